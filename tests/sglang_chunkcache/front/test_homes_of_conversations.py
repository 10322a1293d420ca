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
from tests.sglang_chunkcache.front.front_bench import END, A, Asked, B, Bench, make_output, user
from tests.sglang_chunkcache.front.test_rank_mirror import read

LONG = "an answer of some length " * 20


def is_away(request: Asked) -> bool:
    """Whether its answer says that another rank has more of the history."""
    return "other_rank" in request.answer()["fallbacks"]


def begin_elsewhere(bench: Bench, rank: int, num_tokens: int) -> None:
    """Others keep the rank busy."""
    bench.books.router.begin(rank, num_tokens)


def converse(
    bench: Bench, num_turns: int, *first: Passage, to: str = "c"
) -> tuple[list[Asked], list[dict[str, str]]]:
    """The turns, each over a passage of its own, but for the first one;
    and the messages with a question yet to be asked."""
    messages, turns = [user("one")], []
    for n in range(num_turns):
        passages = (Passage(f"n{n}", f"passage {n} " * 5),) if n else first
        turns.append(bench.turn(messages, *passages, to=to, text=LONG))
        messages.append(user(f"and {n}?"))
    return turns, messages


@pytest.mark.parametrize("is_popular", [False, True])
@pytest.mark.parametrize("first", [(A, B), ()], ids=["chunks", "no chunks"])
def test_no_later_turn_goes_to_a_rank_without_the_history(
    first: tuple[Passage, ...], is_popular: bool
) -> None:
    """4 ranks, 10 turns; popular: every rank has the first turn's chunks."""
    bench = Bench(context_len=1_000_000, num_ranks=4)
    if is_popular:
        # at once: the load spreads them
        for asked in [bench.ask(f"q{i}", A, B) for i in range(12)]:
            bench.reply(asked)
        assert all(rank.held for rank in bench.ranks)
    turns, _ = converse(bench, 10, *first)
    assert len({turn.rank for turn in turns}) == 1
    assert "other_rank" not in bench.books.stats()["fallbacks"]


