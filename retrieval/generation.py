"""Writes the next generation of an index directory: FAISS and BM25 files of the current rows, then
the manifest that names them.

    passages, vectors ── segments, words, removed rows (new files)
        ── manifest (one rename) ── files it does not name are deleted

Until the rename the served generation is unchanged. Files of a run that died before the rename are
deleted by the next run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import MAX_FLAT_ROWS, auto_factory, create_faiss, write_faiss
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Directory
from retrieval.manifest import (
    ANALYZER,
    MANIFEST,
    FileEntry,
    Manifest,
    SegmentEntry,
    entry_of,
    removed_rows,
    sync,
    write_atomically,
)
from retrieval.progress import Progress
from retrieval.settings import SETTINGS

REBUILD_SHARE = 0.2
"""Rows added after the trained segment are searched exactly.
When they exceed this share of it, all rows are trained again."""
PROBE_CHARS = 400


def publish(directory: Directory, *, seed: int, progress: Progress) -> Manifest:
    """Index the rows of store and vectors, write the manifest, delete unnamed files.
    Returns the served manifest if nothing has changed."""
    folder, served, vectors = directory.folder, directory.manifest, directory.vectors
    sync(vectors.path)
    num_rows = min(directory.store.num_rows, vectors.num_rows)
    removed = directory.store.removed_rows()
    removed = removed[removed < num_rows]
    is_same = num_rows == served.num_rows and len(removed) == len(removed_rows(folder, served))
    if is_same:
        _delete_unnamed(folder, served)  # left by a build that died after its manifest was written
        return served
    segments = _index_vectors(directory, num_rows, seed=seed, progress=progress)
    bm25 = _index_texts(directory, num_rows, removed, progress=progress)
    removed_name = None
    if len(removed):
        removed_name = f"removed-{served.generation + 1}.npy"
        np.save(folder / removed_name, removed)
    added = served.vectors
    if num_rows > served.num_rows:
        added = (*added, (num_rows, vectors.checksum(served.num_rows, num_rows)))
    state = STATE_FILE if (folder / STATE_FILE).exists() else None
    names = [SETTINGS, *(part.file for part in segments), *filter(None, (removed_name, state))]
    manifest = Manifest(
        generation=served.generation + 1,
        num_rows=num_rows,
        segments=segments,
        removed=removed_name,
        bm25=bm25,
        probe=served.probe or directory.store.get([0])[0].content[:PROBE_CHARS],
        vectors=added,
        analyzer=ANALYZER,
        files=_entries(directory, names, bm25),
    )
    write_atomically(folder / MANIFEST, manifest.to_json())
    _delete_unnamed(folder, manifest)
    return manifest


# Private, in order of use


def _index_vectors(
    directory: Directory, num_rows: int, *, seed: int, progress: Progress
) -> tuple[SegmentEntry, ...]:
    served = directory.manifest

    def create(first: int, factory: str) -> SegmentEntry:
        vectors = directory.vectors
        index = create_faiss(factory, vectors, first, num_rows, seed=seed, progress=progress)
        name = f"dense-{served.generation + 1}-{first}.faiss"
        write_faiss(index, directory.folder / name)
        return SegmentEntry(name, first, num_rows - first, factory)

    base = served.segments[0] if served.segments else SegmentEntry("", 0, 0, "Flat")
    # Later rows are searched exactly, so with a large base their number is the limit, not their
    # share.
    most = num_rows if base.factory == "Flat" else MAX_FLAT_ROWS
    if num_rows - base.num_rows > min(most, REBUILD_SHARE * base.num_rows):
        factory = directory.settings.factory
        return (create(0, auto_factory(num_rows) if factory == "auto" else factory),)
    if num_rows == served.num_rows:
        return served.segments
    return (base, create(base.num_rows, "Flat"))


def _index_texts(
    directory: Directory, num_rows: int, removed: NDArray[np.int64], *, progress: Progress
) -> str | None:
    folder, served, language = (
        directory.folder,
        directory.manifest,
        directory.settings.bm25_language,
    )
    if language is None:
        return None
    # only here: an index without BM25 does not need tantivy
    from retrieval.bm25 import Bm25Index, link_copy

    name = f"bm25-{served.generation + 1}"
    shutil.rmtree(folder / name, ignore_errors=True)  # left by a build that died here
    first = 0
    if served.bm25:
        first = served.num_rows
        link_copy(folder / served.bm25, folder / name)
        index = Bm25Index.open(folder / name, language=language)
    else:
        index = Bm25Index.create(folder / name, language=language)
    gone = np.setdiff1d(removed[removed < first], removed_rows(folder, served))
    hidden = set(removed[removed >= first].tolist())

    def rows() -> Iterator[tuple[int, str]]:
        for row, passage in directory.store.iterate(first, num_rows):
            if row % 1000 == 0:
                progress("bm25", row - first, num_rows - first)
            if row not in hidden:
                yield row, passage.content

    index.update(rows(), gone.tolist())
    for path in (folder / name).iterdir():
        # tantivy creates some files readable by the owner only
        path.chmod((folder / SETTINGS).stat().st_mode)
    return name


def _entries(directory: Directory, names: list[str], bm25: str | None) -> dict[str, FileEntry]:
    """Of these files and BM25's."""
    folder, served = directory.folder, directory.manifest
    known = dict(served.files)
    for path in sorted((folder / bm25).iterdir()) if bm25 else ():
        if path.suffix != ".lock":
            names.append(f"{bm25}/{path.name}")
            # tantivy never rewrites a file: a linked one is unchanged
            before = f"{served.bm25}/{path.name}"
            if before in known and (folder / before).samefile(path):
                known[names[-1]] = known[before]
    for name in names:
        if name not in known:
            sync(folder / name)
            known[name] = entry_of(folder / name)
    if bm25:
        sync(folder / bm25)
    return {name: known[name] for name in names}


def _delete_unnamed(folder: Path, manifest: Manifest) -> None:
    """Delete files of other generations.
    A process that still serves one has them open and can go on reading."""
    named = {name.split("/")[0] for name in manifest.files}
    patterns = ("dense-*.faiss", "removed-*.npy", "bm25-*", "draft-*", "*.draft")
    for path in chain.from_iterable(map(folder.glob, patterns)):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
