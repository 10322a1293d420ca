"""Variants of a chunk as one of them and differences from it: equal to a slow reference, within the bound, and smaller."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.joint.variants import EQUAL, LIKE, OWN, decode_variants, encode_variants
from sglang_chunkcache.storage.codec import NONE, Quantized
from tests.reference.naive_variants import naive_roundtrip

BLOCK = 4


def drawn(seed: int, num_tokens: int = 10) -> tuple[Tensor, Tensor]:
    """Four variants, two layers: layer 0 equal, in layer 1 some blocks much alike, some hardly."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn((2, 1, 2, num_tokens, 2, 8), generator=generator)
    noise = torch.randn((2, 4, 2, num_tokens, 2, 8), generator=generator)
    noise *= torch.rand((1, 4, 2, num_tokens, 1, 1), generator=generator)
    noise[:, :, 0] = 0
    keys, values = (base + noise).to(torch.bfloat16)
    return keys, values


@given(
    st.integers(0, 10**6),
    st.sampled_from((1, 3, BLOCK, 16)),
    st.sampled_from((0.5, 0.8, 0.95, 1.0)),
    st.sampled_from((0, 2, 4, 6)),
    st.sampled_from((NONE, Quantized(8))),
)
def test_fast_equals_slow(seed: int, block_size: int, threshold: float, bits: int, codec: object) -> None:
    """Any threshold, block size and residual, a shorter last block included."""
    keys, values = drawn(seed)
    how = {"block_size": block_size, "threshold": threshold, "codec": codec, "bits": bits}
    found = decode_variants(encode_variants(keys, values, **how))  # type: ignore[arg-type]
    expected = naive_roundtrip(keys, values, **how)  # type: ignore[arg-type]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=1e-6)  # norms are summed in another order


@given(st.integers(0, 10**6), st.sampled_from((2, 4, 6, 8)))
def test_residuals_err_by_less_than_the_blocks_themselves(seed: int, bits: int) -> None:
    """Of the largest difference from the leader, not of the largest element: that is what a residual gains."""
    keys, values = drawn(seed)
    joint = encode_variants(keys, values, block_size=BLOCK, threshold=-1.0, codec=NONE, bits=bits)
    assert not (joint.kinds == OWN).any()
    for before, after in zip((keys, values), decode_variants(joint), strict=True):
        off = (after.double() - before.double()).abs()
        difference = (before.double() - before[:1].double()).abs().amax(-1, keepdim=True)
        rounding = before.double().abs().amax(-1, keepdim=True) * 2.0**-7
        assert bool((off <= Quantized(bits).max_error(torch.bfloat16) * difference + rounding).all())


def test_what_is_unlike_comes_back_bit_by_bit_and_what_is_equal_costs_nothing() -> None:
    """With a leader that is kept as it is. Layer 0 costs one byte a block."""
    keys, values = drawn(0)
    joint = encode_variants(keys, values, block_size=BLOCK, threshold=1.0, codec=NONE, bits=4)
    assert (joint.kinds[:, 0] == EQUAL).all()
    assert (joint.kinds[:, 1] == OWN).all()
    assert all(map(torch.equal, decode_variants(joint), (keys, values)))
    assert joint.nbytes == (keys[0].nbytes + values[0].nbytes) * (1 + 3 / 2) + joint.kinds.numel()


@pytest.mark.parametrize("bits", [0, 2, 4])
def test_bytes_are_those_of_the_leader_and_of_the_differences(bits: int) -> None:
    """Three variants beside the leader whose layer 1 is alike: packed numbers with scales, or two norms a block."""
    keys, values = drawn(1)
    joint = encode_variants(keys, values, block_size=BLOCK, threshold=-1.0, codec=NONE, bits=bits)
    assert (joint.kinds[:, 1] == LIKE).all()
    rows, blocks = 2 * 3 * 10 * 2, 3 * 3
    residuals = rows * (bits + 2) if bits else 2 * 4 * blocks
    assert joint.nbytes == keys[0].nbytes + values[0].nbytes + joint.kinds.numel() + residuals
