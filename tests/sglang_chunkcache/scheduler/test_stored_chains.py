"""Exact chains in the storage: case by case, then random lives of servers against contents."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st

from radix_ext import Tier
from radix_ext.costs import Line
from radix_ext.loading import WaitPolicy
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.reporting import explain, rank_state
from sglang_chunkcache.storage.jobs import Load
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.kit import requests
from tests.kit.chains import (
    CAPACITY,
    HEAD,
    A,
    B,
    C,
    ChainDisk,
    Server,
    chain,
    depth,
    known,
    later,
    prefetch,
    rag,
    unsent,
)
from tests.kit.integrity import check_store
from tests.reference.scheduler import FakeReq


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ChainDisk]:
    made = ChainDisk(tmp_path)
    yield made
    made.storage.gate.set()
    for each in made.opened_ones:
        each.loader.close()


def stored(disk: ChainDisk, *chunks: tuple[int, ...], **fields: Any) -> None:
    """A server has served them until they were worth it, and has ended."""
    server = Server(disk)
    for _ in range(3):
        server.ask(rag(*chunks, **fields))
    server.stop()


@pytest.fixture
def server(disk: ChainDisk) -> Server:
    """One that has just started. The head, A and B behind it are stored."""
    stored(disk, A, B)
    return Server(disk)


def prefixes(server: Server, head: str | None = None) -> list[int]:
    """How much is before the end of each entry, of that head."""
    found = server.storage.index.held
    return sorted(depth(each) for each in found if head in (None, each.head))


def test_what_host_memory_gets_is_written(disk: ChainDisk) -> None:
    server = Server(disk)
    server.ask(rag(A, B))
    assert server.settle()["written"] == 0
    server.ask(rag(A, C))
    counts = server.settle()
    assert (counts["written"], counts["num_entries"]) == (2, 2), "head and A"
    known(server, A, B)
    counts = server.settle()
    assert (counts["written"], counts["bytes"]) == (
        3,
        {"chains": counts["num_bytes"], "variants": 0, "other": 0},
    )
    server.check()
    server.storage.start(disk.weights + 1)
    assert server.storage.stats()["bytes"] == {
        "chains": 0,
        "variants": 0,
        "other": counts["num_bytes"],
    }


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("loads_at_start", [False, True])
def test_conversation_goes_on_after_a_restart(
    disk: ChainDisk, loads_at_start: bool, page: int
) -> None:
    """Its documents, those of later turns too, and the text between come from the storage."""
    pages: dict[str, Any] = {"capacity": 112, "page_size": page}
    server = Server(disk, **pages)
    turns = [rag(A, B)]
    turns += [later(turns[0], C, tail=(31,))]
    turns += [later(turns[1], (50, 51), (52, 53), tail=(32,))]
    for turn in turns:
        server.ask(turn)
    server.stop()
    server = Server(disk, **pages)
    if loads_at_start:
        assert server.cache.tiers.stored.load_most_used() == 8
        assert server.on_host() == {chain(A), chain(A, B)}, "the others are in no global tree"
    last = later(turns[2], (9,), tail=(33,))
    before = server.settle()["loaded"]
    assert len(turns[2].all_ids) - 1 - server.ask(last) in range(page)
    server.check()
    assert server.settle()["loaded"] == before + (0 if loads_at_start else 8)
    assert len(turns[2].all_ids) - server.ask(later(turns[2], tail=(34,))) in range(page)


def test_release_that_has_first_areas_alone_starts_on_later_ones(disk: ChainDisk) -> None:
    """It reads what an entry goes on from as a chain key."""
    server = Server(disk, capacity=100)
    first = rag(A)
    for turn in (first, later(first, C, tail=(31,))):
        server.ask(turn)
    server.settle()
    places = [each.blob.row.place for each in server.storage.index.held]
    assert len(places) == 4
    for place in places:
        key, first_key, _ = place.exact.split()
        assert bytes.fromhex(key)
        assert bytes.fromhex(first_key)


def test_what_could_not_be_written_is_with_the_next_request(disk: ChainDisk) -> None:
    server = Server(disk)
    disk.storage.fails = True
    known(server, A)
    assert server.settle()["written"] == 0
    disk.storage.fails = False
    server.storage.loader.worker.breaker.paused_until = None
    server.ask(rag(A))
    assert server.settle()["written"] == 2
    server.check()


def test_arriving_request_has_its_chain_loaded(server: Server) -> None:
    """After a restart, all of it; then nothing that is in host memory already."""
    req = rag(A, B, C)
    assert server.ask(req) == len(HEAD + A + B)
    assert state(req).loaded == len(HEAD + A + B)
    assert server.settle()["loaded"] == 3
    server.evict(CAPACITY)
    server.check()
    assert server.ask(rag(A, B)) == len(HEAD + A + B)
    counts = server.settle()
    assert (counts["loaded"], counts["late"]) == (3, 0)
    server.check()


def test_explain_says_what_the_storage_has_behind_the_other_tiers(server: Server) -> None:
    """And whether it would be loaded. It loads nothing."""
    told = explain(server.cache, unsent(rag(A, B, C)))
    assert (told.exact, told.loaded, told.stored, told.fallbacks) == (0, 0, len(HEAD + A + B), ())
    server.ask(rag(A))
    told = explain(server.cache, unsent(rag(A, B, C)))
    assert (told.exact, told.stored) == (len(HEAD + A), len(B))
    for _ in range(8):
        server.storage.waits.times.observe(1, 100.0)
    costly(server)
    told = explain(server.cache, unsent(rag(A, B, C)))
    assert (told.stored, told.fallbacks) == (len(B), (Fallback.STORAGE_SLOW,))
    assert explain(server.cache, unsent(rag(C))).stored == 0
    assert server.settle()["skipped"] == 0
    server.storage.stop()
    assert explain(server.cache, unsent(rag(A, B))).stored == 0


def test_what_is_prefetched_is_there_when_it_comes(server: Server) -> None:
    """It is no request: counted is that it was loaded, and used by the request."""
    before = [variant.priority for variant in server.storage.index.held]
    prefetch(server, rag(A, B, C))
    counts = server.settle()
    assert counts["prefetch"] == {"requested": 3, "loaded": 3, "used": 0}
    assert [variant.priority for variant in server.storage.index.held] == before
    server.check()
    assert server.serve(rag(A, B, C)) == len(HEAD + A + B)
    server.cache.arrived(rag(A, B))
    assert server.storage.stats()["prefetch"]["used"] == 3
    server.check()


def test_other_rank_prefetches_nothing(server: Server) -> None:
    prefetch(server, rag(A), rank=1)
    assert server.settle()["loaded"] == 0


def test_tenant_may_have_so_much_under_way(disk: ChainDisk, server: Server) -> None:
    """Ahead of its requests, which are loaded for."""
    size = max(variant.nbytes for variant in server.storage.index.held)
    server.storage.prefetches.max_bytes = lambda: size
    disk.storage.become("hanging")
    prefetch(server, rag(A, B))
    assert server.storage.stats()["prefetch"] == {"requested": 1, "loaded": 0, "used": 0}
    server.cache.arrived(rag(A, B))
    disk.storage.become("healthy")
    assert server.settle()["loaded"] == 3
    assert server.storage.prefetches.has_room((None, None), size)
    server.check()


@pytest.mark.parametrize(
    ("host_slots", "chains"), [(1000, [(A,), (A, B)]), (len(HEAD + A), [(A,)])]
)
def test_start_fills_host_memory_and_tells_the_front(
    disk: ChainDisk, host_slots: int, chains: list[tuple[tuple[int, ...], ...]]
) -> None:
    """As far as there is room."""
    stored(disk, A, B)
    server = Server(disk, host_slots=host_slots)
    assert server.cache.tiers.stored.load_most_used() == 1 + len(chains)
    server.check()
    nodes = [server.tree.nodes.find(chain(*chunks)) for chunks in chains]
    assert all(node is not None and node.tier(0) is Tier.HOST for node in nodes)
    assert server.serve(rag(A, B)) == len(HEAD + sum(chains[-1], ()))
    server.check()


def test_load_of_the_start_that_comes_too_late_is_dropped(disk: ChainDisk, server: Server) -> None:
    """A request may have computed the chain meanwhile."""
    disk.storage.become("hanging")
    assert server.cache.tiers.stored.load_most_used(0.05) == 0
    known(server, A, B)
    disk.storage.become("healthy")
    server.settle()
    server.check()
    assert server.on_host() == set()
    known(server, A, B, C)
    assert server.on_host() == {chain(A), chain(A, B), chain(A, B, C)}
    server.check()


@pytest.mark.parametrize("room", [95, 75])
def test_chain_longer_than_the_storage_is_kept_from_its_beginning(
    disk: ChainDisk, room: int
) -> None:
    """And not written anew with each request, nor read in vain at a start with less room."""
    links = [(10 * n, 10 * n + 1, 10 * n + 2) for n in range(2, 6)]
    server = Server(disk)
    for _ in range(3):
        server.ask(rag(*links))
    num_bytes = server.settle()["num_bytes"]
    rank_state(server.cache, 0, Asked(clear_store=True))
    server.stop()
    for number in range(2):
        server = Server(disk, storage_bytes=num_bytes * room // 100)
        for _ in range(10):  # what is being written may take more room than it has in the end
            server.ask(rag(*links))
        before = server.settle()["written"]
        for _ in range(5):
            server.ask(rag(*links))
        assert server.settle()["written"] == before, number
        assert prefixes(server) == list(range(len(prefixes(server))))
        server.stop()
    server = Server(disk, storage_bytes=num_bytes * room // 200)
    assert prefixes(server) == list(range(len(prefixes(server))))
    assert server.cache.tiers.stored.load_most_used() == len(prefixes(server)) > 0
    server.check()


def test_end_of_a_chain_leaves_first_after_a_restart(disk: ChainDisk) -> None:
    """Its nodes were used alike. A chain without its beginning is of no use."""
    stored(disk, A, B, C)
    server = Server(disk, storage_bytes=disk.opened_ones[-1].stats()["num_bytes"])
    (place,) = {variant.head for variant in server.storage.index.held}
    others = [(number,) * 4 for number in (91, 92)]
    for _ in range(4):
        server.ask(rag(*others, head=(90,)))
        server.settle()
    left = prefixes(server, place)
    assert left == list(range(len(left)))
    assert 0 < len(left) < 4, "something of it has left"
    server.check()


def test_chain_without_its_beginning_is_not_loaded(server: Server) -> None:
    """Nor is one in whose place there would be another's KV."""
    for variant in list(server.storage.index.held):
        if not variant.prefix:
            server.storage.index.drop(variant)
    assert server.cache.tiers.stored.load_most_used() == 0
    assert server.ask(rag(A, B)) == 0
    assert server.cache.tiers.host.stats()["nodes"] == 0
    server.check()


