"""What each chunk token attends to before its chunk, in the calibrated heads: read while SGLang prefills the prompt.

    prefill   head | A | B | question       at a calibrated head's layer: attention of A's tokens to the head, of B's to A
    keep      the chunks' nodes have it, and so have their variants in the store

The queries are there and the keys are in the pool, so it takes one head's attention once more, a thousandth of the prefill, where
a pass over a stored chunk takes half of its prefill. A chunk that SGLang did not prefill (computed in our pass, or before the
calibration) has none, and `critical` compares all its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

    from sglang_chunkcache.fusion.fill import FusionPass

logger = logging.getLogger(__name__)


def attended(attention: SequenceAttention, parts: Sequence[tuple[int, int]]) -> Tensor:
    """[num_heads, n] float32: each query's attention to the keys of `parts`, half-open and disjoint."""
    blocks = (weights for _, _, weights in attention.weights())
    return torch.cat([torch.stack([block[:, :, a:b].sum(-1) for a, b in parts]).sum(0) for block in blocks], dim=1)


@dataclass(eq=False)
class OutwardRows:
    """Of one request, from its prefill's pieces."""

    heads: tuple[Head, ...]
    pieces: list[tuple[int, Offload]] = field(default_factory=list)
    """First position, and [n] float32 from there on."""

    def of(self, start: int, end: int) -> Tensor | None:
        """[end - start] float32, CPU, own memory. None: not all of it was prefilled, or has arrived."""
        parts, at = [], start
        for first, offload in self.pieces:
            if first <= at < end and offload.is_done():
                part = offload.read()[0][at - first : end - first]
                parts.append(part)
                at += len(part)
        return torch.cat(parts) if at >= end > start else None


@dataclass(eq=False)
class _Job:
    """One request's part of the batch."""

    req: Req
    spans: Sequence[Span]
    first_row: int
    start: int
    masses: Tensor
    """[n] float32, on the device, the piece's tokens."""


class OutwardWatch:
    """Of one rank: of the model that the pass runs, in the heads that it is calibrated with."""

    def __init__(self, fusion_pass: FusionPass) -> None:
        self._pass = fusion_pass
        self._has_failed = False
        self.num_measured = 0
        """Prefilled tokens of requests with chunks."""

    @contextmanager
    def watch(self, batch: ScheduleBatch) -> Iterator[None]:
        """Around the forward of an extend: its requests' `RequestState.outward` grows. Waits for nothing, harms no request."""
        jobs = self._jobs(batch) if self._heads and not self._has_failed else []
        if not jobs:
            yield
            return
        backend = self._pass.runner.attn_backend
        forward = backend.forward_extend
        layers = {layer for layer, _ in self._heads}

        def measure(q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._measure(jobs, q, k, layer)
                layers.discard(layer.layer_id)
            except Exception:
                self._has_failed = True
                jobs.clear()
                logger.exception("chunk cache: what chunks attend to is not measured any more")
            return forward(q, k, v, layer, *args, **kwargs)

        backend.forward_extend = measure
        try:
            yield
        finally:
            del backend.forward_extend
        if layers:  # a captured graph calls no attention of ours: what was not measured is not told
            return
        for job in jobs:
            state(job.req).outward.pieces.append((job.start, Offload([job.masses])))
            self.num_measured += len(job.masses)

    def tell(self, req: Req, nodes: Iterable[TreeNode]) -> None:
        """The request's chunk nodes are in the tree: they have what was measured of them."""
        rows: OutwardRows | None = state(req).outward
        if rows is None or rows.heads != self._heads:
            return
        for node in nodes:
            if facts(node).outward is None:
                facts(node).outward = rows.of(facts(node).start, facts(node).start + len(node.key))

    # Private, in order of use

    @property
    def _heads(self) -> tuple[Head, ...]:
        return self._pass.calibration.heads

    def _jobs(self, batch: ScheduleBatch) -> list[_Job]:
        jobs, row = [], 0
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            spans = state(req).spans
            if spans is not None and any(span.start < start + length and start < span.end for span in spans.spans):
                if state(req).outward is None or state(req).outward.heads != self._heads:
                    state(req).outward = OutwardRows(self._heads)
                masses = torch.zeros(length, device=self._pass.runner.device)
                jobs.append(_Job(req, spans.spans, row, start, masses))
            row += length
        return jobs

    def _measure(self, jobs: Iterable[_Job], q: Tensor, k: Tensor, layer: Any) -> None:
        heads = [head for at, head in self._heads if at == layer.layer_id]
        if not heads:
            return
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        keys = k.view(-1, layer.tp_k_head_num, layer.head_dim)
        pool = self._pass.runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
        rows = self._pass.runner.req_to_token_pool.req_to_token
        for job in jobs:
            part = slice(job.first_row, job.first_row + len(job.masses))
            cached = rows[job.req.kv.req_pool_idx, : job.start].long()
            for head in heads:
                kv_head = head * layer.tp_k_head_num // layer.tp_q_head_num
                seen = torch.cat([pool[cached, kv_head], keys[part, kv_head]])
                masses = _masses(job, queries[part, head], seen, layer.scaling)
                job.masses += masses / len(self._heads)


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
