"""Evidence for selectors, measured by passes that write nothing: the pool's bytes are the same
before and after.

    question    the question over moved KV, up to the last layer that is read
                -> which tokens it attends to
    deviation   the promised region, computed again up to the layer compared
                -> which tokens' KV is off
    scores      a chunk over its own KV, once per variant
                -> what the chunk attended to

Attention weights exist in float32 where they are read by token, piece by piece: those of the
question in the layers that are read, and of a chunk over itself for `Need.RECEIVED`. Masses on
whole chunks come from log-sum-exps. All heads are on this rank: fused mode refuses others.

All of it stays on the device, where tokens are chosen; scores travel with the chunk's KV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.attention.lse import log_sum_exp
from sglang_chunkcache.attention.masked import Observer, SequenceAttention, StopPass
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.recompute import run_pass
from sglang_chunkcache.fusion.selectors.base import positions_in
from sglang_chunkcache.fusion.store import ChunkScores

Head = tuple[int, int]
"""(layer, head of it), both from 0."""


@dataclass(frozen=True)
class QuestionProbe:
    """A request's question over the KV before it.

    token_ids, positions: [n] int64, the question's, positions ascending. kv_slots, kv_positions:
    [m] int64, the KV it may attend to: the exact prefix and what was moved, without gaps. chunks:
    `[start, end)` of each moved chunk, ascending. end: length of the promised region; chunks end
    within it. layers: from 0, those whose attention counts, summed; None: the last. in_all_layers:
    chunks are compared in every layer (focus).
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    kv_positions: Tensor
    chunks: tuple[tuple[int, int], ...]
    end: int
    layers: range | None = None
    in_all_layers: bool = False


@dataclass(frozen=True)
class DeviationProbe:
    """The promised region `[start, start + n)` of a request: everything after its exact prefix.

    token_ids: [n] int64, gaps included. slots: [start + n] int64, the pool's slots of all positions
    from 0, filled but for gaps. chunks: `[start, end)` of each moved chunk, ascending, in the
    region. depth: the layer that is compared, counted from 1. candidates: [m] int64, CPU, positions
    of moved tokens, ascending: only these run and are compared. None: all.
    """

    token_ids: Tensor
    slots: Tensor
    chunks: tuple[tuple[int, int], ...]
    depth: int = 2
    candidates: Tensor | None = None

    @property
    def start(self) -> int:
        """Length of the exact prefix."""
        return self.end - len(self.token_ids)

    @property
    def end(self) -> int:
        """Length of the promised region, the exact prefix included."""
        return len(self.slots)


@dataclass(frozen=True)
class ScoreProbe:
    """A chunk at `[start, start + n)` whose KV was computed at these positions.

    token_ids: [n] int64. slots: [start + n] int64, the pool's slots of all positions from 0 to the
    chunk's end. prefix: `[start, end)` of each chunk before it, ascending. received: also what each
    of its tokens receives.
    """

    token_ids: Tensor
    slots: Tensor
    prefix: tuple[tuple[int, int], ...]
    received: bool = False

    @property
    def start(self) -> int:
        """The chunk's first position."""
        return len(self.slots) - len(self.token_ids)


def question_evidence(
    runner: Any, requests: Sequence[QuestionProbe]
) -> list[tuple[Tensor, Tensor | None]]:
    """What the questions attend to, all in one pass. Softmax over everything a question token sees,
    itself included.

    Returns per request, float32, on the device, no sync:
        [end]: mass on each prompt position, summed over the probe's layers, question tokens and
        heads; 0 at positions without a moved token (FusionRAG 3.2: the last layer; ProphetKV: all).
        [num_layers, num_chunks]: mass on each moved chunk, summed over question tokens, heads and
        the chunk's tokens (Cache-Craft eq. 15's summand, alg. 1). None where not asked for
        (`in_all_layers`).
    Raises:
        ValueError: sequences as in `run_pass`.
    """
    if not requests:
        return []
    observer = _QuestionObserver(runner, requests)
    run_pass(
        runner,
        [
            PassSequence(r.token_ids, SparseRequest(r.positions, r.kv_slots, r.kv_positions))
            for r in requests
        ],
        observer=observer,
    )
    return list(zip(observer.read, observer.by_layer, strict=True))