def stopped(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    request = bench.reply(
        bench.ask(messages, *passages, to="c"), LONG, content=LONG[:-1], matched=" "
    )
    messages.append({"role": "assistant", "content": LONG[:-1]})
    return request


def called(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    """A step that calls a tool; the next message is its result."""
    request = bench.reply(bench.ask(messages, *passages, to="c"), LONG, content=None)
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42"},
    ]
    return request


def left(bench: Bench, messages: list[Any], *passages: Passage) -> Asked:
    """The client goes away after the first token."""
    request = bench.ask(messages, *passages, to="c")
    entry = bench.ranks[request.rank].serve(request.custom_params, request.input_ids)
    bench.observe(request, make_output([65], 0, None, request.rank, entry))
    bench.end(request)
    messages.append({"role": "assistant", "content": "A"})
    return request


@pytest.mark.parametrize("is_one_turn", [False, True])
@pytest.mark.parametrize("end", [stopped, called, left])
def test_turns_that_end_otherwise_have_a_home_too(end: Any, is_one_turn: bool) -> None:
    """At a stop string, in a tool call, by an abort:
    their prompts are cached where they were served. So are a loop's steps."""
    bench = Bench(context_len=1_000_000, num_ranks=4)
    for asked in [bench.ask(f"q{i}", A, B) for i in range(12)]:
        bench.reply(asked)
    messages, ranks = [user("one")], []
    for number in range(10):
        ranks.append(end(bench, messages, *((A, B) if number == 0 or is_one_turn else ())).rank)
        if not is_one_turn or end is not called:
            messages.append(user(f"and {number}?"))
    assert len(set(ranks)) == 1


def test_a_turn_leaves_a_rank_that_is_over_the_bound_and_says_so() -> None:
    """And its next turn goes where the whole history is now."""
    bench = Bench(context_len=100_000, num_ranks=2)
    (*_, last), messages = converse(bench, 3)
    home = last.rank
    begin_elsewhere(bench, home, 100_000)
    away = bench.turn(messages, text=LONG)
    assert away.rank != home
    assert is_away(away)
    assert away.planned.fallbacks == ("other_rank",)  # explained alike
    bench.books.router.end(home, 100_000)
    messages.append(user("?"))
    back = bench.turn(messages)
    assert (back.rank, is_away(back)) == (away.rank, False)
    assert bench.books.stats()["fallbacks"]["other_rank"] == 1


def test_round_robin_says_that_it_leaves() -> None:
    bench = Bench(num_ranks=2, context_len=100_000, routing="round_robin")
    turns, _ = converse(bench, 3)
    assert [(turn.rank, is_away(turn)) for turn in turns] == [(0, False), (1, True), (0, True)]


def test_of_a_rank_that_was_flushed_nothing_is_expected() -> None:
    """Its conversations may go anywhere, and nobody says that it has a history."""
    bench = Bench(num_ranks=2, context_len=100_000)
    (*_, last), messages = converse(bench, 3)
    rank = bench.ranks[last.rank]
    rank.log.restart()
    rank.held.clear()
    read(rank.log, bench.books.mirrors[last.rank])
    begin_elsewhere(bench, last.rank, 1)
    moved = bench.ask(messages, to="c")
    assert (moved.rank, is_away(moved)) == (1 - last.rank, False)


def test_an_answer_of_the_time_before_a_flush_names_no_home() -> None:
    """The flush came while it was read: what it left is gone."""
    bench = Bench(num_ranks=2, context_len=100_000)
    messages = [user("one")]
    asked = bench.ask(messages, A, to="c")
    entry = bench.ranks[asked.rank].serve(asked.custom_params, asked.input_ids)
    bench.observe(asked, make_output([ord(END)], 0, "stop", asked.rank, entry))
    rank = bench.ranks[asked.rank]
    rank.log.restart()
    read(rank.log, bench.books.mirrors[asked.rank])
    bench.end(asked)
    bench.books.finish(asked, bench.books.closed(asked, "ok"))
    messages += [{"role": "assistant", "content": "ok"}, user("two")]
    begin_elsewhere(bench, asked.rank, 1)
    assert bench.ask(messages, to="c").rank != asked.rank


def test_who_serves_counts_not_who_was_meant() -> None:
    """SGLang may send a request elsewhere."""
    bench, messages = Bench(num_ranks=3, context_len=100_000), [user("one")]
    asked = bench.reply(bench.ask(list(messages), to="c"), by=2)
    assert asked.rank == 0
    messages += [{"role": "assistant", "content": "ok"}, user("two")]
    assert bench.ask(messages, to="c").rank == 2


def test_after_an_overflow_no_rank_has_what_is_left() -> None:
    """The turns that stay have other positions."""
    bench = Bench(num_ranks=2, context_len=2200)
    turns, messages = converse(bench, 3)
    assert {turn.rank for turn in turns} == {0}
    begin_elsewhere(bench, 0, 1)
    cut = bench.ask(messages, Passage("l", "long " * 80), to="c")
    assert cut.num_departed > 0
    assert (cut.rank, is_away(cut)) == (1, False)


def test_a_rank_that_answers_as_plain_text_is_no_home() -> None:
    """It read no spans, so its KV is found by no key of ours."""
    bench, messages = Bench(num_ranks=2, context_len=100_000), [user("one")]
    asked = bench.ask(list(messages), to="c")
    bench.observe(asked, make_output([ord(END)], 0, "stop", asked.rank, None))
    bench.end(asked)
    bench.books.finish(asked, bench.books.closed(asked, "ok"))
    messages += [{"role": "assistant", "content": "ok"}, user("two")]
    begin_elsewhere(bench, asked.rank, 1)
    assert bench.ask(messages, to="c").rank != asked.rank


@pytest.mark.parametrize("num_answers", [1, 2])
def test_64_conversations_on_4_ranks(num_answers: int) -> None:
    """10 turns, all of them asked before one is answered, in any order: at most 10% of the later
    turns leave their rank, and when all are under way the busiest rank has at most 1.25 times the
    mean of the tokens in flight."""
    rng = random.Random(num_answers)
    bench = Bench(context_len=1_000_000, num_ranks=4)
    assert isinstance(bench.books.router, KvAware)
    popular = [Passage(f"p{i}", f"popular {i} " * 20) for i in range(8)]
    chats: dict[str, list[dict[str, str]]] = {f"c{i}": [user(f"question {i}")] for i in range(64)}
    last: dict[str, int] = {}
    num_left = num_told = 0
    ratios = []
    for turn in range(10):
        asked = {}
        for name in rng.sample([*chats], 64):
            fresh = [
                Passage(f"{name}-{turn}-{i}", f"{name} {turn} {i} " * rng.randint(2, 30))
                for i in range(3)
            ]
            passages = fresh[: rng.randint(0, 3)] if turn else rng.sample(popular, 2)
            asked[name] = bench.ask(list(chats[name]), *passages, to=name, num_answers=num_answers)
        loads = bench.books.router.in_flight
        ratios.append(max(loads) * 4 / sum(loads))
        for name, request in asked.items():
            text = "x" * rng.randint(50, 500)
            bench.reply(request, text)
            num_left += turn > 0 and request.rank != last[name]
            num_told += is_away(request)
            last[name] = request.rank
            chats[name] += [{"role": "assistant", "content": text}, user(f"and {turn}?")]
    print(
        f"left their rank: {num_left} of {9 * 64}; busiest / mean of tokens in flight:"
        f" {max(ratios):.3f} at most"
    )
    assert num_left <= 0.1 * 9 * 64
    assert num_told == num_left
    assert max(ratios) <= 1.25
    assert bench.is_idle()


def test_conversations_that_begin_one_after_another_spread() -> None:
    """Nothing is in flight, nothing cached: each rank gets as many,
    although turns of the first one come between."""
    bench = Bench(context_len=100_000, num_ranks=4)
    homes = []
    _, messages = converse(bench, 1, to="first")
    for n in range(12):
        bench.turn(messages, to="first")
        messages.append(user("?"))
        homes.append(bench.turn([user(f"{n}")], to=f"c{n}").rank)
    assert [homes.count(rank) for rank in range(4)] == [0, 4, 4, 4]
