"""Exact, fused and plain requests interleaved, driven by Hypothesis through the scheduler's order
of calls.

The pool knows what each slot holds (tests/reference/fused_scheduler.py). After every step each slot
has one owner, locks are what holders explain, nodes hold what their keys say, and no exact KV is
ever computed over approximate KV. The front's mirror has what the rank reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_ext import ChunkId, ChunkPrefixTree, FusionRequest, fused_chunk
from radix_ext.costs import Line, Phase
from radix_ext.fusion_request import QUESTION
from radix_ext.moved_plan import Limits
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import facts, state
from sglang_chunkcache.scheduler.reporting import rank_state
from tests.examples import examples
from tests.kit import releases
from tests.kit.costs import GROWING
from tests.reference.chains import chain_of
from tests.reference.fused_scheduler import ROOMY, FusedScheduler
from tests.reference.scheduler import FakeReq, answer_of, config, marked, walk

pytestmark = pytest.mark.matrix

# they begin alike, and two are of one length
CHUNKS = ((1, 2, 3, 4), (1, 2, 5, 5), (1, 2, 3, 4, 6), (7, 8))
HEADS = ((), (9,), (9, 1), (1, 2, 3, 4, 8))  # one begins as another does, one looks like a chunk
TAILS = ((), (1, 2, 3), (10, 11, 12))
AHEAD, JOINS = st.booleans(), st.sampled_from([True, True, False])
RECIPES = (
    FusionRequest("none", 0.0, "none"),
    FusionRequest("query", 0.5, "query/question=1"),
    FusionRequest("context", 0.5, "context", fresh=frozenset({1})),
    FusionRequest("none", 0.0, "plain", fresh=frozenset({1}), plain=True),
)
Kind = str | FusionRequest
KINDS: tuple[Kind, ...] = ("plain", "exact", *RECIPES)
AREAS = st.lists(st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=3), min_size=1, max_size=2)
SHAPES = st.fixed_dictionaries(
    {
        "head": st.sampled_from(HEADS),
        "areas": AREAS,
        "salt": st.integers(0, 9).map(lambda x: "salt" if x == 9 else None),
        "promoted_len": st.integers(0, 3),
        "keep": st.frozensets(st.integers(0, 4), max_size=3),
        "grows": st.booleans(),
    }
)
SERVERS = st.fixed_dictionaries(
    {
        "capacity": st.integers(50, 120),
        "limits": st.sampled_from([ROOMY, ROOMY, Limits(12, 6, 0), Limits(1000, 1000, 4)]),
        "prefill_budget": st.sampled_from([8, 16, 30]),
        "is_chunked": st.sampled_from([True, True, False]),
        "host_slots": st.sampled_from([0, 20, 200]),
        "one_copy": st.sampled_from(["off", "on"]),
        "costs": st.sampled_from([None, GROWING]),
    }
)


@dataclass
class Live:
    """A request under way."""

    req: FakeReq
    reuse: FusionRequest | None
    sampled: bool = False


def make_live(
    kind: Kind, *, head: Any, areas: Any, tail: tuple[int, ...], salt: str | None, **fields: Any
) -> Live:
    """Head, then every area with `tail` after it. `fields`: of `marked`."""
    ids, spans = list(head), []
    for area in areas:
        for chunk in area:
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        ids += tail
    reuse = kind if isinstance(kind, FusionRequest) else None
    params = marked(spans, namespace=f"{head}{salt}", fusion=reuse, **fields)
    return Live(FakeReq(ids, None if kind == "plain" else params, cache_salt=salt), reuse)


class FuserMachine(RuleBasedStateMachine):
    """Requests join a batch one by one; any other step runs that batch first, as SGLang does."""

    @initialize(
        server=SERVERS,
        eviction=st.sampled_from(["reused", "promoted", "lru"]),
        selector=st.sampled_from(["critical", "context", "h2o"]),
        store=st.sampled_from(
            [(1000, 1, "none"), (100, 2, "none"), (1000, 3, "none"), (1000, 3, "int4")]
        ),
        load_s=st.sampled_from([0.0, 4.0, 7.0]),
    )
    def start(
        self,
        server: dict[str, Any],
        eviction: str,
        selector: str,
        store: tuple[int, int, str],
        load_s: float,
    ) -> None:
        store_bytes, store_variants, store_codec = store
        knobs = config(
            reuse="fused",
            eviction=eviction,
            selector=selector,
            selectors="eval.selectors",
            store_variants=store_variants,
            store_codec=store_codec,
            window_requests=4,
            one_copy=server.pop("one_copy"),
        )
        costs = server.pop("costs")
        self.scheduler = FusedScheduler(config=knobs, store_bytes=store_bytes, **server)
        self.scheduler.fuser.pricing.costs = costs
        if server["host_slots"]:  # a load is worth it for more tokens than that
            loads = {Phase.LOAD: Line(fixed=load_s), Phase.EXTEND: Line(each=1.0)}
            self.scheduler.cache.tiers.host.pricing.agreed = loads
        self.live: list[Live] = []

    # A request's life

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        kind=st.sampled_from(KINDS),
        shape=SHAPES,
        text=st.fixed_dictionaries({"tail": st.sampled_from(TAILS), "is_preprocessing": AHEAD}),
        piece=st.integers(1, 8),
        how=st.fixed_dictionaries({"joins": JOINS, "num_rounds": st.integers(0, 2)}),
        evicted=st.sampled_from([0, 0, 0, 0, 4, 20]),
        again=st.sampled_from([None, *KINDS]),
        moves=st.sampled_from([None, *HEADS]),
    )
    def admit(
        self,
        kind: Kind,
        shape: dict[str, Any],
        text: dict[str, Any],
        piece: int,
        how: dict[str, Any],
        evicted: int,
        again: Kind | None,
        moves: tuple[int, ...] | None,
    ) -> None:
        """Begin one, and in the same batch maybe another with the same chunks and one more, asked
        otherwise (`again`), after the same head or another (`moves`).

        `evicted`: tokens that leave between the match and the promise.
        """
        self.scheduler.evicted_before_load_back = evicted
        self._add(make_live(kind, **shape, **text), piece, **how)
        if again is not None:
            *areas, last = shape["areas"]
            longer = [*areas, [*last, CHUNKS[shape["promoted_len"]]]]
            head = shape["head"] if moves is None else moves
            twin = make_live(again, **{**shape, **text, "areas": longer, "head": head})
            self._add(twin, piece, joins=True, num_rounds=0)
        self.scheduler.evicted_before_load_back = 0

    @rule(kind=st.sampled_from(KINDS), shape=SHAPES)
    def serve(self, kind: Kind, shape: dict[str, Any]) -> None:
        """One that runs alone from its start to its end."""
        self._serve(make_live(kind, tail=(20, 21), **shape))

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        shape=SHAPES,
        heads=st.permutations(HEADS),
        recipes=st.lists(st.sampled_from(RECIPES), min_size=2, max_size=2),
    )
    def lose_source(
        self,
        shape: dict[str, Any],
        heads: list[tuple[int, ...]],
        recipes: list[FusionRequest],
    ) -> None:
        """Chunks are moved to one that runs, and when their source has left, to another one."""
        self._serve(make_live("exact", tail=(20, 21), **{**shape, "head": heads[0]}))
        for recipe, head in zip(recipes, heads[1:], strict=False):
            live = make_live(recipe, tail=(20, 21), **{**shape, "head": head})
            self._add(live, 100, joins=False, num_rounds=0)
            self._run()
            self.scheduler.evict(self.scheduler.capacity)

    @precondition(lambda self: any(not self.scheduler.is_prefilled(live.req) for live in self.live))
    @rule(which=st.integers(0, 4), num_tokens=st.integers(1, 9), stays=st.booleans())
    def prefill(self, which: int, num_tokens: int, stays: bool) -> None:
        self._run()
        waiting = [live for live in self.live if not self.scheduler.is_prefilled(live.req)]
        if not waiting:
            return
        req = waiting[which % len(waiting)].req
        self.scheduler.stash(req)
        self.scheduler.extend(req, min(len(req.all_ids), req.filled + num_tokens))
        if not stays:  # else others may still join
            self._run()

    @precondition(lambda self: any(not live.sampled for live in self.live))
    @rule(which=st.integers(0, 4), token=st.integers(1, 4), is_last=st.booleans())
    def sample(self, which: int, token: int, is_last: bool) -> None:
        self._run()
        waiting = [live for live in self.live if not live.sampled]
        ready = [live for live in waiting if self.scheduler.is_prefilled(live.req)]
        if not ready:
            return
        live = ready[which % len(ready)]
        live.sampled = True
        if is_last:  # ends on its first token: SGLang inserts it once, at its release
            live.req.output_ids.append(token)
            self._release(live, is_insert=True)
        else:
            self.scheduler.sample(live.req, token)
        self._check_report(live)

    @precondition(lambda self: any(live.sampled for live in self.live))
    @rule(which=st.integers(0, 4), token=st.integers(1, 4), is_last=st.booleans())
    def decode(self, which: int, token: int, is_last: bool) -> None:
        self._run()
        running = [live for live in self.live if live.sampled]
        if not running:
            return
        live = running[which % len(running)]
        if is_last or len(live.req.all_ids) + 1 >= self.scheduler.capacity:
            self._release(live, is_insert=True)
        else:
            self.scheduler.decode(live.req, token)

    @precondition(lambda self: self.live)
    @rule(
        which=st.integers(0, 4),
        again=st.booleans(),
        piece=st.integers(1, 8),
        num_evicted=st.integers(0, 40),
    )
    def abort_or_retract(self, which: int, again: bool, piece: int, num_evicted: int) -> None:
        self._run()
        if not self.live:
            return
        live = self.live[which % len(self.live)]
        self._release(live, is_insert=False)
        if again:  # retracted: the same request comes back with its output so far
            live.sampled = False
            self.scheduler.evict(num_evicted)
            self._add(live, piece, joins=False, num_rounds=0)

    # The cache's own

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        """Also between promise and forward, where SGLang allocates for the batch."""
        self.scheduler.evict(num_tokens)

    @rule()
    def forward(self) -> None:
        """Of others, if there is no batch: what waits is captured."""
        self._run()
        self.scheduler.forward()

    @rule(when=st.sampled_from(["early", "late"]))
    def fail(self, when: str) -> None:
        """The next pass does, and computes everything it may. With one copy of a chunk there may be
        no rows for that."""
        self.scheduler.fusion_pass.fails = when

    @precondition(lambda self: not self.live)
    @rule(is_updated=st.booleans())
    def flush(self, is_updated: bool) -> None:
        self.scheduler.weights += is_updated
        before = list(self.scheduler.store.held)
        self.scheduler.flush()
        kept = [each for each in before if each.preprocessed and not is_updated]
        assert list(self.scheduler.store.held) == kept

    @precondition(lambda self: self.scheduler.store.stats().num_variants)
    @rule()
    def clear_store(self) -> None:
        """At any moment."""
        self.scheduler.fuser.keeper.clear_store()

    # After every step

    @invariant()
    def all_is_in_order(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check([live.req for live in self.live])

    @invariant()
    def front_knows_what_may_be_shared(self) -> None:
        """Its mirror is the rank's tree: exact chunks, and below them those fused by a recipe
        without the question."""
        if not hasattr(self, "scheduler"):
            return
        if not hasattr(self, "mirror"):
            self.tree = ChunkPrefixTree(max_nodes=10_000)
            self.mirror = RankMirror(self.tree, 0)
        cache = self.scheduler.cache
        self.mirror.apply(cache.log.unread())
        rank = rank_state(cache, 0)
        assert self.tree.holdings.digest(0) == (rank.events.num_nodes, rank.events.digest)
        assert self.tree.num_unknown_notices == 0
        for keys, node in walk(cache):
            if facts(node).chain is None:
                continue
            chunks = [key for key in keys if key.spans]
            head = tuple(t for key in keys[: len(keys) - len(chunks)] for t in key.token_ids)
            names = [self._name(key) for key in chunks]
            assert facts(node).chain == chain_of(f"{head}{node.key.cache_salt}", names)

    @staticmethod
    def _name(key: ChunkKey) -> ChunkId:
        (span,) = key.spans
        if key.fused is None:
            return span.chunk
        assert QUESTION not in key.fused.recipe
        return fused_chunk(key.fused.recipe, span.chunk)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._run()
        while self.live:
            self._release(self.live[0], is_insert=True)
        self.scheduler.idle()
        self.scheduler.check()
        capacity, allocator = self.scheduler.capacity, self.scheduler.allocator
        has_rows = self.scheduler.fusion_pass.sharing is not None
        free = allocator.slot_map.num_free if has_rows else allocator.available_size()
        nodes = [node for _, node in walk(self.scheduler.cache)]
        assert self.scheduler.cache.fits_alone(nodes, 0 if has_rows else free, free)
        assert not self.scheduler.cache.fits_alone(nodes, 0 if has_rows else free + 1, free + 1)
        self.scheduler.evict(capacity)
        assert self.scheduler.allocator.available_size() == capacity
        assert self.scheduler.cache.stats()["sources"] == 0

    # Helpers

    def _run(self) -> None:
        if self.scheduler.batch:
            self.scheduler.forward()
            for live in [each for each in self.live if state(each.req).is_failed]:
                assert self.scheduler.fusion_pass.sharing is not None
                self._release(live, is_insert=True)
            self.all_is_in_order()

    def _serve(self, live: Live) -> None:
        self._run()
        self._add(live, 100, joins=False, num_rounds=0)
        self._run()
        while live in self.live:
            if self.scheduler.is_prefilled(live.req):
                self.scheduler.sample(live.req, 30)
                self._check_report(live)
                self._release(live, is_insert=True)
            else:
                self.scheduler.stash(live.req)
                if not self.scheduler.prefill(live.req, 100):
                    self._release(live, is_insert=False)

    def _add(self, live: Live, piece: int, *, joins: bool, num_rounds: int) -> None:
        if len(live.req.all_ids) + 4 > self.scheduler.capacity:
            return
        if not joins:
            self._run()
        for _ in range(num_rounds):  # in which it was not admitted
            self.scheduler.queue(live.req)
            self.scheduler.match(live.req)
        self.scheduler.queue(live.req)
        batch = list(self.scheduler.batch)
        is_promised = bool(self.scheduler.fuser.promises._pending)
        matched = self.scheduler.add(live.req, piece)
        if matched is not None:
            self.live.append(live)
            return
        assert self.scheduler.batch == batch
        waits = state(live.req).is_put_off
        self.scheduler.cache.line.left(live.req.rid)
        if not batch and not self.scheduler.evicted_before_load_back:
            assert not is_promised, "a promise outlived its batch"
            assert waits or not self._fits(live.req, piece), "it would fit, and yet it waits"
            assert self.live or not waits, "for itself"

    def _fits(self, req: FakeReq, piece: int) -> bool:
        """Whether SGLang alone would have admitted it:
        its first piece after what is matched, in what is free or idle."""
        self.scheduler.match(req)
        need = len(req.all_ids) - releases.found(req)
        if self.scheduler.is_chunked:
            need = min(need, req.host_hit_length + piece)
        idle = self.scheduler.allocator.available_size() + self.scheduler.cache.evictable_size()
        return bool(need + releases.found(req) <= idle)

    def _release(self, live: Live, *, is_insert: bool) -> None:
        self.live.remove(live)
        self.scheduler.release(live.req, is_insert=is_insert)

    def _check_report(self, live: Live) -> None:
        """What the client is told of the fates adds up."""
        told = answer_of(live.req).report if live.req.customized_info else None
        if live.reuse is None:
            assert told is None
            return
        assert told is not None
        assert min(told.exact, told.relocated, told.recomputed, told.fused_hit, told.gap) >= 0
        promised = told.relocated + told.recomputed + told.gap
        assert told.exact + promised < len(live.req.all_ids)
        assert bool(told.sources) == (promised > told.fused_hit)


FuserMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestFuserMachine = FuserMachine.TestCase
