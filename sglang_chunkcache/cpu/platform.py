"""The real SGLang engine on a machine without a GPU and without `sgl_kernel`.

SGLang finds `activate` by the entry point group `sglang.srt.platforms`; it declines wherever CUDA
is available, so an installed package changes nothing on a GPU machine. The platform names torch's
own attention, which `plugin.py` registers without SGLang's padding (attention.py), and SGLang's
generic KV pool; scheduler, radix cache, HTTP server and everything else are SGLang's, unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_chunkcache import config
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

# Before SGLang: it imports transformers, which imports torchvision.
define_torchvision_ops()

from sglang.srt.platforms.cpu import CpuSRTPlatform  # noqa: E402
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: E402


def activate() -> str | None:
    """Name of the platform class for SGLang to load, or None where CUDA is available."""
    return None if torch.cuda.is_available() else f"{__name__}.CpuNativePlatform"


class CpuNativePlatform(CpuSRTPlatform):  # type: ignore[misc]
    """SGLang's CPU platform with kernels from torch alone."""

    # SGLang asks for pool and allocator classes only of a platform that is out of its tree.
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_kv_pool_cls(self, *, kind: str) -> Any:
        """SGLang's own, which need no kernels. With one copy of a chunk: of virtual slots."""
        settings = config.from_env()
        if kind != "mha" or settings is None or settings.one_copy == "off":
            return None
        from sglang_chunkcache.cpu.one_copy import OneCopyPool

        return OneCopyPool

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_mla_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        def create(size: int, *, index_head_dim: None, **settings: Any) -> Any:
            return MLATokenToKVPool(size, **settings)

        return create

    def get_paged_allocator_cls(self) -> Any:
        """None: SGLang's own."""
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        from sglang_chunkcache.compat import PAGES_WITHOUT_TRITON
        from sglang_chunkcache.cpu.allocator import PagedAllocator

        if PAGES_WITHOUT_TRITON:
            return None

        def create(size: int, page_size: int, **settings: Any) -> Any:
            if page_size > 1:
                return PagedAllocator(size, page_size, **settings)
            return TokenToKVPoolAllocator(size, **settings)

        return create
