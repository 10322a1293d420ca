"""What waiting requests will find leaves last, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_chunkcache.scheduler.look_ahead import AHEAD
from tests.examples import examples
from tests.reference.scheduler import FakeReq
from tests.sglang_chunkcache.scheduler.test_host_chains import CAPACITY, HEAD, A, B, C, HostScheduler, chain, known, rag

D = (4, 5, 6)


class Waiting(HostScheduler):
    """With requests that wait."""

    def __init__(self, **knobs: object) -> None:
        super().__init__(**knobs)  # type: ignore[arg-type]
        self.waiting: list[FakeReq] = []
        self.cache.look_ahead.queue = lambda: self.waiting
        self.wait()
        self.cache.host.needed = self.cache.look_ahead.needed_places

    def wait(self, *reqs: FakeReq) -> None:
        """They arrive, and nobody else waits."""
        self.waiting = list(reqs)
        self.cache.look_ahead.is_stale = True

    def found(self, *chunks: tuple[int, ...]) -> int:
        return self.cached(rag(*chunks, tail=()))

    def cached(self, req: FakeReq) -> int:
        key = self.cache._key(req, req.origin_input_ids, self.cache._spans_of(req), len(req.origin_input_ids))
        return sum(len(node.key) for node in self.cache.path(key))


def asked_for_twice(server: Waiting, *chunks: tuple[int, ...]) -> None:
    for _ in range(2):
        server.serve(rag(*chunks))


@pytest.mark.parametrize("waits", [False, True])
def test_waiting_chain_outlives_one_that_was_asked_for_more_often(waits: bool) -> None:
    server = Waiting()
    server.serve(rag(A, D))
    asked_for_twice(server, B)
    server.wait(*[rag(A, D)] * waits)
    whole = len(HEAD + A + D), len(HEAD + B)
    while (found := (server.found(A, D), server.found(B))) == whole:
        server.evict(1)
    assert (found[0] < whole[0], found[1] < whole[1]) == (not waits, waits)
    server.check()


def test_requests_far_behind_and_plain_ones_keep_nothing() -> None:
    server = Waiting()
    server.serve(rag(A, D))
    asked_for_twice(server, B)
    plain = FakeReq([*HEAD, *A, *D, 30])
    server.wait(*[plain] * AHEAD, rag(A, D))
    while server.found(B) == len(HEAD + B) and server.found(A, D) == len(HEAD + A + D):
        server.evict(1)
    assert server.found(A, D) < len(HEAD + A + D)


def test_all_may_leave_in_the_end() -> None:
    server = Waiting()
    server.serve(rag(A, B))
    server.wait(rag(A, B))
    server.evict(CAPACITY)
    assert server.found(A, B) == 0
    server.check()


@pytest.mark.parametrize("waits", [False, True])
def test_waiting_chain_stays_in_host_memory(waits: bool) -> None:
    """A new one takes the place of one that nobody waits for."""
    server = Waiting(host_slots=len(HEAD + A + B))
    known(server, A)
    known(server, B)
    assert server.on_host() == {chain(A), chain(B)}
    server.wait(rag(A) if waits else rag(B))
    known(server, D)
    assert server.on_host() == ({chain(A), chain(D)} if waits else {chain(B), chain(D)})
    server.check()


def test_host_memory_gives_what_is_waited_for_where_there_is_nothing_else() -> None:
    server = Waiting(host_slots=len(HEAD + A + B))
    known(server, A)
    known(server, B)
    server.wait(rag(A), rag(B))
    known(server, D)
    assert chain(D) in server.on_host()
    assert len(server.on_host()) == 2
    server.check()


CHAINS = st.permutations([A, B, C, D]).flatmap(lambda each: st.integers(1, 4).map(lambda n: tuple(each[:n])))


@given(
    served=st.lists(CHAINS, min_size=1, max_size=8),
    waiting=st.lists(CHAINS, max_size=3),
    amount=st.integers(1, CAPACITY),
)
@settings(max_examples=examples(150), deadline=None)
def test_nothing_that_is_needed_leaves_before_the_others(
    served: Sequence[tuple[tuple[int, ...], ...]], waiting: Sequence[tuple[tuple[int, ...], ...]], amount: int
) -> None:
    server = Waiting()
    for chunks in served:
        server.serve(rag(*chunks))
    server.wait(*(rag(*chunks) for chunks in waiting))
    before = [server.cached(req) for req in server.waiting]
    server.evict(amount)
    server.check()
    if [server.cached(req) for req in server.waiting] == before:
        return
    server.cache.look_ahead.refresh()
    assert all(node in server.cache.look_ahead.nodes for node in server.cache.evictable_leaves)
