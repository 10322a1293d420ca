"""Codecs: exact, or within their bound on whatever finite KV there is;
equal to a slow reference."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.joint.any_bits import AnyBits, quantized
from sglang_chunkcache import config
from sglang_chunkcache.storage.codec import CODECS, NONE, Codec, Quantized, Sizes
from tests.reference.naive_codec import naive_decode, naive_encode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = (2, 3, 4, 5, 6, 7, 8)


def random_rows(seed: int, dtype: torch.dtype, kind: str) -> Tensor:
    """[2, 5, 2, 16], of one kind of trouble."""
    rows = torch.randn(2, 5, 2, 16, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier":
        rows[..., 3] *= 1000
    elif kind == "zeros":
        rows[seed % 2] = 0
    elif kind == "tiny":
        rows *= 1e-6
    elif kind == "largest":
        rows[..., seed % 16] = torch.finfo(dtype).max * (-1) ** seed
    return rows.to(dtype)


def test_the_config_offers_what_there_is() -> None:
    """config.py imports no torch, so it has the names again."""
    assert tuple(CODECS) == config.STORE_CODECS


@given(
    st.integers(0, 10**6),
    st.sampled_from(BITS),
    st.sampled_from(DTYPES),
    st.sampled_from(("plain", "outlier", "zeros", "tiny", "largest")),
)
def test_errors_stay_within_the_bound(seed: int, bits: int, dtype: torch.dtype, kind: str) -> None:
    """Of the largest element of each row. What is finite stays finite, zeros stay zeros."""
    codec, rows = quantized(bits), random_rows(seed, dtype, kind)
    parts = codec.encode(rows, -rows)
    codec.check(parts)
    for before, after in zip((rows, -rows), codec.decode(parts), strict=True):
        assert (after.shape, after.dtype) == (before.shape, dtype)
        largest = before.double().abs().amax(-1, keepdim=True)
        # scales have no smaller steps
        least = 2**bits * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        bound = codec.max_error(dtype) * largest * (1 + 1e-5) + least
        assert bool(((after.double() - before.double()).abs() <= bound).all())


@given(st.integers(0, 10**6), st.sampled_from(BITS), st.sampled_from(DTYPES), st.integers(-6, 6))
def test_what_is_representable_comes_back_bit_by_bit(
    seed: int, bits: int, dtype: torch.dtype, power: int
) -> None:
    """Whole numbers times a power of two, the largest among them."""
    most = 2 ** (bits - 1) - 1
    seeded = torch.Generator().manual_seed(seed)
    rows = torch.randint(-most, most + 1, (2, 3, 1, 8), generator=seeded)
    rows[..., seed % 8] = most
    rows = (rows * 2.0**power).to(dtype)
    found = quantized(bits).decode(quantized(bits).encode(rows, rows))
    assert all(torch.equal(each, rows) for each in found)


@given(st.integers(0, 10**6), st.sampled_from(BITS), st.sampled_from(DTYPES[:2]))
def test_fast_equals_slow(seed: int, bits: int, dtype: torch.dtype) -> None:
    """Bit by bit, packed and unpacked."""
    least = {2: 4, 4: 2, 6: 4, 8: 1}.get(bits, 8)
    keys = random_rows(seed, dtype, "plain")
    values = random_rows(seed + 1, dtype, "outlier")[..., :least]
    parts = quantized(bits).encode(keys, values)
    for data, scales, rows, decoded in zip(
        parts[:2], parts[2:], (keys, values), quantized(bits).decode(parts), strict=True
    ):
        assert all(map(torch.equal, (data, scales), naive_encode(rows, bits)))
        assert torch.equal(decoded, naive_decode(data, scales, bits))


@pytest.mark.parametrize("codec", [NONE, *map(quantized, BITS)], ids=lambda codec: codec.name)
def test_sizes_follow_from_parts_and_parts_from_sizes(codec: Codec) -> None:
    """The store, files and their checks know only one of the two."""
    keys, values = torch.randn(2, 5, 3, 16).half(), torch.randn(2, 5, 3, 8).half()
    parts = codec.encode(keys, values)
    sizes = codec.sizes(parts)
    assert sizes == Sizes(2, 5, 3, 16, 8, torch.float16)
    assert codec.shapes(sizes) == [(tuple(each.shape), each.dtype) for each in parts]
    assert codec.nbytes(sizes) == sum(each.nbytes for each in parts)
    assert all(each.is_contiguous() and each.shape[1] == 5 for each in parts)


def test_heads_of_no_whole_bytes_are_refused_before_there_is_kv() -> None:
    """66 elements are whole bytes in int4, 65 are not."""
    buffer = torch.zeros(5, 2, 66)
    for codec in CODECS.values():
        codec.check_heads(buffer, buffer)
    with pytest.raises(ValueError, match="heads of whole bytes in int4, got heads of 65"):
        CODECS["int4"].check_heads(buffer[..., :65], buffer)
    with pytest.raises(
        ValueError, match="values: expected heads of whole bytes in int5, got heads"
    ):
        quantized(5).encode(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 12))
    for kind, bits in ((AnyBits, 1), (AnyBits, 9), (Quantized, 5)):
        with pytest.raises(ValueError, match=f"got {bits}"):
            kind(bits)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_is_refused(bits: int, number: float) -> None:
    """It would make all of its row wrong, silently. `none` keeps it."""
    rows = torch.randn(2, 3, 1, 8)
    rows[1, 2, 0, 5] = number
    for kv in ((rows, torch.ones(2, 3, 1, 8)), (torch.ones(2, 3, 1, 8), rows)):
        with pytest.raises(ValueError, match="not finite"):
            quantized(bits).check(quantized(bits).encode(*kv))
    NONE.check(NONE.encode(rows, rows))


def test_parts_of_another_kind_are_refused() -> None:
    """Each would be decoded to something."""
    codec = Quantized(4)
    first, second, third, last = codec.encode(torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 8))
    for wrong in (
        [first, second, third],
        [first[0], second, third, last],
        [first.float(), second, third, last],
        [first, second, third[:, :2], last],
        [first, second, third, last.half()],
    ):
        with pytest.raises(ValueError, match="as int4 keeps them"):
            codec.check(wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("bits", BITS)
def test_gpu_equals_cpu_without_synchronising(bits: int) -> None:
    """Bit by bit: what a server with a GPU has written one without reads."""
    rows = random_rows(0, torch.bfloat16, "outlier")
    expected = quantized(bits).encode(rows, rows)
    on_gpu = rows.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = quantized(bits).encode(on_gpu, on_gpu)
        decoded = quantized(bits).decode(parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, (part.cpu() for part in parts), expected))
    assert torch.equal(decoded[0].cpu(), quantized(bits).decode(expected)[0])
