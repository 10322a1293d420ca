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


@dataclass
class BuildRun:
    """`passages`, `vectors`: numbers in the directory when the process ended."""

    killed_in: str | None
    passages: int
    vectors: int
    peak_gib: float


def build(
    source: Path,
    index: Path,
    *,
    num_passages: int,
    dim: int,
    kill_in: str | None,
    rng: random.Random,
) -> BuildRun:
    """Run the build command; kill it at a random moment of the stage, if it is reached."""
    command = [sys.executable, "-m", "retrieval", "build", str(source), "--out", str(index)]
    command += ["--no-split", "--dim", str(dim), "--json"]
    since, log = time.time(), index.with_suffix(".log")
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
    is_due = _moment(kill_in, index, num_passages, dim, since, rng)
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
        raise RuntimeError(f"the build failed ({process.returncode}): {log.read_text()[-2000:]}")
    stage = _stage(index, num_passages, dim, since) if killed else None
    return BuildRun(stage, _num_passages(index), _num_vectors(index, dim), peak / 2**30)


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
        return lambda: after(
            BM25_S * num_passages, _stage(index, num_passages, dim, since) == "bm25"
        )
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


def _peak_bytes(pid: int) -> int:
    """By proc(5); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
