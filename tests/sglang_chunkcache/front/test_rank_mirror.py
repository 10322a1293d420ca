"""The front's mirror of one rank: each event once, in order, whatever happens to the answers."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from radix_ext import ChunkId, ChunkPrefixTree, Tier
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Evicted, Moved
from sglang_chunkcache.wire.state import RankState
from tests.kit.front_planning import chain, held, inserted, make_mirror, read, state_of


def test_mirror_holds_what_the_rank_holds() -> None:
    log, (tree, mirror) = EventLog(100), make_mirror()
    for event in (
        inserted("a", promoted=True),
        inserted("a", "b"),
        inserted("a", "c"),
        Evicted(chain("a", "b")),
    ):
        log.append(event)
    read(log, mirror)
    assert not held(tree, "a", "b")
    nodes = tree.match("n", [ChunkId("a"), ChunkId("c")], rank=0)
    assert [node.promoted for node in nodes] == [True, False]
    assert tree.digest(0) == (2, chain("a") ^ chain("a", "c"))


def test_apply_follows_a_chain_to_the_host_and_back() -> None:
    log, (tree, mirror) = EventLog(100), make_mirror()
    seen = []
    for event in (inserted("a", promoted=True), Moved(chain("a"), Tier.HOST), inserted("a")):
        log.append(event)
        read(log, mirror)
        node = tree.find(chain("a"))
        assert node is not None
        seen.append((node.tier(0), node.promoted, node.hits))
    # the front's own mark may be newer
    assert seen == [(tier, True, 0) for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE)]
    assert tree.stats.num_hits == 0


def test_new_epoch_drops_the_rank_and_a_late_batch_of_the_old_one_changes_nothing() -> None:
    """A slow client's stream carries its batch in every output, also after a flush; what it would
    forget, the log has dropped as acknowledged."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    old = log.unread()
    mirror.apply(old)
    log.restart()
    log.append(inserted("b"))
    read(log, mirror)
    log.acknowledge(mirror.acknowledgement)  # the next request acknowledges: the log forgets
    for _ in range(2):
        assert [held(tree, name) for name in "ab"] == [False, True]
        assert (mirror.num_restarts, mirror.num_gaps) == (1, 0)
        mirror.apply(old)
        read(log, mirror)


def test_ranks_are_apart() -> None:
    tree = ChunkPrefixTree(max_nodes=100)
    mirrors = [RankMirror(tree, rank) for rank in range(2)]
    for rank, mirror in enumerate(mirrors):
        mirror.apply(Batch(7 + rank, 0, (inserted("a"),), 1, 1, chain("a")))
    mirrors[0].restart(99)
    assert [tree.digest(rank)[0] for rank in range(2)] == [0, 1]


def test_mirror_is_compared_with_the_ranks_state() -> None:
    """Up to date and alike, up to date and not, behind; another epoch makes it start again."""
    log, (_, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    read(log, mirror)
    events = Batch(log.epoch, 1, (), seq=1, num_nodes=1, digest=chain("a"))

    def compared(**changes: Any) -> dict[str, Any]:
        return mirror.compared(RankState(0, structs.replace(events, **changes), {}))

    counts = {"restarts": 0, "gaps": 0, "resyncs": 0}
    shown = {"chunk_nodes": 1, "events_behind": 0, "agrees": True, **counts}
    assert compared() == shown
    assert not mirror.is_behind
    assert compared(digest=0) == {**shown, "agrees": False}
    assert mirror.is_behind
    assert compared(seq=3) == {**shown, "events_behind": 2, "agrees": None}
    restarted = compared(epoch=log.epoch + 1, start=0, seq=0, digest=0, num_nodes=0)
    assert restarted == {**shown, "chunk_nodes": 0, "restarts": 1}
    assert not mirror.is_behind


def test_mirror_learns_of_a_start_before_there_is_an_answer() -> None:
    """What the rank's state brings with it, once: the first answer brings it again."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    state = state_of(log)
    assert mirror.compared(state)["agrees"] is True
    assert held(tree, "a")
    read(log, mirror)
    assert (mirror.compared(state)["agrees"], mirror.acknowledgement.seq) == (True, 1)


def test_unknown_parent_is_counted_not_raised() -> None:
    """The tree is bounded: a chain it has forgotten is no error."""
    tree, mirror = make_mirror()
    mirror.apply(Batch(1, 0, (inserted("a", "b"), Evicted(chain("x"))), 2, 0, 0))
    assert tree.stats.num_unknown_notices == 2
    assert mirror.acknowledgement == Acknowledgement(1, 2)
