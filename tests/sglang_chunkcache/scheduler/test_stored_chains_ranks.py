"""Two tensor-parallel ranks, each with a storage of its own:
whatever happens to one of them, both keep the same chains."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_chunkcache.storage.ranks import Ranks
from tests.examples import examples
from tests.kit.cache_integrity import check_integrity
from tests.kit.chains import CAPACITY, HEAD, A, B, C, ChainDisk, Server, prefetch, rag
from tests.polling import DEADLINE_S
from tests.reference.memory_storage import MemoryStorage
from tests.reference.rank_group import RankGroup, on_ranks


class Life:
    """Of one rank. What `steps` say of `self.rank` alone the others do not know."""

    def __init__(
        self, group: RankGroup, folder: Path, storage: MemoryStorage | None = None, **knobs: Any
    ) -> None:
        self.rank, self.disk, self.ranks, self.knobs = (
            group.rank_in_group,
            ChainDisk(folder),
            Ranks(group),
            knobs,
        )
        self.disk.storage = storage or self.disk.storage
        self.server = Server(self.disk, ranks=self.ranks, **knobs)

    def round(self) -> None:
        """After a forward. This rank's thread has had the time to do what it can."""
        if self.disk.storage.gate.is_set():
            assert self.server.storage.loader.drain(DEADLINE_S)
        self.server.storage.poll(is_round=True)

    def ask(self, *chunks: tuple[int, ...], settles: bool = True, **params: Any) -> int:
        req = rag(*chunks, **params)
        self.server.cache.arrived(req)
        if settles:
            self.round()
        found = self.server.serve(req)
        self.server.idle()
        self.round()
        return found

    def restart(self, *, fills: bool, losing: int | None = None) -> None:
        """`losing`: that rank's manifest."""
        self.become("healthy")
        self.round()
        self.server.storage.close()
        if losing == self.rank:
            shutil.rmtree(self.disk.folder)
        self.ranks = Ranks(self.ranks._group)
        self.server = Server(self.disk, ranks=self.ranks, **self.knobs)
        if fills:
            self.server.cache.tiers.stored.load_most_used(5)

    def become(self, state: str) -> None:
        self.disk.storage.become(state)
        self.server.storage.loader.worker.breaker.paused_until = None

    def seen(self) -> dict[str, Any]:
        """What the other rank must have, too."""
        host, storage = self.server.cache.tiers.host, self.server.storage
        nodes = sorted(
            (place, each.is_here, each.blob.is_held, each.chain or 0)
            for place, each in host.nodes._nodes.items()
        )
        held = sorted(
            (each.blob.row.place, each.nbytes, each.priority) for each in storage.index.held
        )
        waiting = {
            kind.__name__: (each.num, each.num_bytes, each.max_bytes)
            for kind, each in storage.loader.waiting.items()
        }
        return {
            "prefetch": storage.prefetches.stats(),
            "nodes": nodes,
            "free": host.pool.num_free,
            "held": held,
            "waiting": waiting,
            "writing": storage.writes._num_bytes,
            "is_paused": storage.loader.is_paused,
        }

    def end(self) -> None:
        self.disk.storage.become("healthy")
        for each in self.disk.opened_ones:
            each.loader.close()


def lives(steps: list[tuple[Any, ...]], **knobs: Any) -> list[list[Any]]:
    """What each rank has after each step."""
    with tempfile.TemporaryDirectory() as folder:

        def live(group: RankGroup) -> list[Any]:
            life = Life(group, Path(folder) / str(group.rank_in_group), **knobs)
            seen: list[Any] = []
            try:
                for kind, *told in steps:
                    if kind == "ask":
                        chunks, head, settles, promoted = told
                        found = life.ask(
                            *chunks, settles=settles, head=head, promoted_len=len(chunks) * promoted
                        )
                        seen.append(found)
                    elif kind == "hint":
                        prefetch(life.server, rag(*told[0]))
                        if life.disk.storage.gate.is_set():
                            assert life.server.storage.loader.drain(DEADLINE_S)
                    elif kind == "evict":
                        life.server.evict(told[0])
                    elif kind == "restart":
                        life.restart(fills=told[0], losing=told[1])
                    elif told[0] == life.rank:
                        if kind == "damage":
                            for held in list(life.disk.storage.held.values()):
                                held[-1] ^= 64
                        elif kind == "lose":
                            life.disk.storage.held.clear()
                        else:
                            life.become(kind)
                    life.server.check()
                    seen.append(life.seen())
            finally:
                life.end()
            return seen

        return on_ranks(live)


def ask(*chunks: tuple[int, ...]) -> tuple[Any, ...]:
    return ("ask", chunks, HEAD, True, False)


