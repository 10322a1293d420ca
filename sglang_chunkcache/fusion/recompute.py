"""Recomputes chosen tokens of cached prompts: runs them through the model, before SGLang's own
extend.

`run_pass` serves requests: all chosen tokens of all requests in one call of the inner model, under
a private attention backend, masked or sparse. `run_extend` is its slow reference and computes what
a failed pass left undone: adjacent tokens, by SGLang's own backend.
Neither chooses tokens. Attention is causal, so recomputing every token of a region, by either,
equals an ordinary prefill of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
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
    PassBackend,
    StopPass,
)
from sglang_chunkcache.attention.masked_layout import plan
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.compat import bind_slots, replayed

PADDING_SLOT = 0
"""SGLang's pool keeps slot 0 for padding; no attention reads it."""

REPLAYS = False
"""Whether passes replay the graphs that SGLang has captured for prefills, where there are some. To
be set once `test_graph_equals_no_graph` has passed on a GPU."""


class PlanError(Exception):
    """No plan for sparse attention. Nothing is written yet: the pass can run with the mask."""


class _SparseBackend(PassBackend):
    """Attends as planned for this pass, whose rows `out_slots` are in the plan's order."""

    def __init__(
        self, runner: Any, attention: SparseAttention, out_slots: Tensor, watch: LayerWatch | None
    ) -> None:
        super().__init__(runner, out_slots, watch=watch)
        self._attention = attention

    def _attend(self, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        pool, at = self.token_to_kv_pool, layer.layer_id
        return self._attention.run(queries, pool.get_key_buffer(at), pool.get_value_buffer(at))


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
        sequences: at least one. For `sparse`, tokens on the CPU and slots on the runner's device
            cost no synchronisation.
        sparse: attends where there is no observer and every sequence writes; elsewhere, and if
            None, the mask does.
        watch: called in each layer, once its K/V is in the pool.
    Returns:
        [total, hidden_size] hidden states after the final norm, one sequence after the other; None
        where the observer ended the pass.
    Raises:
        ValueError: a layer that is not plain causal attention.
        PlanError: `sparse` could not plan the pass.
    Equals `run_extend` run by run, thus ordinary prefill where all tokens are run, within the model
    dtype's rounding.
    """
    # Kernels find all keys in the pool, a token's own included, and show no observer their weights:
    # what writes nothing, or is observed, is left to the mask.
    only_writes = observer is None and all(s.out_slots is not None for s in sequences)
    if sparse is not None and only_writes:
        return _run_sparse(runner, sequences, sparse, watch)
    layout = plan(sequences, runner.device)
    out_slots = layout.out_slots
    if layout.out_rows is not None:
        out_slots = torch.full_like(layout.positions, PADDING_SLOT)
        if layout.out_slots.numel():
            out_slots[layout.out_rows] = layout.out_slots
    batch = _pass_batch(runner, layout.token_ids, layout.positions, out_slots, sequences=sequences)
    try:
        return _forward(runner, MaskedAttention(runner, layout, observer, watch), batch)
    except StopPass:
        return None


@torch.no_grad()
def run_extend(
    runner: Any, row: int, token_ids: Sequence[int], start: int = 0, end: int | None = None
) -> Tensor:
    """Ordinary prefill of a request's positions `[start, end)` over what is before them, through
    the runner's own attention backend. The oracle for `run_pass`: `torch_native` pads to the whole
    length, so keep prompts short.

    Args:
        row: the request's in `req_to_token`, filled up to `end`.
        token_ids: the prompt's, from position 0.
        end: None: behind the last token.
    Returns:
        [end - start, hidden_size].
    """
    batch = _extend_batch(runner, row, token_ids, start, end)
    backend = runner.attn_backend
    # FlashInfer's ragged path writes K/V after attention (SGLang 0.5.21, `flashinfer_backend.py`),
    # where our passes read all keys from the pool. Other backends have no such switch: torch_native
    # and Triton write K/V before they attend.
    before = vars(backend).get("use_paged")
    if before is not None:
        backend.use_paged = True
    try:
        return _forward(runner, backend, batch, prepare=backend.init_forward_metadata)
    finally:
        if before is not None:
            backend.use_paged = before


@torch.no_grad()
def run_forward(runner: Any, row: int, token_ids: Sequence[int], start: int, end: int) -> None:
    """As `run_extend`, as SGLang serves it: in a graph where it has one, with the last token's
    logits."""
    runner.forward(_extend_batch(runner, row, token_ids, start, end))


def _extend_batch(
    runner: Any, row: int, token_ids: Sequence[int], start: int, end: int | None
) -> Any:
    """For SGLang's attention, not ours."""
    end = len(token_ids) if end is None else end
    batch = _forward_batch(
        runner,
        token_ids=upload(torch.tensor(list(token_ids[start:end])), runner.device),
        positions=torch.arange(start, end, device=runner.device),
        # `req_to_token` is int32, and slots that are written are int64.
        out_slots=runner.req_to_token_pool.req_to_token[row, start:end].long(),
        rows=[row],
        prefix_lens=[start],
        extend_lens=[end - start],
    )
    bind_slots(runner, batch)
    return batch


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
        out_slots,
        sequences=sequences,
    )
    hidden = _forward(runner, _SparseBackend(runner, sparse, out_slots, watch), batch)
    # Callers read the rows by sequence.
    return hidden if order is None else torch.empty_like(hidden).index_copy_(0, order, hidden)


def _forward(
    runner: Any, backend: AttentionBackend, batch: Any, prepare: Callable[[Any], None] | None = None
) -> Tensor:
    """The inner model's hidden states, under this backend."""
    found = replayed(runner, backend, batch) if REPLAYS and prepare is None else None
    if found is not None:
        return found
    with forward_context(ForwardContext(attn_backend=backend)):
        if prepare is not None:
            prepare(batch)
        hidden: Tensor = runner.model.model(batch.input_ids, batch.positions, batch)
        return hidden


def _watch_in_order(watch: LayerWatch, rows: Tensor, layer: Any, queries: Tensor) -> None:
    watch(layer, queries[rows])


def _pass_batch(
    runner: Any,
    token_ids: Tensor,
    positions: Tensor,
    out_slots: Tensor,
    *,
    sequences: Sequence[PassSequence],
) -> Any:
    """A batch for our backends, which lay out what they read: it has row 0. A model whose rotary
    kernel writes K/V writes at its slots, [total] int64, `PADDING_SLOT` for what is not written.
    """
    num_tokens = [len(sequence.token_ids) for sequence in sequences]
    return _forward_batch(
        runner,
        token_ids=token_ids,
        positions=positions,
        out_slots=out_slots,
        rows=[0] * len(num_tokens),
        prefix_lens=[
            s.request.num_keys if s.sees_fresh else max(0, s.request.num_keys - n)
            for s, n in zip(sequences, num_tokens, strict=True)
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

    seq_lens = list(map(sum, zip(prefix_lens, extend_lens, strict=True)))
    starts = list(accumulate(extend_lens[:-1], initial=0))
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
