"""Spans on their way to the scheduler: round trip, trust, bad fields."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import Span, chunk_id
from sglang_chunkcache.wire.spans import Acknowledgement, RequestSpans, namespace_of, pack, unpack

IDS = array("q", range(100, 120))
SECRET = "s"


def make_spans(*pairs: tuple[int, int]) -> list[Span]:
    return [Span(start, end, chunk_id(IDS[start:end])) for start, end in pairs]


def packed(**fields: Any) -> dict[str, Any]:
    spans = make_spans((2, 5), (5, 9))
    return {**pack(spans, namespace="n", promoted_len=1, ack=Acknowledgement(7, 3), secret=SECRET), **fields}


def unpacked(params: Any) -> RequestSpans | None:
    return unpack(params, IDS, prompt_len=len(IDS), secret=SECRET)


def test_round_trip_gives_the_same_spans() -> None:
    """What the front means is what the scheduler reads, ids recomputed."""
    got = unpacked(packed())
    assert got == RequestSpans(tuple(make_spans((2, 5), (5, 9))), "n", 1, Acknowledgement(7, 3))


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 3), st.integers(0, 2**48), st.integers(0, 2**40))
def test_round_trip_survives_json(lengths: list[int], start: int, epoch: int, seq: int) -> None:
    """Flat JSON all the way: nested lists kill the server under SGLANG_USE_PICKLE_IPC=0."""
    pairs = []
    for length in lengths:
        pairs.append((start, start + length))
        start += length
    spans, ack = make_spans(*pairs), Acknowledgement(epoch, seq)
    params = pack(spans, namespace="n", promoted_len=0, ack=ack, secret=SECRET)
    assert all(
        isinstance(value, str | int) or all(isinstance(item, int) for item in value) for value in params.values()
    )
    got = unpacked(json.loads(json.dumps(params)))
    assert got is not None
    assert (list(got.spans), got.ack) == (spans, ack)


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
    assert unpack(packed(chunkcache_mark=""), IDS, prompt_len=20, secret="") is None


@pytest.mark.parametrize(
    "spans",
    [[2], [5, 2], [2, 2], [2, 5, 4, 9], [2, 21], [-2, 5], None, 7, "25", ["2", "5"], [2.5, 5], [[2, 5]], [None, None]],
    ids=repr,
)
def test_bad_spans_are_refused(spans: Any) -> None:
    """With the right mark a bad field is a bug of ours: an error that the caller counts, of a kind it catches."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        unpacked(packed(chunkcache_spans=spans))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunkcache_promoted", "x"),
        ("chunkcache_promoted", None),
        ("chunkcache_promoted", float("inf")),
        ("chunkcache_ack", []),
        ("chunkcache_ack", [1]),
        ("chunkcache_ack", [1, 2, 3]),
        ("chunkcache_ack", None),
        ("chunkcache_ack", ["a", "b"]),
        ("chunkcache_ack", [float("inf"), 0]),
    ],
    ids=repr,
)
def test_bad_field_is_refused(field: str, value: Any) -> None:
    """As above, for the other fields."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        unpacked(packed(**{field: value}))


@pytest.mark.parametrize("field", ["chunkcache_spans", "chunkcache_namespace", "chunkcache_promoted", "chunkcache_ack"])
def test_missing_field_is_refused(field: str) -> None:
    """As above, for a field left out."""
    params = packed()
    del params[field]
    with pytest.raises((KeyError, ValueError)):
        unpacked(params)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [([], 0), ([(2, 5)], 1), ([(2, 5), (5, 9)], 2), ([(2, 5), (6, 9)], 1), ([(0, 1), (1, 2), (3, 4)], 2)],
)
def test_area_len_counts_spans_that_touch(pairs: list[tuple[int, int]], expected: int) -> None:
    """The first area ends where tokens come between."""
    assert RequestSpans(tuple(make_spans(*pairs)), "n", 0, Acknowledgement(0, 0)).area_len == expected


@pytest.mark.parametrize(
    ("promoted_len", "end", "expected"), [(0, 20, 2), (1, 20, 5), (2, 20, 20), (1, 3, 3), (0, 1, 1)]
)
def test_promoted_end_cuts_behind_the_promoted_run(promoted_len: int, end: int, expected: int) -> None:
    """`admission=promoted` inserts nothing from the first unpromoted chunk on."""
    spans = RequestSpans(tuple(make_spans((2, 5), (5, 9))), "n", promoted_len, Acknowledgement(0, 0))
    assert spans.promoted_end(end) == expected


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


def test_namespace_of_empty_and_missing_identity_is_one() -> None:
    """SGLang treats an empty cache_salt as none."""
    assert namespace_of([1], "", "") == namespace_of([1], None, None)
