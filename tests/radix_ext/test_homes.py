"""Which rank has how much of a history."""

from array import array

import pytest

from radix_ext import Home, Turn, held_history

EPOCHS = (7, 8, 9)


def turn(home: Home | None, num_tokens: int = 10, tag: str = "") -> Turn:
    body = array("i", range(num_tokens - 1))
    return Turn(2, "", array("i", [0]), body, (), frozenset(), tag, home=home)


FUSED = [turn(Home(0, 7, 0)), turn(Home(1, 8, 10), tag="first")]


@pytest.mark.parametrize(
    ("turns", "recipe", "expected"),
    [
        (
            [turn(Home(0, 7, 0)), turn(Home(0, 7, 10)), turn(Home(2, 9, 20), 5), turn(None)],
            "",
            {0: 20, 2: 25},
        ),
        ([turn(Home(0, 6, 0)), turn(Home(1, 8, 10))], "", {1: 20}),
        ([turn(Home(0, 7, 10)), turn(Home(0, 7, 20))], "", {}),
        (FUSED, "", {0: 10}),
        (FUSED, "first", {0: 10, 1: 20}),
        (FUSED, "query", {0: 10}),
    ],
    ids=["up to its last turn", "flushed", "first turn left", "exact", "recipe", "another recipe"],
)
def test_ranks_have_what_they_computed_and_still_hold(
    turns: list[Turn], recipe: str, expected: dict[int, int]
) -> None:
    """Who serves a turn computes what it lacks of all before."""
    assert held_history(turns, EPOCHS, recipe=recipe) == expected
