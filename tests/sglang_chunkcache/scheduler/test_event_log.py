"""The rank's log: numbered events, repeated until acknowledged, bounded."""

from __future__ import annotations

from radix_ext import ChunkId
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import NOTHING_READ as NOTHING
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Evicted
from tests.reference.chains import chain_of


def make_log(num_events: int, max_events: int = 100) -> EventLog:
    log = EventLog(max_events)
    for i in range(num_events):
        log.append(Evicted(chain_of("n", [ChunkId(str(i))])))
    return log


def test_unread_of_a_stranger_is_everything() -> None:
    """A front that knows nothing gets all there is, from number 0."""
    log = make_log(3)
    batch = log.unread(NOTHING)
    assert (batch.epoch, batch.start, len(batch.events)) == (log.epoch, 0, 3)


def test_unread_repeats_until_acknowledged() -> None:
    """A lost answer costs nothing."""
    log = make_log(3)
    assert log.unread(NOTHING) == log.unread(NOTHING)


def test_unread_forgets_what_is_acknowledged() -> None:
    """The log stays short: only the rest is told, under its old numbers."""
    log = make_log(3)
    assert log.unread(Acknowledgement(log.epoch, 2)).start == 2
    assert log.unread(NOTHING).start == 2


def test_unread_with_all_acknowledged_is_empty() -> None:
    """Nothing new, nothing sent; the start still gives the reader's place."""
    log = make_log(3)
    assert log.unread(Acknowledgement(log.epoch, 3)) == Batch(log.epoch, 3, ())


def test_acknowledgement_of_another_epoch_is_ignored() -> None:
    """It speaks of events that this tree never had."""
    log = make_log(3)
    assert log.unread(Acknowledgement(log.epoch + 1, 3)).start == 0


def test_acknowledgement_beyond_the_end_does_not_break() -> None:
    """A number from nowhere must not kill the scheduler."""
    log = make_log(2)
    assert log.unread(Acknowledgement(log.epoch, 99)) == Batch(log.epoch, 2, ())


def test_older_acknowledgement_after_a_newer_one_changes_nothing() -> None:
    """Requests overtake each other."""
    log = make_log(3)
    log.unread(Acknowledgement(log.epoch, 2))
    assert log.unread(Acknowledgement(log.epoch, 1)).start == 2


def test_overflow_forgets_the_oldest() -> None:
    """A rank that is never asked keeps bounded memory; the reader sees a gap."""
    log = make_log(5, max_events=3)
    batch = log.unread(NOTHING)
    assert (batch.start, len(batch.events), log.seq) == (2, 3, 5)


def test_restart_changes_the_epoch_and_empties() -> None:
    """After a flush nothing of the old tree may be told."""
    log = make_log(3)
    epoch = log.epoch
    log.restart()
    assert log.epoch != epoch
    assert log.unread(NOTHING) == Batch(log.epoch, 0, ())


def test_two_logs_have_different_epochs() -> None:
    """A restarted rank is told apart from the one before."""
    assert make_log(0).epoch != make_log(0).epoch
