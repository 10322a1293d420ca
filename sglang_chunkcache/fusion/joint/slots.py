"""Joint encoding of running requests, in their slots: similar blocks are fused after the prefill and copied back.

That is how the paper measured accuracy (6.1 to 6.3).

    CFF   over "chunks"   units are a prompt's chunks                                  each request alone
    BFF   over "batch"    units are the prompts whose prefill ended with one forward   of one tenant, with one wish

    head | A: block block tail | B: block block | question            what is between the blocks stays as it is

No memory is freed: each block keeps its slots, fused ones hold the shared direction at their own norms. Decoding reads that; the
first token was computed before. A block of which the tree owns a slot is fixed: others join it, it is never written. What is
written is the request's own, and the tree never gets it (`RequestSpans.is_private`).

Keys are compared as they are in the pool, rotated, as in the paper.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.fusion.joint.drift import logit_scale
from sglang_chunkcache.fusion.joint.encoding import decode, encode
from sglang_chunkcache.fusion.joint.expected import KnownChunks, LayerKv
from sglang_chunkcache.fusion.joint.fast_fusion import NEVER, fast_fusion
from sglang_chunkcache.fusion.joint.fusion_rate import unit_similarities
from sglang_chunkcache.fusion.joint.thresholds import LayerStatistics, ThresholdController
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import JointReport
from sglang_chunkcache.wire.spans import MAX_JOINT_BLOCKS, JointRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.fusion.joint.metrics import JointMetrics

logger = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""Thresholds that are tried for a ratio. Each takes the comparison of all blocks once."""
NEAR = 1.05
"""A ratio off by less is what was asked for."""
MAX_S = 2.0
"""What comparing may take: everybody waits. Looked at before each layer."""
MAX_PAIRS = 1 << 16
"""Similarities of a layer that are kept of those of all pairs, at equal distances."""


class Write(NamedTuple):
    """What a layer's slots become."""

    layer: int
    slots: Tensor
    """[num_tokens] int64."""
    keys: Tensor
    """[num_tokens, num_kv_heads, head_dim], the pool's dtype."""
    values: Tensor


