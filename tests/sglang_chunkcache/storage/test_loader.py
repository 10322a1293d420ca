"""The thread beside the scheduler: what it is given comes back, whatever the backend does,
and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_chunkcache.config import MAX_WAITING  # noqa: E402
from sglang_chunkcache.storage import loader as module  # noqa: E402
from sglang_chunkcache.storage.backend import Backend  # noqa: E402
from sglang_chunkcache.storage.breaker import PAUSE_AFTER, PAUSE_S  # noqa: E402
from sglang_chunkcache.storage.jobs import Load, Write  # noqa: E402
from sglang_chunkcache.storage.key import Names  # noqa: E402
from sglang_chunkcache.storage.loader import Loader  # noqa: E402
from sglang_chunkcache.storage.manifest import Manifest  # noqa: E402
from sglang_chunkcache.storage.pointer import Pointers  # noqa: E402
from sglang_chunkcache.storage.worker import Worker  # noqa: E402
from tests.kit.storages import LAYOUT, NUM_TOKENS, keeping, make_entry, make_row, same_bits  # noqa: E402
from tests.polling import DEADLINE_S, until  # noqa: E402
from tests.reference.memory_storage import MemoryStorage  # noqa: E402


class Rig:
    """A loader over a storage that fails as it is told, and a clock that stands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.storage = MemoryStorage()
        self.manifest = Manifest(folder)
        self.loader = Loader(
            Worker(Backend(self.storage), self.manifest, secret=b"s", clock=lambda: self.now)
        )

    def done(self) -> list[Any]:
        assert self.loader.drain(DEADLINE_S)
        return list(self.loader.poll())

    def write(self, name: str = "n") -> Write:
        job = writing(name)
        assert self.loader.write(job)
        return job

    def written(self, name: str = "n") -> Write:
        """What has become of it."""
        job = self.write(name)
        self.done()
        return job

    def load(self, name: str = "n") -> Load:
        job = Load(name, len(self.storage.held.get(name, range(100))), NUM_TOKENS, LAYOUT)
        assert self.loader.load(job)
        return job

    def bound(self, **bounds: Any) -> None:
        """Of writes, from now on."""
        waiting = self.loader.waiting[Write]
        waiting.bounds = waiting.bounds._replace(**bounds)

    def names(self) -> list[str]:
        return [row.name for row in self.manifest.rows()]


def writing(name: str = "n") -> Write:
    return keeping(make_row(name, num_bytes=0, num_tokens=NUM_TOKENS), make_entry())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.storage.gate.set()
    made.loader.close()


def test_entry_is_written_and_loaded(rig: Rig) -> None:
    """Bit for bit, and the row has the bytes' number."""
    written = rig.write()
    assert rig.done() == [written]
    assert written.is_confirmed
    assert written.row.num_bytes == len(rig.storage.held["n"])
    assert rig.manifest.rows() == [written.row]
    loaded = rig.load()
    assert not loaded.is_done
    assert rig.done() == [loaded]
    assert loaded.is_done
    assert loaded.entry is not None
    assert same_bits(loaded.entry.kv[0], written.entry().kv[0])


@pytest.mark.parametrize("ask", [Rig.write, Rig.load])
def test_job_waits_until_it_is_polled(rig: Rig, ask: Callable[[Rig], Any]) -> None:
    """What follows from it waits, too: a damaged entry is written anew."""
    rig.storage.gate.clear()
    ask(rig)
    until(lambda: rig.storage.calls)
    assert rig.loader.stats()["queue"] == 1, "at work"
    rig.storage.gate.set()
    assert rig.loader.drain(DEADLINE_S)
    assert rig.loader.stats()["queue"] == 1, "nobody knows what has become of it"
    list(rig.loader.poll())
    assert rig.loader.stats()["queue"] == 0


def test_loads_pass_writes(rig: Rig) -> None:
    """A request may wait for a load, nobody waits for a write."""
    rig.storage.gate.clear()
    rig.write("a")
    second, load = rig.write("b"), rig.load("c")
    rig.storage.gate.set()
    done = rig.done()
    assert len(done) == 3
    assert done.index(load) < done.index(second), "the thread may have begun the first"


