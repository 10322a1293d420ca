"""An index directory: what is opened is whole, and any damage is named instead of searched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from retrieval.errors import CorruptIndexError
from retrieval.index import Index
from retrieval.manifest import (
    ANALYZER,
    FORMAT,
    MANIFEST,
    PASSAGES,
    VECTORS,
    FileState,
    Manifest,
    read_manifest,
    write_atomically,
)
from retrieval.settings import SETTINGS, read_settings
from tests.retrieval.conftest import TEXTS
from tests.retrieval.small_index import (
    DIM,
    WordEncoder,
    build,
    delete,
    flip,
    make_documents,
    make_retriever,
    make_settings,
    remove,
)

DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda path, other: path.unlink(),
    "emptied": lambda path, other: path.write_bytes(b""),
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a byte": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path, other: flip(path, path.stat().st_size // 2),
    "another index's": lambda path, other: shutil.copyfile(other, path),
}
OF_SIZE = ["deleted", "emptied", "cut", "cut by a byte"]


def use(folder: Path, *, verify: bool) -> list[Any]:
    """Open it and read everything that there is."""
    retriever = make_retriever(folder, verify=verify)
    index = retriever.index
    answers: list[Any] = [
        retriever.search([text], k=50, mode=mode, nprobe=1).hits
        for mode in retriever.modes
        for text in ("late", *TEXTS)
    ]
    rows = index.store.iterate(0, index.num_rows)
    return [*answers, index.vectors.read(0, index.num_rows).tolist(), list(rows)]


def files_of(folder: Path) -> list[str]:
    """But the lock; WAL files are empty or gone once it is built."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith(("lock", "-wal", "-shm")))


def test_what_is_in_it(whole_index: Path) -> None:
    index = Index.open(whole_index, verify=True)
    assert (index.manifest.generation, index.num_rows, index.num_live) == (3, 42, 41)
    assert index.vectors.dim == index.settings.dim == DIM
    segments = [(part.first_row, part.num_rows, part.factory) for part in index.manifest.segments]
    assert segments == [(0, 40, "Flat"), (40, 2, "Flat")]
    assert index.removed.tolist() == [3]
    assert Manifest.from_json(index.manifest.to_json()) == index.manifest
    assert set(index.manifest.files) | {MANIFEST, PASSAGES, VECTORS} == set(files_of(whole_index))
    assert read_settings(whole_index) == make_settings()


@pytest.mark.parametrize(
    ("damage", "verify"),
    [*((each, True) for each in DAMAGES), *((each, False) for each in OF_SIZE)],
)
def test_any_damage_is_named(whole_index: Path, tmp_path: Path, damage: str, verify: bool) -> None:
    """Or the answers are as before, never others; missing bytes are seen without checksums too."""
    other = tmp_path / "other"
    build(other, make_documents([f"other{text}" for text in TEXTS]))
    build(other, make_documents(["more words", "few words"], prefix="e"))
    remove(other, "d4")
    expected = use(whole_index, verify=True)
    for name in files_of(whole_index):
        folder = Path(shutil.copytree(whole_index, tmp_path / "copy"))
        source = other / name
        if not source.is_file():
            source = next(other.glob(f"{Path(name).parent}/*{Path(name).suffix}"))
        DAMAGES[damage](folder / name, source)
        try:
            answer: Any = use(folder, verify=verify)
        except CorruptIndexError as error:
            answer = str(error)
        if isinstance(answer, str):
            assert "\n" not in answer
            assert name == MANIFEST or name.split("/")[0] in answer, "it names what does not fit"
        else:
            assert answer == expected, name
            is_padding = damage == "cut by a byte" and name in (MANIFEST, PASSAGES)
            assert damage not in OF_SIZE or is_padding, name
        delete(folder)


MAY_BE: list[tuple[str, Any]] = [("removed", None), ("bm25", None), ("bm25_language", None)]
MAY_BE += [("factory", "x"), ("xxh3", None), ("xxh3", ...)]  # without a checksum none is checked