@dataclass(frozen=True, eq=False)
class Units:
    """Blocks of several units, one unit after the other."""

    slots: Tensor
    """[num_blocks * block] int64, on the pool's device. Empty: they have none, and are compared alone."""
    lens: tuple[int, ...]
    """Blocks of each unit, at least 1."""
    fixed: Tensor
    """[num_blocks] bool, on the pool's device."""
    block: int
    """Tokens."""
    read: LayerKv
    """Of all blocks."""

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [num_blocks, size]."""
        keys, values = (each.reshape(sum(self.lens), -1) for each in self.read(layer))
        return keys, values


class SlotEncoder:
    """Of one rank, a `scheduler.encoder.Encoder`.

    Args:
        rows: SGLang's ReqToTokenPool.
        pool: its KV pool, `k_buffer` and `v_buffer` by layer, [num_slots, num_kv_heads, head_dim].
        metrics: None: Prometheus is told nothing.
        known: what `explain` compares. None: nothing.
    """

    def __init__(
        self, rows: Any, pool: Any, metrics: JointMetrics | None = None, known: KnownChunks | None = None
    ) -> None:
        self._rows, self._pool, self._metrics, self._known = rows, pool, metrics, known
        self._counts = dict.fromkeys(("requests", "failed", "blocks", "shared"), 0)
        self._last_thresholds: tuple[float | None, ...] | None = None
        self._seconds = self._deadline = 0.0

    def encode(self, batch: ScheduleBatch) -> None:
        """Encode the batch's requests that asked for it and are prefilled. An error leaves their KV as it was computed.

        On CUDA it waits for the forward, whose blocks it compares.
        """
        for wish, ends in _groups(batch):
            try:
                report = self._encode(wish, ends)
            except Exception:  # the answer is as good without
                logger.exception("chunk cache: joint encoding of %d request(s) failed", len(ends))
                self._counts["failed"] += len(ends)
                continue
            for req, _ in ends:
                state(req).joint = report
            if any(each is not None for each in report.thresholds):
                self._last_thresholds = report.thresholds
            self._counts["requests"] += len(ends)
            self._counts["blocks"] += len(report.shared) * report.blocks
            self._counts["shared"] += sum(report.shared)
            self._seconds += report.ms / 1000
        if self._metrics is not None and self._metrics.is_due:
            self._metrics.show(self._counts)

    def explain(self, req: Req, exact: Tensor, cached: int) -> JointReport | None:
        """As `scheduler.encoder.Encoder`. Takes as long as encoding may."""
        spans = state(req).spans
        if self._known is None or spans is None or spans.joint is None or spans.joint.over == "batch":
            return None
        started = self._begin()
        try:
            if exact.is_cuda:
                torch.cuda.synchronize()  # a forward may be computing what the tree has already
            found = sorted(self._known.units(spans.joint, req, exact, cached), key=lambda unit: (not unit[1], unit[0]))
            lens = tuple(num for num, _, _ in found)
            fixed = torch.tensor([is_fixed for num, is_fixed, _ in found for _ in range(num)], dtype=torch.bool)

            def read(layer: int) -> tuple[Tensor, Tensor]:
                keys, values = (torch.cat(side) for side in zip(*(unit(layer) for *_, unit in found), strict=True))
                return keys, values

            units = Units(exact[:0], lens, fixed.to(exact.device), spans.joint.block, read)
            thresholds = self._thresholds(spans.joint, units)
            shared = [self._num_shared(layer, units, threshold) for layer, threshold in enumerate(thresholds)]
        except Exception:  # the request would be served
            logger.exception("chunk cache: joint encoding of a request is not explained")
            return None
        return _report(1, units, shared, thresholds, started)

    def stats(self) -> dict[str, Any]:
        """Requests and blocks since the start, blocks of all layers; by layer the thresholds of what was encoded last."""
        if self._metrics is not None:
            self._metrics.show(self._counts)
        return {**self._counts, "thresholds": self._last_thresholds, "seconds": round(self._seconds, 6)}

    # Private, in order of use

    def _encode(self, wish: JointRequest, ends: Sequence[tuple[Req, int]]) -> JointReport:
        if self._pool.k_buffer[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # else the forward would count as ours
        started = self._begin()
        units = self._units(wish, ends)
        thresholds = self._thresholds(wish, units)
        writes, shared = list[Write](), list[int]()
        for layer, threshold in enumerate(thresholds):
            write, num_shared = self._fused(layer, units, threshold)
            shared.append(num_shared)
            writes += [] if write is None else [write]
        for write in writes:  # only when all of it is there
            self._pool.k_buffer[write.layer][write.slots] = write.keys
            self._pool.v_buffer[write.layer][write.slots] = write.values
        return _report(len(ends), units, shared, thresholds, started)

    def _begin(self) -> float:
        started = time.perf_counter()
        self._deadline = started + MAX_S
        return started

    def _units(self, wish: JointRequest, ends: Sequence[tuple[Req, int]]) -> Units:
        """The units with a block, those with fixed blocks first, then by length (remark 4.1).

        Requests of a batch may have matched the same node: its blocks count once.
        """
        found: list[tuple[list[list[int]], list[bool]]] = []
        seen = set[tuple[int, ...]]()
        for req, end in ends:
            row = self._rows.req_to_token[req.kv.req_pool_idx, :end].tolist()
            for starts in _starts(wish, req, end):
                blocks, fixed = list[list[int]](), list[bool]()
                for start in starts:
                    slots, is_fixed = row[start : start + wish.block], start < req.kv.cache_protected_len
                    if is_fixed and tuple(slots) in seen:
                        continue
                    seen.update([tuple(slots)] if is_fixed else [])
                    blocks.append(slots)
                    fixed.append(is_fixed)
                found.append((blocks, fixed))
        ordered = sorted((unit for unit in found if unit[0]), key=lambda unit: (not any(unit[1]), len(unit[0])))
        pool, device = self._pool, self._pool.k_buffer[0].device
        flat = [slot for blocks, _ in ordered for block in blocks for slot in block]
        slots = torch.tensor(flat, dtype=torch.int64).to(device)
        return Units(
            slots,
            tuple(len(blocks) for blocks, _ in ordered),
            torch.tensor([each for _, fixed in ordered for each in fixed], dtype=torch.bool).to(device),
            wish.block,
            lambda layer: (pool.k_buffer[layer][slots], pool.v_buffer[layer][slots]),
        )

    def _thresholds(self, wish: JointRequest, units: Units) -> list[float]:
        """Of each layer. For a ratio those of a few rounds that came nearest: what was predicted is corrected by what fused."""
        num_layers = len(self._pool.k_buffer)
        if len(units.lens) < 2:
            return [NEVER] * num_layers
        if wish.threshold is not None:
            return [wish.threshold] * num_layers
        assert wish.ratio is not None
        controller = ThresholdController(
            [self._statistics(layer, units) for layer in range(num_layers)], units.lens, ratio=wish.ratio, drift=2
        )
        num_blocks, nearest, best = num_layers * sum(units.lens), math.inf, list[float]()
        for _ in range(MAX_ROUNDS):
            thresholds = controller.thresholds
            num_shared = sum(self._num_shared(layer, units, each) for layer, each in enumerate(thresholds))
            controller.observe(num_blocks, num_shared)
            off = abs(math.log(num_blocks / num_shared / wish.ratio))
            if off < nearest:
                nearest, best = off, thresholds
            if off < math.log(NEAR):
                break
        return best

    def _statistics(self, layer: int, units: Units) -> LayerStatistics:
        """NOTE: queries are not there, so all layers' count as equally long."""
        self._check_time()
        blocks, _ = units.blocks(layer)
        similarities = unit_similarities(blocks, units.lens)
        similarities = similarities[:: -(-len(similarities) // MAX_PAIRS)]
        norm = float(torch.linalg.vector_norm(blocks.float(), dim=1).max())
        return LayerStatistics(similarities, logit_scale(norm, 1.0, self._pool.k_buffer[layer].shape[-1]))

    def _num_shared(self, layer: int, units: Units, threshold: float) -> int:
        if threshold >= NEVER:
            return sum(units.lens)
        self._check_time()
        return len(fast_fusion(*units.blocks(layer), units.lens, threshold, fixed=units.fixed).leaders)

    def _fused(self, layer: int, units: Units, threshold: float) -> tuple[Write | None, int]:
        """What the layer's slots become, and how many blocks are left."""
        if threshold >= NEVER or not units.lens:
            return None, sum(units.lens)
        self._check_time()
        keys, values = units.read(layer)
        lens = [length * units.block for length in units.lens]
        fused = encode(keys, values, lens, block_size=units.block, threshold=threshold, fixed=units.fixed)
        changed = ((fused.references > 1)[fused.table] & ~units.fixed).repeat_interleave(units.block)
        if not changed.any():
            return None, len(fused.keys)
        keys, values = decode(fused)
        return Write(layer, units.slots[changed], keys[changed], values[changed]), len(fused.keys)

    def _check_time(self) -> None:
        if time.perf_counter() > self._deadline:
            raise TimeoutError(
                f"it takes more than {MAX_S:g} s: larger blocks or a threshold in place of a ratio are needed"
            )


def _report(
    num_requests: int, units: Units, shared: Sequence[int], thresholds: Sequence[float], started: float
) -> JointReport:
    return JointReport(
        requests=num_requests,
        units=len(units.lens),
        blocks=sum(units.lens),
        exact=int(units.fixed.sum()),
        shared=tuple(shared),
        thresholds=tuple(each if each < NEVER else None for each in thresholds),
        ms=round(1000 * (time.perf_counter() - started), 3),
    )


def _groups(batch: ScheduleBatch) -> Iterator[tuple[JointRequest, list[tuple[Req, int]]]]:
    """The batch's requests that asked for it and whose prefill ends here, with their lengths: what is compared together, in
    parts if that is too much."""
    together: defaultdict[Any, list[tuple[Req, int]]] = defaultdict(list)
    for req, start, num_tokens in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        spans, end = state(req).spans, start + num_tokens
        if spans is None or spans.joint is None or end < len(req.origin_input_ids) + len(req.output_ids):
            continue
        tenant = id(req) if spans.joint.over == "chunks" else (req.extra_key, req.cache_salt)
        together[spans.joint, tenant].append((req, end))
    for (wish, _), ends in together.items():
        group: list[tuple[Req, int]] = []
        num_blocks = 0
        for req, end in ends:
            num_own = sum(map(len, _starts(wish, req, end)))
            if group and num_blocks + num_own > MAX_JOINT_BLOCKS:
                yield wish, group
                group, num_blocks = [], 0
            group.append((req, end))
            num_blocks += num_own
        yield wish, group


def _starts(wish: JointRequest, req: Req, end: int) -> list[range]:
    """First positions of the blocks of the request's units."""
    spans = state(req).spans
    assert spans is not None
    return wish.units(spans.spans, end)