def deviation_evidence(
    runner: Any, requests: Sequence[DeviationProbe], *, max_rows: int | None = None
) -> list[Tensor]:
    """How far moved KV is from computed KV, at one layer of each request (CacheBlend, FusionRAG eq.
    7 and 8: the second).

    The candidates and gaps run through the layers before it and its projections, those of all
    requests in one pass. A request's attend to each other's fresh KV, and to the pool's of all
    else. At the second layer, with all tokens as candidates, that is an ordinary prefill's: in the
    first layer KV depends on its token alone. Deeper, what is no candidate is seen as it was moved.

    Args:
        max_rows: of one pass. A request with more is cut: candidates of another piece are then seen
            as they were moved, too, which tells from the third layer on. What else is in the batch
            changes nothing. None: as many as there are.
    Returns per request, [end] float32 on the device, no sync: squared difference of K plus that of
    V, summed over heads and dimensions; 0 at positions that were not compared. A depth beyond the
    model's layers is its last.
    Raises:
        ValueError: sequences as in `run_pass`.
    """
    if not requests:
        return []
    ends = [request.end for request in requests]
    # One after the other, so that all requests of a pass are compared at once.
    slots = torch.cat([request.slots for request in requests])
    found = torch.zeros(len(slots), device=runner.device)
    starts = accumulate(ends[:-1], initial=0)
    pieces = [
        piece
        for request, start in zip(requests, starts, strict=True)
        for piece in _pieces(request, start, max_rows)
    ]
    for group in _groups(pieces, max_rows):
        observer = _DeviationObserver(runner, group, slots, found)
        run_pass(runner, [piece.sequence() for piece in group], observer=observer)
    return list(torch.split(found, ends))


def score_chunks(runner: Any, chunks: Sequence[ScoreProbe]) -> list[Tensor]:
    """How much each chunk's tokens attend to the chunks before it and to each other; `scores_of`
    names the columns.

    The chunks' tokens run again over the KV in the pool, theirs included. No sync: sums stay on the
    device.

    Returns per chunk, [n, 3 + num_prefix_chunks] float32, on the device: mass of each token on what
    is in no chunk, on each chunk of the prefix, on earlier tokens of its own chunk, what it
    receives from later ones (0 where not asked for), means over layers and heads.
    Raises:
        ValueError: sequences as in `run_pass`.
    """
    if not chunks:
        return []
    sequences = [
        PassSequence(
            c.token_ids,
            SparseRequest(torch.arange(c.start, len(c.slots)), c.slots),
            own=False,  # their KV is in the pool, as of this very context
        )
        for c in chunks
    ]
    observer = _ScoreObserver(runner, chunks)
    run_pass(runner, sequences, observer=observer)
    return observer.sums


def scores_of(chunk: ScoreProbe, sums: Tensor) -> ChunkScores:
    """A chunk's scores (Cache-Craft eq. 3, 4, 14) from its `score_chunks`, copied to the CPU."""
    on_prefix = sums[:, 1:-2]
    return ChunkScores(
        inter=tuple(on_prefix.sum(0).tolist()),
        prefix_lens=tuple(end - start for start, end in chunk.prefix),
        intra=float(sums[:, -2].sum()),
        context=on_prefix.sum(1),
        # a view would keep all columns in memory
        received=sums[:, -1].clone() if chunk.received else None,
        head=float(sums[:, 0].sum()),
        head_len=chunk.start - sum(end - start for start, end in chunk.prefix),
    )


