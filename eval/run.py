"""One run: a folder that holds its settings, its samples as they come, and a record that is valid at every moment.

    <folder>/samples.jsonl   one JSON object a sample, appended when it is done; `key` says which one it is
    <folder>/record.json     `make_record`'s fields, `kind`, `complete`, `baseline`; `results` are computed from the samples alone

A run that was interrupted is continued by the same command with the same folder: samples that are there are not taken again.
Figures are a pure function of the samples, so whoever reads a folder can compute others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.errors import CommandError
from eval.record import make_record, portable

Sample = dict[str, Any]
Summary = Callable[[Sequence[Sample]], dict[str, Any]]


class Run:
    """Use it as a context manager; `add` samples, and the record is written on the way out, whatever the reason.

    Args:
        folder: new or empty, or that of an interrupted run of the same kind and spec.
        kind: the command: replay, serve, quality, sensitivity.
        spec: every setting, JSON or paths; of paths the record keeps the last part only.
        summarize: samples -> `results`; also called with none and with some.
        baseline: name of the record that this one is to be read beside, if any.
    Raises (on entering):
        CommandError: the folder holds something else, a complete run, or one with another spec.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: str,
        spec: Mapping[str, Any],
        summarize: Summary,
        baseline: str | None = None,
    ) -> None:
        self.folder = folder
        self.samples: list[Sample] = []
        self._kind, self._spec, self._summarize, self._baseline = kind, portable(spec), summarize, baseline
        self._keys: set[str] = set()

    def __enter__(self) -> Run:
        self._resume()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(complete=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(complete=kind is None)
        if kind is not None:
            print(
                f"{len(self.samples)} samples are in {self.folder}; the same command goes on from there",
                file=sys.stderr,
            )

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, sample: Mapping[str, Any]) -> None:
        """Keep one sample, on disk at once. Raises ValueError for a key that is there."""
        if key in self._keys:
            raise ValueError(f"sample {key!r} is there already")
        row = {"key": key, **sample}
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._keys.add(key)
        self.samples.append(row)

    def results(self) -> dict[str, Any]:
        """The figures of the samples so far."""
        return self._summarize(self.samples)

    # Private, in order of use

    def _resume(self) -> None:
        path = self.folder / "record.json"
        if not path.exists():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise CommandError(f"{self.folder} is no folder of a run: name one that is new or empty")
            return
        record = read_record(self.folder)
        if record["complete"]:
            raise CommandError(f"{self.folder} holds a run that is complete: name another folder")
        if (record["kind"], record["spec"]) != (self._kind, self._spec):
            changed = [
                k for k in record["spec"].keys() | self._spec.keys() if record["spec"].get(k) != self._spec.get(k)
            ]
            raise CommandError(
                f"{self.folder} was begun with other settings: {', '.join(sorted(changed)) or 'the command'}"
            )
        self.samples = read_samples(self.folder)
        self._keys = {sample["key"] for sample in self.samples}
        # A sample that was cut off in the middle of its line is gone, and the next one must not be appended to it.
        lines = "".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in self.samples)
        (self.folder / "samples.jsonl").write_text(lines, encoding="utf-8")

    def _write(self, *, complete: bool) -> None:
        record = make_record(self.folder.name, spec=self._spec, results=self._summarize(self.samples))
        record = {"kind": self._kind, "complete": complete, "baseline": self._baseline, **record}
        temporary = self.folder / "record.json.new"
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.folder / "record.json")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run's folder. Raises CommandError for a folder without one, or with one of an older format."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(f"{folder} holds no record.json") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(record, dict) or "kind" not in record:
        raise CommandError(f"{path} has no kind: it was not written by `python -m eval`")
    return record


def read_samples(folder: Path) -> list[Sample]:
    """All whole samples of a run's folder, in the order in which they came; a line cut off at the end is left out."""
    try:
        text = (folder / "samples.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{folder / 'samples.jsonl'}: {error}") from None
    samples = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            samples.append(json.loads(line))
        except ValueError as error:
            raise CommandError(f"{folder / 'samples.jsonl'}, line {number}: {error}") from None
    return samples
