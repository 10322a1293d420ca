"""Chunks that keep their source's position, on real SGLang models: shared slots give the answers that copies give.

    owner    head | A | B | question     computed exactly, and still answering
    one      head | D | B | question     B's rows are the owner's; critical tokens have slots of their own
    two      head | E | B | question     the same, other tokens
    three    head | F | B | question     the same, all tokens: against an ordinary prefill of the whole prompt

All through cache, fuser and fusion pass as the server has them; only SGLang's scheduler is tests/reference/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.variants import VariantIndex
from sglang_chunkcache.attention import choice as attention_choice
from sglang_chunkcache.fusion import fill as fusion_pass
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.promise import Fuser
from sglang_chunkcache.fusion.relocate import RotaryTable
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.wire.report import Fallback, Report
from tests import models
from tests.models import POOL_SLOTS, kv_of
from tests.reference.fused_scheduler import ROOMY
from tests.reference.scheduler import FakeReq, Scheduler, answer_of, config, marked
from tests.sglang_chunkcache.fusion.test_recompute import make_attention

pytestmark = pytest.mark.engine

TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 24 * 2**-7}
"""As in test_fill.py."""
_GENERATOR = torch.Generator().manual_seed(11)
LENS = {"head": 5, "A": 14, "D": 14, "E": 14, "B": 24, "question": 6, "F": 14}
TOKENS = {name: torch.randint(0, 128, (n,), generator=_GENERATOR).tolist() for name, n in LENS.items()}
B_START = LENS["head"] + LENS["A"]
PROMPT_LEN = B_START + LENS["B"] + LENS["question"]
ANSWER = (17, 93, 4, 55)
ONE = FusionRequest("random", 0.4, "one")
TWO = FusionRequest("query", 0.4, "two")
THREE = FusionRequest("query", 1.0, "three")


class EngineScheduler(Scheduler):
    """`Scheduler` over a runner's own pools, whose batches go through its model."""

    def __init__(self, runner: Any, attention: str = "masked", **knobs: Any) -> None:
        """`attention`: of the pass, as in test_recompute.py."""
        self.runner = runner
        self.capacity, self.force_miss, self.prefill_budget, self.is_chunked = POOL_SLOTS, False, None, True
        self.batch: list[tuple[FakeReq, int]] = []
        self.allocator, self.rows = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
        self.allocator.clear()
        self.rows.clear()
        for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
            buffer.fill_(float("nan"))  # a read of what was never written is seen
        settings = config(reuse="fused", selectors="eval.selectors", **knobs)
        self.cache = ChunkRadixCache(CacheInitParams(False, self.rows, self.allocator, 1), settings)
        table = RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb)
        store = VariantIndex(max_bytes=1 << 30, max_chunks=10, max_variants=1, window=1000)
        choice = None
        if attention != "masked":
            choice = make_attention(runner, attention), attention_choice.described("sparse", "a test", attention)
        self.fuser = Fuser(
            self.cache,
            FusionPass(runner, table, settings, choice),
            store,
            ROOMY,
            extend_reserve=256,
            fingerprint=lambda: 0,
        )
        self.cache.promiser = self.fuser
        self.logits: dict[FakeReq, list[Tensor]] = {}
        """Request -> the last token's logits of each of its forwards."""

    def step(self, reqs: Sequence[FakeReq], token: int) -> None:
        """One more token each, together."""
        for req in reqs:
            assert self.extend(req, len(req.all_ids))
        self.forward()
        for req in reqs:
            req.output_ids.append(token)

    def tree_slots(self) -> list[int]:
        return list(set(super().tree_slots()))

    def kv(self, slots: Sequence[int]) -> Tensor:
        """[2, num_layers, n, num_kv_heads, head_dim], a copy."""
        return torch.stack(kv_of(self.runner, torch.tensor(slots)))

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        self.fuser.before(SimpleNamespace(reqs=[req for req, _, _ in batch]))
        starts, ends = [start for _, start, _ in batch], [end for _, _, end in batch]
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        forward = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(batch),
            input_ids=torch.tensor([token for req, start, end in batch for token in req.all_ids[start:end]]),
            positions=torch.cat([torch.arange(start, end) for _, start, end in batch]),
            out_cache_loc=torch.tensor([slot for req, start, end in batch for slot in self.slots(req, start, end)]),
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req, _, _ in batch]),
            seq_lens=torch.tensor(ends),
            seq_lens_cpu=torch.tensor(ends),
            orig_seq_lens=torch.tensor(ends),
            seq_lens_sum=sum(ends),
            extend_num_tokens=sum(lens),
            extend_seq_lens=torch.tensor(lens, dtype=torch.int32),
            extend_seq_lens_cpu=lens,
            extend_prefix_lens=torch.tensor(starts, dtype=torch.int32),
            extend_prefix_lens_cpu=starts,
            extend_start_loc=torch.tensor([sum(lens[:i]) for i in range(len(lens))], dtype=torch.int32),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.no_grad():
            logits = self.runner.forward(forward).logits_output.next_token_logits.float()
        for (req, _, _), row in zip(batch, logits, strict=True):
            self.logits.setdefault(req, []).append(row.clone())


