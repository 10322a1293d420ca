"""Counts what a pass launches on a device, without one.

A device tensor here is a CPU tensor that came from the model, from its pool, from `upload`, from an
operation that was told its device, or from another one. Each operation on such tensors is a launch,
but for views and empty memory. Modules without children are one launch, as SGLang's CUDA kernels
are, and so are the write of K/V and FlashInfer's `run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OUTSIDE = -1
"""In `Launches.by_layer`, what is before and behind the layers."""
FREE = ("empty", "new_empty", "empty_like", "detach", "_local_scalar_dense")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`by_layer[layer]` counts names of operations."""

    def __init__(self, *device_tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_layer: dict[int, Counter[str]] = {}
        self._layer, self._inside = OUTSIDE, 0
        self._device: dict[int, Any] = {}
        self.tag(device_tensors)

    def tag(self, tensors: Any) -> None:
        """These are on the device."""
        for each in tree_leaves(tensors):
            if isinstance(each, torch.Tensor):
                # held, since another storage could get the address
                storage = each.untyped_storage()
                self._device[storage._cdata] = storage

    def add(self, name: str) -> None:
        """A launch, unless another one is counted that contains it."""
        if not self._inside:
            self.by_layer.setdefault(self._layer, Counter())[name] += 1

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """What runs within is one launch."""
        self.add(name)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def total(self, layer: int | None = None) -> int:
        return sum(
            sum(names.values())
            for at, names in self.by_layer.items()
            if layer is None or at == layer
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.untyped_storage()._cdata in self._device for each in inputs):
            returns = func._schema.returns
            is_view = any(each.alias_info and not each.alias_info.is_write for each in returns)
            name = func._schema.name.removeprefix("aten::")
            if not is_view and name not in FREE:
                self.add(name)
            self.tag(out)
        return out

    # Modules

    def _enter(self, module: Any, _: Any) -> None:
        if type(module).__name__.endswith("DecoderLayer"):
            self._layer = module.self_attn.attn.layer_id
        if _is_fused(module):
            self.add(type(module).__name__)
            self._inside += 1

    def _leave(self, module: Any, *_: Any) -> None:
        self._inside -= _is_fused(module)
        if type(module).__name__.endswith("DecoderLayer"):
            self._layer = OUTSIDE


class _Factories(TorchFunctionMode):
    """Tensors that are made with a device are on it."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("device") is not None and isinstance(out, torch.Tensor):
            if func.__name__ not in FREE:
                self._launches.add(func.__name__)
            self._launches.tag(out)
        return out


def _is_fused(module: Any) -> bool:
    return not isinstance(module, RadixAttention) and next(module.children(), None) is None


def count(
    run: Callable[[Launches], object],
    *,
    runner: Any,
    slots: torch.Tensor,
    patch: pytest.MonkeyPatch,
    flashinfer: Any = None,
) -> Launches:
    """What `run` launches. Uploads of host tensors are copies, counted as `upload`.

    Args:
        slots: on the device.
        flashinfer: the module whose wrapper's `run` is a launch.
    """
    from sglang_chunkcache.attention import flashinfer as ours
    from sglang_chunkcache.attention import masked_layout, sparse_layout
    from sglang_chunkcache.fusion import measure, recompute
    from sglang_chunkcache.fusion.selectors import base, critical

    pool = runner.token_to_kv_pool
    launches = Launches(slots, pool.k_buffer, pool.v_buffer, runner.req_to_token_pool.req_to_token)

    def upload(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        if tensor.untyped_storage()._cdata in launches._device:
            return tensor
        with launches.one("upload"):
            out = tensor.clone()
        launches.tag(out)
        return out

    def write(*args: Any, **kwargs: Any) -> None:
        with launches.one("set_kv_buffer"):
            set_kv_buffer(*args, **kwargs)

    set_kv_buffer = pool.set_kv_buffer
    with patch.context() as patched, ExitStack() as entered:
        for module in (ours, masked_layout, sparse_layout, measure, recompute, base, critical):
            patched.setattr(module, "upload", upload)
        patched.setattr(pool, "set_kv_buffer", write)
        if flashinfer is not None:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
            attend = wrapper.run

            def run_wrapper(*args: Any, **kwargs: Any) -> Any:
                with launches.one("FlashInfer"):
                    return attend(*args, **kwargs)

            patched.setattr(wrapper, "run", run_wrapper)
        for handle in (
            hooks.register_module_forward_pre_hook(launches._enter),
            hooks.register_module_forward_hook(launches._leave, always_call=True),
        ):
            entered.callback(handle.remove)
        entered.enter_context(torch.no_grad())
        entered.enter_context(launches)
        entered.enter_context(_Factories(launches))
        run(launches)
    return launches
