"""The front's mirror of one rank: each event once, in order, whatever happens to the answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from radix_ext import ChainId, ChunkId, ChunkPrefixTree, Tier
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import NOTHING_READ, Acknowledgement, Batch, Evicted, Inserted, Moved
from sglang_chunkcache.wire.state import RankState
from tests.reference.chains import chain_of


def make_mirror(max_nodes: int = 1000) -> tuple[ChunkPrefixTree, RankMirror]:
    tree = ChunkPrefixTree(max_nodes=max_nodes)
    return tree, RankMirror(tree, 0)


def chain(*names: str) -> ChainId:
    return chain_of("n", [ChunkId(name) for name in names])


def inserted(*names: str, promoted: bool = False) -> Inserted:
    return Inserted(ChunkId(names[-1]), 4, chain(*names[:-1]) if names[1:] else None, "n", promoted)


def read(log: EventLog, mirror: RankMirror) -> None:
    mirror.apply(log.unread(mirror.acknowledgement))


def held(tree: ChunkPrefixTree, *names: str) -> bool:
    return len(tree.match("n", [ChunkId(name) for name in names], rank=0)) == len(names)


def test_apply_follows_inserts_and_evictions() -> None:
    """The mirror holds what the rank holds."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    for event in (inserted("a"), inserted("a", "b"), inserted("a", "c"), Evicted(chain("a", "b"))):
        log.append(event)
    read(log, mirror)
    assert held(tree, "a", "c")
    assert not held(tree, "a", "b")
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
    assert seen == [
        (tier, True, 0) for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE)
    ]  # the front's own mark may be newer
    assert tree.stats.num_hits == 0


def test_apply_takes_over_the_mark() -> None:
    """Promotion marks are part of the mirror."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a", promoted=True))
    log.append(inserted("a", "b"))
    read(log, mirror)
    nodes = tree.match("n", [ChunkId("a"), ChunkId("b")], rank=0)
    assert [node.promoted for node in nodes] == [True, False]


def test_apply_again_changes_nothing() -> None:
    """Batches repeat what was not yet acknowledged: an eviction must not hit what came back since."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    log.append(Evicted(chain("a")))
    early = log.unread(mirror.acknowledgement)
    log.append(inserted("a"))
    read(log, mirror)
    mirror.apply(early)
    assert held(tree, "a")
    assert mirror.acknowledgement.seq == 3


def test_apply_overlapping_batch_takes_the_new_part() -> None:
    """Two answers overlap; each event counts once."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    early = log.unread(mirror.acknowledgement)
    log.append(inserted("b"))
    late = log.unread(mirror.acknowledgement)
    mirror.apply(early)
    mirror.apply(late)
    assert held(tree, "a")
    assert held(tree, "b")
    assert tree.stats.num_hits == 0


def test_gap_drops_the_rank() -> None:
    """Events were lost for good: what the mirror says may be wrong, so it starts again."""
    log, (tree, mirror) = EventLog(2), make_mirror()
    log.append(inserted("a"))
    read(log, mirror)
    for name in "bcd":
        log.append(inserted(name))
    read(log, mirror)
    assert (mirror.num_gaps, mirror.acknowledgement.seq) == (1, 4)
    assert [held(tree, name) for name in "abcd"] == [False, False, True, True]


def test_new_epoch_drops_the_rank() -> None:
    """A flush: the rank holds nothing of what it held."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    read(log, mirror)
    log.restart()
    log.append(inserted("b"))
    read(log, mirror)
    assert not held(tree, "a")
    assert held(tree, "b")
    assert (mirror.num_restarts, mirror.num_gaps) == (1, 0)


def test_first_epoch_is_no_restart() -> None:
    """Every server begins with one; counting it would show a restart that never was."""
    log, (_, mirror) = EventLog(100), make_mirror()
    read(log, mirror)
    assert mirror.num_restarts == 0
    assert mirror.acknowledgement == Acknowledgement(log.epoch, 0)


