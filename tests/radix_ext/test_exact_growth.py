"""What a fused request's exact chain grows by, and in which order its chunks stand for that."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from radix_ext import AccessTable, Chunk, ChunkId, Span
from radix_ext.exact_growth import exact_gaps, growing_tail, grown
from radix_ext.moved_plan import Estimate, Piece, ReusePlan


def table_of(*requests: str) -> AccessTable:
    table = AccessTable(window=100)
    for names in requests:
        table.observe(map(ChunkId, names))
    return table


def tail(names: str, table: AccessTable, threshold: float = 2) -> str:
    chunks = [Chunk(ChunkId(name), 4) for name in names]
    return "".join(chunk.id for chunk in growing_tail(chunks, table, threshold))


def test_tail_has_what_grows_then_what_is_new_then_what_is_moved() -> None:
    """Each part in retriever order."""
    assert tail("xabyc", table_of("abc", "c")) == "axybc"
    assert tail("xyz", table_of("abc")) == "xyz"
    assert tail("xabyc", table_of("abc", "c"), threshold=inf) == "xyabc"


def test_tail_grows_by_promoted_chunks() -> None:
    """At threshold 3 this access is the second of a and b and the third of c."""
    assert tail("abxc", table_of("abc", "c"), threshold=3) == "cxab"


def gaps(
    movable: str,
    *,
    layout: str = "abcd",
    start: int = 0,
    limit: int = 1000,
    promoted_len: int = 9,
) -> list[int]:
    """Of a prompt of two-token chunks; a dot is a token of text."""
    spans, position = list[Span](), 0
    for name in layout:
        if name != ".":
            spans.append(Span(position, position + 2, ChunkId(name)))
        position += 1 if name == "." else 2
    found = exact_gaps(
        spans,
        start=start,
        limit=limit,
        promoted_len=promoted_len,
        can_move=lambda chunk: chunk in movable,
    )
    return sorted(found)


@pytest.mark.parametrize(
    ("movable", "arguments", "expected"),
    [
        ("abcd", {}, [0]),
        ("ad", {}, [0, 1, 2]),  # b and c must be computed anyway; d would be a second one
        ("cd", {"promoted_len": 3}, [0, 1, 2]),
        ("abcd", {"promoted_len": 0}, []),  # only promoted chains grow
        ("bcd", {"promoted_len": 0}, [0]),
        ("abcd", {"start": 2}, [1]),  # the first chunk is cached
        ("", {"limit": 7}, [0, 1, 2]),  # the last one is not whole
        ("cd", {"layout": "ab.cd"}, [0, 1]),  # behind text nobody finds it
    ],
)
def test_chains_grow_by(movable: str, arguments: dict[str, Any], expected: list[int]) -> None:
    assert gaps(movable, **arguments) == expected


def planned(seconds: float, *, moves: bool = True) -> ReusePlan:
    """All takes ten to compute."""
    return ReusePlan((Piece(0, 1, 0, None),) * moves, estimate=Estimate(seconds, 10.0))


@pytest.mark.parametrize(
    ("moved", "other", "is_other"),
    [
        (planned(5.0), planned(5.4), True),
        (planned(5.0), planned(5.52), False),
        (planned(5.0), planned(4.0), True),  # it is taken off what a call takes
        (planned(9.5), planned(9.9, moves=False), True),  # all is computed, in 10
        (planned(5.0), planned(9.9, moves=False), False),
        (planned(9.9, moves=False), planned(9.0), True),  # the gap is too long without
        (planned(9.9, moves=False), planned(9.8, moves=False), False),  # it says why
        (planned(9.9, moves=False), ReusePlan(()), False),
        (ReusePlan((Piece(0, 1, 0, None),)), planned(1.0), False),  # nobody knows what it costs
    ],
)
def test_chain_grows_where_that_costs_little(
    moved: ReusePlan, other: ReusePlan, is_other: bool
) -> None:
    plans = {frozenset[int](): moved, frozenset([1]): other}
    assert grown(plans.__getitem__, lambda: frozenset([1])) is (other if is_other else moved)
    assert grown(plans.__getitem__, frozenset[int]) is moved