THRICE = [ask(A, B)] * 3


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([*THRICE, ("restart", False, None)], len(HEAD + A + B)),
        ([*THRICE, ("restart", True, 1)], 0),  # rank 1 has lost it
        # the rank that has it throws it away, or lets it be
        *(
            ([*THRICE, ("restart", False, None), (it, 1)], 0)
            for it in ("refusing", "hanging", "damage")
        ),
        ([("refusing", 1), *THRICE, ("restart", True, None)], 0),
        # without a forward between
        ([*THRICE, ("restart", False, None), ("hint", (A, B))], len(HEAD + A + B)),
        # what one cannot read now and the other never, both forget
        *(
            ([*THRICE, ("restart", False, None), ("refusing", 0), (it, 1)], 0)
            for it in ("lose", "damage")
        ),
    ],
)
def test_both_have_what_each_has(steps: list[tuple[Any, ...]], found: int) -> None:
    last = ("ask", (A, B), HEAD, steps[-1][0] != "hint", False)
    first, second = lives([*steps, last])
    assert first == second
    assert first[-2] == found


def test_one_pauses_for_both() -> None:
    """And goes on for both."""
    first, second = lives(
        [("refusing", 1)] + [ask(A, B, C)] * 3 + [("healthy", 1)] + [ask(A, B, C)] * 3
    )
    assert first == second
    paused = [each["is_paused"] for each in first if isinstance(each, dict)]
    assert (any(paused), paused[-1]) == (True, False)
    assert len(first[-1]["held"]) == 4


CHUNKS = st.permutations([A, B, C, (4, 5, 6)]).flatmap(
    lambda each: st.integers(1, 4).map(lambda n: tuple(each[:n]))
)
ASKS = st.tuples(
    st.just("ask"), CHUNKS, st.sampled_from([HEAD, (), (90, 92)]), st.booleans(), st.booleans()
)
OTHERS = st.one_of(
    st.tuples(st.just("evict"), st.integers(1, CAPACITY)),
    st.tuples(st.just("restart"), st.booleans(), st.sampled_from([None, None, 0, 1])),
    st.tuples(st.just("hint"), CHUNKS),
    st.tuples(
        st.sampled_from(["healthy", "refusing", "hanging", "damage", "lose"]), st.integers(0, 1)
    ),
)


@given(
    steps=st.lists(st.one_of(ASKS, ASKS, ASKS, OTHERS), max_size=30),
    slots=st.sampled_from([8, 14, 100]),
)
@settings(max_examples=examples(60), deadline=None)
def test_random_lives_are_alike(steps: list[tuple[Any, ...]], slots: int) -> None:
    first, second = lives(steps, host_slots=slots, storage_bytes=4000)
    assert first == second


class UnsteadyStorage(MemoryStorage):
    """Each call takes up to 2 ms, one in 50 up to 40 ms. After one in 50 up to ten fail."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance, self._num_failing = random.Random(seed), 0

    def _called(self, what: str, key: str) -> None:
        super()._called(what, key)
        time.sleep(self._chance.random() * (0.04 if self._chance.random() < 0.02 else 0.002))
        if self._num_failing:
            self._num_failing -= 1
            raise ConnectionError("by chance")
        if self._chance.random() < 0.02:
            self._num_failing = self._chance.randint(1, 10)


def decisions(group: RankGroup, folder: Path, num_requests: int, seed: int) -> list[Any]:
    """What a rank decides with each of the same requests. Nothing waits for its storage."""
    storage = UnsteadyStorage(seed=group.rank_in_group)
    life = Life(group, folder, storage, host_slots=24, storage_bytes=5_000)
    server = life.server
    chance, log = random.Random(seed), list[Any]()
    chunks = [tuple(range(start, start + chance.randint(2, 5))) for start in range(100, 400, 10)]
    topic = chunks[:8]
    try:
        for number in range(num_requests):
            if number % 50 == 49:
                check_integrity(server.cache)
                topic = chance.sample(chunks, 8)
            req = rag(*chance.sample(topic, chance.randint(1, 4)))
            server.cache.arrived(req)
            found = server.serve(req)
            life.disk.now += 0.1
            host, loader = server.cache.tiers.host, server.storage.loader
            held = [each.blob.row.place for each in server.storage.index.held]
            log.append(
                (
                    found,
                    asdict(host.counts),
                    host.pool.num_free,
                    sorted(map(hash, host.nodes._nodes)),
                    sorted(map(hash, held)),
                    server.storage.num_skipped,
                    loader.is_paused,
                )
            )
    finally:
        life.end()
    return log


def alike(num_requests: int, seed: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        first, second = on_ranks(
            lambda group: decisions(
                group, Path(folder) / str(group.rank_in_group), num_requests, seed
            )
        )
    assert first == second
    return first


def test_slow_and_failing_storages_make_no_difference_between_ranks() -> None:
    log = alike(150, seed=0)
    counts = log[-1][1]
    assert min(counts["saved_tokens"], counts["loaded_tokens"], counts["evicted_tokens"]) > 0


@pytest.mark.nightly
def test_ranks_log_5000_equal_decisions() -> None:
    log = alike(5000, seed=1)
    assert len({each[-1] for each in log}) == 2, "a storage paused, and went on"