def test_nothing_waits_for_a_storage_that_hangs(rig: Rig) -> None:
    """What does not fit is not taken, and counted. Whoever waits here waits for ever."""
    rig.storage.gate.clear()
    taken = [rig.loader.write(writing(f"n{i}")) for i in range(2 * MAX_WAITING)]
    assert sum(taken) == MAX_WAITING
    assert list(rig.loader.poll()) == []
    stats = rig.loader.stats()
    assert stats["full"] == stats["unwritten"] == MAX_WAITING
    rig.load()  # loads have a queue of their own
    rig.storage.gate.set()
    assert len(rig.done()) == MAX_WAITING + 1
    rig.write()  # there is room again


def test_queue_is_bounded_in_bytes(rig: Rig) -> None:
    """Chunks of a large model are large. One is taken whatever its size."""
    rig.bound(unknown_bytes=1)
    rig.storage.gate.clear()
    rig.write("a")
    assert not rig.loader.write(writing("b"))
    rig.storage.gate.set()
    rig.done()
    rig.write("b")


def test_row_follows_the_bytes(rig: Rig) -> None:
    """A storage that keeps nothing, or fails, leaves no row."""
    rig.storage.forgets = True
    assert not rig.written("a").is_confirmed
    rig.storage.forgets, rig.storage.fails = False, True
    assert not rig.written("b").is_confirmed
    assert rig.names() == []
    assert rig.loader.worker.problems == {"failed": 2}


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda held: held.clear(), "gone"),
        (lambda held: held["n"].__setitem__(-1, held["n"][-1] ^ 1), "damaged"),
        (lambda held: held.update(n=held["o"]), "other_entry"),
    ],
)
def test_bad_entry_is_told_by_its_reason(rig: Rig, harm: Any, problem: str) -> None:
    for name in "no":
        rig.write(name)
    rig.done()
    size = len(rig.storage.held["n"])
    harm(rig.storage.held)
    load = Load("n", size, NUM_TOKENS, LAYOUT)
    rig.loader.load(load)
    rig.done()
    assert (load.entry, load.problem, rig.loader.worker.problems) == (None, problem, {problem: 1})


def test_storage_pauses_and_is_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """After several failures in a row nobody asks it for a while. Said once."""
    rig.storage.fails = True
    for i in range(PAUSE_AFTER):
        rig.written(f"n{i}")
    assert rig.loader.is_paused
    calls = len(rig.storage.calls)
    load, write = rig.load(), rig.written()
    assert (load.problem, write.problem, len(rig.storage.calls)) == ("paused", "paused", calls)
    for works in (False, True):  # the one that tries
        rig.now += PAUSE_S
        rig.storage.fails = not works
        assert rig.written().is_confirmed is works
        assert rig.loader.is_paused is not works
    assert rig.loader.stats()["pauses"] == 1
    assert caplog.text.count("pauses after") == caplog.text.count("answers again") == 1


def test_failures_with_successes_between_are_no_pause(rig: Rig) -> None:
    for i in range(3 * PAUSE_AFTER):
        rig.storage.fails = i % 2 == 0
        rig.written(f"n{i}")
    rig.storage.fails = False
    assert not rig.loader.is_paused


def test_entry_that_cannot_be_made_is_no_failure_of_the_backend(rig: Rig) -> None:
    for i in range(PAUSE_AFTER + 1):
        job = writing(f"n{i}")
        job.entry = mock.Mock(side_effect=ValueError("no entry"))
        assert rig.loader.write(job)
        rig.done()
        assert job.problem == "failed"
    assert not rig.loader.is_paused
    assert rig.written().is_confirmed


def test_entry_of_another_server_is_taken_over_unmade(tmp_path: Path) -> None:
    """Nobody reads host memory, encodes and signs what is there."""
    backend, names = Backend(MemoryStorage()), Names(b"")
    row = make_row("n", num_bytes=0, num_tokens=NUM_TOKENS)
    row = row._replace(name=names.entry(row.place, row.scored, row.has_outward, row.heads))
    for server, is_own in (("a", True), ("b", False)):
        manifest, pointers = Manifest(tmp_path / server), Pointers(backend, names)
        loader = Loader(Worker(backend, manifest, secret=b"s", pointers=pointers))
        job = keeping(row, make_entry())
        job.entry = made = mock.Mock(return_value=make_entry())
        assert loader.write(job)
        assert loader.drain(DEADLINE_S)
        assert (job.is_confirmed, job.is_own, made.called) == (True, is_own, is_own)
        loader.close()


