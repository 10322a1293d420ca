"""Reads traces: the chunks that each request retrieved, as JSON Lines.

One JSON object per line, in the order of arrival, UTF-8, plain or gzip (if the name ends in `.gz`):
```
{"passages": ["doc7#2", "doc1#0"], "lengths": [212, 198], "timestamp": 12.5, "conversation": "c41"}
```
- `passages` (or `chunks`): ids in retriever order, strings or integers; 7 and "7" are the same. A repeated id counts once. A
  request without any is left out; one with a `conversation` is a turn of it, but is in no figure.
- `lengths`, optional: token count of each passage. If all requests have them, shares of tokens are reported too. Alternatively
  `--components FILE` gives them by id, one {"kind": "passage", "id": 7, "token_length": 212} per line (RAGPulse's own file).
- `timestamp`, optional: arrival in seconds, not before the previous line; only load generation uses it.
- `conversation`, optional: a string or integer that the turns of one conversation share. A later turn's chunks come after the
  conversation's history: they have no prefix hits, and chunks that an earlier turn has shown may be dropped.
- `question_tokens`, `system_tokens`, `output_tokens`, optional: token counts for `python -m eval serve --task trace`.
- Other fields are ignored. No text is needed: hash your ids if they are confidential.

A trace is streamed: the file is read once for the facts and once per cell, and no request is kept.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import error as ZlibError

from eval.errors import CommandError
from radix_ext import Chunk, ChunkId

MAX_TOKENS = 10_000_000
"""A higher count must be a mistake: a hash, a byte offset, a time."""


class TraceRequest(NamedTuple):
    """One line: distinct chunks in retriever order, each of 1 token if the line has no lengths. None: not given."""

    chunks: tuple[Chunk, ...]
    has_lengths: bool
    timestamp: float | None = None
    conversation: str | None = None
    question_tokens: int | None = None
    system_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def line(self) -> str:
        """The request as a line of a trace."""
        chunks, has_lengths, *fields = self
        record: dict[str, object] = {"passages": [chunk.id for chunk in chunks]}
        if has_lengths:
            record["lengths"] = [chunk.num_tokens for chunk in chunks]
        record |= {name: value for name, value in zip(self._fields[2:], fields, strict=True) if value is not None}
        return json.dumps(record) + "\n"


@dataclass(slots=True)
class TraceFacts:
    """What is known of a trace after one pass. `counted` requests have chunks; figures are computed over these.

    `num_turns` has the conversations of several turns. `largest_*` is of one request, `distinct_*` of each chunk once.
    """

    num_requests: int = 0
    num_counted: int = 0
    has_lengths: bool = True
    num_turns: Mapping[str, int] = field(default_factory=dict)
    distinct_chunks: int = 0
    distinct_tokens: int = 0
    largest_chunks: int = 0
    largest_tokens: int = 0
    sha256: str = ""


def scan(trace: Iterable[TraceRequest]) -> TraceFacts:
    """The facts of a trace. Raises CommandError as the trace does."""
    facts, digest = TraceFacts(), hashlib.sha256()
    num_turns: Counter[str] = Counter()
    ids: set[ChunkId] = set()
    for request in trace:
        lengths = [chunk.num_tokens for chunk in request.chunks]
        key = "\0".join([chunk.id for chunk in request.chunks])
        digest.update(f"{key}\0\0{request.conversation}\0{lengths}\n".encode("utf-8", "surrogatepass"))
        facts.num_requests += 1
        if request.conversation is not None:
            num_turns[request.conversation] += 1
        if lengths:
            facts.num_counted += 1
            facts.has_lengths &= request.has_lengths
            facts.largest_chunks = max(facts.largest_chunks, len(lengths))
            facts.largest_tokens = max(facts.largest_tokens, sum(lengths))
            facts.distinct_tokens += sum(chunk.num_tokens for chunk in request.chunks if chunk.id not in ids)
            ids.update(chunk.id for chunk in request.chunks)
    facts.num_turns = {name: turns for name, turns in num_turns.items() if turns > 1}
    facts.distinct_chunks, facts.sha256 = len(ids), digest.hexdigest()[:16]
    return facts


class TraceFile:
    """The requests of a file that have chunks, and turns of conversations that have none; each iteration reads the file.

    Equal ids are one `Chunk` object, also of several iterations: memory grows with distinct chunks, not with requests.

    Raises (while iterating):
        CommandError: no such file, not gzip, not UTF-8, not a JSON object, an invalid field (with line number), or no request.
    """

    def __init__(self, path: Path, *, max_requests: int | None = None, components: Path | None = None) -> None:
        self._path, self._max_requests = path, max_requests
        self._lengths = None if components is None else _read_components(components)
        self._known: dict[bool, dict[str, Chunk]] = {False: {}, True: {}}  # without and with a length

    def __iter__(self) -> Iterator[TraceRequest]:
        num_requests = num_counted = 0
        latest: tuple[int, float] | None = None
        for number, record in _records(self._path):
            if num_requests == self._max_requests:
                break
            try:
                request = self._parse(record)
                if request.timestamp is not None:
                    if latest is not None and request.timestamp < latest[1]:
                        raise ValueError(
                            f'"timestamp" {request.timestamp:g} is before {latest[1]:g} of line {latest[0]}: '
                            "lines must be in the order of arrival"
                        )
                    latest = number, request.timestamp
            except ValueError as error:
                raise CommandError(f"{self._path}, line {number}: {error}") from None
            if request.chunks or request.conversation is not None:
                num_requests += 1
                num_counted += bool(request.chunks)
                yield request
        if not num_counted:
            among = "" if self._max_requests is None else f" among the first {self._max_requests}"
            raise CommandError(f"{self._path} has no request with passages{among}")

    def _parse(self, record: Mapping[str, Any]) -> TraceRequest:
        """Parse one request. Raises ValueError for an invalid field."""
        chunks, has_lengths = self._chunks(record)
        conversation = record.get("conversation")
        return TraceRequest(
            chunks,
            has_lengths,
            _timestamp(record.get("timestamp")),
            None if conversation is None else _label("conversation", conversation),
            _count("question_tokens", record),
            _count("system_tokens", record),
            _count("output_tokens", record),
        )

    def _chunks(self, record: Mapping[str, Any]) -> tuple[tuple[Chunk, ...], bool]:
        """The distinct chunks of one line, and whether their lengths are known."""
        field = "passages" if "passages" in record else "chunks"
        if field not in record:
            raise ValueError('has neither "passages" nor "chunks"')
        ids = record[field]
        if not isinstance(ids, list):
            raise ValueError(f'"{field}" must be a list but is {_json_type(ids)}')
        labels = [_label(field, label) for label in ids]
        lengths = record.get("lengths")
        if self._lengths is not None:
            missing = [label for label in labels if label not in self._lengths]
            if missing:
                raise ValueError(f"--components has no length for {missing[0]!r}")
            lengths = [self._lengths[label] for label in labels]
        if lengths is not None and (not isinstance(lengths, list) or len(lengths) != len(ids)):
            raise ValueError(f'"lengths" must be a list of {len(ids)} token counts, one for each of "{field}"')
        known = self._known[lengths is not None]
        chunks: dict[str, Chunk] = {}
        for label, length in zip(labels, lengths or [1] * len(labels), strict=True):
            chunk = known.get(label)
            if chunk is None or type(length) is not int or length != chunk.num_tokens:
                _check_count("lengths", length, "must hold positive integers", minimum=1)
                if chunk is not None:
                    self._refuse_length(field, chunk, length, is_on_line=label in chunks)
                chunk = known[label] = Chunk(ChunkId(label), length)
            chunks[label] = chunk
        return tuple(chunks.values()), lengths is not None

    def _refuse_length(self, field: str, chunk: Chunk, length: int, *, is_on_line: bool) -> NoReturn:
        if is_on_line:
            raise ValueError(f'"{field}" has {chunk.id!r} twice, with {chunk.num_tokens} and with {length} tokens')
        first = next(
            number
            for number, record in _records(self._path)
            if "lengths" in record and chunk.id in map(str, record.get("passages", record.get("chunks")))
        )
        raise ValueError(f"{chunk.id!r} has {length} tokens but had {chunk.num_tokens} on line {first}")


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number from 1, object) of all lines that are not blank."""
    if path.is_fifo():
        raise CommandError(f"{path} must be a file, since it is read several times, but is a pipe")
    number = 0
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(path, "rt", encoding="utf-8-sig") as lines:  # editors may begin a file with a byte order mark
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield number, _record(line, f"{path}, line {number}")
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise CommandError(f"{path} cannot be read: it is a directory, name a file") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise CommandError(f"{path} cannot be read after line {number}: {error}") from None


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line.rstrip("\r\n"), parse_constant=_refuse_constant)
        if isinstance(record, Mapping):
            return record
        what = f": must be a JSON object but is {_json_type(record)}"
    except json.JSONDecodeError as error:
        what = f", column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:
        what = f": {error}"
    raise CommandError(f"{where}{what} (expected: one JSON object per line)")


