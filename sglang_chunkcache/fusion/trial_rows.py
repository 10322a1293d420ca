"""Request rows and KV slots for what the server tries on itself:
the gate, the costs, the calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB_ROWS = 16_384
"""Of the output matrix that are in float32 at a time: all of them are 2 GB in a Llama-3-8B."""


class Row(NamedTuple):
    """A row of `req_to_token`, filled from position 0."""

    number: int
    slots: Tensor


@contextmanager
def slots_of(params: Any, num_slots: int) -> Iterator[Tensor]:
    """[num_slots] int64 of the KV pool, given back afterwards.
    Raises RuntimeError where it has not as many."""
    allocator = params.token_to_kv_pool_allocator
    slots = allocator.alloc(num_slots)
    if slots is None:
        raise RuntimeError(f"--reuse fused tries the model and needs {num_slots} KV slots for that")
    try:
        yield slots
    finally:
        allocator.free(slots)


@contextmanager
def rows_of(params: Any, lens: Sequence[int]) -> Iterator[list[Row]]:
    """Request rows with slots of their own, given back afterwards. Raises RuntimeError where the
    pools have not as many.

    params: SGLang's CacheInitParams. lens: tokens of each row.
    """
    pool = params.req_to_token_pool
    with slots_of(params, sum(lens)) as slots:
        indices = pool.alloc_rows(len(lens))
        if indices is None:
            raise RuntimeError(
                f"--reuse fused tries the model and needs {len(lens)} request rows for that"
            )
        try:
            rows = [
                Row(i, part)
                for i, part in zip(indices, torch.split(slots, list(lens)), strict=True)
            ]
            for row in rows:
                # `req_to_token` is int32, the allocator's slots are int64.
                pool.write((row.number, slice(0, len(row.slots))), row.slots.to(torch.int32))
            yield rows
        finally:
            # SGLang's `ReqToTokenPool.free` wants a request, and these rows have none.
            pool.free_slots.extend(indices)


def logits_of(runner: Any, hidden: Tensor) -> Tensor:
    """[n, vocab] float32 from [n, hidden_size]."""
    hidden = hidden.float()
    return torch.cat(
        [hidden @ rows.float().T for rows in runner.model.lm_head.weight.split(VOCAB_ROWS)], dim=1
    )
