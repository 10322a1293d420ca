"""The reference equals loops in float64 and torch's SDPA: it is what kernels are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.reference import ReferenceAttention, attend
from tests.reference import attention as loops
from tests.sglang_chunkcache.attention.strategies import Case, cases
from tests.sglang_chunkcache.attention.tolerances import assert_near

HALF = (torch.float16, torch.bfloat16)


def gather(cache: Tensor, request: SparseRequest, page_size: int) -> Tensor:
    """The request's keys or values, slot by slot."""
    keys = range(request.num_keys)
    return torch.stack(
        [cache[int(request.kv_pages[key // page_size]), key % page_size] for key in keys]
    )


def parts(
    case: Case, got: Tensor
) -> Iterator[tuple[SparseRequest, Tensor, Tensor, Tensor, Tensor]]:
    """Request by request: its queries, keys, values, and rows of the result."""
    lens = [request.positions.numel() for request in case.requests]
    rows = zip(torch.split(case.queries, lens), torch.split(got, lens), strict=True)
    for request, (queries, out) in zip(case.requests, rows, strict=True):
        keys, values = (
            gather(cache, request, case.page_size) for cache in (case.keys, case.values)
        )
        yield request, queries, keys, values, out


@given(cases(max_keys=20, max_requests=2, head_dims=(1, 8, 40), group_sizes=(1, 2, 3)))
def test_attend_equals_loops_in_float64(case: Case) -> None:
    """Scattered queries, gaps and shared pages:
    each query sees exactly the keys at or before its position."""
    for request, queries, keys, values, got in parts(case, case.attend()[0]):
        places = request.positions, request.key_positions()
        expected, _ = loops.attend(queries, keys, values, *places, case.scale)
        assert_near(got, expected, torch.float32)


@given(cases(dtypes=(torch.float32, *HALF)))
def test_attend_equals_masked_sdpa(case: Case) -> None:
    """What torch computes in the model's dtype is within that dtype's tolerance:
    the table is as wide as rounding needs."""
    for request, *inputs, got in parts(case, case.attend()[0]):
        if len(got):
            mask = request.key_positions() <= request.positions[:, None]
            q, k, v = (tensor.movedim(0, 1)[None] for tensor in inputs)
            expected = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True
            )
            assert_near(expected[0].movedim(0, 1), got, case.shape.dtype)


@given(cases(page_sizes=(1,), with_gaps=False))
def test_halves_merged_by_lse_are_the_whole(case: Case) -> None:
    """lse is the natural logarithm of the softmax's denominator:
    the weights with which parts are merged follow from it."""
    halves: list[list[SparseRequest]] = [[], [], []]
    for request in case.requests:
        pages, num_keys, cut = request.kv_pages, request.num_keys, request.num_keys // 2
        late = request.positions[request.positions >= cut]
        if cut:
            halves[0].append(SparseRequest(late, pages, num_keys))
            halves[1].append(SparseRequest(late, pages[:cut], cut))
            after = torch.arange(cut, num_keys)
            halves[2].append(SparseRequest(late, pages[cut:], num_keys - cut, after))
    queries = case.queries[: sum(len(request.positions) for request in halves[0])]
    (whole, whole_lse), (first, first_lse), (second, second_lse) = (
        replace(case, requests=half, queries=queries).attend() for half in halves
    )
    share = (first_lse - whole_lse).exp()[..., None]
    assert_near(first_lse.exp() + second_lse.exp(), whole_lse.exp(), torch.float32)
    assert_near(share * first + (1 - share) * second, whole, torch.float32)


def test_lse_of_equal_logits_is_the_logarithm_of_the_keys_seen() -> None:
    """Natural, not base 2 as FlashInfer's own."""
    request = SparseRequest(torch.tensor([0, 4]), torch.arange(8), 8)
    cache = torch.ones(8, 1, 4)
    _, lse = attend(torch.zeros(2, 2, 4), cache, cache, [request], page_size=1, scale=1.0)
    assert_near(lse, torch.tensor([[1.0, 1.0], [5.0, 5.0]]).log(), torch.float32)


@given(cases(dtypes=HALF))
def test_reference_attention_is_attend_in_the_model_dtype(case: Case) -> None:
    """Rows stay in the requests' order."""
    attention = ReferenceAttention(case.shape, scale=case.scale, page_size=case.page_size)
    attention.plan(case.requests)
    got = attention.run(case.queries, case.keys, case.values)
    assert got.dtype == case.shape.dtype
    assert torch.equal(got, case.attend()[0].to(case.shape.dtype))


def test_caches_without_page_dimension_are_read_by_slot() -> None:
    """SGLang's pools have none at page size 1."""
    request = SparseRequest(torch.tensor([1, 3]), torch.tensor([5, 2, 7, 0]), 4)
    queries, keys, values = torch.randn(2, 2, 8), torch.randn(8, 1, 8), torch.randn(8, 1, 8)
    flat = attend(queries, keys, values, [request], page_size=1, scale=0.3)
    paged = attend(queries, keys[:, None], values[:, None], [request], page_size=1, scale=0.3)
    assert all(torch.equal(a, b) for a, b in zip(flat, paged, strict=True))


def test_the_oracle_refuses_what_it_was_not_planned_for() -> None:
    """Surplus rows would come out as whatever lay in memory, and a test would compare with that."""
    shape = HeadShape(4, 2, 8, torch.float32)
    oracle = ReferenceAttention(shape, scale=0.3)
    queries, cache = torch.randn(2, 4, 8), torch.randn(5, 2, 8)
    with pytest.raises(RuntimeError, match="plan comes before run"):
        oracle.run(queries, cache, cache)
    with pytest.raises(ValueError, match="kv_pages"):
        oracle.plan([SparseRequest(torch.tensor([1, 3]), torch.arange(4), 5)])
    oracle.plan([SparseRequest(torch.tensor([1, 3]), torch.arange(5), 5)])
    assert oracle.run(queries, cache, cache).shape == queries.shape
    for wrong in (torch.randn(3, 4, 8), queries.half(), torch.randn(2, 2, 8)):
        with pytest.raises(ValueError, match="queries: expected"):
            oracle.run(wrong, cache, cache)
    with pytest.raises(ValueError, match="values: expected"):
        oracle.run(queries, cache, torch.randn(5, 2, 7))
