"""Which rank has how much of a history."""

from array import array

import pytest

from radix_ext import Home, Turn, held_history

EPOCHS = (7, 8, 9)


def turn(home: Home | None, num_tokens: int = 10, tag: str = "") -> Turn:
    body = array("i", range(num_tokens - 1))
    return Turn(2, "", array("i", [0]), body, (), frozenset(), tag, home=home)


def test_each_rank_has_the_history_up_to_its_last_turn() -> None:
    """Who serves a turn computes what it lacks of all before."""
    turns = [turn(Home(0, 7, 0)), turn(Home(0, 7, 10)), turn(Home(2, 9, 20), 5), turn(None)]
    assert held_history(turns, EPOCHS) == {0: 20, 2: 25}


def test_a_rank_that_was_flushed_has_nothing() -> None:
    """Its epoch is another one."""
    turns = [turn(Home(0, 6, 0)), turn(Home(1, 8, 10))]
    assert held_history(turns, EPOCHS) == {1: 20}


def test_a_turn_that_stands_elsewhere_is_of_no_use() -> None:
    """After an overflow the first turns are left out, and what follows has other positions."""
    turns = [turn(Home(0, 7, 0)), turn(Home(0, 7, 10)), turn(Home(0, 7, 20))]
    assert held_history(turns[1:], EPOCHS) == {}


@pytest.mark.parametrize(
    ("recipe", "expected"), [("", {0: 10}), ("first", {0: 10, 1: 20}), ("query", {0: 10})]
)
def test_fused_turns_are_found_by_their_recipe_alone(recipe: str, expected: dict[int, int]) -> None:
    """No exact request matches moved KV, nor does another recipe."""
    turns = [turn(Home(0, 7, 0)), turn(Home(1, 8, 10), tag="first")]
    assert held_history(turns, EPOCHS, recipe=recipe) == expected