def test_what_comes_too_late_serves_the_next_request(disk: ChainDisk, server: Server) -> None:
    """The request is computed, and its chain is one with what comes."""
    disk.storage.gate.clear()
    req = rag(A, B)
    assert server.ask(req, settles=False) == 0
    assert server.storage.stats()["late"] == 3
    server.check()
    disk.storage.gate.set()
    server.settle()
    server.check()
    assert server.on_host() == {chain(A), chain(A, B)}
    server.evict(CAPACITY)
    server.check()
    assert server.ask(rag(A, B)) == len(HEAD + A + B)
    server.check()


def patient(disk: ChainDisk, **knobs: Any) -> Server:
    """A server whose requests wait half of what computing takes. What is stored hangs."""
    disk.wait_policy = WaitPolicy(0.5)
    server = costly(Server(disk, **knobs))
    disk.storage.gate.clear()
    return server


def costly(server: Server) -> Server:
    """Computing takes a second a token."""
    server.price(Line(), Line(each=1.0))
    return server


def waiting(server: Server) -> FakeReq:
    """A request that has arrived and is not admitted yet."""
    req = rag(A, B)
    server.cache.arrived(req)
    assert server.admit(req, 10**6) is None
    return req


def come(server: Server, disk: ChainDisk) -> None:
    """The storage answers."""
    disk.storage.gate.set()
    server.settle()


