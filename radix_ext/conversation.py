"""What earlier turns of a conversation looked like as tokens, so that turn t is token for token a
prefix of turn t+1.

A stored turn is used only where the running hash of the client's own messages, which it always
sends, says that both mean the same history: an edit, a retry or a branch agrees on fewer turns, and
a guessed id on none. Where less agrees (the questions, with the answers or without), a turn still
tells which chunks it has shown.

```
tokens of turn t+1:  [lead 1][body 1][lead 2][body 2] … [lead t][body t] | new
```
`now` is in seconds, on any one clock. Prompts and answers are kept as ids, never as text.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from radix_ext.chunk import ChunkId, Span
from radix_ext.errors import MessageError, check_at_least

_IDS_PER_TURN = 230  # a turn and its places in the map are about 920 bytes besides its tokens
_IDS_PER_SPAN = 40  # a span is about 160 bytes, an id 4
_IDS_PER_SEEN = 20  # an entry of a set of shared strings, about 80 bytes
# Of one conversation: a head that changes with every turn must not fill the map with copies of its
# history.
_MAX_HEADS = 4


class ConversationKey(NamedTuple):
    """All four must match, so a guessed id reads no history."""

    api_key: str
    tenant: str
    adapter: str
    conversation_id: str


class Home(NamedTuple):
    """Whose cache has a turn's tokens, and all before them in its prompt."""

    rank: int
    epoch: int  # of the rank's cache
    start: int  # tokens before the turn in that prompt: elsewhere it is of no use to the rank


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, finished or not."""

    num_messages: int  # up to and including this turn's answer
    messages_hash: str  # of these
    lead_ids: array[int]  # the template's tokens that join it to the turn before
    body_ids: array[int]  # 'i': chunks, question, template and answer
    spans: tuple[Span, ...]  # relative to the body
    seen: frozenset[ChunkId]  # every chunk shown so far, turns that have left included
    tag: str = ""  # the caller's own
    found_by: tuple[str, ...] = ()
    """Hashes of less than all messages, by which others find out what it has shown."""
    home: Home | None = None  # None: nobody is known to have kept it

    @property
    def chunks(self) -> frozenset[ChunkId]:
        """What its user was shown with it."""
        return frozenset(span.chunk for span in self.spans)

    @property
    def num_tokens(self) -> int:
        return len(self.lead_ids) + len(self.body_ids)

    @property
    def cost(self) -> int:
        """What it takes to keep, objects included, in token ids of 4 bytes."""
        return (
            self.num_tokens
            + _IDS_PER_TURN
            + _IDS_PER_SPAN * len(self.spans)
            + _IDS_PER_SEEN * len(self.seen)
        )


@dataclass(slots=True, eq=False)
class _Stored:
    key: ConversationKey
    turn: Turn
    before: _Stored | None
    """The turn that its prompt shows before it. None: the prompt begins with it."""
    last_access: float = 0.0
    num_ways: int = 0
    """Turns that follow it, and places by which it is found. Without any it is forgotten."""

    def path(self) -> Iterator[_Stored]:
        """This turn and those before it, newest first."""
        stored: _Stored | None = self
        while stored is not None:
            yield stored
            stored = stored.before


@dataclass(slots=True)
class _Conversation:
    by_head: OrderedDict[str, dict[str, _Stored]] = field(default_factory=OrderedDict)
    """By the hash of what came before the first question, the last used one last; then by that of
    the turn."""
    found_by: dict[str, _Stored] = field(default_factory=dict)


class ConversationMap:
    """The turns of at most `max_conversations`, `max_tokens` in all, forgotten after `idle_s`
    without use.

    A finished turn is found by its conversation and its hash, and leads to the turns before it,
    which never change. So histories that part share what they have in common, and other messages
    under an owner's id take room but nothing of his. Any turn is found by what it names, the last
    to come of several. What can no longer be found is forgotten; beyond a bound the least recently
    used turns go, a history's last one first.

    Raises:
        LimitError: a bound below 1, or a negative idle_s.
    """

    def __init__(self, *, max_conversations: int, max_tokens: int, idle_s: float) -> None:
        check_at_least("max_conversations", max_conversations, 1)
        check_at_least("max_tokens", max_tokens, 1)
        check_at_least("idle_s", idle_s, 0)
        self.max_conversations, self.max_tokens = max_conversations, max_tokens
        self.idle_s = idle_s
        self._found: dict[ConversationKey, _Conversation] = {}
        # Least recently used first. A turn is used with all before it and goes in front of them:
        # none leaves before its own.
        self._by_use: OrderedDict[_Stored, None] = OrderedDict()
        self.num_tokens = 0
        """Token ids in store, with what turns, spans and seen chunks weigh (`Turn.cost`)."""

    def agree(self, key: ConversationKey, hashes: Sequence[str], now: float) -> tuple[Turn, ...]:
        """The history of the last turn whose hash is among the client's, the `running_hashes` of
        its head and its messages. Empty if nothing is stored or nothing agrees.

        It may begin in mid-conversation, its oldest turns having left for overflow: each hash
        covers everything before it.
        """
        self._forget_idle(now)
        conversation = self._found.get(key)
        stored = conversation.by_head.get(hashes[0], {}) if conversation else {}
        last = next((stored[hash] for hash in reversed(hashes) if hash in stored), None)
        if conversation is None or last is None:
            return ()
        conversation.by_head.move_to_end(hashes[0])
        self._use(last, now)
        return _history(last)

    def found(
        self, key: ConversationKey, hashes: Sequence[str], now: float
    ) -> tuple[Turn | None, ...]:
        """For each hash the last turn that is found by it, whatever its head was."""
        self._forget_idle(now)
        conversation = self._found.get(key)
        found = [conversation.found_by.get(hash) if conversation else None for hash in hashes]
        used = set[_Stored]()
        for stored in reversed(found):  # the last one's path has most of the others
            if stored is not None and stored not in used:
                used.update(stored.path())
                self._use(stored, now)
        return tuple(stored.turn if stored is not None else None for stored in found)

    def finish(
        self, key: ConversationKey, head: str, base_turns: Sequence[Turn], turn: Turn, now: float
    ) -> None:
        """Store the turns a request started from, and its own. A history larger than `max_tokens`
        is not kept.

        Of turns with equal messages and different chunks the last to finish is found. Of a
        conversation's heads the last four to be used keep their turns.
        """
        # A larger one would push out every other conversation, and then itself.
        if sum(each.cost for each in (*base_turns, turn)) <= self.max_tokens:
            conversation = self._found.get(key)
            turns = conversation.by_head.get(head, {}) if conversation else {}
            base = turns.get(base_turns[-1].messages_hash) if base_turns else None
            # shortened, or forgotten meanwhile
            if base is None or _history(base) != tuple(base_turns):
                base = None
                for each in base_turns:
                    base = self._add(key, each, base, head)
            self._use(self._add(key, turn, base, head), now)
        self._keep_bounds(now)

    def keep(self, key: ConversationKey, turn: Turn, now: float) -> None:
        """Store a turn whose answer cannot be history: only what it names finds it."""
        if turn.cost <= self.max_tokens:
            self._use(self._add(key, turn, None, None), now)
        self._keep_bounds(now)

    @property
    def num_turns(self) -> int:
        return len(self._by_use)

    def __len__(self) -> int:
        return len(self._found)

    def _use(self, last: _Stored, now: float) -> None:
        for stored in last.path():
            stored.last_access = now
            self._by_use.move_to_end(stored)

    def _add(
        self, key: ConversationKey, turn: Turn, before: _Stored | None, head: str | None
    ) -> _Stored:
        stored = _Stored(key, turn, before)
        if before is not None:
            before.num_ways += 1
        self._by_use[stored] = None
        self.num_tokens += turn.cost
        conversation = self._found.setdefault(key, _Conversation())
        for name in turn.found_by:
            self._place(conversation.found_by, name, stored)
        if head is not None:
            self._place(conversation.by_head.setdefault(head, {}), turn.messages_hash, stored)
            conversation.by_head.move_to_end(head)
            while len(conversation.by_head) > _MAX_HEADS:
                for gone in conversation.by_head.popitem(last=False)[1].values():
                    self._release(gone)
        return stored

    def _place(self, turns: dict[str, _Stored], name: str, stored: _Stored) -> None:
        stored.num_ways += 1
        other = turns.get(name)
        turns[name] = stored
        if other is not None:
            self._release(other)

    def _release(self, stored: _Stored | None) -> None:
        """One way less to it, and to those before it if none is left."""
        while stored is not None:
            stored.num_ways -= 1
            if stored.num_ways:
                return
            del self._by_use[stored]
            self.num_tokens -= stored.turn.cost
            stored = stored.before

    def _keep_bounds(self, now: float) -> None:
        # What was just stored is the last used, and fits by itself, so it stays.
        while len(self._found) > self.max_conversations or self.num_tokens > self.max_tokens:
            self._forget(next(iter(self._by_use)))
        self._forget_idle(now)

    def _forget(self, stored: _Stored) -> None:
        """Take it out of the map, as nothing follows it."""
        conversation = self._found[stored.key]
        places = [(conversation.found_by, name) for name in stored.turn.found_by]
        by_hash = stored.turn.messages_hash
        places += [(turns, by_hash) for turns in conversation.by_head.values()]
        for turns, name in places:
            if turns.get(name) is stored:  # another turn may be found there by now
                del turns[name]
                self._release(stored)
        for head in [head for head, turns in conversation.by_head.items() if not turns]:
            del conversation.by_head[head]
        if not conversation.by_head and not conversation.found_by:
            del self._found[stored.key]

    def _forget_idle(self, now: float) -> None:
        while self._by_use:
            oldest = next(iter(self._by_use))
            if now - oldest.last_access <= self.idle_s:
                break
            self._forget(oldest)


def _history(last: _Stored) -> tuple[Turn, ...]:
    return tuple(stored.turn for stored in reversed([*last.path()]))


def running_hashes(messages: Sequence[Mapping[str, object]], *, after: str = "") -> tuple[str, ...]:
    """After each message, the hash of it and all before it: equal hashes, equal histories. `after`
    is the hash of what came before the first.

    A message counts with all its fields that hold something, in canonical JSON. Fields that are
    null or empty do not count: clients send an answer back with some that the server never wrote.

    Raises:
        MessageError: a message that JSON cannot express; names its index.
    """
    hashes: list[str] = []
    running = bytes.fromhex(after)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise MessageError(
                f"message {index} must be an object but got {type(message).__name__}"
            )
        fields = {
            name: value for name, value in message.items() if value not in (None, "", [], {}, ())
        }
        try:
            # Clients send fields in any order. `dumps` escapes lone surrogates, which UTF-8 lacks.
            text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"message {index} cannot be written as JSON: {error}") from None
        running = blake2b(running + text.encode(), digest_size=16).digest()
        hashes.append(running.hex())
    return tuple(hashes)