def test_late_batch_of_an_older_epoch_changes_nothing() -> None:
    """A slow client's stream carries its batch in every output, also after a flush: going back to the old epoch would
    forget the new tree, whose events the log has dropped as acknowledged, and the mirror would stay wrong."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    old = log.unread(mirror.acknowledgement)
    mirror.apply(old)
    log.restart()
    log.append(inserted("b"))
    read(log, mirror)
    log.unread(mirror.acknowledgement)  # the next request acknowledges: the log forgets
    mirror.apply(old)
    read(log, mirror)
    assert not held(tree, "a")
    assert held(tree, "b")
    assert mirror.num_gaps == 0


def test_ranks_are_apart() -> None:
    """One rank's flush leaves the other's mirror alone."""
    tree = ChunkPrefixTree(max_nodes=100)
    mirrors = [RankMirror(tree, rank) for rank in range(2)]
    for rank, mirror in enumerate(mirrors):
        mirror.apply(Batch(7 + rank, 0, (inserted("a"),)))
    mirrors[0].restart(99)
    assert [tree.digest(rank)[0] for rank in range(2)] == [0, 1]


def test_mirror_is_compared_with_the_ranks_state() -> None:
    """Up to date and alike, up to date and not, behind; another epoch makes it start again."""
    log, (_, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    read(log, mirror)
    state = RankState(0, log.epoch, seq=1, digest=chain("a"), chunk_nodes=1, counts={})
    shown = {"chunk_nodes": 1, "events_behind": 0, "agrees": True, "restarts": 0, "gaps": 0}
    assert mirror.compared(state) == shown
    assert mirror.compared(structs.replace(state, digest=0)) == {**shown, "agrees": False}
    assert mirror.compared(structs.replace(state, seq=3)) == {**shown, "events_behind": 2, "agrees": None}
    restarted = mirror.compared(structs.replace(state, epoch=log.epoch + 1, seq=0, digest=0, chunk_nodes=0))
    assert restarted == {**shown, "chunk_nodes": 0, "restarts": 1}


def test_mirror_learns_of_a_start_before_there_is_an_answer() -> None:
    """What the rank's state brings with it, once: the first answer brings it again."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    state = RankState(0, log.epoch, 1, chain("a"), 1, {}, events=log.unread(NOTHING_READ))
    assert mirror.compared(state)["agrees"] is True
    assert held(tree, "a")
    read(log, mirror)
    assert mirror.compared(state) == {"chunk_nodes": 1, "events_behind": 0, "agrees": True, "restarts": 0, "gaps": 0}


def test_unknown_parent_is_counted_not_raised() -> None:
    """The tree is bounded: a chain it has forgotten is no error."""
    tree, mirror = make_mirror()
    mirror.apply(Batch(1, 0, (inserted("a", "b"), Evicted(chain("x")))))
    assert tree.stats.num_unknown_notices == 2
    assert mirror.acknowledgement == Acknowledgement(1, 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=25), st.integers(3, 50))
def test_any_delivery_ends_in_agreement(steps: list[tuple[int, int]], max_events: int) -> None:
    """Answers late, twice or lost: after one more answer, mirror and rank agree, or the mirror knows of a gap."""
    log, (tree, mirror) = EventLog(max_events), make_mirror()
    truth: set[str] = set()
    batches: list[Batch] = []
    acks = [mirror.acknowledgement]
    for kind, pick in steps:
        name = "abcdef"[pick % 6]
        if kind <= 1:
            log.append(Evicted(chain(name)) if name in truth else inserted(name))
            truth ^= {name}
        elif kind == 2:
            batches.append(log.unread(acks[-1 - pick % len(acks)]))
        elif kind == 3 and batches:
            mirror.apply(batches[pick % len(batches)])
            acks.append(mirror.acknowledgement)
        elif kind == 4 and batches:
            batches.pop(pick % len(batches))
    read(log, mirror)
    digest = 0
    for name in truth:
        digest ^= chain(name)
    assert mirror.num_gaps or tree.digest(0) == (len(truth), digest)
    tree.check_integrity()
