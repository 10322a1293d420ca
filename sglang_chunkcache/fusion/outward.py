"""What each chunk token attends to before its chunk, in the calibrated heads: read while the prompt is computed.

    prefill   head | A | B | question       at a calibrated head's layer: attention of A's tokens to the head, of B's to A
    pass      head | A moved | C a gap      the same of C's tokens, to A
    keep      the chunks' nodes have it, and so have their variants in the store

The queries are there and the keys are in the pool, so it takes one head's attention once more, where a pass over a stored chunk
takes half of its prefill. A chunk that was computed before the calibration has none, and `critical` compares all its tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from radix_ext import Span
from sglang_chunkcache.attention.masked import SequenceAttention
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.store import Offload
from sglang_chunkcache.scheduler.node import facts, state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.fusion.calibration import Calibration
    from sglang_chunkcache.fusion.move import Move

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """The pass: its model, SGLang's ModelRunner, and what that is calibrated with."""

    runner: Any
    calibration: Calibration


class Measure(Protocol):
    """Called in each layer of a forward: SGLang's layer, the queries, [n, num_heads * head_dim] or by heads, and keys that are
    not in the pool yet."""

    def __call__(self, layer: Any, q: Tensor, k: Tensor | None = None) -> None: ...


def attended(attention: SequenceAttention, parts: Sequence[tuple[int, int]]) -> Tensor:
    """[num_heads, n] float32: each query's attention to the keys of `parts`, half-open and disjoint."""
    blocks = (weights for _, _, weights in attention.weights())
    return torch.cat([torch.stack([block[:, :, a:b].sum(-1) for a, b in parts]).sum(0) for block in blocks], dim=1)


@dataclass(eq=False)
class OutwardRows:
    """Of one request, piece by piece as it is computed."""

    heads: tuple[Head, ...]
    pieces: list[tuple[int, Offload]] = field(default_factory=list)
    """First position, and [n] float32 from there on."""

    def of(self, start: int, end: int) -> Tensor | None:
        """[end - start] float32, CPU, own memory. None: not all of it was computed, or has arrived."""
        parts, at = [], start
        for first, offload in self.pieces:
            if first <= at < end and offload.is_done():
                part = offload.read()[0][at - first : end - first]
                parts.append(part)
                at += len(part)
        return torch.cat(parts) if at >= end > start else None


@dataclass(eq=False)
class _Job:
    """Adjacent tokens of one request, all of which are computed now."""

    rows: OutwardRows
    """Which learn of them."""
    spans: Sequence[Span]
    start: int
    part: slice
    """Of the queries."""
    cached: Tensor
    """[m] int64: slots of the request's first m positions, whose keys are in the pool when the layer attends."""
    masses: Tensor
    """[n] float32, on the device."""


