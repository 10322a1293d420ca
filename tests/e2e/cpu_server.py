"""A server without a GPU on which runs what SGLang has for GPUs alone: adapters, HiCache
and prefill and decode servers.

python -m tests.e2e.cpu_server FLAGS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from sglang_chunkcache import launch_server
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

HOST_POOLS = "sglang.srt.mem_cache.pool_host"


def install() -> None:
    """In this process."""
    define_torchvision_ops()  # without which nothing of SGLang is imported on a CPU build
    _pin_nothing()
    if find_spec(HOST_POOLS):  # in newer releases
        _copy_to_host_memory()
    if find_spec("nixl"):
        _send_from_host_memory()


def _pin_nothing() -> None:
    def unpinned(create: Any) -> Any:
        @wraps(create)
        def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return create(*args, **kwargs)

        return created

    torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _copy_to_host_memory() -> None:
    """As sgl_kernel's `transfer_kv_direct`, which only its CUDA build has."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    def copy(
        src_layers: Sequence[torch.Tensor],
        dst_layers: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    patches: list[tuple[Any, str, Any]] = [
        (mha, "transfer_kv_direct", copy),
        (common, "_cuda_host_register", lambda *_: None),
        (base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0),  # of 10 GiB
    ]
    for module, name, value in patches:
        setattr(module, name, value)


def _send_from_host_memory() -> None:
    """SGLang tells NIXL that the pool is a GPU's."""
    from nixl._api import nixl_agent

    def on_host(method: Any) -> Any:
        told = signature(method)

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = told.bind(*args, **kwargs)
            given.arguments["mem_type"] = "DRAM"
            return method(*given.args, **given.kwargs)

        return called

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, on_host(getattr(nixl_agent, name)))


if __name__ in ("__main__", "__mp_main__"):
    install()
if __name__ == "__main__":
    launch_server.main(sys.argv[1:])
