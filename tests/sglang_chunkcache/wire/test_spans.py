"""Spans on their way to the scheduler: round trip, trust, bad fields."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from radix_ext import ChunkId, FusionRequest, Span, chunk_id
from sglang_chunkcache.config import SELECTORS
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.spans import (
    MARK_KEY,
    SPANS_KEY,
    RequestSpans,
    namespace_of,
    pack,
    unpack,
)

IDS = array("q", range(100, 120))
SECRET = "s"


def make_spans(*pairs: tuple[int, int]) -> list[Span]:
    return [Span(start, end, chunk_id(IDS[start:end])) for start, end in pairs]


def make_request(*pairs: tuple[int, int], **fields: Any) -> RequestSpans:
    return RequestSpans(tuple(make_spans(*pairs)), "n", 1, Acknowledgement(7, 3), **fields)


REQUEST = make_request((2, 5), (5, 9))


def packed(request: RequestSpans = REQUEST, **fields: Any) -> dict[str, Any]:
    return {**pack(request, secret=SECRET), **fields}


def unpacked(params: Any) -> RequestSpans | None:
    return unpack(params, IDS, secret=SECRET)


def test_round_trip_gives_the_same_request() -> None:
    """What the front means is what the scheduler reads."""
    assert unpacked(packed()) == REQUEST


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.integers(0, 3),
    st.integers(0, 2**48),
    st.sets(st.integers(0, 5)),
    st.none()
    | st.builds(FusionRequest, st.sampled_from(SELECTORS), st.floats(0, 1), st.text(max_size=9)),
)
def test_round_trip_of_every_field(
    lengths: list[int],
    start: int,
    seq: int,
    keep: set[int],
    fusion: FusionRequest | None,
) -> None:
    """Through JSON once more, as a client's body is."""
    pairs = []
    for length in lengths:
        pairs.append((start, start + length))
        start += length
    request = make_request(
        *pairs, keep=frozenset(keep), fusion=fusion, is_preprocessing=True, is_later_turn=True
    )
    request = structs.replace(request, ack=Acknowledgement(2**48, seq))
    params = packed(request)
    assert all(isinstance(value, str) for value in params.values()), (
        "nested lists kill SGLang's server"
    )
    assert unpacked(json.loads(json.dumps(params))) == request


NOT_OURS: list[Any] = [
    None,
    {},
    {"chunkcache_spans": [2, 5]},
    packed(chunkcache_mark="x"),
    packed(chunkcache_mark=None),
    packed(chunkcache_mark=1),
    packed(chunkcache_mark=["s"]),
    packed(chunkcache_mark=""),
    packed(chunkcache_mark="é"),
    packed(chunkcache_mark="\ud800"),
    "text",
    ["chunkcache_mark"],
    5,
    True,
]


@pytest.mark.parametrize("params", NOT_OURS, ids=repr)
def test_request_without_the_mark_is_not_read(params: Any) -> None:
    """Whatever a client writes, of whatever type, is not ours and no error."""
    assert unpacked(params) is None


def test_empty_secret_trusts_nobody() -> None:
    """A server without secret must not take an empty mark for its own."""
    assert unpack(packed(chunkcache_mark=""), IDS, secret="") is None


@pytest.mark.parametrize(
    "spans", [((5, 2),), ((2, 2),), ((2, 5), (4, 9)), ((2, 21),), ((-2, 5),)], ids=repr
)
def test_bad_spans_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    """With the right mark a bad span is a bug of ours:
    an error that the caller counts, of the kind it catches."""
    request = structs.replace(
        REQUEST, spans=tuple(Span(start, end, ChunkId("x")) for start, end in spans)
    )
    with pytest.raises(ValueError, match="span"):
        unpacked(packed(request))


def test_span_of_another_chunk_than_its_tokens_is_refused() -> None:
    """No claim about a chunk is believed: its KV would be found by everybody who sends that
    chunk."""
    request = structs.replace(REQUEST, spans=(Span(2, 5, chunk_id([1, 2, 3])),))
    with pytest.raises(ValueError, match="not those of the chunk"):
        unpacked(packed(request))


BROKEN = [
    (lambda text: text.replace("[1,", "[2,", 1), "version 2"),
    (lambda text: text[3:-1], "array"),  # none
    (lambda text: text.replace('"namespace"', '"namespaces"'), "namespace"),
    (lambda text: text.replace('"promoted_len":1', '"promoted_len":"1"'), "promoted_len"),
    (lambda text: text.replace('"promoted_len":1', '"promoted_len":-1'), "promoted_len"),
    (lambda text: text.replace('"promoted_len":1', '"promoted_len":1,"more":1'), "more"),
    (lambda text: text.replace('"epoch":7', '"epoch":7.5'), "epoch"),
    (lambda text: text[:-2], "truncated"),
    (lambda text: "", "truncated"),
]


@pytest.mark.parametrize(("damage", "match"), BROKEN, ids=range(len(BROKEN)))
def test_damaged_message_is_refused(damage: Callable[[str], str], match: str) -> None:
    """Strict: another version, a missing, unknown or mistyped field; the error names it."""
    params = packed()
    whole = params[SPANS_KEY]
    assert damage(whole) != whole
    with pytest.raises(ValueError, match=match):
        unpacked({**params, SPANS_KEY: damage(whole)})


def test_message_left_out_is_refused() -> None:
    """The mark alone says nothing."""
    with pytest.raises(ValueError, match="truncated"):
        unpacked({MARK_KEY: SECRET})


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], 0),
        ([(2, 5)], 1),
        ([(2, 5), (5, 9)], 2),
        ([(2, 5), (6, 9)], 1),
        ([(0, 1), (1, 2), (3, 4)], 2),
    ],
)
def test_area_len_counts_spans_that_touch(pairs: list[tuple[int, int]], expected: int) -> None:
    """The first area ends where tokens come between."""
    assert (
        RequestSpans(tuple(make_spans(*pairs)), "n", 0, Acknowledgement(0, 0)).area_len == expected
    )


def test_namespace_tells_heads_and_tenants_apart() -> None:
    """One global root per head and identity; shifting text between fields is no way around it."""
    names = [
        namespace_of([1, 2], None, None, None),
        namespace_of([1], None, None, None),
        namespace_of([], None, None, None),
        namespace_of([1, 2], "a", None, None),
        namespace_of([1, 2], None, "a", None),
        namespace_of([1, 2], None, None, "a"),
        namespace_of([1, 2], "a", "b", None),
        namespace_of([1, 2], "ab", None, None),
        namespace_of([1, 2], "a\0001:b", None, None),
    ]
    assert len(set(names)) == len(names)


def test_namespace_tells_an_empty_name_from_none() -> None:
    """SGLang shares no KV between an empty extra_key and none."""
    assert namespace_of([1], "", None) != namespace_of([1], None, None)
