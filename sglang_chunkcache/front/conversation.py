"""What of a conversation goes into a turn's prompt, and which chunks it has shown already.

    turns in store, their own ids | turns rendered from the request, each with its chunks | the
    question's turn the oldest leave where not everything fits, and their chunks with them

Counts tokens, tokenises what is new, and decides; `radix_ext.ConversationMap` keeps the turns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from radix_ext import (
    Chunk,
    ChunkId,
    ConversationKey,
    MessageError,
    Span,
    Turn,
    running_hashes,
)
from sglang_chunkcache.errors import RequestError, TooLongError
from sglang_chunkcache.front.prompt import (
    NO_SETTINGS,
    Area,
    Exchange,
    Piece,
    PromptAssembler,
    TemplateSettings,
    TokenizedChunk,
    exchange_ends,
    joined,
    num_opening,
    text_of,
    turn_start,
)
from sglang_chunkcache.front.tokenizer import RequestEncoder

_PROBE = "\ue000reasoning\ue001"
"""Reasoning that no model writes."""


class ClaimedHistory(NamedTuple):
    """What a request's messages say of its conversation, as running hashes."""

    num_opening: int
    """System messages in front."""
    hashes: tuple[str, ...]
    """Of all in front of the first question, and then after each message:
    equal hashes, equal histories."""
    questions: Mapping[int, tuple[str, ...]]
    """By user message hashes of less than that: of the user's messages so far; if it was answered,
    of all messages up to its answer, whatever stands in front of the first."""
    said: str
    """The latter of all messages."""

    def after(self, num_messages: int) -> str:
        """The hash of that many messages; at least the opening."""
        return self.hashes[num_messages - self.num_opening]

    @property
    def asked(self) -> tuple[str, ...]:
        """The hash of all the user's messages; none without any."""
        return self.questions[max(self.questions)][:1] if self.questions else ()

    def up_to(self, num_messages: int) -> tuple[str, ...]:
        """The hashes of up to that many messages."""
        return self.hashes[: 1 + max(0, num_messages - self.num_opening)]


class Conversation(NamedTuple):
    """What a request continues."""

    key: ConversationKey
    claimed: ClaimedHistory
    turns: tuple[Turn, ...]
    """Those in store that the messages agree with."""
    asked: Mapping[int, Turn]
    """By user message, a turn in store that tells what was shown with it: with the same answers if
    there is one, else with the same questions."""


