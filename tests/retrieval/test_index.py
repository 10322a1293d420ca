"""An index directory: what is opened is whole, and any damage is named instead of searched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.errors import CorruptIndexError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Index
from retrieval.manifest import (
    MANIFEST,
    PASSAGES,
    VECTORS,
    Manifest,
    read_manifest,
    write_atomically,
)
from retrieval.retriever import Retriever
from retrieval.settings import SETTINGS, read_settings
from tests.retrieval.conftest import TEXTS
from tests.retrieval.small_index import (
    DIM,
    WordEncoder,
    build,
    delete,
    make_documents,
    make_settings,
    remove,
)

Damage = Callable[[Path, Path], object]


def flip(path: Path, at: int) -> None:
    """One bit of the byte `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Damage] = {
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
    retriever = Retriever(
        Index.open(folder, verify=verify), WordEncoder(), verify=verify, threads=1
    )
    index = retriever.index
    answers: list[Any] = [
        retriever.search([text], k=50, mode=mode, nprobe=1).hits
        for mode in retriever.modes
        for text in ("late", *TEXTS)
    ]
    return [
        *answers,
        index.vectors(0, index.num_rows).tolist(),
        list(index.store.iterate(0, index.num_rows)),
    ]


def files_of(folder: Path) -> list[str]:
    """Everything that an index is made of, but the lock;
    WAL files are empty or gone once it is built."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith(("lock", "-wal", "-shm")))


def test_what_is_in_it(whole_index: Path) -> None:
    """Both segments, the removed row, texts and vectors by row."""
    index = Index.open(whole_index, verify=True)
    assert (index.generation, index.num_rows, index.num_live, index.dim) == (3, 42, 41, DIM)
    assert [(part.first_row, part.num_rows, part.factory) for part in index.manifest.segments] == [
        (0, 40, "Flat"),
        (40, 2, "Flat"),
    ]
    assert index.removed.tolist() == [3]
    assert index.is_live(np.array([-1, 2, 3, 41, 42])).tolist() == [False, True, False, True, False]
    texts = [passage.text for _, passage in index.store.iterate(0, 42)]
    assert texts == [*TEXTS, "late words", "later words"]
    expected = WordEncoder().encode_passages(texts).astype(np.float16).astype(np.float32)
    assert np.array_equal(index.vectors(0, 42), expected)
    scores, rows = index.search_dense(expected[:1], k=50, nprobe=1)
    assert sorted(rows[0, :41].tolist()) == [row for row in range(42) if row != 3]
    np.testing.assert_allclose(scores[0, :41], expected[rows[0, :41]] @ expected[0], atol=1e-5)
    assert (rows[0, 41:] == -1).all()


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_named(whole_index: Path, tmp_path: Path, damage: str) -> None:
    """Whatever happened to whichever file: a line with its name, or the same answers as before,
    never others."""
    other = tmp_path / "other"
    build(other, make_documents([f"other{text}" for text in TEXTS]))
    build(other, make_documents(["more words", "few words"], prefix="e"))
    remove(other, "d4")
    expected = use(whole_index, verify=True)
    silent = []
    for name in files_of(whole_index):
        folder = Path(shutil.copytree(whole_index, tmp_path / "copy"))
        source = other / name
        if damage == "another index's" and not source.is_file():
            source = next(other.glob(f"{Path(name).parent}/*{Path(name).suffix}"))
        DAMAGES[damage](folder / name, source)
        try:
            if use(folder, verify=True) != expected:
                silent.append(name)
        except CorruptIndexError as error:
            message = str(error)
            if "\n" in message or not (
                name.split("/")[0] in message or name == MANIFEST
            ):  # which names what does not fit
                silent.append(f"{name}: {message}")
        delete(folder)
    # Rows of a file that only grows have no checksum: neighbours may come out otherwise, a search
    # does not read them.
    assert silent == []


@pytest.mark.parametrize("damage", OF_SIZE)
def test_missing_bytes_are_seen_without_reading(
    whole_index: Path, tmp_path: Path, damage: str
) -> None:
    """A server starts without checksums; a copy that broke off is told all the same."""
    for name in files_of(whole_index):
        folder = Path(shutil.copytree(whole_index, tmp_path / "copy"))
        DAMAGES[damage](folder / name, folder / name)
        if name in (MANIFEST, PASSAGES) and damage == "cut by a byte":
            delete(folder)
            continue  # a line's end, and an empty end of SQLite's last page
        expected = (
            "has not finished" if (name, damage) == (MANIFEST, "deleted") else name.split("/")[0]
        )
        with pytest.raises(CorruptIndexError, match=expected):
            use(folder, verify=False)
        delete(folder)


@pytest.mark.parametrize("name", [MANIFEST, SETTINGS])
@pytest.mark.parametrize("change", ["missing", "number", "text", "list", "null"])
def test_json_of_another_shape(folder: Path, name: str, change: str) -> None:
    """Each field missing or of another type: a line that names the file.
    The manifest is written by hand at most."""
    whole = json.loads((folder / name).read_text())
    for field in whole:
        if field == "xxh3" and change in ("missing", "null"):
            continue  # a manifest without a checksum is not checked by it
        changed = {key: value for key, value in whole.items() if key != field}
        if change != "missing":
            values = {"number": 7.5, "text": "x", "list": ["x"], "null": None}
            if type(values[change]) is type(whole[field]):
                continue
            changed[field] = values[change]
        if (field, change) in {
            ("removed", "null"),
            ("bm25", "null"),
            ("factory", "text"),
            ("bm25_language", "null"),
        }:
            continue
        (folder / name).write_text(json.dumps(changed))
        with pytest.raises(CorruptIndexError, match=name.split(".")[0]):
            use(folder, verify=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", '"x"', "\udc80"])
@pytest.mark.parametrize("name", [MANIFEST, SETTINGS])
def test_json_that_is_none(folder: Path, name: str, content: str) -> None:
    """Also an empty file, as some file systems leave one after a power cut."""
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptIndexError, match=name):
        Index.open(folder, verify=False)


def test_another_format(folder: Path) -> None:
    """Of a later version of this package."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(CorruptIndexError, match=r"manifest\.json: .*format 2"):
        Index.open(folder, verify=False)


def test_no_index(tmp_path: Path) -> None:
    """Nothing there, a file, an empty folder, a build that has not finished."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "file", "empty"):
        with pytest.raises(CorruptIndexError, match=f"{name}: no index there"):
            Index.open(tmp_path / name, verify=False)
    write_atomically(tmp_path / "empty" / SETTINGS, "{}")
    with pytest.raises(CorruptIndexError, match="has not finished; run it again"):
        Index.open(tmp_path / "empty", verify=False)


def test_json_round_trips(whole_index: Path) -> None:
    """What is read is what was written."""
    manifest = read_manifest(whole_index)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert read_settings(whole_index) == make_settings()
    assert set(manifest.files) | {MANIFEST, PASSAGES, VECTORS} == set(files_of(whole_index))
    assert STATE_FILE not in manifest.files


def test_settings_name_their_differences() -> None:
    """In the message that refuses them."""
    settings = make_settings()
    assert settings.differences(settings) == []
    assert settings.differences(replace(settings, factory="HNSW32", max_tokens=9)) == [
        "max_tokens",
        "factory",
    ]


def test_a_generation_that_goes_while_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading the manifest and opening its files a build has replaced them:
    the next one is opened."""
    real, builds = np.load, list[int]()

    def build_meanwhile(*args: Any, **kwargs: Any) -> Any:
        if not builds:
            builds.append(1)
            remove(folder, "d4")
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "load", build_meanwhile)
    index = Index.open(folder, verify=False)
    assert (index.generation, index.removed.tolist()) == (4, [3, 4])


def test_compressed_vectors_only_propose(tmp_path: Path) -> None:
    """Scores are those of the stored vectors, so rows of the exact segment win only if they are
    nearer."""
    texts = [f"word{number % 97} tail{number % 31} end{number}" for number in range(1200)]
    build(tmp_path, make_documents(texts), factory="IVF1,PQ4x4", bm25_language=None)
    build(
        tmp_path,
        make_documents(["word1 tail2"], prefix="late"),
        factory="IVF1,PQ4x4",
        bm25_language=None,
    )
    index = Index.open(tmp_path, verify=True)
    assert [entry.factory for entry in index.manifest.segments] == ["IVF1,PQ4x4", "Flat"]
    queries = WordEncoder().encode_queries(["word1 tail2", "word50 tail7 end3"] * 40)
    scores, rows = index.search_dense(queries, k=5, nprobe=1)
    assert rows[0][0] == 1200
    stored = index.vectors(0, index.num_rows)
    np.testing.assert_allclose(
        scores, np.take_along_axis(queries @ stored.T, rows, axis=1), atol=1e-5
    )
    assert (np.diff(scores, axis=1) <= 0).all()
    best = np.sort(queries @ stored.T, axis=1)[:, ::-1][:, :5]
    assert (scores >= best - 1e-5).mean() > 0.8, "ten proposals for each that is wanted"
    assert index.search_dense(queries[:0], k=5, nprobe=1)[1].shape == (0, 5)
    delete(tmp_path)
    np.testing.assert_array_equal(
        index.search_dense(queries, k=5, nprobe=1)[1], rows, "what is open stays as it is"
    )
