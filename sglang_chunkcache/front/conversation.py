"""What of a conversation goes into a turn's prompt, and which chunks it has shown already.

    turns in store, their own ids | turns rendered from the request, each with its chunks | the
    question's turn the oldest leave where not everything fits, and their chunks with them

Counts tokens, tokenises what is new, and decides; `radix_ext.ConversationMap` keeps the turns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from radix_ext import (
    Chunk,
    ChunkId,
    ConversationKey,
    Home,
    MessageError,
    Span,
    Turn,
    keep_recent,
    running_hashes,
    shown,
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

Later = Callable[[Sequence[int], str], Sequence[int]]
"""From an answer's ids and its text to the ids of all behind the turn's last chunk,
as later turns show it."""


_PROBE = "\ue000reasoning\ue001"
"""Reasoning that no model writes."""


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What shapes a chat prompt besides its messages. `reserve` tokens stay free for the answer;
    `may_shorten` says whether old turns may be left out, which only a conversation has asked for;
    `encode` is the request's. `prefill` begins the answer."""

    settings: TemplateSettings
    reserve: int
    may_shorten: bool
    encode: RequestEncoder
    prefill: str


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


@dataclass(frozen=True, slots=True)
class Past:
    """What stands before the question: turns in store, then the chunks of later user messages,
    shown ones included."""

    turns: tuple[Turn, ...] = ()
    chunks: Mapping[int, tuple[TokenizedChunk, ...]] | None = None
    """By message, none for those without.
    None: later messages are text alone, and part of the question's turn."""
    claimed: ClaimedHistory | None = None
    """None: no conversation, so nothing will be stored."""
    asked: Mapping[int, Turn] = field(default_factory=dict)
    """As the conversation has it."""
    unknown: tuple[int, ...] = ()
    """User messages with an answer of which nobody can tell what they have shown."""
    is_changed: bool = False
    """Chunks were sent that are not those that a turn in store has shown."""

    @property
    def num_messages(self) -> int:
        """That the turns in store cover."""
        return self.turns[-1].num_messages if self.turns else 0


class Fitted(NamedTuple):
    """A turn that fits the context."""

    turns: tuple[Turn, ...]
    """Earlier turns that stay."""
    lead: tuple[int, ...]
    """What joins it to these."""
    intro: tuple[Piece, ...]
    """Its text before its chunks, with the chunks of user messages that nobody has answered."""
    outro: tuple[int, ...]
    kept: tuple[TokenizedChunk, ...]
    """Its chunks that the conversation has not shown yet."""
    num_departed: int
    """Turns left out."""
    num_reused: int
    """Of `turns`: those in store."""
    seen: frozenset[ChunkId] | None
    """Chunks of all earlier turns.
    None where departed turns do not matter: only `--chunkcache-dedup paper` reads them."""
    later: Later

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        texts = sum(len(ids) for ids in (self.lead, *(ids for ids, _ in self.intro), self.outro))
        return texts + sum(turn.num_tokens for turn in self.turns) + _num_tokens(self.kept)


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A conversation's turn before its answer is complete."""

    key: ConversationKey
    claimed: ClaimedHistory
    fitted: Fitted
    num_messages: int
    """The answer comes after that many."""
    prefill: str
    """The client's beginning of the answer; the client sends the whole back."""
    step: Turn | None
    """This turn as it was kept at an earlier step, of a tool loop or before a question that nobody
    has answered. None: it has none."""

    @property
    def start(self) -> int:
        """Of the turn in its prompt, in tokens: behind the earlier ones."""
        return sum(turn.num_tokens for turn in self.fitted.turns)

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
        seen, content = self.fitted.seen, self.prefill + content
        answer = _counted({"role": "assistant", "content": content})
        (whole_hash,) = running_hashes([answer], after=self.claimed.hashes[-1])
        # Without the outro, which comes with the answer: later turns may show both otherwise.
        shown = self.kept(input_ids[: len(input_ids) - len(self.fitted.outro)], spans)
        return replace(
            shown,
            num_messages=self.num_messages + 1,
            messages_hash=whole_hash,
            body_ids=shown.body_ids + array("i", self.fitted.later(output_ids, content)),
            seen=frozenset() if seen is None else seen | shown.chunks,
            tag=tag,
            found_by=(*shown.found_by, *running_hashes([answer], after=self.claimed.said)),
        )

    def kept(self, input_ids: Sequence[int], spans: Sequence[Span]) -> Turn:
        """What the turn has shown, whatever becomes of its answer: its prompt."""
        lead = array("i", self.fitted.lead)
        start = self.start + len(lead)
        own = tuple(Span(s - start, e - start, chunk) for s, e, chunk in spans if s >= start)
        return Turn(
            self.num_messages,
            self.claimed.hashes[-1],
            lead,
            array("i", input_ids[start:]),
            own,
            frozenset(),
            found_by=self.claimed.asked,
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
            _counted({**message, "content": text_of(message, i)})
            for i, message in enumerate(messages)
        ]
        head = {
            # no message has this role, so none hashes like a head
            "role": "\0head",
            "tools": settings.tools,
            "kwargs": settings.kwargs,
            "messages": counted[:start],
        }
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


