"""Each pass takes the kernel whose estimate is least, and equals the reference by any;
FlashInfer is its model here."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.per_pass import KernelPerPass
from tests.examples import examples
from tests.reference import flashinfer
from tests.sglang_chunkcache.attention.strategies import Case, cases
from tests.sglang_chunkcache.attention.tolerances import assert_near

SCALE = 0.125
LLAMA = HeadShape(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
NUM_SMS = 132
H200_MS_PER_KEY = {"fa2": 108e-6, "fa3": 27e-6}
"""As eval/results/2026-11-26T0408-attention-h200 has them at 15% of 8,192 tokens."""

any_pass = cases(dtypes=(torch.float16,), head_dims=(64,), max_keys=400, max_requests=3)


def make(
    shape: HeadShape,
    ms_per_key: Mapping[str, float],
    *,
    scale: float = SCALE,
    num_sms: int = NUM_SMS,
    modules: Any = flashinfer,
) -> KernelPerPass:
    kernels = {}
    for kernel in ms_per_key:
        kernels[kernel] = FlashInferSparse(
            shape, device=torch.device("cpu"), scale=scale, kernel=kernel, modules=modules
        )
        kernels[kernel]._num_sms = num_sms
    return KernelPerPass(kernels, ms_per_key)


def scattered(num_keys: int, share: float, num_requests: int = 1) -> list[SparseRequest]:
    positions = torch.arange(0, num_keys, round(1 / share))
    return [SparseRequest(positions, torch.arange(num_keys)) for _ in range(num_requests)]


def taken(attention: KernelPerPass, requests: Sequence[SparseRequest]) -> str:
    before = dict(attention.passes)
    attention.plan(requests)
    (name,) = (name for name, num in attention.passes.items() if num != before[name])
    return name


def blocks(kernel: FlashInferSparse, requests: Sequence[SparseRequest]) -> list[list[int]]:
    """Keys that each block of each launch walks, head by head."""
    shape = kernel._shape
    heads = shape.num_kv_heads if kernel._kernel == "fa2" else shape.num_qo_heads
    found = []
    for launch in kernel.lay_out(requests).launches:
        walked = []
        for entry, num_keys in enumerate(launch.kv_indptr.diff().tolist()):
            num_rows = int(launch.qo_indptr[entry + 1] - launch.qo_indptr[entry])
            for start in range(0, num_rows, kernel.tile_rows):
                hidden = max(0, num_rows - start - kernel.tile_rows)
                walked += [num_keys - (hidden if launch.kind == "causal" else 0)] * heads
        found.append(walked)
    return found


def estimate(kernel: FlashInferSparse, requests: Sequence[SparseRequest], num_sms: int) -> float:
    """`busiest_keys`, slowly."""
    total = 0.0
    for walked in blocks(kernel, requests):
        longest = 0 if kernel._kernel == "fa2" else max(walked)
        total += max(sum(walked) / num_sms, longest)
    return total


def last_done(walked: Sequence[int], num_sms: int) -> int:
    """When the last multiprocessor is done, as FlashInfer's plan for FA3 spreads blocks."""
    busy = [0] * num_sms
    for keys in sorted(walked, reverse=True):
        heapq.heapreplace(busy, busy[0] + keys)
    return max(busy)


@settings(max_examples=examples(40))
@given(any_pass, st.integers(1, 40), st.tuples(*[st.floats(0.1, 10)] * 2))
def test_the_choice_follows_the_estimate(
    case: Case, num_sms: int, rates: tuple[float, float]
) -> None:
    ms_per_key = dict(zip(KERNELS, rates, strict=True))
    attention = make(case.shape, ms_per_key, num_sms=num_sms)
    ms = {
        name: ms_per_key[name] * estimate(kernel, case.requests, num_sms)
        for name, kernel in attention.kernels.items()
    }
    assert ms[taken(attention, case.requests)] <= min(ms.values()) * (1 + 1e-9)


@settings(max_examples=examples(40))
@given(any_pass, st.integers(1, 40))
def test_the_estimate_is_near_what_spreading_the_blocks_gives(case: Case, num_sms: int) -> None:
    """Never above it, and never below half."""
    fa3 = make(case.shape, {"fa3": 1.0}, num_sms=num_sms).kernels["fa3"]
    done = sum(last_done(walked, num_sms) for walked in blocks(fa3, case.requests))
    keys = fa3.busiest_keys(fa3.lay_out(case.requests))
    assert keys <= done * (1 + 1e-9)
    assert done <= 2 * keys


@pytest.mark.parametrize(
    ("requests", "kernel"),
    [
        (scattered(2048, 0.05), "fa2"),  # 32 of FA3's blocks, each at 2,048 keys
        (scattered(8192, 0.01), "fa2"),
        (scattered(2048, 0.05, num_requests=8), "fa3"),  # they fill the multiprocessors
        (scattered(8192, 0.15), "fa3"),
        (scattered(32768, 0.15), "fa3"),
    ],
)
def test_small_passes_take_fa2_and_large_ones_fa3(
    requests: list[SparseRequest], kernel: str
) -> None:
    """On an H200: 132 multiprocessors."""
    assert taken(make(LLAMA, H200_MS_PER_KEY), requests) == kernel


def test_one_kernel_takes_every_pass() -> None:
    for kernel in KERNELS:
        attention = make(LLAMA, {kernel: 1.0})
        for requests in (scattered(2048, 0.05), scattered(8192, 0.15), []):
            attention.plan(requests)
        assert attention.passes == {kernel: 3}


@settings(max_examples=examples(40))
@given(any_pass)
def test_every_pass_equals_the_reference(case: Case) -> None:
    """By each kernel, and after passes of the other."""
    attention = make(case.shape, dict.fromkeys(KERNELS, 1.0), scale=case.scale)
    for fastest in (*KERNELS, *KERNELS):
        attention._ms_per_key = {kernel: float(kernel != fastest) for kernel in KERNELS}
        order = attention.plan(case.requests)
        rows = slice(None) if order is None else order
        got = attention.run(case.queries[rows], case.keys, case.values)
        assert_near(got, case.attend()[0][rows], case.shape.dtype)
    if len(case.queries):
        assert attention.passes == dict.fromkeys(KERNELS, 2)


def test_flashinfer_plans_the_kernel_that_is_taken_alone() -> None:
    planned: list[str] = []

    class Wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **kwargs: Any) -> None:
            planned.append(self.backend)
            super().plan(*args, **kwargs)

    modules = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    make(LLAMA, H200_MS_PER_KEY, modules=modules).plan(scattered(8192, 0.15))
    assert planned == ["fa3"]


def test_run_refuses_what_was_not_planned() -> None:
    """A plan that fails leaves none, not the one before."""
    attention = make(LLAMA, H200_MS_PER_KEY)
    none = torch.empty(0, 32, 128, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="plan comes before run"):
        attention.run(none, none[:, :8], none[:, :8])
    attention.plan(scattered(2048, 0.05))
    unseen = SparseRequest(torch.tensor([0]), torch.arange(1), torch.tensor([5]))
    with pytest.raises(ValueError, match="nothing to attend to"):
        attention.plan([unseen])
    with pytest.raises(RuntimeError, match="plan comes before run"):
        attention.run(none, none[:, :8], none[:, :8])
