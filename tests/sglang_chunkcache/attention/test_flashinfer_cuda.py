"""Our CUDA variants: what they answer, on the host with g++; that they fit FlashInfer's kernels,
with nvcc.

`pytest -m nvcc tests/sglang_chunkcache/attention/test_flashinfer_cuda.py`: 2 to 4 minutes, no GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglang_chunkcache.attention.base import HeadShape
from sglang_chunkcache.attention.flashinfer_cuda import (
    SOURCES,
    jit_args,
    unsupported,
    unsupported_shape,
)

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda")
SHAPE = HeadShape(8, 2, 128, torch.bfloat16)

Q_INDPTR = [0, 3, 3, 8]
KV_LENS = [10, 4, 70]
LIMITS = [1, 5, 10, 1, 64, 65, 69, 70]

HARNESS = """
#include <sys/mman.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#define __device__
#define __host__
namespace math { constexpr float log2e = 1.5f, inf = 5e4f; }
struct AttentionVariantBase {};
template <int ROWS, bool WITH_SCALE> struct OnlineSoftmax { explicit OnlineSoftmax(float) {} };
#define REGISTER_LOGITS_MASK(params, entry, qo, kv, qo_head, kv_head, ...) \\
  template <typename Params> bool LogitsMask(const Params& params, uint32_t entry, uint32_t qo, \\
      uint32_t kv, uint32_t qo_head, uint32_t kv_head) { __VA_ARGS__ }
#define REGISTER_LOGITS_TRANSFORM(params, logits, entry, qo, kv, qo_head, kv_head, ...) \\
  template <typename Params, typename T> T LogitsTransform(const Params& params, T logits, \\
      uint32_t entry, uint32_t qo, uint32_t kv, uint32_t qo_head, uint32_t kv_head) { __VA_ARGS__ }
namespace fa2 { %(fa2)s }
namespace fa3 { %(fa3)s }

const int32_t q_indptr[] = {%(q_indptr)s}, kv_lens[] = {%(kv_lens)s}, given[] = {%(limits)s};
struct Params {
  const int32_t *q_indptr, *limits;
  double sm_scale;
  uint32_t get_qo_len(uint32_t entry) const { return q_indptr[entry + 1] - q_indptr[entry]; }
  uint32_t get_kv_len(uint32_t entry) const { return kv_lens[entry]; }
};
struct MainloopParams { Params additional_params; };

int main() {
  // The limits end where a page ends, and the next page must not be read.
  int access = PROT_READ | PROT_WRITE;
  char* pages = (char*)mmap(nullptr, 8192, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(pages + 4096, 4096, PROT_NONE);
  int32_t* limits = (int32_t*)(pages + 4096 - sizeof given);
  memcpy(limits, given, sizeof given);
  Params params{q_indptr, limits, 2.0};
  MainloopParams mainloop{params};
  for (int entry = 0; entry < (int)(sizeof kv_lens / 4); ++entry) {
    int qo_len = params.get_qo_len(entry), kv_len = kv_lens[entry];
    fa2::ChunkcacheLimits two(params, entry, nullptr);
    auto block = std::make_tuple(0, 0, 0, q_indptr[entry], 0, qo_len, kv_len, 0);
    fa3::ChunkcacheLimits three(mainloop, block);
    printf("%%u %%u %%u ", two.qo_len, two.kv_len, two.window_left);
    printf("%%g %%g\\n", two.sm_scale_log2, three.sm_scale_log2);
    for (int row = 0; row < qo_len + %(more)d; ++row)
      for (int key = 0; key < kv_len + %(more)d; ++key) {
        float logit = three.LogitsTransform(mainloop, 0.25f, 0, row, key, 0, 0);
        printf("%%d", two.LogitsMask(params, entry, row, key, 0, 0));
        printf("%%c", logit == 0.25f ? '1' : logit == -5e4f ? '0' : '?');
      }
    printf("\\n");
  }
}
"""

MORE = 6
"""Rows and keys past an entry's end that the kernels ask for too."""

COMPILE = """
import subprocess, sys, torch
torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked for flags
from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
from sglang_chunkcache.attention.base import HeadShape
from sglang_chunkcache.attention.flashinfer_cuda import jit_args
backend, dtype, head_dim, source = sys.argv[1:]
args = jit_args(HeadShape(8, 2, int(head_dim), getattr(torch, dtype)), backend)
spec = gen_customize_batch_prefill_module(backend, *args)
spec.write_ninja()
target = str(spec.build_dir / f"{spec.name}_{source}.cuda.o")
sys.exit(subprocess.run(["ninja", "-C", str(spec.build_dir), target]).returncode)
"""

CURAND = """
struct curandState_t {};
__device__ float curand_normal(curandState_t*);
__device__ double curand_normal_double(curandState_t*);
__device__ float curand_uniform(curandState_t*);
__device__ double curand_uniform_double(curandState_t*);
using number = unsigned long long;
__device__ void curand_init(number, number, number, curandState_t*);
"""
"""A header of CUDA's that CUTLASS includes, for names no kernel of ours uses;
toolkits without cuRAND lack it."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_row_sees_the_first_keys_up_to_its_limit(tmp_path: Path) -> None:
    """In both variants; rows past an entry's end see nothing and read no limit past the last."""
    arrays = {"q_indptr": Q_INDPTR, "kv_lens": KV_LENS, "limits": LIMITS}
    parts = {name: ", ".join(map(str, ints)) for name, ints in arrays.items()}
    source = HARNESS % {"fa2": SOURCES["fa2"], "fa3": SOURCES["fa3"], "more": MORE, **parts}
    (tmp_path / "harness.cpp").write_text(source)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "harness.cpp", "-o", "harness"], cwd=tmp_path, check=True
    )
    done = subprocess.run([tmp_path / "harness"], capture_output=True, text=True, check=True)
    lines = iter(done.stdout.splitlines())
    for start, end, kv_len in zip(Q_INDPTR, Q_INDPTR[1:], KV_LENS, strict=False):
        assert next(lines) == f"{end - start} {kv_len} {kv_len} 3 3"
        expected = ""
        for row in range(end - start + MORE):
            limit = LIMITS[start + row] if start + row < end else 0
            expected += "11" * limit + "00" * (kv_len + MORE - limit)
        assert next(lines) == expected


