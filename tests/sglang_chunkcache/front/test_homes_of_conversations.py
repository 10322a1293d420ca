"""A conversation's next turn goes to the rank that has its history: real planner, router and books
over several ranks.

.venv/bin/python -m pytest -n 0 -s tests/sglang_chunkcache/front/test_homes_of_conversations.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from radix_ext import KvAware
from sglang_chunkcache.front.request import Passage
from tests.kit.front_bench import END, A, Asked, B, Bench, make_output, user
from tests.kit.front_planning import CALL, RESULT, Talk, assistant, read

LONG = "an answer of some length " * 20


def is_away(request: Asked) -> bool:
    """Whether its answer says that another rank has more of the history."""
    return "other_rank" in request.answer()["fallbacks"]


def make_bench(num_ranks: int = 2, **knobs: Any) -> Bench:
    return Bench(**{"num_ranks": num_ranks, "context_len": 1_000_000, **knobs})


def make_popular(bench: Bench) -> None:
    """Every rank has two chunks: the load of requests that come at once spreads them."""
    for asked in [bench.ask(f"q{i}", A, B) for i in range(12)]:
        bench.reply(asked)
    assert all(rank.held for rank in bench.ranks)


def keep_busy(bench: Bench, rank: int, num_tokens: int = 1) -> None:
    """By others."""
    bench.bookkeeper.router.begin(rank, num_tokens)


def flush(bench: Bench, rank: int) -> None:
    bench.ranks[rank].log.restart()
    bench.ranks[rank].held.clear()
    read(bench.ranks[rank].log, bench.bookkeeper.mirrors[rank])


def converse(talk: Talk, num_turns: int, *first: Passage) -> list[Asked]:
    """The turns, each over a passage of its own, but for the first one."""
    passages = [first, *((Passage(f"n{n}", f"passage {n} " * 5),) for n in range(1, num_turns))]
    return [talk.turn(f"and {n}?", *each, answer=LONG) for n, each in enumerate(passages)]


@pytest.mark.parametrize("is_popular", [False, True])
@pytest.mark.parametrize("first", [(A, B), ()], ids=["chunks", "no chunks"])
def test_no_later_turn_goes_to_a_rank_without_the_history(first: Any, is_popular: bool) -> None:
    """Though, if popular, every rank has the first turn's chunks."""
    bench = make_bench(4)
    if is_popular:
        make_popular(bench)
    turns = converse(Talk(bench), 10, *first)
    assert len({turn.rank for turn in turns}) == 1
    assert "other_rank" not in bench.bookkeeper.stats()["fallbacks"]


