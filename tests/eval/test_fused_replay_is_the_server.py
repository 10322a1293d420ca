"""`eval replay --reuse fused` against the server's own scheduler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang")

from eval.replay import fused
from eval.replay.fused import EvenAttention, FusedCount, FusedReplay
from radix_ext import Chunk, ChunkId, FusionRequest, OrderPolicy, ReplaySettings, chunk_id
from radix_ext.moved_plan import Limits
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.wire.report import Report
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import SECRET, FakeReq, answer_of, marked

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


class WatchedReplay(FusedReplay):
    """Notes how the last request's prompt was ordered."""

    prompt: Any = None

    def _prompt(self, *args: Any) -> Any:
        self.prompt = super()._prompt(*args)
        return self.prompt


class Pair:
    """A replay and a server of the same configuration, served the same requests."""

    def __init__(self, order: OrderPolicy, limits: Limits, **knobs: Any) -> None:
        self.config = ChunkCacheConfig(
            reuse="fused",
            secret=SECRET,
            window_requests=WINDOW,
            max_pass_tokens=limits.max_pass_tokens,
            max_gap_tokens=limits.max_gap_tokens,
            **knobs,
        )
        settings = ReplaySettings(order, "seen", "reused", "all", "off", None, None, WINDOW, 2, 64)
        sizes = {"kv_bytes": BYTES, "store_bytes": STORE_BYTES, "chunk_tokens": 1}
        self.replay = WatchedReplay(settings, self.config, prefill_budget=64, **sizes)
        self.server = FusedScheduler(5000, self.config, limits=limits, store_bytes=STORE_BYTES)
        self.exact_gaps = self.config.exact_gaps if order == "tree" else 0
        self.recent: list[list[ChunkId]] = []
        self.fallbacks: Counter[str] = Counter()

    def serve(self, request: Sequence[Chunk]) -> tuple[FusedCount, Report]:
        """What the replay counted, and what the server reported."""
        count = self.replay.step(request)
        self.recent = [*self.recent, [chunk.id for chunk in request]][-WINDOW:]
        asked = Counter(chunk for ids in self.recent for chunk in ids)
        ids: list[int] = []
        spans = []
        for chunk in self.replay.prompt.chunks:
            spans.append((len(ids), len(ids) + chunk.num_tokens))
            ids += TOKENS_OF[chunk.id]
        counts = [asked[chunk.id] for chunk in self.replay.prompt.chunks]
        keep = [i for i, count in enumerate(counts) if count >= self.config.store_threshold]
        promoted_len = next((i for i, count in enumerate(counts) if count < 2), len(counts))
        selector = self.config.selector
        fusion = FusionRequest(selector, self.config.recompute_ratio, self.replay.prompt.recipe)
        params = marked(
            spans, promoted_len=promoted_len, keep=keep, fusion=fusion, exact_gaps=self.exact_gaps
        )
        number = len(self.recent) + 10_000 * self.replay.num_requests
        req = FakeReq([*ids, number, 7], params)
        self.server.serve(req, answer=[50])
        self.server.idle()
        report = answer_of(req).report
        assert report is not None
        self.fallbacks.update(reason.value for reason in report.fallbacks)
        return count, report

    def empty_device(self) -> None:
        """Everything leaves both trees; the stores stay."""
        self.server.evict(5000)
        settings = self.replay._settings
        self.replay._settings = replace(settings, capacity=1)
        self.replay._make_room(CHUNKS[:1], ())
        self.replay._settings = settings


def stored(store: VariantIndex) -> dict[ChunkId, list[tuple[Any, ...]]]:
    """Per chunk its variants: prefix, priority, and when each was used last."""
    found = {}
    for chunk in CHUNKS:
        variants = store.find(chunk.id) or store.find((chunk.id, None, None))
        found[chunk.id] = [
            (each.prefix, pytest.approx(each.priority), each.last_used) for each in variants
        ]
    return found


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("order", "limits", "knobs"),
    [
        ("tree", ROOMY, {"selector": "query"}),
        ("tree", ROOMY, {"selector": "query", "exact_gaps": 2, "store_threshold": 1}),
        ("tree", ROOMY, {"selector": "query", "exact_gaps": 0}),
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
    monkeypatch.setattr(
        fused.EvenAttention,
        "of",
        lambda start, lens, n: EvenAttention((1.0,) * len(lens), tuple(lens), 1.0, n),
    )
    pair = Pair(order, limits, **{"store_chunks": 2, **knobs})
    seen: Counter[str] = Counter()
    for number, request in enumerate(requests(seed)):
        if number % 12 == 11:
            pair.empty_device()
        count, report = pair.serve(request)
        told = (report.exact, report.relocated, report.recomputed, report.fused_hit)
        assert (count.exact, count.relocated, count.recomputed, count.fused_hit) == told
        tiers = Counter[str]()
        for source in report.sources:
            tiers[source.where] += source.end - source.start
        assert (count.from_device, count.from_host) == (tiers["device"], tiers["host"])
        assert stored(pair.replay.store) == stored(pair.server.store)
        seen.update(count._asdict())
    assert pair.replay.store.stats() == pair.server.store.stats()
    assert pair.replay.fallbacks == pair.fallbacks
    stats = pair.replay.store.stats()
    assert min(stats.num_evicted, stats.num_uses) > 0
    reached = ("exact", "relocated", "from_device", "from_host", "computed", "ended")
    assert min(seen[name] for name in reached) > 0
