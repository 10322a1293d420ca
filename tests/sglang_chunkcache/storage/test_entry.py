"""Stored bytes: what is written is read bit for bit, and everything else is refused by its
reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from sglang_chunkcache.storage import entry  # noqa: E402
from sglang_chunkcache.storage.codec import CODECS, Quantized  # noqa: E402
from sglang_chunkcache.storage.entry import (  # noqa: E402
    DTYPES,
    Entry,
    Layout,
    Masses,
    Refusal,
    RefusedEntryError,
)

LAYOUT = Layout(2, 1, 4, 4, "bfloat16")
NUM_TOKENS = 3


def make_entry(
    seed: int = 0, *, scored: bool = True, layout: Layout = LAYOUT, num_tokens: int = NUM_TOKENS
) -> Entry:
    """Random bits, so also numbers that are none."""
    made = torch.Generator().manual_seed(seed)

    def bits(dim: int) -> Any:
        kind = DTYPES[layout.dtype]
        shape = layout.num_layers, num_tokens, layout.num_kv_heads, dim * kind.itemsize
        return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8).view(kind)

    tokens = torch.rand(3, num_tokens, generator=made)
    if not scored:
        return Entry((bits(layout.key_dim), bits(layout.value_dim)))
    masses = Masses((0.1, 2.5), (4, 5), 1e-30, 0.3, 7)
    heads = ((0, 1), (1, 0))
    return Entry(
        (bits(layout.key_dim), bits(layout.value_dim)),
        masses,
        tokens[0],
        tokens[1],
        tokens[2],
        heads,
    )


def read(
    data: Any,
    name: str = "n",
    *,
    layout: Layout = LAYOUT,
    secret: bytes = b"",
    num_tokens: int = NUM_TOKENS,
) -> Entry:
    return entry.read(data, name, layout=layout, num_tokens=num_tokens, secret=secret)


def reason(data: Any, name: str = "n", **given: Any) -> Refusal:
    with pytest.raises(RefusedEntryError) as refused:
        read(data, name, **given)
    return refused.value.reason


def same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", [False, True])
def test_entry_comes_back_bit_for_bit(dtype: str, scored: bool) -> None:
    """A stored chunk is the source of others: each lost bit would be a rounding nobody counted."""
    layout = replace_layout(dtype=dtype, value_dim=2)
    written = make_entry(scored=scored, layout=layout)
    found = read(entry.write(written, "n", secret=b"s"), layout=layout, secret=b"s")
    assert len(found.tensors()) == len(written.tensors())
    assert all(map(same_bits, found.tensors(), written.tensors()))
    assert (found.masses, found.heads, found.layout) == (written.masses, written.heads, layout)
    assert found.kv[0].untyped_storage().nbytes() == found.kv[0].nbytes, (
        "a view keeps the file in memory"
    )


def replace_layout(**fields: Any) -> Layout:
    return Layout(
        **{name: fields.get(name, getattr(LAYOUT, name)) for name in LAYOUT.__struct_fields__}
    )


def test_entry_without_some_measurements_comes_back_without_them() -> None:
    """Each of them may be missing alone."""
    whole = make_entry()
    for part in (
        replace(whole, received=None),
        replace(whole, outward=None),
        replace(whole, masses=None, context=None),
    ):
        found = read(entry.write(part, "n", secret=b""))
        assert [each is None for each in (found.context, found.received, found.outward)] == [
            each is None for each in (part.context, part.received, part.outward)
        ]


@given(at=st.integers(0), bit=st.integers(0, 7), secret=st.sampled_from([b"", b"secret"]))
def test_every_flipped_bit_is_refused(at: int, bit: int, secret: bytes) -> None:
    """Wherever it is: header, checksum, KV."""
    data = entry.write(make_entry(), "n", secret=secret)
    data[at % len(data)] ^= 1 << bit
    reason(data, secret=secret)


@given(length=st.integers(0))
def test_every_truncation_is_refused(length: int) -> None:
    """A write that was cut off, and HiCache's `get`, which fills a smaller tensor without a
    word."""
    data = entry.write(make_entry(), "n", secret=b"")
    assert reason(data[: length % len(data)]) is Refusal.TRUNCATED


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: torch.cat([data, data[:1]]), Refusal.TRUNCATED),
        (lambda data: torch.zeros_like(data), Refusal.FORMAT),
        (lambda data: with_byte(data, 8, entry.VERSION + 1), Refusal.FORMAT),
        (lambda data: with_byte(data, len(data) - 1, 1 ^ int(data[-1])), Refusal.DAMAGED),
        (lambda data: with_byte(data, 28, 1 ^ int(data[28])), Refusal.DAMAGED),
    ],
)
def test_damage_is_told_by_its_kind(change: Callable[[Any], Any], expected: Refusal) -> None:
    """An operator tells a bad disk from an old format."""
    assert reason(change(entry.write(make_entry(), "n", secret=b""))) is expected


def with_byte(data: Any, at: int, value: int) -> Any:
    data[at] = value
    return data


def test_another_entry_under_the_name_is_refused() -> None:
    """Whole bytes of another chunk are another chunk's KV."""
    assert reason(entry.write(make_entry(), "other", secret=b"")) is Refusal.OTHER_ENTRY


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "int8"},
        {"dtype": "float16"},
        {"num_layers": 1},
        {"num_kv_heads": 2},
        {"key_dim": 2},
        {"value_dim": 2},
    ],
)
def test_another_layout_is_refused(fields: dict[str, Any]) -> None:
    """It would be read as other numbers."""
    assert (
        reason(entry.write(make_entry(), "n", secret=b""), layout=replace_layout(**fields))
        is Refusal.LAYOUT
    )


