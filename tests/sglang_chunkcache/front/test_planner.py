"""What is sent to which rank: order, limits, conversations, overflow, routing, parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from radix_ext import Tier
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.request import Identity, Passage
from tests.kit.front_bench import END, A, Asked, B, Bench, C, D, sent, text_of, told, user
from tests.kit.front_planning import CALL, RESULT, Talk, assistant, system

OTHERS = [
    Identity("me", cache_salt="x"),
    Identity("me", extra_key="x"),
    Identity("me", lora="x"),
]


def begins_with(request: Asked, earlier: Asked) -> bool:
    """Token for token, with its answer and its end token."""
    before = sent(earlier)
    return bool(request.input_ids[: len(before)] == before)


# One request


def test_prompt_is_head_chunks_question() -> None:
    """A cold cache: the retriever's order, one span per chunk, separator included."""
    request = Bench().ask("why?", A, B)
    text = text_of(request)
    assert text == f"\x02\x01u{A.text};{B.text};why?{END}\x01a"
    assert request.order == ["a", "b"]
    assert [text[span.start : span.end] for span in request.spans] == [A.text + ";", B.text + ";"]


@pytest.mark.parametrize(
    ("knobs", "first", "second", "order", "num_planned"),
    [
        ({}, [A, B, C], [C, D, B, A], "abcd", 3),
        ({"order": "retriever"}, [A, B], [B, A], "ba", 0),
        ({}, [A, C], [D, C], "cd", 0),  # its own chunks do not count as seen
    ],
)
def test_order_follows_what_is_cached(
    knobs: Any, first: list[Passage], second: list[Passage], order: str, num_planned: int
) -> None:
    bench = Bench(**knobs)
    bench.reply(bench.ask("one", *first))
    request = bench.ask("two", *second)
    assert (request.order, request.planned_len) == (list(order), num_planned)


def test_a_request_under_way_is_planned_on() -> None:
    """Two at once: the second takes the first one's order, and forgets it if that one fails."""
    bench = Bench()
    first, second = bench.ask("one", A, B), bench.ask("two", B, A)
    assert second.order == ["a", "b"]
    bench.end(first)
    bench.end(second)
    assert bench.ask("three", B, A).order == ["b", "a"]


def test_repeated_text_is_sent_once() -> None:
    """Identity is the text: the second label is reported, not sent. A label is only shown back."""
    bench = Bench()
    request = bench.ask("q", A, B, Passage("again", A.text), Passage("a", "other"))
    assert (request.order, request.repeated) == (["a", "b", "a"], ("again",))
    assert bench.bookkeeper.metrics.totals()["chunks"]["repeated"] == 1


@pytest.mark.parametrize("text", ["", " ", "\n\n"], ids=repr)
def test_empty_chunk_is_dropped_and_told(text: str) -> None:
    """Retrievers return such; the rest of the request is answered."""
    bench = Bench()
    asked = bench.ask("q", Passage("e", text), A)
    of_parts = bench.parts([[Passage("e", text), A], "m", [Passage("f", text)]])
    assert (asked.order, asked.empty) == (["a"], ("e",))
    assert (of_parts.order, of_parts.empty) == (["a"], ("e", "f"))
    assert bench.bookkeeper.metrics.totals()["chunks"]["empty"] == 3


# Limits


@pytest.mark.parametrize("max_new_tokens", [None, 0, 1, 50])
def test_prompt_that_just_fits_is_sent(max_new_tokens: int | None) -> None:
    """Prompt and answer may fill the context to the last token."""
    room = max(1, max_new_tokens or 0)
    bench = Bench(context_len=200)
    length = 200 - room - len(bench.ask("").input_ids)
    assert len(bench.ask("q" * length, max_new_tokens=max_new_tokens).input_ids) == 200 - room
    field = "max_tokens" if room > 1 else "messages"
    with pytest.raises(RequestError, match=rf"^{field}: .* exceed the context of 200"):
        bench.ask("q" * (length + 1), max_new_tokens=max_new_tokens)


# Conversations


def test_turn_is_a_prefix_of_the_next() -> None:
    """The history's spans stay in place, or the prompt would match nothing."""
    talk = Talk(Bench())
    first, second, third = talk.turn("one", A, B), talk.turn("two", C), talk.turn("three")
    assert begins_with(second, first)
    assert begins_with(third, second)
    assert third.num_turns == 2
    text = text_of(third)
    assert text == (
        f"\x02\x01u{A.text};{B.text};one{END}\x01aok{END}"
        f"\x01u{C.text};two{END}\x01aok{END}\x01uthree{END}\x01a"
    )
    assert [text[s.start : s.end] for s in third.spans] == [f"{p.text};" for p in (A, B, C)]
    assert len(third.area) == 2


