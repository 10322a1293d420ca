"""The rank's log: numbered events, repeated until acknowledged, bounded;
its nodes, told again in parts."""

from __future__ import annotations

import pytest

from radix_ext import ChainId, ChunkId, Tier
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import Acknowledgement, Event, Evicted, Inserted, Moved
from tests.reference.chains import chain_of


def chain(names: str) -> ChainId:
    return chain_of("n", [ChunkId(name) for name in names])


def inserted(names: str) -> Inserted:
    """The last of these, after the others."""
    return Inserted(ChunkId(names[-1]), 4, chain(names[:-1]) if names[1:] else None, "n", False)


def make_log(*events: Event, max_events: int = 100, max_told: int = 100) -> EventLog:
    log = EventLog(max_events, max_told=max_told)
    for event in events or map(inserted, "abc"):
        log.append(event)
    return log


@pytest.mark.parametrize(
    ("acknowledged", "start"), [([], 0), ([2], 2), ([3], 3), ([99], 3), ([2, 1], 2)], ids=str
)
def test_acknowledged_events_are_forgotten(acknowledged: list[int], start: int) -> None:
    """The rest is told again and again. Requests overtake each other; a number may be nonsense."""
    log = make_log()
    assert log.unread().digest == chain("a") ^ chain("b") ^ chain("c")
    for seq in acknowledged:
        log.acknowledge(Acknowledgement(log.epoch, seq))
    log.acknowledge(Acknowledgement(log.epoch + 1, 3))  # of another tree
    assert (log.unread().start, len(log.unread().events)) == (start, 3 - start)
    assert log.unread() == log.unread()


def test_overflow_forgets_the_oldest() -> None:
    """A rank that is never asked keeps bounded memory; the reader sees a gap."""
    log = make_log(*map(inserted, "abcde"), max_events=3)
    batch = log.unread()
    assert (batch.start, len(batch.events), log.seq) == (2, 3, 5)


def test_restart_changes_the_epoch_and_empties() -> None:
    """After a flush nothing of the old tree may be told."""
    log = make_log()
    epoch = log.epoch
    log.restart()
    assert len({epoch, log.epoch, make_log().epoch}) == 3
    batch = log.unread()
    assert (batch.epoch, batch.start, batch.events, batch.seq) == (log.epoch, 0, (), 0)
    assert (batch.num_nodes, batch.digest) == (0, 0)
    assert log.part(0).nodes == ()


def test_a_message_is_bounded() -> None:
    """Of any size it would hold up the answers behind it."""
    log = make_log(*map(inserted, "abcde"), max_told=2)
    batch = log.unread()
    assert (len(batch.events), batch.seq) == (2, 5)
    for name in "abcde":
        log.append(Moved(chain(name), Tier.HOST))
    assert max(len(log.part(first).nodes) for first in range(5)) == 2


def test_parts_tell_what_is_held_now_and_where() -> None:
    """Parents first; what came back is told once, where it was born again."""
    moved = Moved(chain("b"), Tier.HOST)
    left = [Evicted(chain("acd")), Evicted(chain("ac"))]
    log = make_log(*map(inserted, ["a", "b", "ac", "acd"]), moved, *left, inserted("ac"))
    part = log.part(0)
    assert part.nodes == (inserted("a"), inserted("b"), moved, inserted("ac"))
    assert part.next is None
    log.append(inserted("b"))  # back on the device
    assert log.part(0).nodes == (inserted("a"), inserted("b"), inserted("ac"))


def test_a_part_goes_on_where_the_last_one_ended() -> None:
    """Whatever came and went between, and also if one was lost: the rank keeps no record."""
    log = make_log(*map(inserted, "abcde"), max_told=3)
    first = log.part(0)
    assert (first.nodes, first.next) == ((inserted("a"), inserted("b")), 2)
    for event in (Evicted(chain("a")), Evicted(chain("c")), inserted("f")):
        log.append(event)
    assert first.next is not None
    second = log.part(first.next)
    assert (second.first, second.nodes) == (2, (inserted("d"), inserted("e")))
    assert second == log.part(2)
    assert second.next is not None
    assert log.part(second.next).nodes == (inserted("f"),)
    assert log.part(second.next).next is None


def test_what_has_left_takes_no_room() -> None:
    """A rank that lives long has had many nodes."""
    log = make_log(max_told=10)
    for number in range(1000):
        log.append(inserted("x"))
        log.append(Evicted(chain("x")))
        log.acknowledge(Acknowledgement(log.epoch, log.seq))
        assert len(log._held) == 3, number
    assert log.part(0).nodes == tuple(map(inserted, "abc"))


def test_nodes_of_one_chain_are_told_once() -> None:
    """Fused nodes of two questions: the first that comes and the last that goes."""
    log = make_log(inserted("a"), inserted("a"), inserted("ab"), Evicted(chain("a")))
    assert [type(event) for event in log.unread().events] == [Inserted, Inserted]
    assert (log.num_nodes, log.digest) == (2, chain("a") ^ chain("ab"))
    log.append(Evicted(chain("a")))
    assert log.unread().events[2:] == (Evicted(chain("a")),)
    assert (log.num_nodes, log.digest) == (1, chain("ab"))
