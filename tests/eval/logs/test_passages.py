"""What of a prompt is a chunk, and what stands before it."""

from __future__ import annotations

from typing import Any

import pytest

from eval.errors import CommandError
from eval.logs.call import UnreadError
from eval.logs.openai import call_of
from eval.logs.passages import Passages, Splitter, digest
from eval.replay.trace import Logged, TraceRequest

SYSTEM = {"role": "system", "content": "Answer."}


def read(*messages: Any, between: Any = ("From:", "Asked:"), **fields: Any) -> TraceRequest:
    """As a request with passages "a", "b" between marks, or others, split at "---"."""
    said = [
        each if isinstance(each, dict) else {"role": "user", "content": each} for each in messages
    ]
    return Passages(Splitter("---", between)).request(call_of({"messages": said, **fields}))


def logged(request: TraceRequest) -> Logged:
    assert request.logged is not None
    return request.logged


def test_separator_alone_leaves_both_ends_out() -> None:
    """A template's first words and the question are no passages."""
    found = read("Read this. --- a --- b ---  --- What?", between=None)
    assert [chunk.id for chunk in found.chunks] == [digest("a"), digest("b")]
    with pytest.raises(UnreadError, match="no passages"):
        read("Read this. --- What?", between=None)
    with pytest.raises(UnreadError, match="--separator matches nothing"):
        read("Read this. What?", between=None)
    with pytest.raises(CommandError, match="not a regular expression"):
        Splitter("(", None)


def test_text_that_nothing_stands_behind_is_named() -> None:
    """Up to the end of the message the question would be a passage."""
    for text, told in (
        ("a --- b Asked: ?", "first text of --between"),
        ("From: a --- b", "second text of --between"),
        ("From: Asked:", "nothing stands between"),
    ):
        with pytest.raises(UnreadError, match=told):
            read(text)
    assert len(read("From: a --- b", between=("From:", "$")).chunks) == 2


def test_head_is_what_ours_would_have_before_the_chunks() -> None:
    """The question before the passages ends up behind them, the logged prompt has it before."""
    one, other = (read(SYSTEM, f"{q} From: a --- b Asked:") for q in ("Who?", "Where?"))
    assert one.head == other.head == digest("\0".join(["", "", "system\0Answer."]))
    assert logged(one).text_front != logged(other).text_front
    assert logged(one).question != logged(other).question
    in_system = {"role": "system", "content": "Answer. From: a --- b Asked: below."}
    first, second = (read(in_system, question) for question in ("Who?", "Where?"))
    assert first.head == second.head
    assert logged(first).question == digest("Who?")


def test_history_is_the_conversations_if_it_has_an_id() -> None:
    """Otherwise it stands before the chunks, as in SGLang's prompt."""
    turns = [
        "Hello",
        {"role": "assistant", "content": "From: x Asked:"},
        "From: a --- b Asked: Who?",
    ]
    named = read(SYSTEM, *turns, metadata={"session_id": 7})
    assert (named.conversation, named.head) == ("7", read(SYSTEM, turns[-1]).head)
    assert read(SYSTEM, *turns).head != named.head


def test_tools_models_and_tenants_have_heads_of_their_own() -> None:
    text = "From: a --- b Asked: Who?"
    fields: list[dict[str, Any]] = [{}, {"model": "m"}, {"tools": [{"x": 1}]}, {"cache_salt": "t"}]
    requests = [read(SYSTEM, text, **each) for each in fields]
    assert len({each.head for each in requests}) == 4
    assert logged(requests[3]).front == requests[0].head


def test_times_ids_ranks_and_scores_are_left_out() -> None:
    """What a clock, a counter or a retriever has written; nothing else."""
    times = ["Monday, 3 March 2026 10:04 PM", "Tuesday, 4 May 2026 9:59 am"]
    ids = ["7f9c24e5-1d2b-4c3a-8b7e-0123456789ab", "12345678-1234-4321-8765-ba9876543210"]
    fronts = [
        logged(
            read(
                f"It is {time}, user Ann{n}, {name}. From: a Asked: ?",
                {"role": "user", "content": "From: a Asked:"},
                user=f"Ann{n}",
            )
        )
        for n, (time, name) in enumerate(zip(times, ids, strict=True))
    ]
    assert fronts[0].front != fronts[1].front
    assert fronts[0].plain_front == fronts[1].plain_front
    labelled = "From: [1] boots (score: 0.83) --- Document 2: pens --- 3 pens Asked: ?"
    found = read(labelled)
    assert digest("boots") not in [chunk.id for chunk in found.chunks]
    assert [chunk.id for chunk in logged(found).plain_chunks] == [
        *map(digest, ("boots", "pens", "3 pens"))
    ]


def test_chunks_of_a_message_are_its_passages() -> None:
    """As our own clients send them."""
    asked = {"role": "user", "content": "Who?", "chunks": [{"id": "1", "text": "a"}, "b"]}
    found = read(SYSTEM, asked, "And?")
    assert [chunk.id for chunk in found.chunks] == [digest("a"), digest("b")]
    assert logged(found).text_front is None
    assert found.head == read(SYSTEM, "From: a Asked:").head
