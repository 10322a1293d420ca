"""Our patches of SGLang: what the one around `generate_request` does,
and that a missing one is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    EmbeddingReqInput,
    GenerateReqInput,
)
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_chunkcache import config, hooks, launch_server, start_steps
from sglang_chunkcache.attention.slot_map import MappedPool, SlotMap
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.cpu.one_copy import VirtualAllocator
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.guard.lethal import Guard, Limits
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.misplaced import Misplaced
from tests.reference.one_copy import CountingVirtual
from tests.reference.scheduler import Scheduler
from tests.reference.scheduler import config as scheduler_config

MANAGER = SimpleNamespace()
METRICS = Metrics(prometheus=False)
LETHAL = GenerateReqInput(text="x", priority=2**63)


def outputs(obj: Any, raw_request: Any = None, *, guarded: bool = True) -> list[Any]:
    """What a watched `generate_request` gives: SGLang's, which says what it was called with."""

    async def generate(*given: Any) -> AsyncIterator[Any]:
        yield given

    guard = Guard(lambda: Limits(1101, None), lambda: METRICS) if guarded else None
    watch = hooks._watched(Misplaced(lambda: METRICS), guard)

    async def collected() -> list[Any]:
        return [output async for output in watch(generate, MANAGER, obj, raw_request)]

    return asyncio.run(collected())


def test_lethal_request_does_not_reach_sglang() -> None:
    """The error comes where SGLang's own come: with the first step, not with the call."""
    with pytest.raises(RequestError, match="priority: must fit"):
        outputs(LETHAL)


def test_chunks_on_v1_are_seen_with_and_without_the_guard() -> None:
    """SGLang gets the request as it came, its body untouched."""
    body = {"chunks": [{"text": "x"}]}
    request = SimpleNamespace(scope={"path": "/v1/chat/completions"}, _json=body)
    assert outputs(LETHAL, request, guarded=False) == [(MANAGER, LETHAL, request)]
    assert outputs(GenerateReqInput(text="x"), request)[0][2] is request
    assert METRICS.totals()["misplaced"] == {"chunks": 2}


@pytest.mark.parametrize(
    "obj", [GenerateReqInput(text="x"), EmbeddingReqInput(text="x"), None], ids=type
)
def test_other_request_is_sglangs(obj: Any) -> None:
    """With what it was called with. Embeddings have other fields."""
    assert outputs(obj, "raw") == [(MANAGER, obj, "raw")]


def test_missing_hooks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs that it could not apply one, and goes on."""
    in_rank = {hooks.GET_INTERNAL_STATE, hooks.ADD_TO_QUEUE, hooks.FORWARD}
    every = {*in_rank, hooks.GENERATE_REQUEST, hooks.DECIDE_AUTH}
    waits = {hooks.ADD_TO_BATCH, *hooks.UPDATES, hooks.CHECK_WEIGHTS}
    fused = {"reuse": "fused", "host_mib": 0}
    maps = {hooks.BUILD_ALLOCATOR, hooks.CHECK_POOL}
    for knobs, is_main, missing in (
        (fused, True, every | waits),
        ({**fused, "one_copy": "on"}, True, every | waits | maps),
        ({}, True, every),
        ({"host_mib": 0}, False, in_rank),
        ({"tree": "stock"}, False, {hooks.GET_INTERNAL_STATE}),
        ({"storage_backend": "file"}, True, every | waits),
    ):
        settings = ChunkCacheConfig(**knobs)
        monkeypatch.setattr(HookRegistry, "_patched", set())
        assert set(hooks.missing_hooks(settings, is_main=is_main)) == missing
        monkeypatch.setattr(HookRegistry, "_patched", missing)
        assert hooks.missing_hooks(settings, is_main=is_main) == []


@pytest.mark.parametrize("rank", ["tp_rank", "dp_rank", None])
def test_loading_is_shown_of_the_first_rank(
    rank: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At a terminal, where the file is named; no rank names a later step but the first."""
    assert hooks.LOAD_MODEL not in hooks.missing_hooks(ChunkCacheConfig(), is_main=False)
    path = tmp_path / "step"
    monkeypatch.setenv(start_steps.FILE, str(path))
    assert hooks.LOAD_MODEL in hooks.missing_hooks(ChunkCacheConfig(), is_main=False)
    ranks = {name: int(name == rank) for name in ("tp_rank", "pp_rank", "dp_rank")}
    told: list[str] = []

    def load(runner: Any) -> str:
        told.append(path.read_text() if path.exists() else "")
        return "loaded"

    assert hooks._tell_loading(load, SimpleNamespace(**ranks)) == "loaded"
    assert (start_steps.WEIGHTS in told[0]) == (rank is None)


