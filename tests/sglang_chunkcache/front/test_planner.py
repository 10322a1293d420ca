"""What is sent to which rank: order, limits, conversations, overflow, routing, parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from radix_ext import ConversationMap, Tier
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.request import Identity, Passage
from tests.sglang_chunkcache.front.front_bench import (
    END,
    A,
    Asked,
    B,
    Bench,
    C,
    D,
    sent,
    text_of,
    told,
    user,
)

# One request


def test_prompt_is_head_chunks_question() -> None:
    """A cold cache: the retriever's order, one span per chunk, separator included."""
    request = Bench().ask("why?", A, B)
    assert text_of(request) == f"\x02\x01u{A.text};{B.text};why?{END}\x01a"
    assert request.order == ["a", "b"]
    assert [text_of(request)[span.start : span.end] for span in request.spans] == [
        A.text + ";",
        B.text + ";",
    ]


def test_no_chunks_is_an_ordinary_prompt() -> None:
    """An empty list: no spans, no intro."""
    bench = Bench(template="Use: {chunks}{question}")
    request = bench.reply(bench.ask("why?"))
    assert text_of(request) == f"\x02\x01uwhy?{END}\x01a"
    assert request.answer()["order"] == []
    assert bench.is_idle()


def test_cached_order_is_used_again() -> None:
    """The same chunks in another order go into the order that is cached."""
    bench = Bench()
    bench.reply(bench.ask("one", A, B, C))
    request = bench.ask("two", C, D, B, A)
    assert request.order == ["a", "b", "c", "d"]
    assert request.planned_len == 3


def test_order_retriever_leaves_the_order_alone() -> None:
    """The baseline."""
    bench = Bench(order="retriever")
    bench.reply(bench.ask("one", A, B))
    request = bench.ask("two", B, A)
    assert (request.order, request.planned_len) == (["b", "a"], 0)


def test_a_requests_own_chunks_do_not_count_as_seen() -> None:
    """Its order is decided before it is counted;
    counted first, both would be seen and `d` would stay in front."""
    bench = Bench()
    bench.reply(bench.ask("one", A, C))
    assert bench.ask("two", D, C).order == ["c", "d"]


def test_evicted_chunks_are_not_planned_on() -> None:
    """The next answer tells of the eviction; the order follows."""
    bench = Bench()
    bench.reply(bench.ask("one", A, B))
    bench.ranks[0].evict_all()
    bench.reply(bench.ask("two", D))
    assert bench.ask("three", B, A).order == ["b", "a"]


def test_a_request_under_way_is_planned_on() -> None:
    """Two at once: the second takes the first one's order, and forgets it if that one fails."""
    bench = Bench()
    first = bench.ask("one", A, B)
    second = bench.ask("two", B, A)
    assert second.order == ["a", "b"]
    bench.end(first)
    bench.end(second)
    assert bench.ask("three", B, A).order == ["b", "a"]


def test_other_heads_and_tenants_share_no_chain() -> None:
    """Behind another system prompt, salt or adapter there is no cached chain."""
    bench = Bench()
    bench.reply(bench.ask("one", A, B))
    for other in (
        bench.ask([{"role": "system", "content": "x"}, user("q")], B, A),
        bench.ask("q", B, A, who=Identity("me", cache_salt="x")),
        bench.ask("q", B, A, who=Identity("me", extra_key="x")),
        bench.ask("q", B, A, who=Identity("me", lora="x")),
    ):
        assert other.order == ["b", "a"]


def test_repeated_text_is_sent_once() -> None:
    """Identity is the text: the second label is reported, not sent."""
    bench = Bench()
    request = bench.ask("q", A, B, Passage("again", A.text))
    assert (request.order, request.repeated) == (["a", "b"], ("again",))
    assert bench.books.metrics.totals()["chunks"]["repeated"] == 1


