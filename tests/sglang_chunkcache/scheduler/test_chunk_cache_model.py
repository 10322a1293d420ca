"""`ChunkRadixCache` against a dict of paths, driven by Hypothesis through the scheduler's order of
calls.

Requests with and without chunks and audits run interleaved; prefill pieces end anywhere, also
inside chunks. After every step each slot has one owner, the tree equals the model, nothing locked
was evicted, and the events of the log, delivered late, twice or not at all, lead the front's mirror
to the tree's digest once everything has arrived. The same in pages, some longer than chunks.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_ext import ChunkPrefixTree
from radix_ext.eviction import NEW
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.events import Acknowledgement, Batch
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.kit.integrity import check_tree
from tests.reference.naive_cache import NaiveCache, Path, units
from tests.reference.scheduler import FakeReq, Scheduler, config, marked, walk

pytestmark = pytest.mark.matrix

CAPACITY = 48
# they begin alike, and one is another's beginning
CHUNKS = ((1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 4, 6), (7, 8))
HEADS = ((), (9,), (1, 2), (9, 1, 2, 3, 4))  # some look like chunks
TAILS = ((), (1, 2, 3), (3, 3), (10, 11, 12))
SALTS = (None, None, "salt")
REQUEST: dict[str, Any] = {
    "head": st.sampled_from(HEADS),
    "areas": st.lists(
        st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=3), min_size=1, max_size=2
    ),
    "tail": st.sampled_from(TAILS),
    "salt": st.sampled_from(SALTS),
    "promoted_len": st.integers(0, 3),
    "is_plain": st.sampled_from([False, False, True]),
    "is_audit": st.sampled_from([False, False, False, True]),
    "ack": st.integers(0, 9),
    "like": st.integers(0, 3),
}


@dataclass
class Live:
    """A request under way."""

    req: FakeReq
    spans: tuple[tuple[int, int], ...] | None
    area_len: int
    promoted_len: int
    is_audit: bool
    locked: Path = ()
    sampled: bool = False
    inserted: bool = False


class CacheMachine(RuleBasedStateMachine):
    """Scheduler and model do the same."""

    page_size = 1

    @initialize(
        eviction=st.sampled_from(["reused", "reused", "promoted", "lru"]),
        force_miss=st.sampled_from([False, False, False, True]),
    )
    def start(self, eviction: str, force_miss: bool) -> None:
        self.eviction = eviction
        self.scheduler = Scheduler(
            CAPACITY, config(eviction=eviction), force_miss=force_miss, page_size=self.page_size
        )
        self.inserts: list[float] = []
        """When each request came into the tree for the first time."""
        self.age, self.ages = 0.0, [0.0]
        """The highest priority that has left; what it was after each insert."""
        self.model = NaiveCache(self.page_size)
        self.live: list[Live] = []
        self.shapes: list[tuple[tuple[int, ...], list[list[tuple[int, ...]]], str | None]] = []
        self.tree = ChunkPrefixTree(max_nodes=10_000)
        self.mirror = RankMirror(self.tree, 0)
        self.acks = [self.mirror.acknowledgement]
        self.batches: list[Batch] = []
        self.scheduler.cache.log.max_told = 4
        self.may_have_gap = False

    # A request's life

    @precondition(lambda self: len(self.live) < 4)
    @rule(piece=st.integers(1, 9), **REQUEST)
    def admit(self, piece: int, **drawn: Any) -> None:
        self._admit(self._make(**drawn), piece)

    @rule(token=st.integers(1, 4), **REQUEST)
    def serve(self, token: int, **drawn: Any) -> None:
        """From the queue to its only token, if slots suffice: this fills the tree."""
        live = self._make(**drawn)
        self._admit(live, len(live.req.all_ids))
        if live in self.live:
            live.req.output_ids.append(token)
            self._release(live, is_insert=True)

    def _make(
        self,
        head: tuple[int, ...],
        areas: list[list[tuple[int, ...]]],
        tail: tuple[int, ...],
        salt: str | None,
        promoted_len: int,
        is_plain: bool,
        is_audit: bool,
        ack: int,
        like: int,
    ) -> Live:
        # the same chunks as an earlier request, maybe with another question or marks
        if like and self.shapes:
            head, areas, salt = self.shapes[-like % len(self.shapes)]
        self.shapes.append((head, areas, salt))
        ids, spans = list(head), []
        for area in areas:
            for chunk in area:
                spans.append((len(ids), len(ids) + len(chunk)))
                ids += chunk
            ids += tail
        area_len = len(areas[0]) + (len(areas[1]) if len(areas) > 1 and not tail else 0)
        promoted_len = min(promoted_len, area_len)
        ack_pair = self.acks[-1 - ack % len(self.acks)]
        is_audit = is_audit and not is_plain
        fields: dict[str, Any] = {
            "promoted_len": promoted_len,
            "ack": ack_pair,
            "is_audit": is_audit,
        }
        params = marked(spans, namespace=f"{head}{salt}", **fields)
        req = FakeReq(ids, None if is_plain else params, cache_salt=salt)
        return Live(req, None if is_plain else tuple(spans), area_len, promoted_len, is_audit)

    @precondition(lambda self: any(not self.scheduler.is_prefilled(live.req) for live in self.live))
    @rule(which=st.integers(0, 3), num_tokens=st.integers(1, 7))
    def prefill(self, which: int, num_tokens: int) -> None:
        waiting = [live for live in self.live if not self.scheduler.is_prefilled(live.req)]
        live = waiting[which % len(waiting)]
        self._count(live)
        self.scheduler.stash(live.req)
        self._book_insert(live, live.req.filled)
        with self._watch_eviction():
            self.scheduler.prefill(live.req, num_tokens)

    @precondition(
        lambda self: any(self._is_computed(live) and not live.sampled for live in self.live)
    )
    @rule(which=st.integers(0, 3), token=st.integers(1, 4), is_last=st.booleans())
    def sample(self, which: int, token: int, is_last: bool) -> None:
        ready = [live for live in self.live if self._is_computed(live) and not live.sampled]
        live = ready[which % len(ready)]
        if is_last:  # ends on its first token: SGLang inserts it once, at its release
            live.req.output_ids.append(token)
            self._release(live, is_insert=True)
            return
        live.sampled = True
        self._count(live)
        self.scheduler.sample(live.req, token)
        self._book_insert(live, live.req.filled)
        self._collect(live)

    @precondition(lambda self: any(live.sampled for live in self.live))
    @rule(which=st.integers(0, 3), token=st.integers(1, 4), is_last=st.booleans())
    def decode(self, which: int, token: int, is_last: bool) -> None:
        running = [live for live in self.live if live.sampled]
        live = running[which % len(running)]
        if is_last:
            self._release(live, is_insert=True)
            return
        with self._watch_eviction():
            self.scheduler.decode(live.req, token)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), again=st.booleans(), piece=st.integers(1, 9))
    def abort_or_retract(self, which: int, again: bool, piece: int) -> None:
        live = self.live[which % len(self.live)]
        self._release(live, is_insert=False)
        if again:  # retracted: the same request comes back with its output so far
            live.sampled = False
            self._admit(live, piece)

    # The cache's own

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens: int) -> None:
        with self._watch_eviction():
            self.scheduler.evict(num_tokens)

    @precondition(lambda self: not self.live)
    @rule()
    def flush(self) -> None:
        self.scheduler.cache.reset()
        self.scheduler.allocator.clear()
        self.model = NaiveCache(self.page_size)
        # a flush waits for idle: what was sent before it has arrived or is lost
        self.batches.clear()

    # The front's mirror

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 9), is_lost=st.booleans(), is_kept=st.booleans())
    def deliver(self, which: int, is_lost: bool, is_kept: bool) -> None:
        index = which % len(self.batches)
        batch = self.batches[index] if is_kept else self.batches.pop(index)
        if not is_lost:
            self.mirror.apply(batch)
            self.acks.append(self.mirror.acknowledgement)

    @precondition(lambda self: len(self.tree.nodes) > 0)
    @rule()
    def forget(self) -> None:
        """As a front that was replaced: it has heard nothing, and what the log has forgotten is a
        gap, before each late answer that it hears."""
        self.tree.drop_rank(0)
        self.mirror = RankMirror(self.tree, 0)
        self.acks, self.may_have_gap = [self.mirror.acknowledgement], True

    @rule()
    def deliver_everything(self) -> None:
        for batch in self.batches:
            self.mirror.apply(batch)
        self.batches.clear()
        cache = self.scheduler.cache
        self.mirror.hear(rank_state(cache, 0))
        while self.mirror.is_behind:
            self.mirror.hear(rank_state(cache, 0, Asked(read=(self.mirror.reading,))))
        self.acks.append(self.mirror.acknowledgement)
        rank = rank_state(cache, 0)
        assert self.mirror.acknowledgement == Acknowledgement(rank.events.epoch, rank.events.seq)
        assert self.may_have_gap or not self.mirror.num_gaps
        assert self.tree.holdings.digest(0) == (rank.events.num_nodes, rank.events.digest)
        check_tree(self.tree)

    # After every step

    @invariant()
    def slots_have_one_owner(self) -> None:
        self.scheduler.check([live.req for live in self.live])

    @invariant()
    def tree_equals_model(self) -> None:
        held: dict[Path, tuple[int, ...]] = {}
        marks: dict[Path, bool] = {}
        for keys, node in walk(self.scheduler.cache):
            path = path_of(keys)
            slots, size = node.value.tolist(), len(path_of(keys[-1:])) - 1
            for n in range(len(path) - size + 1, len(path) + 1):
                length = self.model.num_slots(path[:n]) - self.model.num_slots(path[: n - 1])
                held[path[:n]], slots = tuple(slots[:length]), slots[length:]
            assert not slots
            if facts(node).chain is not None:
                marks[path] = facts(node).promoted
        assert {path: each for path, each in held.items() if each} == {
            path: each for path, each in self.model.slots.items() if each
        }
        assert marks == self.model.marks

    @invariant()
    def locks_cover_what_requests_use(self) -> None:
        locked = {slot for live in self.live for slot in self._locked_slots(live)}
        assert self.scheduler.cache.protected_size() == len(locked)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.live:
            self._release(self.live[0], is_insert=True)
        self.scheduler.check()
        self.deliver_everything()
        self.scheduler.evict(CAPACITY + 1)  # chunks without a page, too
        assert self.scheduler.allocator.available_size() == CAPACITY
        assert rank_state(self.scheduler.cache, 0).events.num_nodes == 0

    # Helpers

    def _units(self, live: Live, up_to: int) -> Path:
        req = live.req
        return units(req.all_ids, live.spans, up_to, req.extra_key, req.cache_salt, self.page_size)

    def _admit(self, live: Live, piece: int) -> None:
        self.scheduler.cache.arrived(live.req)
        expected = self.model.match(self._units(live, len(live.req.all_ids) - 1))
        for _ in range(piece % 3):  # the queue asks again and again
            assert self.scheduler.match(live.req) == (
                0 if self.scheduler.force_miss else self.model.num_slots(expected)
            )
        live.locked = expected[:1] if self.scheduler.force_miss else expected
        limit = len(live.req.all_ids) - 1
        is_asked = self.model.num_slots(self._units(live, limit)) > 0  # else SGLang does not look
        rest = self.model.rest(live.locked, limit) if is_asked else 0
        has_room = self.scheduler.allocator.available_size() >= self.page_size
        with _EvictionWatch(self, self.model.slots_of(live.locked)):
            matched = self.scheduler.admit(live.req, piece)
        if matched is not None:
            found = self.model.num_slots(live.locked)
            assert matched in (found, found + rest)
            assert matched > found or not (rest and has_room)
            assert self.scheduler.slots(live.req, 0, found) == self.model.slots_of(live.locked)
            self.live.append(live)

    def _is_computed(self, live: Live) -> bool:
        return self.scheduler.is_prefilled(live.req) and live.req.kv.kv_allocated_len == len(
            live.req.all_ids
        )

    def _locked_slots(self, live: Live) -> list[int]:
        return self.scheduler.slots(live.req, 0, live.req.kv.cache_protected_len)

    def _inserted(self, live: Live, up_to: int) -> Path:
        """What a request should leave in the tree after `up_to` computed tokens."""
        return self._units(live, max(up_to, self.model.num_slots(live.locked)))

    def _book_insert(self, live: Live, up_to: int, rows: Sequence[int] | None = None) -> None:
        if live.is_audit:  # what it has computed stays its own and goes with it
            assert rows is not None or live.req.kv.cache_protected_len == self.model.num_slots(
                live.locked
            )
            return
        path = self._inserted(live, up_to)
        length = self.model.num_slots(path)
        self.model.insert(
            path, rows if rows is not None else self.scheduler.slots(live.req, 0, length)
        )
        if live.spans is not None:
            self.model.mark(path, live.promoted_len, live.area_len, counts_hits=not live.inserted)
        live.locked, live.inserted = path, True
        if rows is None:
            assert live.req.kv.cache_protected_len == length
            assert self.scheduler.slots(live.req, 0, length) == self.model.slots_of(path)

    def _count(self, live: Live) -> None:
        """The request is about to be inserted."""
        if not live.inserted and not live.is_audit:
            self.inserts.append(time.monotonic())
            self.ages.append(self.age)

    def _release(self, live: Live, *, is_insert: bool) -> None:
        committed = live.req.kv.kv_committed_len
        rows = self.scheduler.slots(live.req, 0, committed)
        self.live.remove(live)
        if is_insert:
            self._count(live)
        self.scheduler.release(live.req, is_insert=is_insert)
        if is_insert:
            self._book_insert(live, committed, rows)
            self._collect(live)

    def _collect(self, live: Live) -> None:
        """The answer goes out with what was attached to it."""
        entry = (live.req.customized_info or {}).pop(ANSWER_KEY, None)
        assert entry is None or (live.spans is not None and not live.is_audit and len(entry) == 1)
        if entry:
            self.batches.append(decode(entry[0], Answer).events)

    def _watch_eviction(self) -> Any:
        return _EvictionWatch(self)


class _EvictionWatch:
    """Whatever is evicted inside leaves in policy order, is not locked,
    and leaves the model too."""

    def __init__(self, machine: CacheMachine, locked: Sequence[int] = ()) -> None:
        self.machine, self.locked = machine, set(locked)
        self.cache = machine.scheduler.cache

    def __enter__(self) -> None:
        self.evicted: list[int] = []
        self.original = self.cache.evict
        self.cache.evict = self._evict

    def __exit__(self, *exc: object) -> None:
        del self.cache.evict

    def _evict(self, params: Any) -> Any:
        expected = self._expected(params.num_tokens)
        locked = {
            slot for live in self.machine.live for slot in self.machine._locked_slots(live)
        } | self.locked
        before, chunks = set(self.machine.scheduler.tree_slots()), self._chunks()
        result = self.original(params)
        gone = before - set(self.machine.scheduler.tree_slots())
        assert not gone & locked, "a locked slot was evicted"
        assert gone == expected, "eviction order"
        assert result.num_tokens_evicted == len(gone)
        self.machine.model.evict(gone, chunks - self._chunks())
        return result

    def _chunks(self) -> set[Path]:
        return {path_of(keys) for keys, node in walk(self.cache) if facts(node).chunk is not None}

    def _expected(self, num_tokens: int) -> set[int]:
        """The least of all leaves, again and again."""
        nodes = {node: path_of(keys) for keys, node in walk(self.cache)}
        gone: set[int] = set()
        while len(gone) < num_tokens:
            parents = {node.parent for node in nodes}
            leaves = [node for node in nodes if node not in parents and node.lock_ref == 0]
            if not leaves:
                break
            victim = min(leaves, key=lambda node: self._priority(node, nodes[node]))
            self.machine.age = max(self.machine.age, self._priority(victim, nodes[victim])[0])
            del nodes[victim]
            gone.update(victim.value.tolist())
        return gone

    def _priority(self, node: Any, path: Path) -> tuple[float, float]:
        """By mark, or by hits and what has left since the last access; then by last access."""
        machine = self.machine
        if machine.eviction == "promoted":
            return machine.model.is_promoted(path), node.last_access_time
        if machine.eviction == "lru":
            return 0, node.last_access_time
        age = machine.ages[bisect(machine.inserts, node.last_access_time)]
        return age + NEW + log2(1 + machine.model.hits.get(path, 0)), node.last_access_time


def path_of(keys: Sequence[Any]) -> Path:
    """Node keys from the root downward as units."""
    first = keys[0]
    path: list[tuple[Any, ...]] = [
        ("chunks" if isinstance(first, ChunkKey) else "plain", first.extra_key, first.cache_salt)
    ]
    for key in keys:
        spans = key.spans if isinstance(key, ChunkKey) else ()
        lead = spans[0].start if spans else len(key.token_ids)
        path += [("token", token) for token in key.token_ids[:lead]]
        path += [("chunk", *key.token_ids[lead:])] if spans else []
    return tuple(path)


CacheMachine.TestCase.settings = settings(max_examples=examples(250), stateful_step_count=50)
TestCacheMachine = CacheMachine.TestCase


class PagedMachine(CacheMachine):
    """In pages that some chunks fill and others do not."""

    page_size = 4


PagedMachine.TestCase.settings = CacheMachine.TestCase.settings
TestPagedMachine = PagedMachine.TestCase
