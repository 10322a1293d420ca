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


FUSIONS = st.builds(FusionRequest, st.sampled_from(SELECTORS), st.floats(0, 1), st.text(max_size=9))


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.integers(0, 3),
    st.integers(0, 2**48),
    st.sets(st.integers(0, 5)),
    st.none() | FUSIONS,
)
def test_round_trip_of_every_field(
    lengths: list[int], start: int, seq: int, keep: set[int], fusion: FusionRequest | None
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
    # nested lists kill SGLang's server
    assert all(isinstance(value, str) for value in params.values())
    assert unpacked(json.loads(json.dumps(params))) == request


NOT_OURS: list[Any] = [
    *(None, {}, {"chunkcache_spans": [2, 5]}, "text", ["chunkcache_mark"], 5),
    *(packed(chunkcache_mark=mark) for mark in ("x", None, ["s"], "", "é", "\ud800")),
]


@pytest.mark.parametrize("params", NOT_OURS, ids=repr)
def test_request_without_the_mark_is_not_read(params: Any) -> None:
    """Whatever a client writes, of whatever type, is not ours and no error."""
    assert unpacked(params) is None


def test_empty_secret_trusts_nobody() -> None:
    """A server without secret must not take an empty mark for its own."""
    assert unpack(packed(chunkcache_mark=""), IDS, secret="") is None


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        *(([pair], "span") for pair in ((5, 2), (2, 2), (2, 21), (-2, 5))),
        ([(2, 5), (4, 9)], "span"),
        ([(2, 5)], "not those of the chunk"),
    ],
    ids=repr,
)
def test_bad_spans_are_refused(spans: list[tuple[int, int]], match: str) -> None:
    """With the right mark a bad span is a bug of ours. No claim about a chunk is believed: its KV
    would be found by everybody who sends that chunk."""
    wrong = tuple(Span(start, end, ChunkId("x")) for start, end in spans)
    with pytest.raises(ValueError, match=match):
        unpacked(packed(structs.replace(REQUEST, spans=wrong)))


BROKEN = [
    (lambda text: text.replace("[1,", "[2,", 1), "version 2"),
    (lambda text: text[3:-1], "array"),  # none
    (lambda text: text.replace('"namespace"', '"namespaces"'), "namespace"),
    (lambda text: text.replace('"promoted_len":1', '"promoted_len":"1"'), "promoted_len"),
    (lambda text: text.replace('"promoted_len":1', '"promoted_len":1,"more":1'), "more"),
    (lambda text: text.replace('"epoch":7', '"epoch":7.5'), "epoch"),
    (lambda text: text[:-2], "truncated"),
    (lambda text: "", "truncated"),
]


@pytest.mark.parametrize(("damage", "match"), BROKEN, ids=range(len(BROKEN)))
def test_damaged_message_is_refused(damage: Callable[[str], str], match: str) -> None:
    """Strict: another version, a missing, unknown or mistyped field; the error names it."""
    whole = packed()[SPANS_KEY]
    assert damage(whole) != whole
    with pytest.raises(ValueError, match=match):
        unpacked({**packed(), SPANS_KEY: damage(whole)})
    with pytest.raises(ValueError, match="truncated"):
        unpacked({MARK_KEY: SECRET})


@pytest.mark.parametrize(
    ("pairs", "expected"), [([], 0), ([(2, 5), (6, 9)], 1), ([(0, 1), (1, 2), (3, 4)], 2)]
)
def test_area_len_counts_spans_that_touch(pairs: list[tuple[int, int]], expected: int) -> None:
    """The first area ends where tokens come between."""
    assert make_request(*pairs).area_len == expected


def test_namespace_tells_heads_and_tenants_apart() -> None:
    """One global root per head and identity; shifting text between fields is no way around it, and
    SGLang shares no KV between an empty extra_key and none."""
    heads: list[list[int]] = [[1, 2], [1], []]
    names = [namespace_of(head, None, None, None) for head in heads]
    for tenant in ("a", None, None), (None, "a", None), (None, None, "a"), ("a", "b", None):
        names.append(namespace_of([1, 2], *tenant))
    names += [namespace_of([1, 2], key, None, None) for key in ("", "ab", "a\0001:b")]
    assert len(set(names)) == len(names)