class _QuestionObserver(Observer):
    def __init__(self, runner: Any, requests: Sequence[QuestionProbe]) -> None:
        self._last_layer = runner.token_to_kv_pool.layer_num - 1
        device = runner.device
        self._inside, self._is_moved = [], []
        self._owners: list[Tensor | None] = []
        for request in requests:
            keys, _ = torch.cat([request.kv_positions.cpu(), request.positions.cpu()]).sort()
            inside = keys[keys < request.end]
            self._inside.append(upload(inside, device))
            owners = upload(_owners(request.chunks, request.end)[inside], device)
            self._is_moved.append((owners < len(request.chunks)).float())
            is_owner = None
            if request.in_all_layers:  # products with it are sums
                numbers = torch.arange(len(request.chunks), device=device)
                is_owner = (owners[:, None] == numbers).float()
            self._owners.append(is_owner)
        last = range(self._last_layer, self._last_layer + 1)
        self._layers = [request.layers or last for request in requests]
        # The pass is over after the last layer that any of its requests reads.
        self._stop = max(
            self._last_layer if r.in_all_layers else layers[-1]
            for r, layers in zip(requests, self._layers, strict=True)
        )
        self.read = [torch.zeros(r.end, device=device) for r in requests]
        self.by_layer = [
            torch.zeros(self._last_layer + 1, len(r.chunks), device=device)
            if r.in_all_layers
            else None
            for r in requests
        ]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        is_read, by_layer = layer_id in self._layers[sequence], self.by_layer[sequence]
        if is_read or by_layer is not None:
            inside, is_owner = self._inside[sequence], self._owners[sequence]
            mass = torch.zeros(len(inside), device=inside.device)
            for _, _, weights in attention.weights():
                # Keys ascend, so the question's own come after those of the region.
                mass += weights.sum((0, 1))[: len(inside)]
            if by_layer is not None and is_owner is not None:
                by_layer[layer_id] = mass @ is_owner
            if is_read:
                self.read[sequence][inside] += mass * self._is_moved[sequence]
        # Sequences attend one after the other: the last one ends the layer for all.
        if layer_id == self._stop and sequence == len(self.read) - 1:
            raise StopPass


class _Piece(NamedTuple):
    """What runs at a time of a request, whose position 0 is the batch's number `start`. Positions
    are [n] int64, CPU, ascending: those that run, that these see of the pool, that are compared."""

    request: DeviationProbe
    start: int
    run: Tensor
    seen: Tensor
    compared: Tensor

    def sequence(self) -> PassSequence:
        request = self.request
        seen_slots = request.slots[upload(self.seen, request.slots.device)]
        ids = request.token_ids[self.run - request.start]
        return PassSequence(ids, SparseRequest(self.run, seen_slots, self.seen))


def _pieces(request: DeviationProbe, start: int, max_rows: int | None) -> Iterator[_Piece]:
    moved = positions_in(request.chunks)
    compared = moved if request.candidates is None else request.candidates
    if not len(compared):
        return
    is_gap = np.ones(request.end, dtype=np.bool_)
    is_gap[: request.start] = is_gap[moved.numpy()] = False
    num_gaps = int(is_gap[: compared[-1]].sum())
    room = len(compared) if max_rows is None else max(1, max_rows - num_gaps)
    for piece in torch.split(compared, room):
        # Gaps before the piece run with it once more: a pass that writes nothing
        # has left no KV for them.
        is_run = is_gap.copy()
        is_run[piece.numpy()] = True
        # Attention is causal, so what is behind the piece is neither run nor seen.
        end = int(piece[-1]) + 1
        run, seen = (torch.from_numpy(np.flatnonzero(part[:end])) for part in (is_run, ~is_run))
        yield _Piece(request, start, run, seen, piece)


def _groups(pieces: Sequence[_Piece], max_rows: int | None) -> Iterator[list[_Piece]]:
    """Neighbours that run in one pass."""
    group, num_rows = list[_Piece](), 0
    for piece in pieces:
        num_rows += len(piece.run)
        if group and max_rows is not None and num_rows > max_rows:
            yield group
            group, num_rows = [], len(piece.run)
        group.append(piece)
    if group:
        yield group


