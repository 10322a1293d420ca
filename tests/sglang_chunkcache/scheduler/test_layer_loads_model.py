"""Prefills behind a prefix that comes from host memory while they run:
hidden states are those of a prefix that was there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.fusion.recompute import run_extend, run_pass
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.scheduler.layer_loads import LayerLoads
from tests import models
from tests.kit.pricing import make_pricing

PREFIX, PROMPT = 60, 80
TOKENS = [(7 * n) % models.VOCAB for n in range(PROMPT)]
SLOTS, SLOW_S = torch.arange(1, PROMPT + 1), 0.05


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The runner, and what loads the prefix: (layers ahead) -> nothing.
    Its slots hold NaN before."""
    runner = models.runner("llama")
    device = runner.token_to_kv_pool
    row = models.make_row(runner, SLOTS)
    run_extend(runner, row, TOKENS, 0, PREFIX)
    pool = HostPool(device, 1 << 20)
    slots = pool.alloc(PREFIX)
    assert slots is not None
    pool.save(SLOTS[:PREFIX], slots)
    start = LayerLoads.start

    def slowed(loads: LayerLoads, copy: Any, *args: Any, **kwargs: Any) -> int:
        def late(layers: range) -> None:
            time.sleep(SLOW_S * len(layers))
            copy(layers)

        return start(loads, late, *args, **kwargs)

    monkeypatch.setattr(LayerLoads, "start", slowed)

    def load(num_ahead: int) -> HostPool:
        for buffer in (*device.k_buffer, *device.v_buffer):
            buffer[SLOTS] = float("nan")
        pool.load(pool.prepare(slots), SLOTS[:PREFIX], num_ahead=num_ahead, clock=make_pricing())
        return pool

    yield runner, load
    device.register_layer_transfer_counter(None)
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer[SLOTS] = 0


def prefill(runner: Any) -> Tensor:
    return run_extend(runner, 1, TOKENS, PREFIX, PROMPT)


def our_pass(runner: Any) -> Tensor:
    positions = torch.arange(PREFIX, PROMPT)
    request = SparseRequest(positions, SLOTS)
    hidden = run_pass(
        runner, [PassSequence(torch.tensor(TOKENS[PREFIX:]), request, SLOTS[PREFIX:])]
    )
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("forward", [prefill, our_pass])
def test_layers_that_come_beside_are_those_that_were_there(loaded: Any, forward: Any) -> None:
    """And a forward that does not wait reads NaN."""
    runner, load = loaded
    pool = load(models.NUM_LAYERS)
    expected = forward(runner)
    assert not pool.finish()
    for num_ahead in range(models.NUM_LAYERS):
        load(num_ahead)
        assert torch.equal(forward(runner), expected)
        assert not pool.finish()
    load(0)
    counter = runner.token_to_kv_pool.layer_transfer_counter
    runner.token_to_kv_pool.register_layer_transfer_counter(None)
    assert forward(runner).isnan().all()
    runner.token_to_kv_pool.register_layer_transfer_counter(counter)
    for layer in range(models.NUM_LAYERS):
        counter.wait_until(layer)
    pool.finish()