def make_request(first: str, reuse: FusionRequest | None) -> FakeReq:
    """head | first | B | question."""
    ids = [token for name in ("head", first, "B", "question") for token in TOKENS[name]]
    spans = [(LENS["head"], B_START), (B_START, B_START + LENS["B"])]
    return FakeReq(ids, marked(spans, fusion=reuse))


def report(req: FakeReq) -> Report:
    told = answer_of(req).report
    assert told is not None
    return told


def answer(scheduler: EngineScheduler, reqs: Sequence[FakeReq]) -> None:
    """The first token of each is out; then some more, all in one batch."""
    for req in reqs:
        scheduler.sample(req, ANSWER[0])
    for token in ANSWER[1:]:
        scheduler.step(reqs, token)


@pytest.fixture(
    params=[
        ("llama", "float32"),
        pytest.param(("qwen3", "float32"), marks=pytest.mark.nightly),
        pytest.param(("llama", "bfloat16"), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    runner = models.runner(*request.param)
    yield runner
    runner.token_to_kv_pool_allocator.clear()  # what the schedulers' trees hold
    runner.req_to_token_pool.clear()


def alone(runner: Any, first: str, reuse: FusionRequest | None) -> tuple[Tensor, list[Tensor]]:
    """KV rows and logits of one request that shares nothing: copies of its own, recomputed with the mask."""
    scheduler = EngineScheduler(runner, exclusive_slots="off", recompute_attention="masked")
    if reuse is not None:
        scheduler.serve(make_request("A", None))
    req = make_request(first, reuse)
    assert scheduler.admit(req, 1000) is not None
    answer(scheduler, [req])
    if reuse is not None:
        assert (report(req).shared, report(req).fallbacks) == (0, ())
    return scheduler.kv(scheduler.slots(req, 0, req.filled)), scheduler.logits[req]


@pytest.mark.parametrize("attention", ["masked", "reference"])
def test_requests_recompute_different_tokens_of_one_chunk(runner: Any, attention: str) -> None:
    """In one batch with the owner of the shared slots; then all decode together. KV and logits are those of requests with
    copies of their own, those of the last one an ordinary prefill's, and the shared slots keep every bit."""
    expected = [alone(runner, *each) for each in (("A", None), ("D", ONE), ("E", TWO), ("F", None))]
    scheduler = EngineScheduler(runner, attention)
    owner, one, two, three = (make_request(*each) for each in (("A", None), ("D", ONE), ("E", TWO), ("F", THREE)))
    scheduler.admit(owner, 1000)
    scheduler.sample(owner, ANSWER[0])
    source = scheduler.slots(owner, B_START, B_START + LENS["B"])
    before = scheduler.kv(source)
    for req in (one, two, three):
        assert scheduler.add(req, 1000) == B_START + LENS["B"]
    scheduler.step([owner], ANSWER[1])  # the very batch that fills the others
    scheduler.check([owner, one, two, three])
    rows = [scheduler.slots(req, B_START, B_START + LENS["B"]) for req in (one, two, three)]
    recomputed = [
        {i for i, (mine, theirs) in enumerate(zip(row, source, strict=True)) if mine != theirs} for row in rows
    ]
    assert recomputed[0] != recomputed[1]
    assert [len(each) for each in recomputed] == [10, 10, 24]  # 0.4 of 24, and all
    assert torch.equal(scheduler.kv(source), before)
    for req in (one, two, three):
        scheduler.sample(req, ANSWER[0])
    scheduler.step([one, two, three], ANSWER[1])
    for token in ANSWER[2:]:
        scheduler.step([owner, one, two, three], token)
        scheduler.check([owner, one, two, three])
    assert torch.equal(scheduler.kv(source), before)
    for req, (kv, logits) in zip((owner, one, two, three), expected, strict=True):
        got = scheduler.kv(scheduler.slots(req, 0, req.filled))
        torch.testing.assert_close(got, kv, rtol=0, atol=TOLERANCES[runner.dtype])
        torch.testing.assert_close(
            torch.stack(scheduler.logits[req]), torch.stack(logits), rtol=0, atol=TOLERANCES[runner.dtype]
        )
    for req, num in zip((one, two, three), (10, 10, 24), strict=True):
        assert (report(req).shared, report(req).recomputed) == (LENS["B"] - num, num)
    stats = scheduler.cache.stats()
    assert stats["moves"]["attention"]["kernel"] == (None if attention == "masked" else attention)
    assert stats["moves"]["attention"]["fallbacks"] == 0
    assert stats["shared"]["tokens"] == 2 * (LENS["B"] - 10)
    assert stats["shared"]["bytes"] == stats["shared"]["tokens"] * before[:, :, 0].nbytes
    assert "moved_device" not in stats["moves"]["tokens"]


def test_those_who_share_go_on_without_the_owner(runner: Any) -> None:
    """Owner and source leave, all else is evicted, others take what is free: the rows hold what they held."""
    _, logits = alone(runner, "D", ONE)
    scheduler = EngineScheduler(runner)
    scheduler.serve(make_request("A", None))
    req = make_request("D", ONE)
    scheduler.admit(req, 1000)
    scheduler.sample(req, ANSWER[0])
    scheduler.evict(POOL_SLOTS)
    for slot in scheduler.free_slots():
        for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
            buffer[slot] = float("nan")
    for token in ANSWER[1:]:
        scheduler.step([req], token)
    torch.testing.assert_close(
        torch.stack(scheduler.logits[req]), torch.stack(logits), rtol=0, atol=TOLERANCES[runner.dtype]
    )
    scheduler.check([req])


@pytest.mark.parametrize("name", ["question_evidence", "run_pass"])
def test_failing_pass_leaves_shared_slots_alone(runner: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before or after the critical tokens have their slots: everything is prefilled, into slots of the request's own."""
    plain = EngineScheduler(runner)
    expected = make_request("E", None)
    plain.admit(expected, 1000)
    full = plain.kv(plain.slots(expected, 0, PROMPT_LEN))
    scheduler = EngineScheduler(runner)
    owner, req = make_request("A", None), make_request("E", TWO)
    scheduler.admit(owner, 1000)
    scheduler.sample(owner, ANSWER[0])
    source = scheduler.slots(owner, B_START, B_START + LENS["B"])
    before = scheduler.kv(source)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fusion_pass, name, fail)
    scheduler.admit(req, 1000)
    assert torch.equal(scheduler.kv(source), before)
    got = scheduler.kv(scheduler.slots(req, 0, PROMPT_LEN))
    torch.testing.assert_close(got, full, rtol=0, atol=TOLERANCES[runner.dtype])
    scheduler.sample(req, ANSWER[0])
    assert (report(req).fallbacks, report(req).shared) == ((Fallback.PASS_FAILED,), 0)
    scheduler.check([owner, req])
