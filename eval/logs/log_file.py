"""A log's file as a trace: what can be read of it, and which lines cannot."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

from eval.errors import CommandError
from eval.logs.call import UnreadError
from eval.logs.openai import call_of
from eval.logs.passages import Passages
from eval.logs.spans import Span, calls_of, is_spans, spans_of
from eval.replay.trace import TraceRequest

MAX_NAMED = 20
"""Lines named one by one; the others are counted by reason."""


class LogFile:
    """Requests in the order of their times, or, where not all have one, of the file. All are in
    memory, without their texts.

    Attributes:
        unread: JSON: number of lines, of requests, what could not be read with its reasons.
    Raises:
        CommandError: no such file, or no request with passages in it.
    """

    def __init__(self, path: Path, passages: Passages, *, max_requests: int | None = None) -> None:
        self._passages = passages
        self._named: list[tuple[int, str]] = []
        self._reasons: Counter[str] = Counter()
        self._num_lines = 0
        found = [*self._requests(path)]
        if all(each.timestamp is not None for each in found):
            found.sort(key=lambda each: each.timestamp or 0.0)
        else:
            found = [each._replace(timestamp=None) for each in found]
        self._found = found[:max_requests]
        self.unread: dict[str, Any] = {
            "lines": self._num_lines,
            "requests": len(found),
            "named": sorted(self._named)[:MAX_NAMED],
            "histories": passages.num_histories,
            "reasons": dict(self._reasons.most_common(MAX_NAMED)),
        }
        if not found:
            told = "; ".join(f"line {number}: {reason}" for number, reason in self._named[:3])
            raise CommandError(f"{path}: no request with passages; {told or 'the file is empty'}")

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _requests(self, path: Path) -> Iterator[TraceRequest]:
        spans: list[Span] = []
        for number, row in self._rows(path):
            try:
                if is_spans(row):
                    spans += spans_of(row, number)
                else:
                    yield self._passages.request(call_of(row))
            except UnreadError as error:
                self._skip(number, str(error))
        for call, number in calls_of(spans):
            try:
                yield self._passages.request(call)
            except UnreadError as error:
                self._skip(number, str(error))

    def _rows(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    self._num_lines += 1
                    try:
                        row = json.loads(line.decode("utf-8-sig"))
                    except UnicodeDecodeError:
                        self._skip(number, "not UTF-8")
                    except json.JSONDecodeError as error:
                        self._skip(number, f"not JSON: {error.msg}")
                    except (ValueError, RecursionError):
                        self._skip(number, "not JSON that can be read")
                    else:
                        if isinstance(row, dict):
                            yield number, row
                        else:
                            self._skip(number, "not a JSON object")
        except FileNotFoundError:
            raise CommandError(f"{path} does not exist") from None
        except (EOFError, ZlibError, gzip.BadGzipFile):
            self._skip(number + 1, "the compressed file ends early")
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error}") from None

    def _skip(self, number: int, reason: str) -> None:
        self._reasons[reason] += 1
        if len(self._named) < 1000:
            self._named.append((number, reason))


def histories_text(unread: Mapping[str, Any]) -> list[str]:
    """For people: chunks that find nothing, since no line says which conversation is theirs."""
    count = unread["histories"]
    told = "have a conversation's history before their chunks, and no id of it: they find nothing"
    return [f"{count:,} of {unread['requests']:,} requests {told}."] if count else []


def unread_text(unread: Mapping[str, Any]) -> list[str]:
    """For people: what was not read, by line."""
    skipped = sum(unread["reasons"].values())
    lines = [f"Read {unread['requests']:,} requests of {unread['lines']:,} lines."]
    lines += histories_text(unread)
    if skipped:
        lines[0] += f" {skipped:,} were not read: " + "; ".join(
            f"{count:,}: {reason}" for reason, count in unread["reasons"].items()
        )
        lines += [f"  line {number}: {reason}" for number, reason in unread["named"]]
        if skipped > len(unread["named"]):
            lines.append(f"  and {skipped - len(unread['named']):,} more")
    return lines
