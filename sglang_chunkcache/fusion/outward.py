"""What a chunk's tokens attend to before it, in the calibrated heads: read as they are computed.

    prefill   head | A | B | question    at a calibrated head's layer: attention of A's tokens to
                                         the head, of B's to A
    pass      head | A moved | C a gap   the same of C's tokens, to A
    keep      the chunks' nodes have it, and so have their variants in the store

The queries are there and the keys are in the pool, so it takes one head's attention once more,
where a pass over a stored chunk takes half of its prefill. A chunk that was computed before the
calibration has none, and `critical` compares all its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from radix_ext import Span
from sglang_chunkcache.attention.masked import SequenceAttention
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.store import Offload
from sglang_chunkcache.scheduler.node import facts, state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.fusion.move import Move

logger = logging.getLogger(__name__)


Measure = Callable[..., None]
"""Called in each layer of a forward: SGLang's layer, the queries, [n, num_heads * head_dim] or by
heads, and, if they are not in the pool yet, the keys."""
BLOCK = 512
"""Tokens that attend at a time, each over the keys up to the last one's."""


@dataclass(eq=False)
class OutwardRows:
    """Of one request, piece by piece as it is computed."""

    heads: tuple[Head, ...]
    pieces: list[tuple[int, Offload]] = field(default_factory=list)
    """First position, and [n] float32 from there on."""

    def of(self, start: int, end: int) -> Tensor | None:
        """[end - start] float32, CPU, own memory. None: not all is computed, or has arrived."""
        parts, at = [], start
        # A prefill in pieces computes a chunk in several forwards, in order of position.
        for first, offload in self.pieces:
            if first <= at < end and offload.is_done():
                part = offload.read()[0][at - first : end - first]
                parts.append(part)
                at += len(part)
        return torch.cat(parts) if at >= end > start else None


class _Job(NamedTuple):
    """Adjacent tokens of one request, all of which are computed now."""

    rows: OutwardRows
    """Which learn of them."""
    start: int
    part: slice
    """Of the queries."""
    cached: Tensor
    """[m] int64: slots of the first m positions, whose keys are in the pool by then."""
    here: range
    """From the first to the last chunk token, counted from `start`."""
    before: Tensor
    """[n] int64: where each token's chunk starts; 0: it is in none."""
    first_chunk: int
    """Where the first chunk of the prompt starts."""
    counted: Tensor
    """[m] float32: 1 for keys of chunks."""
    masses: Tensor
    """[n] float32, on the device; added to."""


class OutwardWatch:
    """Of one rank. Reads the model and the calibrated heads of a `FusionPass`. Waits for nothing,
    harms no request."""

    def __init__(self, fusion_pass: Any) -> None:
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

            def forward_extend(
                q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any
            ) -> Any:
                # `k` as it comes: FlashInfer's ragged path writes it into the pool after attention.
                measure(layer, q, k)
                return forward(q, k, v, layer, *args, **kwargs)

            # An attribute of the instance, which hides the class's method until it is deleted.
            backend.forward_extend = forward_extend
            try:
                yield
            finally:
                del backend.forward_extend

    def watch_pass(
        self, work: Iterable[tuple[Move, Tensor]]
    ) -> AbstractContextManager[Measure | None]:
        """Around the pass over these moves at these positions, ascending: the `outward` of moves
        with chunks among their gaps. Yields what the pass calls in each layer, if anything, once
        its keys are in the pool."""
        return self._measuring(self._gaps(work))

    def tell(self, req: Req, nodes: Iterable[TreeNode]) -> None:
        """The request's chunk nodes are in the tree: they have what was measured of them."""
        rows: OutwardRows | None = state(req).outward
        if rows is None or rows.heads != self._heads:
            return
        for node in nodes:
            if facts(node).outward is None:
                facts(node).outward = rows.of(facts(node).start, facts(node).start + len(node.key))

    @contextmanager
    def _measuring(self, found: Iterable[_Job]) -> Iterator[Measure | None]:
        """What was measured is told if the forward ended, and through all the heads' layers."""
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
                # For good: answers are right without it, and each batch would log a traceback.
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
        heads: tuple[Head, ...] = self._pass.calibration.heads
        return heads

    def _prefilled(self, batch: ScheduleBatch) -> Iterator[_Job]:
        row = 0
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            spans = state(req).spans
            # an audit leaves no nodes
            chunks = () if spans is None or spans.is_audit else spans.spans
            if any(span.start < start + length and start < span.end for span in chunks):
                # Calibrated between two pieces of a prompt: masses of other heads do not go on.
                if state(req).outward is None or state(req).outward.heads != self._heads:
                    state(req).outward = OutwardRows(self._heads)
                # Up to `start` the keys are in the pool; the forward's own come as `k`.
                slots = self._pass.runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                cached = slots[:start].long()
                yield self._job(state(req).outward, chunks, start, row, length, cached)
            row += length

    def _gaps(self, work: Iterable[tuple[Move, Tensor]]) -> Iterator[_Job]:
        row = 0
        for move, positions in work:
            gaps = _merged(
                (piece.start, piece.end)
                for piece in move.plan.pieces
                if piece.source is None and piece.span is not None
            )
            rows = OutwardRows(self._heads)
            move.outward = rows if gaps else None
            for start, end in gaps:
                # All tokens of a gap run, so they are adjacent rows of the pass.
                first = row + int(torch.searchsorted(positions, start))
                yield self._job(rows, move.spans, start, first, end - start, move.slots[:end])
            row += len(positions)

    def _job(
        self,
        rows: OutwardRows,
        spans: Sequence[Span],
        start: int,
        first: int,
        length: int,
        cached: Tensor,
    ) -> _Job:
        device, end = self._pass.runner.device, start + length
        borders = torch.tensor([(span.start, span.end) for span in spans])
        starts, ends = borders[:, 0].contiguous(), borders[:, 1]
        places = torch.arange(end)
        number = torch.searchsorted(starts, places, right=True) - 1
        in_chunk = (number >= 0) & (places < ends[number])
        before = torch.where(in_chunk, starts[number], 0)[start:]
        return _Job(
            rows,
            start,
            slice(first, first + length),
            cached,
            range(max(0, spans[0].start - start), min(length, spans[-1].end - start)),
            upload(before, device),
            spans[0].start,
            upload(in_chunk.float(), device),
            torch.zeros(length, device=device),
        )

    def _measure(self, jobs: Iterable[_Job], layer: Any, q: Tensor, k: Tensor | None) -> None:
        heads = [head for at, head in self._heads if at == layer.layer_id]
        if not heads:
            return
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        fresh = None if k is None else k.view(-1, layer.tp_k_head_num, layer.head_dim)
        # By the getter, which waits for the layer's loads beside the forward.
        pool = self._pass.runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
        for job in jobs:
            for head in heads:
                kv_head = head * layer.tp_k_head_num // layer.tp_q_head_num
                seen = pool[job.cached, kv_head]
                if fresh is not None:
                    seen = torch.cat([seen, fresh[job.part, kv_head]])
                # The mean over heads, as the calibration has ranked tokens by (`Place._chunks`).
                masses = _masses(job, queries[job.part, head], seen, layer.scaling)
                job.masses.add_(masses / len(self._heads))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch are one."""
    areas: list[tuple[int, int]] = []
    for start, end in spans:
        if areas and areas[-1][1] == start:
            start = areas.pop()[0]
        areas.append((start, end))
    return areas


def _masses(job: _Job, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[n]: attention of the piece's chunk tokens to the chunks before theirs, to the text before
    the first chunk; else 0.

    One sum for each block of tokens, however many chunks they are of. Equals
    tests/reference/outward.py.
    """
    found = torch.zeros_like(job.masses)
    places = torch.arange(len(keys), device=keys.device)
    for first in range(job.here.start, job.here.stop, BLOCK):
        last = min(first + BLOCK, job.here.stop)
        seen = places[: job.start + last]
        query, key = queries[first:last, None], keys[: len(seen), None]
        attention = SequenceAttention(query, key, seen[job.start + first :], seen, scale)
        for start, end, weights in attention.weights():
            rows = slice(first + start, first + end)
            before = job.before[rows]
            weights[0].masked_fill_(seen >= before[:, None], 0)
            # What is before the first chunk is in none.
            found[rows] = torch.where(
                before == job.first_chunk, weights[0].sum(1), weights[0] @ job.counted[: len(seen)]
            )
    return found
