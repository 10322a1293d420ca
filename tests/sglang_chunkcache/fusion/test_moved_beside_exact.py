"""Moved and ordinary KV side by side on a real model: what a fused request leaves for others, and
what a batch's pass declines, is what a prefill computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.wire.report import Fallback
from tests import models
from tests.kit import releases
from tests.kit.cache_integrity import nodes_of
from tests.kit.costs import GROWING
from tests.kit.fused import report
from tests.kit.requests import rag
from tests.kit.tensors import all_kv, spoil
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.scheduler import FakeReq, Round, config, walk

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

HEAD = (90, 91)
A, B, C, D, E = ([(7 * index + 3 * i) % 89 + 1 for i in range(80)] for index in range(5))
Make = Callable[[], ModelScheduler]
FUSION = FusionRequest("first", 0.25, "r")
TOLERANCE = 5e-5
"""Of keys and values of the float32 model between two prefills of other pieces."""


@pytest.fixture
def make() -> Iterator[Make]:
    """A scheduler with nothing cached; the next takes its place on the pool."""
    runner = models.runner("llama")

    def made() -> ModelScheduler:
        knobs = config(reuse="fused", recompute_attention="masked")
        scheduler = ModelScheduler(runner, 1500, knobs, prefill_budget=512)
        scheduler.fuser.fusion_pass.calibrated(Calibration(heads=((0, 1), (2, 3))))
        return scheduler

    yield made
    models.assert_given_back(runner)


def kv_of_batch(scheduler: ModelScheduler, *reqs: FakeReq) -> list[Tensor]:
    """The requests in one batch; each one's KV when it is computed."""
    for req in reqs:
        assert scheduler.add(req, 1000) is not None
    return finish(scheduler, *reqs)


def finish(scheduler: ModelScheduler, *reqs: FakeReq) -> list[Tensor]:
    scheduler.forward()
    scheduler.check(reqs)
    rows: list[Any] = [scheduler.slots(req, 0, req.filled) for req in reqs]
    found = [torch.stack(models.kv_of(scheduler._runner, torch.tensor(row))) for row in rows]
    for req in reqs:
        scheduler.sample(req, 70)
    for req in reqs:
        scheduler.release(req, is_insert=True)
    return found


