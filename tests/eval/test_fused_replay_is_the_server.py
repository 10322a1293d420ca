"""`eval replay --reuse fused` against the server's own scheduler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

pytest.importorskip("sglang")

from eval.replay import fused
from eval.replay.exact import ReplaySettings
from eval.replay.fused import EvenAttention, FusedReplay, Timing
from eval.replay.fused_count import FusedCount
from radix_ext import Chunk, ChunkId, FusionRequest, OrderPolicy, chunk_id
from radix_ext.costs import Costs
from radix_ext.fusion_request import QUESTION
from radix_ext.moved_plan import Limits
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode
from sglang_chunkcache.wire.report import Answer, Report
from tests.kit.costs import GROWING
from tests.kit.integrity import of_chains
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.memory_host import MemoryHost
from tests.reference.scheduler import SECRET, FakeReq, answer_of, marked, walk

WINDOW, NUM_CHUNKS, NUM_REQUESTS = 20, 14, 120
TOKENS = [
    [100 * number + offset for offset in range(2 + number % 5)]
    for number in range(1, NUM_CHUNKS + 1)
]
CHUNKS = [Chunk(chunk_id(tokens), len(tokens)) for tokens in TOKENS]
TOKENS_OF = {chunk.id: tokens for chunk, tokens in zip(CHUNKS, TOKENS, strict=True)}
BYTES = 8
"""Of one token's KV in the pass of the test."""
STORE_BYTES = 1 << 30
MAX_PROMPT = 31
"""Tokens of a request's chunks and its question."""


def alike(start: int, lens: Sequence[int], num_tokens: int) -> EvenAttention:
    """As the server's reference pass measures."""
    return EvenAttention((1.0,) * len(lens), tuple(lens), 1.0, num_tokens)


class WatchedReplay(FusedReplay):
    """Notes how the last request's prompt was ordered. In a pool that is too small the question,
    of one token, is a chunk at its end: it takes its place there."""

    prompt: Any = None

    def _prompt(self, *args: Any) -> Any:
        found = self.prompt = super()._prompt(*args)
        if self._settings.capacity_tokens is None:
            return found
        question = Chunk(chunk_id([10_000 + self.num_requests]), 1)
        return found._replace(chunks=(*found.chunks, question), keys=(*found.keys, question.id))


class Pair:
    """A replay and a server of the same configuration, served the same requests.

    Args:
        capacity: of the device, None for all; `host`: of host memory, in tokens.
        share: of the requests that opt into moved KV.
    """

    def __init__(
        self,
        order: OrderPolicy,
        limits: Limits,
        *,
        capacity: int | None = None,
        host: int = 0,
        share: float = 1.0,
        costs: Costs | None = None,
        **knobs: Any,
    ) -> None:
        self.config = ChunkCacheConfig(
            reuse="fused",
            secret=SECRET,
            window_requests=WINDOW,
            max_pass_tokens=limits.max_pass_tokens,
            max_gap_tokens=limits.max_gap_tokens,
            **knobs,
        )
        settings = ReplaySettings(
            order, "seen", "reused", "all", "off", None, capacity, WINDOW, 2, 64, host
        )
        budget = 64 if capacity is None else MAX_PROMPT
        sizes: dict[str, Any] = {"store_bytes": STORE_BYTES, "chunk_tokens": 1, "share": share}
        sizes["kv_bytes"] = MemoryHost.token_bytes if host else BYTES
        sizes["timing"] = costs and Timing(costs, limits.num_layers, MAX_PROMPT)
        self.replay = WatchedReplay(settings, self.config, prefill_budget=budget, **sizes)
        self.server = FusedScheduler(
            capacity or 5000,
            self.config,
            limits=limits,
            prefill_budget=budget,
            store_bytes=STORE_BYTES,
            host_slots=host,
        )
        self.is_small, self.costs = capacity is not None, costs
        self.recent: list[list[ChunkId]] = []
        self.fallbacks: Counter[str] = Counter()

    def serve(self, request: Sequence[Chunk]) -> tuple[FusedCount, Answer, int]:
        """What the replay counted; what the server answered, and how much of the prompt it
        matched."""
        count = self.replay.step(request, question_len=2 if self.costs else 0)
        prompt = self.replay.prompt
        self.recent = [*self.recent, [chunk.id for chunk in request]][-WINDOW:]
        asked = Counter(chunk for ids in self.recent for chunk in ids)
        ids: list[int] = []
        spans = []
        for chunk in prompt.chunks:
            spans.append((len(ids), len(ids) + chunk.num_tokens))
            ids += TOKENS_OF[chunk.id]
        counts = [asked[chunk.id] for chunk in prompt.chunks]
        keep = [i for i, count in enumerate(counts) if count >= self.config.store_threshold]
        promoted_len = next((i for i, count in enumerate(counts) if count < 2), len(counts))
        fusion = FusionRequest(self.config.selector, self.config.recompute_ratio)
        recipe = QUESTION * self.replay._fusion.asks_the_question + prompt.recipe
        opted: Any = {}
        if prompt.is_fused:
            grows = self.replay._grows_from is not None
            opted = {"fusion": replace(fusion, recipe=recipe), "grows": grows}
        params = marked(spans, promoted_len=promoted_len, keep=keep, **opted)
        number = 10_000 + self.replay.num_requests
        req = FakeReq([*ids, number] if self.is_small else [*ids, number, 7], params)
        self.server.fuser.pricing.costs = self.costs
        matched = self.server.serve(req, answer=[] if self.is_small else [50])
        write_back = self.server.cache.tiers.host.write_back
        while self.server.num_pending or write_back.num_waiting:
            self.server.forward()
        answer = answer_of(req)
        if answer.report is not None:
            self.fallbacks.update(reason.value for reason in answer.report.fallbacks)
        return count, answer, matched

    def empty_device(self) -> None:
        """Everything leaves both trees; the stores stay."""
        self.server.evict(5000)
        settings = self.replay._settings
        self.replay._settings = replace(settings, capacity=1)
        self.replay._make_room(CHUNKS[:1], ())
        self.replay._settings = settings


