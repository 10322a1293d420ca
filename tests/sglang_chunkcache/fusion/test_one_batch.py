"""Two requests of one batch on a real model:
what is declined is computed over KV that the same batch's pass fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from torch import Tensor

from radix_ext import FusionRequest
from sglang_chunkcache.wire.report import Fallback
from tests import models
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.scheduler import FakeReq, answer_of, config, marked

pytestmark = pytest.mark.engine

HEAD, QUESTION = [90, 91, 92], [100, 101, 102, 103]
CHUNKS = {
    name: [(7 * index + 3 * i) % 89 + 1 for i in range(80)] for index, name in enumerate("ABCD")
}
FUSION = FusionRequest("first", 0.25, "r")
TOLERANCE = 5e-5


@pytest.fixture
def scheduler() -> Iterator[ModelScheduler]:
    """A, B and C have been computed after each other."""
    runner = models.runner("llama")
    made = ModelScheduler(
        runner, 1500, config(reuse="fused", recompute_attention="masked"), prefill_budget=256
    )
    made.serve(make_request("ABC", None))
    yield made
    models.assert_given_back(runner)


def make_request(names: str, fusion: FusionRequest | None) -> FakeReq:
    ids, spans = list(HEAD), []
    for name in names:
        spans.append((len(ids), len(ids) + len(CHUNKS[name])))
        ids += CHUNKS[name]
    return FakeReq([*ids, *QUESTION], marked(spans, fusion=fusion))


def kv_of_batch(scheduler: ModelScheduler, *reqs: FakeReq) -> list[Tensor]:
    """The requests in one batch; each one's KV when it is computed."""
    for req in reqs:
        assert scheduler.add(req, 1000) is not None
    scheduler.forward()
    scheduler.check(reqs)
    rows: list[Any] = [scheduler.slots(req, 0, req.filled) for req in reqs]
    found = [torch.stack(models.kv_of(scheduler._runner, torch.tensor(row))) for row in rows]
    for req in reqs:
        scheduler.sample(req, 70)
    for req in reqs:
        scheduler.release(req, is_insert=True)
    return found


def fallbacks(req: FakeReq) -> tuple[Fallback, ...]:
    report = answer_of(req).report
    assert report is not None
    return report.fallbacks


def test_request_behind_what_the_batch_fills_reads_it_filled(scheduler: ModelScheduler) -> None:
    """B is moved for the first request.
    The second stands on it and computes C: as after a batch that has moved B."""
    one, two = make_request("B", FUSION), make_request("BC", FUSION)
    _, got = kv_of_batch(scheduler, one, two)
    assert (fallbacks(one), fallbacks(two)) == ((), (Fallback.NOT_FILLED,))
    scheduler.cache.reset()
    scheduler.allocator.clear()
    scheduler.serve(make_request("ABC", None))
    one, two = make_request("B", FUSION), make_request("BC", replace(FUSION, fresh=frozenset({1})))
    kv_of_batch(scheduler, one)
    (expected,) = kv_of_batch(scheduler, two)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_request_that_a_full_pass_leaves_out_is_a_prefill(scheduler: ModelScheduler) -> None:
    """Beside the one that fills the pass: every token's KV is what a request without moved KV
    has."""
    scheduler.fuser.limits = replace(scheduler.fuser.limits, max_pass_tokens=50)
    one, two = make_request("B", FUSION), make_request("CB", replace(FUSION, recipe="s"))
    _, got = kv_of_batch(scheduler, one, two)
    assert (fallbacks(one), fallbacks(two)) == ((), (Fallback.PASS_FULL,))
    (expected,) = kv_of_batch(scheduler, make_request("CB", None))
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