@pytest.mark.nvcc
@pytest.mark.nightly
@pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("ninja") and find_spec("flashinfer")),
    reason="needs nvcc, ninja and FlashInfer",
)
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "source"),
    [
        ("fa2", "bfloat16", 128, "batch_prefill_paged_kernel_mask_2"),  # 2: custom mask
        ("fa2", "float16", 64, "batch_prefill_paged_kernel_mask_2"),
        ("fa3", "bfloat16", 128, "batch_prefill_paged_sm90_kernel_mask_0"),  # 0: no mask
    ],
)
def test_the_kernel_with_our_variant_compiles(
    backend: str, dtype: str, head_dim: int, source: str, tmp_path: Path
) -> None:
    """Of the module's kernels the one that a limited launch uses, for Hopper."""
    (tmp_path / "curand_kernel.h").write_text(CURAND)
    include = [*filter(None, [os.getenv("CPLUS_INCLUDE_PATH")]), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "CPLUS_INCLUDE_PATH": os.pathsep.join(include),
    }
    command = [sys.executable, "-c", COMPILE, backend, dtype, str(head_dim), source]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert list(tmp_path.rglob(f"*{source}.cuda.o"))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_modules_of_different_shapes_have_different_names(backend: str) -> None:
    """FlashInfer keeps modules by name: the wrong dtype's would be loaded silently."""
    dtypes = torch.bfloat16, torch.float16
    shapes = [HeadShape(8, 2, dim, dtype) for dim in (64, 128) for dtype in dtypes]
    assert len({jit_args(shape, backend)[0] for shape in shapes}) == len(shapes)
    other_heads = HeadShape(4, 4, 64, torch.float16), HeadShape(8, 1, 64, torch.float16)
    assert jit_args(other_heads[0], backend) == jit_args(other_heads[1], backend)


def test_unsupported_names_the_reason() -> None:
    for shape, what in (
        (replace(SHAPE, dtype=torch.float32), "dtype torch.float32"),
        (replace(SHAPE, head_dim=96), "head_dim 96"),
        (replace(SHAPE, num_qo_heads=32), "32 query heads for 2 KV heads"),
        (replace(SHAPE, num_qo_heads=7), "7 query heads for 2 KV heads"),
    ):
        found = str(unsupported_shape(shape))
        assert what in found
        assert unsupported(shape, device=CUDA) == found


def test_unsupported_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashinfer")
    module, capability = "sglang_chunkcache.attention.flashinfer_cuda", (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def reason(device: str = "cuda") -> str | None:
        return unsupported(SHAPE, device=torch.device(device))

    assert reason() is None
    assert reason("cpu") == "the kernels need CUDA, not cpu"
    capability = (7, 5)
    assert "not 7.5" in str(reason())
    capability = (8, 9)
    monkeypatch.setattr(f"{module}.version", lambda _: "0.6.15")
    assert reason() == "flashinfer is 0.6.15, the kernels were written for 0.6.18, 0.7.1, 0.7.2"
    monkeypatch.setattr(f"{module}.find_spec", lambda _: None)
    assert reason() == "flashinfer is not installed"
