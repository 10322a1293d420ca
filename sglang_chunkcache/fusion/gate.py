"""The start-up gate: does moving and recomputing KV give on this very model what an ordinary prefill gives?

    full      head | A | B | question      SGLang's own attention, once whole and once in two pieces
    elsewhere head | B                     B's KV, computed alone
    moved     head | A | B | question      head and A from `full`, B moved from `elsewhere`, then recomputed whole;
              ###  # #  ### #  # ###  #    then some of it once more, scattered

Layer 0 knows no context, so there moved keys must equal computed ones; with all of B recomputed the last token's logits must
equal those of `full`; and scattered tokens run once more over KV that is right must get the K/V they have, which they do if each
sees the keys up to its own and no other. What "equal" means is measured: ordinary prefill in two pieces differs from one, too.

The pass attends as it will in service: sparse, or masked.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.attention import choice
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.masked import Observer
from sglang_chunkcache.fusion.recompute import run_pass, run_virtual
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved, read_blob, write_blob

logger = logging.getLogger(__name__)

HEAD_LEN, CHUNK_LEN, QUESTION_LEN = 8, 48, 8
"""Tokens: short enough for any pool and for SGLang's slow attention on the CPU."""

MAX_ULPS = 2.0
"""Layer 0, moved or stored and moved: two roundings, each half a unit, of keys that were rounded once themselves."""

NOISE_FACTOR = 4.0
"""Logits and K/V may differ by this many times what ordinary prefill in two pieces differs from one."""

MIN_KV_NOISE = 1e-5
"""Least noise granted to K/V, relative: sums in another order, in float32. Coarser dtypes get half a unit in the last place."""

QUANTILE = 0.75
"""Of the tokens' differences: a few tokens may take another way through a mixture of experts, in one prefill or the other."""

CLUSTERS, SINGLES = (0, 1, 2, 3), (7, 10, 13)
"""Which of every 16 tokens are run once more, as two requests of one pass."""

VOCAB_ROWS = 16_384
"""Of the output matrix that are in float32 at a time: all of them are 2 GB in a Llama-3-8B."""


class _Row(NamedTuple):
    number: int
    slots: Tensor


@dataclass(frozen=True)
class GateFigures:
    """What was measured. Units in the last place are those of the pool's dtype at the largest key of layer 0."""

    moved_ulps: float
    """Layer-0 keys of B moved on the device against computed ones."""
    stored_ulps: float
    """The same by way of the store."""
    logit_error: float
    """Largest difference of the last token's logits, everything recomputed, against full prefill."""
    logit_noise: float
    """The same for ordinary prefill in two pieces."""
    logit_error_unrecomputed: float
    """The same with B moved and not recomputed: what the gate would see if recomputation did nothing."""
    logit_scale: float
    """Largest logit."""
    scattered_error: float
    """By how much the K/V of scattered tokens changes when they are run once more: the upper quartile over tokens, relative, in
    multiples of what that layer's K/V differs by for prefill in two pieces; the largest over requests, layers, keys, values."""
    scattered_error_off_by_one: float
    """The same, were each token to see one key less: what the gate would see if limits were wrong."""
    dtype: str

    @property
    def max_logit_error(self) -> float:
        """The tolerance: prefill's own noise, at least a few units in the last place of the largest logit."""
        return NOISE_FACTOR * max(self.logit_noise, _eps(self.dtype) * self.logit_scale)

    @property
    def passed(self) -> bool:
        """Whether fused mode may run."""
        ulps = (self.moved_ulps, self.stored_ulps)
        return (  # NaN fails
            all(each <= MAX_ULPS for each in ulps)
            and self.logit_error <= self.max_logit_error
            and self.scattered_error <= NOISE_FACTOR
        )

    @property
    def conclusive(self) -> bool:
        """Whether mistakes would have shown: dummy weights, for one, give the same logits whatever is cached."""
        return self.logit_error_unrecomputed > self.max_logit_error and self.scattered_error_off_by_one > NOISE_FACTOR

    def as_dict(self) -> dict[str, Any]:
        """For stats and the command."""
        return {
            **asdict(self),
            "max_ulps": MAX_ULPS,
            "max_logit_error": self.max_logit_error,
            "max_scattered_error": NOISE_FACTOR,
            "conclusive": self.conclusive,
            "passed": self.passed,
        }

    def __str__(self) -> str:
        return (
            f"layer-0 keys off by {self.moved_ulps:.2f} units in the last place when moved, {self.stored_ulps:.2f} by way of "
            f"the store (limit {MAX_ULPS}); logits off by {self.logit_error:.4g} with everything recomputed "
            f"(limit {self.max_logit_error:.4g}, without recomputing {self.logit_error_unrecomputed:.4g}); K/V of scattered "
            f"tokens off by {self.scattered_error:.4g} times prefill's own noise (limit {NOISE_FACTOR}, with limits off by one "
            f"{self.scattered_error_off_by_one:.4g})"
        )