class TurnFitter:
    """Fits turns into a context of `context_len` tokens;
    `dedup` and `past_reasoning` as in the configuration."""

    def __init__(
        self, assembler: PromptAssembler, *, context_len: int, dedup: str, past_reasoning: str
    ) -> None:
        self._assembler, self._context_len, self._dedup = assembler, context_len, dedup
        self._drops_reasoning = past_reasoning == "template"

    def fit(
        self,
        messages: Sequence[Mapping[str, Any]],
        past: Past,
        chunks: Sequence[TokenizedChunk],
        context: PromptContext,
    ) -> Fitted:
        """Choose what stays. All that fits does.

        Otherwise the oldest turns leave until half of the context is free, so that the prefix
        breaks once and not every turn; CRAFT 4.3 says why that is safe. What leaves takes its
        chunks with it, which count as not shown then.
        """
        room = self._context_len - context.reserve
        lay = partial(self._laid, messages, past, chunks, context)
        laid = lay(num_departed=0)
        if not context.may_shorten or laid.num_fitting(room, with_lead=True) == laid.num_turns:
            return self._fitted(laid)
        head_len = len(context.encode(self._assembler.head(messages, context.settings)))
        # What departs may have to be sent again.
        budget = min(
            self._context_len // 2 + laid.own_len,
            room - _num_tokens(chunks) + _num_tokens(laid.own),
        )
        most = max(0, laid.num_fitting(budget - head_len))

        def kept(num_turns: int) -> Fitted:
            return self._fitted(lay(num_departed=laid.num_turns - num_turns))

        fitted = kept(most)
        if fitted.num_tokens <= room:
            return fitted
        # What stays may have to show chunks that have left with others.
        # By bisection: each try renders the prompt, and a history may have very many turns.
        fewer = bisect_right(range(most), room, key=lambda num_turns: kept(num_turns).num_tokens)
        return kept(max(0, fewer - 1))

    # Private, in order of use

    def _laid(
        self,
        messages: Sequence[Mapping[str, Any]],
        past: Past,
        chunks: Sequence[TokenizedChunk],
        context: PromptContext,
        *,
        num_departed: int,
    ) -> _Laid:
        num_agreed, place = past.num_messages, turn_start(messages)
        bounds = [
            num_agreed,
            *(exchange_ends(messages, num_agreed) if past.chunks is not None else ()),
        ]
        turns, skipped = past.turns[num_departed:], max(0, num_departed - len(past.turns))
        is_paper = self._dedup == "paper"
        shown_chunks = set(shown(past.turns, "paper") if is_paper else shown(turns, "kept"))
        seen, unshown = frozenset(shown_chunks), dict[int, tuple[TokenizedChunk, ...]]()
        # In the order of the messages: a chunk is shown with the first of them that has it.
        for i, each in sorted({**(past.chunks or {}), place: tuple(chunks)}.items()):
            ids = {item.chunk.id for item in each}
            if i >= bounds[skipped]:
                unshown[i] = tuple(
                    item
                    for item in each
                    if self._dedup == "off" or item.chunk.id not in shown_chunks
                )
                shown_chunks |= ids
            # chunks of departed turns count as shown, as in the paper
            elif is_paper:
                shown_chunks |= ids
                seen |= ids
        opening = messages[: num_opening(messages)]
        # messages that the template does not get, so that it shows the first of the others as such
        num_cut = 0
        if num_departed and turns:
            lead = self._first_lead(
                messages, past.turns[num_departed - 1].num_messages, turns[0], context
            )
            turns = (replace(turns[0], lead_ids=array("i", lead)), *turns[1:])
        elif num_departed:
            num_cut, num_agreed = bounds[skipped] - len(opening), 0
        exchanges = self._assembler.exchanges(
            [*opening, *messages[len(opening) + num_cut :]] if num_cut else messages,
            num_agreed=num_agreed,
            with_chunks={i - num_cut for i, each in unshown.items() if each},
            is_split=past.chunks is not None,
            settings=context.settings,
        )
        # without an exchange `bounds[-1]` is 0, and the opening would be there twice
        own = [*opening, *messages[max(bounds[-1], len(opening)) :]]
        stay = [one.moved(num_cut) for one in (exchanges if num_cut else exchanges[skipped:])]
        return _Laid(
            turns, stay, unshown, past, seen if is_paper else None, own, num_departed, context
        )

    def _first_lead(
        self, messages: Sequence[Mapping[str, Any]], start: int, turn: Turn, context: PromptContext
    ) -> tuple[int, ...]:
        """What a turn in store begins with when the messages before `start` have left: the head,
        and what it had in its lead of messages that nobody has answered."""
        question = turn_start(messages[: turn.num_messages])
        between = [*messages[start:question]]
        if not between or str(text_of(between[-1], 0)) not in self._assembler.tokenizer.decode(
            turn.lead_ids
        ):
            return context.encode(self._assembler.head(messages, context.settings))
        asked = [*messages[: num_opening(messages)], *between, messages[question]]
        (one,) = self._assembler.exchanges(asked, settings=context.settings)
        return context.encode(one.lead)

    def _fitted(self, laid: _Laid) -> Fitted:
        turns, lead = laid.joined()
        seen = None if laid.seen is None else turns[-1].seen if turns else laid.seen
        return Fitted(
            turns,
            lead,
            laid.intro,
            laid.outro,
            laid.own,
            laid.num_departed,
            len(laid.turns),
            seen,
            partial(self._later, laid),
        )

    def _later(self, laid: _Laid, output_ids: Sequence[int], content: str) -> Sequence[int]:
        """Question and answer as the chat template shows them in later turns, where that is less
        than what was generated: it leaves out reasoning. Elsewhere what was generated."""
        given = (*laid.outro, *output_ids)
        context, answer = laid.context, {"role": "assistant", "content": content}
        # an answer that comes last was shown as a user's
        if not self._drops_reasoning or laid.messages[-1].get("role") == "assistant":
            return given
        try:
            one, after = self._shown_later(laid, answer)
            ending, end = context.encode(one.areas[-1].ending), context.encode(after.lead)[:1]
            ids = output_ids[:-1] if tuple(output_ids[-1:]) == end else output_ids
            if (
                ending == laid.outro
                and one.answer.strip() == self._assembler.tokenizer.decode(ids).strip()
            ):
                return given
            shown_later = (*ending, *context.encode(one.answer))
            # No less is shown later, so the template leaves no reasoning out.
            if self._num_visible(shown_later) >= self._num_visible((*laid.outro, *ids)):
                return given
            laid_out, _ = self._shown_later(laid, {**answer, "reasoning_content": _PROBE})
        except ValueError:  # an empty answer, or a template that refuses the two
            return given
        is_kept = (
            _PROBE in laid_out.areas[-1].ending + laid_out.answer
        )  # where the client sends it back
        return given if is_kept else shown_later

    def _shown_later(self, laid: _Laid, answer: Mapping[str, Any]) -> list[Exchange]:
        return self._assembler.exchanges(
            [*laid.messages, answer, {"role": "user", "content": "?"}],
            with_chunks={turn_start(laid.messages)} if laid.own else (),
            is_split=True,
            settings=laid.context.settings,
        )

    def _num_visible(self, ids: Sequence[int]) -> int:
        return len("".join(self._assembler.tokenizer.decode(ids, with_special=False).split()))