def test_deleted_entry_loses_its_row_first(rig: Rig) -> None:
    """Also where the storage fails: a kill between leaves bytes nobody knows, never only a row."""
    for name in "ab":
        rig.written(name)
    for name, fails, left in (("a", False, ["b"]), ("b", True, [])):
        rig.storage.fails = fails
        rig.loader.delete([make_row(name)])
        rig.done()
        assert (rig.names(), list(rig.storage.held)) == (left, ["b"])


def test_uses_are_kept(rig: Rig) -> None:
    """The order of eviction outlives the process."""
    rig.written()
    rig.loader.use({"n": (3.0, 2)})
    rig.done()
    assert [(row.priority, row.num_uses) for row in rig.manifest.rows()] == [(3.0, 2)]


def test_end_writes_what_waits(tmp_path: Path) -> None:
    """And frees the folder. Twice is once."""
    rig = Rig(tmp_path)
    for i in range(20):
        rig.write(f"n{i}")
    rig.loader.close()
    rig.loader.close()
    manifest = Manifest(tmp_path)
    assert len(manifest.rows()) == 20
    manifest.close()
    assert not rig.loader.load(Load("n0", 1, NUM_TOKENS, LAYOUT))


def test_end_does_not_wait_for_a_storage_that_hangs(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has not written was never confirmed. Whoever waits for it waits for ever."""
    rig.storage.gate.clear()
    rig.write("a")
    rig.write("b")
    rig.loader.close(0.2)
    assert "does not answer" in caplog.text


def test_bytes_that_are_refused_and_stay_are_not_written_over(rig: Rig) -> None:
    """Nobody reports success for what the storage kept of somebody else."""
    rig.written()
    rig.storage.held["n"][-1] ^= 1
    rig.load()
    rig.done()
    assert "n" in rig.loader.worker.refused
    job = rig.written()
    assert (job.is_confirmed, job.problem) == (False, "damaged")
    assert rig.loader.worker.problems == {"damaged": 1}
    rig.loader.delete([make_row("n")])
    rig.done()
    assert "n" not in rig.loader.worker.refused
    assert rig.written().is_confirmed


def test_load_waits_for_a_few_deletions_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage of thousands is cleared while requests come."""
    monkeypatch.setattr(module, "DELETED_AT_ONCE", 2)
    rig.storage.gate.clear()
    rig.loader.delete([make_row(f"n{i}") for i in range(9)])
    until(lambda: rig.storage.calls)  # the thread is at the first
    rig.load("n")
    rig.storage.gate.set()
    rig.done()
    assert rig.storage.calls.index(("get", "n")) == 2


class NoPointers(MemoryStorage):
    """Keeps entries alone."""

    def set(self, key: str, value: Any = None, *rest: Any) -> bool:
        if key.startswith("ccp1-"):
            raise ConnectionError("no pointers")
        return super().set(key, value)


def test_entry_without_a_pointer_is_its_writers_all_the_same(tmp_path: Path) -> None:
    """It has a row, so it is in the budget."""
    backend, manifest = Backend(NoPointers()), Manifest(tmp_path)
    pointers = Pointers(backend, Names(b""))
    loader = Loader(Worker(backend, manifest, secret=b"", pointers=pointers))
    job = writing()
    loader.write(job)
    assert loader.drain(DEADLINE_S)
    assert job.is_confirmed
    assert job.is_own
    assert [row.name for row in manifest.rows()] == ["n"]
    assert loader.worker.problems == {"failed": 1}
    loader.close()


def test_writes_are_bounded_by_what_they_take(rig: Rig) -> None:
    """As soon as one was made: so many bytes are much for one disk and little for another."""

    def sleep(seconds: float) -> None:
        rig.now += seconds

    rig.storage.seconds_per_byte, rig.storage.sleep = 1.0, sleep
    rig.written("a")
    size = writing("b").size
    for seconds, is_taken in ((1.5 * size, False), (1e9, True)):
        rig.bound(seconds=seconds)
        rig.storage.gate.clear()
        rig.write(f"b{seconds}")
        assert rig.loader.write(writing(f"c{seconds}")) is is_taken
        rig.storage.gate.set()
        rig.done()
