"""Writes the next generation of an index directory: FAISS and BM25 files of the current rows, then
the manifest that names them.

    passages, vectors ── segments, words, removed rows (new files)
        ── manifest (one rename) ── files it does not name are deleted

Until the rename the served generation is unchanged. Files of a run that died before the rename are
deleted by the next run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import ADD_ROWS, MAX_FLAT_ROWS, auto_factory, create_faiss, write_faiss
from retrieval.hashed_encoder import STATE_FILE
from retrieval.manifest import (
    ANALYZER,
    MANIFEST,
    FileEntry,
    Manifest,
    SegmentEntry,
    entry_of,
    read_manifest,
    removed_rows,
    sync,
    write_atomically,
)
from retrieval.progress import Progress
from retrieval.settings import SETTINGS, BuildOptions, IndexSettings
from retrieval.store import PassageStore
from retrieval.vectors import VectorFile

REBUILD_SHARE = 0.2
"""Rows added after the trained segment are searched exactly.
When they exceed this share of it, all rows are trained again."""
PROBE_CHARS = 400


@dataclass(frozen=True)
class _Draft:
    """A generation that is being made.

    Attributes:
        old: the served generation; None: the draft is the directory's first.
        num_rows: rows with text and vector, removed ones among them.
        removed: rows that are hidden, ascending.
    """

    folder: Path
    settings: IndexSettings
    store: PassageStore
    vectors: VectorFile
    options: BuildOptions
    progress: Progress
    old: Manifest | None
    num_rows: int
    removed: NDArray[np.int64]

    @property
    def number(self) -> int:
        return self.old.generation + 1 if self.old else 1

    @property
    def first(self) -> int:
        """First row that the old generation does not have."""
        return self.old.num_rows if self.old else 0


def publish(
    folder: Path,
    settings: IndexSettings,
    store: PassageStore,
    vectors: VectorFile,
    *,
    options: BuildOptions,
    progress: Progress,
) -> Manifest:
    """Index the rows of store and vectors, write the manifest, delete unnamed files.
    Returns the old manifest if unchanged."""
    old = read_manifest(folder) if (folder / MANIFEST).exists() else None
    vectors.sync()
    num_rows = min(store.num_rows, vectors.num_rows)
    removed = store.removed_rows()
    removed = removed[removed < num_rows]
    is_same = (
        old is not None
        and old.num_rows == num_rows
        and num_live(folder, old) == num_rows - len(removed)
    )
    if old and is_same and not old.is_outdated:
        _delete_unnamed(folder, old)  # left by a build that died after its manifest was written
        return old
    draft = _Draft(folder, settings, store, vectors, options, progress, old, num_rows, removed)
    segments = _index_vectors(draft)
    bm25 = _index_texts(draft)
    removed_name = None
    if len(removed):
        removed_name = f"removed-{draft.number}.npy"
        np.save(folder / removed_name, removed)
    added = ((num_rows, vectors.checksum(draft.first, num_rows)),) if num_rows > draft.first else ()
    manifest = Manifest(
        generation=draft.number,
        num_rows=num_rows,
        segments=segments,
        removed=removed_name,
        bm25=bm25,
        probe=old.probe if old else store.get([0])[0].content[:PROBE_CHARS],
        vectors=(*(old.vectors if old else ()), *added),
        analyzer=ANALYZER,
        files=_entries(draft, [segment.file for segment in segments], removed_name, bm25),
    )
    write_atomically(folder / MANIFEST, manifest.to_json())
    _delete_unnamed(folder, manifest)
    return manifest


def num_live(folder: Path, manifest: Manifest) -> int:
    """Passages that a generation serves."""
    return manifest.num_rows - len(removed_rows(folder, manifest))


def sample_rows(num_rows: int, size: int, seed: int) -> NDArray[np.int64]:
    """Distinct rows of `[0, num_rows)`, ascending; all of them if `size` allows."""
    if size >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, size, replace=False))


# Private, in order of use


def _index_vectors(draft: _Draft) -> tuple[SegmentEntry, ...]:
    num_rows, vectors, old = draft.num_rows, draft.vectors, draft.old

    def create(first: int, factory: str) -> SegmentEntry:
        draft.progress("train", 0, None)
        index = create_faiss(
            factory,
            vectors.dim,
            num_rows - first,
            lambda n: vectors.read_rows(
                first + sample_rows(num_rows - first, n, draft.options.seed)
            ),
            (
                vectors.read(at, min(at + ADD_ROWS, num_rows))
                for at in range(first, num_rows, ADD_ROWS)
            ),
            lambda done: draft.progress("add", done, num_rows - first),
        )
        name = f"dense-{draft.number}-{first}.faiss"
        write_faiss(index, draft.folder / name)
        return SegmentEntry(name, first, num_rows - first, factory)

    base = old.segments[0] if old else None
    # Later rows are searched exactly, so with a large base their number is the limit, not their
    # share.
    most = MAX_FLAT_ROWS if base and base.factory != "Flat" else num_rows
    if base is None or num_rows - base.num_rows > min(most, REBUILD_SHARE * base.num_rows):
        factory = draft.settings.factory
        return (create(0, auto_factory(num_rows) if factory == "auto" else factory),)
    if num_rows == base.num_rows:
        return (base,)
    if old and old.num_rows == num_rows:
        return old.segments
    return (base, create(base.num_rows, "Flat"))


def _index_texts(draft: _Draft) -> str | None:
    folder, removed, old, language = (
        draft.folder,
        draft.removed,
        draft.old,
        draft.settings.bm25_language,
    )
    if language is None:
        return None
    # only here: an index without BM25 does not need tantivy
    from retrieval.bm25 import Bm25Index, link_copy

    name = f"bm25-{draft.number}"
    shutil.rmtree(folder / name, ignore_errors=True)  # left by a build that died here
    if old and old.bm25 and not old.is_outdated:
        link_copy(folder / old.bm25, folder / name)
        index = Bm25Index.open(folder / name, language=language, version=ANALYZER)
        first, gone = old.num_rows, np.setdiff1d(removed, removed_rows(folder, old))
    else:
        index = Bm25Index.create(folder / name, language=language, version=ANALYZER)
        first, gone = 0, np.zeros(0, np.int64)
    hidden = set(removed[removed >= first].tolist())

    def rows() -> Iterator[tuple[int, str]]:
        for row, passage in draft.store.iterate(first, draft.num_rows):
            if row % 1000 == 0:
                draft.progress("bm25", row - first, draft.num_rows - first)
            if row not in hidden:
                yield row, passage.content

    index.update(rows(), gone[gone < first].tolist(), memory_bytes=draft.options.bm25_memory_bytes)
    for path in (folder / name).iterdir():
        # tantivy creates some files readable by the owner only
        path.chmod((folder / SETTINGS).stat().st_mode)
    return name


def _entries(
    draft: _Draft, segments: Sequence[str], removed: str | None, bm25: str | None
) -> dict[str, FileEntry]:
    folder, old = draft.folder, draft.old
    state = STATE_FILE if (folder / STATE_FILE).exists() else None
    names = [SETTINGS, *segments, *filter(None, (removed, state))]
    known = dict(old.files) if old else {}
    if bm25:
        words = sorted(
            f"{bm25}/{path.name}"
            for path in (folder / bm25).iterdir()
            if not path.name.endswith(".lock")
        )
        names += words
        for name in words:  # tantivy never rewrites a file: a linked one is unchanged
            before = f"{old.bm25 if old else None}{name.removeprefix(bm25)}"
            if before in known and (folder / before).samefile(folder / name):
                known[name] = known[before]
    for name in names:
        if name not in known:
            sync(folder / name)
    if bm25:
        sync(folder / bm25)
    return {name: known[name] if name in known else entry_of(folder / name) for name in names}


def _delete_unnamed(folder: Path, manifest: Manifest) -> None:
    """Delete files of other generations.
    A process that still serves one has them open and can go on reading."""
    named = {name.split("/")[0] for name in manifest.files}
    patterns = ("dense-*.faiss", "removed-*.npy", "bm25-*", "draft-*", "*.draft")
    for path in chain.from_iterable(map(folder.glob, patterns)):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
