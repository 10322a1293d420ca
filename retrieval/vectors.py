"""The passages' vectors: one append-only file of float16 rows, row r at byte `r * dim * 2`.

Each passage is encoded once. An interrupted build continues after the last complete row, and FAISS
indexes are rebuilt from this file. FAISS receives the rounded values, so an exact FAISS index holds
the values of this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError

_DTYPE = np.dtype("<f2")
_BLOCK_BYTES = 1 << 22


class VectorFile:
    """Vectors of an index directory.
    One writer; a reader sees the rows that existed when it opened the file."""

    def __init__(self, path: Path, *, dim: int) -> None:
        self.path, self.dim = path, dim
        size = path.stat().st_size if path.exists() else 0
        self.num_rows = size // (dim * _DTYPE.itemsize)  # a killed writer may leave a part of a row
        self._mapped: NDArray[np.float16] | None = None

    def append(self, vectors: NDArray[np.float32]) -> None:
        """Add rows. [n, dim], finite; rounded to float16.

        Raises:
            RetrievalError: another dim, or values that float16 cannot hold.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise RetrievalError(f"vectors must be [n, {self.dim}], got {list(vectors.shape)}")
        with np.errstate(over="ignore"):  # what overflows is refused below
            rows = np.ascontiguousarray(vectors, dtype=_DTYPE)
        if not np.isfinite(rows).all():
            raise RetrievalError("vectors must be finite and within float16's range")
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            # overwrites an incomplete row of a killed writer
            file.seek(self.num_rows * self.dim * _DTYPE.itemsize)
            file.write(rows.tobytes())
            file.truncate()
        self.num_rows += len(rows)

    def sync(self) -> None:
        """Wait until the rows are on disk."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def checksum(self, first: int, last: int) -> str:
        """XXH3 of the bytes of rows `[first, last)`."""
        digest, size = xxhash.xxh3_128(), self.dim * _DTYPE.itemsize
        with open(self.path, "rb") as file:
            file.seek(first * size)
            left = (last - first) * size
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
        return digest.hexdigest()

    def map(self) -> NDArray[np.float16]:
        """[num_rows, dim], memory-mapped: the rows stay readable after the file is renamed or
        deleted."""
        if self._mapped is None or len(self._mapped) != self.num_rows:
            self._mapped = np.memmap(
                self.path, dtype=_DTYPE, mode="r", shape=(self.num_rows, self.dim)
            )
        return self._mapped

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows `[first, last)` as [n, dim] float32."""
        return self.read_rows(np.arange(first, last))

    def read_rows(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[len(rows), dim] float32. Raises CorruptIndexError if the file is too short."""
        if not len(rows):
            return np.zeros((0, self.dim), np.float32)
        if int(rows.max()) >= self.num_rows:
            raise CorruptIndexError(
                f"{self.path}: holds {self.num_rows} vectors, not {int(rows.max()) + 1}"
            )
        mapped = self.map()
        # A slice converts one stretch of the file; an index array first copies it row by row.
        is_run = int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        taken = mapped[int(rows[0]) : int(rows[-1]) + 1] if is_run else mapped[rows]
        return np.asarray(taken, dtype=np.float32)