def assert_close(got: Tensor, expected: Tensor, atol: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_requests_of_one_batch_are_filled_as_if_alone(make: Make) -> None:
    """B is moved for both, C for the second."""
    scheduler = make()
    scheduler.serve(rag(A, B, C))
    one, two = rag(B, fusion=FUSION), rag(B, C, fusion=FUSION)
    _, got = kv_of_batch(scheduler, one, two)
    assert (report(one).fallbacks, report(two).fallbacks) == ((), ())
    scheduler.cache.reset()
    scheduler.allocator.clear()
    scheduler.serve(rag(A, B, C))
    (expected,) = kv_of_batch(scheduler, rag(B, C, fusion=FUSION))
    assert_close(got, expected)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_request_that_a_full_pass_leaves_out_is_filled_by_the_next(
    make: Make, is_preempted: bool
) -> None:
    """SGLang 0.5.21 would lose those who made room for it: then it is a prefill."""
    scheduler = make()
    scheduler.serve(rag(A, B, C))
    promises = scheduler.fuser.promises
    promises._limits = replace(promises._limits, max_pass_tokens=50)
    asked = replace(FUSION, recipe="s")
    one, two = rag(B, fusion=FUSION), rag(C, B, fusion=asked)
    around = Round(scheduler)
    assert scheduler.add(one, 1000, around) is not None
    around.preempt_list += ["another"] * is_preempted
    assert (scheduler.add(two, 1000, around) is not None) == is_preempted
    got = finish(scheduler, one, *[two] * is_preempted)[-1]
    if is_preempted:
        assert report(two).fallbacks == (Fallback.PASS_FULL,)
        (expected,) = kv_of_batch(scheduler, rag(C, B))
    else:
        (got,) = kv_of_batch(scheduler, two)
        assert report(two).fallbacks == ()
        scheduler.cache.reset()
        scheduler.allocator.clear()
        scheduler.serve(rag(A, B, C))
        (expected,) = kv_of_batch(scheduler, rag(C, B, fusion=asked))
    assert_close(got, expected)


def fail_at(monkeypatch: pytest.MonkeyPatch, layer: Any, *, times: int) -> None:
    """The layer's next calls raise an error, once it has written its KV."""
    forward, left = layer.forward, [times]

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(layer, "forward", failing)


BATCH = [(A, B, C), (A, B, D, C), (A, E, B), (D, E, B)]
"""After A, B, C and D were served alone. The exact chain grows by B with the first, the others move
it; C is moved for two, E is a gap of two."""


def sharing(make: Make) -> tuple[ModelScheduler, list[FakeReq]]:
    scheduler = make()
    for chunk in (A, B, C, D):
        scheduler.serve(rag(chunk))
    scheduler.fuser.pricing.costs = GROWING
    wish: dict[str, Any] = {"fusion": FUSION, "promoted_len": 2, "grows": True}
    return scheduler, [rag(*chunks, **wish) for chunks in BATCH]


def tree_of(scheduler: ModelScheduler) -> list[Any]:
    return [(str(keys), node.value.tolist()) for keys, node in walk(scheduler.cache)]


def tree_kv(scheduler: ModelScheduler) -> Tensor:
    return torch.stack(models.kv_of(scheduler._runner, torch.tensor(scheduler.tree_slots())))


@pytest.mark.parametrize("layer", range(models.NUM_LAYERS))
def test_pass_that_fails_at_any_layer_leaves_no_trace(
    make: Make, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """All of its batch are computed, also who moves what the chain grows by: the whole pool is bit
    by bit as if nothing had been moved before, and every node of the tree is filled."""
    runner, pools, trees = models.runner("llama"), list[Tensor](), list[list[Any]]()
    for is_moved in (False, True):
        spoil(runner)
        scheduler, reqs = sharing(make)
        with monkeypatch.context() as patch:
            if is_moved:
                fail_at(patch, runner.model.model.layers[layer], times=1)
            else:
                mover = scheduler.fuser.fusion_pass.mover
                patch.setattr(mover, "move", mock.Mock(side_effect=OSError))
            found = kv_of_batch(scheduler, *reqs)
        scheduler.check()
        assert scheduler.cache.protected_size() == 0
        told = [(report(req).fallbacks, report(req).gap, report(req).relocated) for req in reqs]
        assert told == [((Fallback.PASS_FAILED,), gap, 0) for gap in (len(B), 0, len(E), len(E))]
        assert bool(tree_kv(scheduler).isfinite().all())
        pools.append(torch.stack(all_kv(runner)).view(torch.uint8))
        trees.append(tree_of(scheduler))
    assert torch.equal(*pools)
    assert trees[0] == trees[1]
    alone = make()
    for got, chunks in zip(found, BATCH, strict=True):
        assert_close(got, kv_of_batch(alone, rag(*chunks))[0])


@pytest.mark.parametrize("layer", range(models.NUM_LAYERS))
def test_what_cannot_even_be_computed_leaves_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Tree and pool are as they were, bit by bit, whichever layer fails."""
    scheduler, reqs = sharing(make)

    def everything() -> list[Any]:
        num_evictable = scheduler.cache.evictable_size()
        return [*tree_of(scheduler), sorted(scheduler.free_slots()), num_evictable]

    before, kv = everything(), tree_kv(scheduler)
    for req in reqs:
        assert scheduler.add(req, 1000) is not None
    with monkeypatch.context() as patch:
        # the pass, then the region that is computed in its place
        fail_at(patch, scheduler._runner.model.model.layers[layer], times=2)
        scheduler.forward()
    for req in reqs:
        assert getattr(req, releases.DROPPED) is not None
        scheduler.release(req, is_insert=True)
    assert everything() == before
    assert torch.equal(tree_kv(scheduler), kv)


def cached_kv(scheduler: ModelScheduler, req: FakeReq, num_tokens: int) -> Tensor:
    """What the tree holds of this prompt."""
    assert scheduler.match(req) >= num_tokens
    return torch.stack(
        models.kv_of(scheduler._runner, releases.prefix_slots(scheduler.cache, req)[:num_tokens])
    )


def outward_of(scheduler: ModelScheduler, chunk: list[int]) -> list[Tensor]:
    """What its computed nodes' tokens were seen to attend to before it, in order of position."""
    found = [facts(node) for node in nodes_of(scheduler.cache) if list(node.key.token_ids) == chunk]
    computed = sorted((each for each in found if not each.is_moved), key=lambda each: each.start)
    assert all(each.outward is not None for each in computed)
    return [torch.as_tensor(each.outward) for each in computed]


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_exact_request_on_an_exact_gap_has_an_ordinary_prefills_kv(
    make: Make, ratio: float
) -> None:
    """B is computed before C and A are moved; the exact request computes D after it."""
    scheduler = make()
    scheduler.serve(rag(A, B, C), answer=[1])
    fusion = FusionRequest("first", ratio, "r")
    moving = rag(B, C, A, fusion=fusion, promoted_len=3, grows=True)
    scheduler.fuser.pricing.costs = GROWING
    scheduler.serve(moving, answer=[1])
    assert scheduler.serve(rag(B, D), answer=[1]) == len(HEAD) + len(B)
    scheduler.check()
    found = cached_kv(scheduler, rag(B, D), len(HEAD) + len(B + D))
    fused = cached_kv(scheduler, moving, len(HEAD) + len(B + C + A))
    assert [len(outward_of(scheduler, chunk)) for chunk in (A, B, C)] == [1, 2, 1]

    alone = make()
    alone.serve(rag(B, D), answer=[1])
    for chunk in (B, D):
        assert_close(outward_of(scheduler, chunk)[0], outward_of(alone, chunk)[0], atol=1e-4)
    assert_close(found, cached_kv(alone, rag(B, D), len(HEAD) + len(B + D)))

    alone.serve(rag(B, C, A), answer=[1])
    ordinary = cached_kv(alone, rag(B, C, A), len(HEAD) + len(B + C + A))
    moved = (fused - ordinary)[..., len(HEAD) + len(B) :, :, :]
    assert float(moved.abs().max()) > 20 * TOLERANCE