@pytest.mark.parametrize("name", [MANIFEST, SETTINGS])
@pytest.mark.parametrize("value", [7.5, "x", ["x"], None, ...])
def test_json_of_another_shape(folder: Path, name: str, value: Any) -> None:
    """Each field missing (`...`) or of another type."""
    whole = json.loads((folder / name).read_text())
    for field, right in whole.items():
        changed = {**whole, field: value}
        if value is ...:
            del changed[field]
        if (field, value) in MAY_BE or type(value) is type(right):
            continue
        (folder / name).write_text(json.dumps(changed))
        with pytest.raises(CorruptIndexError, match=name.split(".")[0]):
            use(folder, verify=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", '"x"', "\udc80"])
@pytest.mark.parametrize(("name", "read"), [(MANIFEST, read_manifest), (SETTINGS, read_settings)])
def test_json_that_is_none(
    folder: Path, name: str, read: Callable[[Path], object], content: str
) -> None:
    """Some file systems leave an empty one after a power cut."""
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    for work in (read, partial(Index.open, verify=False)):
        with pytest.raises(CorruptIndexError, match=name):
            work(folder)


def test_index_of_another_version_is_refused(folder: Path) -> None:
    """Its words cannot be looked up."""
    manifest = read_manifest(folder)
    for step in (-1, 1):
        format_ = json.dumps({**json.loads(manifest.to_json()), "format": FORMAT + step})
        words = replace(manifest, analyzer=ANALYZER + step).to_json()
        for text, message in [(format_, "format 2"), (words, f"this release has {ANALYZER}")]:
            (folder / MANIFEST).write_text(text)
            with pytest.raises(CorruptIndexError, match=rf"manifest\.json: .*{message}"):
                Index.open(folder, verify=False)


def test_no_index(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "file", "empty"):
        with pytest.raises(CorruptIndexError, match=f"{name}: no index there"):
            Index.open(tmp_path / name, verify=False)
    write_atomically(tmp_path / "empty" / SETTINGS, "{}")
    with pytest.raises(CorruptIndexError, match="has not finished; run it again"):
        Index.open(tmp_path / "empty", verify=False)


def test_a_generation_that_goes_while_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its manifest and its files: the next one is opened."""
    real = np.load

    def build_meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        remove(folder, "d4")
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "load", build_meanwhile)
    index = Index.open(folder, verify=False)
    assert (index.manifest.generation, index.removed.tolist()) == (4, [3, 4])


def test_state_is_older_than_the_manifest_at_every_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a build changes between the two looks would never be opened: at a refresh the files
    would look as those that are served."""
    looks, manifest = list[str](), read_manifest(folder)

    def look_at_state(folder: Path) -> dict[str, FileState]:
        looks.append("state")
        return {}

    def look_at_manifest(folder: Path) -> Manifest:
        looks.append("manifest")
        return replace(manifest, generation=len(looks))

    def is_gone(*args: Any, **kwargs: Any) -> NoReturn:
        looks.append("open")
        raise CorruptIndexError("gone")

    monkeypatch.setattr("retrieval.index.state_of", look_at_state)
    monkeypatch.setattr("retrieval.index.read_manifest", look_at_manifest)
    monkeypatch.setattr(Index, "_open", is_gone)
    with pytest.raises(CorruptIndexError, match="gone"):
        Index.open(folder, verify=False)
    assert looks.count("open") == 5
    tries = " ".join(looks).split("open")[:-1]
    assert all(one.split()[-2:] == ["state", "manifest"] for one in tries)


def test_compressed_vectors_only_propose(tmp_path: Path) -> None:
    """Scores are those of the stored vectors, so exact rows win only if nearer."""
    texts = [f"word{number % 97} tail{number % 31} end{number}" for number in range(1200)]
    for documents in (make_documents(texts), make_documents(["word1 tail2"], prefix="late")):
        build(tmp_path, documents, factory="IVF1,PQ4x4", bm25_language=None)
    index = Index.open(tmp_path, verify=True)
    assert [entry.factory for entry in index.manifest.segments] == ["IVF1,PQ4x4", "Flat"]
    queries = WordEncoder().encode_queries(["word1 tail2", "word50 tail7 end3"] * 40)
    scores, rows = index.search_dense(queries, k=5, nprobe=1)
    assert rows[0][0] == 1200
    exact = queries @ index.vectors.read(0, index.num_rows).T
    np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, axis=1), atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()
    best = np.sort(exact, axis=1)[:, ::-1][:, :5]
    assert (scores >= best - 1e-5).mean() > 0.8, "ten proposals for each that is wanted"
    assert index.search_dense(queries[:0], k=5, nprobe=1)[1].shape == (0, 5)
    delete(tmp_path)
    again = index.search_dense(queries, k=5, nprobe=1)[1]
    np.testing.assert_array_equal(again, rows, "what is open stays as it is")