def told(report: Report) -> tuple[int, ...]:
    """Exact, relocated, recomputed, found fused; moved from the device, from host memory."""
    tiers = Counter[str]()
    for source in report.sources:
        tiers[source.where] += source.end - source.start
    fates = report.exact, report.relocated, report.recomputed, report.fused_hit
    return (*fates, tiers["device"], tiers["host"])


def counted(count: FusedCount) -> tuple[int, ...]:
    """As `told`."""
    fates = count.exact, count.relocated, count.recomputed, count.fused_hit
    return (*fates, count.from_device, count.from_host)


def stored(store: VariantIndex) -> dict[ChunkId, list[tuple[Any, ...]]]:
    """Per chunk its variants: prefix, priority, and when each was used last."""
    found = {}
    for chunk in CHUNKS:
        variants = store.find(chunk.id) or store.find((chunk.id, None, None))
        found[chunk.id] = [
            (each.prefix, pytest.approx(each.priority), each.last_used) for each in variants
        ]
    return found


def in_host_memory(store: VariantIndex) -> list[tuple[Any, ...]]:
    """Variants in the order in which they leave: chunk, prefix, whether exact, uses, bytes. The
    head is the chunk ""."""
    held, found = store.held, list[tuple[Any, ...]]()
    for each in sorted(held, key=lambda variant: (variant.priority, variant.last_used)):
        chunk = held.identity_of(each)
        chunk = chunk.chunk if isinstance(chunk, ChunkIdentity) else chunk
        found.append((chunk, each.prefix, each.is_exact, each.num_uses, each.nbytes))
    return found


def on_device(pair: Pair) -> tuple[Counter[Any], Counter[Any]]:
    """The replay's and the server's chains, one for each node."""
    known = pair.replay._known
    ours = Counter(tuple(known[above].chunk for above in node.path()) for node in known)
    chains = (keys for keys, _ in walk(pair.server.cache))
    theirs = Counter(tuple(chunk_id(list(key.token_ids)) for key in keys) for keys in chains)
    return ours, theirs


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


def drifting(seed: int) -> Iterator[list[Chunk]]:
    """Popular chunks, half of which are others after a third of the requests."""
    rng = random.Random(seed)
    for number in range(300):
        drawn = (int(NUM_CHUNKS * rng.random() ** 2) for _ in range(rng.randint(1, 5)))
        shift = number // 100 * (NUM_CHUNKS // 2)
        yield [CHUNKS[each] for each in dict.fromkeys((n + shift) % NUM_CHUNKS for n in drawn)]


def requests(seed: int) -> list[list[Chunk]]:
    """Few popular chunks, 1 to 5 a request; some requests are repeated."""
    rng = random.Random(seed)
    made: list[list[Chunk]] = []
    for _ in range(NUM_REQUESTS):
        if made and rng.random() < 0.15:
            made.append(rng.choice(made[-10:]))
        else:
            drawn = [int(NUM_CHUNKS * rng.random() ** 1.5) for _ in range(rng.randint(1, 5))]
            made.append([CHUNKS[number] for number in dict.fromkeys(drawn)])
    return made


