"""Which variants are worth loading, beside a slow reference that compares every two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cmp_to_key

from hypothesis import given
from hypothesis import strategies as st

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


def never() -> None:
    """When loads have come that do not."""


def at(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def test_wait_is_a_share_of_computing() -> None:
    """A wait in vain costs that share of a first token at most."""
    waits = [WaitPolicy(0.1).seconds(load, 2.0, 0.0, never) for load in (None, 0.0, 0.2, 0.21)]
    assert waits == [0.2, 0.2, 0.2, 0.0]
    assert WaitPolicy(0.1).seconds(None, 0.0, 0.0, never) == 0.0
    assert WaitPolicy(0.0).seconds(None, 2.0, 0.0, never) == 0.0


def test_loads_are_as_late_as_those_before() -> None:
    """Who waits for them, too, is told so, until others come sooner."""
    policy = WaitPolicy(1.0)
    assert policy.seconds(0.1, 1.0, 0.0, at(2.1)) == 1.0
    policy.ended(in_vain=True)
    # two seconds late: only where they save as much
    assert policy.seconds(0.1, 2.0, 3.0, at(3.2)) == 0.0
    assert policy.seconds(0.1, 2.0, 4.0, at(4.0)) == 2.0
    assert (policy.num_waits, policy.num_in_vain) == (2, 1)


def test_nobody_waits_behind_what_is_overdue() -> None:
    """A storage that hangs has those wait who come before it is known; the first one's loads are
    asked for, however many have come since."""
    came: list[float] = []
    policy = WaitPolicy(1.0)
    assert policy.seconds(None, 1.0, 0.0, lambda: came[0] if came else None) == 1.0
    assert policy.seconds(None, 2.0, 0.5, never) == 2.0
    policy.ended(in_vain=True)
    assert [policy.seconds(0.1, 1e9, now, never) for now in (1.0, 2.0, 9.0)] == [0.0] * 3
    came.append(9.5)
    # more than eight seconds late, then a tenth of one early
    assert policy.seconds(0.1, 1.0, 10.0, at(10.0)) == 0.0
    assert policy.seconds(0.1, 1.0, 11.0, never) == 1.0


def test_first_loads_are_not_late_if_they_come_in_time() -> None:
    """Nobody had estimated them."""
    policy = WaitPolicy(1.0)
    assert policy.seconds(None, 3.0, 0.0, at(2.0)) == 3.0
    assert policy.seconds(2.0, 2.0, 5.0, never) == 2.0


def test_nothing_is_learnt_of_what_is_looked_up() -> None:
    """It brings loads that nobody had counted."""
    policy = WaitPolicy(1.0)
    assert policy.seconds(0.1, 1.0, 0.0, None) == 1.0
    assert policy.seconds(0.1, 1.0, 9.0, None) == 1.0
