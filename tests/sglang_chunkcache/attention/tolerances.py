"""How far attention in a dtype may be from the float32 reference on the same inputs: |got -
expected| <= t + t * |expected|.

Keys, queries and values are exact in their dtype; a kernel accumulates in float32 and rounds the
weights and the output. Each rounding costs up to half a unit in the last place (2^-8 for bfloat16,
2^-11 for float16). Largest t seen with torch's SDPA over 1,000 random passes of normal inputs (up
to 4,096 keys, head sizes 8-128, groups of 1-8, scales 0.09-0.35):

    float32     5.9e-6 (float32 logits of up to 20, summed in another order)
    float16     4.3e-4
    bfloat16    3.7e-3

The table keeps a factor of 1.6 above the worst. A query at key 100 that sees one key too many is
off by some 1e-2.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`got` was computed in `dtype`, `expected` by the reference. NaN is never near."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