@pytest.mark.parametrize("is_hinted", [False, True])
def test_request_waits_for_its_loads(disk: ChainDisk, is_hinted: bool) -> None:
    """Also for those that another has begun."""
    stored(disk, A, B)
    server = patient(disk)
    if is_hinted:
        prefetch(server, rag(A, B))
    req = waiting(server)
    disk.now = 0.5 * len(HEAD + A + B) - 0.01
    assert server.admit(req, 10**6) is None
    come(server, disk)
    assert server.serve(req) == len(HEAD + A + B)
    counts = server.storage.stats()
    assert (counts["waits"], counts["waits_in_vain"], counts["late"]) == (1, 0, 0)
    assert counts["prefetch"]["used"] == (3 if is_hinted else 0)
    server.check()


@pytest.mark.parametrize("is_admitted", [False, True])
def test_what_found_no_room_is_loaded_when_there_is(disk: ChainDisk, is_admitted: bool) -> None:
    """A request asks for more than may be under way, and waits in SGLang's queue. If it does not
    wait it computes the rest, which is loaded no further."""
    stored(disk, A, B, C)
    server = Server(disk)
    waiting = server.storage.loader.waiting[Load]
    waiting.bounds = waiting.bounds._replace(unknown_bytes=2)
    disk.storage.gate.clear()
    req = rag(A, B, C)
    server.cache.arrived(req)
    if is_admitted:
        assert server.serve(req) == 0
    for _ in range(4):
        come(server, disk)
        if not is_admitted:
            server.match(req)
    assert server.storage.loader.worker.num_loaded == (1 if is_admitted else 4)
    if not is_admitted:
        assert server.serve(req) == len(HEAD + A + B + C)
    server.check()