class _Laid:
    """A prompt laid out: texts, of which each is encoded when its length is asked for."""

    def __init__(
        self,
        turns: tuple[Turn, ...],
        exchanges: Sequence[Exchange],
        unshown: Mapping[int, tuple[TokenizedChunk, ...]],
        past: Past,
        seen: frozenset[ChunkId] | None,
        messages: Sequence[Mapping[str, Any]],
        num_departed: int,
        context: PromptContext,
    ) -> None:
        self.turns, self.messages, self.num_departed, self.context = (
            turns,
            messages,
            num_departed,
            context,
        )
        *self._exchanges, self._open = exchanges
        self._unshown, self._past, self.seen = unshown, past, seen
        encode = context.encode
        *before, area = self._open.areas
        self.own = unshown[area.message]
        self.intro: tuple[Piece, ...] = (*self._body(before), (encode(area.intro), None))
        # apart, as SGLang's `_append_assistant_prefix_to_prompt_ids` does
        self.outro = (*encode(area.ending), *(encode(context.prefill) if context.prefill else ()))

    @property
    def num_turns(self) -> int:
        """Before the question's."""
        return len(self.turns) + len(self._exchanges)

    @property
    def own_len(self) -> int:
        """Tokens of the question's turn after its lead."""
        return sum(len(ids) for ids, _ in self.intro) + _num_tokens(self.own) + len(self.outro)

    def num_fitting(self, room: int, *, with_lead: bool = False) -> int:
        """How many of the newest turns fit into that many tokens beside the question's. -1: not
        even that. `with_lead`: and beside what joins it to the turn before."""
        fits = -1
        try:
            room -= self.own_len + (len(self.context.encode(self._open.lead)) if with_lead else 0)
            if room < 0:
                return fits
            fits = 0
            for exchange in reversed(self._exchanges):
                room -= len(self.context.encode(exchange.lead)) + sum(
                    len(ids) for ids, _ in self._pieces(exchange)
                )
                if room < 0:
                    return fits
                fits += 1
        except TooLongError:
            return fits
        return fits + len(keep_recent(self.turns, max(0, room)))

    def joined(self) -> tuple[tuple[Turn, ...], tuple[int, ...]]:
        """The turns before the question's, and what joins it to them."""
        turns, seen = list(self.turns), self.seen
        for exchange in self._exchanges:
            lead = self._after(turns, exchange.lead)
            body, spans = joined((), self._pieces(exchange))
            seen = None if seen is None else seen | {span.chunk for span in spans}
            n, hash = exchange.num_messages, ""
            names: tuple[str, ...] = ()
            home: Home | None = None
            if claimed := self._past.claimed:
                question = exchange.areas[-1].message
                hash, names, kept = (
                    claimed.after(n),
                    claimed.questions[question],
                    self._past.asked.get(question),
                )
                # Its KV is of this very history; a turn is kept without its answer.
                if kept is not None and kept.messages_hash == claimed.after(n - 1):
                    home = kept.home
            turns.append(
                Turn(
                    n,
                    hash,
                    array("i", lead),
                    body,
                    spans,
                    seen or frozenset(),
                    found_by=names,
                    home=home,
                )
            )
        return tuple(turns), self._after(turns, self._open.lead)

    # Private, in order of use

    def _body(self, areas: Sequence[Area]) -> Iterator[Piece]:
        for area in areas:
            yield self.context.encode(area.intro), None
            yield from (
                (item.token_ids, item.chunk.id) for item in self._unshown.get(area.message, ())
            )
            yield self.context.encode(area.ending), None

    def _pieces(self, exchange: Exchange) -> list[Piece]:
        return [*self._body(exchange.areas), (self.context.encode(exchange.answer), None)]

    def _after(self, turns: Sequence[Turn], text: str) -> tuple[int, ...]:
        """A lead's ids behind these turns.
        An answer that ended with the token that the template puts after it has it once."""
        lead = self.context.encode(text)
        return (
            lead[1:] if lead and turns and turns[-1].body_ids[-1:] == array("i", lead[:1]) else lead
        )


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
    turns, asked, claimed = (
        (conversation.turns, conversation.asked, conversation.claimed)
        if conversation
        else ((), {}, None)
    )
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
    return Past(turns, chunks if is_known else None, claimed, asked, tuple(unknown), is_changed)


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