class Past(NamedTuple):
    """What stands before the question: turns in store, then the chunks of later user messages,
    shown ones included."""

    turns: tuple[Turn, ...]
    chunks: Mapping[int, tuple[TokenizedChunk, ...]] | None
    """By message, none for those without.
    None: later messages are text alone, and part of the question's turn."""
    conversation: Conversation | None
    """None: nothing will be stored."""
    unknown: tuple[int, ...]
    """User messages with an answer of which nobody can tell what they have shown."""
    is_changed: bool
    """Chunks were sent that are not those that a turn in store has shown."""


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A conversation's turn before its answer is complete."""

    conversation: Conversation
    fitted: Fitted

    def closed(
        self,
        input_ids: Sequence[int],
        spans: Sequence[Span],
        output_ids: Sequence[int],
        *,
        content: str,
        tag: str,
    ) -> Turn:
        """The turn with its answer, under the hash of all messages, the answer included."""
        fitted, claimed = self.fitted, self.conversation.claimed
        # the client sends the whole answer back, with the beginning that came from it
        content = fitted.prompt.prefill + content
        answer = _counted({"role": "assistant", "content": content})
        (whole_hash,) = running_hashes([answer], after=claimed.hashes[-1])
        # Without the outro, which comes with the answer: later turns may show both otherwise.
        shown = self.kept(input_ids[: len(input_ids) - len(fitted.outro)], spans)
        return replace(
            shown,
            num_messages=shown.num_messages + 1,
            messages_hash=whole_hash,
            body_ids=shown.body_ids + array("i", fitted.later(output_ids, content)),
            seen=fitted.seen | shown.chunks if fitted.prompt.dedup == "paper" else frozenset(),
            tag=tag,
            found_by=(*shown.found_by, *running_hashes([answer], after=claimed.said)),
        )

    def kept(self, input_ids: Sequence[int], spans: Sequence[Span]) -> Turn:
        """What the turn has shown, whatever becomes of its answer: its prompt."""
        fitted, claimed = self.fitted, self.conversation.claimed
        lead = array("i", fitted.lead)
        start = fitted.start + len(lead)
        own = tuple(Span(s - start, e - start, chunk) for s, e, chunk in spans if s >= start)
        return Turn(
            len(fitted.prompt.messages),
            claimed.hashes[-1],
            lead,
            array("i", input_ids[start:]),
            own,
            frozenset(),
            found_by=claimed.asked,
        )

    @property
    def step(self) -> Turn | None:
        """This turn as it was kept at an earlier step, of a tool loop or before a question that
        nobody has answered. None: it has none."""
        turns, asked = self.fitted.turns, self.conversation.asked
        first = turns[-1].num_messages if turns else 0
        hashes = set(self.conversation.claimed.hashes[:-1])
        kept = (asked[i] for i in sorted(asked, reverse=True) if i >= first)
        return next((turn for turn in kept if turn.messages_hash in hashes), None)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat turn that is to fit a context of `context_len` tokens, `reserve` of which stay free
    for the answer; `dedup` and `past_reasoning` as in the configuration."""

    assembler: PromptAssembler
    context_len: int
    dedup: str
    past_reasoning: str
    messages: Sequence[Mapping[str, Any]]
    past: Past
    chunks: Sequence[TokenizedChunk]
    """Of the question."""
    settings: TemplateSettings
    encode: RequestEncoder
    prefill: str
    """Begins the answer."""
    reserve: int

    def fit(self) -> Fitted:
        """Choose what stays. All that fits does.

        Otherwise the oldest turns of a conversation leave until half of the context is free, so
        that the prefix breaks once and not every turn; CRAFT 4.3 says why that is safe. What leaves
        takes its chunks with it, which count as not shown then.
        """
        room = self.context_len - self.reserve
        whole = self._without(0)
        if not self.past.conversation or whole.num_fitting(room, with_lead=True) == whole.num_turns:
            return whole
        head_len = len(self.encode(self.assembler.head(self.messages, self.settings)))
        # What departs may have to be sent again.
        budget = min(
            self.context_len // 2 + whole.own_len,
            room - _num_tokens(self.chunks) + _num_tokens(whole.kept),
        )
        most = max(0, whole.num_fitting(budget - head_len))

        def kept(num_turns: int) -> Fitted:
            return self._without(whole.num_turns - num_turns)

        fitted = kept(most)
        if fitted.num_tokens <= room:
            return fitted
        # What stays may have to show chunks that have left with others.
        # By bisection: each try renders the prompt, and a history may have very many turns.
        fewer = bisect_right(range(most), room, key=lambda num_turns: kept(num_turns).num_tokens)
        return kept(max(0, fewer - 1))

    # Private, in order of use

    def _without(self, num_departed: int) -> Fitted:
        """The prompt after so many of the oldest turns have left."""
        messages, past = self.messages, self.past
        num_agreed = past.turns[-1].num_messages if past.turns else 0
        bounds = [
            num_agreed,
            *(exchange_ends(messages, num_agreed) if past.chunks is not None else ()),
        ]
        turns, skipped = past.turns[num_departed:], max(0, num_departed - len(past.turns))
        is_paper = self.dedup == "paper"
        # chunks of departed turns count as shown, as in the paper (CRAFT 4.3)
        seen = past.turns[-1].seen if is_paper and past.turns else frozenset[ChunkId]()
        shown = {*seen, *(chunk for turn in turns for chunk in turn.chunks)}
        unshown = dict[int, tuple[TokenizedChunk, ...]]()
        # In the order of the messages: a chunk is shown with the first of them that has it.
        own = {turn_start(messages): tuple(self.chunks)}
        for i, each in sorted({**(past.chunks or {}), **own}.items()):
            ids = {item.chunk.id for item in each}
            if i >= bounds[skipped]:
                unshown[i] = tuple(
                    item for item in each if self.dedup == "off" or item.chunk.id not in shown
                )
                shown |= ids
            elif is_paper:
                shown |= ids
                seen |= ids
        opening = messages[: num_opening(messages)]
        # messages that the template does not get, so that it shows the first of the others as such
        num_cut = 0
        if num_departed and turns:
            lead = self._first_lead(past.turns[num_departed - 1].num_messages, turns[0])
            turns = (replace(turns[0], lead_ids=array("i", lead)), *turns[1:])
        elif num_departed:
            num_cut, num_agreed = bounds[skipped] - len(opening), 0
        exchanges = self.assembler.exchanges(
            [*opening, *messages[len(opening) + num_cut :]] if num_cut else messages,
            num_agreed=num_agreed,
            with_chunks={i - num_cut for i, each in unshown.items() if each},
            is_split=past.chunks is not None,
            settings=self.settings,
        )
        # without an exchange `bounds[-1]` is 0, and the opening would be there twice
        last = [*opening, *messages[max(bounds[-1], len(opening)) :]]
        stay = [one.moved(num_cut) for one in (exchanges if num_cut else exchanges[skipped:])]
        return Fitted(self, turns, stay, unshown, seen, last, num_departed)

    def _first_lead(self, start: int, turn: Turn) -> tuple[int, ...]:
        """What a turn in store begins with when the messages before `start` have left: the head,
        and what it had in its lead of messages that nobody has answered."""
        messages, question = self.messages, turn_start(self.messages[: turn.num_messages])
        between = [*messages[start:question]]
        if not between or str(text_of(between[-1], 0)) not in self.assembler.tokenizer.decode(
            turn.lead_ids
        ):
            return self.encode(self.assembler.head(messages, self.settings))
        asked = [*messages[: num_opening(messages)], *between, messages[question]]
        (one,) = self.assembler.exchanges(asked, settings=self.settings)
        return self.encode(one.lead)


class Fitted:
    """A turn laid out: texts, of which each is encoded when its length is asked for.

    Args:
        stored: earlier turns in store that stay.
        exchanges: those after them that stay, then the question's.
        unshown: chunks that are to be shown, by message.
        seen: chunks of all earlier turns up to the exchanges; none unless with
            `--chunkcache-dedup paper`, which alone reads them.
        messages: the question's, behind the opening.
    """

    def __init__(
        self,
        prompt: ChatPrompt,
        stored: tuple[Turn, ...],
        exchanges: Sequence[Exchange],
        unshown: Mapping[int, tuple[TokenizedChunk, ...]],
        seen: frozenset[ChunkId],
        messages: Sequence[Mapping[str, Any]],
        num_departed: int,
    ) -> None:
        self.prompt, self.num_departed = prompt, num_departed
        self._stored, self._unshown, self._seen, self._messages = stored, unshown, seen, messages
        *self._exchanges, self._open = exchanges
        *before, area = self._open.areas
        encode = prompt.encode
        self.kept = unshown[area.message]
        """Its chunks that the conversation has not shown yet."""
        self.intro: tuple[Piece, ...] = (*self._body(before), (encode(area.intro), None))
        """Its text before these, with the chunks of user messages that nobody has answered."""
        # apart, as SGLang's `_append_assistant_prefix_to_prompt_ids` does
        self.outro = (*encode(area.ending), *(encode(prompt.prefill) if prompt.prefill else ()))

    @property
    def num_reused(self) -> int:
        """Of `turns`: those in store."""
        return len(self._stored)

    @property
    def num_turns(self) -> int:
        """Before the question's."""
        return self.num_reused + len(self._exchanges)

    @property
    def own_len(self) -> int:
        """Tokens of the question's turn after its lead."""
        return sum(len(ids) for ids, _ in self.intro) + _num_tokens(self.kept) + len(self.outro)

    def num_fitting(self, room: int, *, with_lead: bool = False) -> int:
        """How many of the newest turns fit into that many tokens beside the question's. -1: not
        even that. `with_lead`: and beside what joins it to the turn before."""
        fits = -1
        with suppress(TooLongError):
            for length in self._lens(with_lead=with_lead):
                room -= length
                if room < 0:
                    break
                fits += 1
        return fits

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The turns before the question's."""
        turns, seen, conversation = list(self._stored), self._seen, self.prompt.past.conversation
        for exchange in self._exchanges:
            lead = array("i", self._after(turns, exchange.lead))
            body, spans = joined((), self._pieces(exchange))
            if self.prompt.dedup == "paper":
                seen |= {span.chunk for span in spans}
            turn = Turn(exchange.num_messages, "", lead, body, spans, seen)
            if conversation:
                claimed, question = conversation.claimed, exchange.areas[-1].message
                kept = conversation.asked.get(question)
                # Its KV is of this very history; a turn is kept without its answer.
                is_same = kept and kept.messages_hash == claimed.after(turn.num_messages - 1)
                turn = replace(
                    turn,
                    messages_hash=claimed.after(turn.num_messages),
                    found_by=claimed.questions[question],
                    home=kept.home if kept and is_same else None,
                )
            turns.append(turn)
        return tuple(turns)

    @property
    def lead(self) -> tuple[int, ...]:
        """What joins the question's turn to these."""
        return self._after(self.turns, self._open.lead)

    @property
    def seen(self) -> frozenset[ChunkId]:
        """Chunks of all earlier turns, if they are read."""
        return self.turns[-1].seen if self.turns else self._seen

    @property
    def start(self) -> int:
        """Of the turn in its prompt, in tokens: behind the earlier ones."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return self.start + len(self.lead) + self.own_len

    def before_chunks(self) -> tuple[array[int], tuple[Span, ...]]:
        """Token ids up to the turn's first chunk, and the earlier turns' chunks in them."""
        ids, spans = array("i"), list[Span]()
        for turn in self.turns:
            offset = len(ids) + len(turn.lead_ids)
            ids.extend(turn.lead_ids)
            ids.extend(turn.body_ids)
            spans += [Span(s + offset, e + offset, chunk) for s, e, chunk in turn.spans]
        ids.extend(self.lead)
        ids, own = joined(ids, self.intro)
        return ids, (*spans, *own)

    def later(self, output_ids: Sequence[int], content: str) -> Sequence[int]:
        """The ids of all behind the turn's last chunk, as later turns show it, from the answer's
        ids and its text: question and answer by the chat template where that is less than what was
        generated, since it leaves out reasoning. Elsewhere what was generated."""
        given = (*self.outro, *output_ids)
        encode, decode = self.prompt.encode, self.prompt.assembler.tokenizer.decode
        # an answer that comes last was shown as a user's
        is_shown_as_answer = self._messages[-1].get("role") != "assistant"
        if self.prompt.past_reasoning != "template" or not is_shown_as_answer:
            return given

        def num_visible(ids: Sequence[int]) -> int:
            return len("".join(decode(ids, with_special=False).split()))

        try:
            one, after = self._shown_later(content=content)
            ending, end = encode(one.areas[-1].ending), encode(after.lead)[:1]
            ids = output_ids[:-1] if tuple(output_ids[-1:]) == end else output_ids
            if ending == self.outro and one.answer.strip() == decode(ids).strip():
                return given
            shown_later = (*ending, *encode(one.answer))
            # No less is shown later, so the template leaves no reasoning out.
            if num_visible(shown_later) >= num_visible((*self.outro, *ids)):
                return given
            probed, _ = self._shown_later(content=content, reasoning_content=_PROBE)
        except ValueError:  # an empty answer, or a template that refuses the two
            return given
        # where the client sends it back
        is_kept = _PROBE in probed.areas[-1].ending + probed.answer
        return given if is_kept else shown_later

    # Private, in order of use

    def _lens(self, *, with_lead: bool) -> Iterator[int]:
        """Tokens of the question's turn, then of those before it, the newest first."""
        encode = self.prompt.encode
        yield self.own_len + (len(encode(self._open.lead)) if with_lead else 0)
        for exchange in reversed(self._exchanges):
            yield len(encode(exchange.lead)) + sum(len(ids) for ids, _ in self._pieces(exchange))
        yield from (turn.num_tokens for turn in reversed(self._stored))

    def _body(self, areas: Sequence[Area]) -> Iterator[Piece]:
        for area in areas:
            yield self.prompt.encode(area.intro), None
            for item in self._unshown.get(area.message, ()):
                yield item.token_ids, item.chunk.id
            yield self.prompt.encode(area.ending), None

    def _pieces(self, exchange: Exchange) -> list[Piece]:
        return [*self._body(exchange.areas), (self.prompt.encode(exchange.answer), None)]

    def _after(self, turns: Sequence[Turn], text: str) -> tuple[int, ...]:
        """A lead's ids behind these turns.
        An answer that ended with the token that the template puts after it has it once."""
        lead = self.prompt.encode(text)
        is_there = lead and turns and turns[-1].body_ids[-1:] == array("i", lead[:1])
        return lead[1:] if is_there else lead

    def _shown_later(self, **answer: str) -> list[Exchange]:
        return self.prompt.assembler.exchanges(
            [*self._messages, {"role": "assistant", **answer}, {"role": "user", "content": "?"}],
            with_chunks={turn_start(self._messages)} if self.kept else (),
            is_split=True,
            settings=self.prompt.settings,
        )


