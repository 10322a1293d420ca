"""One run: a folder with its settings, the samples taken so far, and a record that is valid at
every moment.

    <folder>/samples.jsonl   one JSON object per sample, appended when it is done; `key` identifies
                             it
    <folder>/record.json     schema, kind, complete, baseline, name, command, date, git, versions,
                             machine, spec, samples (number, sha256), results, values

`results` are computed from the samples alone, so other figures can be computed from a folder later;
`values` are what `compare` and `report` need of them (`packed.py`), so a record is enough for both.
The same command with the same folder continues an interrupted run; samples in the folder are not
taken again. `git` names the commit with which the run began, `git.resumed_with` those with which it
continued.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.errors import CommandError
from eval.packed import pack_results, pack_samples, record_text, unpack_results
from eval.record import git_state, origin, portable

Sample = dict[str, Any]
Summary = Callable[[Sequence[Sample]], dict[str, Any]]
SCHEMA = 2
"""Of records; 1, without a number, has its values in samples.jsonl alone."""


class Run:
    """A context manager: `add` samples inside; the record is written on exit, also after an
    exception.

    Args:
        folder: new or empty, or the folder of an interrupted run of the same kind and spec, or of a
            run without samples.
        kind: the command: replay, serve, quality, recall, bench.
        spec: every setting, JSON or paths; of paths the record keeps the last part only.
        summarize: samples -> `results`; also called with no samples and with some of them.
        baseline: name of the record to compare this one with, if any.
    Raises (on entering):
        CommandError: the folder holds something else, a complete run, or samples of another spec,
        or cannot be written; or
            a setting is infinite.
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
        # Through JSON, where tuples are lists: else a run's spec would differ from its record's.
        self._kind, self._spec, self._summarize, self._baseline = (
            kind,
            portable(spec),
            summarize,
            baseline,
        )
        self._keys: set[str] = set()
        self._git: dict[str, Any] = {}

    def __enter__(self) -> Run:
        for name, value in self._spec.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise CommandError(f"{name}: expected a finite number, got {value}")
        # Only here: hours later another commit may be checked out, while the old code still runs.
        self._git = git_state()
        try:
            self._resume()
            self.folder.mkdir(parents=True, exist_ok=True)
            # A run that is killed leaves this record, without which `_resume` refuses its samples.
            self._write(complete=False)
        except OSError as error:
            told = (
                f"{self.folder} cannot be written: {error.strerror}; name another folder with --out"
            )
            raise CommandError(told) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write(complete=kind is None)
        if kind is not None and self.samples:
            told = f"{len(self.samples)} samples are in {self.folder}"
            print(f"{told}; the same command with --out {self.folder} goes on", file=sys.stderr)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, sample: Mapping[str, Any]) -> None:
        """Keep one sample. Raises as `add_all`."""
        self.add_all([(key, sample)])

    def add_all(self, samples: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Keep several samples, each with its key, atomically: they are written to disk at once, in
        one write.

        Raises:
            ValueError: a key exists already, or a number is not finite; then no sample is kept.
        """
        rows: dict[str, Sample] = {}
        for key, sample in samples:
            if key in self._keys or key in rows:
                raise ValueError(f"sample {key!r} is there already")
            rows[key] = {"key": key, **sample}
        # Before the file is opened: a number that JSON lacks raises here, with nothing written.
        text = "".join(map(_line, rows.values()))
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(text)
        self._keys |= rows.keys()
        self.samples += rows.values()

    def drop(self, keys: Collection[str]) -> None:
        """Remove those of these samples that exist, on disk too, so that they are taken again."""
        kept = [sample for sample in self.samples if sample["key"] not in keys]
        if len(kept) < len(self.samples):
            _replace(self.folder / "samples.jsonl", "".join(map(_line, kept)))
            self.samples, self._keys = kept, {sample["key"] for sample in kept}

    def results(self) -> dict[str, Any]:
        """The figures of the samples so far."""
        return self._summarize(self.samples)

    # Private, in order of use

    def _resume(self) -> None:
        if not (self.folder / "record.json").exists():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise CommandError(
                    f"{self.folder} is not the folder of a run: name one that is new or empty"
                )
            return
        record = read_record(self.folder)
        # Records are added, never edited.
        if record["complete"]:
            raise CommandError(f"{self.folder} holds a complete run: name another folder")
        self.samples = read_samples(self.folder)
        self._keys = {sample["key"] for sample in self.samples}
        # With none the settings may change: a mistyped first command needs no other folder.
        if self.samples:
            begun = {"the command": record["kind"], **record["spec"]}
            now = {"the command": self._kind, **self._spec}
            if changed := sorted(
                name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name)
            ):
                raise CommandError(
                    f"{self.folder} was begun with other settings: {', '.join(changed)}"
                )
            self._git = _resumed(record["git"], self._git)
        # A sample whose line was cut off is dropped, since the next one must not be appended to it.
        path = self.folder / "samples.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text[-1:] not in ("", "\n"):
            _replace(path, text[: text.rfind("\n") + 1])

    def _write(self, *, complete: bool) -> None:
        head = {
            "schema": SCHEMA,
            "kind": self._kind,
            "complete": complete,
            "baseline": self._baseline,
        }
        record = {
            **head,
            "name": self.folder.name,
            **origin(),
            "git": self._git,
            "spec": self._spec,
        }
        record["samples"] = (
            {"number": len(self.samples), "sha256": _sha256(self.folder)} if self.samples else None
        )
        record["results"] = pack_results(self._summarize(self.samples))
        record["values"] = pack_samples(self.samples, self._spec.get("block"))
        _replace(self.folder / "record.json", record_text(record))


def new_folder(command: str) -> Path:
    """The folder of a run without `--out`."""
    return Path("runs") / f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-{command}"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run's folder.
    Raises CommandError for a folder without one, or with one of another format."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder} holds no record.json that can be read: {error}") from None
    if not isinstance(record, dict) or "kind" not in record:
        raise CommandError(f"{path} has no kind: it was not written by `python -m eval`")
    return {
        **record,
        **({"results": unpack_results(record["results"])} if "results" in record else {}),
    }


def read_samples(folder: Path) -> list[Sample]:
    """All complete samples of a run's folder, in the order of the file;
    an incomplete last line is left out."""
    path = folder / "samples.jsonl"
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    samples = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            samples.append(json.loads(line))
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: {error}") from None
    return samples


def _resumed(begun: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A run's `git` when it continues with the state `now`; dirty if it ever was."""
    _, *others = dict.fromkeys([begun["sha"], *begun.get("resumed_with", []), now["sha"]])
    known = {"sha": begun["sha"], "dirty": begun["dirty"] or now["dirty"]}
    return known | ({"resumed_with": others} if others else {})


def _sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()


def _line(sample: Sample) -> str:
    return json.dumps(sample, separators=(",", ":"), allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    # Killed before this line, the run still has its old file whole.
    temporary.replace(path)
