"""The reference equals loops in float64 and torch's SDPA: it is what kernels are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eval.bench.attention.reference import ReferenceAttention
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from tests.reference import attention as loops
from tests.sglang_chunkcache.attention.strategies import Case, cases
from tests.sglang_chunkcache.attention.tolerances import assert_near

HALF = (torch.float16, torch.bfloat16)


def gather(cache: Tensor, request: SparseRequest) -> Tensor:
    """The request's keys or values, slot by slot."""
    return torch.stack([cache[slot] for slot in request.kv_slots.tolist()])


def parts(
    case: Case, got: Tensor
) -> Iterator[tuple[SparseRequest, Tensor, Tensor, Tensor, Tensor]]:
    """Request by request: its queries, keys, values, and rows of the result."""
    lens = [request.positions.numel() for request in case.requests]
    rows = zip(torch.split(case.queries, lens), torch.split(got, lens), strict=True)
    for request, (queries, out) in zip(case.requests, rows, strict=True):
        keys, values = (gather(cache, request) for cache in (case.keys, case.values))
        yield request, queries, keys, values, out


@given(cases(max_keys=20, max_requests=2, head_dims=(1, 8, 40), group_sizes=(1, 2, 3)))
def test_attend_equals_loops_in_float64(case: Case) -> None:
    """Scattered queries, gaps and shared slots."""
    for request, queries, keys, values, got in parts(case, case.attend()[0]):
        places = request.positions, request.key_positions()
        expected, _ = loops.attend(queries, keys, values, *places, case.scale)
        assert_near(got, expected, torch.float32)


@given(cases(dtypes=(torch.float32, *HALF)))
def test_attend_equals_masked_sdpa(case: Case) -> None:
    """What torch computes in the model's dtype is within that dtype's tolerance."""
    for request, *inputs, got in parts(case, case.attend()[0]):
        if len(got):
            mask = request.key_positions() <= request.positions[:, None]
            q, k, v = (tensor.movedim(0, 1)[None] for tensor in inputs)
            expected = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True
            )
            assert_near(expected[0].movedim(0, 1), got, case.shape.dtype)


@given(cases(with_gaps=False))
def test_halves_merged_by_lse_are_the_whole(case: Case) -> None:
    """lse is the natural logarithm of the softmax's denominator."""
    halves: list[list[SparseRequest]] = [[], [], []]
    for request in case.requests:
        slots, num_keys, cut = request.kv_slots, request.num_keys, request.num_keys // 2
        late = request.positions[request.positions >= cut]
        if cut:
            halves[0].append(SparseRequest(late, slots))
            halves[1].append(SparseRequest(late, slots[:cut]))
            halves[2].append(SparseRequest(late, slots[cut:], torch.arange(cut, num_keys)))
    queries = case.queries[: sum(len(request.positions) for request in halves[0])]
    (whole, whole_lse), (first, first_lse), (second, second_lse) = (
        replace(case, requests=half, queries=queries).attend() for half in halves
    )
    share = (first_lse - whole_lse).exp()[..., None]
    assert_near(first_lse.exp() + second_lse.exp(), whole_lse.exp(), torch.float32)
    assert_near(share * first + (1 - share) * second, whole, torch.float32)


@given(cases(dtypes=HALF))
def test_reference_attention_is_attend_in_the_model_dtype(case: Case) -> None:
    attention = ReferenceAttention(case.shape, scale=case.scale)
    attention.plan(case.requests)
    got = attention.run(case.queries, case.keys, case.values)
    assert got.dtype == case.shape.dtype
    assert torch.equal(got, case.attend()[0].to(case.shape.dtype))


def test_the_oracle_refuses_what_it_was_not_planned_for() -> None:
    """Surplus rows would come out as whatever lay in memory, and a test would compare with that."""
    oracle = ReferenceAttention(HeadShape(4, 2, 8, torch.float32), scale=0.3)
    queries, cache = torch.randn(2, 4, 8), torch.randn(5, 2, 8)
    with pytest.raises(RuntimeError, match="plan comes before run"):
        oracle.run(queries, cache, cache)
    oracle.plan([SparseRequest(torch.tensor([1, 3]), torch.arange(5))])
    for wrong in (torch.randn(3, 4, 8), queries.half(), torch.randn(2, 2, 8)):
        with pytest.raises(ValueError, match="queries: expected"):
            oracle.run(wrong, cache, cache)
    with pytest.raises(ValueError, match="values: expected"):
        oracle.run(queries, cache, torch.randn(5, 2, 7))
