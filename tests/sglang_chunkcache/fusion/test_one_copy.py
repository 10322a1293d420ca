"""One copy of a chunk in the KV pool is read as the copy that would have been made, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor

from radix_ext import FusionRequest
from sglang_chunkcache.cpu.one_copy import OneCopyPool
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.gate import gated_attention
from sglang_chunkcache.fusion.price_trial import measure_costs
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import Fallback
from tests import models
from tests.kit.fused import report
from tests.kit.pricing import make_pricing
from tests.kit.requests import rag
from tests.kit.tensors import PoolHost, table_of
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.one_copy import CountingVirtual
from tests.reference.scheduler import FakeReq, config

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

CHUNKS = [[(7 * index + 3 * i) % 89 + 1 for i in range(40 + 5 * index)] for index in range(6)]
FIRST, ASKED = FusionRequest("first", 0.2, "f"), FusionRequest("query", 0.3, "q")


def make_scheduler(runner: Any, allocator: Any = None) -> ModelScheduler:
    knobs = config(reuse="fused", recompute_attention="masked")
    scheduler = ModelScheduler(runner, 1500, knobs, prefill_budget=512, allocator=allocator)
    scheduler.fuser.fusion_pass.calibrated(Calibration(heads=((0, 1), (2, 3))))
    return scheduler


@pytest.fixture(params=["llama", pytest.param("stablelm", marks=pytest.mark.nightly)])
def runner(request: pytest.FixtureRequest) -> Any:
    return models.runner(request.param)


@pytest.fixture
def shared(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelScheduler]:
    """With one copy. The pool's rows hold NaN."""
    with monkeypatch.context() as patch:
        yield on_one_copy(runner, patch, num_rows=models.POOL_SLOTS)