def test_request_does_not_wait_for_what_the_device_has_by_now(disk: ChainDisk) -> None:
    """Another has computed it."""
    stored(disk, A, B)
    server = patient(disk)
    req, other = rag(A, B), rag(A, B)
    server.cache.arrived(req)
    assert server.serve(other) == 0
    assert server.serve(req) == len(HEAD + A + B)
    assert server.storage.stats()["waits"] == 0


def test_request_that_has_waited_in_vain_is_computed(disk: ChainDisk) -> None:
    """It is as if it had not waited, and the next one does not."""
    stored(disk, A, B)
    server = patient(disk)
    req = waiting(server)
    disk.now = 0.5 * len(HEAD + A + B)
    assert server.serve(req) == 0
    counts = server.storage.stats()
    assert (counts["waits"], counts["waits_in_vain"], counts["late"]) == (1, 1, 3)
    other = rag(A, B, extra_key="other")
    server.cache.arrived(other)
    assert server.serve(other) == 0
    assert server.storage.stats()["waits"] == 1
    come(server, disk)
    server.check()


def test_request_does_not_wait_where_nothing_comes(
    disk: ChainDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for what takes too long, though it is loaded."""
    stored(disk, A)
    server = patient(disk)
    assert server.ask(rag(A, extra_key="other"), settles=False) == 0
    # more than half for both, less than all
    times, each_s = server.storage.waits.times, 0.3 * len(HEAD + A)
    monkeypatch.setattr(times, "seconds", lambda num_bytes: each_s)
    monkeypatch.setattr(times, "all_seconds", lambda sizes: each_s * len(sizes))
    assert server.ask(rag(A), settles=False) == 0
    assert (server.storage.stats()["waits"], server.storage.stats()["late"]) == (0, 2)
    come(server, disk)
    server.check()


@pytest.mark.parametrize("fails", [False, True])
def test_chain_of_which_a_part_is_under_way(disk: ChainDisk, fails: bool) -> None:
    """It ends there for now: nothing under way is loaded, linked, built upon or evicted."""
    stored(disk, A, B)
    server = Server(disk, host_slots=len(HEAD + A + B + C))
    assert server.ask(rag(A)) == len(HEAD + A)
    server.evict(CAPACITY)
    disk.storage.become("hanging")
    req = rag(A, B)
    server.cache.arrived(req)
    assert server.serve(req) == len(HEAD + A)
    for _ in range(2):
        server.serve(rag(A, B, C))
    known(server, (50, 51, 52))
    server.check()
    disk.storage.become("healthy")
    disk.storage.fails = fails
    server.settle()
    server.check()
    assert (chain(A, B) in server.on_host()) is not fails


def test_what_is_being_written_stays(disk: ChainDisk) -> None:
    """Else another chain's KV would be written under its name."""
    server = Server(disk, host_slots=len(HEAD + A))
    disk.storage.become("hanging")
    known(server, A)
    known(server, C)
    assert server.on_host() == {chain(A)}
    disk.storage.become("healthy")
    server.settle()
    known(server, C)
    server.check()
    assert server.on_host() == {chain(C)}
    server.settle()
    server.evict(CAPACITY)
    assert server.ask(rag(A)) == len(HEAD + A)


def test_flush_while_a_load_and_a_write_are_under_way(disk: ChainDisk) -> None:
    """Slots that the thread holds are given to nobody until it has done."""
    stored(disk, A, B)
    server = Server(disk, host_slots=20)
    disk.storage.gate.clear()  # the head's write is under way from here on
    known(server, C)
    server.cache.arrived(rag(A, B))
    server.cache.arrived(rag(C))
    server.flush()
    assert server.cache.tiers.host.pool.num_free == 20 - len(HEAD + A + B)
    known(server, (50, 51, 52))
    server.check()
    disk.storage.gate.set()
    server.settle()
    server.check()
    assert server.on_host() == {chain((50, 51, 52))}
    assert server.ask(rag(A, B)) == len(HEAD + A + B)


def test_chain_that_something_else_has_computed_is_replaced(disk: ChainDisk) -> None:
    """Its bits are not what is computed here. What computed them finds neither."""
    stored(disk, A, B)
    for how, num_found in (("exact", len(HEAD + A + B)), ("upgraded", 0), ("exact", 0)):
        server = Server(disk, how=how)
        assert server.cache.tiers.stored.load_most_used() == (3 if num_found else 0)
        assert server.ask(rag(A, B)) == num_found
        for _ in range(3):
            server.ask(rag(A, B))
        counts = server.settle()
        assert (counts["num_entries"], counts["written"]) == (3, 0 if num_found else 3)
        server.stop()


def test_failed_load_takes_what_follows_with_it(disk: ChainDisk, server: Server) -> None:
    (row,) = (v.blob.row for v in server.storage.index.held if depth(v) == 1)
    disk.storage.held[row.name][-3] ^= 64
    assert server.ask(rag(A, B)) == len(HEAD)
    assert server.settle()["problems"] == {"damaged": 1}
    server.check()


@pytest.mark.parametrize(
    "fields", [{}, {"head": (90,)}, {"extra_key": "x"}, {"cache_salt": "s"}], ids=str
)
def test_tenants_chain_comes_with_its_request(disk: ChainDisk, fields: dict[str, Any]) -> None:
    """Not with the start, nor with the request of another."""
    stored(disk, A, B, cache_salt="pepper")
    server = Server(disk)
    assert server.cache.tiers.stored.load_most_used() == 0
    assert server.ask(rag(A, B, **fields)) == 0
    assert server.settle()["loaded"] == 0
    server.flush()
    assert server.ask(rag(A, B, cache_salt="pepper")) == len(HEAD + A + B)


def test_other_weights_find_nothing(disk: ChainDisk) -> None:
    """Nor does anybody as long as the weights are in doubt."""
    stored(disk, A, B)
    disk.weights = 1
    server = Server(disk)
    assert server.cache.tiers.stored.load_most_used() == 0
    assert server.ask(rag(A, B)) == 0
    server.weights = 0
    server.cache.doubt_weights()
    assert server.ask(rag(A, B, C)) == len(HEAD + A + B), "on the device"
    assert server.settle()["loaded"] == 0
    server.evict(CAPACITY)
    server.flush()
    assert server.ask(rag(A, B)) == len(HEAD + A + B)
    assert server.settle()["loaded"] == 3


def test_load_that_does_not_pay_is_left_out(server: Server) -> None:
    server.storage.waits.times.observe(1, 100.0)
    costly(server)
    assert server.ask(rag(A, B)) == 0
    counts = server.settle()
    assert (counts["loaded"], counts["skipped"], counts["pays"]) == (0, 1, False)


def test_what_fails_here_ends_no_scheduler(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.cache.tiers.stored, "_came", lambda *args: 1 / 0)
    assert server.ask(rag(A, B)) == 0
    assert "what the storage has done is lost" in caplog.text


def test_cleared_storage_has_nothing(disk: ChainDisk, server: Server) -> None:
    cleared = rank_state(server.cache, 0, Asked(clear_store=True)).cleared
    assert cleared is not None
    assert (cleared.chunks, cleared.variants) == (3, 3)
    assert server.ask(rag(A, B)) == 0
    server.settle()
    assert not disk.storage.held


@pytest.mark.parametrize("is_there", [False, True])
def test_request_waits_for_what_others_have(disk: ChainDisk, is_there: bool) -> None:
    """Until they are asked, and if they have something, until that has come."""
    if is_there:
        first = Server(disk, overlapped="first")
        for _ in range(3):
            first.ask(rag(A, B))
        first.settle()
    second = patient(disk, overlapped="second")
    req = waiting(second)
    come(second, disk)
    assert second.serve(req) == (len(HEAD + A + B) if is_there else 0)
    counts = second.storage.stats()
    assert (counts["waits"], counts["waits_in_vain"], counts["late"]) == (1, 0, 0)
    assert counts["found"] == (3 if is_there else 0)
    second.check()


CHUNKS = st.permutations([A, B, C, (4, 5, 6)]).flatmap(
    lambda each: st.integers(1, 4).map(lambda n: tuple(each[:n]))
)
ASKS = st.tuples(
    st.just("ask"), CHUNKS, st.sampled_from([HEAD, (), (90, 92)]), st.booleans(), st.booleans()
)
TURNS = st.tuples(st.just("goes on"), CHUNKS, st.integers(0, 3), st.booleans())
OTHERS = st.one_of(
    st.tuples(st.just("evict"), st.integers(1, CAPACITY)),
    st.tuples(st.just("flush"), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("gate"), st.booleans()),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("damage"), st.integers(1, 30)),
)


