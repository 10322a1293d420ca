"""`create_cache`: what it puts together from a configuration and a loaded model,
and that a restart finds what was stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_chunkcache import hooks, plugin
from sglang_chunkcache.fusion.promise import Fuser
from sglang_chunkcache.plugin import create_cache
from sglang_chunkcache.storage.storage import Storage
from tests import models
from tests.kit.cache_integrity import hosted_only
from tests.polling import DEADLINE_S
from tests.reference.scheduler import CountingAllocator, FakeReq, Scheduler, config, marked

HEAD, CHUNK, QUESTION = [90, 91, 92], list(range(1, 21)), [100, 101]
CAPACITY = 1500

Create = Callable[..., Any]
"""`create_cache` with these knobs."""


class Served(Scheduler):
    """`Scheduler` over a cache that was made."""

    def __init__(self, cache: Any) -> None:
        super().__init__(CAPACITY, None, rows=cache.req_to_token_pool)
        self.cache, self.allocator = cache, cache.token_to_kv_pool_allocator

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        pool = self.allocator.get_kvcache()
        for layer in range(pool.layer_num):
            pool.get_kv_buffer(layer)  # which waits for what is loaded
            for req, start, end in batch:
                for side, buffers in enumerate((pool.k_buffer, pool.v_buffer), 1):
                    values = torch.tensor(req.all_ids[start:end]).float()[:, None, None]
                    buffers[layer][self.slots(req, start, end)] = values * side + layer


def kv_of(scheduler: Served, req: FakeReq) -> torch.Tensor:
    """Of the request's head and chunk."""
    slots = torch.tensor(scheduler.slots(req, 0, len(HEAD + CHUNK)))
    pool = scheduler.allocator.get_kvcache()
    return torch.stack([buffer[slots] for buffer in (*pool.k_buffer, *pool.v_buffer)])


