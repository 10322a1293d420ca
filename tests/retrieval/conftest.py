"""A small index that tests may only read, and copies of it that they may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.retrieval.small_index import build, make_documents, remove

TEXTS = [f"word{number} shared tail{number % 5}" for number in range(40)]


@pytest.fixture(scope="session")
def whole_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 passages d0 … d39 in a base segment, e0 and e1 in a later one, d3 removed:
    every kind of file is there."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    build(folder, make_documents(TEXTS))
    build(folder, make_documents(["late words", "later words"], prefix="e"))
    remove(folder, "d3")
    return folder


@pytest.fixture
def folder(whole_index: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole_index, tmp_path / "index"))
