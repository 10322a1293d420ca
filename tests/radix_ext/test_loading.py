"""Which variants are worth loading, beside a slow reference that compares every two."""

from __future__ import annotations

from functools import cmp_to_key

from hypothesis import given
from hypothesis import strategies as st

from radix_ext.costs import TRIED_EVERY
from radix_ext.loading import Patience, worth_loading
from radix_ext.variants import Variant
from tests.reference.sources import ids


def make_variant(
    before: str, head: str = "h", *, preprocessed: bool = False, last_used: int = 0
) -> Variant:
    return Variant(ids(before), None, preprocessed=preprocessed, head=head, last_used=last_used)


def chosen(
    variants: list[Variant], before: str = "abc", *, num: int = 9, alone: bool = False
) -> list[str]:
    found = worth_loading(variants, ids(before), "h", max_variants=num, alone=alone)
    return [
        "".join(variant.prefix) + ("" if variant.head == "h" else f"@{variant.head}")
        for variant in found
    ]


def test_what_has_seen_most_of_the_chunks_before_it_comes_first() -> None:
    """Then what has seen least else. The rest stays on the disk."""
    variants = [make_variant(before) for before in ("", "xyz", "a", "axb", "ab", "cab")]
    assert chosen(variants) == ["cab", "ab", "axb", "a", "", "xyz"]
    assert chosen(variants, num=2) == ["cab", "ab"]


def test_preprocessed_variant_comes_first() -> None:
    """FusionRAG wants it used."""
    assert chosen([make_variant("abc"), make_variant("x", preprocessed=True)]) == ["x", "abc"]


def test_other_heads_are_for_want_of_ones_own() -> None:
    """As a plan takes them."""
    assert chosen([make_variant("abc", "g"), make_variant("x")]) == ["x"]
    assert chosen([make_variant("abc", "g")]) == ["abc@g"]


def test_plain_kv_has_seen_nothing() -> None:
    """No chunk, no other head, no neighbours."""
    variants = [make_variant("a"), make_variant("", "g"), make_variant("", preprocessed=True)]
    assert chosen(variants, alone=True) == []
    assert chosen([*variants, make_variant("")], alone=True) == [""]


VARIANTS = st.lists(
    st.builds(
        make_variant,
        st.lists(st.sampled_from("abcd"), unique=True, max_size=4).map("".join),
        st.sampled_from("hg"),
        preprocessed=st.booleans(),
    ),
    max_size=6,
)


@given(
    variants=VARIANTS,
    before=st.sets(st.sampled_from("abcd")),
    alone=st.booleans(),
    num=st.integers(0, 4),
)
def test_order_is_that_of_comparing_every_two(
    variants: list[Variant], before: set[str], alone: bool, num: int
) -> None:
    """Rule by rule."""
    for last_used, variant in enumerate(variants):
        variant.last_used = last_used
    known = set(ids("".join(before)))

    def compare(one: Variant, other: Variant) -> int:
        if one.preprocessed != other.preprocessed:
            return -1 if one.preprocessed else 1
        seen = [len(known & set(each.prefix)) for each in (one, other)]
        if seen[0] != seen[1]:
            return -1 if seen[0] > seen[1] else 1
        if len(one.prefix) != len(other.prefix):
            return -1 if len(one.prefix) < len(other.prefix) else 1
        return -1 if one.last_used > other.last_used else 1

    allowed = [each for each in variants if each.head == "h"]
    if alone:
        allowed = [each for each in allowed if each.prefix == () and not each.preprocessed]
    elif not allowed:
        allowed = variants
    expected = sorted(allowed, key=cmp_to_key(compare))[:num]
    assert worth_loading(variants, known, "h", max_variants=num, alone=alone) == expected


def test_wait_is_a_share_of_computing() -> None:
    """Only where the load is estimated to be there by then. What was never tried is tried."""
    patience = Patience(0.1)
    assert [patience.seconds(load, 2.0) for load in (None, 0.0, 0.2, 0.21)] == [0.2, 0.2, 0.2, 0.0]
    assert patience.seconds(None, 0.0) == Patience(0.0).seconds(None, 2.0) == 0.0
    assert patience.num_waits == 3


def test_after_a_wait_in_vain_few_wait() -> None:
    """Until one of those has its loads in time."""
    patience = Patience(0.1)

    def num_waits(num_requests: int) -> int:
        return sum(patience.seconds(0.01, 1.0) > 0 for _ in range(num_requests))

    assert num_waits(3) == 3
    patience.ended(in_vain=True)
    assert num_waits(TRIED_EVERY - 1) == 0
    assert num_waits(1) == 1
    patience.ended(in_vain=True)
    assert num_waits(TRIED_EVERY) == 1
    patience.ended(in_vain=False)
    assert num_waits(3) == 3
    assert patience.num_in_vain == 2