def test_coded_entry_comes_back_as_it_was_coded() -> None:
    """And not where another codec, or none, is expected:
    its bytes would be read as other numbers."""
    keys, values = torch.randn(2, NUM_TOKENS, 1, 8), torch.randn(2, NUM_TOKENS, 1, 16)
    for codec in (Quantized(8), Quantized(4)):
        written = Entry(codec.encode(keys, values), codec=codec)
        layout = Layout(2, 1, 8, 16, "float32", codec.name)
        assert (written.layout, written.num_tokens) == (layout, NUM_TOKENS)
        data = entry.write(written, "n", secret=b"")
        found = read(data, layout=layout)
        assert found.codec.name == codec.name
        assert all(map(torch.equal, found.kv, written.kv))
        assert len(data) <= NUM_TOKENS * layout.token_bytes + entry.OVERHEAD_BYTES
        for name in CODECS.keys() - {codec.name}:
            assert reason(data, layout=Layout(2, 1, 8, 16, "float32", name)) is Refusal.LAYOUT


def test_entry_without_a_codec_has_the_bytes_it_always_had() -> None:
    """What older versions have written is found, and what this one writes they read."""
    assert b"codec" not in bytes(entry.write(make_entry(), "n", secret=b""))


def test_another_number_of_tokens_is_refused() -> None:
    """It would be moved to slots of other tokens."""
    assert reason(entry.write(make_entry(), "n", secret=b""), num_tokens=4) is Refusal.LAYOUT


@pytest.mark.parametrize(("written", "asked"), [(b"a", b"b"), (b"", b"b"), (b"a", b"")])
def test_another_secret_is_refused(written: bytes, asked: bytes) -> None:
    """With a secret nobody else can make an entry, and none of an earlier secret is used."""
    assert reason(entry.write(make_entry(), "n", secret=written), secret=asked) is Refusal.SECRET


def test_header_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a secret anybody can make a checksum."""
    data = entry.write(make_entry(), "n", secret=b"")
    for at, value in ((60, 255), (64, 0)):  # the header's length, its first byte
        bad = data.clone()
        bad[at] = value
        view = entry._view(bad)
        view[28:60] = entry._checksum(view, b"")
        assert reason(bad) is Refusal.FORMAT