class _DeviationObserver(Observer):
    """Compares rows of the pass with what `slots` hold, and puts that into `found`."""

    def __init__(self, runner: Any, pieces: Sequence[_Piece], slots: Tensor, found: Tensor) -> None:
        self._pool, self._slots, self._found = runner.token_to_kv_pool, slots, found
        by_layer, row = defaultdict[int, list[Tensor]](list), 0
        for piece in pieces:
            rows = row + torch.searchsorted(piece.run, piece.compared)
            layer = min(piece.request.depth, self._pool.layer_num) - 1
            by_layer[layer].append(torch.stack([rows, piece.start + piece.compared]))
            row += len(piece.run)
        self._compared = {
            layer: upload(torch.cat(each, dim=1), runner.device) for layer, each in by_layer.items()
        }
        self.last_layer = max(by_layer)

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        if layer_id in self._compared:
            rows, places = self._compared[layer_id]
            pool, slots = self._pool, self._slots[places]
            off_keys, off_values = (
                (fresh[rows].float() - cached[slots].float()).square().sum((1, 2))
                for fresh, cached in (
                    (keys, pool.get_key_buffer(layer_id)),
                    (values, pool.get_value_buffer(layer_id)),
                )
            )
            self._found[places] = off_keys + off_values
        # The layer's own attention is not needed: its KV is projected from the layer before.
        if layer_id == self.last_layer:
            raise StopPass


class _ScoreObserver(Observer):
    def __init__(self, runner: Any, chunks: Sequence[ScoreProbe]) -> None:
        self._last_layer = runner.token_to_kv_pool.layer_num - 1
        self._chunks = chunks
        # The head, and text between chunks.
        rest = [_owners(c.prefix, c.start) == len(c.prefix) for c in chunks]
        self._rest = [upload(each.nonzero()[:, 0], runner.device) for each in rest]
        self.sums = [
            torch.zeros(len(c.token_ids), 3 + len(c.prefix), device=runner.device) for c in chunks
        ]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        chunk, rest, sums = self._chunks[sequence], self._rest[sequence], self.sums[sequence]
        queries, keys, scale = attention.queries, attention.keys, attention.scale
        own = keys[chunk.start :]
        # Weights in float32 take heads * n * m numbers, log-sum-exps heads * n for each part.
        parts = [log_sum_exp(queries, keys[start:end], scale=scale) for start, end in chunk.prefix]
        parts.append(log_sum_exp(queries, own, scale=scale, is_causal=True))
        head = (
            log_sum_exp(queries, keys[rest], scale=scale)
            if len(rest)
            else torch.full_like(parts[-1], -torch.inf)
        )
        lse = torch.stack([head, *parts])
        total = lse.logsumexp(0)
        masses = (lse - total).exp()  # [parts, num_heads, n]
        on_own = masses[-1].clone()
        # A chunk's attention to itself is that to earlier tokens: a token's own key is taken out,
        # and rounding may leave less than 0.
        masses[-1] = (on_own - (_own_logits(queries, own, scale) - total).exp()).clamp_min(0)
        num_weights = queries.shape[1] * (self._last_layer + 1)
        sums[:, :-1] += masses.sum(1).T / num_weights
        if chunk.received:
            inside = replace(
                attention, keys=own, key_positions=attention.key_positions[chunk.start :]
            )
            for first, last, weights in inside.weights():
                # Softmax within the chunk, times the chunk's share, is softmax over all keys.
                received = (weights * on_own[:, first:last, None]).sum(0) / num_weights
                received.diagonal(first).zero_()  # received from later tokens alone
                sums[:, -1] += received.sum(0)
        if layer_id == self._last_layer and sequence == len(self._chunks) - 1:
            raise StopPass


def _own_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[num_heads, n] float32: each query's logit at its own key."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    by_group = queries.float().reshape(num_tokens, num_kv_heads, -1, head_dim)
    return (by_group * keys.float()[:, :, None]).sum(-1).flatten(1).T * scale


def _owners(spans: Sequence[tuple[int, int]], length: int) -> Tensor:
    """[length] int64, CPU: the index of the span that a position is in, `len(spans)` of none."""
    owners = torch.full((length,), len(spans))
    lens = torch.tensor([end - start for start, end in spans], dtype=torch.int64)
    owners[positions_in(spans)] = torch.arange(len(spans)).repeat_interleave(lens)
    return owners
