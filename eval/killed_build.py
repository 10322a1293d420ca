"""Runs `python -m retrieval build` in a process, kills it at a random moment of a stage, and measures time and memory until then.

    read     after a random share of the passages           encode   after a random share of the vectors
    add      some seconds after the last vector: while FAISS is trained or filled, or its file is written
    bm25     some seconds after the BM25 index was begun

The progress of a build is observed from outside, by the files that it has written. Times of its stages are read from its
progress bars, to a second; a shorter stage has no bar. Memory is the kernel's high-water mark of resident pages, including
memory-mapped files, and a sampled maximum without them.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from retrieval.errors import RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.manifest import PASSAGES, VECTORS
from retrieval.store import PassageStore

STAGES = ("read", "encode", "add", "bm25")
ADD_S, BM25_S = 100e-6, 40e-6
"""Estimated times of those stages per passage, for choosing a random moment in them."""
POLL_S = 0.02
_BAR = re.compile(r"(\w+) *: .*\[(\d+(?::\d\d)+)[<,]")


@dataclass
class BuildRun:
    """One process of the build.

    `passages`, `vectors`: numbers in the directory when the process ended; `stages`: seconds; `report`: the command's own.
    """

    killed_in: str | None
    seconds: float
    cpu_seconds: float
    passages: int
    vectors: int
    peak_gib: float
    peak_anonymous_gib: float
    stages: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] | None = None


class StageTimes:
    """Reads a build's progress bars while it runs; `seconds` is valid after the build has ended."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._spans: dict[str, tuple[float, float]] = {}
        self.text = ""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage that had a bar, and of the intervals before encode (fit) and add (train)."""
        self._thread.join()
        found: dict[str, float] = {}
        before: float | None = None
        for stage, (start, end) in self._spans.items():
            hidden = {"encode": "fit", "add": "train"}.get(stage)
            if hidden and before is not None and start - before >= 1:
                found[hidden] = round(start - before, 1)
            found[stage] = round(end - start, 1)
            before = end
        return found

    def _follow(self) -> None:
        for line in _lines(self._stream):
            if match := _BAR.match(line):
                now = time.monotonic()
                elapsed = 0
                for part in match[2].split(":"):
                    elapsed = 60 * elapsed + int(part)
                start = self._spans.get(match[1], (now - elapsed, 0.0))[0]
                self._spans[match[1]] = (start, now)
            elif line.strip():
                self.text = (self.text + line + "\n")[-2000:]


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines that end in a newline or, as progress bars do, in a carriage return."""
    rest = b""
    while block := stream.read1(1 << 16):  # type: ignore[attr-defined]
        *lines, rest = re.split(rb"[\r\n]", rest + block)
        yield from (line.decode("utf-8", "replace") for line in lines)
    yield rest.decode("utf-8", "replace")


def build(
    source: Path, index: Path, *, num_passages: int, dim: int, kill_in: str | None, rng: random.Random
) -> BuildRun:
    """Run the build command; kill it at a random moment of the stage `kill_in`, if it is reached. Raises if it fails."""
    command = [sys.executable, "-m", "retrieval", "build", str(source), "--out", str(index)]
    start, since, cpu_before = time.monotonic(), time.time(), _children_cpu()
    process = subprocess.Popen(
        [*command, "--no-split", "--dim", str(dim), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    times = StageTimes(process.stderr)
    is_due = _moment(kill_in, index, num_passages, dim, since, rng)
    peak = anonymous = 0
    killed = False
    try:
        while process.poll() is None:
            memory = _memory(process.pid)
            peak, anonymous = max(peak, memory.get("VmHWM", 0)), max(anonymous, memory.get("RssAnon", 0))
            if is_due():
                process.kill()
                killed = process.wait() < 0
                break
            time.sleep(POLL_S)
    finally:
        process.kill()
    output = process.stdout.read()
    seconds, stages = time.monotonic() - start, times.seconds()
    if not killed and process.returncode:
        raise RuntimeError(f"the build failed ({process.returncode}): {times.text}")
    return BuildRun(
        killed_in=_stage(index, num_passages, dim, since) if killed else None,
        seconds=round(seconds, 1),
        cpu_seconds=round(_children_cpu() - cpu_before, 1),
        passages=_num_passages(index),
        vectors=_num_vectors(index, dim),
        peak_gib=round(peak / 2**30, 3),
        peak_anonymous_gib=round(anonymous / 2**30, 3),
        stages=stages,
        report=None if killed else json.loads(output),
    )


def _moment(
    stage: str | None, index: Path, num_passages: int, dim: int, since: float, rng: random.Random
) -> Callable[[], bool]:
    """Whether the random moment of `stage` is reached."""
    share = rng.uniform(0.1, 0.9)
    begun: list[float] = []

    def after(seconds: float, has_begun: bool) -> bool:
        if has_begun and not begun:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] >= share * seconds

    if stage == "read":
        return lambda: _num_passages(index) >= share * num_passages
    if stage == "encode":
        return lambda: _num_vectors(index, dim) >= share * num_passages
    if stage == "add":
        return lambda: after(ADD_S * num_passages, _num_vectors(index, dim) >= num_passages)
    if stage == "bm25":
        return lambda: after(BM25_S * num_passages, _stage(index, num_passages, dim, since) == "bm25")
    return lambda: False


def _stage(index: Path, num_passages: int, dim: int, since: float) -> str:
    """The stage of a build that was started at `since`, by the files that it has written."""
    if any(path.stat().st_ctime >= since for path in index.glob("bm25-*")):
        return "bm25"
    if _num_vectors(index, dim) >= num_passages:
        return "add"
    return "encode" if (index / STATE_FILE).exists() else "read"


def _num_passages(index: Path) -> int:
    try:
        store = PassageStore(index / PASSAGES, writable=False)
        rows = store.num_rows
        store.close()
        return rows
    except RetrievalError:  # not begun yet
        return 0


def _num_vectors(index: Path, dim: int) -> int:
    path = index / VECTORS
    return path.stat().st_size // (2 * dim) if path.exists() else 0


def _children_cpu() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory(pid: int) -> dict[str, int]:
    """Memory in bytes, by the names of proc(5); empty if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