@pytest.mark.parametrize("text", ["", " ", "\n\n"], ids=repr)
def test_empty_chunk_is_dropped_and_told(text: str) -> None:
    """Retrievers return such; the rest of the request is answered."""
    bench = Bench()
    asked = bench.ask("q", Passage("e", text), A)
    of_parts = bench.parts([[Passage("e", text), A], "m", [Passage("f", text)]])
    assert (asked.order, asked.empty, of_parts.order, of_parts.empty) == (
        ["a"],
        ("e",),
        ["a"],
        ("e", "f"),
    )
    assert bench.books.metrics.totals()["chunks"]["empty"] == 3


def test_same_label_with_other_text_is_another_chunk() -> None:
    """A label is only shown back."""
    assert Bench().ask("q", A, Passage("a", "other")).order == ["a", "a"]


# Limits


def test_chunk_longer_than_the_context_is_named() -> None:
    """400 with the label and both lengths."""
    with pytest.raises(RequestError, match="'big' has 301 tokens, the context is 200"):
        Bench(context_len=200).ask("q", Passage("big", "x" * 300))


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


def test_turn_is_a_prefix_of_the_next() -> None:
    """Token for token, answer and its end token included."""
    bench, messages = Bench(), [user("one")]
    first = bench.turn(messages, A, B)
    messages.append(user("two"))
    second = bench.turn(messages, C)
    messages.append(user("three"))
    third = bench.turn(messages)
    assert second.input_ids[: len(sent(first))] == sent(first)
    assert third.input_ids[: len(sent(second))] == sent(second)
    assert third.num_turns == 2
    expected = f"\x02\x01u{A.text};{B.text};one{END}\x01aok{END}\x01u{C.text};two{END}\x01aok{END}\x01uthree{END}\x01a"
    assert text_of(third) == expected


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "42"}


def test_tool_loop_is_one_turn_of_its_conversation() -> None:
    """Each step renders the turn again around the same chunks;
    the plain answer closes it, the next turn goes on from there."""
    bench, messages = Bench(), list[Any]([user("one")])
    bench.turn(messages, A)
    messages.append(user("two"))
    first = bench.reply(bench.ask(messages, A, B, to="c"), "call", content=None)
    messages += [CALL, RESULT]
    second = bench.turn(messages, A, B)
    assert (first.dropped, first.order) == (second.dropped, second.order) == (("a",), ["b"])
    assert (
        second.input_ids[: len(first.input_ids) - len("\x01a")] == first.input_ids[: -len("\x01a")]
    )
    assert text_of(second).endswith(f"\x01u{B.text};two{END}\x01a{END}\x01t42{END}\x01a")
    messages.append(user("three"))
    third = bench.turn(messages, B, C)
    assert third.input_ids[: len(sent(second))] == sent(second)
    assert (third.num_turns, third.dropped, third.order) == (2, ("b",), ["c"])


def test_answer_that_is_sent_again_is_no_earlier_turn() -> None:
    """History ends before the last user message: its turn is rendered anew, its chunks are sent."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    again = bench.ask(messages, A, to="c")
    assert (again.num_turns, again.order, again.dropped) == (0, ["a"], ())
    assert text_of(again) == f"\x02\x01u{A.text};one{END}\x01uok{END}\x01a"


def test_prefilled_answer_is_one_answer() -> None:
    """The prompt ends with the client's beginning;
    the conversation keeps the whole, as the client sends it back."""
    bench, begun = Bench(), [user("one"), {"role": "assistant", "content": "It "}]
    first = bench.reply(bench.ask(begun, A, to="c", continues=True), "is")
    assert text_of(first) == f"\x02\x01u{A.text};one{END}\x01aIt "
    second = bench.ask(
        [user("one"), {"role": "assistant", "content": "It is"}, user("two")], A, to="c"
    )
    assert second.input_ids[: len(sent(first))] == sent(first)
    assert (second.num_turns, second.dropped) == (1, ("a",))


def test_answer_cut_by_length_gets_the_templates_end() -> None:
    """Without an end token of its own, the template's stands behind the answer: once either way."""
    bench = Bench()
    first = bench.reply(bench.ask("one", A, to="c"), "cut", reason="length")
    second = bench.ask([user("one"), {"role": "assistant", "content": "cut"}, user("two")], to="c")
    assert second.input_ids[: len(sent(first))] == sent(first)
    assert text_of(second).endswith(f"\x01acut{END}\x01utwo{END}\x01a")


