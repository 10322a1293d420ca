"""The passages' vectors: one append-only file of float16 rows, row r at byte `r * dim * 2`.

Each passage is encoded once. An interrupted build continues after the last complete row, and FAISS
indexes are rebuilt from this file. FAISS receives the rounded values, so an exact FAISS index holds
the values of this file.
"""

from __future__ import annotations

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
        self.path, self.dim, self._row_bytes = path, dim, dim * _DTYPE.itemsize
        size = path.stat().st_size if path.exists() else 0
        self.num_rows = size // self._row_bytes  # a killed writer may leave a part of a row
        self._mapped: NDArray[np.float16] | None = None

    def append(self, vectors: NDArray[np.float32]) -> None:
        """Add rows, [n, dim], rounded to float16. Raises RetrievalError: another dim, or values
        that float16 cannot hold."""
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise RetrievalError(f"vectors must be [n, {self.dim}], got {list(vectors.shape)}")
        with np.errstate(over="ignore"):  # what overflows is refused below
            rows = np.ascontiguousarray(vectors, dtype=_DTYPE)
        if not np.isfinite(rows).all():
            raise RetrievalError("vectors must be finite and within float16's range")
        with open(self.path, "ab") as file:
            file.truncate(self.num_rows * self._row_bytes)  # no incomplete row of a killed writer
            file.write(rows.tobytes())
        self.num_rows += len(rows)

    def checksum(self, first: int, last: int) -> str:
        """XXH3 of the bytes of rows `[first, last)`."""
        digest, left = xxhash.xxh3_128(), (last - first) * self._row_bytes
        with open(self.path, "rb") as file:
            file.seek(first * self._row_bytes)
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
        return digest.hexdigest()

    def map(self) -> NDArray[np.float16]:
        """[num_rows, dim], memory-mapped: readable after the file is renamed or deleted."""
        if self._mapped is None or len(self._mapped) != self.num_rows:
            shape = (self.num_rows, self.dim)
            self._mapped = np.memmap(self.path, dtype=_DTYPE, mode="r", shape=shape)
        return self._mapped

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows `[first, last)` as [n, dim] float32."""
        return self.read_rows(np.arange(first, last))

    def read_rows(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[len(rows), dim] float32. Raises CorruptIndexError if the file is too short."""
        if not len(rows):
            return np.zeros((0, self.dim), np.float32)
        if rows.max() >= self.num_rows:
            numbers = f"{self.num_rows} vectors, not {rows.max() + 1}"
            raise CorruptIndexError(f"{self.path}: holds {numbers}")
        # A slice converts one stretch of the file; an index array first copies it row by row.
        is_run = bool((np.diff(rows) == 1).all())
        taken = self.map()[slice(rows[0], rows[-1] + 1) if is_run else rows]
        return np.asarray(taken, dtype=np.float32)
