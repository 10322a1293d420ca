"""The relocation kernel in Triton's interpreter.

It cuts bits off where it goes from float32 to bfloat16, and loses subnormals on the way back. The
device rounds to the nearest, so torch's conversion replaces the interpreter's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from sglang_chunkcache.fusion import relocate_kernel


@contextmanager
def interpreted() -> Iterator[ModuleType]:
    """The module once more, its kernels for the interpreter;
    Triton asks the environment when it decorates."""
    spec = importlib.util.spec_from_file_location(
        relocate_kernel.__name__, relocate_kernel.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        # releases that have no such function round by themselves
        patch.setattr(interpreter, "_convert_float", _torch_cast, raising=False)
        yield module


def _torch_cast(data: Any, source: tl.dtype, target: tl.dtype, _: object) -> Any:
    """In place of the interpreter's conversion of float32 to bfloat16 and back."""
    if target == tl.bfloat16:
        return torch.tensor(data).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (source, target) == (tl.bfloat16, tl.float32)
    return torch.tensor(data.view(np.int16)).view(torch.bfloat16).float().numpy()
