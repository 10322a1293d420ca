"""Which servers get no storage: where KV could not be named, or ranks would disagree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

from sglang_chunkcache.config import ChunkCacheConfig  # noqa: E402
from sglang_chunkcache.storage.opening import create_storage  # noqa: E402


def context(pool: Any = None, **flags: Any) -> Any:
    args = {"enable_memory_saver": False, "tp_size": 1, "enable_lora": None, "lora_paths": None}
    return SimpleNamespace(
        server_args=SimpleNamespace(**args | flags),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool)),
    )


def pool_of(dtype: Any) -> MHATokenToKVPool:
    return MHATokenToKVPool(8, 1, dtype, 1, 4, 1, "cpu", False)


@pytest.mark.parametrize(
    ("ctx", "message"),
    [
        (context(enable_memory_saver=True), "--enable-memory-saver"),
        (context(enable_lora=True), "--lora-paths"),
        (context(lora_paths=["a"]), "--lora-paths"),
        (context(pool_of(torch.float8_e4m3fn)), "KV of float8_e4m3fn in a MHATokenToKVPool"),
        (context(SimpleNamespace(dtype=torch.bfloat16)), "KV of bfloat16 in a SimpleNamespace"),
    ],
)
def test_storage_that_cannot_be_is_refused_by_name(ctx: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_storage(ctx, ChunkCacheConfig(storage_backend="file"), lambda: 1 << 30)


def test_no_storage_where_none_is_wanted() -> None:
    assert create_storage(None, ChunkCacheConfig(), lambda: 1 << 30) is None