def test_sglang_counts_slots_where_rows_are_shared() -> None:
    """Its allocator is replaced, and its check adds up to what it expects."""
    pool = CountingVirtual.of(20, 60)._kvcache
    stock = TokenToKVPoolAllocator(20, torch.float32, "cpu", pool, False)
    assert hooks._virtual_slots(stock) is stock, "the pool has no virtual slots"
    pool = Mapped()
    stock = TokenToKVPoolAllocator(20, torch.float32, "cpu", pool, False)
    made = hooks._virtual_slots(stock)
    assert (type(made), made.size, made.available_size()) == (VirtualAllocator, 20, 20)

    scheduler = Scheduler(20, scheduler_config(), allocator=CountingVirtual.of(20, 60))
    own, at = scheduler.allocator.alloc(12), torch.arange(12)
    slot_map = scheduler.allocator.slot_map
    slot_map.share(scheduler.allocator.take(12), slot_map.rows(own), old=at, new=at)
    checker = SimpleNamespace(tree_cache=scheduler.cache)
    stats = PoolStats(12, 0.6, scheduler.allocator.available_size(), 0)
    told = hooks._add_up_slots(lambda _, counted, uncached: (counted, uncached), checker, stats, 24)
    assert told[0].full_available_size + told[0].full_evictable_size + told[1] == 20


class Mapped(MappedPool):
    slot_map = SlotMap(20, 60)


def test_arrival_and_update_are_told_to_our_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang returns stays; a server's other caches are left alone."""
    told: list[Any] = []
    cache = SimpleNamespace(arrived=told.append, doubt_weights=lambda: told.append("doubt"))
    monkeypatch.setattr(hooks, "_ours", lambda cache: cache)
    scheduler, nobody = SimpleNamespace(tree_cache=cache), SimpleNamespace(tree_cache=None)
    assert hooks._tell_arrival("result", scheduler, "req", is_retracted=True) == "result"
    hooks._tell_arrival(None, nobody, "req")
    for each in (scheduler, nobody, None):
        hooks._tell_update(SimpleNamespace(scheduler=each), "request")
    for action in ("checksum", "reset_tensors"):
        check = CheckWeightsReqInput(action=action)
        hooks._tell_check(SimpleNamespace(scheduler=scheduler), check)
    assert told == ["req", "doubt", "doubt"]


@pytest.mark.parametrize("is_idle", [False, True])
def test_request_that_is_put_off_blocks_nobody(
    is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does SGLang 0.5.21 take a batch for full that is empty: nothing would ever run."""
    monkeypatch.setattr(hooks, "_ours", lambda cache: cache)
    answer: Any = None
    line = SimpleNamespace(add=lambda adder, req, add, match: answer and add(), is_idle=is_idle)
    cache = SimpleNamespace(line=line, admitting=lambda req: nullcontext())
    adder = SimpleNamespace(tree_cache=cache)
    req = SimpleNamespace(init_next_round_input=print)

    def told(said: Any) -> Any:
        return hooks._add_or_wait(lambda *args: said, adder, req)

    assert told("added") is AddReqResult.CONTINUE
    answer = True
    assert told("added") == "added"
    full = AddReqResult.OTHER if is_idle else AddReqResult.NO_TOKEN
    assert told(AddReqResult.NO_TOKEN) is full
    adder.tree_cache = None
    assert told(AddReqResult.NO_TOKEN) is AddReqResult.NO_TOKEN


@pytest.mark.parametrize("guard", ["off", "on"])
def test_start_without_a_hook_fails(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the guard is off: chunks on `/v1` are looked for."""
    there = {hooks.GET_INTERNAL_STATE, hooks.ADD_TO_QUEUE, hooks.FORWARD}
    monkeypatch.setattr(HookRegistry, "_patched", there)
    said: list[str] = []
    monkeypatch.setattr(config, "from_env", lambda: ChunkCacheConfig(guard=guard))
    launch_server._check_hooks(said.append)  # type: ignore[arg-type]
    assert hooks.GENERATE_REQUEST in said[0]