def on_one_copy(runner: Any, patch: pytest.MonkeyPatch, *, num_rows: int) -> ModelScheduler:
    plain = runner.token_to_kv_pool
    sizes = plain.head_num, plain.head_dim, plain.layer_num
    pool = OneCopyPool(num_rows, 1, plain.dtype, *sizes, "cpu", False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(torch.nan)
    for owner in (runner, runner.attn_backend):
        patch.setattr(owner, "token_to_kv_pool", pool)
    allocator = CountingVirtual(num_rows, torch.float32, "cpu", pool, False)
    return make_scheduler(runner, allocator)


def served(scheduler: ModelScheduler, *reqs: FakeReq) -> list[Tensor]:
    """In one batch; each one's KV as attention reads it."""
    for req in reqs:
        assert scheduler.add(req, 1000) is not None
    scheduler.forward()
    scheduler.check(reqs)
    rows = [torch.tensor(scheduler.slots(req, 0, req.filled)) for req in reqs]
    found = [torch.stack(models.kv_of(scheduler._runner, row)) for row in rows]
    for req in reqs:
        scheduler.sample(req, 70)
        scheduler.release(req, is_insert=True)
    return found


def traffic() -> list[list[FakeReq]]:
    """Batches of exact and moved requests; the last ones find fused chains."""
    rng = random.Random(4)
    orders = [rng.sample(CHUNKS, 4) for _ in range(3)]
    all_three = range(3)
    batches: list[list[FakeReq]] = [
        [rag(*CHUNKS[:3], keep=all_three), rag(*CHUNKS[3:], keep=all_three)]
    ]
    for fusion in (FIRST, ASKED, None, FIRST):
        batches += [[rag(*order, fusion=fusion) for order in orders[:2]], [rag(*orders[2])]]
    return batches


@pytest.mark.parametrize("are_on_device", [True, False])
def test_equals_copies_bit_for_bit(
    are_on_device: bool, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer, whatever is moved, recomputed, found again or exact, and wherever its source
    is. Fewer rows are used."""
    runs: list[list[Tensor]] = []
    fates: list[list[tuple[Any, ...]]] = []
    used, shares = [], []
    for is_shared in (False, True):
        with monkeypatch.context() as patch:
            scheduler = (
                on_one_copy(runner, patch, num_rows=models.POOL_SLOTS)
                if is_shared
                else make_scheduler(runner)
            )
            batches = traffic()
            found = list[Tensor]()
            for batch in batches:
                if not are_on_device:
                    scheduler.cache.evict(EvictParams(num_tokens=models.POOL_SLOTS))
                found += served(scheduler, *batch)
                scheduler.fuser.keeper.captures.drain()
            runs.append(found)
            told = [report(req) for batch in batches for req in batch if is_moved(req)]
            fates.append([(each.exact, each.relocated, each.gap) for each in told])
            shares.append([each.shared for each in told])
            taken = scheduler.cache.evictable_size() + scheduler.cache.protected_size()
            used.append(taken if not is_shared else scheduler.allocator.slot_map.num_used)
            wheres = {source.where for each in told for source in each.sources}
            assert wheres <= {"gap", "device" if are_on_device else "host"}
    assert fates[0] == fates[1]
    assert not any(shares[0])
    moved = [each.relocated - each.fused_hit for each in told]
    if are_on_device:
        assert shares[1] == moved
        assert used[1] < 0.8 * used[0]
    else:
        assert 0 < sum(shares[1]) < sum(moved), "the first of a batch has all loaded"
    assert sum(relocated for _, relocated, _ in fates[0]) > 500
    for copied, mapped in zip(*runs, strict=True):
        assert torch.equal(copied, mapped)


def test_rows_whose_source_has_left_equal_copies_of_it(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: what shares a share turns once, from where the row was computed."""
    found = list[Tensor]()
    for is_shared in (False, True):
        with monkeypatch.context() as patch:
            scheduler = (
                on_one_copy(runner, patch, num_rows=models.POOL_SLOTS)
                if is_shared
                else make_scheduler(runner)
            )
            served(scheduler, rag(*CHUNKS[:3]))
            reader = rag(*CHUNKS[1:3], fusion=FusionRequest("none", 0.0, "n"), head=[50])
            late = rag(*CHUNKS[2:0:-1], fusion=FIRST, head=[51, 52, 53])
            for req in (reader, late):
                assert scheduler.add(req, 1000) is not None
                scheduler.forward()
                scheduler.sample(req, 70)
                if is_shared:
                    scheduler.cache.evict(EvictParams(num_tokens=models.POOL_SLOTS))
            assert report(late).recomputed > 0
            assert report(late).shared == (report(late).relocated if is_shared else 0)
            rows = torch.tensor(scheduler.slots(late, 0, late.filled))
            found.append(torch.stack(models.kv_of(runner, rows)))
            for req in (reader, late):
                scheduler.release(req, is_insert=True)
    assert torch.equal(*found)


def is_moved(req: FakeReq) -> bool:
    spans = state(req).spans
    return spans is not None and spans.fusion is not None


def test_request_that_is_failed_gives_all_back(
    shared: ModelScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass fails: what it shares gets rows of its own, and is computed like a prefill."""
    served(shared, rag(*CHUNKS[:3]))
    mover = shared.fuser.fusion_pass.mover
    with monkeypatch.context() as patch:
        patch.setattr(mover, "move", _raises)
        req = rag(*CHUNKS[1:3], fusion=FIRST)
        (got,) = served(shared, req)
    assert report(req).fallbacks == (Fallback.PASS_FAILED,)
    (expected,) = served(shared, rag(*CHUNKS[1:3]))
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)


def _raises(*_: Sequence[Any]) -> None:
    raise OSError


def test_without_room_to_compute_each_request_fails_for_itself(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass fails, and others have the rows: the request that has some is served."""
    scheduler = on_one_copy(runner, monkeypatch, num_rows=1000)
    served(scheduler, rag(*CHUNKS[:5]))
    reqs = [rag(*CHUNKS[1::-1], fusion=FIRST), rag(*CHUNKS[3:1:-1], fusion=FIRST)]
    assert all(scheduler.add(req, 1000) is not None for req in reqs)
    scheduler.cache.evict(EvictParams(num_tokens=1000))
    slot_map = scheduler.allocator.slot_map
    assert scheduler.allocator.alloc(slot_map.num_free - 100) is not None
    monkeypatch.setattr(scheduler.fuser.fusion_pass.mover, "move", _raises)
    scheduler.forward()
    assert [state(req).is_failed for req in reqs] == [False, True]
    assert (slot_map.violations(), slot_map.num_reserved) == ([], 0)
    runner.req_to_token_pool.clear()


def test_slots_whose_rows_cannot_be_had_are_given_back(
    shared: ModelScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(shared, rag(*CHUNKS[:3]))
    slot_map = shared.allocator.slot_map
    before = slot_map.num_used, slot_map.num_evictable, shared.allocator.num_free_slots
    with monkeypatch.context() as patch:
        patch.setattr(slot_map, "assign", _raises)
        with pytest.raises(OSError):
            shared.add(rag(*CHUNKS[2::-1], fusion=FIRST), 1000)
    after = slot_map.num_used, slot_map.num_evictable, shared.allocator.num_free_slots
    assert (slot_map.violations(), after) == ([], before)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_loads_are_priced_whatever_rows_the_gate_has_used(
    codec: str, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = on_one_copy(runner, monkeypatch, num_rows=800).allocator
    rows = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, req_to_token_pool=runner.req_to_token_pool
    )
    means = Means(runner, table_of(runner), rows, None, 16, make_pricing())
    gated_attention(means, "masked")
    host: Any = PoolHost(runner, codec, 8 << 20)
    measure_costs(means, host, max_tokens=2048)
    assert allocator.available_size() == 800
