"""Conversations: agreement by hashes, edits, retries, branches, two at once, overflow, bounds,
guessed keys."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import (
    ChunkId,
    ConversationKey,
    ConversationMap,
    MessageError,
    Span,
    Turn,
    running_hashes,
)

KEY = ConversationKey("key", "", "", "c1")
Messages = list[dict[str, object]]


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def make_map(
    *, max_conversations: int = 10, max_tokens: int = 100_000, idle_s: float = 60
) -> ConversationMap:
    return ConversationMap(
        max_conversations=max_conversations, max_tokens=max_tokens, idle_s=idle_s
    )


def asked_hash(messages: Messages) -> str:
    """Of the questions among them."""
    return running_hashes([message for message in messages if message["role"] == "user"])[-1]


def make_turn(
    messages: Messages, *, chunks: str = "", seen: str = "", num_tokens: int = 10
) -> Turn:
    """A turn whose answer is the last of `messages`; one token of its tokens is the lead."""
    return Turn(
        num_messages=len(messages),
        messages_hash=running_hashes(messages)[-1],
        lead_ids=array("i", [0]),
        body_ids=array("i", range(num_tokens - 1)),
        spans=tuple(Span(i, i + 1, ChunkId(name)) for i, name in enumerate(chunks)),
        seen=frozenset(map(ChunkId, seen or chunks)),
        found_by=(asked_hash(messages),),
    )


HEAD = "00"  # the hash of a system prompt


def hashes_of(messages: Messages, head: str = HEAD) -> tuple[str, ...]:
    return (head, *running_hashes(messages))


DIALOGUE: Messages = [user("q1"), answer("a1"), user("q2"), answer("a2"), user("q3")]
TURN_1, TURN_2 = (
    make_turn(DIALOGUE[:2], chunks="abc"),
    make_turn(DIALOGUE[:4], chunks="d", seen="abcd"),
)


@pytest.fixture
def conversations() -> ConversationMap:
    """Two turns finished, at times 0 and 1."""
    stored = make_map()
    stored.finish(KEY, HEAD, (), TURN_1, 0)
    stored.finish(KEY, HEAD, (TURN_1,), TURN_2, 1)
    return stored


def agree(
    stored: ConversationMap, messages: Messages, *, key: ConversationKey = KEY, now: float = 2
) -> tuple[Turn, ...]:
    return stored.agree(key, hashes_of(messages), now)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (DIALOGUE, (TURN_1, TURN_2)),
        (DIALOGUE[:1], ()),  # begun anew under a known id
        (DIALOGUE[:3], (TURN_1,)),  # turn 2 again: its old answer must not be in the prompt
        ([user("q1, edited"), *DIALOGUE[1:]], ()),
        ([*DIALOGUE[:3], answer("a2, edited"), user("q3")], (TURN_1,)),
    ],
    ids=["next turn", "first", "retry", "early edit", "late edit"],
)
def test_turns_agree_up_to_the_first_message_that_differs(
    conversations: ConversationMap, messages: Messages, expected: tuple[Turn, ...]
) -> None:
    """Asking changes nothing: a turn that was aborted is simply not finished."""
    for _ in range(2):
        assert agree(conversations, messages) == expected


def test_two_turns_at_once_are_both_kept(conversations: ConversationMap) -> None:
    """Both start from the last finished turn; neither sees the other's tokens."""
    base = agree(conversations, DIALOGUE)
    for text in ("first", "second"):
        conversations.finish(KEY, HEAD, base, make_turn([*DIALOGUE, answer(text)]), 3)
    for text in ("first", "second"):
        messages = [*DIALOGUE, answer(text)]
        assert agree(conversations, [*messages, user("q4")], now=5) == (*base, make_turn(messages))


def test_history_without_its_oldest_turns_still_agrees() -> None:
    """After overflow turn 1 has left: turn 2 is judged by its own hash,
    which covers turn 1's messages."""
    stored = make_map()
    stored.finish(KEY, HEAD, (), TURN_2, 0)
    assert agree(stored, DIALOGUE) == (TURN_2,)
    assert agree(stored, [user("else"), *DIALOGUE[1:]]) == ()


@pytest.mark.parametrize("field", ConversationKey._fields)
def test_guessed_conversation_id_reads_nothing(conversations: ConversationMap, field: str) -> None:
    """Another API key, salt or extra key is another conversation,
    even with the very same messages."""
    assert agree(conversations, DIALOGUE, key=KEY._replace(**{field: "guess"})) == ()


def test_other_messages_under_the_same_id_take_nothing(conversations: ConversationMap) -> None:
    """A hundred strangers, and one who says what the owner said first, with another chunk."""
    for number in range(100):
        theirs = [user(f"x{number}"), answer("y")]
        conversations.finish(KEY, HEAD, (), make_turn(theirs), 2)
    theirs = [*DIALOGUE[:2], user("else"), answer("z")]
    conversations.finish(KEY, HEAD, (), make_turn(DIALOGUE[:2], chunks="x"), 2)
    conversations.finish(KEY, HEAD, agree(conversations, theirs), make_turn(theirs), 2)
    assert agree(conversations, DIALOGUE) == (TURN_1, TURN_2)
    own, others = agree(conversations, DIALOGUE), agree(conversations, theirs)
    assert [turn.chunks for turn in own] == [set("abc"), {"d"}]
    assert [turn.chunks for turn in others] == [{"x"}, set()]
    assert len(conversations) == 1


