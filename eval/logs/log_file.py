"""A log's file as a trace: what can be read of it, and which lines cannot."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any
from zlib import error as ZlibError

from eval.errors import CommandError
from eval.logs.call import UnreadError
from eval.logs.openai import call_of
from eval.logs.passages import NO_SEPARATOR, Passages
from eval.logs.spans import Span, calls_of, is_spans, spans_of
from eval.progress import progress
from eval.replay.trace import TraceRequest

MAX_NAMED = 20
"""Lines named one by one; the others are counted by reason."""
EXAMPLE = r"--separator '\n---\n', or with --between 'Context:' 'Question:' around all passages"


class LogFile:
    """Requests in the order of their times, or, where not all have one, of the file. All are in
    memory, without their texts.

    Attributes:
        unread: JSON: number of lines, of requests, of their passages, what could not be read with
            its reasons.
        example: one request as it was cut, for a terminal alone; none was: empty.
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
        self._found, cuts = found[:max_requests], passages.cuts
        self.example = cuts.example
        sizes = [len(each.chunks) for each in found] or [0]
        self.unread: dict[str, Any] = {
            "lines": self._num_lines,
            "requests": len(found),
            "passages": [median_low(sizes), min(sizes), max(sizes)],
            "cut": [cuts.num_requests, cuts.num_differing],
            "named": sorted(self._named)[:MAX_NAMED],
            "histories": passages.num_histories,
            "reasons": dict(self._reasons.most_common(MAX_NAMED)),
        }
        if not found:
            raise CommandError(f"{path}: no request with passages; {self._nothing()}")

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
            except RecursionError:
                self._skip(number, "nested too deeply")
        for call, number in calls_of(spans):
            try:
                yield self._passages.request(call)
            except UnreadError as error:
                self._skip(number, str(error))

    def _rows(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            is_packed = path.suffix == ".gz"
            look: dict[str, Any] = {"unit": "B", "unit_scale": True}
            with (
                (gzip.open if is_packed else open)(path, "rb") as file,
                progress("read", None if is_packed else path.stat().st_size, **look) as bar,
            ):
                for number, line in enumerate(file, 1):
                    bar.update(len(line))
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

    def _nothing(self) -> str:
        told = []
        for reason, count in self._reasons.most_common(3):
            first = min((line for line, named in self._named if named == reason), default=0)
            more = f" and {count - 1:,} more" if count > 1 else ""
            told.append(f"line {first}{more}: {reason}")
            if reason == NO_SEPARATOR:
                told.append(f"such as {EXAMPLE}")
        return "; ".join(told) or "no line tells of one"

    def _skip(self, number: int, reason: str) -> None:
        self._reasons[reason] += 1
        if len(self._named) < 1000:
            self._named.append((number, reason))


def warnings_text(unread: Mapping[str, Any]) -> list[str]:
    """For people: chunks that find nothing, since no line says which conversation is theirs, and
    cuts that are probably wrong."""
    (num_cut, num_differing), told = unread["cut"], []
    if count := unread["histories"]:
        told.append(
            f"{count:,} of {unread['requests']:,} requests have a conversation's history before"
            " their chunks, and no id of it: they find nothing."
        )
    if 2 * num_differing > num_cut:
        told.append(
            f"{num_differing:,} of {num_cut:,} requests have another text before their first"
            " passage, behind the same system message: a passage is probably in it, unless the"
            " question is. What stands before the first and behind the last --separator is no"
            " passage; --between says where passages begin and end."
        )
    if num_cut and unread["passages"][2] == 1:
        told.append("No request has two passages: --separator probably matches nothing.")
    return told


def passages_text(unread: Mapping[str, Any]) -> str:
    """For people: "4 passages each (median; 3 to 5)"."""
    median, low, high = unread["passages"]
    return f"{median:,} passages each" + (f" (median; {low:,} to {high:,})" if low < high else "")


def unread_text(unread: Mapping[str, Any]) -> list[str]:
    """For people: what was read, what was not, by line, and what is probably wrong."""
    skipped = sum(unread["reasons"].values())
    num_requests, each = f"{unread['requests']:,} requests", passages_text(unread)
    lines = [f"Read {num_requests} of {unread['lines']:,} lines, {each}."]
    if skipped:
        lines[0] += f" {skipped:,} were not read: " + "; ".join(
            f"{reason} ({count:,} of {skipped:,})" for reason, count in unread["reasons"].items()
        )
        lines += [f"  line {number}: {reason}" for number, reason in unread["named"]]
        if skipped > len(unread["named"]):
            lines.append(f"  and {skipped - len(unread['named']):,} more")
    return lines + [f"Warning: {told}" for told in warnings_text(unread)]