def request() -> FakeReq:
    spans = marked([(len(HEAD), len(HEAD + CHUNK))], promoted_len=1)
    return FakeReq([*HEAD, *CHUNK, *QUESTION], spans)


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Create]:
    """In a scheduler's process whose hooks are in."""
    runner = models.runner("llama")
    made: list[Any] = []

    def create(**knobs: Any) -> Any:
        sizes = {"host_mib": 1, "store_mib": 1}
        told = config(**{**sizes, "move": "always", "recompute_attention": "masked", **knobs})
        for name, value in told.to_env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(HookRegistry, "_patched", set())
        monkeypatch.setattr(HookRegistry, "_patched", set(hooks.missing_hooks(told, is_main=False)))
        pool, worker = runner.token_to_kv_pool, SimpleNamespace(model_runner=runner)
        allocator = CountingAllocator(CAPACITY, torch.float32, "cpu", pool, False)
        params = CacheInitParams(False, runner.req_to_token_pool, allocator, 1)
        given = {"params": params, "server_args": runner.server_args, "tp_rank": 0}
        made.append(create_cache(SimpleNamespace(**given, tp_worker=worker)))
        return made[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield create
    for cache in made:
        if cache.tiers.storage is not None:
            cache.tiers.storage.close()
    runner.token_to_kv_pool.register_layer_transfer_counter(None)


def file_in(folder: Path) -> dict[str, Any]:
    return {
        "storage_backend": "file",
        "storage_backend_extra_config": json.dumps({"directory": str(folder)}),
    }


@pytest.mark.parametrize("reuse", ["exact", "fused"])
def test_without_a_storage(create: Create, reuse: str) -> None:
    cache = create(reuse=reuse)
    tiers = cache.tiers
    assert tiers.host.tree is cache
    assert tiers.storage is None
    assert tiers.stored is None
    assert isinstance(tiers.fuser, Fuser) == (reuse == "fused")
    if reuse == "fused":
        # cuDNN compiles a plan for each shape of a masked pass.
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        assert tiers.fuser.tree is cache
        assert tiers.fuser.store is tiers.host.index
        assert 2 << 20 <= tiers.fuser.store.held.max_bytes < 2.01 * (1 << 20)
        assert tiers.fuser.tier is None
        assert tiers.fuser.pricing is tiers.host.pricing


@pytest.mark.parametrize("reuse", ["exact", "fused"])
def test_restart_loads_chains_from_the_storage(create: Create, tmp_path: Path, reuse: str) -> None:
    """The storage is started before the chains are loaded, which would find it off."""
    knobs = {"reuse": reuse, **file_in(tmp_path / "kv")}
    cache = create(**knobs)
    assert isinstance(cache.tiers.storage, Storage)
    assert not cache.tiers.storage.is_off
    assert cache.tiers.stored.storage is cache.tiers.storage
    if reuse == "fused":
        assert cache.tiers.fuser.tier.storage is cache.tiers.storage
    scheduler, req = Served(cache), request()
    scheduler.serve(req)
    scheduler.forward()  # of others, after which the chain is saved
    assert cache.tiers.host.stats()["tokens"] == len(HEAD + CHUNK)
    assert cache.tiers.storage.loader.drain(DEADLINE_S)
    cache.release_host_resources()

    cache = create(**knobs)
    assert cache.tiers.host.stats()["tokens"] == len(HEAD + CHUNK)
    assert len(hosted_only(cache.tiers.host)) == 1
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.zero_()
    scheduler, req = Served(cache), request()
    assert scheduler.admit(req, 1000) == len(HEAD + CHUNK)
    loaded = kv_of(scheduler, req)
    scheduler.release(req, is_insert=False)
    computed = Served(create(reuse="exact", host_mib=0))
    req = request()
    assert computed.admit(req, 1000) == 0
    assert torch.equal(loaded, kv_of(computed, req))
    computed.release(req, is_insert=False)


@pytest.mark.parametrize("reuse", ["exact", "fused"])
def test_storage_counts_a_request_once(create: Create, tmp_path: Path, reuse: str) -> None:
    """By the fuser, if there is one, else by the chains."""
    cache = create(reuse=reuse, **file_in(tmp_path / "kv"))
    with mock.patch.object(cache.tiers.storage.index, "ask") as ask:
        req = request()
        cache.arrived(req)
        Served(cache).serve(req, answer=[50])
    assert ask.call_count == 1


def test_without_host_memory(create: Create, tmp_path: Path) -> None:
    """Moved KV has a pool of its own; exact chains have nowhere to go."""
    cache = create(reuse="exact", host_mib=0)
    assert cache.tiers.host.pool.num_slots == 0
    assert "host" not in cache.stats()
    cache = create(reuse="fused", host_mib=0, **file_in(tmp_path / "kv"))
    assert cache.tiers.stored is None
    assert cache.tiers.fuser.store is cache.tiers.host.index
    assert cache.tiers.fuser.tier.storage is cache.tiers.storage
    cache.tiers.storage.close()
    with pytest.raises(ValueError, match="--chunkcache-storage-backend: exact chains"):
        create(reuse="exact", host_mib=0, **file_in(tmp_path / "other"))


@pytest.mark.parametrize(
    ("is_on", "low_first", "ranks"),
    [(False, False, [0, 0]), (True, False, [1, 7]), (True, True, [-1, -7])],
)
def test_waiting_requests_rank_as_sglang_is_told(
    is_on: bool, low_first: bool, ranks: list[int]
) -> None:
    args = SimpleNamespace(
        enable_priority_scheduling=is_on, schedule_low_priority_values_first=low_first
    )
    rank_of = plugin._rank_of(args)
    assert [rank_of(SimpleNamespace(priority=each)) for each in (1, 7)] == ranks


def test_missing_hook_stops_the_start(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "missing_hooks", lambda settings, is_main: [hooks.ADD_TO_QUEUE])
    with pytest.raises(RuntimeError, match="did not apply our hooks"):
        create()
