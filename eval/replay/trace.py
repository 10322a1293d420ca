"""Reads traces: the chunks that each request retrieved, as JSON Lines.

One JSON object per line, in the order of arrival, UTF-8, plain or gzip (if the name ends in `.gz`):
```
{"passages": ["doc7#2", "doc1#0"], "lengths": [212, 198], "timestamp": 12.5, "conversation": "c41",
"head": "support bot, v3"} ```
- `passages` (or `chunks`): ids in retriever order, strings or integers; 7 and "7" are the same. A
  repeated id counts once. A request without any is left out; one with a `conversation` is a turn of
  it, but is in no figure.
- `lengths`, optional: token count of each passage. If all requests have them, shares of tokens are
  reported too. Alternatively `--components FILE` gives them by id, one {"kind": "passage", "id": 7,
  "token_length": 212} per line (RAGPulse's own file).
- `timestamp`, optional: arrival in seconds, not before the previous line; only load generation uses
  it.
- `conversation`, optional: a string or integer that the turns of one conversation share. A later
  turn's chunks come after the conversation's history: they have no prefix hits, and chunks that an
  earlier turn has shown may be dropped.
- `head`, optional: a string or integer that stands for all text before the first chunk, system
  prompt and tools; with a time or a user's name in it that is another one each time. Chunks behind
  different heads share nothing in exact mode. Lines without a head share one.
- `question_tokens`, `system_tokens`, `output_tokens`, optional: token counts for `python -m eval
  serve --task trace`.
- Other fields are ignored. No text is needed: hash your ids if they are confidential.

A trace is streamed: the file is read once for the facts and once per cell, and no request is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from eval.data.rows import (
    MAX_COUNT,
    Row,
    count_of,
    name_of,
    names_of,
    number_of,
    read_rows,
    text_of,
)
from eval.errors import CommandError
from radix_ext import Chunk, ChunkId

T = TypeVar("T")


class Logged(NamedTuple):
    """What a log tells of a request that a trace does not; texts as digests (eval/logs).

    `front` is all text before the first chunk if ours serves the chunks, `plain_front` without its
    times and ids; `text_front` all text before the first passage in the prompt as it was logged;
    `plain_chunks` the chunks without ranks and scores in them. None: not told.
    """

    front: str
    plain_front: str
    plain_chunks: tuple[Chunk, ...]
    text_front: str | None = None
    model: str = ""
    question: str | None = None
    user: str | None = None
    salt: str | None = None

    def head(self, front: str | None = None) -> str:
        """Of the request, or with another front. Tenants share nothing."""
        front = self.front if front is None else front
        return front if self.salt is None else f"{front}\0{self.salt}"


class TraceRequest(NamedTuple):
    """One line: distinct chunks in retriever order, each of 1 token if the line has no lengths.
    None: not given."""

    chunks: tuple[Chunk, ...]
    has_lengths: bool
    timestamp: float | None = None
    conversation: str | None = None
    head: str | None = None
    question_tokens: int | None = None
    system_tokens: int | None = None
    output_tokens: int | None = None
    logged: Logged | None = None


@dataclass(slots=True)
class TraceFacts:
    """What is known of a trace after one pass. `counted` requests have chunks; figures are computed
    over these.

    `num_turns` has the conversations of several turns. `largest_*` is of one request, `distinct_*`
    of each chunk once.
    """

    num_requests: int = 0
    num_counted: int = 0
    has_lengths: bool = True
    num_turns: Mapping[str, int] = field(default_factory=dict)
    distinct_chunks: int = 0
    distinct_tokens: int = 0
    num_tokens: int = 0
    """Of all chunks of all requests."""
    largest_chunks: int = 0
    largest_tokens: int = 0
    num_headed: int = 0
    """Of the counted ones, those that name a head, and how many different heads these are."""
    num_heads: int = 0
    sha256: str = ""


def scan(trace: Iterable[TraceRequest]) -> TraceFacts:
    """The facts of a trace. Raises CommandError as the trace does."""
    facts, digest = TraceFacts(), hashlib.sha256()
    num_turns: Counter[str] = Counter()
    ids: set[ChunkId] = set()
    heads: set[int] = set()
    for request in trace:
        lengths = [chunk.num_tokens for chunk in request.chunks]
        key = "\0".join([chunk.id for chunk in request.chunks])
        head = "" if request.head is None else f"\0{request.head}"
        # JSON may have half a surrogate pair, which UTF-8 refuses.
        digest.update(
            f"{key}\0\0{request.conversation}\0{lengths}{head}\n".encode("utf-8", "surrogatepass")
        )
        facts.num_requests += 1
        if request.conversation is not None:
            num_turns[request.conversation] += 1
        if lengths:
            facts.num_counted += 1
            facts.has_lengths &= request.has_lengths
            facts.largest_chunks = max(facts.largest_chunks, len(lengths))
            facts.largest_tokens = max(facts.largest_tokens, sum(lengths))
            facts.num_tokens += sum(lengths)
            facts.distinct_tokens += sum(
                chunk.num_tokens for chunk in request.chunks if chunk.id not in ids
            )
            ids.update(chunk.id for chunk in request.chunks)
            if request.head is not None:
                facts.num_headed += 1
                # Hashes take less memory: with a time in it each request has a head of its own.
                heads.add(hash(request.head))
    # A single turn is served like a request without a conversation; counting it takes memory.
    facts.num_turns = {name: turns for name, turns in num_turns.items() if turns > 1}
    facts.num_heads = len(heads)
    facts.distinct_chunks, facts.sha256 = len(ids), digest.hexdigest()[:16]
    return facts


class TraceFile:
    """The requests of a file that have chunks, and turns of conversations that have none; each
    iteration reads the file.

    Equal ids are one `Chunk` object, also of several iterations: memory grows with distinct chunks,
    not with requests.

    Raises:
        CommandError: a pipe; while iterating: no such file, not gzip, not UTF-8, not a JSON object,
            an invalid field (with line number), or no request.
    """

    def __init__(
        self, path: Path, *, max_requests: int | None = None, components: Path | None = None
    ) -> None:
        if path.is_fifo():
            raise CommandError(
                f"{path} must be a file, since it is read several times, but is a pipe"
            )
        self._path, self._max_requests = path, max_requests
        self._lengths = None if components is None else read_components(components)
        # without and with a length
        self._known: dict[bool, dict[str, Chunk]] = {False: {}, True: {}}

    def __iter__(self) -> Iterator[TraceRequest]:
        num_requests = num_counted = 0
        latest = float("-inf")
        for where, row in read_rows(self._path):
            # Before the row is checked, so that an invalid one beyond the limit ends no replay.
            if num_requests == self._max_requests:
                break
            request = self._request(row, where)
            if request.timestamp is not None:
                if request.timestamp < latest:
                    raise CommandError(
                        f"{where}: timestamp is before {latest:g} of a line above it"
                    )
                latest = request.timestamp
            # A turn without chunks may be the last one, after which the conversation is forgotten.
            if request.chunks or request.conversation is not None:
                num_requests += 1
                num_counted += bool(request.chunks)
                yield request
        if not num_counted:
            among = "" if self._max_requests is None else f" among the first {self._max_requests}"
            raise CommandError(f"{self._path} has no request with passages{among}")

    def _request(self, row: Row, where: str) -> TraceRequest:
        chunks, has_lengths = self._chunks(row, where)
        timestamp = _given(number_of, row, "timestamp", where)
        conversation, head = (
            _given(name_of, row, name, where) for name in ("conversation", "head")
        )
        question, system, output = (
            _given(count_of, row, f"{name}_tokens", where)
            for name in ("question", "system", "output")
        )
        said = (conversation, head, question, system, output)
        return TraceRequest(chunks, has_lengths, timestamp, *said)

    def _chunks(self, row: Row, where: str) -> tuple[tuple[Chunk, ...], bool]:
        """The distinct chunks of one line, and whether their lengths are known."""
        field = "passages" if "passages" in row else "chunks"
        if field not in row:
            raise CommandError(
                f"{where}: has neither passages nor chunks; is it a log of calls? --log reads one"
            )
        names, lengths = names_of(row, field, where), row.get("lengths")
        if self._lengths is not None:
            lengths = [self._lengths.get(("passage", name)) for name in names]
        if lengths is not None and (not isinstance(lengths, list) or len(lengths) != len(names)):
            raise CommandError(
                f"{where}: lengths must be a list of {len(names)} token counts, one for each of"
                f" {field}"
            )
        known = self._known[lengths is not None]
        for name, length in zip(names, lengths or [1] * len(names), strict=True):
            # `isinstance` would take `true` for a length of 1.
            if type(length) is not int or not 1 <= length <= MAX_COUNT:
                raise CommandError(
                    f"{where}: the length of {name!r} must be an integer from 1 to {MAX_COUNT:,}"
                )
            # `setdefault` alone would make a `Chunk` at every mention.
            chunk = known.get(name) or known.setdefault(name, Chunk(ChunkId(name), length))
            if chunk.num_tokens != length:
                raise CommandError(
                    f"{where}: {name!r} has {length} tokens but had {chunk.num_tokens} before"
                )
        return tuple(known[name] for name in dict.fromkeys(names)), lengths is not None


def read_components(path: Path) -> dict[tuple[str, str], int]:
    """(kind, id) -> tokens, from RAGPulse's file of components. Raises CommandError."""
    return {
        (text_of(row, "kind", where), name_of(row, "id", where)): count_of(
            row, "token_length", where
        )
        for where, row in read_rows(path)
    }


def _given(read: Callable[[Row, str, str], T], row: Row, name: str, where: str) -> T | None:
    return None if row.get(name) is None else read(row, name, where)