def test_tool_loop_is_one_turn_of_its_conversation() -> None:
    """Each step renders the turn again around the same chunks."""
    talk = Talk(Bench())
    talk.turn("one", A)
    bench, messages = talk.bench, [*talk.messages, user("two")]
    first = bench.reply(bench.ask(messages, A, B, to="c"), "call", content=None)
    messages += [CALL, RESULT]
    second = bench.reply(bench.ask(messages, A, B, to="c"))
    assert (first.dropped, first.order) == (second.dropped, second.order) == (("a",), ["b"])
    shared = first.input_ids[: -len("\x01a")]
    assert second.input_ids[: len(shared)] == shared
    assert text_of(second).endswith(f"\x01u{B.text};two{END}\x01a{END}\x01t42{END}\x01a")
    messages += [assistant("ok"), user("three")]
    third = bench.reply(bench.ask(messages, B, C, to="c"))
    assert begins_with(third, second)
    assert (third.num_turns, third.dropped, third.order) == (2, ("b",), ["c"])


def test_prefilled_answer_is_one_answer() -> None:
    """The prompt ends with the client's beginning."""
    bench = Bench()
    begun = [user("one"), assistant("It ")]
    first = bench.reply(bench.ask(begun, A, to="c", continues=True), "is")
    assert text_of(first) == f"\x02\x01u{A.text};one{END}\x01aIt "
    second = Talk(bench, user("one"), assistant("It is")).ask("two", A)
    assert begins_with(second, first)
    assert (second.num_turns, second.dropped) == (1, ("a",))


def test_answer_cut_by_length_gets_the_templates_end() -> None:
    """Without an end token of its own, the template's stands behind the answer: once either way."""
    bench = Bench()
    first = bench.reply(bench.ask("one", A, to="c"), "cut", reason="length")
    second = Talk(bench, user("one"), assistant("cut")).ask("two")
    assert begins_with(second, first)
    assert text_of(second).endswith(f"\x01acut{END}\x01utwo{END}\x01a")


@pytest.mark.parametrize(("dedup", "order"), [("shown", ["c"]), ("off", ["b", "c"])])
def test_shown_chunk_is_dropped(dedup: str, order: list[str]) -> None:
    """What the conversation has seen is not sent again, and said so; "off" is for measurements."""
    talk = Talk(Bench(dedup=dedup))
    talk.turn("one", A, B)
    request = talk.turn("two", B, C)
    assert (request.order, request.dropped) == (order, ("b",) if dedup == "shown" else ())


@pytest.mark.parametrize("who", [Identity("thief"), *OTHERS], ids=repr)
def test_guessed_conversation_id_shows_nothing(who: Identity) -> None:
    """Even with the very messages: another key, salt or adapter has no history here."""
    talk = Talk(Bench())
    talk.turn("one", A)
    request = talk.ask("two", A, who=who)
    assert (request.num_turns, request.dropped, request.order) == (0, (), ["a"])


def test_two_turns_at_once_start_from_the_last_finished() -> None:
    """Neither sees the other, and both can go on."""
    talk = Talk(Bench())
    talk.turn("one", A)
    branches = {name: talk.ask(name) for name in ("left", "right")}
    assert [branch.num_turns for branch in branches.values()] == [1, 1]
    for name in ("right", "left"):
        talk.bench.reply(branches[name], name[0])
    for name in branches:
        history = Talk(talk.bench, *talk.messages, user(name), assistant(name[0]))
        assert history.ask("next").num_turns == 2


def test_foreign_messages_under_the_id_cost_the_owner_nothing() -> None:
    """Without API keys everybody has the same key: a stranger's turns live beside the owner's."""
    owner = Talk(Bench())
    owner.turn("hello", A)
    owner.turn("one", B)
    for opening in ("hello", "other"):
        stranger = Talk(owner.bench)
        stranger.turn(opening, C)
        stranger.turn("more", C)
    request = owner.ask("two", A, B)
    assert (request.num_turns, request.dropped) == (2, ("a", "b"))


# Overflow


def long_talk(num_turns: int, **knobs: Any) -> tuple[Talk, list[Asked]]:
    """Turns of about 60 tokens in a context of 300, each with a chunk of its own."""
    talk = Talk(Bench(context_len=300, **knobs), system("sys"))
    passages = [Passage(f"p{i}", f"<{i}>" + "x" * 30) for i in range(num_turns)]
    return talk, [
        talk.turn(f"question {i}", each, max_new_tokens=10) for i, each in enumerate(passages)
    ]


def test_overflow_breaks_the_prefix_once() -> None:
    """After a break the next turns go on token for token, until the context is full again."""
    _, requests = long_talk(12)
    breaks = [not begins_with(later, earlier) for earlier, later in pairwise(requests)]
    assert breaks == [request.num_departed > 0 for request in requests[1:]]
    assert 1 <= sum(breaks) <= 6
    assert not any(a and b for a, b in pairwise(breaks))
    assert all(len(request.input_ids) + 10 <= 300 for request in requests)
    broken = next(request for request in requests if request.num_departed)
    assert text_of(broken).startswith("\x02\x01ssys" + END)
    assert ("question 0" in text_of(broken), broken.num_turns > 0) == (False, True)
    history = len(broken.input_ids) - len(text_of(broken).rsplit("\x01u", 1)[1])
    assert history <= 150 + 10, "half of the context is free"


