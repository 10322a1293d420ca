"""A RAG request's stages in the front process. Data only.

Draft        what the client sent, tokenised; its chunks are not in order yet
             (drafter.py)
Planned      rank, order, token ids and spans: all that is decided before the engine is asked
             (planner.py)
RagRequest   a planned request that runs, and what its answer has taught so far
             (bookkeeper.py)
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from radix_ext import (
    Chunk,
    ChunkId,
    ConversationKey,
    FusionRequest,
    OrderPolicy,
    Outline,
    Parting,
    Plan,
    Span,
    Turn,
    fused_chunk,
)
from radix_ext.audit import AuditDecision
from sglang_chunkcache.front.conversation import OpenTurn
from sglang_chunkcache.front.prompt import Piece, TokenizedChunk, joined
from sglang_chunkcache.wire.report import Answer, Fallback, Report
from sglang_chunkcache.wire.spans import KEY_PREFIX, namespace_of


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved chunk as the client sent it.
    `label` is only shown back: identity is the token ids."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request; keeps caches and conversations of different tenants apart."""

    api_key: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None
    # it follows from the others, so comparing them is enough
    tenant: str = field(init=False, compare=False)
    """Names those who share KV, whatever the adapter. A digest: clients may send long salts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant", namespace_of((), self.extra_key, self.cache_salt))

    @property
    def is_named(self) -> bool:
        """The request names its tenant."""
        return self.cache_salt is not None or self.extra_key is not None

    def conversation(self, conversation_id: str) -> ConversationKey:
        """Its key."""
        return ConversationKey(self.api_key, self.tenant, self.lora or "", conversation_id)


@dataclass(slots=True, eq=False)
class Timeline:
    """When a request came, and when each step before the engine was over, in `perf_counter`'s
    seconds. A step begins where the one before has ended."""

    came: float = field(default_factory=time.perf_counter)
    ends: dict[str, float] = field(default_factory=dict)

    def ended(self, step: str) -> None:
        self.ends[step] = time.perf_counter()

    def steps(self) -> Iterator[tuple[str, float, float]]:
        """(step, begun, ended)."""
        begun = self.came
        for step, end in self.ends.items():
            yield step, begun, end
            begun = end


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides its prompt."""

    max_new_tokens: int | None = None
    prompt_field: str = "messages"
    """What the client calls its prompt, and the limit of its answer; errors name them."""
    length_field: str = "max_tokens"
    order: OrderPolicy | None = None
    """Of the chunks. None: the server's."""
    fusion: FusionRequest | None = None
    """None: exact reuse only. The planner fills in the recipe."""
    rank: int | None = None
    """None: the router's choice."""
    requires_history: bool = False
    """Refused rather than answered where nobody can tell what an earlier turn has shown."""
    num_answers: int = 1
    """With more than one SGLang fills its cache with a request of its own first,
    and does not report what was cached."""
    retrieval: Mapping[str, Any] | None = None
    """What was searched for and found, to be shown. None: the client sent its chunks."""
    is_denied: bool = False
    """Moved KV was asked for, and there is none in SGLang's tree."""
    logprob_start: int | None = None
    """Logprobs of the prompt are asked for from this token on, so it is computed from there on.
    None: of no token."""
    timeline: Timeline = field(default_factory=Timeline, compare=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt whose chunks are not in order yet: `before`, the chunks, `after`."""

    before: array[int]
    """Token ids: a conversation's history, and this turn's text before its chunks."""
    history: tuple[Span, ...]
    """Chunks in `before`."""
    chunks: tuple[TokenizedChunk, ...]
    """To be ordered, in retriever order."""
    after: tuple[Piece, ...]
    """Text, and chunks of later areas, which stay in place."""
    labels: Mapping[ChunkId, str]
    """Of `chunks`, and of chunks that were sent and are dropped."""
    identity: Identity
    options: Options
    later_labels: tuple[str, ...] = ()
    """Of the chunks in `after`."""
    repeated: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    num_turns: int = 0
    """Earlier turns in `before` that were in store."""
    num_rendered: int = 0
    """Further ones, rendered from the messages."""
    num_unknown: int = 0
    """Earlier turns of which nobody can tell what they have shown."""
    is_changed: bool = False
    """An earlier message's chunks are not those that the conversation has shown with it."""
    num_departed: int = 0
    """Turns or exchanges left out because the context is full."""
    earlier_recipe: str = ""
    """Of the conversation's last fused turn."""
    turn: OpenTurn | None = None
    """What the conversation keeps when the answer is complete.
    None: the request belongs to no conversation."""
    is_preprocessing: bool = False
    """Fills the store ahead of requests: its chunks count neither as accesses nor as hits."""
    outline: Outline = ()
    """What `head` is rendered from, by the client's names."""

    @property
    def head(self) -> array[int]:
        """Token ids before the first chunk."""
        return self.before[: self.history[0].start] if self.history else self.before

    def assemble(self, ordered: Sequence[TokenizedChunk]) -> tuple[array[int], tuple[Span, ...]]:
        """The prompt's ids and spans with the chunks in this order."""
        ids, spans = joined(
            self.before, [*((item.token_ids, item.chunk.id) for item in ordered), *self.after]
        )
        return ids, (*self.history, *spans)


class Reason(NamedTuple):
    """Why a chunk is computed. `parting`: where the text before it parts from what it is cached
    behind (`other_head`)."""

    fallback: Fallback
    parting: Parting | None = None


class Missed(NamedTuple):
    """Chunks of a prompt that were not found cached, all for one reason. `spans` are indices."""

    reason: Reason
    spans: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a prompt's chunks before it runs, span by span."""

    reasons: tuple[Reason, ...]
    """Why the chunk is computed, if it is."""
    texts: tuple[str, ...]
    """Names the text before the chunk that is no chunk."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is sent to which rank. Nothing is counted or taken for it yet."""

    draft: Draft
    input_ids: list[int]
    spans: tuple[Span, ...]
    area: tuple[Span, ...]
    """The spans of the first chunk area."""
    namespace: str
    rank: int
    order: list[str]
    """Labels of the chunks that are sent with this turn."""
    planned_len: int
    """Leading chunks of `area` that the tree expects to be cached exactly."""
    fused_from: int
    """Leading chunks of `area` whose KV is expected to be exact, cached or not."""
    fusion: FusionRequest | None
    order_seconds: float
    """What ordering and routing took."""
    grows: bool = False
    """Its exact chain may grow by a chunk that could be moved."""
    terms: AuditDecision | None = None
    """Of the audit. None: it asks for no moved KV, or nothing is audited."""
    expected: Expected | None = None
    """None: it asks for moved KV, which has reasons of its own."""
    is_away: bool = False
    """Another rank has more of its conversation's history."""
    border: int = 0
    """By so many tokens less than what is there a match of its rank's may be."""
    held_len: int | None = None
    """Leading chunks of `area` that the rank is taken to hold; None: nothing behind its head."""

    def is_found(self, span: Span, num_found: int) -> bool:
        """Whether the chunk is among the prompt's first tokens, of which so many were found."""
        return num_found > 0 and span.end - self.border <= num_found

    @property
    def is_short(self) -> bool:
        """Whether no match can be: the prompt has no whole page before its last token."""
        return len(self.input_ids) - 1 <= self.border

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Why it is not served as it asks, or as its conversation was."""
        reasons = {
            Fallback.AUDIT_PAUSED: self.terms is not None and not self.terms.is_moved,
            Fallback.UNKNOWN_HISTORY: self.draft.num_unknown > 0,
            Fallback.CHANGED_HISTORY: self.draft.is_changed,
            Fallback.OTHER_RANK: self.is_away,
            Fallback.STOCK_TREE: self.draft.options.is_denied,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    @property
    def labels(self) -> list[str]:
        """One per span. Those of earlier turns are not kept:
        such chunks are named by the first characters of their hash."""
        # `order` has this turn's labels, whose chunks are the last spans
        earlier = self.spans[: len(self.spans) - len(self.order)]
        return [*(span.chunk[:8] for span in earlier), *self.order]

    @property
    def chain(self) -> list[Chunk]:
        """The first chunk area as the tree should come to know it."""
        chunks = [Chunk(span.chunk, span.end - span.start) for span in self.area]
        if self.fusion is None:
            return chunks
        fused = (
            # by the recipe's name, or exact requests would be ordered for KV that they cannot use
            replace(chunk, id=fused_chunk(self.fusion.recipe, chunk.id))
            for chunk in chunks[self.fused_from :]
        )
        return [*chunks[: self.fused_from], *fused]

    @property
    def predicted_exact(self) -> int:
        """Prompt tokens up to the end of the chunks that the tree expects to be cached."""
        return self.area[self.planned_len - 1].end if self.planned_len and not self.is_short else 0


@dataclass
class RagRequest:
    """A planned request: `begin` of the bookkeeper fills the first two fields,
    `observe` the others."""

    planned: Planned
    custom_params: dict[str, str] = field(default_factory=dict)
    """What the scheduler is told."""
    plan: Plan | None = None
    """What the tree expects of the request while it runs."""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_cut: bool = False
    """The answer ended at a stop string: the client does not see all of its tokens,
    so they cannot be its history."""
    streams: bool = False
    is_answered: bool = False
    """The first token is there, and with it all that the rank reports."""
    answered_at: float | None = None
    """By `perf_counter`. An answer that is not streamed comes with its last token."""
    served_by: int | None = None
    epoch: int | None = None
    """Of the rank's cache. None: it has not said that it read the request."""
    known: dict[str, int] | None = None
    """Prompt tokens by the fates that a rank reports; None where they are not known."""
    hit_len: int = 0
    """Chunks of the first area found cached under the very same prefix."""
    report: Report | None = None
    """What the rank did for a fused request."""
    fallbacks: list[Fallback] = field(default_factory=list)
    missed: tuple[Missed, ...] | None = None
    """The chunks that were computed. None: not known, or it asked for moved KV."""
    is_sampled: bool = False
    """Its answer waits for an audit, or was audited."""
    is_refused: bool = False
    """SGLang raised an error about the request's parameters."""
    heard: str = ""
    """The rank's last message as it came: a stream repeats it with every output."""
    decoded: Answer | None = None
    """That message, decoded. None if that failed."""

    @property
    def is_complete(self) -> bool:
        """The answer ended by itself or at its length limit."""
        # SGLang's third type, `abort`, leaves an answer that no client takes for whole
        return self.finish_reason in ("stop", "length")

    @property
    def first_token_s(self) -> float | None:
        """From its arrival. None: there is none yet, or SGLang hands out the answer whole."""
        if not self.streams or self.answered_at is None:
            return None
        return self.answered_at - self.planned.draft.options.timeline.came

    @property
    def outcome(self) -> str:
        """As the metrics call it."""
        finished = "finished" if self.is_complete else "aborted"
        return "refused" if self.is_refused else finished

    def closed_turn(self, content: str | None) -> Turn | None:
        """The turn of a complete answer, None where it is none of a conversation's. `content` is
        the message the client got, None where it is not plain text. May run in a thread, since a
        long answer may be tokenised again."""
        planned, turn = self.planned, self.planned.draft.turn
        if turn is None or content is None or self.is_cut or not self.is_complete:
            return None
        # Without chunks nothing was moved, so later turns have no recipe to keep.
        tag = planned.fusion.recipe if planned.fusion and planned.spans else ""
        return turn.closed(
            planned.input_ids, planned.spans, self.output_ids, content=content, tag=tag
        )

    def params_with(self, theirs: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's `custom_params`: the client's and ours. Ours come with the server's secret
        mark and are believed, so a client's key that could be taken for one of them is left out."""
        others = {
            key: value for key, value in (theirs or {}).items() if not key.startswith(KEY_PREFIX)
        }
        return {**others, **self.custom_params}

    @property
    def num_cached(self) -> int | None:
        """Prompt tokens whose KV was there, in place or moved, and was not computed.
        None where the rank does not report it."""
        return None if self.known is None else self.known["exact"] + self.known["relocated"]

    def fates(self) -> dict[str, int] | None:
        """Prompt tokens by fate; they sum to the prompt's length.
        None where the rank does not report them."""
        if self.known is None:
            return None
        return {**self.known, "computed": len(self.planned.input_ids) - sum(self.known.values())}
