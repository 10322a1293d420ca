"""Joint encoding in slots, against the paper's algorithm block by block; test_promise_model.py has random lives of requests."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from radix_ext import ChunkId, Span
from sglang_chunkcache.fusion.joint import slots
from sglang_chunkcache.fusion.joint.slots import NEAR, SlotEncoder
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.events import NOTHING_READ
from sglang_chunkcache.wire.spans import JointRequest, RequestSpans
from tests.e2e.poisoned_server import checked_encode
from tests.reference import naive_joint

LAYERS, HEADS, SIZE, VALUE_SIZE, SLOTS = 2, 2, 4, 3, 400
BATCH = JointRequest(threshold=0.9, block=2, over="batch")


class Rank:
    """A pool full of numbers, and requests whose rows are scattered over it."""

    def __init__(self, seed: int, *, noise: float = 0.3, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = noise
        self.k_buffer, self.v_buffer = (
            [torch.randn(SLOTS, HEADS, size, generator=self.generator).to(dtype) for _ in range(LAYERS)]
            for size in (SIZE, VALUE_SIZE)
        )
        self.req_to_token = torch.zeros(16, 128, dtype=torch.int32)
        self.free = torch.randperm(SLOTS, generator=self.generator).tolist()
        self.reqs: list[Any] = []
        self.encoder = SlotEncoder(self, self)

    def add(
        self,
        lens: Sequence[int],
        wish: JointRequest | None,
        *,
        cached: int = 0,
        like: Any = None,
        extra_key: str | None = None,
    ) -> Any:
        """A request: a token, chunks of these lengths that begin alike, a token. `cached`: what it has matched, of `like`."""
        row = len(self.reqs)
        spans, at = [], 1
        for length in lens:
            spans.append(Span(at, at + length, ChunkId(str(length))))
            at += length
        slots = [self.free.pop() for _ in range(at + 1)]
        for span in spans:
            for buffers, size in ((self.k_buffer, SIZE), (self.v_buffer, VALUE_SIZE)):
                text = torch.randn(128, HEADS, size, generator=torch.Generator().manual_seed(7))[
                    : span.end - span.start
                ]
                for buffer in buffers:
                    noise = self.noise * torch.randn(text.shape, generator=self.generator)
                    buffer[slots[span.start : span.end]] = (text + noise).to(buffer.dtype)
        if like is not None:
            slots[:cached] = self.slots(like)[:cached]
        self.req_to_token[row, : len(slots)] = torch.tensor(slots)
        req: Any = SimpleNamespace(
            origin_input_ids=array("q", range(len(slots))),
            output_ids=array("q"),
            kv=SimpleNamespace(req_pool_idx=row, cache_protected_len=cached),
            extra_key=extra_key,
            cache_salt=None,
        )
        state(req).is_read, state(req).spans = True, RequestSpans(tuple(spans), "n", 0, NOTHING_READ, joint=wish)
        self.reqs.append(req)
        return req

    def slots(self, req: Any) -> list[int]:
        return [int(slot) for slot in self.req_to_token[req.kv.req_pool_idx, : len(req.origin_input_ids)]]

    def encode(self, *reqs: Any, end: int | None = None) -> None:
        """After the extend of these requests, up to `end` or to their ends."""
        ends = [len(req.origin_input_ids) if end is None else end for req in reqs]
        starts = [req.kv.cache_protected_len for req in reqs]
        lens = [last - start for start, last in zip(starts, ends, strict=True)]
        self.encoder.encode(SimpleNamespace(reqs=list(reqs), prefix_lens=starts, extend_lens=lens))

    def numbers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in (*self.k_buffer, *self.v_buffer)]


def slow(
    rank: Rank, units: Sequence[Sequence[tuple[list[int], bool]]], threshold: float
) -> tuple[list[Tensor], list[int]]:
    """The pool as the paper has it afterwards, and the blocks left by layer. `units`: slots of blocks, and whether they stay."""
    found, left = rank.numbers(), []
    flat = [block for unit in units for block in unit]
    fixed = {i for i, (_, is_fixed) in enumerate(flat) if is_fixed}
    for layer in range(LAYERS):
        keys, values = rank.k_buffer[layer], rank.v_buffer[layer]
        trace = naive_joint.Trace()
        blocks = [
            [(keys[slots].flatten().tolist(), values[slots].flatten().tolist()) for slots, _ in unit] for unit in units
        ]
        shared = naive_joint.fast_fusion(blocks, threshold, trace, fixed)
        assume(all(abs(each - threshold) > 1e-3 for each in trace.compared))
        left.append(len(shared))
        for block in shared:
            for member in block.members:
                if len(block.members) == 1 or member in fixed:
                    continue
                slots = flat[member][0]
                for buffer, direction, target in (
                    (keys, block.keys, found[layer]),
                    (values, block.values, found[LAYERS + layer]),
                ):
                    norm = math.sqrt(math.fsum(x * x for x in buffer[slots].flatten().tolist()))
                    target[slots] = torch.tensor([norm * x for x in direction]).view(buffer[slots].shape)
    return found, left


def blocks_of(slots: list[int], start: int, end: int, block: int, cached: int) -> list[tuple[list[int], bool]]:
    return [(slots[at : at + block], at < cached) for at in range(start, end - block + 1, block)]


def assert_equal(rank: Rank, expected: Sequence[Tensor]) -> None:
    for found, wanted in zip((*rank.k_buffer, *rank.v_buffer), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@given(
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    noise=st.sampled_from((0.05, 0.3)),
    cached_chunks=st.integers(0, 3),
    block=st.integers(1, 4),
    threshold=st.sampled_from((0.8, 0.95)),
)
def test_chunks_of_a_prompt(
    lens: list[int], seed: int, noise: float, cached_chunks: int, block: int, threshold: float
) -> None:
    """The slots of the request's own blocks become what the paper says; all others keep every bit."""
    rank = Rank(seed, noise=noise)
    cached = 1 + sum(lens[:cached_chunks]) if cached_chunks else 0
    req = rank.add(lens, JointRequest(threshold=threshold, block=block), cached=cached)
    spans, slots = state(req).spans.spans, rank.slots(req)  # type: ignore[union-attr]
    units = [blocks_of(slots, span.start, span.end, block, cached) for span in spans]
    ordered = sorted((unit for unit in units if unit), key=lambda unit: (not unit[0][1], len(unit)))
    expected, left = slow(rank, ordered, threshold)
    before = rank.numbers()
    rank.encode(req)
    assert_equal(rank, expected)
    own = [
        slot
        for span in spans
        for slots_, kept in blocks_of(slots, span.start, span.end, block, cached)
        if not kept
        for slot in slots_
    ]
    for now, was in zip(rank.numbers(), before, strict=True):
        now[own] = was[own]
        assert torch.equal(now, was)
    report = state(req).joint
    assert report is not None
    assert (report.requests, report.blocks, list(report.shared)) == (1, sum(map(len, units)), left)
    assert report.exact == sum(kept for unit in units for _, kept in unit)
    assert report.thresholds == (threshold if len(ordered) > 1 else None,) * LAYERS


@given(
    seed=st.integers(0, 999),
    lens=st.lists(st.integers(2, 8), min_size=2, max_size=5),
    noise=st.sampled_from((0.05, 0.3)),
    cached=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
@example(seed=0, lens=[5, 5], noise=0.05, cached=[3, 0, 0, 0, 0])
def test_requests_of_a_batch(seed: int, lens: list[int], noise: float, cached: list[int]) -> None:
    """Units are whole prompts, those with matched blocks first, then the shorter ones. A block whose first token was matched
    keeps every bit, the tokens after that too."""
    rank = Rank(seed, noise=noise)
    reqs = [rank.add([length], BATCH, cached=num) for length, num in zip(lens, cached, strict=False)]
    units = [blocks_of(rank.slots(req), 0, len(req.origin_input_ids), 2, req.kv.cache_protected_len) for req in reqs]
    ordered = sorted(units, key=lambda unit: (not unit[0][1], len(unit)))
    expected, left = slow(rank, ordered, 0.9)
    before, kept = rank.numbers(), [slot for unit in units for slots, is_fixed in unit if is_fixed for slot in slots]
    rank.encode(*reqs)
    assert_equal(rank, expected)
    assert all(torch.equal(now[kept], was[kept]) for now, was in zip(rank.numbers(), before, strict=True))
    assert {state(req).joint for req in reqs} == {state(reqs[0]).joint}
    report = state(reqs[0]).joint
    assert report is not None
    assert (report.requests, report.units, list(report.shared)) == (len(lens), len(lens), left)


def test_wishes_and_tenants_are_kept_apart() -> None:
    """Equal blocks of another tenant, with another threshold, or of a request that asks for its own chunks only."""
    rank = Rank(0, noise=0.0)
    wishes = [(BATCH, "a"), (BATCH, "b"), (JointRequest(threshold=0.8, block=2, over="batch"), "a"), (None, "a")]
    wishes += [(JointRequest(threshold=0.9, block=2), "a")] * 2
    reqs = [rank.add([8], wish, extra_key=key) for wish, key in wishes]
    rank.encode(*reqs)
    reports = [state(req).joint for req in reqs]
    assert reports.pop(3) is None
    assert [report.shared for report in reports if report] == [(5, 5)] * 3 + [(4, 4)] * 2
    salted = rank.add([8], BATCH, extra_key="a")
    salted.cache_salt = "salt"
    rank.encode(reqs[0], salted)
    assert (report := state(salted).joint) is not None
    assert report.shared == (5, 5)
    other = rank.add([8], BATCH, extra_key="a")
    rank.encode(reqs[0], other)
    report = state(other).joint
    assert report is not None
    assert report.shared < (10, 10)


def test_batch_of_too_many_blocks_is_fused_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five prompts with five blocks each two may be compared."""
    monkeypatch.setattr(slots, "MAX_JOINT_BLOCKS", 12)
    rank = Rank(0, noise=0.0)
    reqs = [rank.add([8], BATCH) for _ in range(5)]
    rank.encode(*reqs)
    assert [report.requests for req in reqs if (report := state(req).joint)] == [2, 2, 2, 2, 1]


def test_matched_blocks_of_two_requests_count_once() -> None:
    """The tree holds them once already; what one of them has computed may join them, and they keep every bit."""
    rank = Rank(1, noise=0.0)
    first = rank.add([7], None)
    reqs = [rank.add([7, 8], BATCH, cached=8, like=first) for _ in range(2)]
    before = rank.numbers()
    rank.encode(*reqs)
    report = state(reqs[0]).joint
    assert report is not None
    assert (report.blocks, report.exact) == (4 + 4 + 4, 4)
    kept = rank.slots(first)[:8]
    assert all(torch.equal(now[kept], was[kept]) for now, was in zip(rank.numbers(), before, strict=True))


def test_soak_notices_a_write_to_a_slot_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check, on an encoder that takes no block for fixed."""
    rank = Rank(1)
    first = rank.add([7], None)
    req = rank.add([7, 8], JointRequest(threshold=0.5, block=2), cached=8, like=first)
    node = SimpleNamespace(value=torch.tensor(rank.slots(first)[:8]), children={})
    batch: Any = SimpleNamespace(reqs=[req], prefix_lens=[8], extend_lens=[9])
    batch.tree_cache = SimpleNamespace(root_node=SimpleNamespace(children={0: node}))
    checked_encode(rank.encoder, batch)
    assert (report := state(req).joint) is not None
    assert min(report.shared) < report.blocks
    units = SlotEncoder._units

    def unfixed(*args: Any) -> slots.Units:
        found = units(*args)
        return replace(found, fixed=torch.zeros_like(found.fixed))

    monkeypatch.setattr(SlotEncoder, "_units", unfixed)
    with pytest.raises(AssertionError, match=r"of 8 slots of the tree \{"):
        checked_encode(rank.encoder, batch)


def test_only_the_last_piece_encodes() -> None:
    """What comes later would be computed over approximate KV, and the pieces before are compared with the rest."""
    rank = Rank(2, noise=0.05)
    req = rank.add([8, 8], JointRequest(threshold=0.5, block=4))
    before = rank.numbers()
    rank.encode(req, end=12)
    assert all(map(torch.equal, rank.numbers(), before))
    assert (state(req).joint, rank.encoder.stats()["failed"]) == (None, 0)
    rank.encode(req)
    assert state(req).joint is not None
    assert not torch.equal(rank.k_buffer[0], before[0])


@pytest.mark.parametrize("ratio", [1.2, 1.6, 2.5])
def test_ratio_is_reached(ratio: float) -> None:
    """With blocks of many similarities the thresholds give what is asked for, in all layers together."""
    rank = Rank(3, noise=0.7)
    req = rank.add([40] * 3, JointRequest(ratio=ratio, block=1))
    rank.encode(req)
    report = state(req).joint
    assert report is not None
    compression = LAYERS * report.blocks / sum(report.shared)
    assert abs(math.log(compression / ratio)) < math.log(NEAR)
    assert all(each is None or 0 < each < 1 for each in report.thresholds)


def test_ratio_that_blocks_do_not_give() -> None:
    """Each of the second chunk's blocks joins one of the first's at most, so two are never three."""
    rank = Rank(4, noise=0.01)
    req = rank.add([8, 8], JointRequest(ratio=3, block=2))
    rank.encode(req)
    report = state(req).joint
    assert report is not None
    assert sum(report.shared) >= LAYERS * report.blocks / 2


@pytest.mark.parametrize("wish", [JointRequest(ratio=2, block=4), JointRequest(threshold=0.5, block=4)], ids=str)
@pytest.mark.parametrize("lens", [[], [3], [3, 3], [8]], ids=str)
def test_nothing_to_compare(lens: list[int], wish: JointRequest) -> None:
    """No chunk, or none but one with a whole block."""
    rank = Rank(5, noise=0.0)
    before = rank.numbers()
    req = rank.add(lens, wish)
    before = rank.numbers()
    rank.encode(req)
    report = state(req).joint
    assert report is not None
    assert report.shared == (report.blocks,) * LAYERS
    assert report.thresholds == (None,) * LAYERS
    assert rank.encoder.stats()["thresholds"] is None
    assert all(map(torch.equal, rank.numbers(), before))


def test_error_leaves_kv_as_it_was_computed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, when others are compared already; the batch's other requests have theirs encoded."""
    rank = Rank(6, noise=0.0)
    bad, good = (
        rank.add([8, 8], JointRequest(threshold=0.5, block=3)),
        rank.add([8, 8], JointRequest(threshold=0.5, block=4)),
    )
    before, fused = rank.numbers(), SlotEncoder._fused

    def failing(encoder: SlotEncoder, layer: int, units: Any, threshold: float) -> Any:
        if layer == LAYERS - 1 and units.block == 3:
            raise RuntimeError("no memory")
        return fused(encoder, layer, units, threshold)

    monkeypatch.setattr(SlotEncoder, "_fused", failing)
    with caplog.at_level(logging.ERROR):
        rank.encode(bad, good)
    assert "joint encoding of 1 request(s) failed" in caplog.text
    assert (state(bad).joint, state(good).joint is None) == (None, False)
    kept = rank.slots(bad)
    assert all(torch.equal(now[kept], was[kept]) for now, was in zip(rank.numbers(), before, strict=True))
    stats = rank.encoder.stats()
    assert (stats["requests"], stats["failed"], stats["blocks"], stats["shared"]) == (1, 1, 8, 4)
    assert stats["thresholds"] == (0.5, 0.5)


def test_what_takes_too_long_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody waits."""
    rank = Rank(0, noise=0.0)
    req = rank.add([8, 8], JointRequest(threshold=0.5, block=2))
    before = rank.numbers()
    monkeypatch.setattr(slots, "MAX_S", -1.0)
    rank.encode(req)
    assert all(map(torch.equal, before, rank.numbers()))
    assert (state(req).joint, rank.encoder.stats()["failed"]) == (None, 1)
