"""Recomputes chosen tokens of cached prompts: runs them through the model, before SGLang's own
extend.

`run_pass` serves requests: all chosen tokens of all requests in one call of the inner model, under
a private attention backend, masked or sparse. `run_virtual` is its slow reference and computes what
a failed pass left undone: each run of tokens is an ordinary sequence for SGLang's own backend.
Neither chooses tokens. Attention is causal, so recomputing every token of a region, by either,
equals an ordinary prefill of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence, SparseAttention
from sglang_chunkcache.attention.masked import (
    LayerWatch,
    MaskedAttention,
    Observer,
    StopPass,
    checked_heads,
)
from sglang_chunkcache.attention.masked_layout import plan
from sglang_chunkcache.attention.upload import upload

PADDING_SLOT = 0
"""SGLang's pool keeps slot 0 for padding; no attention reads it."""


class PlanError(Exception):
    """The sparse attention could not plan a pass.
    Nothing is written yet, so the same pass can run with the mask."""


class SparseBackend(AttentionBackend):  # type: ignore[misc]
    """Runs one planned pass under SGLang's model: in each layer, K/V is written into the pool, then
    `attention` attends.

    Nothing here waits for the device.

    Args:
        runner: SGLang's ModelRunner, page size 1; its pool is written at `out_slots`.
        attention: planned for this pass.
        out_slots: [n] int64, on the device, in the plan's order.
    """

    def __init__(
        self,
        runner: Any,
        attention: SparseAttention,
        out_slots: Tensor,
        watch: LayerWatch | None = None,
    ) -> None:
        super().__init__()
        # SGLang finds both pools through the backend
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._attention = attention
        self._write_loc = KVWriteLoc(out_slots)
        self._watch = watch

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """SGLang's call, once a layer; returns [n, num_heads * head_dim].
        Raises ValueError as `checked_heads` does."""
        queries, keys, values = checked_heads(layer, q, k, v, save_kv_cache, kwargs)
        pool = self.token_to_kv_pool
        # It waits for the layer's loads, which may be into slots that are written here.
        pool.get_key_buffer(layer.layer_id)
        pool.set_kv_buffer(layer, self._write_loc, keys, values)
        # Only now: the watch reads the pass's own keys from the pool, gaps included.
        if self._watch is not None:
            self._watch(layer, queries)
        out = self._attention.run(
            queries, pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        )
        return out.flatten(1)


@torch.no_grad()
def run_pass(
    runner: Any,
    sequences: Sequence[PassSequence],
    *,
    observer: Observer | None = None,
    sparse: SparseAttention | None = None,
    watch: LayerWatch | None = None,
) -> Tensor | None:
    """Run the sequences through the inner model: eager, no logits, no graph, on the current stream.

    In each layer every sequence's K/V is written before any attends, so a sequence may read what
    another writes.

    Args:
        runner: SGLang's ModelRunner; its KV pool is written at `out_slots`, nothing else of it
            changes.
        sequences: For `sparse`, tokens on the CPU and slots on the runner's device cost no
            synchronisation.
        sparse: attends where there is no observer and every sequence writes; elsewhere, and if
            None, the mask does.
        watch: called in each layer, once its K/V is in the pool.
    Returns:
        [total, hidden_size] hidden states after the final norm, one sequence after the other; None
        where the observer ended the pass.
    Raises:
        ValueError: no sequences; a layer that is not plain causal attention.
        PlanError: `sparse` could not plan the pass.
    Equals `run_virtual`, and ordinary prefill where every token is run, within the model dtype's
    rounding.
    """
    # Kernels find all keys in the pool, a token's own included, and show no observer their weights:
    # what writes nothing, or is observed, is left to the mask.
    if (
        sparse is not None
        and observer is None
        and sequences
        and all(s.out_slots is not None for s in sequences)
    ):
        return _run_sparse(runner, sequences, sparse, watch)
    layout = plan(sequences, runner.device)
    batch = _pass_batch(
        runner,
        layout.token_ids,
        layout.positions,
        num_keys=[len(s.key_positions) for s in layout.sequences],
        num_tokens=[len(s.positions) for s in layout.sequences],
    )
    with forward_context(
        ForwardContext(attn_backend=MaskedAttention(runner, layout, observer, watch))
    ):
        try:
            return runner.model.model(batch.input_ids, batch.positions, batch)  # type: ignore[no-any-return]
        except StopPass:
            return None


@torch.no_grad()
def run_virtual(
    runner: Any,
    *,
    req_pool_index: int,
    runs: Sequence[tuple[int, int]],
    token_ids: Sequence[int],
    max_sequences: int | None = None,
) -> Tensor:
    """Run stretches of one request as sequences of their own through the runner's own attention
    backend.

    Stretch [a, b) is a sequence on the request's row: prefix a, extend b - a, K/V written over the
    slots row[a:b]. The oracle for `run_pass`: `torch_native` pads every stretch to its whole
    length, so keep prompts short.

    Args:
        req_pool_index: the request's row in `req_to_token`, filled up to the last run's end.
        runs: half-open position intervals, ascending, disjoint.
        token_ids: the prompt's, from position 0.
        max_sequences: runs per pass, the request pool's size at most (and by default: backends size
            their buffers by it). Passes go in ascending position, so each finds what it depends on.
    Returns:
        [total, hidden_size], one run after the other.
    Raises:
        ValueError: runs empty, out of order or beyond `token_ids`.
    """
    _check_runs(runs, len(token_ids))
    cap = min(max_sequences or runner.req_to_token_pool.size, runner.req_to_token_pool.size)
    return torch.cat(
        [
            _run_virtual(runner, req_pool_index, runs[i : i + cap], token_ids)
            for i in range(0, len(runs), cap)
        ]
    )


