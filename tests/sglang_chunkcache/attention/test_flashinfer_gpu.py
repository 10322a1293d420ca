"""The real FlashInfer: its kernels with our variants equal the reference, and
tests/reference/flashinfer.py equals it.

Compiles up to four modules for each dtype and head size, minutes each, the first time;
`-k "bfloat16-128 or not float16"` takes one set.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.choice import choose
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.flashinfer_cuda import jit_args, unsupported
from tests.reference import flashinfer as model
from tests.sglang_chunkcache.attention.strategies import Case
from tests.sglang_chunkcache.attention.tolerances import assert_near

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = HeadShape(8, 2, 128, torch.bfloat16)
SCALE = 0.09

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or unsupported(SHAPE, device=CUDA) is not None,
        reason="needs CUDA and the FlashInfer that was read",
    ),
]
every_shape = pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param(dtype, head_dim, id=f"{str(dtype).removeprefix('torch.')}-{head_dim}")
        for dtype in (torch.bfloat16, torch.float16)
        for head_dim in (128, 64)
    ],
)


def skip_without_hopper(kernel: str) -> None:
    if kernel != "fa2" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FA3 needs a Hopper GPU")


def make_case(shape: HeadShape, lengths: Sequence[int], seed: int = 0, share: float = 0.15) -> Case:
    """A request per length: the first positions, a run, a few single ones, the last;
    slots of no request are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = 2 * max(lengths) + 1
    used = torch.zeros(num_slots, dtype=torch.bool)
    requests = []
    for num_keys in lengths:
        chosen = torch.rand(num_keys, generator=generator) < share
        chosen[:3] = chosen[num_keys // 2 : num_keys // 2 + 300] = chosen[-1] = True
        slots = torch.randperm(num_slots, generator=generator)[:num_keys]
        used[slots] = True
        requests.append(SparseRequest(chosen.nonzero().flatten(), slots))
    num_rows = sum(request.positions.numel() for request in requests)
    keys, values = torch.randn(
        2, num_slots, shape.num_kv_heads, shape.head_dim, generator=generator
    )
    keys[~used] = values[~used] = torch.nan
    queries = torch.randn(num_rows, shape.num_qo_heads, shape.head_dim, generator=generator)
    tensors = (tensor.to(CUDA, shape.dtype) for tensor in (queries, keys, values))
    return Case(requests, shape, SCALE, *tensors)


def in_order(case: Case, order: Tensor | None) -> Tensor:
    return case.queries if order is None else case.queries[order.to(CUDA)]


def expected(case: Case, order: Tensor | None) -> Tensor:
    return case.attend()[0] if order is None else case.attend()[0][order.to(CUDA)]


def make(kernel: str, case: Case) -> FlashInferSparse:
    return FlashInferSparse(case.shape, device=CUDA, scale=case.scale, kernel=kernel)


@every_shape
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group_size", [1, 4, 7, 8])
def test_kernels_equal_the_reference(
    kernel: str, dtype: torch.dtype, head_dim: int, group_size: int
) -> None:
    """On shared slots; planned anew for a smaller and a larger pass, each run twice."""
    skip_without_hopper(kernel)
    shape = HeadShape(2 * group_size, 2, head_dim, dtype)
    attention = make(kernel, make_case(shape, [9]))
    for seed, lengths in enumerate([[3000, 700, 1], [40], [6000, 2049, 128]]):
        case = make_case(shape, lengths, seed)
        order = attention.plan(case.requests)
        queries = in_order(case, order)
        for _ in range(2):
            got = attention.run(queries, case.keys, case.values)
            assert_near(got, expected(case, order), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_plan_and_run_do_not_wait_for_the_device(kernel: str) -> None:
    """The host plans a pass while the GPU is busy with the one before."""
    skip_without_hopper(kernel)
    case = make_case(SHAPE, [3000, 700])
    attention = make(kernel, case)
    attention.warm_up()
    queries = in_order(case, attention.plan(case.requests))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.plan(case.requests)
        attention.run(queries, case.keys, case.values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("backend", "variant", "causal"),
    [
        *((backend, not causal, causal) for backend in ("fa2", "fa3") for causal in (False, True)),
        ("fa3", False, False),
    ],
)
def test_model_equals_flashinfer(backend: str, variant: bool, causal: bool) -> None:
    """Output and log-sum-exp, entry by entry; one entry sees no key at all."""
    flashinfer = pytest.importorskip("flashinfer")
    skip_without_hopper(backend)
    generator = torch.Generator().manual_seed(0)
    qo_indptr, kv_indptr, last = ([0, 5, 200, 203], [0, 40, 500, 500], [1, 1, 0])
    host = [torch.tensor(ints, dtype=torch.int32) for ints in (qo_indptr, kv_indptr, last)]
    indices = torch.randint(600, (500,), generator=generator, dtype=torch.int32)
    limits = torch.randint(1, 41, (203,), generator=generator, dtype=torch.int32)
    limits[5:200] *= 11
    limits[200:] = 0
    queries = torch.randn(203, 8, 128, generator=generator).to(SHAPE.dtype)
    cache = torch.randn(2, 600, 1, 2, 128, generator=generator).to(SHAPE.dtype)
    results = []
    for module, device in ((flashinfer, CUDA), (model, CPU)):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        mask = torch.zeros(1, dtype=torch.uint8, device=device)
        args = {"jit_args": jit_args(SHAPE, backend)} if variant else {}
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend, **args)
        places, sizes = (host[0], host[1], indices.to(device), host[2]), (8, 2, 128, 1)
        wrapper.plan(
            *places,
            *sizes,
            causal=causal,
            packed_custom_mask=mask if variant and backend == "fa2" else None,
            sm_scale=SCALE,
            q_data_type=SHAPE.dtype,
            max_token_per_sequence=195,
        )
        extra = (limits.to(device), SCALE) if variant else ()
        out, lse = wrapper.run(queries.to(device), tuple(cache.to(device)), *extra, return_lse=True)
        results.append((out.cpu(), lse.cpu()))
    (out, lse), (model_out, model_lse) = results
    assert_near(out, model_out, SHAPE.dtype)
    assert_near(lse[:200], model_lse[:200], SHAPE.dtype)
    assert bool((lse[200:] < -1000).all())


def test_choice_finds_every_kernel_right() -> None:
    """On Hopper none is left out."""
    choice = choose(SHAPE, device=CUDA, scale=SCALE)
    assert choice.attention is not None
    assert choice.attention.kernels.keys() == choice.ms.keys()
    assert set(choice.failed) == (set() if torch.cuda.get_device_capability()[0] == 9 else {"fa3"})