def test_spans_of_the_history_stay_in_place() -> None:
    """The scheduler needs the old turns' spans, or the prompt matches nothing."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A, B)
    messages.append(user("two"))
    request = bench.turn(messages, C)
    assert [text_of(request)[s.start : s.end] for s in request.spans] == [
        p.text + ";" for p in (A, B, C)
    ]
    assert len(request.area) == 2


def test_later_turns_keep_the_retrievers_order() -> None:
    """Nothing is reordered behind a history."""
    bench, messages = Bench(), [user("one")]
    bench.reply(bench.ask("x", C, B))
    bench.turn(messages, A)
    messages.append(user("two"))
    assert bench.turn(messages, B, C).order == ["b", "c"]


def test_first_chunks_in_a_later_turn_are_ordered() -> None:
    """A history without chunks is only a longer head."""
    bench = Bench()
    for order in ((A, B), (B, A)):
        messages = [user("hi")]
        bench.turn(messages, to=str(order))
        messages.append(user("two"))
        assert bench.turn(messages, *order, to=str(order)).order == ["a", "b"]


def test_shown_chunk_is_dropped() -> None:
    """What the conversation has seen is not sent again, and said so."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A, B)
    messages.append(user("two"))
    request = bench.turn(messages, B, C)
    assert (request.order, request.dropped) == (["c"], ("b",))
    assert request.answer()["turns_reused"] == 1


def test_dedup_off_sends_again() -> None:
    """For measurements."""
    bench, messages = Bench(dedup="off"), [user("one")]
    bench.turn(messages, A)
    messages.append(user("two"))
    assert bench.turn(messages, A).order == ["a"]


def test_edited_history_starts_fresh() -> None:
    """Another first question: nothing of the stored turns is used, the chunks are sent."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    request = bench.ask([user("ONE"), messages[1], user("two")], A, to="c")
    assert (request.num_turns, request.order, request.dropped) == (0, ["a"], ())
    assert "ONE" in text_of(request)
    assert "one" not in text_of(request)


def test_edited_answer_starts_at_the_turn_before() -> None:
    """The longest agreeing run is kept; of the turn after it, what its user was shown."""
    bench, messages = Bench(), [user("one")]
    first = bench.turn(messages, A)
    messages.append(user("two"))
    bench.turn(messages, B)
    messages[-1] = {"role": "assistant", "content": "edited"}
    request = bench.ask([*messages, user("three")], B, to="c")
    assert request.num_turns == 1
    assert request.input_ids[: len(sent(first))] == sent(first)
    assert (request.num_rendered, request.dropped) == (1, ("b",))
    assert text_of(request).endswith(f"\x01u{B.text};two{END}\x01aedited{END}\x01uthree{END}\x01a")


def test_retry_of_a_turn_gives_the_same_prompt() -> None:
    """The stored answer to it is not in the way."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    messages.append(user("two"))
    again = list(messages)
    request = bench.turn(messages, B)
    retry = bench.ask(again, B, to="c")
    assert retry.input_ids == request.input_ids


def test_branch_goes_on_from_the_common_turn() -> None:
    """Two continuations of one turn."""
    bench, messages = Bench(), [user("one")]
    first = bench.turn(messages, A)
    left, right = [*messages, user("left")], [*messages, user("right")]
    bench.turn(left, B)
    request = bench.turn(right, B)
    assert (request.num_turns, request.order) == (1, ["b"])
    assert request.input_ids[: len(sent(first))] == sent(first)