def _read_components(path: Path) -> dict[str, int]:
    """Id -> tokens of the passages in RAGPulse's file of components."""
    lengths: dict[str, int] = {}
    for number, record in _records(path):
        if record.get("kind", "passage") != "passage":
            continue
        try:
            label, length = _label("id", record.get("id")), record.get("token_length")
            _check_count("token_length", length, "must be a positive integer", minimum=1)
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: {error}") from None
        lengths[label] = length  # type: ignore[assignment]
    if not lengths:
        raise CommandError(f"{path} has no passage with a length")
    return lengths


def _label(field: str, value: object) -> str:
    if type(value) is str and value:
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f'"{field}" must hold strings or integers but has {_json_type(value)}')
    if value == "":
        raise ValueError(f'"{field}" must not hold an empty string')
    return str(value)


def _timestamp(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'"timestamp" must be seconds, a number, but is {_json_type(value)}')
    if not 0 <= value <= 1e12 or not math.isfinite(value):
        raise ValueError(f'"timestamp" must be seconds from 0 to 1e12 but is {_short(value)}')
    return float(value)


def _count(field: str, record: Mapping[str, Any]) -> int | None:
    value: int | None = record.get(field)
    if value is not None:
        _check_count(field, value, "must be an integer of at least 0", minimum=0)
    return value


def _check_count(field: str, value: object, wanted: str, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f'"{field}" {wanted} but has {_short(value)}')
    if value > MAX_TOKENS:
        raise ValueError(f'"{field}" must be token counts of at most {MAX_TOKENS} but has {_short(value)}')


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