def gated_attention(
    runner: Any, table: RotaryTable, params: Any, wish: str
) -> tuple[SparseAttention | None, dict[str, Any], GateFigures]:
    """The recompute pass's attention as `choice.create` chooses it, and the gate's figures with it.

    With `auto`, one that does not get through the gate is given up for the masked one, which is measured in its place.

    Raises:
        ValueError: `sparse` is wished for and cannot be.
        RuntimeError: as `run_gate` does.
    """
    sparse, attention = choice.create(runner, wish)
    if sparse is not None and wish == "auto":
        try:
            figures = run_gate(runner, table, params, sparse=sparse)
            if figures.passed:
                return sparse, attention, figures
            reason = str(figures)
        except Exception as error:
            logger.warning("chunk cache: the gate did not get through with sparse attention", exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        reason = f"{attention['kernel']} failed the gate: {reason}"
        sparse, attention = None, {**attention, "kind": "masked", "kernel": None, "reason": reason}
    return sparse, attention, run_gate(runner, table, params, sparse=sparse)


@torch.no_grad()
def run_gate(
    runner: Any, table: RotaryTable, params: Any, *, sparse: SparseAttention | None = None, seed: int = 0
) -> GateFigures:
    """Measure on the loaded model, in slots and rows that are given back.

    Args:
        runner: SGLang's ModelRunner.
        params: SGLang's CacheInitParams, for the pools.
        sparse: what the pass attends with; None: the mask.
    Raises:
        RuntimeError: the pool has no room for four prompts of about a hundred tokens.
    """
    vocab = runner.model_config.vocab_size
    rng = random.Random(seed)
    head, a, b, question = (
        [rng.randrange(vocab) for _ in range(n)] for n in (HEAD_LEN, CHUNK_LEN, CHUNK_LEN, QUESTION_LEN)
    )
    prompt, alone = [*head, *a, *b, *question], [*head, *b]
    start, end = HEAD_LEN + CHUNK_LEN, HEAD_LEN + 2 * CHUNK_LEN
    pool = runner.token_to_kv_pool
    with _rows(params, [len(prompt), len(prompt), len(alone), len(prompt)]) as (full, pieces, elsewhere, moved):
        device = full.slots.device
        expected = _logits(runner, _prefill(runner, full, prompt, [(0, len(prompt))]))
        noisy = _logits(runner, _prefill(runner, pieces, prompt, [(0, start), (start, len(prompt))]))
        _prefill(runner, elsewhere, alone, [(0, len(alone))])
        b_here = torch.arange(start, end, device=device)
        b_there = torch.arange(HEAD_LEN, HEAD_LEN + CHUNK_LEN, device=device)
        before = torch.arange(start, device=device)

        def move(source: _Row, old: Tensor, new: Tensor) -> None:
            copy_moved(
                pool,
                table,
                source_slots=source.slots[old],
                source_positions=old,
                target_slots=moved.slots[new],
                target_positions=new,
            )

        keys, values = read_blob(pool, table, elsewhere.slots[b_there], b_there)
        write_blob(pool, table, keys, values, target_slots=moved.slots[b_here], target_positions=b_here)
        stored_ulps = _ulps(pool, full.slots[b_here], moved.slots[b_here])
        move(full, before, before)
        move(elsewhere, b_there, b_here)
        moved_ulps = _ulps(pool, full.slots[b_here], moved.slots[b_here])
        without = _logits(runner, _again(runner, moved, prompt, [range(end, len(prompt))], sparse))
        _again(runner, moved, prompt, [range(start, end)], sparse)
        got = _logits(runner, _again(runner, moved, prompt, [range(end, len(prompt))], sparse))

        noise = _kv_error(_kv(pool, pieces.slots), _kv(pool, full.slots)).amax(1)
        error, error_off_by_one = _scattered_errors(runner, moved, prompt, noise, sparse)
    return GateFigures(
        moved_ulps=moved_ulps,
        stored_ulps=stored_ulps,
        logit_error=float((got - expected).abs().max()),
        logit_noise=float((noisy - expected).abs().max()),
        logit_error_unrecomputed=float((without - expected).abs().max()),
        logit_scale=float(expected.abs().max()),
        scattered_error=error,
        scattered_error_off_by_one=error_off_by_one,
        dtype=str(pool.dtype).removeprefix("torch."),
    )


@contextmanager
def _rows(params: Any, lens: Sequence[int]) -> Iterator[list[_Row]]:
    """Request rows with slots of their own, given back afterwards."""
    rows_pool, allocator = params.req_to_token_pool, params.token_to_kv_pool_allocator
    slots = allocator.alloc(sum(lens))
    indices = rows_pool.alloc_rows(len(lens)) if slots is not None else None
    if slots is None or indices is None:
        if slots is not None:
            allocator.free(slots)
        raise RuntimeError(
            f"the start-up gate of --reuse fused needs {sum(lens)} KV slots and {len(lens)} request rows"
        )
    try:
        rows = [_Row(i, part) for i, part in zip(indices, slots.split(list(lens)), strict=True)]
        for row in rows:
            rows_pool.write((row.number, slice(0, len(row.slots))), row.slots.to(torch.int32))
        yield rows
    finally:
        rows_pool.free_slots.extend(indices)
        allocator.free(slots)


def _prefill(runner: Any, row: _Row, token_ids: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Tensor:
    """SGLang's own attention, one pass a piece; hidden states of the last."""
    for piece in pieces:
        hidden = run_virtual(runner, req_pool_index=row.number, runs=[piece], token_ids=token_ids)
    return hidden


def _again(
    runner: Any, row: _Row, token_ids: Sequence[int], requests: Sequence[Sequence[int]], sparse: SparseAttention | None
) -> Tensor:
    """Our pass over positions of the row, each request's ascending."""
    ids = torch.tensor(token_ids)
    sequences = [
        PassSequence(
            token_ids=ids[positions],
            request=SparseRequest(positions, row.slots[: int(positions[-1]) + 1], int(positions[-1]) + 1),
            out_slots=row.slots[positions.to(row.slots.device)],
        )
        for positions in map(torch.tensor, requests)
    ]
    hidden = run_pass(runner, sequences, sparse=sparse)
    assert hidden is not None, "no observer ends it"
    return hidden


def _scattered_errors(
    runner: Any, row: _Row, token_ids: Sequence[int], noise: Tensor, sparse: SparseAttention | None
) -> tuple[float, float]:
    """`scattered_error` and `scattered_error_off_by_one`, on a row that is right.

    Args:
        noise: [2 * num_layers], what prefill's own K/V differs by.
    """
    pool, ids = runner.token_to_kv_pool, torch.tensor(token_ids)
    requests = [[i for i in range(1, len(ids)) if i % 16 in chosen] for chosen in (CLUSTERS, SINGLES)]
    positions = [i for request in requests for i in request]
    slots = row.slots[torch.tensor(positions, device=row.slots.device)]
    right = _kv(pool, slots)
    noise = noise.clamp(min=max(MIN_KV_NOISE, _eps(str(pool.dtype).removeprefix("torch.")) / 2))

    def multiples(kv: list[Tensor]) -> float:
        parts = torch.split(_kv_error(kv, right) / noise[:, None], [len(request) for request in requests], dim=1)
        return float(torch.stack([part.quantile(QUANTILE, dim=1).max() for part in parts]).max())

    fresh = _FreshKV()
    one_less = [
        PassSequence(ids[i : i + 1], SparseRequest(torch.tensor([i]), row.slots[:i], i), own=False) for i in positions
    ]
    run_pass(runner, one_less, observer=fresh)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = float("nan")  # to be written in each layer before anything attends
    _again(runner, row, token_ids, requests, sparse)
    return multiples(_kv(pool, slots)), multiples(fresh.kv)


class _FreshKV(Observer):
    """Keeps what a pass computes, as `_kv` reads what the pool holds."""

    def __init__(self) -> None:
        self.kv: list[Tensor] = []

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        self.kv += [keys.flatten(1).float(), values.flatten(1).float()]


def _kv(pool: Any, slots: Tensor) -> list[Tensor]:
    """Keys and values of each layer in turn, [n, num_kv_heads * head_dim] float32."""
    layers = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return [buffer[slots].flatten(1).float() for layer in layers for buffer in layer]


def _kv_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """[2 * num_layers, n]: relative difference of each token's."""
    tiny = torch.finfo(torch.float32).tiny
    pairs = zip(got, expected, strict=True)
    return torch.stack([(have - want).norm(dim=1) / want.norm(dim=1).clamp(min=tiny) for have, want in pairs])


def _logits(runner: Any, hidden: Tensor) -> Tensor:
    """The last token's, [vocab] float32."""
    last = hidden[-1].float()
    return torch.cat([rows.float() @ last for rows in runner.model.lm_head.weight.split(VOCAB_ROWS)])


def _ulps(pool: Any, expected: Tensor, got: Tensor) -> float:
    keys = pool.k_buffer[0]
    want, have = keys[expected].float(), keys[got].float()
    return float((have - want).abs().max() / (_eps(str(keys.dtype).removeprefix("torch.")) * want.abs().max()))


def _eps(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps
