"""The rule by which nodes leave."""

from math import log2
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import Aging, eviction

STEPS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9)), max_size=30)


@given(STEPS, st.integers(0, 3))
def test_age_is_that_at_the_last_access(steps: list[tuple[int, float]], hits: int) -> None:
    """Against every age there was: a request's own evictions do not make what it uses younger."""
    aging, now, age = Aging(0.5), 0, 0.0
    ages = [0.0]
    for waited, priority in steps:
        ages += [age] * waited
        now += waited
        aging.evicted(priority, now)
        age = max(age, priority)
    found = [aging.priority(hits=hits, last_access=number) for number in range(now + 2)]
    assert found == [each + 0.5 + log2(1 + hits) for each in [*ages, age]]


def test_ages_of_long_ago_are_forgotten() -> None:
    """A server that runs for a year keeps as many as one that runs for a day; what was used before
    them is as old as the first of them, and so leaves before all that was used since."""
    with patch.object(eviction, "_MAX_AGES", 4):
        aging = Aging(1)
        aging.evicted(1, 0)
        aging.evicted(2, 6)
        assert aging.priority(hits=0, last_access=2) == 1 + 1
        aging = Aging(1)
        for now in (*range(100), 200, 201):
            aging.evicted(now, now)
            assert len(aging._ages) <= 8
        assert aging.priority(hits=0, last_access=0) == aging.priority(hits=0, last_access=198)
        assert aging.priority(hits=0, last_access=201) == 1 + 200


def test_what_was_popular_leaves_after_some_turnovers() -> None:
    """By evictions, however many requests that takes: ten doublings of hits are gone after ten
    times as many newcomers as there is room for besides."""
    aging = Aging(0.5)
    popular = aging.priority(hits=15, last_access=0)
    newcomers = 0
    while aging.priority(hits=0, last_access=newcomers) < popular:
        aging.evicted(aging.priority(hits=0, last_access=newcomers), newcomers)
        newcomers += 1
    assert newcomers == 4 / 0.5


def test_newcomers_that_are_turned_away_age_what_is_kept() -> None:
    """Else what was popular once stays for good in a tier that admits little."""
    aging = Aging(0.5)
    popular, turned_away = aging.now(15), 0
    while aging.now(0) < popular:
        aging.turned_away(0.01)
        turned_away += 1
    assert turned_away == pytest.approx(4 / 0.5 * 25, abs=1)