def test_overflow_goes_on_from_the_turns_that_stayed(conversations: ConversationMap) -> None:
    """The first turn that stays has a new lead.
    A retry from before goes on from what stayed, too."""
    stayed = replace(TURN_2, lead_ids=array("i", [7, 7, 7]))
    third = make_turn([*DIALOGUE, answer("a3")])
    conversations.finish(KEY, HEAD, (stayed,), third, 2)
    assert agree(conversations, [*DIALOGUE, answer("a3"), user("q4")]) == (stayed, third)
    assert agree(conversations, DIALOGUE) == (stayed,)


def test_least_recently_used_conversation_goes_first() -> None:
    """Bounded in conversations."""
    stored = make_map(max_conversations=2)
    keys = [KEY._replace(conversation_id=name) for name in "abc"]
    stored.finish(keys[0], HEAD, (), TURN_1, 0)
    stored.finish(keys[1], HEAD, (), TURN_1, 1)
    agree(stored, DIALOGUE, key=keys[0])
    stored.finish(keys[2], HEAD, (), TURN_1, 3)
    assert [bool(agree(stored, DIALOGUE, key=key, now=4)) for key in keys] == [True, False, True]
    assert len(stored) == 2


def test_tokens_in_store_are_bounded() -> None:
    """Two turns and a half in all: the third conversation pushes out the first;
    one too large is not kept."""
    plain, later = make_turn(DIALOGUE[:2]), make_turn(DIALOGUE[:4])
    stored = make_map(max_tokens=plain.cost * 5 // 2)
    keys = [KEY._replace(conversation_id=name) for name in "abc"]
    for now, key in enumerate(keys):
        stored.finish(key, HEAD, (), plain, now)
        assert stored.num_tokens <= stored.max_tokens
    assert [bool(agree(stored, DIALOGUE, key=key, now=3)) for key in keys] == [False, True, True]
    stored.finish(keys[2], HEAD, (plain, later), make_turn([*DIALOGUE, answer("a3")]), 4)
    assert (len(stored), stored.num_tokens) == (2, 2 * plain.cost)


def test_spans_and_seen_chunks_weigh_in() -> None:
    """Many tiny chunks cost more in objects than in tokens: the bound counts them."""
    assert TURN_1.cost > make_turn(DIALOGUE[:2]).cost + 10 * TURN_1.num_tokens
    stored = make_map(max_tokens=TURN_1.num_tokens)
    stored.finish(KEY, HEAD, (), TURN_1, 0)
    stored.keep(KEY, TURN_1, 0)
    assert (len(stored), stored.num_turns, stored.num_tokens) == (0, 0, 0)


def test_idle_conversations_are_forgotten() -> None:
    """Kept up to idle_s since the last use, not longer."""
    stored = make_map(idle_s=60)
    stored.finish(KEY, HEAD, (), TURN_1, 0)
    assert [bool(agree(stored, DIALOGUE, now=now)) for now in (60, 120, 180.5)] == [1, 1, 0]
    assert (len(stored), stored.num_tokens) == (0, 0)


steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from("xyz"), min_size=1, max_size=4)),
    max_size=40,
)


@given(steps=steps, max_conversations=st.integers(1, 3), max_turns=st.integers(1, 12))
def test_histories_equal_a_map_that_forgets_nothing(
    steps: list[tuple[str, list[str]]], max_conversations: int, max_turns: int
) -> None:
    """With room the same histories; without it only what the messages say, within the bounds."""
    roomy = make_map()
    tight = make_map(
        max_conversations=max_conversations, max_tokens=max_turns * make_turn(DIALOGUE[:2]).cost
    )
    # by conversation and all of its words
    histories: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    for now, (name, words) in enumerate(steps):
        key = KEY._replace(conversation_id=name)
        messages = [message for word in words for message in (user(word), answer(word))]
        before = [histories.get((name, tuple(words[:number])), ()) for number in range(len(words))]
        expected = next((history for history in reversed(before) if history), ())
        turn = make_turn(messages)
        for stored in (roomy, tight):
            base = agree(stored, messages[:-1], key=key, now=now)
            found = tuple(each.messages_hash for each in base)
            assert found == (
                expected
                if stored is roomy
                else tuple(hash for hash in running_hashes(messages) if hash in found)
            )
            stored.finish(key, HEAD, base, turn, now)
            assert stored.num_tokens <= stored.max_tokens
            assert len(stored) <= stored.max_conversations
        histories[name, tuple(words)] = (*expected, turn.messages_hash)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (DIALOGUE[:1] + DIALOGUE[2:3], DIALOGUE[1:3], False),  # all before it counts
        ([user("ab"), user("c")], [user("a"), user("bc")], False),
        ([user("a")], [answer("a")], False),
        ([answer("a") | {"tool_calls": [{"id": "1"}]}], [answer("a")], False),
        # clients send an answer back with null fields, and in their own order
        ([{"refusal": None, "tool_calls": [], "content": "a", "role": "user"}], [user("a")], True),
        ([user("\ud800 é")], [user("\ud800 é")], True),
    ],
)
def test_hashes_tell_histories_apart(one: Messages, other: Messages, is_same: bool) -> None:
    assert (running_hashes(one)[-1] == running_hashes(other)[-1]) is is_same