def _run_virtual(
    runner: Any, req_pool_index: int, runs: Sequence[tuple[int, int]], token_ids: Sequence[int]
) -> Tensor:
    row = runner.req_to_token_pool.req_to_token[req_pool_index]
    batch = _forward_batch(
        runner,
        token_ids=upload(torch.tensor([t for a, b in runs for t in token_ids[a:b]]), runner.device),
        positions=torch.cat([torch.arange(a, b, device=runner.device) for a, b in runs]),
        # `req_to_token` is int32, and slots that are written are int64.
        out_slots=torch.cat([row[a:b] for a, b in runs]).long(),
        rows=[req_pool_index] * len(runs),
        prefix_lens=[a for a, _ in runs],
        extend_lens=[b - a for a, b in runs],
    )
    backend = runner.attn_backend
    # FlashInfer's ragged path writes K/V after attention, so a run would read another's old K/V
    # (SGLang 0.5.21, `flashinfer_backend.py`).
    with _paged(backend), forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        return runner.model.model(batch.input_ids, batch.positions, batch)  # type: ignore[no-any-return]


@runtime_checkable
class _RaggedByDefault(Protocol):
    """SGLang's FlashInfer backend."""

    use_paged: bool


@contextmanager
def _paged(backend: Any) -> Iterator[None]:
    # Other backends, as torch_native and Triton, write K/V before they attend.
    if not isinstance(backend, _RaggedByDefault):
        yield
        return
    before, backend.use_paged = backend.use_paged, True
    try:
        yield
    finally:
        backend.use_paged = before


def _run_sparse(
    runner: Any,
    sequences: Sequence[PassSequence],
    sparse: SparseAttention,
    watch: LayerWatch | None,
) -> Tensor:
    """The pass in the plan's order. Queued only: no tensor is read back from the device."""
    device = torch.device(runner.device)
    requests = [sequence.request for sequence in sequences]
    try:
        order = sparse.plan(requests)
    except Exception as error:
        raise PlanError(f"{type(error).__name__}: {error}") from error
    token_ids = torch.cat([s.token_ids for s in sequences])
    positions = torch.cat([request.positions for request in requests])
    out_slots = torch.cat(
        [upload(s.out_slots, device) for s in sequences if s.out_slots is not None]
    )
    if order is not None:
        token_ids, positions = token_ids[order.to(token_ids.device)], positions[order]
        order = upload(order, device)
        out_slots = out_slots[order]
        # The watch counts rows as the requests come, whatever order the plan has.
        watch = watch and partial(_watch_in_order, watch, order.argsort())
    batch = _pass_batch(
        runner,
        upload(token_ids, device),
        upload(positions, device),
        num_keys=[request.num_keys for request in requests],
        num_tokens=[len(request.positions) for request in requests],
    )
    with forward_context(
        ForwardContext(attn_backend=SparseBackend(runner, sparse, out_slots, watch))
    ):
        hidden: Tensor = runner.model.model(batch.input_ids, batch.positions, batch)
    # Callers read the rows by sequence.
    return hidden if order is None else torch.empty_like(hidden).index_copy_(0, order, hidden)


def _watch_in_order(watch: LayerWatch, rows: Tensor, layer: Any, queries: Tensor) -> None:
    watch(layer, queries[rows])


def _check_runs(runs: Sequence[tuple[int, int]], num_tokens: int) -> None:
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    for start, end in runs:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(f"run [{start}, {end}): expected a stretch of [0, {num_tokens})")
    for (_, end), (start, _) in pairwise(runs):
        if start < end:
            raise ValueError(f"run at {start} starts before the previous one ends, at {end}")


def _pass_batch(
    runner: Any, token_ids: Tensor, positions: Tensor, *, num_keys: list[int], num_tokens: list[int]
) -> Any:
    """A batch for our backends only: its slots are the padding slot and its row is 0,
    since our backends lay out their own."""
    return _forward_batch(
        runner,
        token_ids=token_ids,
        positions=positions,
        out_slots=torch.full_like(positions, PADDING_SLOT),
        rows=[0] * len(num_tokens),
        prefix_lens=[
            max(0, keys - tokens) for keys, tokens in zip(num_keys, num_tokens, strict=True)
        ],
        extend_lens=num_tokens,
    )


def _forward_batch(
    runner: Any,
    *,
    token_ids: Tensor,
    positions: Tensor,
    out_slots: Tensor,
    rows: list[int],
    prefix_lens: list[int],
    extend_lens: list[int],
) -> Any:
    """An EXTEND batch with the fields that SGLang's dense models and attention backends read."""

    def on_device(values: list[int], dtype: torch.dtype) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype), runner.device)

    seq_lens = [prefix + extend for prefix, extend in zip(prefix_lens, extend_lens, strict=True)]
    starts = [sum(extend_lens[:i]) for i in range(len(extend_lens))]
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        input_ids=token_ids,
        positions=positions,
        out_cache_loc=out_slots,
        req_pool_indices=on_device(rows, torch.int64),
        req_pool_indices_cpu=torch.tensor(rows),
        seq_lens=on_device(seq_lens, torch.int64),
        seq_lens_cpu=torch.tensor(seq_lens),
        orig_seq_lens=on_device(seq_lens, torch.int64),
        seq_lens_sum=sum(seq_lens),
        extend_num_tokens=len(token_ids),
        extend_seq_lens=on_device(extend_lens, torch.int32),
        extend_seq_lens_cpu=extend_lens,
        extend_prefix_lens=on_device(prefix_lens, torch.int32),
        extend_prefix_lens_cpu=prefix_lens,
        extend_start_loc=on_device(starts, torch.int32),
        global_num_token_non_padded_cpu=len(token_ids),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        is_prefill_only=True,
    )