@given(
    steps=st.lists(st.one_of(ASKS, ASKS, TURNS, OTHERS), max_size=40),
    slots=st.sampled_from([8, 14, 100]),
    page_size=st.sampled_from([1, 4]),
)
@settings(max_examples=examples(200), deadline=None)
def test_random_lives(steps: list[tuple[Any, ...]], slots: int, page_size: int) -> None:
    """Whatever is loaded has the contents of its place; nothing leaks, the front agrees."""
    with tempfile.TemporaryDirectory() as folder:
        disk = ChainDisk(Path(folder))
        disk.wait_policy = WaitPolicy(0.5)
        made: dict[str, Any] = {"host_slots": slots, "storage_bytes": 4000, "page_size": page_size}
        server, asked = costly(Server(disk, **made)), list[FakeReq]()
        for kind, *told in steps:
            if kind == "ask":
                chunks, head, settles, promoted = told
                asked.append(rag(*chunks, head=head, promoted_len=len(chunks) * promoted))
                server.ask(asked[-1], settles=settles and disk.storage.gate.is_set())
            elif kind == "goes on":
                chunks, back, settles = told
                before = asked[-1 - back % len(asked)] if asked else rag(A)
                req = later(before, *chunks, tail=(31 + back,))
                if len(req.all_ids) <= CAPACITY // 2:
                    asked.append(req)
                    server.ask(req, settles=settles and disk.storage.gate.is_set())
            elif kind == "evict":
                server.evict(told[0])
            elif kind == "flush":
                disk.weights = server.weights = told[0]
                server.flush()
            elif kind == "gate":
                disk.storage.become("healthy" if told[0] else "hanging")
            elif kind == "fail":
                disk.storage.fails = told[0]
                server.storage.loader.worker.breaker.paused_until = None
            elif kind == "damage":
                for held in list(disk.storage.held.values()):
                    held[-told[0]] ^= 64
            else:
                disk.storage.become("healthy")
                server.stop()
                server = costly(Server(disk, **made))
                if told[0]:
                    server.cache.tiers.stored.load_most_used(5)
            server.check()
        disk.storage.become("healthy")
        server.settle()
        server.check()
        assert not server.storage.under_way
        check_store(server.storage.index)
        assert not any(blob.is_held for blob in server.cache.tiers.host.nodes._slots.out)
        server.storage.close()