ROOMY = Limits(max_pass_tokens=1000, max_gap_tokens=1000)
STORE_4_2 = {"store_chunks": 4, "store_variants": 2}
STORE_3_3 = {"store_chunks": 3, "store_variants": 3}
TIGHT = Limits(max_pass_tokens=9, max_gap_tokens=4, question_window=0)  # a replay has no questions


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("order", "limits", "knobs"),
    [
        ("tree", ROOMY, {"selector": "query"}),
        ("tree", ROOMY, {"selector": "query", "store_threshold": 1, "costs": GROWING}),
        ("retriever", TIGHT, {"selector": "query", "recompute_ratio": 0.5, **STORE_4_2}),
        # fused nodes are found again
        ("tree", ROOMY, {"selector": "none", "store_threshold": 1}),
        ("tree", ROOMY, {"selector": "critical"}),
        ("retriever", ROOMY, {"selector": "context", "store_threshold": 3, **STORE_3_3}),
        ("tree", TIGHT, {"selector": "first", "recompute_ratio": 0.3}),
    ],
)
def test_replay_equals_the_server(
    monkeypatch: pytest.MonkeyPatch,
    order: OrderPolicy,
    limits: Limits,
    knobs: dict[str, Any],
    seed: int,
) -> None:
    monkeypatch.setattr(fused.EvenAttention, "of", alike)
    pair = Pair(order, limits, **{"store_chunks": 2, **knobs})
    seen: Counter[str] = Counter()
    for number, request in enumerate(requests(seed)):
        if number % 12 == 11:
            pair.empty_device()
        count, answer, _ = pair.serve(request)
        assert answer.report is not None
        assert counted(count) == told(answer.report)
        assert stored(pair.replay.store) == stored(pair.server.store)
        seen.update(count._asdict())
    assert pair.replay.store.stats() == pair.server.store.stats()
    assert pair.replay.fallbacks == pair.fallbacks
    stats = pair.replay.store.stats()
    assert min(stats.num_evicted, stats.num_uses) > 0
    reached = ("exact", "relocated", "from_device", "from_host", "computed", "ended")
    assert min(seen[name] for name in reached) > 0


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize(
    ("order", "host", "share", "knobs"),
    [
        ("tree", 120, 0.5, {"selector": "query"}),
        ("tree", 90, 0.8, {"selector": "critical"}),
        ("retriever", 120, 0.5, {"selector": "query", "store_threshold": 1}),
        ("tree", 90, 0.7, {"selector": "none", "store_chunks": 10, "store_variants": 2}),
        # what is scored is captured although its chain is kept
        ("tree", 600, 0.7, {"selector": "context"}),
    ],
)
def test_replay_equals_the_server_with_host_memory(
    monkeypatch: pytest.MonkeyPatch,
    order: OrderPolicy,
    host: int,
    share: float,
    knobs: dict[str, Any],
    seed: int,
) -> None:
    """Chains leave a device that is too small, come back, and are moved from where they are."""
    monkeypatch.setattr(fused.EvenAttention, "of", alike)
    pair = Pair(order, ROOMY, capacity=60, host=host, share=share, **knobs)
    seen: Counter[str] = Counter()
    tiers = pair.server.cache.tiers.host
    assert pair.replay.host is not None
    for request in drifting(seed):
        count, answer, matched = pair.serve(request)
        if answer.report is None:
            assert count.exact == matched
        else:
            assert counted(count) == told(answer.report)
        assert count.exact_from_host == answer.loaded
        assert in_host_memory(pair.replay.store) == in_host_memory(pair.server.store)
        ours, theirs = on_device(pair)
        assert ours == theirs
        assert asdict(pair.replay.host.counts).items() <= asdict(tiers.counts).items()
        seen.update(count._asdict())
        chains = [each for each in pair.server.store.held if isinstance(each, HostNode)]
        seen["moved_chain"] += any(each.before and each.num_uses > each.hits for each in chains)
    pair.server.check()
    assert not [*of_chains(pair.replay.host.nodes)]
    reached = ("exact", "exact_from_host", "from_device", "from_host", "moved_chain", "computed")
    assert min(seen[name] for name in reached) > 0
    assert pair.replay.num_evicted > 300
