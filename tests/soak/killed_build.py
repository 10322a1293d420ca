"""Runs `python -m retrieval build` in a process, kills it at a random moment of a stage, and
measures its memory until then.

    read     after a random share of the passages
    encode   after a random share of the vectors
    add      some seconds after the last vector: while FAISS is trained, filled, or written
    bm25     some seconds after the BM25 index was begun

The progress of a build is observed from outside, by the files that it has written. Memory is the
kernel's high-water mark of resident pages, including memory-mapped files.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from retrieval.errors import RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.manifest import PASSAGES, VECTORS
from retrieval.store import PassageStore

STAGES = ("read", "encode", "add", "bm25")
ADD_S, BM25_S = 100e-6, 40e-6
"""Estimated times of those stages per passage, for choosing a random moment in them."""
POLL_S = 0.02


@dataclass(frozen=True)
class BuildRun:
    """One process. `passages`, `vectors`: numbers in the directory when it ended."""

    killed_in: str | None
    passages: int
    vectors: int
    peak_gib: float


@dataclass
class Build:
    """The command over `source`, run into `index` again and again."""

    source: Path
    index: Path
    num_passages: int
    dim: int
    rng: random.Random

    def run(self, kill_in: str | None) -> BuildRun:
        """Kill it at a random moment of the stage, if it is reached."""
        command = [sys.executable, "-m", "retrieval", "build", str(self.source), "--no-split"]
        command += ["--out", str(self.index), "--dim", str(self.dim), "--json"]
        since, log = time.time(), self.index.with_suffix(".log")
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        is_due = self._moment(kill_in, since)
        peak, killed = 0, False
        try:
            while process.poll() is None:
                peak = max(peak, _peak_bytes(process.pid))
                if is_due():
                    process.kill()
                    killed = process.wait() < 0
                    break
                time.sleep(POLL_S)
        finally:
            process.kill()
        if not killed and process.returncode:
            raise RuntimeError(f"build failed ({process.returncode}): {log.read_text()[-2000:]}")
        stage = self._stage(since) if killed else None
        return BuildRun(stage, self._num_passages(), self._num_vectors(), peak / 2**30)

    def _moment(self, stage: str | None, since: float) -> Callable[[], bool]:
        """Whether the random moment of `stage` is reached."""
        num = self.rng.uniform(0.1, 0.9) * self.num_passages
        begun: list[float] = []

        def after(seconds: float, has_begun: bool) -> bool:
            if has_begun and not begun:
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() - begun[0] >= seconds

        moments: dict[str | None, Callable[[], bool]] = {
            "read": lambda: self._num_passages() >= num,
            "encode": lambda: self._num_vectors() >= num,
            "add": lambda: after(ADD_S * num, self._num_vectors() >= self.num_passages),
            "bm25": lambda: after(BM25_S * num, self._stage(since) == "bm25"),
        }
        return moments.get(stage, lambda: False)

    def _stage(self, since: float) -> str:
        """Of a build that was started at `since`, by the files that it has written."""
        if any(path.stat().st_ctime >= since for path in self.index.glob("bm25-*")):
            return "bm25"
        if self._num_vectors() >= self.num_passages:
            return "add"
        return "encode" if (self.index / STATE_FILE).exists() else "read"

    def _num_passages(self) -> int:
        try:
            with closing(PassageStore(self.index / PASSAGES, writable=False)) as store:
                return store.num_rows
        except RetrievalError:  # not begun yet
            return 0

    def _num_vectors(self) -> int:
        path = self.index / VECTORS
        return path.stat().st_size // (2 * self.dim) if path.exists() else 0


def _peak_bytes(pid: int) -> int:
    """By proc(5); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
