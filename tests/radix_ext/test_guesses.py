"""What a guess may take, and when it was wanted."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from radix_ext.guesses import JUDGED, LIFE, WORTH, Guess, Guesses


def loaded(guesses: Guesses, guess: Guess, *chunks: str) -> None:
    for chunk in chunks:
        guesses.begin("t", 1, chunk)
        guesses.end(guess, "t", 1, chunk, has_come=True)


def test_tenant_has_a_limit_of_its_own() -> None:
    guesses = Guesses(10)
    assert guesses.has_room(Guess.HINT, "a", 10)
    guesses.begin("a", 6, "c")
    assert not guesses.has_room(Guess.HINT, "a", 5)
    assert guesses.has_room(Guess.HINT, "b", 10)
    assert guesses.num_bytes == 6
    guesses.end(Guess.HINT, "a", 6, "c", has_come=False)
    assert guesses.has_room(Guess.HINT, "a", 10)
    assert guesses.num_bytes == 0
    assert guesses.stats() == {"hint": {"loads": 0, "used": 0, "wasted": 0, "over": 1}}


def test_chunk_that_is_asked_for_while_it_comes_is_used() -> None:
    """Its request waits for it, and will not ask again."""
    guesses = Guesses(10)
    guesses.begin("t", 1, "c")
    guesses.asked("c")
    guesses.next_request()
    guesses.end(Guess.SEARCH, "t", 1, "c", has_come=True)
    assert guesses.stats()["search"] == {"loads": 1, "used": 1, "wasted": 0, "over": 0}


def test_chunk_is_used_once_and_wasted_after_its_life() -> None:
    guesses = Guesses(10)
    loaded(guesses, Guess.SEARCH, "used", "wasted")
    for _ in range(LIFE):
        guesses.asked("used")
        guesses.next_request()
    assert guesses.stats()["search"] == {"loads": 2, "used": 1, "wasted": 0, "over": 0}
    guesses.next_request()
    guesses.asked("wasted")
    assert guesses.stats()["search"] == {"loads": 2, "used": 1, "wasted": 1, "over": 0}


def test_kind_pays_while_enough_of_the_last_are_used() -> None:
    """Few say nothing, and kinds do not answer for each other."""
    guesses = Guesses(1000)
    for number in range(JUDGED // 4 - 1):
        loaded(guesses, Guess.NEXT_TURN, str(number))
    for _ in range(LIFE + 1):
        guesses.next_request()
    assert guesses.pays(Guess.NEXT_TURN)
    loaded(guesses, Guess.NEXT_TURN, "one more")
    for _ in range(LIFE + 1):
        guesses.next_request()
    assert not guesses.pays(Guess.NEXT_TURN)
    assert guesses.pays(Guess.SEARCH)
    for number in range(JUDGED):
        loaded(guesses, Guess.NEXT_TURN, str(number))
        if number < WORTH * JUDGED:
            guesses.asked(str(number))
    for _ in range(LIFE + 1):
        guesses.next_request()
    assert guesses.pays(Guess.NEXT_TURN)


STEPS = st.lists(st.tuples(st.sampled_from(["load", "ask", "next"]), st.integers(0, 3)), max_size=200)


@given(steps=STEPS)
def test_every_load_is_used_or_wasted_in_the_end(steps: list[tuple[str, int]]) -> None:
    """Once: a chunk that is loaded again before anybody asks is one guess."""
    guesses, is_open, found = Guesses(1000), set[int](), Counter[str]()
    for kind, chunk in steps:
        if kind == "load":
            loaded(guesses, Guess.HINT, str(chunk))
            is_open.add(chunk)
        elif kind == "ask":
            guesses.asked(str(chunk))
            found["used"] += chunk in is_open
            is_open.discard(chunk)
        else:
            guesses.next_request()
    found["wasted"] = len(is_open)
    for _ in range(LIFE + 1):
        guesses.next_request()
    told = guesses.stats().get("hint", {"used": 0, "wasted": 0})
    assert (told["used"], told["wasted"]) == (found["used"], found["wasted"])
