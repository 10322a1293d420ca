"""Every name of FlashInfer that we use, and the model that replaces it in tests. Failures after an
upgrade show what to read.

The insides of the kernels that sglang_chunkcache/attention/flashinfer_cuda.py relies on are pinned
by compiling them (test_flashinfer_cuda.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("flashinfer")

import flashinfer as real
import torch

from sglang_chunkcache.attention import flashinfer_cuda as variants
from sglang_chunkcache.attention.base import HeadShape
from tests.kit.contract import source
from tests.reference import flashinfer as model

pytestmark = pytest.mark.matrix

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
OWNS_MASK = "variant_owns_mask" in inspect.signature(getattr(real, WRAPPER)).parameters
MODEL = model.SINCE_07 if OWNS_MASK else model


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_version_is_the_one_that_was_read() -> None:
    """The variants use more than the public interface."""
    assert real.__version__ in variants.VERSIONS


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_model_takes_what_the_wrapper_takes(method: str) -> None:
    """Names, kinds and defaults, in order where passed by position; FlashInfer has more."""
    ours = parameters(getattr(getattr(MODEL, WRAPPER), method))
    theirs = parameters(getattr(getattr(real, WRAPPER), method))
    by_position = {"__init__": 3, "plan": 9, "run": 2}[method]
    assert list(ours)[:by_position] == list(theirs)[:by_position]
    for name, parameter in ours.items():
        assert name in theirs
        assert parameter.kind == theirs[name].kind
        same_default = parameter.default == theirs[name].default
        assert same_default or str(parameter.default) == f"torch.{theirs[name].default}"


def test_jit_args_are_what_the_generator_takes() -> None:
    """By position, after the backend; FlashInfer reads names at 7 and 9 itself."""
    from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

    names = list(parameters(gen_customize_batch_prefill_module))[1:]
    shape = HeadShape(8, 2, 128, torch.bfloat16)
    args = dict(zip(names, variants.jit_args(shape, "fa2"), strict=False))
    assert args.pop("variant_decl") == variants.SOURCES["fa2"]
    assert args.pop("uri").startswith("chunkcache_limits_fa2_bf16_128_")
    assert args == {
        **dict.fromkeys(("dtype_q", "dtype_kv", "dtype_o"), torch.bfloat16),
        "idtype": torch.int32,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "additional_tensor_names": ["limits"],
        "additional_tensor_dtypes": ["int32_t"],
        "additional_scalar_names": ["sm_scale"],
        "additional_scalar_dtypes": ["double"],
        "variant_name": "ChunkcacheLimits",
    }
    assert (names[7], names[9]) == ("additional_tensor_names", "additional_scalar_names")


def test_a_mask_is_what_selects_the_masked_mode() -> None:
    """Whatever is in the mask that `plan` was given: the FA2 variant depends on it."""
    text = source(inspect.unwrap(getattr(real, WRAPPER).run))
    either = " or self._variant_owns_mask" if OWNS_MASK else ""
    condition = f"if self._custom_mask_buf is not None{either}: "
    assert f"{condition}mask_mode = MaskMode.CUSTOM.value else: " in text
