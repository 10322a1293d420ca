"""What a usual mistake of an application costs: the trace replayed with it, or, where the log has
it, without it.

The mistakes are those of sglang_chunkcache/front/README.md, "Why a chunk was not found". Where a
trace does not tell enough, one is not replayed, and the page says why: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eval.replay.cells import ReplayCell
from eval.replay.survey import Survey
from eval.replay.trace import TraceRequest
from radix_ext import Chunk, ChunkId

DAY_S = 86_400
Change = Callable[[TraceRequest, int], TraceRequest]
"""(request, its number) -> the request with, or without, the mistake."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """`is_made`: the log has it. `is_cure`: the replay is without it. `is_needless`: nothing is lost
    without it. `by_stock`: it leaves stock SGLang's prefix cache alone."""

    name: str
    says: str
    change: Change
    is_made: bool = False
    is_cure: bool = False
    is_needless: bool = False
    by_stock: bool = False


def mistakes_of(told: Survey) -> tuple[list[Mistake], list[str]]:
    """What can be replayed, and what cannot, with the reason."""
    has_times = told.num_plain_fronts < told.num_fronts
    has_salts, has_labels = told.num_salts > 1, told.num_labelled > 0
    found = [
        Mistake(
            "text",
            "Passages in the text of a message",
            _in_text,
            is_made=told.num_in_text > 0,
            by_stock=True,
        )
    ]
    cures = [
        (has_times, "times", "Times, dates, numbers or ids in front of the chunks", _without_times),
        (has_labels, "labels", "Ranks or scores in passages' texts", _without_labels),
        (has_times and has_labels, "both", "Both of these", _without_both),
    ]
    found += [
        Mistake(name, says, change, is_made=True, is_cure=True, is_needless=True)
        for is_there, name, says, change in cures
        if is_there
    ]
    wanted = [
        (has_salts, "salts", f"{told.num_salts:,} tenants kept apart (cache_salt)", _without_salt),
        (
            told.num_heads > max(1, told.num_models),
            "heads",
            f"All that differs in front of the chunks: {told.num_heads:,} heads",
            _without_head,
        ),
    ]
    found += [
        Mistake(name, says, change, is_made=True, is_cure=True)
        for is_there, name, says, change in wanted
        if is_there
    ]
    is_long = told.has_times and told.last_s // DAY_S > told.first_s // DAY_S
    put_in = (
        (
            not has_times,
            "second",
            "The time, to the second, in the system prompt or a tool's description",
            _second,
        ),
        (is_long and not has_times, "date", "The date in the system prompt", _date),
        (told.num_users > 1, "user", "The user's name in the system prompt", _user),
        (not has_salts, "salt", "A cache_salt for each request", _each),
        (not has_labels, "rank", "The rank in a passage's text", _rank),
        (told.has_questions and not has_labels, "score", "The score in a passage's text", _score),
    )
    found += [Mistake(name, says, change) for is_told, name, says, change in put_in if is_told]
    missing = [
        ("a date in the system prompt: the log is not of two days", not is_long and not has_times),
        ("a user's name: the log names no users", told.num_users < 2),
        ("a score in passages' texts: the log has no questions", not told.has_questions),
        ("overlapping windows: the log does not have documents before they are cut", True),
    ]
    return found, [says for says, is_missing in missing if is_missing]


class MistakeCell:
    """A replay of changed requests; its sample has sums only."""

    def __init__(self, mistake: Mistake, cell: ReplayCell) -> None:
        self._mistake, self._cell, self._number = mistake, cell, 0

    def step(self, request: TraceRequest) -> None:
        self._cell.step(self._mistake.change(request, self._number))
        self._number += 1

    @property
    def sample(self) -> dict[str, Any]:
        told, mistake = self._cell.sample, self._mistake
        prefix, unit = ("token_", "tokens") if told["tokens"] else ("", "chunks")
        names = (
            ("token_hits", "dropped_tokens", "lost_tokens")
            if prefix
            else ("hits", "dropped", "lost")
        )
        hits, dropped, lost = (sum(told[name]) for name in names)
        return {
            "mistake": mistake.name,
            "says": mistake.says,
            "is_made": mistake.is_made,
            "is_cure": mistake.is_cure,
            "is_needless": mistake.is_needless,
            "total": sum(told[unit]),
            "saved": hits + dropped - lost,
        }


# Private, in order of use


def _in_text(request: TraceRequest, number: int) -> TraceRequest:
    logged = request.logged
    if logged is None or logged.text_front is None:
        return request
    return request._replace(head=logged.head(logged.text_front))


def _without_times(request: TraceRequest, number: int) -> TraceRequest:
    logged = request.logged
    return request if logged is None else request._replace(head=logged.head(logged.plain_front))


def _without_both(request: TraceRequest, number: int) -> TraceRequest:
    return _without_times(_without_labels(request, number), number)


def _without_salt(request: TraceRequest, number: int) -> TraceRequest:
    return request if request.logged is None else request._replace(head=request.logged.front)


def _without_labels(request: TraceRequest, number: int) -> TraceRequest:
    return request if request.logged is None else request._replace(chunks=request.logged.plain_chunks)


def _without_head(request: TraceRequest, number: int) -> TraceRequest:
    return request._replace(head=request.logged.model if request.logged else None)


def _second(request: TraceRequest, number: int) -> TraceRequest:
    # without times each request has a second of its own
    return _behind(request, number if request.timestamp is None else int(request.timestamp))


def _date(request: TraceRequest, number: int) -> TraceRequest:
    return _behind(request, int((request.timestamp or 0) // DAY_S))


def _user(request: TraceRequest, number: int) -> TraceRequest:
    return _behind(request, request.logged.user if request.logged else None)


def _each(request: TraceRequest, number: int) -> TraceRequest:
    return _behind(request, number)


def _rank(request: TraceRequest, number: int) -> TraceRequest:
    chunks = (_other(chunk, rank) for rank, chunk in enumerate(request.chunks))
    return request._replace(chunks=tuple(chunks))


def _score(request: TraceRequest, number: int) -> TraceRequest:
    """One belongs to a chunk and a question."""
    question = request.logged.question if request.logged else None
    return request._replace(chunks=tuple(_other(chunk, question) for chunk in request.chunks))


def _behind(request: TraceRequest, text: object) -> TraceRequest:
    return request._replace(head=f"{request.head}\0{text}")


def _other(chunk: Chunk, text: object) -> Chunk:
    return Chunk(ChunkId(f"{chunk.id}\0{text}"), chunk.num_tokens)
