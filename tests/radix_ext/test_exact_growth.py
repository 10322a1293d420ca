"""What a fused request's exact chain grows by, and in which order its chunks stand for that."""

from __future__ import annotations

from typing import Any

import pytest

from radix_ext import AccessTable, Chunk, ChunkId, ExactGrowth, Span
from radix_ext.exact_growth import exact_gaps


def table_of(*requests: str) -> AccessTable:
    table = AccessTable(window=100)
    for names in requests:
        table.observe(map(ChunkId, names))
    return table


def tail(names: str, table: AccessTable, num_chunks: int, threshold: int = 2) -> str:
    chunks = [Chunk(ChunkId(name), 4) for name in names]
    return "".join(chunk.id for chunk in ExactGrowth(num_chunks, threshold).tail(chunks, table))


@pytest.mark.parametrize(
    ("num_chunks", "expected"), [(0, "xyabc"), (1, "axybc"), (2, "abxyc"), (9, "abcxy")]
)
def test_tail_has_what_grows_then_what_is_new_then_what_is_moved(
    num_chunks: int, expected: str
) -> None:
    """Each part in retriever order. With no bound it is the tail of an exact request."""
    assert tail("xabyc", table_of("abc", "c"), num_chunks) == expected


def test_tail_grows_by_promoted_chunks() -> None:
    """At threshold 3 this access is the second of a and b and the third of c."""
    assert tail("abxc", table_of("abc", "c"), 1, threshold=3) == "cxab"


def gaps(
    movable: str,
    *,
    layout: str = "abcd",
    start: int = 0,
    limit: int = 1000,
    promoted_len: int = 9,
    num_chunks: int = 1,
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
        num_chunks=num_chunks,
        can_move=lambda chunk: chunk in movable,
    )
    return sorted(found)


@pytest.mark.parametrize(
    ("movable", "arguments", "expected"),
    [
        *(("abcd", {"num_chunks": num}, [*range(min(num, 4))]) for num in (0, 1, 2, 9)),
        ("ad", {}, [0, 1, 2]),  # b and c must be computed anyway; d would be a second one
        ("cd", {"promoted_len": 3}, [0, 1, 2]),
        ("abcd", {"promoted_len": 1, "num_chunks": 3}, [0]),  # only promoted chains grow
        ("bcd", {"promoted_len": 0}, [0]),
        ("abcd", {"start": 2, "num_chunks": 2}, [1, 2]),  # the first chunk is cached
        ("", {"limit": 7}, [0, 1, 2]),  # the last one is not whole
        ("abcd", {"layout": "ab.cd", "num_chunks": 4}, [0, 1]),  # behind text nobody finds it
    ],
)
def test_chains_grow_by(movable: str, arguments: dict[str, Any], expected: list[int]) -> None:
    assert gaps(movable, **arguments) == expected
