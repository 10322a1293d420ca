"""Writes the nearest passages of every passage to a file.

FusionRAG (3.1) computes a passage's KV after its neighbours, because passages that are retrieved
for one question tend to be each other's neighbours (`python -m eval recall` measures it).

    neighbors file   {"id": "d1#0", "neighbors": ["d7#0", "d3#812", ...]}   nearest first
    corpus file      {"id": "d1#0", "text": "..."}                          as the model reads it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.manifest import replaced
from retrieval.progress import Progress

BATCH_ROWS = 1024
"""Passages whose neighbours are searched in one batch."""


def nearest(index: Index, first: int, last: int, *, n: int, nprobe: int) -> dict[int, list[int]]:
    """The rows of the `n` passages with the largest inner product, of every live row in
    `[first, last)`, nearest first; never the passage itself. Fewer if the index, or the `nprobe`
    lists visited, hold fewer.

    Raises:
        RetrievalError: `n` is less than 1.
    """
    if n < 1:
        raise RetrievalError(f"neighbors: n must be at least 1, got {n}")
    rows = np.setdiff1d(np.arange(first, last), index.removed)
    if not len(rows):
        return {}
    # One more, since each finds itself.
    _, found = index.search_dense(index.vectors.read_rows(rows), k=n + 1, nprobe=nprobe)
    # With equal vectors the passage itself may not come first, or not be among the n + 1 at all.
    return {
        row: [other for other in others if other not in (-1, row)][:n]
        for row, others in zip(rows.tolist(), found.tolist(), strict=True)
    }


def write_neighbors(index: Index, path: Path, *, n: int, nprobe: int, progress: Progress) -> int:
    """Write the neighbors file of a whole index; returns the number of its lines. Raises
    RetrievalError: see `nearest`, or the file cannot be written."""

    def rows() -> Iterator[dict[str, Any]]:
        for first in range(0, index.num_rows, BATCH_ROWS):
            last = min(first + BATCH_ROWS, index.num_rows)
            near = nearest(index, first, last, n=n, nprobe=nprobe)
            # One query a batch: the same passages are neighbours of many.
            names = index.store.ids(sorted({*near, *chain.from_iterable(near.values())}))
            for row, others in near.items():
                yield {"id": names[row], "neighbors": [names[other] for other in others]}
            progress("neighbors", last, index.num_rows)

    return _write(path, rows())


def write_corpus(index: Index, path: Path, *, progress: Progress) -> int:
    """Write the corpus file likewise."""
    removed = set(index.removed.tolist())

    def rows() -> Iterator[dict[str, Any]]:
        for row, passage in index.store.iterate(0, index.num_rows):
            if row not in removed:
                yield {"id": passage.id, "text": passage.content}
                progress("corpus", row + 1, index.num_rows)

    return _write(path, rows())


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line; returns their number."""
    if path.suffix == ".gz":
        what = "this command writes plain text; leave out .gz, or compress the file afterwards"
        raise RetrievalError(f"{path}: {what}")
    num_lines = 0
    try:
        # `dumps` escapes all but ASCII
        with replaced(path) as draft, draft.open("w", encoding="ascii") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                num_lines += 1
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}") from None
    return num_lines
