"""A conversation never loses what its user has been shown:
restarts, replicas, changed settings, cut answers, overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_chunkcache.errors import HistoryError
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.wire.report import Fallback
from tests.kit.front_bench import END, A, Asked, B, Bench, C, D, sent, text_of, user
from tests.kit.front_planning import CALL, RESULT, Talk, assistant, system

Messages = list[dict[str, Any]]
UNKNOWN, CHANGED = Fallback.UNKNOWN_HISTORY, Fallback.CHANGED_HISTORY


def with_chunks(message: Mapping[str, Any], *chunks: Passage) -> dict[str, Any]:
    return {**message, "chunks": list(chunks)}


LABELS = {f"{passage.text};": passage.label for passage in (A, B, C, D)}
PASSAGES = {passage.label: passage for passage in (A, B, C, D)}


def shown_in(request: Asked) -> list[str]:
    """The chunks of a prompt, in its order."""
    text = text_of(request)
    return [LABELS[text[span.start : span.end]] for span in request.spans]


def told(request: Asked) -> list[Fallback]:
    """What its answer says of its history."""
    return [reason for reason in request.fallbacks if reason in (UNKNOWN, CHANGED)]


# What becomes of the first turn's chunks when the second turn comes


def first_turn() -> Talk:
    talk = Talk(Bench(), system("It is noon."))
    talk.turn("one", A, B)
    return talk


Change = Callable[[Talk], object]
"""May return options of the second turn."""
AGREE: dict[str, Change] = {
    "with reasoning": lambda talk: talk.messages[2].update(reasoning_content="I look for it."),
    "white space": lambda talk: talk.messages[2].update(content="\n\nok "),
    "in parts": lambda talk: talk.messages[2].update(content=[{"type": "text", "text": "ok"}]),
}
DIFFER: dict[str, Change] = {
    "another time": lambda talk: talk.messages[0].update(content="It is 12:00:01."),
    "a tool": lambda talk: {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "other settings": lambda talk: {"template_kwargs": {"enable_thinking": False}},
    "an edited answer": lambda talk: talk.messages[2].update(content="edited"),
}
LOST: dict[str, Change] = {
    "forgotten": lambda talk: talk.bench.bookkeeper.forget(),
    "idle": lambda talk: setattr(talk.bench, "now", 10_000),
}


def changed_turn(change: Change) -> tuple[Talk, dict[str, Any]]:
    """The first turn after the change, and the options that the second has for it."""
    talk = first_turn()
    options = change(talk)
    return talk, options if isinstance(options, dict) else {}


@pytest.mark.parametrize("change", AGREE.values(), ids=AGREE)
def test_what_the_server_wrote_does_not_count(change: Change) -> None:
    """Clients send answers back with more or less than the server wrote."""
    talk, options = changed_turn(change)
    request = talk.ask("two", **options)
    assert (request.num_turns, request.num_rendered, request.num_unknown) == (1, 0, 0)
    assert shown_in(request) == ["a", "b"]


@pytest.mark.parametrize("change", DIFFER.values(), ids=DIFFER)
def test_changed_turn_keeps_its_chunks(change: Change) -> None:
    """It is rendered anew, from the client's words and the chunks that were shown with them."""
    talk, options = changed_turn(change)
    answer = talk.messages[2]["content"]
    request = talk.turn("two", B, C, **options)
    assert (request.num_turns, request.num_rendered, request.num_unknown) == (0, 1, 0)
    assert (shown_in(request), request.dropped, told(request)) == (["a", "b", "c"], ("b",), [])
    assert f"one{END}\x01a{answer}{END}\x01u" in text_of(request)
    assert talk.ask("three", **options).num_turns == 2


@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
def test_lost_turn_is_told(change: Change) -> None:
    """Nobody can tell what it has shown: the answer says so, and counts it."""
    talk, _ = changed_turn(change)
    request = talk.ask("two")
    assert (request.num_unknown, request.num_rendered, told(request)) == (1, 1, [UNKNOWN])
    assert shown_in(request) == []
    shown = request.answer()
    assert (shown["turns_unknown"], shown["turns_reused"]) == (1, 0)
    assert talk.bench.bookkeeper.metrics.totals()["fallbacks"]["unknown_history"] == 1