@pytest.mark.parametrize(("dedup", "again"), [("shown", ["p0"]), ("paper", []), ("off", ["p0"])])
def test_chunk_of_a_departed_turn(dedup: str, again: list[str]) -> None:
    talk, requests = long_talk(6, dedup=dedup)
    assert any(request.num_departed for request in requests)
    assert talk.turn("again", Passage("p0", "<0>" + "x" * 30), max_new_tokens=10).order == again


def test_dropped_chunks_do_not_push_turns_out() -> None:
    """A chunk that is not sent again needs no room."""
    talk, big = Talk(Bench(context_len=300)), Passage("big", "y" * 150)
    first = talk.turn("one", big, max_new_tokens=10)
    for i in range(3):
        request = talk.turn(f"again {i}", big, max_new_tokens=10)
        assert (request.dropped, request.num_departed) == (("big",), 0)
        assert begins_with(request, first)


# Ranks

LONG, SHORT = Passage("long", "l" * 40), Passage("short", "s" * 20)


def test_kv_aware_goes_where_the_chain_is() -> None:
    """The rank that holds the chunks serves, and gets its own acknowledgement."""
    bench = Bench(num_ranks=2)
    one, two = (bench.reply(bench.ask("q", *each)).rank for each in ((A, B), (C, D)))
    assert one != two
    again = bench.ask("x", B, A)
    assert again.rank == one
    assert told(again).ack.epoch == bench.ranks[again.rank].log.epoch
    bench.end(again)
    assert bench.ask("y", D, C).rank == two


@pytest.mark.parametrize(("worth", "is_home"), [(0.9, True), (0.1, False)])
def test_kv_aware_counts_what_a_load_saves(worth: float, is_home: bool) -> None:
    """Two chunks in one rank's host memory against one of them on the other's device."""
    bench = Bench(num_ranks=2)
    first = bench.reply(bench.ask("one", A, B))
    tree, chain = bench.bookkeeper.tree, first.chain
    tree.insert(first.namespace, chain[:1], rank=1 - first.rank, tier=Tier.DEVICE, promoted_len=0)
    for node in tree.match(first.namespace, [chunk.id for chunk in chain], rank=first.rank):
        tree.move(node.chain, rank=first.rank, tier=Tier.HOST)
    bench.bookkeeper.mirrors[first.rank].host_worth = worth
    assert (bench.ask("two", A, B).rank == first.rank) is is_home


@pytest.mark.parametrize("worth", [0.9, 0.1])
def test_order_weighs_host_memory_of_its_own_rank(worth: float) -> None:
    """A long chunk in host memory against a short one on the device; for the other rank's the
    opposite would hold."""
    bench = Bench(num_ranks=2)
    other = bench.reply(bench.ask("zero", A)).rank
    first = bench.reply(bench.ask("one", LONG, SHORT))
    tree, rank, (head, tail) = bench.bookkeeper.tree, first.rank, first.chain
    assert (other, rank) == (0, 1)
    both = tree.match(first.namespace, [head.id, tail.id])
    tree.evict(both[1].chain, rank=rank)
    tree.move(both[0].chain, rank=rank, tier=Tier.HOST)
    tree.insert(first.namespace, [tail], rank=rank, tier=Tier.DEVICE, promoted_len=0)
    for mirror, its in zip(bench.bookkeeper.mirrors, (1 - worth, worth), strict=True):
        mirror.host_worth = its
    request = bench.ask("two", LONG, SHORT)
    assert (request.rank, request.order[0]) == (rank, "long" if worth > 0.5 else "short")


# Parts (frontend programs)


def test_parts_stand_as_they_come() -> None:
    bench = Bench()
    request = bench.reply(bench.parts(["head ", [A, B], " mid ", [C, D], " end"]))
    assert text_of(request) == f"\x02head {A.text};{B.text}; mid {C.text};{D.text}; end"
    assert request.order == ["a", "b", "c", "d"]
    assert (len(request.spans), len(request.area)) == (4, 2)
    again = bench.parts(["head ", [B, A], " mid ", [D, C], " end"])
    assert again.order == ["a", "b", "d", "c"]


def test_parts_report_repeats() -> None:
    """Within one area; in a later one the chunk is sent where and as the program put it."""
    bench = Bench()
    parts: list[Any] = [[A, Passage("again", A.text)], "m", [], [Passage("other", A.text)]]
    request = bench.reply(bench.parts(parts))
    assert (request.order, request.repeated) == (["a", "other"], ("again",))
    assert bench.is_idle()


def test_parts_that_cannot_be_sent_are_refused() -> None:
    bench = Bench(context_len=50)
    with pytest.raises(RequestError, match="exceed the context"):
        bench.parts(["x" * 60])
    bench.assembler.tokenizer.bos_ids = ()
    with pytest.raises(RequestError, match="empty"):
        bench.parts([""])
    assert bench.is_idle()