@pytest.mark.parametrize(
    "message", ["text", {"role": "user", "content": {1, 2}}, {"role": "user", "content": b"x"}]
)
def test_message_that_is_no_json_is_refused(message: dict[str, object]) -> None:
    """The edge can name the message."""
    with pytest.raises(MessageError, match="message 1"):
        running_hashes([user("fine"), message])


# Questions, heads, and what can no longer be found


def test_turn_is_found_by_its_questions(conversations: ConversationMap) -> None:
    """Whatever was answered, and behind any head:
    that says what its user was shown, and gives no tokens to continue from."""
    other = [DIALOGUE[0], answer("another answer"), DIALOGUE[2]]
    hashes = [asked_hash(other[:n]) for n in (1, 3)]
    assert conversations.found(KEY, hashes, 2) == (TURN_1, TURN_2)
    assert conversations.found(KEY, [asked_hash([user("q2")])], 2) == (None,)
    assert conversations.found(KEY._replace(tenant="x"), hashes, 2) == (None, None)
    assert conversations.agree(KEY, hashes_of(other, head="11"), 2) == ()


def test_turn_without_an_answer_is_found_by_its_questions_alone(
    conversations: ConversationMap,
) -> None:
    """It was stopped: it shows nothing else, and takes no other turn's place but that of the same
    questions."""
    stopped = replace(make_turn(DIALOGUE, chunks="e"), messages_hash="")
    conversations.keep(KEY, stopped, 3)
    assert conversations.found(KEY, [asked_hash(DIALOGUE)], 3) == (stopped,)
    assert agree(conversations, DIALOGUE) == (TURN_1, TURN_2)
    finished = make_turn([*DIALOGUE, answer("a3")], chunks="f")
    conversations.finish(KEY, HEAD, (TURN_1, TURN_2), finished, 4)
    assert conversations.found(KEY, [asked_hash(DIALOGUE)], 4) == (finished,)
    assert conversations.num_turns == 3


def test_heads_of_a_conversation_are_bounded() -> None:
    """The time in a system prompt: each turn stores all turns before it behind a new head.
    The four used last stay."""
    stored = make_map()
    heads = [f"{i:02x}" for i in range(1, 9)]
    for now, head in enumerate(heads):
        stored.finish(KEY, head, (), TURN_1, now)
        stored.agree(KEY, hashes_of(DIALOGUE, head=heads[0]), now)
    known = [head for head in heads if stored.agree(KEY, hashes_of(DIALOGUE, head=head), 9)]
    assert known == [heads[0], *heads[-3:]]
    assert stored.num_turns == 4


lives = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(["00", "11", "22", "33", "44", "55"]),
        st.lists(st.sampled_from("xyz"), min_size=1, max_size=4),
        st.sampled_from(["finish", "keep", "shorten"]),
    ),
    max_size=40,
)


@given(steps=lives, max_turns=st.integers(2, 30))
def test_what_is_stored_is_counted_and_found(
    steps: list[tuple[str, str, list[str], str]], max_turns: int
) -> None:
    """After any life: the tokens in store are those of its turns, each can be found,
    and all that is found agrees."""
    stored = make_map(
        max_conversations=2, max_tokens=max_turns * make_turn(DIALOGUE[:2]).cost, idle_s=20
    )
    for now, (name, head, words, step) in enumerate(steps):
        key = KEY._replace(conversation_id=name)
        messages = [message for word in words for message in (user(word), answer(word))]
        base = stored.agree(key, hashes_of(messages[:-1], head), now)
        assert {turn.messages_hash for turn in base} <= set(running_hashes(messages))
        if step == "keep":
            stored.keep(key, replace(make_turn(messages), messages_hash=""), now)
        else:
            if step == "shorten" and base:
                base = (replace(base[-1], lead_ids=array("i", [7, now])),)
            stored.finish(key, head, base, make_turn(messages), now)
        turns = [each.turn for each in stored._by_use]
        assert stored.num_tokens == sum(turn.cost for turn in turns) <= stored.max_tokens
        found = {
            id(each)
            for conversation in stored._found.values()
            for turns_of in [*conversation.by_head.values(), conversation.found_by]
            for last in turns_of.values()
            for each in last.path()
        }
        assert found == {id(each) for each in stored._by_use}
