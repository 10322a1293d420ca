"""Writes the nearest passages of every passage to a file.

Knows an open index, not the model that reads the files later. FusionRAG (3.1) computes a passage's KV after its neighbours,
because passages that are retrieved for one question tend to be each other's neighbours (`python -m eval recall` measures it).

    neighbors file    {"id": "d1#0", "neighbors": ["d7#0", "d3#812", ...]}    one line for every passage, nearest first
    corpus file       {"id": "d1#0", "text": "..."}                           the same passages, as the served model reads them
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.manifest import sync
from retrieval.progress import Progress

BATCH_ROWS = 1024
"""Passages whose neighbours are searched in one batch; a killed run loses at most one batch."""


def nearest(index: Index, first: int, last: int, *, n: int, nprobe: int) -> dict[int, list[int]]:
    """The rows of the `n` most similar passages of every live row in `[first, last)`, nearest first.

    Similarity is the inner product of passage vectors. A passage is never its own neighbour, even if another one has an equal
    vector. Returns fewer than `n` if the index, or the `nprobe` lists visited, hold fewer.

    Raises:
        RetrievalError: `n` is less than 1.
    """
    if n < 1:
        raise RetrievalError(f"neighbors: n must be at least 1, got {n}")
    rows = np.arange(first, last, dtype=np.int64)
    is_live = index.is_live(rows)
    rows = rows[is_live]
    if not len(rows):
        return {}
    _, found = index.search_dense(index.vectors(first, last)[is_live], k=n + 1, nprobe=nprobe)
    # With equal vectors the passage itself may not come first, or not be among the n + 1 at all.
    return {
        row: [other for other in others if other not in (-1, row)][:n]
        for row, others in zip(rows.tolist(), found.tolist(), strict=True)
    }


def write_neighbors(index: Index, path: Path, *, n: int, nprobe: int, progress: Progress) -> int:
    """Write the neighbors file of a whole index.

    Lines are written to a hidden file next to `path`, which is renamed when complete. An interrupted run continues after its
    last complete line if index, generation and settings are the same; otherwise it starts again.

    Args:
        progress: called with ("neighbors", rows done, rows in all) after every batch.

    Returns:
        Number of lines that this run wrote.

    Raises:
        RetrievalError: see `nearest`, or the file cannot be written.
    """
    served = hashlib.blake2b(index.manifest.to_json().encode(), digest_size=8).hexdigest()
    partial = path.with_name(f".{path.name}.{served}-{n}-{nprobe}.partial")
    num_lines = 0
    with _completed(path, partial):
        for stale in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
            if stale != partial:
                stale.unlink()
        start = _resume(index, partial)
        with partial.open("a", encoding="ascii") as file:
            for first in range(start, index.num_rows, BATCH_ROWS):
                last = min(first + BATCH_ROWS, index.num_rows)
                for line in _lines(index, nearest(index, first, last, n=n, nprobe=nprobe)):
                    file.write(line)
                    num_lines += 1
                file.flush()
                progress("neighbors", last, index.num_rows)
    return num_lines


def write_corpus(index: Index, path: Path, *, progress: Progress) -> int:
    """Write the corpus file of a whole index atomically; returns the number of passages.

    Raises:
        RetrievalError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    is_live = index.is_live(np.arange(index.num_rows))
    num_lines = 0
    with _completed(path, partial), partial.open("w", encoding="ascii") as file:
        for row, passage in index.store.iterate(0, index.num_rows):
            if is_live[row]:
                file.write(json.dumps({"id": passage.id, "text": passage.content}) + "\n")
                num_lines += 1
                progress("corpus", row + 1, index.num_rows)
    return num_lines


# Private, in order of use


@contextmanager
def _completed(path: Path, partial: Path) -> Iterator[None]:
    """Rename the partial file when its content is on disk."""
    if path.suffix == ".gz":
        raise RetrievalError(f"{path}: this command writes plain text; leave out .gz, or compress the file afterwards")
    try:
        yield
        sync(partial)
        partial.replace(path)
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}") from None


def _resume(index: Index, partial: Path) -> int:
    """Truncate an interrupted run's file after its last complete line; returns the row to continue with."""
    if not partial.exists():
        return 0
    num_lines, size, last_line = 0, 0, b""
    with partial.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            num_lines, size, last_line = num_lines + 1, size + len(line), line
        live = np.flatnonzero(index.is_live(np.arange(index.num_rows)))
        row = int(live[num_lines - 1]) if 0 < num_lines <= len(live) else -1
        if row < 0 or not _is_line_of(index, row, last_line):  # no complete line, or a line of another index
            row, size = -1, 0
        file.truncate(size)
    return row + 1


def _is_line_of(index: Index, row: int, line: bytes) -> bool:
    try:
        return bool(json.loads(line)["id"] == index.store.get([row])[0].id)
    except (ValueError, KeyError, TypeError):
        return False


def _lines(index: Index, neighbors: Mapping[int, Sequence[int]]) -> Iterator[str]:
    rows = sorted({*neighbors, *(row for others in neighbors.values() for row in others)})
    names = index.store.ids(rows)
    for row, others in neighbors.items():
        yield json.dumps({"id": names[row], "neighbors": [names[other] for other in others]}) + "\n"
