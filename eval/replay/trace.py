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
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from zlib import error as ZlibError

from eval.errors import CommandError
from radix_ext import Chunk, ChunkId

MAX_TOKENS = 10_000_000
"""A higher count must be a mistake: a hash, a byte offset, a time."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line: distinct chunks in retriever order, each of 1 token if the line has no lengths. None: not given."""

    chunks: tuple[Chunk, ...]
    has_lengths: bool
    timestamp: float | None = None
    conversation: str | None = None
    question_tokens: int | None = None
    system_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests that have chunks, and turns of conversations that have none, in the order of arrival."""

    requests: tuple[TraceRequest, ...]

    @property
    def counted(self) -> tuple[TraceRequest, ...]:
        """The requests that have chunks, over which figures are computed."""
        return tuple(request for request in self.requests if request.chunks)

    @property
    def has_lengths(self) -> bool:
        """Whether every request has the lengths of its chunks."""
        return all(request.has_lengths for request in self.counted)

    @property
    def has_conversations(self) -> bool:
        """Whether any conversation has a second turn."""
        named = [request.conversation for request in self.requests if request.conversation is not None]
        return len(set(named)) < len(named)


def read_trace(
    path: Path, *, k: int | None = None, max_requests: int | None = None, components: Path | None = None
) -> Trace:
    """Read a trace, at most the first `k` chunks of a request and the first `max_requests` requests that are not left out.

    Raises:
        CommandError: no such file, not gzip, not UTF-8, not a JSON object, an invalid field (with line number), or no request.
    """
    lengths = None if components is None else _read_components(components)
    requests: list[TraceRequest] = []
    latest: tuple[int, float] | None = None
    told: dict[str, tuple[int, int]] = {}
    for number, record in _records(path):
        if max_requests is not None and len(requests) == max_requests:
            break
        try:
            request = _parse(record, k, lengths)
            if request.timestamp is not None:
                if latest is not None and request.timestamp < latest[1]:
                    raise ValueError(
                        f'"timestamp" {request.timestamp:g} is before {latest[1]:g} of line {latest[0]}: '
                        "lines must be in the order of arrival"
                    )
                latest = number, request.timestamp
            for chunk in request.chunks if request.has_lengths else ():
                line, length = told.setdefault(chunk.id, (number, chunk.num_tokens))
                if length != chunk.num_tokens:
                    raise ValueError(f"{chunk.id!r} has {chunk.num_tokens} tokens but had {length} on line {line}")
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: {error}") from None
        if request.chunks or request.conversation is not None:
            requests.append(request)
    trace = Trace(tuple(requests))
    if not trace.counted:
        among = "" if max_requests is None else f" among the first {max_requests}"
        raise CommandError(f"{path} has no request with passages{among}")
    return trace


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number from 1, object) of all lines that are not blank."""
    for number, line in _lines(path):
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(record, Mapping):
                raise ValueError(f"must be a JSON object but is {_json_type(record)}")
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{path}, line {number}: {error} (expected: one JSON object per line)") from None
        yield number, record


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(
            path, "rt", encoding="utf-8-sig"
        ) as lines:  # `-sig`: some editors begin a file with a byte order mark
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield number, line
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise CommandError(f"{path} cannot be read: it is a directory, name a file") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise CommandError(f"{path} cannot be read after line {number}: {error}") from None


def _parse(record: Mapping[str, Any], k: int | None, lengths: Mapping[str, int] | None) -> TraceRequest:
    """Parse one request. Raises ValueError for an invalid field."""
    chunks, has_lengths = _chunks(record, lengths)
    conversation = record.get("conversation")
    return TraceRequest(
        chunks[:k],
        has_lengths,
        timestamp=_timestamp(record.get("timestamp")),
        conversation=None if conversation is None else _label("conversation", conversation),
        **{name: _count(name, record.get(name)) for name in ("question_tokens", "system_tokens", "output_tokens")},
    )


def _chunks(record: Mapping[str, Any], known: Mapping[str, int] | None) -> tuple[tuple[Chunk, ...], bool]:
    """The distinct chunks of one line, and whether their lengths are known."""
    field = "passages" if "passages" in record else "chunks"
    if field not in record:
        raise ValueError('has neither "passages" nor "chunks"')
    ids = record[field]
    if not isinstance(ids, list):
        raise ValueError(f'"{field}" must be a list but is {_json_type(ids)}')
    labels = [_label(field, label) for label in ids]
    lengths: Sequence[object] | None = record.get("lengths")
    if known is not None:
        missing = [label for label in labels if label not in known]
        if missing:
            raise ValueError(f"--components has no length for {missing[0]!r}")
        lengths = [known[label] for label in labels]
    if lengths is not None and (not isinstance(lengths, list) or len(lengths) != len(ids)):
        raise ValueError(f'"lengths" must be a list of {len(ids)} token counts, one for each of "{field}"')
    chunks: dict[str, Chunk] = {}
    for label, length in zip(labels, lengths or [1] * len(labels), strict=True):
        _check_count("lengths", length, "must hold positive integers", minimum=1)
        chunk = chunks.setdefault(label, Chunk(ChunkId(label), length))
        if chunk.num_tokens != length:
            raise ValueError(f'"{field}" has {label!r} twice, with {chunk.num_tokens} and with {length} tokens')
    return tuple(chunks.values()), lengths is not None


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


def _count(field: str, value: object) -> int | None:
    if value is not None:
        _check_count(field, value, "must be an integer of at least 0", minimum=0)
    return value  # type: ignore[return-value]


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
