"""The start-up gate: does moving and recomputing KV give on this very model what an ordinary prefill gives?

    full      head | A | B | question      SGLang's own attention, once whole and once in two pieces
    elsewhere head | B                     B's KV, computed alone
    moved     head | A | B | question      head and A from `full`, B moved from `elsewhere`, then recomputed whole

Layer 0 knows no context, so there moved keys must equal computed ones; with all of B recomputed the last token's logits must
equal those of `full`. What "equal" means is measured: ordinary prefill in two pieces differs from one, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.recompute import PassSequence, run_pass, run_virtual
from sglang_chunkcache.relocate import RotaryTable, copy_moved, read_blob, write_blob

HEAD_LEN, CHUNK_LEN, QUESTION_LEN = 8, 48, 8
"""Tokens: short enough for any pool and for SGLang's slow attention on the CPU."""

MAX_ULPS = 2.0
"""Layer 0, moved or stored and moved: two roundings, each half a unit, of keys that were rounded once themselves."""

NOISE_FACTOR = 4.0
"""Logits may differ by this many times what ordinary prefill in two pieces differs from one."""


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
    dtype: str

    @property
    def max_logit_error(self) -> float:
        """The tolerance: prefill's own noise, at least a few units in the last place of the largest logit."""
        return NOISE_FACTOR * max(self.logit_noise, _eps(self.dtype) * self.logit_scale)

    @property
    def passed(self) -> bool:
        """Whether fused mode may run."""
        ulps = (self.moved_ulps, self.stored_ulps)
        return all(each <= MAX_ULPS for each in ulps) and self.logit_error <= self.max_logit_error  # NaN fails

    @property
    def conclusive(self) -> bool:
        """Whether skipping recomputation would have shown: dummy weights, for one, give the same logits whatever is cached."""
        return self.logit_error_unrecomputed > self.max_logit_error

    def as_dict(self) -> dict[str, Any]:
        """For stats and the command."""
        return {
            **asdict(self),
            "max_ulps": MAX_ULPS,
            "max_logit_error": self.max_logit_error,
            "conclusive": self.conclusive,
            "passed": self.passed,
        }

    def __str__(self) -> str:
        return (
            f"layer-0 keys off by {self.moved_ulps:.2f} units in the last place when moved, {self.stored_ulps:.2f} by way of "
            f"the store (limit {MAX_ULPS}); logits off by {self.logit_error:.4g} with everything recomputed "
            f"(limit {self.max_logit_error:.4g}, without recomputing {self.logit_error_unrecomputed:.4g})"
        )


@torch.no_grad()
def run_gate(runner: Any, table: RotaryTable, params: Any, *, seed: int = 0) -> GateFigures:
    """Measure on the loaded model, in slots and rows that are given back.

    Args:
        runner: SGLang's ModelRunner.
        params: SGLang's CacheInitParams, for the pools.
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
        without = _logits(runner, _again(runner, moved, prompt, end, len(prompt)))
        _again(runner, moved, prompt, start, end)
        got = _logits(runner, _again(runner, moved, prompt, end, len(prompt)))
    return GateFigures(
        moved_ulps=moved_ulps,
        stored_ulps=stored_ulps,
        logit_error=float((got - expected).abs().max()),
        logit_noise=float((noisy - expected).abs().max()),
        logit_error_unrecomputed=float((without - expected).abs().max()),
        logit_scale=float(expected.abs().max()),
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


def _again(runner: Any, row: _Row, token_ids: Sequence[int], start: int, end: int) -> Tensor:
    """Our pass over `[start, end)`."""
    positions = torch.arange(start, end)
    sequence = PassSequence(
        token_ids=torch.tensor(token_ids)[start:end],
        positions=positions,
        kv_slots=row.slots[:end],
        kv_positions=torch.arange(end),
        out_slots=row.slots[start:end],
    )
    hidden = run_pass(runner, [sequence])
    assert hidden is not None, "no observer ends it"
    return hidden


def _logits(runner: Any, hidden: Tensor) -> Tensor:
    """The last token's, [vocab] float32."""
    logits: Tensor = hidden[-1].float() @ runner.model.lm_head.weight.float().T
    return logits


def _ulps(pool: Any, expected: Tensor, got: Tensor) -> float:
    keys = pool.k_buffer[0]
    want, have = keys[expected].float(), keys[got].float()
    return float((have - want).abs().max() / (_eps(str(keys.dtype).removeprefix("torch.")) * want.abs().max()))


def _eps(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps
