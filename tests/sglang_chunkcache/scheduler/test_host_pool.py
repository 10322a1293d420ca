"""SGLang's host pool under ours, on a real KV pool."""

from __future__ import annotations

import re
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from torch import nn

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler import host_memory, host_pool
from sglang_chunkcache.scheduler.host_memory import HostMemory
from sglang_chunkcache.scheduler.host_pool import HostPool, NoSlots
from tests import models
from tests.polling import DEADLINE_S
from tests.reference.memory_host import FixedCosts

pytestmark = pytest.mark.matrix


def context(pool: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: pool, device="cuda")
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    group = SimpleNamespace(world_size=1, broadcast_object=lambda told: told)
    layers = range(getattr(pool, "layer_num", 0))
    model = nn.ModuleList(RadixAttention(2, 16, 1.0, 1, layer_id=layer) for layer in layers)
    worker = SimpleNamespace(model_runner=SimpleNamespace(tp_group=group, model=model))
    args = SimpleNamespace(dp_size=1, enable_dp_attention=False, enable_pdmux=False, pp_size=1)
    return SimpleNamespace(params=params, server_args=args, tp_worker=worker)


def create(ctx: Any, host_mib: int | None = None) -> HostPool:
    return HostMemory(ctx, ChunkCacheConfig(host_mib=host_mib)).create_pool()


def created(ctx: Any, host_mib: int | None = None) -> HostPool:
    pool = create(ctx, host_mib)
    assert type(pool) is HostPool
    return pool


def allocated(pool: HostPool, num_tokens: int) -> torch.Tensor:
    slots = pool.alloc(num_tokens)
    assert slots is not None
    return slots


class Gate:
    """Holds back the copies of a pool's layers on their thread."""

    def __init__(self, pool: HostPool) -> None:
        self._is_open = [Event() for _ in range(pool.num_layers)]
        start = pool.loads.start

        def held(copy: Any, *args: Any, **kwargs: Any) -> int:
            def late(layers: range) -> None:
                for layer in layers:
                    assert self._is_open[layer].wait(DEADLINE_S)
                copy(layers)

            return start(late, *args, **kwargs)

        pool.loads.start = held  # type: ignore[method-assign]

    def open(self, layer: int) -> None:
        self._is_open[layer].set()


@pytest.fixture
def device() -> Any:
    """Other tests use it, too."""
    pool = models.runner("llama").token_to_kv_pool
    assert type(pool) is MHATokenToKVPool
    yield pool
    pool.register_layer_transfer_counter(None)


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_what_was_saved_is_loaded_bit_for_bit(device: Any, num_ahead: int) -> None:
    """To other slots, in no order, all layers in line and beside who reads them."""
    pool = HostPool(device, 1 << 20)
    buffers = [*device.k_buffer, *device.v_buffer]
    for buffer in buffers:
        buffer.normal_()
    sources, targets = torch.tensor([7, 3, 9, 4]), torch.tensor([20, 22, 21, 30])
    wanted = [buffer[sources].clone() for buffer in buffers]
    others = [buffer[31:40].clone() for buffer in buffers]
    slots = allocated(pool, 4)
    pool.save(sources, slots)
    for buffer in buffers:
        buffer[:31].zero_()
    pool.load(pool.prepare(slots), targets, num_ahead=num_ahead, clock=FixedCosts())
    for layer in reversed(range(pool.num_layers)):
        device.get_kv_buffer(layer)
    assert not pool.finish()
    for buffer, want, other in zip(buffers, wanted, others, strict=True):
        assert torch.equal(buffer[targets], want)
        assert torch.equal(buffer[31:40], other)
        assert not buffer[23:30].any()


def test_slots_are_uploaded_without_a_wait(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from pageable memory they may wait for all that the stream has queued."""
    pool, sglangs, on_device = HostPool(device, 1 << 20), mock.Mock(layer_num=1), torch.tensor([1])
    monkeypatch.setattr(pool, "_pool", sglangs)
    monkeypatch.setattr(pool, "_is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(host_pool, "upload", lambda slots, device: on_device)
    slots: Any = mock.Mock(device="cuda")
    pool.save(slots, torch.tensor([7]))
    prepared = pool.prepare(torch.tensor([7]))
    pool.load(prepared, slots, num_ahead=pool.num_layers, clock=FixedCosts())
    (saved,) = sglangs.backup_from_device_all_layer.call_args_list
    loaded = sglangs.load_to_device_per_layer.call_args_list
    assert all(call.args[1] is on_device for call in (saved, *loaded))
    assert len(loaded) == pool.num_layers


def test_reader_waits_for_its_layer(device: Any) -> None:
    """By SGLang's getters."""
    pool = HostPool(device, 1 << 20)
    gate = Gate(pool)
    pool.load(pool.prepare(allocated(pool, 1)), torch.tensor([7]), num_ahead=0, clock=FixedCosts())
    for layer in range(pool.num_layers):
        getter = device.get_value_buffer if layer else device.get_key_buffer
        reader = Thread(target=getter, args=(layer,))
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        gate.open(layer)
        reader.join(DEADLINE_S)
        assert not reader.is_alive()
    pool.finish()


def test_a_graph_of_whole_prefills_asks_for_no_layers(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is replayed without a call: all layers have to be there before."""
    assert created(context(device), 1).is_layered
    graphs = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.FULL))
    graph = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs))
    monkeypatch.setattr(cuda_graph_config, "get_exec", lambda: graph)
    assert not created(context(device), 1).is_layered


def test_layers_without_attention_are_asked_for_by_nobody(device: Any) -> None:
    """As DeciLM's: nothing is loaded beside a forward that would not wait for it."""
    asked = context(device)
    del asked.tp_worker.model_runner.model[1]
    assert not created(asked, 1).is_layered


def test_slots_are_counted(device: Any) -> None:
    pool = HostPool(device, 1 << 20)
    assert pool.num_free == pool.num_slots >= (1 << 20) // pool.token_bytes
    keys, values = device.get_kv_size_bytes()
    assert pool.token_bytes == (keys + values) // len(device.k_buffer[0])
    slots = allocated(pool, pool.num_slots - 1)
    assert pool.alloc(2) is None
    pool.free(slots)
    assert pool.num_free == pool.num_slots


def test_default_is_twice_the_device_where_that_is_there(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda: 1 << 40)
    pool = created(context(device))
    over = pool.num_slots * pool.token_bytes - 2 * sum(device.get_kv_size_bytes())
    assert 0 <= over <= 2 * pool.token_bytes
    budget = "sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes"
    monkeypatch.setattr(budget, lambda asked: -1)
    assert isinstance(create(context(device)), NoSlots)


def test_without_host_memory_there_is_none(device: Any) -> None:
    """Nor by default where the device's memory is the host's."""
    ctx = context(device)
    ctx.params.token_to_kv_pool_allocator.device = "cpu"
    assert isinstance(create(ctx), NoSlots)
    created(ctx, 1)
    assert isinstance(create(context(device), 0), NoSlots)
    pool = created(context(device), 1)
    assert 0 <= pool.num_slots * pool.token_bytes - (1 << 20) <= 2 * pool.token_bytes


@pytest.mark.parametrize("other", [None, "it has none"])
def test_ranks_agree_on_size_and_refusal(device: Any, other: str | None) -> None:
    """Rank 0's default; where one rank cannot, none does."""
    ctx = context(device)
    ctx.tp_worker.model_runner.tp_group = SimpleNamespace(
        world_size=2,
        broadcast_object=lambda mine: 4096,
        all_gather_object=lambda mine: [mine, other],
    )
    if other is None:
        pool = created(ctx)
        assert pool.num_slots == 4096 // pool.token_bytes + 1
        return
    assert isinstance(create(ctx), NoSlots)
    with pytest.raises(ValueError, match=other):
        create(ctx, 1)


@pytest.mark.parametrize("mib", [1, 1 << 40])
def test_what_cannot_be_had_is_refused_if_asked_for(device: Any, mib: int) -> None:
    pool = device if mib > 1 else SimpleNamespace()
    with pytest.raises(ValueError, match=re.escape(f"--chunkcache-host-mib {mib}: ")):
        create(context(pool), mib)
    if mib == 1:
        assert isinstance(create(context(pool)), NoSlots)


def test_pool_that_is_sized_after_graphs_is_refused_by_name(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its size is that of the addresses it may get."""
    monkeypatch.setattr(device, "post_capture_active", True)
    with pytest.raises(ValueError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        create(context(device), 1)
    assert isinstance(create(context(device)), NoSlots)


def test_captured_variants_in_a_codec_have_a_store_of_their_own() -> None:
    fused, ctx = ChunkCacheConfig(reuse="fused"), context(None)
    assert [
        HostMemory(ctx, each).has_captured
        for each in (fused, replace(fused, store_codec="int8"), ChunkCacheConfig())
    ] == [True, False, False]