def stopped(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    request = bench.ask(messages, *passages, to="c")
    messages.append(assistant(LONG[:-1]))
    return bench.reply(request, LONG, content=LONG[:-1], matched=" ")


def called(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    """A step that calls a tool; the next message is its result."""
    request = bench.reply(bench.ask(messages, *passages, to="c"), LONG, content=None)
    messages += [CALL, RESULT]
    return request


def left(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    """The client goes away after the first token."""
    request = bench.ask(messages, *passages, to="c")
    entry = bench.ranks[request.rank].serve(request.custom_params, request.input_ids)
    bench.observe(request, make_output([65], 0, None, request.rank, entry))
    bench.end(request)
    messages.append(assistant("A"))
    return request


@pytest.mark.parametrize("is_one_turn", [False, True])
@pytest.mark.parametrize("end", [stopped, called, left])
def test_turns_that_end_otherwise_have_a_home_too(end: Any, is_one_turn: bool) -> None:
    """Their prompts are cached where they were served. So are a loop's steps."""
    bench = make_bench(4)
    make_popular(bench)
    messages, ranks = [user("one")], []
    for number in range(10):
        ranks.append(end(bench, messages, *((A, B) if number == 0 or is_one_turn else ())).rank)
        if not is_one_turn or end is not called:
            messages.append(user(f"and {number}?"))
    assert len(set(ranks)) == 1


def test_a_turn_leaves_a_rank_that_is_over_the_bound_and_says_so() -> None:
    """And its next turn goes where the whole history is now."""
    talk = Talk(make_bench())
    home = converse(talk, 3)[-1].rank
    keep_busy(talk.bench, home, 100_000)
    away = talk.turn("?", answer=LONG)
    assert away.rank != home
    assert is_away(away)
    assert away.planned.fallbacks == ("other_rank",)  # explained alike
    talk.bench.bookkeeper.router.end(home, 100_000)
    back = talk.turn("?")
    assert (back.rank, is_away(back)) == (away.rank, False)
    assert talk.bench.bookkeeper.stats()["fallbacks"]["other_rank"] == 1


@pytest.mark.parametrize("is_plain", [False, True])
def test_answer_that_left_nothing_names_no_home(is_plain: bool) -> None:
    bench = make_bench()
    asked = bench.ask("one", A, to="c")
    entry = bench.ranks[asked.rank].serve(asked.custom_params, asked.input_ids)
    output = make_output([ord(END)], 0, "stop", asked.rank, None if is_plain else entry)
    bench.observe(asked, output)
    if not is_plain:
        flush(bench, asked.rank)
    bench.end(asked)
    bench.bookkeeper.conversations.finish(asked, asked.closed_turn("ok"))
    keep_busy(bench, asked.rank)
    assert Talk(bench, user("one"), assistant("ok")).ask("two").rank != asked.rank


def test_after_an_overflow_no_rank_has_what_is_left() -> None:
    """The turns that stay have other positions."""
    talk = Talk(make_bench(context_len=2200))
    assert {turn.rank for turn in converse(talk, 3)} == {0}
    keep_busy(talk.bench, 0)
    cut = talk.ask("?", Passage("l", "long " * 80))
    assert cut.num_departed > 0
    assert (cut.rank, is_away(cut)) == (1, False)


@pytest.mark.parametrize("num_answers", [1, 2])
def test_64_conversations_on_4_ranks(num_answers: int) -> None:
    """10 turns, all of them asked before one is answered, in any order: at most 10% of the later
    turns leave their rank, and when all are under way the busiest rank has at most 1.25 times the
    mean of the tokens in flight."""
    rng = random.Random(num_answers)
    bench = make_bench(4)
    assert isinstance(bench.bookkeeper.router, KvAware)
    popular = [Passage(f"p{i}", f"popular {i} " * 20) for i in range(8)]
    talks = [Talk(bench, to=f"c{i}") for i in range(64)]
    last: dict[Talk, int] = {}
    num_left = num_told = 0
    ratios = []
    for turn in range(10):
        asked = {}
        for talk in rng.sample(talks, 64):
            fresh = [
                Passage(f"{talk.to}-{turn}-{i}", f"{talk.to} {turn} {i} " * rng.randint(2, 30))
                for i in range(3)
            ]
            passages = fresh[: rng.randint(0, 3)] if turn else rng.sample(popular, 2)
            asked[talk] = talk.ask(f"and {turn}, {talk.to}?", *passages, num_answers=num_answers)
        loads = bench.bookkeeper.router.in_flight
        ratios.append(max(loads) * 4 / sum(loads))
        for talk, request in asked.items():
            text = "x" * rng.randint(50, 500)
            bench.reply(request, text)
            num_left += turn > 0 and request.rank != last[talk]
            num_told += is_away(request)
            last[talk] = request.rank
            talk.messages += [user(f"and {turn}, {talk.to}?"), assistant(text)]
    print(f"left their rank: {num_left} of {9 * 64}; busiest / mean load: {max(ratios):.3f}")
    assert num_left <= 0.1 * 9 * 64
    assert num_told == num_left
    assert max(ratios) <= 1.25
    assert bench.is_idle()


def test_conversations_that_begin_one_after_another_spread() -> None:
    bench = make_bench(4)
    first, homes = Talk(bench, to="first"), []
    converse(first, 1)
    for n in range(12):
        first.turn("?")
        homes.append(Talk(bench, to=f"c{n}").turn(f"{n}").rank)
    assert [homes.count(rank) for rank in range(4)] == [0, 4, 4, 4]