@pytest.mark.parametrize(
    "who",
    [
        Identity("thief"),
        Identity("me", cache_salt="x"),
        Identity("me", extra_key="x"),
        Identity("me", lora="x"),
    ],
    ids=repr,
)
def test_guessed_conversation_id_shows_nothing(who: Identity) -> None:
    """Even with the very messages: another key, salt or adapter has no history here."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    request = bench.ask([*messages, user("two")], A, to="c", who=who)
    assert (request.num_turns, request.dropped, request.order) == (0, (), ["a"])


def test_guessed_id_without_the_messages_shows_nothing() -> None:
    """A history is only used by who can tell it."""
    bench, messages = Bench(), [user("secret")]
    bench.turn(messages, A)
    request = bench.ask([user("x"), {"role": "assistant", "content": "y"}, user("z")], A, to="c")
    assert request.num_turns == 0
    assert "secret" not in text_of(request)


@pytest.mark.parametrize("conversation_id", [None, "", "other"])
def test_no_known_conversation_means_no_history(conversation_id: str | None) -> None:
    """Without id nothing is stored or read."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    assert bench.ask([*messages, user("two")], A, to=conversation_id).num_turns == 0


def test_other_tools_are_another_history() -> None:
    """Tools stand in the prompt's head."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    request = bench.ask([*messages, user("two")], A, to="c", tools=[{"type": "function"}])
    assert request.num_turns == 0
    assert text_of(request).startswith("\x02[1]")


def test_two_turns_at_once_start_from_the_last_finished() -> None:
    """Neither sees the other, and both can go on."""
    bench, messages = Bench(), [user("one")]
    bench.turn(messages, A)
    left, right = (bench.ask([*messages, user(name)], to="c") for name in ("left", "right"))
    assert left.num_turns == right.num_turns == 1
    bench.reply(right, "r")
    bench.reply(left, "l")
    histories = {
        name: [*messages, user(name), {"role": "assistant", "content": name[0]}, user("next")]
        for name in ("left", "right")
    }
    assert bench.ask(histories["left"], to="c").num_turns == 2
    assert bench.ask(histories["right"], to="c").num_turns == 2


def test_foreign_messages_under_the_id_cost_the_owner_nothing() -> None:
    """Without API keys everybody has the same key:
    a stranger's turns live beside the owner's, also from a common opening."""
    bench, messages = Bench(), [user("hello")]
    bench.turn(messages, A)
    messages.append(user("one"))
    bench.turn(messages, B)
    for stranger in ([user("hello")], [user("other")]):
        bench.turn(stranger, C)
        stranger.append(user("more"))
        bench.turn(stranger, C)
    request = bench.ask([*messages, user("two")], A, B, to="c")
    assert (request.num_turns, request.dropped) == (2, ("a", "b"))


def test_idle_conversation_is_forgotten() -> None:
    """Bounded in time: the next turn is rendered whole."""
    bench, messages = Bench(conversation_idle_s=10), [user("one")]
    bench.turn(messages, A)
    bench.now = 11
    request = bench.ask([*messages, user("two")], A, to="c")
    assert request.num_turns == 0
    assert "one" in text_of(request)


# Overflow


def long_talk(
    bench: Bench, num_turns: int, system: str = "sys"
) -> tuple[list[dict[str, str]], list[Asked]]:
    """Turns of about 60 tokens, each with a chunk of its own."""
    messages, requests = [{"role": "system", "content": system}], []
    for i in range(num_turns):
        messages.append(user(f"question {i}"))
        requests.append(
            bench.turn(messages, Passage(f"p{i}", f"<{i}>" + "x" * 30), max_new_tokens=10)
        )
    return messages, requests


def test_overflow_drops_the_oldest_turns_and_keeps_the_head() -> None:
    """The system prompt stays, the newest turns stay, half of the context is free."""
    bench = Bench(context_len=300)
    _, requests = long_talk(bench, 6)
    broken = next(r for r in requests if r.num_departed)
    assert text_of(broken).startswith("\x02\x01ssys" + END)
    assert "question 0" not in text_of(broken)
    assert broken.num_turns > 0
    history = len(broken.input_ids) - len(text_of(broken).rsplit("\x01u", 1)[1])
    assert history <= 150 + 10


def test_overflow_breaks_the_prefix_once() -> None:
    """After a break the next turns go on token for token, until the context is full again."""
    bench = Bench(context_len=300)
    _, requests = long_talk(bench, 12)
    breaks = [
        later.input_ids[: len(sent(earlier))] != sent(earlier)
        for earlier, later in pairwise(requests)
    ]
    assert breaks == [request.num_departed > 0 for request in requests[1:]]
    assert 1 <= sum(breaks) <= 6
    assert not any(a and b for a, b in pairwise(breaks))
    assert all(len(request.input_ids) + 10 <= 300 for request in requests)


@pytest.mark.parametrize(("dedup", "again"), [("shown", ["p0"]), ("paper", []), ("off", ["p0"])])
def test_chunk_of_a_departed_turn(dedup: str, again: list[str]) -> None:
    """`shown` sends it again, `paper` keeps it dropped (CRAFT 4.3)."""
    bench = Bench(context_len=300, dedup=dedup)
    messages, requests = long_talk(bench, 6)
    assert any(request.num_departed for request in requests)
    messages.append(user("again"))
    assert bench.turn(messages, Passage("p0", "<0>" + "x" * 30), max_new_tokens=10).order == again


def test_overflow_by_one_turn_keeps_no_history() -> None:
    """A new turn of nearly the whole context leaves room for head and itself only."""
    bench = Bench(context_len=300)
    messages, _ = long_talk(bench, 3)
    messages.append(user("big"))
    request = bench.turn(messages, Passage("big", "y" * 230), max_new_tokens=10)
    assert (request.num_turns, request.num_departed) == (0, 3)
    assert text_of(request) == f"\x02\x01ssys{END}\x01u{'y' * 230};big{END}\x01a"


def test_dropped_chunks_do_not_push_turns_out() -> None:
    """A chunk that is not sent again needs no room:
    the prompt would have fitted, the prefix must not break."""
    bench = Bench(context_len=300)
    big = Passage("big", "y" * 150)
    messages = [user("one")]
    first = bench.turn(messages, big, max_new_tokens=10)
    for i in range(3):
        messages.append(user(f"again {i}"))
        request = bench.turn(messages, big, max_new_tokens=10)
        assert (request.dropped, request.num_departed) == (("big",), 0)
        assert request.input_ids[: len(sent(first))] == sent(first)


def test_forgotten_long_conversation_is_still_answered() -> None:
    """A forgotten conversation costs a prefix, never an answer:
    the client sends all messages, more than fits."""
    bench = Bench(context_len=300)
    messages, _ = long_talk(bench, 30)
    bench.books.conversations = ConversationMap(max_conversations=1, max_tokens=10_000, idle_s=60)
    messages.append(user("next"))
    assert len(bench.turn(messages, A, max_new_tokens=10).input_ids) <= 290


# Ranks


def test_kv_aware_goes_where_the_chain_is() -> None:
    """The rank that holds the chunks serves, and gets its own acknowledgement."""
    bench = Bench(num_ranks=2)
    homes = {}
    for name, passages in (("one", (A, B)), ("two", (C, D))):
        homes[name] = bench.reply(bench.ask(name, *passages)).rank
    assert homes["one"] != homes["two"]
    again = bench.ask("x", B, A)
    assert again.rank == homes["one"]
    assert told(again).ack.epoch == bench.ranks[again.rank].log.epoch
    bench.end(again)
    assert bench.ask("y", D, C).rank == homes["two"]


@pytest.mark.parametrize(("worth", "is_home"), [(0.9, True), (0.1, False)])
def test_kv_aware_counts_what_a_load_saves(worth: float, is_home: bool) -> None:
    """Two chunks in one rank's host memory against one of them on the other's device."""
    bench = Bench(num_ranks=2)
    first = bench.reply(bench.ask("one", A, B))
    tree, chain = bench.books.tree, first.chain
    tree.insert(first.namespace, chain[:1], rank=1 - first.rank, tier=Tier.DEVICE, promoted_len=0)
    for node in tree.match(first.namespace, [chunk.id for chunk in chain], rank=first.rank):
        tree.move(node.chain, rank=first.rank, tier=Tier.HOST)
    bench.books.mirrors[first.rank].host_worth = worth
    assert (bench.ask("two", A, B).rank == first.rank) is is_home


def test_kv_aware_avoids_an_overloaded_rank() -> None:
    """Above max_load_ratio x the mean a rank gets no more, however much it holds."""
    bench = Bench(num_ranks=2)
    home = bench.reply(bench.ask("one", A, B)).rank
    assert bench.ask("two", A, B).rank == home
    assert bench.ask("three", A, B).rank != home


def test_round_robin_takes_turns() -> None:
    """The baseline."""
    bench = Bench(num_ranks=2, routing="round_robin")
    assert [bench.reply(bench.ask("q", A)).rank for _ in range(4)] == [0, 1, 0, 1]


def test_history_goes_back_to_its_rank() -> None:
    """A conversation's KV is where its last turn was computed."""
    bench, messages = Bench(num_ranks=2), [user("one")]
    first = bench.turn(messages, A)
    messages.append(user("two"))
    assert bench.turn(messages, B).rank == first.rank


