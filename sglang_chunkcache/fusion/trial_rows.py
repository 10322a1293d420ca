"""What the server tries on itself with (the gate, the costs, the calibration): the loaded model,
request rows and KV slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence, SparseAttention
from sglang_chunkcache.fusion.recompute import run_extend, run_pass
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved
from sglang_chunkcache.scheduler.pricing import Pricing

VOCAB_ROWS = 16_384
"""Of the output matrix that are in float32 at a time: all of them are 2 GB in a Llama-3-8B."""


class Row(NamedTuple):
    """A row of `req_to_token`, filled from position 0."""

    number: int
    slots: Tensor


@dataclass(frozen=True, eq=False)
class Means:
    """The loaded model, and how the server moves and recomputes on it."""

    runner: Any
    """SGLang's ModelRunner."""
    table: RotaryTable
    params: Any
    """SGLang's CacheInitParams, for the pools."""
    sparse: SparseAttention | None
    """What the recompute pass attends with; None: the mask."""
    window: int
    """The question's, in tokens."""
    pricing: Pricing

    @property
    def pool(self) -> Any:
        """SGLang's KV pool."""
        return self.runner.token_to_kv_pool

    def synchronize(self) -> None:
        """Wait for what is queued on the device."""
        if torch.device(self.runner.device).type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def slots(self, num_slots: int) -> Iterator[Tensor]:
        """[num_slots] int64, given back afterwards. RuntimeError: the pool has not as many."""
        allocator = self.params.token_to_kv_pool_allocator
        slots = allocator.alloc(num_slots)
        if slots is None:
            raise RuntimeError(
                f"--reuse fused tries the model and needs {num_slots} KV slots for that"
            )
        try:
            yield slots
        finally:
            allocator.free(slots)

    @contextmanager
    def rows(self, lens: Sequence[int]) -> Iterator[list[Row]]:
        """Request rows of so many tokens with slots of their own, given back afterwards.
        Raises RuntimeError where the pools have not as many."""
        pool = self.params.req_to_token_pool
        with self.slots(sum(lens)) as slots:
            indices = pool.alloc_rows(len(lens))
            if indices is None:
                raise RuntimeError(
                    f"--reuse fused tries the model and needs {len(lens)} request rows for that"
                )
            try:
                rows = list(map(Row, indices, torch.split(slots, list(lens))))
                for row in rows:
                    # `req_to_token` is int32, the allocator's slots are int64.
                    pool.write((row.number, slice(0, len(row.slots))), row.slots.to(torch.int32))
                yield rows
            finally:
                # SGLang's `ReqToTokenPool.free` wants a request, and these rows have none.
                pool.free_slots.extend(indices)

    def prefill(
        self, row: Row, token_ids: Sequence[int], start: int = 0, end: int | None = None
    ) -> Tensor:
        """SGLang's own attention over the row's positions `[start, end)`, None: to the last token;
        [end - start, hidden_size]. What is before them is in the row."""
        return run_extend(self.runner, row.number, token_ids, start, end)

    def recompute(
        self,
        row: Row,
        token_ids: Sequence[int] | Tensor,
        requests: Sequence[Sequence[int] | Tensor],
    ) -> Tensor:
        """Our pass over positions of the row, each request's ascending; [total, hidden_size]."""
        ids = torch.as_tensor(token_ids)
        sequences = [PassSequence.of_row(ids, row.slots, torch.as_tensor(at)) for at in requests]
        hidden = run_pass(self.runner, sequences, sparse=self.sparse)
        assert hidden is not None, "no observer ends it"
        return hidden

    def move(self, source: Tensor, old: Tensor, target: Tensor, new: Tensor) -> None:
        """KV of the slots `source`, stored at positions `old`, to `target` at `new`."""
        copy_moved(
            self.pool,
            self.table,
            source_slots=source,
            source_positions=old,
            target_slots=target,
            target_positions=new,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] float32 from [n, hidden_size]."""
        hidden, parts = hidden.float(), self.runner.model.lm_head.weight.split(VOCAB_ROWS)
        return torch.cat([hidden @ rows.float().T for rows in parts], dim=1)
