"""VectorFile: what is appended is read back as float16 rounds it, whatever a killed writer left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import CorruptIndexError
from retrieval.vectors import VectorFile

ROWS = np.random.default_rng(0).standard_normal((7, 3), dtype=np.float32)
ROUNDED = ROWS.astype(np.float16).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vectors.f16"


def test_read_what_was_appended(path: Path) -> None:
    """In any batches, from any row to any other."""
    file = VectorFile(path, dim=3)
    assert file.num_rows == 0
    for first, last in [(0, 2), (2, 2), (2, 7)]:
        file.append(ROWS[first:last])
    again = VectorFile(path, dim=3)
    assert (again.num_rows, again.read(0, 7).dtype.name) == (7, "float32")
    for first in range(8):
        for last in range(first, 8):
            assert np.array_equal(again.read(first, last), ROUNDED[first:last])


def test_read_rows_in_any_order(path: Path) -> None:
    """The sample that FAISS is trained on, and runs that only look like runs."""
    VectorFile(path, dim=3).append(ROWS)
    file = VectorFile(path, dim=3)
    for rows in ([5], [6, 0, 0], [0, 2, 2, 3], [3, 1, 2, 6], [1, 3, 2, 4]):
        assert np.array_equal(file.read_rows(np.array(rows)), ROUNDED[rows])


@pytest.mark.parametrize("num_bytes", range(1, 6))
def test_half_a_row_is_written_over(path: Path, num_bytes: int) -> None:
    VectorFile(path, dim=3).append(ROWS[:2])
    with open(path, "ab") as file:
        file.write(b"\xff" * num_bytes)
    vectors = VectorFile(path, dim=3)
    assert vectors.num_rows == 2
    vectors.append(ROWS[2:])
    assert path.stat().st_size == 7 * 3 * 2
    assert np.array_equal(VectorFile(path, dim=3).read(0, 7), ROUNDED)


def test_readers_see_the_rows_of_when_they_opened_it(path: Path) -> None:
    """A build may append while the file is read."""
    VectorFile(path, dim=3).append(ROWS[:4])
    early = VectorFile(path, dim=3)
    VectorFile(path, dim=3).append(ROWS[4:])
    assert early.num_rows == 4
    assert np.array_equal(early.read(0, 4), ROUNDED[:4])
    with pytest.raises(CorruptIndexError, match=r"vectors\.f16: holds 4 vectors, not 5"):
        early.read(0, 5)


def test_what_cannot_be_stored(path: Path) -> None:
    """Refused before anything is written: an infinite score would be every question's best."""
    file = VectorFile(path, dim=3)
    for vectors in (np.zeros((1, 4)), np.zeros(3)):
        with pytest.raises(ValueError, match=r"must be \[n, 3\]"):
            file.append(vectors.astype(np.float32))
    for number in (np.nan, np.inf, 70_000.0):
        with pytest.raises(ValueError, match="finite"):
            file.append(np.full((1, 3), number, np.float32))
    assert not path.exists()