@pytest.mark.parametrize("is_loaded_at_start", [False, True])
def test_pages_come_back(disk: ChainDisk, *, is_loaded_at_start: bool) -> None:
    """Behind a chunk without a page of its own, too."""
    pages: dict[str, Any] = {"page_size": 4, "capacity": 80}
    server = Server(disk, **pages)
    chunks = (A, (9,), (60, 61, 62), B)  # up to tokens 6, 7, 10 and 13
    for _ in range(3):
        server.ask(rag(*chunks))
    server.stop()
    server = Server(disk, **pages)
    if is_loaded_at_start:
        server.cache.tiers.stored.load_most_used(5)
        assert server.on_host() == {chain(*chunks[:n]) for n in range(1, 5)}
    assert server.ask(rag(*chunks)) == 12
    server.check()


def test_chunk_without_a_page_is_loaded_behind_what_the_device_has(disk: ChainDisk) -> None:
    pages: dict[str, Any] = {"page_size": 4, "capacity": 80}
    chunks = (A, (9,), (60, 61, 62), B)
    server = Server(disk, **pages)
    for _ in range(3):
        server.ask(rag(*chunks))
    server.stop()
    server = Server(disk, **pages)
    server.serve(rag(A, tail=(30, 31, 32, 33)))
    assert server.ask(rag(*chunks)) == 12
    server.check()


