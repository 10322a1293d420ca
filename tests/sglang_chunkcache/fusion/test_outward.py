"""What chunks attend to before them, read from SGLang's own prefill,
against the whole matrix of one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eval.bench.attention.reference import ReferenceAttention
from radix_ext import ChunkId, Span
from radix_ext.moved_plan import Piece
from sglang_chunkcache.fusion import outward
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.fill import _sequence
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.outward import OutwardWatch
from sglang_chunkcache.fusion.recompute import _forward_batch, run_pass
from sglang_chunkcache.scheduler.node import facts, state
from tests import models
from tests.kit.tensors import (
    ATOL,
    CHUNKS,
    NUM_TOKENS,
    OTHERS,
    SLOTS,
    Shuffling,
    make_tokens,
    prefill_weights,
    reference_of,
    runner,
    spoil,
)
from tests.models import make_row, prefill
from tests.reference import outward as reference
from tests.reference.attention import attend

__all__ = ["runner"]
HEADS = ((0, 1), (2, 3))
TOKENS = make_tokens(0, NUM_TOKENS)


def make_watch(runner: Any, heads: tuple[Head, ...] = HEADS) -> OutwardWatch:
    fused: Any = SimpleNamespace(runner=runner, calibration=Calibration(heads=heads))
    return OutwardWatch(fused)


def make_spans(chunks: Sequence[tuple[int, int]] = CHUNKS) -> tuple[Span, ...]:
    return tuple(Span(start, end, ChunkId(str(start))) for start, end in chunks)


def expected_of(weights: Tensor, chunks: Sequence[tuple[int, int]], number: int) -> Tensor:
    """The heads' attention to the chunks before this one, to the head's text where there are
    none."""
    start, end = chunks[number]
    before = chunks[:number] or [(0, start)]
    return sum(  # type: ignore[return-value]
        weights[layer, head, start:end, a:b].sum(-1) / len(HEADS)
        for layer, head in HEADS
        for a, b in before
    )


def make_req(row: int, chunks: Sequence[tuple[int, int]] | None, *, is_audit: bool = False) -> Any:
    req: Any = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row))
    if chunks is not None:
        state(req).spans = cast("Any", SimpleNamespace(spans=make_spans(chunks), is_audit=is_audit))
    return req


@torch.no_grad()
def extend(runner: Any, watch: OutwardWatch, pieces: Sequence[tuple[Any, Any, int, int]]) -> None:
    """One forward over (request, all its token ids, start, end)."""
    reqs = [req for req, *_ in pieces]
    rows = [req.kv.req_pool_idx for req in reqs]
    lens = {
        "prefix_lens": [start for _, _, start, _ in pieces],
        "extend_lens": [end - start for _, _, start, end in pieces],
    }
    slots = [
        runner.req_to_token_pool.req_to_token[row][start:end]
        for row, (_, _, start, end) in zip(rows, pieces, strict=True)
    ]
    batch = _forward_batch(
        runner,
        token_ids=torch.cat([tokens[a:b] for _, tokens, a, b in pieces]),
        positions=torch.cat([torch.arange(a, b) for _, _, a, b in pieces]),
        out_slots=torch.cat(slots).long(),
        rows=rows,
        **lens,
    )
    told: Any = SimpleNamespace(reqs=reqs, **lens)
    with watch.watch(told), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        runner.attn_backend.init_forward_metadata(batch)
        runner.model.model(batch.input_ids, batch.positions, batch)
    assert "forward_extend" not in vars(runner.attn_backend)


@pytest.mark.parametrize(
    "chunks", [CHUNKS, (CHUNKS[0], CHUNKS[2])], ids=["contiguous", "text between"]
)
@pytest.mark.parametrize("at", [10, 15, 33])
def test_it_is_the_heads_attention_to_what_was_before(
    runner: Any, chunks: tuple[tuple[int, int], ...], at: int
) -> None:
    """Also of a chunk that is prefilled in two pieces, the second beside a plain request."""
    weights, watch = prefill_weights(runner, TOKENS, SLOTS), make_watch(runner)
    req = make_req(make_row(runner, OTHERS, index=2), chunks)
    plain = make_req(make_row(runner, SLOTS, index=3), None)
    extend(runner, watch, [(req, TOKENS, 0, at)])
    other = make_tokens(1, NUM_TOKENS)
    extend(runner, watch, [(plain, other, 0, 5), (req, TOKENS, at, NUM_TOKENS)])
    assert state(plain).outward is None
    for number, span in enumerate(chunks):
        found, expected = state(req).outward.of(*span), expected_of(weights, chunks, number)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", [None, ReferenceAttention, Shuffling])
def test_gaps_of_a_pass_are_measured_alike(runner: Any, kind: Any) -> None:
    """Of two prompts, beside critical tokens, in whatever order the attention wants its rows."""
    weights = prefill_weights(runner, TOKENS, SLOTS)
    prefill(runner, TOKENS.tolist(), OTHERS)
    one, other = make_move(SLOTS, gaps=[2]), make_move(OTHERS, gaps=[0, 1])
    critical = [3, *range(*CHUNKS[2])], [*range(CHUNKS[0][0], CHUNKS[1][1]), 30, 38]
    work = [(move, torch.tensor(at)) for move, at in zip((one, other), critical, strict=True)]
    for move, _ in work:
        for piece in move.plan.pieces:
            spoil(runner, move.slots[piece.start : piece.end])
    watch, sparse = make_watch(runner), kind and reference_of(runner, kind)
    with watch.watch_pass(work) as measure:
        run_pass(runner, [_sequence(*each) for each in work], sparse=sparse, watch=measure)
    for move, gaps in ((one, [2]), (other, [0, 1])):
        found = [move.outward.of(*span) for span in CHUNKS]
        assert [number for number, each in enumerate(found) if each is not None] == gaps
        for number in gaps:
            expected = expected_of(weights, CHUNKS, number)
            torch.testing.assert_close(found[number].double(), expected, rtol=0, atol=ATOL)
    assert watch.num_measured == 30


def test_pass_that_fails_tells_nothing(runner: Any) -> None:
    prefill(runner, TOKENS.tolist(), SLOTS)
    move, positions = make_move(SLOTS, gaps=[1]), torch.arange(*CHUNKS[1])

    def fail() -> None:
        with make_watch(runner).watch_pass([(move, positions)]) as measure:
            run_pass(runner, [_sequence(move, positions)], watch=measure)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert move.outward.of(*CHUNKS[1]) is None


def make_move(slots: Any, *, gaps: Sequence[int]) -> Any:
    pieces = [Piece(*CHUNKS[number], span=number, source=None) for number in gaps]
    plan, ids = SimpleNamespace(pieces=pieces), array("q", TOKENS.tolist())
    return SimpleNamespace(plan=plan, spans=make_spans(), slots=slots, token_ids=ids, tail=None)


def test_forward_that_calls_no_attention_tells_nothing(runner: Any) -> None:
    """As a captured graph: zeros would say that no token looks beyond its chunk."""
    watch, req = make_watch(runner), make_req(make_row(runner, OTHERS, index=2), CHUNKS)
    told: Any = SimpleNamespace(reqs=[req], prefix_lens=[0], extend_lens=[NUM_TOKENS])
    with watch.watch(told):
        pass
    assert (state(req).outward.of(*CHUNKS[0]), watch.num_measured) == (None, 0)
    extend(runner, watch, [(req, TOKENS, 0, NUM_TOKENS)])
    assert watch.num_measured == NUM_TOKENS


def test_nodes_have_what_was_measured_of_them(runner: Any) -> None:
    """Not of what was cached before, not for heads that are calibrated no more, and once."""
    prefill(runner, TOKENS.tolist(), OTHERS)
    req = make_req(make_row(runner, OTHERS, index=2), CHUNKS)
    extend(runner, make_watch(runner, ()), [(req, TOKENS, 22, NUM_TOKENS)])
    assert state(req).outward is None, "no heads, nothing to measure"
    watch = make_watch(runner)
    audit = make_req(req.kv.req_pool_idx, CHUNKS, is_audit=True)
    extend(runner, watch, [(audit, TOKENS, 22, NUM_TOKENS)])
    assert state(audit).outward is None, "its nodes are nowhere"
    extend(runner, watch, [(req, TOKENS, 22, NUM_TOKENS)])
    nodes: list[Any] = [SimpleNamespace(key=range(start, end)) for start, end in CHUNKS]
    for node, (start, _) in zip(nodes, CHUNKS, strict=True):
        facts(node).start = start
    make_watch(runner, ((1, 0),)).tell(req, nodes)
    assert all(facts(node).outward is None for node in nodes)
    watch.tell(req, nodes)
    assert [facts(node).outward is not None for node in nodes] == [False, True, True]
    known = facts(nodes[1]).outward
    watch.tell(req, nodes)
    assert facts(nodes[1]).outward is known


def test_a_failure_costs_no_request(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill(runner, TOKENS.tolist(), SLOTS)
    expected = models.kv_of(runner, SLOTS)
    watch, req = make_watch(runner), make_req(make_row(runner, OTHERS, index=2), CHUNKS)
    monkeypatch.setattr(outward, "_masses", None)
    extend(runner, watch, [(req, TOKENS, 0, NUM_TOKENS)])
    for got, wanted in zip(models.kv_of(runner, OTHERS), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=ATOL)
    assert "not measured any more" in caplog.text
    assert state(req).outward.of(*CHUNKS[0]) is None


# One sum for all chunks


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    num_calls: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def make_job(spans: Sequence[tuple[int, int]], start: int, end: int) -> Any:
    watch = make_watch(SimpleNamespace(device="cpu"), ())
    rows, seen = outward.OutwardRows(()), torch.arange(start)
    return watch._job(rows, make_spans(spans), start, 0, end - start, seen)


@st.composite
def prompts(draw: Any) -> tuple[list[tuple[int, int]], int, int]:
    """Chunks that touch or have text between them, behind a head or none,
    and a piece of their prompt."""
    spans, at = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0, 0, 0, 3]))
        length = draw(st.integers(1, 9))
        spans.append((at, at + length))
        at += length
    end = draw(st.integers(1, at + 4))
    return spans, draw(st.integers(0, end - 1)), end


@given(prompts(), st.sampled_from([1, 4, 512]))
@settings(max_examples=150, deadline=None)
def test_merged_is_as_chunk_by_chunk(
    prompt: tuple[list[tuple[int, int]], int, int], block: int
) -> None:
    """Whatever touches, wherever the piece begins and ends, however many tokens attend at once."""
    spans, start, end = prompt
    torch.manual_seed(len(spans) + 7 * end)
    queries, keys = torch.randn(end - start, 8), torch.randn(end, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outward, "BLOCK", block)
        job = make_job(spans, start, end)
    found = outward._masses(job, queries, keys, 0.5)
    seen = keys[:, None]
    places = torch.arange(start, end), torch.arange(end)
    _, weights = attend(queries[:, None], seen, seen, *places, 0.5)
    expected = reference.masses(weights[0], spans, start)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gap", [0, 1], ids=["touching", "text between"])
def test_number_of_sums_is_by_tokens(gap: int) -> None:
    """A forward with 250 chunks does as many operations as one with ten of the same tokens."""

    def num_operations(num_chunks: int) -> int:
        size = 1000 // num_chunks
        spans = [(5 + n * size, 5 + (n + 1) * size - gap) for n in range(num_chunks)]
        job = make_job(spans, 0, 1010)
        counted = Counted()  # type: ignore[no-untyped-call]
        with counted:
            outward._masses(job, torch.randn(1010, 8), torch.randn(1010, 8), 0.5)
        return counted.num_calls

    # The first chunk is apart, and less of it leaves more blocks of the others.
    assert abs(num_operations(250) - num_operations(10)) <= num_operations(1)
