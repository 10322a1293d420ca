"""Exact gaps on a real model: what a fused request computes for others is what an ordinary prefill
computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.scheduler.node import facts
from tests import models
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.scheduler import FakeReq, config, marked

pytestmark = pytest.mark.engine

HEAD, QUESTION = [3, 5], [7, 11, 13]
A, B, C, D = ([10 * start + offset for offset in range(1, 8)] for start in (2, 3, 4, 5))
TOLERANCE = 5e-5
"""Of keys and values of the float32 model between two prefills of other pieces."""


@pytest.fixture
def runner() -> Iterator[Any]:
    runner = models.runner("llama")
    yield runner
    models.assert_given_back(runner)


def rag(*chunks: list[int], fusion: FusionRequest | None = None, promoted_len: int = 0) -> FakeReq:
    ids, spans = list(HEAD), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    told = marked(spans, fusion=fusion, promoted_len=promoted_len, exact_gaps=1 if fusion else 0)
    return FakeReq([*ids, *QUESTION], told)


def cached_kv(runner: Any, scheduler: ModelScheduler, req: FakeReq) -> list[torch.Tensor]:
    """Keys and values of all layers of what the tree holds of this prompt:
    [tokens, heads, head size] each."""
    num_tokens = len(req.origin_input_ids) - len(QUESTION)
    assert scheduler.match(req) >= num_tokens
    pool = runner.token_to_kv_pool
    buffers = [
        get(layer)
        for layer in range(pool.layer_num)
        for get in (pool.get_key_buffer, pool.get_value_buffer)
    ]
    return [buffer[req.prefix_indices[:num_tokens]].clone() for buffer in buffers]


def make_scheduler(runner: Any) -> ModelScheduler:
    knobs = config(reuse="fused", recompute_attention="masked")
    scheduler = ModelScheduler(runner, 400, knobs, prefill_budget=256)
    scheduler.fuser.fusion_pass.calibration = Calibration(heads=((0, 1), (2, 3)))
    return scheduler


def outward_of(scheduler: ModelScheduler, chunk: list[int]) -> list[torch.Tensor | None]:
    """What its computed nodes' tokens were seen to attend to before it, in order of position."""
    nodes = [
        node
        for node in scheduler.cache._nodes()
        if list(node.key.token_ids) == chunk and not facts(node).is_moved
    ]
    return [facts(node).outward for node in sorted(nodes, key=lambda node: facts(node).start)]


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_exact_request_on_an_exact_gap_has_an_ordinary_prefills_kv(
    runner: Any, ratio: float
) -> None:
    """B is computed in the pass, before C and A are moved;
    the exact request finds it and computes D after it."""
    scheduler = make_scheduler(runner)
    scheduler.serve(rag(A, B, C), answer=[1])
    moving = rag(B, C, A, fusion=FusionRequest("first", ratio, "r"), promoted_len=3)
    scheduler.serve(moving, answer=[1])
    assert scheduler.serve(rag(B, D), answer=[1]) == len(HEAD) + len(B)
    scheduler.check()
    found = cached_kv(runner, scheduler, rag(B, D))
    fused = cached_kv(runner, scheduler, moving)

    assert [len(outward_of(scheduler, chunk)) for chunk in (A, B, C)] == [1, 2, 1]

    alone = make_scheduler(runner)
    alone.serve(rag(B, D), answer=[1])
    for chunk in (B, D):
        torch.testing.assert_close(
            outward_of(scheduler, chunk)[0], outward_of(alone, chunk)[0], rtol=0, atol=1e-4
        )
    for got, expected in zip(found, cached_kv(runner, alone, rag(B, D)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)

    alone.serve(rag(B, C, A), answer=[1])
    ordinary = cached_kv(runner, alone, rag(B, C, A))
    moved = slice(len(HEAD) + len(B), None)
    assert (
        max(float((a - b)[moved].abs().max()) for a, b in zip(fused, ordinary, strict=True))
        > 20 * TOLERANCE
    )