def claimed_history(
    messages: Sequence[Mapping[str, Any]], settings: TemplateSettings = NO_SETTINGS
) -> ClaimedHistory:
    """Running hashes of all that shapes a history: its settings, then each message. Answers count
    without their reasoning and without white space around them: clients send back more or less than
    the server wrote. Raises RequestError."""
    # at most all but one: the last message is the question, even if it is a system message
    start = min(num_opening(messages), max(0, len(messages) - 1))
    questions, question = dict[int, tuple[str, ...]](), 0
    asked = said = ""
    try:
        counted = [
            _counted({**each, "content": text_of(each, i)}) for i, each in enumerate(messages)
        ]
        # no message has this role, so none hashes like a head
        head = {"role": "\0head", **settings._asdict(), "messages": counted[:start]}
        hashes = running_hashes([head, *counted[start:]])
        for i, message in enumerate(counted[start:], start):
            (said,) = running_hashes([message], after=said)
            if message.get("role") == "user":
                (asked,) = running_hashes([{"content": _stripped(message["content"])}], after=asked)
                questions[question := i] = (asked,)
            elif message.get("role") == "assistant" and questions:
                # the last answer's hash alone: those before it are steps of a tool loop
                questions[question] = (*questions[question][:1], said)
    except MessageError as error:
        raise RequestError(f"messages: {error}") from None
    return ClaimedHistory(start, hashes, questions, said)


