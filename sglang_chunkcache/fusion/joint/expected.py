"""KV that a prompt's chunks have before it is computed: what joint encoding would compare, for `explain`.

    head | A: matched | B: cached elsewhere, keys turned to B's place | C: nowhere, left out | question

B's blocks are those that computing would give as far as B does not depend on what precedes it. Reads alone; what it returns is
read layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radix_ext import text_before
from radix_ext.cfo import Prefix
from radix_ext.moved_plan import Candidate
from radix_ext.sources import ChunkSources, DeviceCopy, HostCopy
from sglang_chunkcache.fusion.relocate import RotaryTable, placed
from sglang_chunkcache.scheduler.node import ChunkIdentity, state
from sglang_chunkcache.wire.spans import JointRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LayerKv = Callable[[int], tuple[Tensor, Tensor]]
"""Layer to keys and values, [num_tokens, num_kv_heads, head_dim], the pool's dtype."""


class KnownChunks:
    """Of one rank.

    Args:
        pool: as in `SlotEncoder`.
        table: the model's.
    """

    def __init__(self, pool: Any, table: RotaryTable, sources: ChunkSources) -> None:
        self._pool, self._table, self._sources = pool, table, sources

    def units(self, wish: JointRequest, req: Req, slots: Tensor, cached: int) -> list[tuple[int, bool, LayerKv]]:
        """(blocks, whether they are exact, the tokens of these blocks) of each chunk that has any and is known.

        Args:
            slots: [num_matched] int64, of the exact prefix.
            cached: its tokens with those that host memory has; of these only what is known otherwise is compared.
        """
        spans = state(req).spans
        assert spans is not None
        heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
        chunks, starts = tuple(span.chunk for span in spans.spans), wish.units(spans.spans, len(req.origin_input_ids))
        found = list[tuple[int, bool, LayerKv]]()
        for index, (span, head) in enumerate(zip(spans.spans, heads, strict=True)):
            end = span.start + len(starts[index]) * wish.block
            if span.end <= len(slots):
                read: LayerKv | None = partial(self._in_pool, slots[span.start : end])
            else:
                options = self._sources.candidates(ChunkIdentity(span.chunk, req.extra_key, req.cache_salt), head)
                read = self._elsewhere(options, chunks[:index], span.start, end)
            if end > span.start and read is not None:
                found.append((len(starts[index]), span.start < cached, read))
        return found

    # Private, in order of use

    def _in_pool(self, slots: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.k_buffer[layer][slots], self._pool.v_buffer[layer][slots]

    def _elsewhere(self, options: Sequence[Candidate], before: Prefix, start: int, end: int) -> LayerKv | None:
        """Of the source that has seen most of the chunks `before`, among equals the first: on the device."""
        source = max(options, key=lambda each: len(set(before).intersection(each.prefix)), default=None)
        device = self._pool.k_buffer[0].device
        new = torch.arange(start, end, device=device)
        if isinstance(source, DeviceCopy):
            read = partial(self._in_pool, source.node.value[: end - start])
            return placed(self._table, read, source.start + new - start, new)
        if isinstance(source, HostCopy):
            blob = source.variant.blob

            def decoded(layer: int) -> tuple[Tensor, Tensor]:
                keys, values = blob.read(device, range(layer, layer + 1))
                return keys[0, : end - start], values[0, : end - start]

            return placed(self._table, decoded, None, new)
        return None
