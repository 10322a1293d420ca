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
structs = pytest.importorskip("msgspec").structs

from sglang_chunkcache.storage import entry  # noqa: E402
from sglang_chunkcache.storage.codec import CODECS, Quantized  # noqa: E402
from sglang_chunkcache.storage.entry import (  # noqa: E402
    DTYPES,
    Entry,
    Layout,
    Refusal,
    RefusedEntryError,
)
from tests.kit.storages import LAYOUT, NUM_TOKENS, make_entry, same_bits  # noqa: E402


def written(entry_: Entry | None = None, name: str = "n", secret: bytes = b"") -> Any:
    return entry.write(entry_ or make_entry(), name, secret=secret)


def read(data: Any, *, layout: Layout = LAYOUT, secret: bytes = b"", num_tokens: int = 3) -> Entry:
    return entry.read(data, "n", layout=layout, num_tokens=num_tokens, secret=secret)


def reason(data: Any, **given: Any) -> Refusal:
    with pytest.raises(RefusedEntryError) as refused:
        read(data, **given)
    return refused.value.reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", [False, True])
def test_entry_comes_back_bit_for_bit(dtype: str, scored: bool) -> None:
    """A stored chunk is the source of others: each lost bit would be a rounding nobody counted."""
    layout = Layout(2, 1, 4, 2, dtype)
    made = make_entry(scored=scored, layout=layout)
    found = read(written(made, secret=b"s"), layout=layout, secret=b"s")
    assert len(found.tensors()) == len(made.tensors())
    assert all(map(same_bits, found.tensors(), made.tensors()))
    assert (found.masses, found.heads, found.layout) == (made.masses, made.heads, layout)
    # a view would keep the file in memory
    assert found.kv[0].untyped_storage().nbytes() == found.kv[0].nbytes


@pytest.mark.parametrize(
    "lacks", [{"received": None}, {"outward": None}, {"masses": None, "context": None}], ids=str
)
def test_entry_without_some_measurements_comes_back_without_them(lacks: dict[str, None]) -> None:
    part = replace(make_entry(), **lacks)  # type: ignore[arg-type]
    found = read(written(part))
    for name in ("context", "received", "outward"):
        assert (getattr(found, name) is None) == (getattr(part, name) is None)


@given(at=st.integers(0), bit=st.integers(0, 7), secret=st.sampled_from([b"", b"secret"]))
def test_every_flipped_bit_is_refused(at: int, bit: int, secret: bytes) -> None:
    """Wherever it is: header, checksum, KV."""
    data = written(secret=secret)
    data[at % len(data)] ^= 1 << bit
    reason(data, secret=secret)


@given(length=st.integers(0))
def test_every_truncation_is_refused(length: int) -> None:
    data = written()
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
    assert reason(change(written())) is expected


def with_byte(data: Any, at: int, value: int) -> Any:
    data[at] = value
    return data


OTHER_LAYOUTS: list[dict[str, Any]] = [
    *({"codec": "int8"}, {"dtype": "float16"}, {"num_layers": 1}),
    *({"num_kv_heads": 2}, {"key_dim": 2}, {"value_dim": 2}),
]


@pytest.mark.parametrize(
    ("data", "asked", "expected"),
    [
        *(({}, {"layout": structs.replace(LAYOUT, **f)}, Refusal.LAYOUT) for f in OTHER_LAYOUTS),
        ({}, {"num_tokens": 4}, Refusal.LAYOUT),
        ({"name": "other"}, {}, Refusal.OTHER_ENTRY),
        ({"secret": b"a"}, {"secret": b"b"}, Refusal.SECRET),
        ({}, {"secret": b"b"}, Refusal.SECRET),
        ({"secret": b"a"}, {}, Refusal.SECRET),
    ],
)
def test_what_was_written_for_another_is_refused(
    data: dict[str, Any], asked: dict[str, Any], expected: Refusal
) -> None:
    """It would be read as other numbers, or as another chunk's."""
    assert reason(written(**data), **asked) is expected


@pytest.mark.parametrize("codec", [Quantized(8), Quantized(4)], ids=lambda codec: codec.name)
def test_coded_entry_comes_back_as_it_was_coded(codec: Quantized) -> None:
    """And not where another codec, or none, is expected."""
    keys, values = torch.randn(2, NUM_TOKENS, 1, 8), torch.randn(2, NUM_TOKENS, 1, 16)
    made = Entry(codec.encode(keys, values), codec=codec)
    layout = Layout(2, 1, 8, 16, "float32", codec.name)
    assert (made.layout, made.num_tokens) == (layout, NUM_TOKENS)
    data = written(made)
    found = read(data, layout=layout)
    assert found.codec.name == codec.name
    assert all(map(torch.equal, found.kv, made.kv))
    assert len(data) <= NUM_TOKENS * layout.token_bytes + entry.OVERHEAD_BYTES
    for name in CODECS.keys() - {codec.name}:
        assert reason(data, layout=structs.replace(layout, codec=name)) is Refusal.LAYOUT


def test_entry_without_a_codec_has_the_bytes_it_always_had() -> None:
    """What older versions have written is found, and what this one writes they read."""
    assert b"codec" not in bytes(written())


def test_header_that_makes_no_sense_is_refused() -> None:
    """Without a secret anybody can make a checksum."""
    data = written()
    for at, value in ((60, 255), (64, 0)):  # the header's length, its first byte
        bad = data.clone()
        bad[at] = value
        view = entry._view(bad)
        view[28:60] = entry._checksum(view, b"")
        assert reason(bad) is Refusal.FORMAT
