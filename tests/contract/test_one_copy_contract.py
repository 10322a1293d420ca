"""What one copy of a chunk needs of SGLang. Releases without it refuse `--chunkcache-one-copy`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_chunkcache import hooks


def target(name: str) -> Any:
    module, owner, function = name.rsplit(".", 2)
    pytest.importorskip(module)
    found = getattr(getattr(importlib.import_module(module), owner), function, None)
    if found is None:
        pytest.skip(f"this release has no {name}")
    return found


def test_allocator_is_made_in_one_place() -> None:
    """For slots without pages of SGLang's own class, which we put ours in place of."""
    text = inspect.getsource(target(hooks.BUILD_ALLOCATOR))
    assert "token_to_kv_pool_allocator = TokenToKVPoolAllocator(" in text
    assert text.strip().endswith("return token_to_kv_pool_allocator")


def test_check_of_the_pool_adds_up_what_it_is_given() -> None:
    check = target(hooks.CHECK_POOL)
    assert list(inspect.signature(check).parameters)[:2] == ["self", "ps"]
    text = inspect.getsource(check)
    for name in ("ps.full_available_size", "ps.full_evictable_size", "self.max_total_num_tokens"):
        assert name in text
    assert "protected = self.tree_cache.protected_size()" in text
    stats = inspect.getmodule(check).PoolStats  # type: ignore[union-attr]
    names = {field.name for field in dataclasses.fields(stats)}
    assert {"full_available_size", "full_evictable_size"} <= names


def test_pool_is_read_by_its_getters() -> None:
    """Of attention. What is written is indexed by the locations that are given."""
    backend = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    text = inspect.getsource(backend.TorchNativeAttnBackend)
    assert "k_buffer" not in text
    assert "k_cache[per_req_tokens]" in text
    assert list(inspect.signature(MHATokenToKVPool.set_kv_buffer).parameters)[1:3] == [
        "layer",
        "loc_info",
    ]


def test_allocator_clears_itself_with_its_pool_known() -> None:
    """Ours asks the pool for its map then."""
    text = inspect.getsource(TokenToKVPoolAllocator.__init__)
    assert text.index("super().__init__(") < text.index("self.clear()")
