"""What a usual mistake of an application costs: the trace replayed with it, or, where the log has
it, without it.

The mistakes are those of sglang_chunkcache/front/README.md, "Why a chunk was not found". Where a
trace does not tell enough, one is not replayed, and the page says why: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from eval.replay.cells import CHUNK_COUNTS, TOKEN_COUNTS, ReplayCell
from eval.replay.grid import Cell
from eval.replay.survey import DAY_S, Survey
from eval.replay.trace import Logged, TraceFacts, TraceRequest
from radix_ext import Chunk, ChunkId

Change = Callable[[TraceRequest, Logged, int], dict[str, Any]]
"""(request, what its log tells, its number) -> fields with, or without, the mistake."""


Kind = Literal["made", "needless", "kept", "put_in"]
"""The log has it, replayed: as it is; without it, which costs an application nothing; without it,
though there may be a reason for it. Or it is put in."""


class Mistake(NamedTuple):
    """`name` is the key of its sample. Passages in a text leave only SGLang's prefix cache:
    `by_stock`."""

    name: str
    says: str
    change: Change
    kind: Kind

    @property
    def by_stock(self) -> bool:
        return self.name == "text"


def mistakes_of(told: Survey) -> tuple[list[Mistake], list[str]]:
    """What can be replayed, and what cannot, with the reason."""
    has_times = len(told.plain_fronts) < len(told.fronts)
    has_labels = len(told.plain_chunks) < len(told.chunks)
    has_salts, has_users = len(told.salts) > 1, len(told.users - {None}) > 1
    has_days = told.has_times and told.last_s // DAY_S > told.first_s // DAY_S
    num_heads = len(told.fronts or told.heads)
    has_heads = num_heads > max(1, len(told.models))
    has_scores = told.has_questions and not has_labels
    in_text: Kind = "made" if told.num_in_text else "put_in"
    heads = f"All that differs before the chunks: {num_heads:,} heads"
    time, label = "times, dates, numbers or ids before the chunks", "ranks or scores in passages"
    second, salt = "The time, to the second, in the system prompt", "A cache_salt for each request"
    user, both = "The user's name in the system prompt", f"{time.capitalize()}, and {label}"
    of_each = 2 * len(told.salts) > told.num_requests
    salts = salt if of_each else f"{len(told.salts):,} tenants kept apart"
    of_salts: Kind = "needless" if of_each else "kept"
    listed: list[tuple[bool, str, str, Change, Kind]] = [
        (True, "text", "Passages in the text of a message", _in_text, in_text),
        (has_times, "times", time.capitalize(), _no_times, "needless"),
        (has_labels, "labels", label.capitalize(), _no_labels, "needless"),
        (has_times and has_labels, "both", both, _neither, "needless"),
        (has_salts, "salts", salts, lambda _, log, n: {"head": log.front}, of_salts),
        (has_heads, "heads", heads, lambda _, log, n: {"head": log.head(log.model)}, "kept"),
        (not has_times, "second", f"{second} or a tool", _second, "put_in"),
        (has_days and not has_times, "date", "The date in the system prompt", _date, "put_in"),
        (has_users, "user", user, lambda each, log, n: _behind(each, log.user), "put_in"),
        (not has_salts, "salt", salt, lambda each, log, n: _behind(each, n), "put_in"),
        (not has_labels, "rank", "The rank in a passage's text", _rank, "put_in"),
        (has_scores, "score", "The score in a passage's text", _score, "put_in"),
    ]
    missing = [
        (not has_days and not has_times, "a date in the system prompt: the log is of one day"),
        (not has_users, "a user's name: the log does not name two users"),
        (not told.has_questions, "a score in passages' texts: the log has no questions"),
        (True, "overlapping windows: the log has no documents before they are cut"),
    ]
    found = [Mistake(*each[1:]) for each in listed if each[0]]
    return found, [says for is_it, says in missing if is_it]


class MistakeCell:
    """A replay of changed requests; its sample has sums only."""

    def __init__(self, mistake: Mistake, cell: Cell, facts: TraceFacts, *, warm_up: int) -> None:
        self._mistake, self._number = mistake, 0
        self._cell = ReplayCell(cell, facts, warm_up=warm_up)

    def step(self, request: TraceRequest) -> None:
        logged = request.logged or Logged("", "", request.chunks)
        changed = self._mistake.change(request, logged, self._number)
        self._cell.step(request._replace(**changed))
        self._number += 1

    @property
    def sample(self) -> dict[str, Any]:
        told, mistake = self._cell.sample, self._mistake
        names = TOKEN_COUNTS if told["tokens"] else CHUNK_COUNTS
        total, hits, dropped, lost = (sum(told[name]) for name in names)
        sums = {"total": total, "saved": hits + dropped - lost}
        return {"mistake": mistake.name, "says": mistake.says, "kind": mistake.kind, **sums}


# Private, in order of use


def _in_text(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    # a later turn follows its history, whatever stands between that and its passages
    is_known = logged.text_front is not None and request.conversation is None
    return {"head": logged.head(logged.text_front)} if is_known else {}


def _no_times(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    return {"head": logged.head(logged.plain_front)}


def _no_labels(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    return {"chunks": logged.plain_chunks}


def _neither(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    return _no_times(request, logged, number) | _no_labels(request, logged, number)


def _second(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    # without times each request has a second of its own
    return _behind(request, number if request.timestamp is None else int(request.timestamp))


def _date(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    return _behind(request, int((request.timestamp or 0) // DAY_S))


def _rank(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    return {"chunks": tuple(_other(chunk, rank) for rank, chunk in enumerate(request.chunks))}


def _score(request: TraceRequest, logged: Logged, number: int) -> dict[str, Any]:
    """One belongs to a chunk and a question."""
    return {"chunks": tuple(_other(chunk, logged.question) for chunk in request.chunks)}


def _behind(request: TraceRequest, text: object) -> dict[str, Any]:
    return {"head": f"{request.head}\0{text}"}


def _other(chunk: Chunk, text: object) -> Chunk:
    return Chunk(ChunkId(f"{chunk.id}\0{text}"), chunk.num_tokens)
