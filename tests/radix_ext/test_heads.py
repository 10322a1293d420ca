"""Where heads part, against a slow comparison token by token; what is kept, and how much of it."""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import Heads, Outline, Parting

NO_OUTLINE: Outline = ()
ids = st.lists(st.integers(0, 2), max_size=12)


def make_heads(*, max_heads: int = 4, max_tokens: int = 100, max_bytes: int = 1 << 20) -> Heads:
    return Heads(max_heads=max_heads, max_tokens=max_tokens, max_bytes=max_bytes)


def note(
    heads: Heads, name: str, head: Any, outline: Outline = NO_OUTLINE, *, tenant: str = "t"
) -> None:
    heads.note(tenant, name, array("i", head), outline)


def parting(
    heads: Heads, head: Any, *among: str, outline: Outline = NO_OUTLINE, tenant: str = "t"
) -> Parting | None:
    return heads.parting(tenant, "mine", array("i", head), outline, among=among)


def common_len(first: list[int], second: list[int]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


@given(mine=ids, others=st.lists(ids, min_size=1, max_size=4))
def test_token_is_that_of_the_nearest_head(mine: list[int], others: list[list[int]]) -> None:
    """The first that differs; of equal beginnings the shorter one's end."""
    heads = make_heads()
    for number, other in enumerate(others):
        note(heads, str(number), other)
    assert parting(heads, mine) == Parting(None, max(common_len(mine, other) for other in others))
    assert parting(heads, mine, "0") == Parting(None, common_len(mine, others[0]))


def test_own_name_and_other_tenants_are_no_other_head() -> None:
    heads = make_heads()
    note(heads, "mine", [1, 2])
    note(heads, "x", [1, 2, 3], tenant="another")
    assert parting(heads, [1, 2]) is None
    assert parting(heads, [1, 2], "x") is None


@pytest.mark.parametrize(
    ("mine", "theirs", "field"),
    [
        ([("a", 1), ("b", {"x": [1]})], [("a", 1), ("b", {"x": [1]})], None),
        ([("a", 1), ("b", {"x": [1]})], [("a", 1), ("b", {"x": [2]})], "b"),
        ([("a", None), ("b", 1)], [("a", 1), ("b", 2)], "a"),
        ([("a", 1)], [("a", 1), ("b", 2)], "b"),
        ([("a", 1), ("b", 2)], [("a", 1)], "b"),
        # of two endpoints: what one has none of the other does not name
        ([("a", None), ("b", {}), ("c", 1)], [("d", 1)], "c"),
        ([("a", None), ("b", {})], [("d", 1)], "d"),
        ([], [("a", None), ("b", {}), ("c", 1)], "c"),
        ([("a", [])], [], None),
    ],
)
def test_field_is_the_first_part_that_differs(
    mine: Outline, theirs: Outline, field: str | None
) -> None:
    heads = make_heads()
    note(heads, "x", [1], theirs)
    assert parting(heads, [1], outline=mine) == Parting(field, 1)


def test_long_heads_are_cut() -> None:
    """Where they part behind the cut is not known, and not said."""
    heads = make_heads(max_tokens=4)
    note(heads, "x", range(9))
    assert parting(heads, range(8)) == Parting(None, None)
    assert parting(heads, [0, 1, 2]) == Parting(None, 3)
    assert parting(heads, [0, 1, 2, 9, 9, 9]) == Parting(None, 3)


def test_least_recently_noted_heads_and_tenants_leave() -> None:
    """Whole tenants where bytes are short, but never the last one."""
    heads = make_heads(max_heads=2)
    for name, head in (("a", [1, 1, 1]), ("b", [1, 1]), ("a", [1, 1, 1]), ("c", [1])):
        note(heads, name, head)
    assert parting(heads, [1, 1, 1, 1]) == Parting(None, 3)
    # gone, so the nearest of the others
    assert parting(heads, [1, 1, 1, 1], "b") == Parting(None, 3)
    assert parting(heads, [1, 1, 1, 1], "c") == Parting(None, 1)
    small = make_heads(max_bytes=2100)
    for tenant in "tutv":
        note(small, "x", range(100), tenant=tenant)
    assert [parting(small, [0], tenant=tenant) is None for tenant in "tuv"] == [False, True, False]
    assert 800 < small.num_bytes <= 2100
    tiny = make_heads(max_bytes=1)
    note(tiny, "x", [1])
    assert (len(tiny), parting(tiny, [1])) == (1, Parting(None, 1))