class OutwardWatch:
    """Of one rank: of the model that the pass runs, in the heads that it is calibrated with. Waits for nothing, harms no
    request."""

    def __init__(self, fusion_pass: Watched) -> None:
        self._pass = fusion_pass
        self._has_failed = False
        self.num_measured = 0
        """Computed tokens of chunks, with what stands between in a prefill."""

    @contextmanager
    def watch(self, batch: ScheduleBatch) -> Iterator[None]:
        """Around the forward of an extend: its requests' `RequestState.outward` grows."""
        with self._measuring(self._prefilled(batch)) as measure:
            if measure is None:
                yield
                return
            backend = self._pass.runner.attn_backend
            forward = backend.forward_extend

            def forward_extend(q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
                measure(layer, q, k)
                return forward(q, k, v, layer, *args, **kwargs)

            backend.forward_extend = forward_extend
            try:
                yield
            finally:
                del backend.forward_extend

    @contextmanager
    def watch_pass(self, work: Iterable[tuple[Move, Sequence[int]]]) -> Iterator[Measure | None]:
        """Around the pass over these moves at these positions, ascending: the `outward` of moves with chunks among their gaps.

        Yields what the pass calls in each layer once its keys are in the pool. None: there is nothing to measure.
        """
        with self._measuring(self._gaps(work)) as measure:
            yield measure

    def tell(self, req: Req, nodes: Iterable[TreeNode]) -> None:
        """The request's chunk nodes are in the tree: they have what was measured of them."""
        rows: OutwardRows | None = state(req).outward
        if rows is None or rows.heads != self._heads:
            return
        for node in nodes:
            if facts(node).outward is None:
                facts(node).outward = rows.of(facts(node).start, facts(node).start + len(node.key))

    # Private, in order of use

    @contextmanager
    def _measuring(self, found: Iterable[_Job]) -> Iterator[Measure | None]:
        """What was measured is told if the forward came to its end, and through each of the heads' layers."""
        jobs = list(found) if self._heads and not self._has_failed else []
        if not jobs:
            yield None
            return
        layers = {layer for layer, _ in self._heads}

        def measure(layer: Any, q: Tensor, k: Tensor | None = None) -> None:
            try:
                self._measure(jobs, layer, q, k)
                layers.discard(layer.layer_id)
            except Exception:
                self._has_failed = True
                jobs.clear()
                logger.exception("chunk cache: what chunks attend to is not measured any more")

        yield measure
        if layers:  # a captured graph calls no attention of ours: what was not measured is not told
            return
        for job in jobs:
            job.rows.pieces.append((job.start, Offload([job.masses])))
            self.num_measured += len(job.masses)

    @property
    def _heads(self) -> tuple[Head, ...]:
        return self._pass.calibration.heads

    def _prefilled(self, batch: ScheduleBatch) -> Iterator[_Job]:
        row = 0
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            spans = state(req).spans
            chunks = () if spans is None or spans.is_audit else spans.spans  # an audit leaves no nodes
            if any(span.start < start + length and start < span.end for span in chunks):
                if state(req).outward is None or state(req).outward.heads != self._heads:
                    state(req).outward = OutwardRows(self._heads)
                slots = self._pass.runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                yield self._job(state(req).outward, chunks, start, row, length, slots[:start].long())
            row += length

    def _gaps(self, work: Iterable[tuple[Move, Sequence[int]]]) -> Iterator[_Job]:
        row = 0
        for move, positions in work:
            gaps = [piece for piece in move.plan.pieces if piece.source is None and piece.span is not None]
            move.outward = OutwardRows(self._heads) if gaps else None
            for gap in gaps:
                assert move.outward is not None
                first = row + bisect_left(positions, gap.start)
                cached = move.slots[: gap.end]
                yield self._job(move.outward, move.spans, gap.start, first, gap.end - gap.start, cached)
            row += len(positions)

    def _job(
        self, rows: OutwardRows, spans: Sequence[Span], start: int, first: int, length: int, cached: Tensor
    ) -> _Job:
        masses = torch.zeros(length, device=self._pass.runner.device)
        return _Job(rows, spans, start, slice(first, first + length), cached, masses)

    def _measure(self, jobs: Iterable[_Job], layer: Any, q: Tensor, k: Tensor | None) -> None:
        heads = [head for at, head in self._heads if at == layer.layer_id]
        if not heads:
            return
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        fresh = None if k is None else k.view(-1, layer.tp_k_head_num, layer.head_dim)
        pool = self._pass.runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
        for job in jobs:
            for head in heads:
                kv_head = head * layer.tp_k_head_num // layer.tp_q_head_num
                seen = pool[job.cached, kv_head]
                if fresh is not None:
                    seen = torch.cat([seen, fresh[job.part, kv_head]])
                job.masses += _masses(job, queries[job.part, head], seen, layer.scaling) / len(self._heads)


def _masses(job: _Job, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[n]: attention of the piece's chunk tokens to the chunks before theirs, to the text before the first chunk; else 0."""
    found = torch.zeros_like(job.masses)
    spans = [(span.start, span.end) for span in job.spans]
    for number, span in enumerate(spans):
        start, end = max(span[0], job.start), min(span[1], job.start + len(found))
        if start < end:
            piece = slice(start - job.start, end - job.start)
            positions = torch.arange(end, device=keys.device)
            attention = SequenceAttention(queries[piece, None], keys[:end, None], positions[start:], positions, scale)
            found[piece] = attended(attention, spans[:number] or [(0, span[0])])[0]
    return found