def history_of(
    messages: Sequence[Mapping[str, Any]],
    conversation: Conversation | None,
    sent: Mapping[int, tuple[TokenizedChunk, ...]],
    *,
    is_question_known: bool = True,
) -> Past:
    """What the messages before the question have shown: by turns in store, by the chunks that came
    with them (`sent`), by what turns in store say that was shown with them. `is_question_known`:
    whether the question's own chunks are."""
    turns, asked = (conversation.turns, conversation.asked) if conversation else ((), {})
    sent_ids = {i: frozenset(item.chunk.id for item in items) for i, items in sent.items()}
    place, first, is_changed = turn_start(messages), 0, False
    earlier = set[ChunkId]()  # shown or sent with the messages before

    def is_shown(turn: Turn, ids: frozenset[ChunkId]) -> bool:
        """Whether these are what the turn has shown, apart from what was shown before it."""
        return ids - turn.chunks - turn.seen <= earlier and turn.chunks - ids <= earlier

    ends = exchange_ends(messages, 0) if turns else []
    for n, turn in enumerate(turns):
        question = turn_start(messages[: turn.num_messages])
        # A history may begin in mid-conversation: its first turn then follows an exchange.
        start = first or max((end for end in ends if end <= question), default=0)
        earlier.update(*(sent_ids[i] for i in range(first, start) if i in sent_ids))
        users = [i for i in range(start, turn.num_messages) if messages[i].get("role") == "user"]
        ids = frozenset[ChunkId]().union(*(sent_ids[i] for i in users if i in sent))
        is_whole = all(i in sent for i in users)
        if any(i in sent for i in users) and not is_shown(
            turn, ids if is_whole else ids | turn.chunks
        ):
            # the turns after it are cached behind what it had shown
            turns, is_changed = turns[:n], True
            break
        earlier |= turn.chunks | ids
        first = turn.num_messages
    chunks = dict[int, tuple[TokenizedChunk, ...]]()
    unknown, unanswered = list[int](), list[int]()
    for i in range(first, place):
        role = messages[i].get("role")
        if role == "user":
            unanswered.append(i)
            if i in sent:
                chunks[i] = sent[i]
                is_changed = is_changed or (i in asked and not is_shown(asked[i], sent_ids[i]))
            elif i in asked:
                chunks[i] = chunks_of(asked[i])
            earlier.update(item.chunk.id for item in chunks.get(i, ()))
        elif role == "assistant":
            unknown += [question for question in unanswered if question not in chunks]
            unanswered = []
    if not is_question_known:
        unknown.append(place)
    is_known = conversation is not None or any(i < place for i in sent)
    return Past(turns, chunks if is_known else None, conversation, tuple(unknown), is_changed)


def chunks_of(turn: Turn) -> tuple[TokenizedChunk, ...]:
    """What a turn has shown."""
    return tuple(
        TokenizedChunk(
            Chunk(span.chunk, span.end - span.start), turn.body_ids[span.start : span.end]
        )
        for span in turn.spans
    )


# Private, in order of use


def _counted(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What of a message says which history it belongs to."""
    if message.get("role") != "assistant":
        return message
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**others, "content": _stripped(message.get("content"))}


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _num_tokens(chunks: Sequence[TokenizedChunk]) -> int:
    return sum(item.chunk.num_tokens for item in chunks)
