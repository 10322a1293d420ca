"""Conversations of all tenants: a request continues what its messages agree with, and keeps its own
turn.

    of        what is in store of a conversation
    keep      the prompt's chunks at once, however the request ends: the next turn may come before
    finish    the whole turn in place of these, when its answer is complete

`conversation.py` makes prompts and turns of them, `radix_ext.ConversationMap` stores turns. One
event loop, so nothing here is locked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from radix_ext import ConversationKey, ConversationMap, Home, Turn
from sglang_chunkcache.config import ConversationConfig
from sglang_chunkcache.front.conversation import ClaimedHistory, Conversation, OpenTurn
from sglang_chunkcache.front.request import RagRequest


class Conversations:
    """Of one front. `clock` is in seconds."""

    def __init__(self, config: ConversationConfig, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns = ConversationMap(
            max_conversations=config.max_conversations,
            max_tokens=config.max_conversation_tokens,
            idle_s=config.conversation_idle_s,
        )

    def of(self, key: ConversationKey, claimed: ClaimedHistory, *, start: int) -> Conversation:
        """What is in store of a conversation: up to message `start` as far as `claimed` agrees, and
        what its questions up to that message have shown."""
        now = self._clock()
        names = [
            (i, name) for i, names in claimed.questions.items() if i <= start for name in names
        ]
        turns = self._turns.found(key, [name for _, name in names], now)
        # A name with the answers comes after the one with the questions alone, and replaces it.
        asked = {i: turn for (i, _), turn in zip(names, turns, strict=True) if turn is not None}
        return Conversation(key, claimed, self._turns.agree(key, claimed.up_to(start), now), asked)

    def keep(self, rag: RagRequest) -> None:
        """What the request's turn has shown, and which rank has its KV as soon as one says so."""
        turn = rag.planned.draft.turn
        if turn is not None:
            kept = turn.kept(rag.planned.input_ids, rag.planned.spans)
            self._turns.keep(
                turn.conversation.key, replace(kept, home=_home(rag, turn)), self._clock()
            )

    def finish(self, rag: RagRequest, closed: Turn | None) -> None:
        """What `RagRequest.closed_turn` has made of the complete answer."""
        turn = rag.planned.draft.turn
        if closed is not None and turn is not None:
            closed = replace(closed, home=_home(rag, turn))
            first_hash = turn.conversation.claimed.hashes[0]
            self._turns.finish(
                turn.conversation.key, first_hash, turn.fitted.turns, closed, self._clock()
            )

    def stats(self) -> dict[str, int]:
        """How many there are, and the tokens of their turns."""
        return {"count": len(self._turns), "tokens": self._turns.num_tokens}


def _home(rag: RagRequest, turn: OpenTurn) -> Home | None:
    """Who has the turn's KV. None: nobody, or no rank has said that it read the request."""
    if rag.epoch is None:
        return None
    return Home(rag.served_by or 0, rag.epoch, turn.fitted.start)
