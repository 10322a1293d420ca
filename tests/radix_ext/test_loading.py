"""Which variants are worth loading, beside a slow reference that compares every two."""

from __future__ import annotations

from functools import cmp_to_key

from hypothesis import given
from hypothesis import strategies as st

from radix_ext.costs import EXPLORATION_PERIOD
from radix_ext.loading import WaitPolicy, worth_loading
from radix_ext.variants import Variant
from tests.reference.sources import ids


def make_variant(
    before: str, head: str = "h", *, preprocessed: bool = False, last_used: int = 0
) -> Variant:
    return Variant(ids(before), None, preprocessed=preprocessed, head=head, last_used=last_used)


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
    wait_policy = WaitPolicy(0.1)
    assert [wait_policy.seconds(load, 2.0) for load in (None, 0.0, 0.2, 0.21)] == [
        0.2,
        0.2,
        0.2,
        0.0,
    ]
    assert wait_policy.seconds(None, 0.0) == WaitPolicy(0.0).seconds(None, 2.0) == 0.0
    assert wait_policy.num_waits == 3


def test_after_a_wait_in_vain_few_wait() -> None:
    """Until one of those has its loads in time."""
    wait_policy = WaitPolicy(0.1)

    def num_waits(num_requests: int) -> int:
        return sum(wait_policy.seconds(0.01, 1.0) > 0 for _ in range(num_requests))

    assert num_waits(3) == 3
    wait_policy.ended(in_vain=True)
    assert num_waits(EXPLORATION_PERIOD - 1) == 0
    assert num_waits(1) == 1
    wait_policy.ended(in_vain=True)
    assert num_waits(EXPLORATION_PERIOD) == 1
    wait_policy.ended(in_vain=False)
    assert num_waits(3) == 3
    assert wait_policy.num_in_vain == 2