# Parts (frontend programs)


def test_parts_stand_as_they_come() -> None:
    """Texts, an area, text, an area; the tokenizer's own first token in front."""
    bench = Bench()
    request = bench.parts(["head ", [A, B], " mid ", [C, D], " end"])
    assert text_of(request) == f"\x02head {A.text};{B.text}; mid {C.text};{D.text}; end"
    assert request.order == ["a", "b", "c", "d"]
    assert len(request.spans) == 4
    assert len(request.area) == 2


def test_parts_order_only_the_first_area() -> None:
    """What stands behind another text is fixed."""
    bench = Bench()
    bench.reply(bench.parts(["h", [A, B], "m", [C, D]]))
    request = bench.parts(["h", [B, A], "m", [D, C]])
    assert request.order == ["a", "b", "d", "c"]


def test_parts_continue_a_program() -> None:
    """A frontend program sends its text so far again; the spans must come out the same."""
    bench = Bench()
    first = bench.parts(["h", [A, B], "question"])
    second = bench.parts(["h", [A, B], "question", " answer", [C]])
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert second.spans[:2] == first.spans


def test_parts_report_repeats() -> None:
    """Within one area; in a later one the chunk is sent where the program put it."""
    bench = Bench()
    request = bench.parts([[A, Passage("again", A.text)], "m", [A]])
    assert (request.order, request.repeated) == (["a", "a"], ("again",))


def test_parts_labels_follow_their_area() -> None:
    """The same text under two labels: each place shows the label it was sent with."""
    bench = Bench()
    request = bench.parts([[A], "m", [Passage("other", A.text)]])
    assert request.order == ["a", "other"]


@pytest.mark.parametrize("parts", [[[]], ["x", []], [[], "x", [A]]], ids=repr)
def test_parts_with_empty_areas_are_served(parts: list[Any]) -> None:
    """An empty area is no chunks."""
    bench = Bench()
    bench.reply(bench.parts(parts))
    assert bench.is_idle()


def test_parts_without_anything_are_refused() -> None:
    """A tokenizer without a first token leaves nothing to send."""
    bench = Bench()
    bench.assembler.tokenizer.bos_ids = ()
    with pytest.raises(RequestError, match="empty"):
        bench.parts([""])
    assert bench.is_idle()


def test_parts_longer_than_the_context_are_refused() -> None:
    """As in chats."""
    with pytest.raises(RequestError, match="exceed the context"):
        Bench(context_len=50).parts(["x" * 60])
