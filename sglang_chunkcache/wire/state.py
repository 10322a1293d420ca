"""A rank's state as the front asks for it, through SGLang's internal state."""

from __future__ import annotations

from typing import Any

from sglang_chunkcache.wire.events import Batch, Part, Reading
from sglang_chunkcache.wire.message import Record
from sglang_chunkcache.wire.report import Explanation
from sglang_chunkcache.wire.spans import RequestSpans

STATE_KEY = "chunkcache"
"""Key of the encoded `RankState` in a scheduler's internal state."""


class ExplainRequest(Record, frozen=True):
    """A request to explain or to load for, not to run: what SGLang would get of it."""

    input_ids: list[int]
    spans: RequestSpans
    extra_key: str | None
    cache_salt: str | None
    dp_rank: int = 0
    """Who is to answer."""


class CalibrationPrompt(Record, frozen=True):
    """Token ids of a prompt to calibrate on."""

    head: list[int]
    chunks: list[list[int]]
    question: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.head) + sum(map(len, self.chunks)) + len(self.question)


# SGLang sends a state request to every rank, so one message has what is meant for each.
class Asked(Record, frozen=True):
    """What the front asks of a rank, beside its state."""

    explain: tuple[ExplainRequest, ...] = ()
    """Of any ranks."""
    prefetch: ExplainRequest | None = None
    """What it needs is loaded ahead."""
    clear_store: bool = False
    calibrate: list[CalibrationPrompt] | None = None
    read: tuple[Reading, ...] = ()
    """Of any ranks: what comes next is wanted."""


NOTHING = Asked()
"""The rank's state alone."""


class Cleared(Record, frozen=True):
    """What a store held before it was emptied."""

    chunks: int
    variants: int
    bytes: int


class RankState(Record, frozen=True):
    """What one rank says of itself."""

    dp_rank: int
    events: Batch
    """What nobody has acknowledged.
    A start that has loaded chains tells of them before there is an answer."""
    counts: dict[str, Any]
    """For `/chunkcache/stats`: shown as they are."""
    part: Part | None = None
    """The answer to that of `read` that was meant for this rank.
    None: no part was asked for, or there are more events first."""
    explanations: tuple[Explanation, ...] = ()
    """The answers to those of `explain` that this rank was to answer, in their order."""
    cleared: Cleared | None = None
    """The answer to `clear_store`."""
    refusal: tuple[int, str] | None = None
    """HTTP's status, and why `calibrate` was not done. Its figures are among the counts."""
    num_waiting: int = 0
    """Requests whose prefill has not begun or not ended, of those that were sent before this was
    asked."""
