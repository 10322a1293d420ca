"""What earlier turns of a conversation looked like as tokens, so that turn t is token for token a prefix of turn t+1.

The client sends all messages every time. A stored turn is used only where the running hash of the client's own
messages says that both mean the same history: an edit, a retry or a branch simply agrees on fewer turns, and a
guessed id on none.

```
tokens of turn t+1:  [lead 1][body 1][lead 2][body 2] … [lead t][body t] | new
```
Time is passed in as `now` (seconds on any one clock), never read. Prompts and answers are kept as ids, never as text.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

from radix_ext.chunk import ChunkId, Span
from radix_ext.errors import MessageError, check_at_least, check_choice

ShownPolicy = Literal["kept", "paper"]
SHOWN_POLICIES: tuple[ShownPolicy, ...] = get_args(ShownPolicy)

_IDS_PER_SPAN = 40  # a span is about 160 bytes, an id 4
_IDS_PER_SEEN = 20  # an entry of a set of shared strings, about 80 bytes


class ConversationKey(NamedTuple):
    """The owner of a conversation and its id. All four must match, so a guessed id reads no history."""

    api_key: str
    cache_salt: str
    extra_key: str
    conversation_id: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn.

    `num_messages` and `messages_hash` describe all messages up to and including this turn's answer; `lead_ids` are the
    template's tokens that join it to the turn before; `body_ids` (array 'i') are chunks, question, template and answer;
    `spans` are relative to the body; `seen` is every chunk shown so far, turns that have left included; `tag` is the
    caller's own.
    """

    num_messages: int
    messages_hash: str
    lead_ids: "array[int]"
    body_ids: "array[int]"
    spans: tuple[Span, ...]
    seen: frozenset[ChunkId]
    tag: str = ""

    @property
    def num_tokens(self) -> int:
        """Lead and body."""
        return len(self.lead_ids) + len(self.body_ids)

    @property
    def cost(self) -> int:
        """What it takes to keep, in token ids of 4 bytes: spans and seen chunks are objects."""
        return self.num_tokens + _IDS_PER_SPAN * len(self.spans) + _IDS_PER_SEEN * len(self.seen)


@dataclass(slots=True)
class _Stored:
    turns: tuple[Turn, ...]
    num_tokens: int
    last_access: float


class ConversationMap:
    """The finished turns of at most `max_conversations`, `max_tokens` in all, forgotten after `idle_s` without use.

    Beyond a bound the least recently used conversation goes, whole.

    Raises:
        LimitError: a bound below 1, or a negative idle_s.
    """

    def __init__(self, *, max_conversations: int, max_tokens: int, idle_s: float) -> None:
        check_at_least("max_conversations", max_conversations, 1)
        check_at_least("max_tokens", max_tokens, 1)
        check_at_least("idle_s", idle_s, 0)
        self.max_conversations = max_conversations
        self.max_tokens = max_tokens
        self.idle_s = idle_s
        self._stored: OrderedDict[ConversationKey, _Stored] = OrderedDict()  # least recently used first
        self._num_tokens = 0

    def recall(self, key: ConversationKey, now: float) -> tuple[Turn, ...]:
        """The conversation's turns, which count as used; empty if nothing is stored. `agreeing` says which may stand."""
        self._forget_idle(now)
        stored = self._stored.get(key)
        if stored is None:
            return ()
        stored.last_access = now
        self._stored.move_to_end(key)
        return stored.turns

    def finish(self, key: ConversationKey, base_turns: Sequence[Turn], turn: Turn, now: float) -> None:
        """Store the turns a request started from, and its own. Of two at once, the last to finish stays.

        A history larger than `max_tokens` is not kept at all.
        """
        self._forget(key)
        turns = (*base_turns, turn)
        num_tokens = sum(stored.cost for stored in turns)
        if num_tokens <= self.max_tokens:
            self._stored[key] = _Stored(turns, num_tokens, now)
            self._num_tokens += num_tokens
        while len(self._stored) > self.max_conversations or self._num_tokens > self.max_tokens:
            self._forget(next(iter(self._stored)))
        self._forget_idle(now)

    @property
    def num_tokens(self) -> int:
        """Token ids in store, with what spans and seen chunks weigh (`Turn.cost`)."""
        return self._num_tokens

    def __len__(self) -> int:
        """Conversations in store."""
        return len(self._stored)

    def _forget(self, key: ConversationKey) -> None:
        stored = self._stored.pop(key, None)
        if stored is not None:
            self._num_tokens -= stored.num_tokens

    def _forget_idle(self, now: float) -> None:
        while self._stored:
            key, oldest = next(iter(self._stored.items()))
            if now - oldest.last_access <= self.idle_s:
                break
            self._forget(key)


def agreeing(turns: Sequence[Turn], hashes: Sequence[str]) -> tuple[Turn, ...]:
    """The longest leading run of turns whose last hash equals the client's at the same message; maybe none.

    `hashes` are the `running_hashes` of the client's messages. The run may begin in mid-conversation, its oldest turns
    having left for overflow: each hash covers everything before it.
    """
    for length in range(len(turns), 0, -1):
        turn = turns[length - 1]
        if turn.num_messages <= len(hashes) and hashes[turn.num_messages - 1] == turn.messages_hash:
            return tuple(turns[:length])
    return ()


def running_hashes(messages: Sequence[Mapping[str, object]], *, after: str = "") -> tuple[str, ...]:
    """After each message, the hash of it and all before it: equal hashes, equal histories. `after` is the hash of what
    came before the first.

    A message counts with all its fields that hold something, in canonical JSON. Fields that are null or empty do not
    count: clients send an answer back with some that the server never wrote.

    Raises:
        MessageError: a message that JSON cannot express; names its index.
    """
    hashes: list[str] = []
    running = bytes.fromhex(after)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise MessageError(f"message {index} must be an object but got {type(message).__name__}")
        fields = {name: value for name, value in message.items() if value not in (None, "", [], {}, ())}
        try:
            text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"message {index} cannot be written as JSON: {error}") from None
        running = blake2b(running + text.encode(), digest_size=16).digest()
        hashes.append(running.hex())
    return tuple(hashes)


def keep_recent(turns: Sequence[Turn], num_tokens_budget: int) -> tuple[Turn, ...]:
    """Drop the oldest turns until the others fit the budget (CRAFT 4.3 says why that is safe); maybe all of them."""
    num_tokens, first = 0, len(turns)
    while first and num_tokens + turns[first - 1].num_tokens <= num_tokens_budget:
        first -= 1
        num_tokens += turns[first].num_tokens
    return tuple(turns[first:])


def shown(turns: Sequence[Turn], policy: ShownPolicy) -> frozenset[ChunkId]:
    """The chunks a next turn need not send again: `kept` those in these turns, `paper` also those of departed turns.

    Raises:
        PolicyError: unknown policy.
    """
    check_choice("policy", policy, SHOWN_POLICIES)
    if policy == "paper":
        return turns[-1].seen if turns else frozenset()
    return frozenset(span.chunk for turn in turns for span in turn.spans)