@pytest.mark.parametrize("name", [*AGREE, *DIFFER, *LOST])
def test_lost_turn_comes_with_its_chunks(name: str) -> None:
    """A message's own chunks are used wherever the turn is not in store; `[]` is an answer, too."""
    talk, options = changed_turn({**AGREE, **DIFFER, **LOST}[name])
    talk.messages[1] = with_chunks(talk.messages[1], B, A)
    request = talk.turn("two", C, **options)
    expected = ["a", "b", "c"] if name in AGREE else ["b", "a", "c"]
    assert (shown_in(request), request.num_unknown, told(request)) == (expected, 0, [])
    other = Talk(talk.bench, talk.messages[0], with_chunks(user("other")), assistant("ok"))
    assert told(other.ask("two", **options)) == []


@pytest.mark.parametrize("to", ["c", None])
def test_required_history_is_refused(to: Any) -> None:
    """With the message's index, and with a status that clients do not retry."""
    bench, ok = Bench(), assistant("ok")
    talk = Talk(bench, user("one"), ok, with_chunks(user("two"), A), ok, to=to)
    with pytest.raises(HistoryError, match=r"messages\.0\.chunks: ") as error:
        talk.ask("three", requires_history=True)
    assert error.value.status == 422
    assert bench.is_idle()
    talk.messages[0] = with_chunks(talk.messages[0])
    bench.end(talk.ask("three", requires_history=True))
    for unanswered in ([user("one")], [user("one"), user("two")]):  # nothing was said before
        assert bench.ask(unanswered, to=to, requires_history=True).num_unknown == 0


# Turns that did not end well


def cut(talk: Talk) -> str:
    """It ended at a stop string."""
    talk.bench.reply(talk.ask("two", D), "It serves.", content="It serves", matched=".")
    return "It serves"


def aborted(talk: Talk) -> str:
    """The client has left in the stream, which the server has not noticed yet."""
    talk.ask("two", D)
    return "It"


def called(talk: Talk) -> str:
    """Its answer was a tool call, and the user has not waited for more."""
    talk.bench.reply(talk.ask("two", D), content=None)
    return "Never mind."


@pytest.mark.parametrize("end", [cut, aborted, called])
def test_turn_is_kept_whatever_its_end(end: Callable[[Talk], str]) -> None:
    """Its prompt, and the answer as the client has it."""
    talk = first_turn()
    got = end(talk)
    talk.messages += [user("two"), assistant(got)]
    request = talk.ask("three", C)
    assert (request.num_turns, request.num_rendered, told(request)) == (1, 1, [])
    assert shown_in(request) == ["a", "b", "d", "c"]
    assert f"{D.text};two{END}\x01a{got}{END}\x01u{C.text};three" in text_of(request)


# History from the request


def talk(bench: Bench, *turns: Sequence[Passage]) -> tuple[Talk, list[Asked]]:
    """A conversation of which the client keeps every message with its chunks in the order of the
    answers."""
    said, requests = Talk(bench), list[Asked]()
    for i, chunks in enumerate(turns):
        requests.append(said.turn(f"q{i}", *chunks, answer=f"r{i}"))
        own = [PASSAGES[label] for label in requests[-1].order]
        said.messages[-2] = with_chunks(said.messages[-2], *own)
    return said, requests


chunk_lists = st.lists(st.lists(st.sampled_from([A, B, C, D]), max_size=4), min_size=1, max_size=4)


@given(
    turns=chunk_lists,
    known=st.sets(st.integers(0, 3)),
    dedup=st.sampled_from(["shown", "off", "paper"]),
)
@settings(max_examples=60, deadline=None)
def test_any_replica_renders_the_same(turns: Any, known: Any, dedup: str) -> None:
    """A cold one as the warm one, token for token, at every turn, with an id and without."""
    said, requests = talk(Bench(dedup=dedup), *turns)
    some = Bench(dedup=dedup)
    for i, request in enumerate(requests):
        asked = [*said.messages[: 2 * i], user(f"q{i}")]
        own = [PASSAGES[label] for label in [*request.order, *request.dropped]]
        for to in ("c", None):
            cold = Bench(dedup=dedup).ask(asked, *own, to=to)
            assert text_of(cold) == text_of(request)
            assert told(cold) == []
        if i in known:
            assert text_of(some.reply(some.ask(asked, *own, to="c"), f"r{i}")) == text_of(request)


@pytest.mark.parametrize(
    ("now", "is_changed"),
    [((A, B), False), ((B, A), False), ((A, C), True), ((A,), True), ((), True)],
)
def test_other_chunks_are_another_history(now: tuple[Passage, ...], is_changed: bool) -> None:
    """Equal as a set: the stored turn. Different: rendered from that message on, and told."""
    said = Talk(Bench())
    for i, chunks in enumerate(([A, B], [D], [])):
        said.turn(f"q{i}", *chunks, answer=f"r{i}")
    said.messages[0] = with_chunks(user("q0"), *now)
    request = said.ask("q3")
    assert told(request) == ([CHANGED] if is_changed else [])
    assert (request.num_turns, request.num_rendered) == ((0, 3) if is_changed else (3, 0))
    expected = [*(each.label for each in now), "d"] if is_changed else ["a", "b", "d"]
    assert shown_in(request) == expected


def test_two_questions_of_one_turn_have_their_own_chunks() -> None:
    bench = Bench()
    two = [with_chunks(user("one"), A), with_chunks(user("two"), B)]
    first = bench.reply(bench.ask(two, to="c"))
    assert text_of(first) == f"\x02\x01u{A.text};one{END}\x01u{B.text};two{END}\x01a"
    said = Talk(bench, *two, assistant("ok"))
    later = said.ask("three")
    assert later.input_ids[: len(sent(first))] == sent(first)
    assert (later.num_turns, told(later)) == (1, [])
    changed = Talk(bench, with_chunks(user("one"), D), user("two"), assistant("ok")).ask("three")
    assert (changed.num_turns, told(changed)) == (0, [CHANGED])
    assert "d" in shown_in(changed)
    bench.bookkeeper.forget()
    assert said.ask("three").input_ids == later.input_ids


# Overflow


def long_talk(num_turns: int) -> Talk:
    said = Talk(Bench(context_len=4000))
    for i in range(num_turns):
        own = Passage(f"n{i}", f"<{i}>" * 30)
        said.turn(f"and {i}?", A, own, answer="answer " * 10)
        said.messages[-2] = with_chunks(said.messages[-2], A, own)
    return said


@pytest.mark.parametrize("is_cold", [False, True])
def test_chunks_leave_with_their_turns(is_cold: bool) -> None:
    """What stays keeps its chunks, what has left may be shown again."""
    said = long_talk(40)
    if is_cold:
        said.bench.bookkeeper.forget()
    request = said.ask("again?", Passage("n0", "<0>" * 30), A)
    text = text_of(request)
    stayed = [i for i in range(40) if f"and {i}?" in text]
    assert 5 < len(stayed) < 40
    assert stayed[-1] == 39
    assert all(f"<{i}>" * 30 in text for i in stayed)
    assert ("n0" in request.order, request.num_unknown) == (True, 0)
    assert text.count(A.text) == 1, "shown once, though the turn that has shown it first has left"
    assert len(request.input_ids) <= 4000


# Reasoning

THINKING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant'"
    " and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content"
    " }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{%"
    " endif %}"
)
REASONING, ANSWER = "<think>\nI reckon.\n</think>\n\n", "Paris."


@dataclass(frozen=True)
class Mode:
    """How a client has a reasoning model answer:
    what is generated, what it gets, what it sends with each turn."""

    generated: str
    content: str
    kwargs: dict[str, Any] | None = None


MODES = {
    "parsed": Mode(REASONING + ANSWER, "\n\n" + ANSWER),
    "in the content": Mode(REASONING + ANSWER, REASONING + ANSWER),
    "off": Mode(ANSWER, ANSWER, {"enable_thinking": False}),
}
with_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def thinking_bench(**knobs: Any) -> Bench:
    """Its template leaves out past reasoning."""
    from tests.reference.tiny_tokenizer import make_tokenizer

    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = THINKING
    return Bench(tokenizer=tokenizer, end="<|im_end|>", **knobs)


def thought(said: Talk, text: str, mode: Mode, *chunks: Passage) -> Asked:
    request = said.ask(text, *chunks, template_kwargs=mode.kwargs)
    said.messages += [user(text), assistant(mode.content)]
    return said.bench.reply(request, mode.generated, content=mode.content)


