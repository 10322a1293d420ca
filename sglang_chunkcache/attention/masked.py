"""Attention of scattered tokens with torch alone: serves on the CPU, measures for selectors,
replaces a kernel that fails.

Also what every attention of our passes has in common (`PassBackend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_chunkcache.attention.masked_layout import Block, PassLayout, SequenceLayout

MASK_BYTES = 64 << 20
"""Masks of a pass are kept from layer to layer up to this size, else built in each."""

WEIGHT_BYTES = 128 << 20
"""Largest piece of attention weights that is in memory at a time, for observers."""


class StopPass(Exception):
    """An observer has seen enough: the rest of the forward pass is left out."""


@dataclass(frozen=True)
class SequenceAttention:
    """Queries and keys of one sequence in one layer.

    queries: [n, num_heads, head_dim]; keys: [m, num_kv_heads, head_dim], both model dtype, rotated,
    only to be read. positions: [n], key_positions: [m] int64, ascending; a query sees the keys at
    or before its position.
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor
    key_positions: Tensor
    scale: float

    def weights(self) -> Iterator[tuple[int, int, Tensor]]:
        """Attention weights, softmax over all visible keys, piece by piece.

        Yields `(start, end, weights)` for queries [start, end): [num_heads, end - start, m]
        float32, 0 where hidden. A piece has at most `WEIGHT_BYTES` (but one query at least).
        """
        num_tokens, num_heads, head_dim = self.queries.shape
        num_keys, num_kv_heads, _ = self.keys.shape
        keys = self.keys.float().permute(1, 2, 0)
        rows = max(1, WEIGHT_BYTES // (4 * num_heads * num_keys))
        for start in range(0, num_tokens, rows):
            end = min(start + rows, num_tokens)
            queries = (
                self.queries[start:end].float().reshape(end - start, num_kv_heads, -1, head_dim)
            )
            # One product a KV head: for a dimension of heads `matmul` would copy the keys.
            logits = torch.bmm(queries.permute(1, 2, 0, 3).flatten(1, 2), keys).mul_(self.scale)
            logits = logits.view(num_heads, end - start, num_keys)
            logits.masked_fill_(self.key_positions > self.positions[start:end, None], float("-inf"))
            yield start, end, logits.softmax(-1)


class Observer:
    """Reads what a pass computes. Both methods may raise `StopPass`."""

    last_layer: int | None = None
    """Whose K/V ends the pass, from 0. None: it is not known, or none."""

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        """Fresh K/V of the whole pass, [total, num_kv_heads, head_dim], before the layer attends
        and, unless the model's rotary kernel has, before anything writes it."""

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        """Sequence number `sequence` of the pass is about to attend."""


LayerWatch = Callable[[Any, Tensor], None]
"""Called with SGLang's layer and all queries, [total, num_heads, head_dim], by sequence."""


class PassBackend(AttentionBackend):  # type: ignore[misc]
    """A private SGLang backend: passed through `ForwardContext` for one pass, registered nowhere.
    Raises ValueError for a layer that is more than causal attention over the pool.

    In each layer all fresh K/V is written before any token attends, since one sequence may read
    what another of the same pass writes. Nothing here waits for the device.

    Args:
        runner: SGLang's ModelRunner; its pool is written at `out_slots`.
        out_slots: [w] int64, on the device.
        out_rows: [w] int64, on the device: the pass's tokens that are written; None: all.
    """

    def __init__(
        self,
        runner: Any,
        out_slots: Tensor,
        out_rows: Tensor | None = None,
        watch: LayerWatch | None = None,
    ) -> None:
        super().__init__()
        # SGLang finds both pools through the backend
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._out_slots, self._out_rows, self._watch = out_slots, out_rows, watch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Asked for by SGLang's graphs. All is laid out."""

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
        """SGLang's call, once a layer; returns [total, num_heads * v_head_dim]."""
        queries, keys, values = _checked_heads(layer, q, k, v, kwargs)
        # It waits for the layer's loads, which may be into slots that are written here.
        self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        self._observe(layer, keys, values)
        if save_kv_cache:  # else the model has, at its batch's slots, which are these
            self._write(layer, keys, values)
        # Only now: the watch reads the pass's own keys from the pool, gaps included.
        if self._watch is not None:
            self._watch(layer, queries)
        return self._attend(layer, queries, keys, values).flatten(1)

    def _observe(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """Show fresh K/V to the pass's observer, where it has one."""

    def _write(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        if not self._out_slots.numel():
            return
        if self._out_rows is not None:
            keys, values = keys[self._out_rows], values[self._out_rows]
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(self._out_slots), keys, values)

    def _attend(self, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[total, num_heads, v_head_dim]."""
        raise NotImplementedError


class MaskedAttention(PassBackend):
    """Attends as laid out."""

    def __init__(
        self,
        runner: Any,
        layout: PassLayout,
        observer: Observer | None = None,
        watch: LayerWatch | None = None,
    ) -> None:
        super().__init__(runner, layout.out_slots, layout.out_rows, watch)
        self._layout, self._observer = layout, observer
        num_entries = sum(
            (b.end - b.start) * b.num_keys for s in layout.sequences for b in s.blocks if b.masked
        )
        # For one layer they would be kept in vain: on the CPU at 5% of the time, in page faults.
        is_for_one = observer is not None and observer.last_layer == 1
        # 2 bytes a number, as nearly all models; float32 takes twice the limit.
        self._masks: dict[tuple[int, int], Tensor] | None = (
            None if is_for_one or 2 * num_entries > MASK_BYTES else {}
        )

    def _observe(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        if self._observer is not None:
            self._observer.on_kv(layer.layer_id, keys, values)

    def _attend(self, layer: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # Not like the queries: heads of values may have another size.
        out = queries.new_empty(*queries.shape[:2], layer.v_head_dim)
        for index, sequence in enumerate(self._layout.sequences):
            rows, scale = sequence.rows, layer.scaling
            seen_keys, seen_values = self._gather(layer.layer_id, sequence, keys, values)
            if self._observer is not None:
                attention = SequenceAttention(
                    queries[rows], seen_keys, sequence.positions, sequence.key_positions, scale
                )
                self._observer.on_attention(layer.layer_id, index, attention)
            self._attend_in_blocks(index, queries[rows], seen_keys, seen_values, scale, out[rows])
        return out

    def _gather(
        self, layer_id: int, sequence: SequenceLayout, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All K/V the sequence may see, [m, num_kv_heads, head_dim] each, in the model's dtype."""
        gathered = []
        for buffer, fresh in (
            (self.token_to_kv_pool.get_key_buffer(layer_id), keys),
            (self.token_to_kv_pool.get_value_buffer(layer_id), values),
        ):
            # The pool may keep another dtype than the model computes in.
            seen = buffer[sequence.kv_slots].to(fresh.dtype)
            if sequence.own:
                # From the layer's tensors: what has no slots is nowhere in the pool.
                seen = torch.cat([seen, fresh[sequence.rows]])
            gathered.append(seen if sequence.key_order is None else seen[sequence.key_order])
        return gathered[0], gathered[1]

    def _attend_in_blocks(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor
    ) -> None:
        """One call per block of queries, over the keys that its last query sees."""
        # Query heads that share a KV head form one dimension over which keys are expanded without a
        # copy: on the CPU as fast as `enable_gqa`, which not every CUDA kernel supports together
        # with a mask.
        queries = queries.reshape(queries.shape[0], keys.shape[1], -1, queries.shape[2])
        group = queries.shape[2]
        for block in self._layout.sequences[index].blocks:
            query = queries[block.start : block.end].permute(1, 2, 0, 3)
            key, value = (
                seen[: block.num_keys].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
                for seen in (keys, values)
            )
            mask = self._mask(index, block, queries.dtype) if block.masked else None
            attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
            out[block.start : block.end] = attended.flatten(0, 1).transpose(0, 1)

    def _mask(self, index: int, block: Block, dtype: torch.dtype) -> Tensor:
        """[queries, keys] of 0 and -inf: on the CPU 10 to 30% faster than booleans."""
        kept = {} if self._masks is None else self._masks
        if (index, block.start) not in kept:
            sequence = self._layout.sequences[index]
            hidden = (
                sequence.key_positions[: block.num_keys]
                > sequence.positions[block.start : block.end, None]
            )
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            kept[index, block.start] = mask.masked_fill_(hidden, float("-inf"))
        return kept[index, block.start]


def _checked_heads(
    layer: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's arguments of a backend, by heads: [total, num_heads, head_dim] each.

    Raises:
        ValueError: the layer is more than causal attention over the pool.
    """
    if k is None or v is None:
        raise ValueError(
            f"layer {layer.layer_id}: the pass does not support K/V shared with another layer"
        )
    # What no layer's attributes tell at the start (model_support.py). Ignored, each of them would
    # give wrong KV without a word.
    if found := [name for name, value in kwargs.items() if value is not None]:
        raise ValueError(f"layer {layer.layer_id}: the pass does not support {', '.join(found)}")
    return (
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
    )
