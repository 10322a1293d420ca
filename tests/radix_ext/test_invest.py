"""What a fused request's exact chain grows by, and in which order its chunks stand for that."""

from __future__ import annotations

import pytest

from radix_ext import AccessTable, Chunk, ChunkId, Growth, Span
from radix_ext.invest import exact_gaps


def table_of(*requests: str) -> AccessTable:
    table = AccessTable(window=100)
    for names in requests:
        table.observe(map(ChunkId, names))
    return table


def tail(names: str, table: AccessTable, num_chunks: int, threshold: int = 2) -> str:
    chunks = [Chunk(ChunkId(name), 4) for name in names]
    return "".join(chunk.id for chunk in Growth(num_chunks, threshold).tail(chunks, table))


@pytest.mark.parametrize(
    ("num_chunks", "expected"), [(0, "xyabc"), (1, "axybc"), (2, "abxyc"), (9, "abcxy")]
)
def test_tail_has_what_grows_then_what_is_new_then_what_is_moved(
    num_chunks: int, expected: str
) -> None:
    """Each part in retriever order. With no bound it is the tail `seen`."""
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
    ("num_chunks", "expected"), [(0, []), (1, [0]), (2, [0, 1]), (9, [0, 1, 2, 3])]
)
def test_as_many_as_may_be(num_chunks: int, expected: list[int]) -> None:
    """All could be moved."""
    assert gaps("abcd", num_chunks=num_chunks) == expected


def test_what_must_be_computed_costs_nothing() -> None:
    """b and c have no source; d would be a second one."""
    assert gaps("ad") == [0, 1, 2]
    assert gaps("cd", promoted_len=3) == [0, 1, 2]


def test_only_promoted_chains_grow() -> None:
    """b is below the threshold, so the chain ends there, whatever c is."""
    assert gaps("abcd", promoted_len=1, num_chunks=3) == [0]
    assert gaps("bcd", promoted_len=0) == [0]


def test_run_begins_after_the_exact_prefix_and_stays_in_the_plan() -> None:
    """The first chunk is cached, the last one is not whole."""
    assert gaps("abcd", start=2, num_chunks=2) == [1, 2]
    assert gaps("", limit=7) == [0, 1, 2]


def test_later_areas_do_not_grow() -> None:
    """Behind text that is no chunk nothing is found by others."""
    assert gaps("abcd", layout="ab.cd", num_chunks=4) == [0, 1]