def test_what_is_loaded_does_not_take_the_place_of_what_precedes_it(disk: ChainDisk) -> None:
    stored(disk, A, B)
    server = Server(disk, host_slots=8)
    server.ask(rag(A))
    server.ask(rag(A))
    found = list[int]()
    for _ in range(3):
        server.evict(CAPACITY)
        found.append(server.ask(rag(A, B)))
    assert found == [len(HEAD + A)] * 3


def test_chain_is_written_before_the_next_one_takes_its_slots(disk: ChainDisk) -> None:
    """Two are saved after one forward, and host memory has room for one."""
    server = Server(disk, host_slots=8, capacity=100)
    reqs = [
        rag(chunk, head=head, promoted_len=1)
        for chunk, head in (((1, 2, 3, 4), (90, 91)), ((5, 6, 7, 8), (92, 93)))
    ]
    for req in reqs:
        assert server.add(req, 100) is not None
    server.forward()
    for req in reqs:
        server.release(req, is_insert=True)
    server.idle()
    server.settle()
    held = sorted(variant.blob.row.num_tokens for variant in server.storage.index.held)
    assert (held, server.cache.tiers.host.counts.evicted_tokens) == ([2, 4], 0)
    server.check()
    server.storage.close()


def test_request_counts_once_where_its_chunks_may_be_moved(disk: ChainDisk) -> None:
    """Half of f_r is forgotten once a window."""
    server = disk.server(host_slots=200)
    assert server.fuser.tier is not None
    storage = server.fuser.tier.storage
    asked: list[int] = []
    with mock.patch.object(storage.index, "ask", lambda chunks: asked.append(len(chunks))):
        for _ in range(2):
            req = requests.fused(requests.A)
            server.cache.arrived(req)
            server.serve(req, answer=[50])
    assert asked == [3, 3]  # the head, A behind it, A
    disk.stop()
