"""Tokens to shared blocks and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.joint.encoding import JointLayer, decode, encode, relative_errors
from eval.joint.fast_fusion import NEVER

HEADS, SIZE, VALUE_SIZE = 2, 4, 3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def made(lens: list[int], seed: int, dtype: torch.dtype, noise: float) -> tuple[Tensor, Tensor]:
    """Units that begin like one text, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def side(size: int) -> Tensor:
        text = torch.randn(max(lens), HEADS, size, generator=generator)
        tokens = torch.cat([text[:length] for length in lens])
        return (tokens + noise * torch.randn(tokens.shape, generator=generator)).to(dtype)

    return side(SIZE), side(VALUE_SIZE)


def sides(layer: JointLayer, *given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Decoded keys and values, each with what it was."""
    return zip(decode(layer), given, strict=True)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


layers = st.tuples(
    st.lists(st.integers(0, 11), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from(DTYPES),
    st.sampled_from((0.0, 0.1, 0.5)),
)


@given(layers, st.integers(1, 4))
def test_nothing_is_lost_above_one(
    case: tuple[list[int], int, torch.dtype, float], block_size: int
) -> None:
    kv = made(*case)
    layer = encode(*kv, case[0], block_size=block_size, threshold=NEVER)
    assert all(same_bits(*pair) for pair in sides(layer, *kv))


@given(layers, st.integers(1, 4), st.sampled_from((0.3, 0.8, 0.98)))
def test_what_was_not_fused_comes_back_bit_by_bit(
    case: tuple[list[int], int, torch.dtype, float], block_size: int, threshold: float
) -> None:
    lens, *_ = case
    keys, values = made(*case)
    layer = encode(keys, values, lens, block_size=block_size, threshold=threshold)
    assert int(layer.references.sum()) == sum(length // block_size for length in lens)
    assert len(layer.tail_keys) == sum(length % block_size for length in lens)
    alone = iter((layer.references[layer.table] == 1).tolist())
    own: list[bool] = []
    for length in lens:
        for _ in range(length // block_size):
            own += [next(alone)] * block_size
        own += [True] * (length % block_size)
    mask = torch.tensor(own, dtype=torch.bool)
    for found, given_ in sides(layer, keys, values):
        assert found.shape == given_.shape
        assert same_bits(found[mask], given_[mask])


@given(layers, st.integers(1, 4), st.integers(0, 99))
def test_fixed_blocks_come_back_bit_by_bit(
    case: tuple[list[int], int, torch.dtype, float], block_size: int, seed: int
) -> None:
    lens, *_ = case
    keys, values = made(*case)
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.rand(sum(length // block_size for length in lens), generator=generator) < 0.5
    layer = encode(keys, values, lens, block_size=block_size, threshold=0.3, fixed=fixed)
    for pair in sides(layer, keys, values):
        now, before = (blocks(each, lens, block_size) for each in pair)
        assert all(torch.equal(now[i], before[i]) for i in fixed.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("num_units", [2, 3, 5, 8])
def test_equal_units_share_and_keep_every_bit(dtype: torch.dtype, num_units: int) -> None:
    """What is equal, as layer 0 of a chunk's variants, costs nothing."""
    kv = made([11] * num_units, 0, dtype, 0.0)
    layer = encode(*kv, [11] * num_units, block_size=4, threshold=0.999)
    assert layer.references.tolist() == [num_units] * len(layer.keys) == [num_units] * 2
    assert all(same_bits(*pair) for pair in sides(layer, *kv))
    errors = [each.tolist() for each in relative_errors(layer, *kv)]
    assert errors == [[0.0] * 2 * num_units] * 2


@given(layers, st.integers(1, 4))
def test_norms_are_kept(case: tuple[list[int], int, torch.dtype, float], block_size: int) -> None:
    """So a block is never further off than twice its norm."""
    lens, _, dtype, _ = case
    kv = made(*case)
    layer = encode(*kv, lens, block_size=block_size, threshold=0.5)
    precision = 4 * torch.finfo(dtype).eps
    for pair in sides(layer, *kv):
        both = (blocks(each, lens, block_size) for each in pair)
        for now, before in zip(*both, strict=True):
            assert abs(now.norm() / before.norm() - 1) < precision
    assert all(bool((each <= 2 + precision).all()) for each in relative_errors(layer, *kv))


def blocks(tokens: Tensor, lens: list[int], block_size: int) -> list[Tensor]:
    """One by one, without what `encode` uses."""
    parts = [torch.split(unit, block_size) for unit in torch.split(tokens, lens)]
    return [block.float() for unit in parts for block in unit if len(block) == block_size]


def test_leader_of_zeros() -> None:
    keys, values = torch.ones(2, 1, 2), torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
    layer = encode(keys, values, [1, 1], block_size=1, threshold=0.5)
    assert layer.table.tolist() == [0, 0]
    torch.testing.assert_close(decode(layer)[1], values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_block_that_is_not_finite_comes_back(bad: float) -> None:
    """A norm that is no number scales nothing."""
    keys, values = torch.ones(4, 1, 2), torch.ones(4, 1, 2)
    keys[1, 0, 0] = bad
    layer = encode(keys, values, [2, 2], block_size=1, threshold=0.5)
    for found, given_ in sides(layer, keys, values):
        torch.testing.assert_close(found, given_, equal_nan=True)


def test_bytes_shrink_with_what_is_shared() -> None:

    def num_bytes(threshold: float) -> int:
        keys, values = made([64, 64, 64, 64], 0, torch.bfloat16, 0.0)
        layer: JointLayer = encode(keys, values, [64] * 4, block_size=16, threshold=threshold)
        assert layer.nbytes >= keys.nbytes * len(layer.keys) // 16
        return layer.nbytes

    kept = 64 * HEADS * (SIZE + VALUE_SIZE) * 2
    assert num_bytes(0.9) == kept + 16 * 12
    assert num_bytes(NEVER) == 4 * kept + 16 * 12


@pytest.mark.parametrize(
    ("shape", "block_size", "names"),
    [
        ((4, 2, 4), 2, r"keys: expected \[5, num_kv_heads, head_dim\], got \[4, 2, 4\]"),
        ((5, 8), 2, r"keys: expected \[5, num_kv_heads, head_dim\], got \[5, 8\]"),
        ((5, 2, 4), 0, "block_size: expected 1 or more, got 0"),
    ],
)
def test_wrong_arguments(shape: tuple[int, ...], block_size: int, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        encode(torch.ones(shape), torch.ones(5, 2, 3), [2, 3], block_size=block_size, threshold=0.5)