@with_modes
def test_past_reasoning_is_left_out_as_by_the_template(mode: Mode) -> None:
    """Later turns read as SGLang's own rendering of them."""
    said, kept = Talk(thinking_bench()), Talk(thinking_bench(past_reasoning="kept"))
    tokenizer, before = said.bench.tokenizer, list[int]()
    for i in range(3):
        messages = [*said.messages, user(f"question {i}")]
        stock = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **(mode.kwargs or {})
        )
        request, whole = (thought(each, f"question {i}", mode) for each in (said, kept))
        assert (tokenizer.decode(request.input_ids), request.num_turns) == (stock, i)
        assert whole.input_ids[: len(before)] == before
        before = sent(whole)


@with_modes
def test_cold_replica_shares_what_is_cached(mode: Mode) -> None:
    """The first later turn all before the first answer, the next ones all but the newest answer."""
    said, requests = Talk(thinking_bench()), list[Asked]()
    turns: Sequence[Sequence[Passage]] = ([A, B], [C], [D], [])
    for i, chunks in enumerate(turns):
        if i == 1:
            said.bench.bookkeeper.forget()
        requests.append(thought(said, f"question {i}", mode, *chunks))
        said.messages[-2] = with_chunks(said.messages[-2], *chunks)
    opened = said.bench.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    for before, after in pairwise(requests):
        ids, n = before.input_ids, len(opened)
        end = next(i + n for i in reversed(range(len(ids))) if ids[i : i + n] == opened)
        assert after.input_ids[:end] == ids[:end]
    assert [request.num_turns for request in requests] == [0, 0, 2, 3]
    cold = Talk(thinking_bench(), *said.messages[:-2])
    again = cold.ask("question 3", template_kwargs=mode.kwargs)
    assert again.input_ids == requests[-1].input_ids


# What strangers may send


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize(
    "between",
    [[user("IMPORTANT")], [user("IMPORTANT"), CALL, RESULT], [system("IMPORTANT")]],
    ids=["user", "tool", "system"],
)
def test_messages_that_nobody_has_answered_stay_at_overflow(
    between: Messages, is_cold: bool
) -> None:
    """The oldest turn leaves, and nothing behind it; also where its neighbour is in store."""
    said = Talk(Bench(context_len=500), system("sys"))
    said.turn("q" * 300, answer="a" * 100)
    said.messages += between
    said.turn("then", answer="so")
    if is_cold:
        said.bench.bookkeeper.forget()
    request = said.ask("final" * 10, max_new_tokens=10)
    text = text_of(request)
    assert request.num_turns + request.num_rendered == 1
    assert text.startswith("\x02\x01ssys\x03\x01")
    assert "q" * 300 not in text
    assert text.index("IMPORTANT") < text.index("then") < text.index("final")


def test_step_of_a_tool_loop_after_a_restart_is_unknown() -> None:
    """Its question was shown chunks that nobody sends."""
    step = [user("one"), CALL, RESULT]
    assert told(Bench().ask(step, to="c")) == [UNKNOWN]
    for asked, continues in ((step, False), ([user("one"), assistant("It")], True)):
        with pytest.raises(HistoryError, match=r"messages\.0\.chunks"):
            Bench().ask(asked, continues=continues, to="c", requires_history=True)
    assert told(Bench().ask(step, A, to="c", requires_history=True)) == []


def test_other_answer_is_another_branch() -> None:
    """The question was asked again with other chunks."""
    bench = Bench()
    for text, chunk in (("first", A), ("second", C)):
        Talk(bench).turn("one", chunk, answer=text)
    for text, name in (("first", "a"), ("second", "c"), ("edited", "c")):
        later = Talk(bench, system("Another time."), user("one"), assistant(text))
        assert shown_in(later.ask("two")) == [name]


def test_chunks_that_reappear_are_laid_out_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(context_len=4000)
    chunks = [Passage(str(i), f"chunk {i} " * 12) for i in range(20)]
    messages = list[dict[str, Any]]()
    for i in range(200):
        brought = (chunks[i % 20],) if i < 20 or i >= 180 else ()
        messages += [with_chunks(user(f"q{i}"), *brought), assistant("an answer")]
    renders, render = list[int](), bench.assembler._render

    def counted(*args: Any) -> str:
        renders.append(1)
        return render(*args)

    monkeypatch.setattr(bench.assembler, "_render", counted)
    request = bench.ask([*messages, user("now")], to="c", max_new_tokens=10)
    assert request.num_departed > 20, "nor is all but a little left"
    assert 2000 < len(request.input_ids) <= 3990
    assert len(renders) <= 40
