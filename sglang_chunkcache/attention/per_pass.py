"""The kernel of each pass: that of the least estimated time.

    estimate = milliseconds a key, timed at the start * keys that the busiest multiprocessor walks

Large blocks are fast, but in a small pass they are padded and fewer than multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from sglang_chunkcache.attention.base import SparseRequest
from sglang_chunkcache.attention.flashinfer import FlashInferSparse
from sglang_chunkcache.attention.sparse_layout import SparseLayout


class KernelPerPass:
    """`SparseAttention` by several kernels.

    Args:
        kernels: name -> kernel, warmed up; at least one.
        ms_per_key: name -> milliseconds of a layer over its `busiest_keys`.
    """

    def __init__(
        self, kernels: Mapping[str, FlashInferSparse], ms_per_key: Mapping[str, float]
    ) -> None:
        self.kernels, self._ms_per_key = kernels, ms_per_key
        self.passes = dict.fromkeys(kernels, 0)
        """Kernel -> passes planned for it."""
        self._planned: FlashInferSparse | None = None

    def only(self, names: Iterable[str]) -> KernelPerPass:
        """Of these kernels."""
        return KernelPerPass({name: self.kernels[name] for name in names}, self._ms_per_key)

    def plan(self, requests: Sequence[SparseRequest]) -> Tensor | None:
        """Lay out the pass for each kernel, upload the fastest; see `SparseAttention.plan`."""
        # A plan that raises an error leaves nothing that `run` could take for this pass.
        self._planned = None
        layouts = {name: kernel.lay_out(requests) for name, kernel in self.kernels.items()}
        fastest = next(iter(layouts))
        if len(layouts) > 1:
            fastest = min(layouts, key=lambda name: self._estimated_ms(name, layouts[name]))
        order = self.kernels[fastest].plan(requests, layouts[fastest])
        self._planned = self.kernels[fastest]
        self.passes[fastest] += 1
        return order

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer; see `SparseAttention.run`."""
        if self._planned is None:
            raise RuntimeError("plan comes before run")
        return self._planned.run(queries, keys, values)

    def _estimated_ms(self, name: str, layout: SparseLayout) -> float:
        return self._ms_per_key[name] * self.kernels[name].busiest_keys(layout)
