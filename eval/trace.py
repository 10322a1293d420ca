"""Traces: which chunks each request retrieved, read from JSON Lines.

One JSON object a line, in the order of arrival, plain or gzip (by the name's `.gz`):
```
{"passages": ["doc7#2", "doc1#0"], "lengths": [212, 198], "timestamp": 12.5}
```
- `passages` (or `chunks`): ids in retriever order, strings or integers; 7 and "7" are the same. A repeated id counts once, a
  request without any is left out.
- `lengths`, optional: tokens of each of them, positive integers. Given on all requests, the token hit rate is told too.
- Everything else, `timestamp` for one, is not looked at.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import error as ZlibError

from eval.errors import CommandError
from radix_ext import Chunk, ChunkId


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as the tree sees them: distinct chunks in retriever order; without lengths every chunk has 1 token."""

    requests: tuple[tuple[Chunk, ...], ...]
    has_lengths: bool


def read_trace(path: Path, *, k: int | None, max_requests: int | None) -> Trace:
    """Read a trace, at most the first `k` chunks of a request and the first `max_requests` requests that have any.

    Raises:
        CommandError: no such file, not gzip, not UTF-8, no JSON object, a wrong field (with the line number), no request.
    """
    requests: list[tuple[Chunk, ...]] = []
    has_lengths = True
    for number, line in _lines(path):
        if max_requests is not None and len(requests) == max_requests:
            break
        try:
            record = json.loads(line)
            chunks, with_lengths = _parse_record(record)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{path}, line {number}: {error}") from None
        if chunks:
            requests.append(chunks[:k])
            has_lengths = has_lengths and with_lengths
    if not requests:
        raise CommandError(f"{path} has no request with passages")
    return Trace(tuple(requests), has_lengths)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of all lines that are not blank."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield number, line
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise CommandError(f"{path} cannot be read after line {number}: {error}") from None


def _parse_record(record: object) -> tuple[tuple[Chunk, ...], bool]:
    """The distinct chunks of one line, and whether it gives their lengths. ValueError says what is wrong."""
    if not isinstance(record, Mapping):
        raise ValueError(f"must be a JSON object but is {_json_type(record)}")
    field = "passages" if "passages" in record else "chunks"
    if field not in record:
        raise ValueError('has neither "passages" nor "chunks"')
    ids, lengths = record[field], record.get("lengths")
    if not isinstance(ids, list):
        raise ValueError(f'"{field}" must be a list but is {_json_type(ids)}')
    if lengths is not None and (not isinstance(lengths, list) or len(lengths) != len(ids)):
        raise ValueError(f'"lengths" must be a list of {len(ids)} token counts, one for each of "{field}"')
    chunks: dict[str, Chunk] = {}
    for label, length in zip(ids, lengths or [1] * len(ids), strict=True):
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f'"{field}" must hold strings or integers but has {_json_type(label)}')
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f'"lengths" must hold positive integers but has {length!r}')
        chunks.setdefault(str(label), Chunk(ChunkId(str(label)), length))
    return tuple(chunks.values()), lengths is not None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
