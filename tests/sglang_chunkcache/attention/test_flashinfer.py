"""A pass on FlashInfer equals the reference, whatever the kernel; FlashInfer itself is
tests/reference/flashinfer.py here.

test_flashinfer_gpu.py holds that model against the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse, tile_rows
from tests.examples import examples
from tests.reference import flashinfer
from tests.sglang_chunkcache.attention.strategies import Case, cases
from tests.sglang_chunkcache.attention.tolerances import assert_near

CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)
SHAPE = HeadShape(num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
SCALE = 0.125
NUM_SLOTS = 600

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
any_pass = cases(dtypes=HALF, head_dims=(64, 128), max_keys=160, max_requests=3)


def make(kernel: str = "fa2", shape: HeadShape = SHAPE, **kwargs: Any) -> FlashInferSparse:
    arguments: dict[str, Any] = {"device": CPU, "scale": SCALE, "modules": flashinfer, **kwargs}
    return FlashInferSparse(shape, kernel=kernel, **arguments)


def run(attention: FlashInferSparse, case: Case) -> Tensor:
    """The pass's result in the requests' order."""
    order = attention.plan(case.requests)
    queries = case.queries if order is None else case.queries[order]
    got = attention.run(queries, case.keys, case.values)
    assert got.shape == queries.shape
    assert got.dtype == queries.dtype
    out = torch.full_like(got, torch.nan)
    out[slice(None) if order is None else order] = got
    return out


def make_case(position_lists: Sequence[Sequence[int]], num_keys: int = 500, seed: int = 0) -> Case:
    """Requests of `SHAPE` over the same slots of a pool."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_keys]
    requests = [
        SparseRequest(torch.tensor(positions, dtype=torch.int64), slots)
        for positions in position_lists
    ]
    num_rows = sum(map(len, position_lists))
    queries = torch.randn(num_rows, SHAPE.num_qo_heads, SHAPE.head_dim, generator=generator)
    keys, values = torch.randn(
        2, NUM_SLOTS, SHAPE.num_kv_heads, SHAPE.head_dim, generator=generator
    )
    return Case(
        requests, SHAPE, SCALE, *(tensor.to(SHAPE.dtype) for tensor in (queries, keys, values))
    )


POSITIONS = [[3, 9, *range(20, 240), *range(241, 499, 7)], [3, 9, 200, 480]]
"""A run of 220 between scattered ones."""
MIXED = make_case(POSITIONS)


@every_kernel
@pytest.mark.parametrize("modules", [flashinfer, flashinfer.SINCE_07], ids=["0.6", "0.7"])
@settings(max_examples=examples(60))
@given(case=any_pass)
def test_every_pass_equals_the_reference(modules: Any, kernel: str, case: Case) -> None:
    """Positions empty to all, groups of 1 to 8, shared slots, keys with gaps."""
    attention = make(kernel, case.shape, modules=modules, scale=case.scale)
    assert_near(run(attention, case), case.attend()[0], case.shape.dtype)


@every_kernel
def test_replanned_for_smaller_and_larger_passes(kernel: str) -> None:
    attention, every_other = make(kernel), range(0, 300, 2)
    some, more = [[7]], [[3, 5], every_other]
    passes: Any = [some, [range(5, 400)], more, [[]], [[250], range(9)], []]
    for seed, lists in enumerate(passes):
        case = make_case(lists, seed=seed)
        assert_near(run(attention, case), case.attend()[0], SHAPE.dtype)


@every_kernel
def test_warm_up_leaves_nothing_to_compile(kernel: str) -> None:
    """A request must not wait minutes for a module."""
    ran: set[str] = set()

    class Wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            ran.add(f"{self.backend} with {len(args)} arguments, {sorted(kwargs)}")
            return super().run(*args, **kwargs)

    attention = make(kernel, modules=SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    attention.warm_up()
    warmed = set(ran)
    ran.clear()
    run(attention, MIXED)
    assert ran
    assert ran <= warmed


def test_tiles_are_as_high_as_the_kernels_blocks() -> None:
    """A tile beyond a block reads its keys twice, one below leaves rows of the block empty."""
    fa2, fa3 = [(128, 1, 128), (128, 7, 18), (64, 8, 16)], [(128, 8, 128), (64, 1, 192)]
    for kernel, sizes in (("fa2", fa2), ("fa3", fa3)):
        for head_dim, group_size, rows in sizes:
            shape = HeadShape(2 * group_size, 2, head_dim, torch.bfloat16)
            assert tile_rows(shape, kernel) == rows


def test_run_refuses_what_was_not_planned() -> None:
    """Rows without a plan would keep whatever the memory held."""
    attention = make()
    with pytest.raises(RuntimeError, match="plan comes before run"):
        attention.run(MIXED.queries, MIXED.keys, MIXED.values)
    attention.plan(MIXED.requests)
    with pytest.raises(ValueError, match=f"expected {len(MIXED.queries)} rows as planned, got 5"):
        attention.run(MIXED.queries[:5], MIXED.keys, MIXED.values)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"shape": HeadShape(4, 2, 80, torch.float16)}, "head_dim 80"),
        ({"kernel": "fa4"}, "fa4"),
        ({"scale": 1e-3}, "0.001"),
    ],
)
def test_constructor_refuses(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make(**arguments)
