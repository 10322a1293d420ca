"""Documents into an index directory: create it, go on with it, extend it, take passages out of it.

    read     documents -> passages -> PassageStore      a transaction every few documents
    fit      the embedded encoder, on a sample           once in a directory's life
    encode   passages -> VectorFile                      in batches, behind the last row that is there
    index    VectorFile -> FAISS, PassageStore -> BM25   new files, then the manifest that names them

Each stage goes on from what lies in the directory, so a build that was killed is simply run again, and a build over more
documents is the same command too. What is served changes with the last step alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import ADD_ROWS, MAX_FLAT_ROWS, auto_factory, check_factory, create_faiss, write_faiss
from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE, fit_default
from retrieval.index import (
    MANIFEST,
    PASSAGES,
    SETTINGS,
    VECTORS,
    FileEntry,
    IndexSettings,
    Manifest,
    SegmentEntry,
    check_encoder,
    check_files,
    check_num_vectors,
    check_store,
    entry_of,
    read_manifest,
    read_settings,
    removed_rows,
    settings_json,
    sync,
    write_atomically,
    writer_lock,
)
from retrieval.passage import Document, Passage
from retrieval.splitter import Splitter
from retrieval.store import PassageStore
from retrieval.tokens import Tokens
from retrieval.vectors import VectorFile

Progress = Callable[[str, int, int | None], None]
"""Told the stage, how much of it is done, and of how much, if that is known."""

REBUILD_SHARE = 0.2
"""Rows behind the trained segment are searched exactly; once they are this share of it, it is trained anew over all."""
READ_DOCUMENTS = 5000
"""In one transaction: each waits for the disk."""
PROBE_CHARS = 400

T = TypeVar("T")


@dataclass(frozen=True)
class BuildOptions:
    """What a run may choose anew.

    Attributes:
        fit_passages: sample that the embedded encoder is fitted on.
        encode_batch: passages handed to the encoder at once.
        bm25_memory_bytes: buffer of BM25's writer.
        seed: of the samples and of the embedded encoder.
    """

    fit_passages: int
    encode_batch: int
    bm25_memory_bytes: int
    seed: int


@dataclass
class BuildReport:
    """What a run did. `added` and `removed` are passages; the latter of documents that have changed."""

    documents: int = 0
    unchanged: int = 0
    changed: int = 0
    added: int = 0
    duplicates: int = 0
    removed: int = 0
    encoded: int = 0
    passages: int = 0
    generation: int = 0


def build_index(
    documents: Iterable[Document],
    folder: Path,
    settings: IndexSettings,
    *,
    tokens: Tokens,
    encoder: Encoder | None,
    options: BuildOptions,
    progress: Progress,
) -> BuildReport:
    """Make `folder` hold these documents too. A document that changed replaces what it was.

    Args:
        encoder: of `settings.encoder`; None: the embedded one, fitted here if the directory has none.
    Raises:
        RetrievalError: the directory has other settings, another process writes it, documents that make no index.
        CorruptIndexError: the directory is damaged.
    """
    cut = _cutter(settings, tokens)  # what cannot work is refused before the directory keeps it
    check_factory("Flat" if settings.factory == "auto" else settings.factory, int(settings.encoder["dim"]))
    if settings.bm25_language is not None:
        from retrieval.bm25 import check_language  # only here: an index without BM25 does not need tantivy

        check_language(settings.bm25_language)
    folder.mkdir(parents=True, exist_ok=True)
    with writer_lock(folder):
        if not (folder / SETTINGS).exists() and ((folder / PASSAGES).exists() or (folder / MANIFEST).exists()):
            raise RetrievalError(f"{folder}: holds files of an index but no {SETTINGS}; use another directory")
        store = PassageStore(folder / PASSAGES, writable=True)
        try:
            _settle_settings(folder, settings, has_rows=store.num_rows > 0)
            vectors = VectorFile(folder / VECTORS, dim=int(settings.encoder["dim"]))
            _check_served(folder, store, vectors)
            if vectors.num_rows > store.num_rows:
                raise CorruptIndexError(f"{store.path}: holds {store.num_rows} of {vectors.num_rows} passages")
            report = _read(documents, store, cut, progress)
            if not store.num_rows:
                raise RetrievalError("there is no text in these documents")
            encoder = encoder or _embedded(folder, settings, store, options, progress)
            if vectors.num_rows:
                check_encoder(store, vectors, encoder)
            report.encoded = _encode(store, vectors, encoder, options, progress)
            manifest = _publish(folder, settings, store, options, progress)
        finally:
            store.close(checkpoint=True)
    return replace(report, passages=_num_live(folder, manifest), generation=manifest.generation)


def remove_passages(
    folder: Path,
    ids: Sequence[str],
    *,
    load: Callable[[], Encoder],
    options: BuildOptions,
    progress: Progress,
) -> int:
    """Take passages out of the served index; ids of documents stand for all their passages. Returns how many.

    A later build that sees their document again puts them back.

    Args:
        load: gives the index's encoder; only called where another document has a text that is removed, and takes it over.
    Raises:
        RetrievalError: an id that nobody has (then nothing is removed), or another process writes the directory.
    """
    settings = read_settings(folder)
    with writer_lock(folder):
        vectors = VectorFile(folder / VECTORS, dim=int(settings.encoder["dim"]))
        store = PassageStore(folder / PASSAGES, writable=True)
        try:
            _check_served(folder, store, vectors)
            rows: set[int] = set()
            store.begin()
            for name in ids:
                found = store.rows_of(name) or _unserved(folder, store, name)
                if not store.forget(name) and not found:
                    raise RetrievalError(f"{folder}: no passage and no document has the id {name!r}")
                rows.update(found)
            store.remove(sorted(rows))
            encoder = load() if store.num_rows > vectors.num_rows else None
            store.commit()
            if encoder:
                check_encoder(store, vectors, encoder)
                _encode(store, vectors, encoder, options, progress)
            _publish(folder, settings, store, options, progress)
        finally:
            store.close(checkpoint=True)
    return len(rows)


# Private, in order of use


def _unserved(folder: Path, store: PassageStore, name: str) -> list[int]:
    """Rows of this id that a removal which died has marked, but that are still served."""
    waiting = np.setdiff1d(store.removed_rows(), removed_rows(folder, read_manifest(folder))).tolist()
    passages = zip(waiting, store.get(waiting), strict=True)
    return [row for row, passage in passages if name in (passage.id, passage.document_id)]


def _check_served(folder: Path, store: PassageStore, vectors: VectorFile) -> None:
    """A damaged index is refused here as it is by those who search: nothing is built on it."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        check_files(folder, manifest, {}, verify=False)
        check_store(store, manifest)
        check_num_vectors(vectors, manifest)


def _settle_settings(folder: Path, settings: IndexSettings, *, has_rows: bool) -> None:
    """Keep the settings, or compare them with those that are kept. What no file has been made by yet may still change."""
    if not (folder / SETTINGS).exists() or not has_rows:
        write_atomically(folder / SETTINGS, settings_json(settings))
        return
    there = read_settings(folder)
    names = there.differences(settings)
    if names and not (folder / MANIFEST).exists() and set(names) <= {"factory", "bm25_language"}:
        write_atomically(folder / SETTINGS, settings_json(settings))
    elif names:
        name = names[0]
        raise RetrievalError(
            f"{folder}: was built with {name} {getattr(there, name)!r}, not {getattr(settings, name)!r}; "
            "an index keeps its settings, so use another directory"
        )


def _cutter(settings: IndexSettings, tokens: Tokens) -> Callable[[Document], Iterable[Passage]]:
    if settings.is_split:
        splitter = Splitter(tokens, max_tokens=settings.max_tokens, overlap_tokens=settings.overlap_tokens)
        return splitter.split

    def whole(document: Document) -> list[Passage]:
        num_tokens = len(tokens.offsets(document.text))
        return [Passage(document.id, document.id, document.title, document.text, 0, num_tokens, num_tokens)]

    return whole


def _read(
    documents: Iterable[Document],
    store: PassageStore,
    cut: Callable[[Document], Iterable[Passage]],
    progress: Progress,
) -> BuildReport:
    report, run, removed_before = BuildReport(), store.begin_run(), len(store.removed_rows())
    for batch in _batches(documents, READ_DOCUMENTS):
        store.begin()
        for document in batch:
            report.documents += 1
            if (is_known := store.is_known(document, run)) is not None:
                report.unchanged += is_known
                report.changed += not is_known
            if is_known:
                continue
            added, duplicates = store.put(document, cut(document), run)
            report.added += added
            report.duplicates += duplicates
        store.commit()
        progress("read", report.documents, None)
    report.removed = len(store.removed_rows()) - removed_before
    return report


def _embedded(
    folder: Path, settings: IndexSettings, store: PassageStore, options: BuildOptions, progress: Progress
) -> Encoder:
    path = folder / STATE_FILE
    if not path.exists():
        if (folder / VECTORS).exists():
            raise CorruptIndexError(f"{path}: missing, and another one would not fit the vectors that are there")
        progress("fit", 0, None)
        rows = _sample(store.num_rows, options.fit_passages, options.seed)
        contents = [p.content for part in _batches(rows.tolist(), 1000) for p in store.get(part)]
        encoder = fit_default(contents, dim=int(settings.encoder["dim"]), seed=options.seed)
        draft = path.with_name("draft-" + path.name)
        encoder.save(draft)
        sync(draft)
        draft.replace(path)
    return load_encoder(settings.encoder, folder=folder, override=None, device=None, batch_size=options.encode_batch)


def _encode(
    store: PassageStore, vectors: VectorFile, encoder: Encoder, options: BuildOptions, progress: Progress
) -> int:
    first, num_rows = vectors.num_rows, store.num_rows
    for batch in _batches(store.iterate(first, num_rows), options.encode_batch):
        vectors.append(encoder.encode_passages([passage.content for _, passage in batch]))
        progress("encode", vectors.num_rows, num_rows)
    return num_rows - first


def _publish(
    folder: Path,
    settings: IndexSettings,
    store: PassageStore,
    options: BuildOptions,
    progress: Progress,
) -> Manifest:
    """Index what is in store and vectors, write the manifest, delete what it does not name. The old one, if nothing changed."""
    old = read_manifest(folder) if (folder / MANIFEST).exists() else None
    vectors = VectorFile(folder / VECTORS, dim=int(settings.encoder["dim"]))
    vectors.sync()
    num_rows = min(store.num_rows, vectors.num_rows)
    removed = store.removed_rows()
    removed = removed[removed < num_rows]
    if old and old.num_rows == num_rows and _num_live(folder, old) == num_rows - len(removed):
        _delete_unnamed(folder, old)  # of a build that died behind its manifest
        return old
    generation = old.generation + 1 if old else 1
    segments = _index_vectors(folder, settings, vectors, num_rows, old, generation, options, progress)
    bm25 = _index_texts(folder, settings, store, num_rows, removed, old, generation, options, progress)
    removed_name = None
    if len(removed):
        removed_name = f"removed-{generation}.npy"
        np.save(folder / removed_name, removed)
    first = old.num_rows if old else 0
    added = ((num_rows, vectors.checksum(first, num_rows)),) if num_rows > first else ()
    manifest = Manifest(
        generation=generation,
        num_rows=num_rows,
        segments=segments,
        removed=removed_name,
        bm25=bm25,
        probe=old.probe if old else store.get([0])[0].content[:PROBE_CHARS],
        vectors=(*(old.vectors if old else ()), *added),
        files=_entries(folder, [segment.file for segment in segments], removed_name, bm25, old),
    )
    write_atomically(folder / MANIFEST, manifest.to_json())
    _delete_unnamed(folder, manifest)
    return manifest


def _index_vectors(
    folder: Path,
    settings: IndexSettings,
    vectors: VectorFile,
    num_rows: int,
    old: Manifest | None,
    generation: int,
    options: BuildOptions,
    progress: Progress,
) -> tuple[SegmentEntry, ...]:
    def create(first: int, factory: str) -> SegmentEntry:
        progress("train", 0, None)
        index = create_faiss(
            factory,
            vectors.dim,
            num_rows - first,
            lambda n: vectors.read_rows(first + _sample(num_rows - first, n, options.seed)),
            (vectors.read(at, min(at + ADD_ROWS, num_rows)) for at in range(first, num_rows, ADD_ROWS)),
            lambda done: progress("add", done, num_rows - first),
        )
        name = f"dense-{generation}-{first}.faiss"
        write_faiss(index, folder / name)
        return SegmentEntry(name, first, num_rows - first, factory)

    base = old.segments[0] if old else None
    # Later rows are searched exactly, so beside a large base their number counts, not their share.
    most = MAX_FLAT_ROWS if base and base.factory != "Flat" else num_rows
    if base is None or num_rows - base.num_rows > min(most, REBUILD_SHARE * base.num_rows):
        return (create(0, auto_factory(num_rows) if settings.factory == "auto" else settings.factory),)
    if num_rows == base.num_rows:
        return (base,)
    if old and old.num_rows == num_rows:
        return old.segments
    return (base, create(base.num_rows, "Flat"))


def _index_texts(
    folder: Path,
    settings: IndexSettings,
    store: PassageStore,
    num_rows: int,
    removed: NDArray[np.int64],
    old: Manifest | None,
    generation: int,
    options: BuildOptions,
    progress: Progress,
) -> str | None:
    if settings.bm25_language is None:
        return None
    from retrieval.bm25 import Bm25Index, link_copy  # only here: an index without BM25 does not need tantivy

    name = f"bm25-{generation}"
    shutil.rmtree(folder / name, ignore_errors=True)  # of a build that died here
    if old and old.bm25:
        link_copy(folder / old.bm25, folder / name)
        index = Bm25Index.open(folder / name, language=settings.bm25_language)
        first, gone = old.num_rows, np.setdiff1d(removed, removed_rows(folder, old))
    else:
        index = Bm25Index.create(folder / name, language=settings.bm25_language)
        first, gone = 0, np.zeros(0, np.int64)
    hidden = set(removed[removed >= first].tolist())

    def rows() -> Iterator[tuple[int, str]]:
        for row, passage in store.iterate(first, num_rows):
            if row % 1000 == 0:
                progress("bm25", row - first, num_rows - first)
            if row not in hidden:
                yield row, passage.content

    index.update(rows(), gone[gone < first].tolist(), memory_bytes=options.bm25_memory_bytes)
    for path in (folder / name).iterdir():
        path.chmod((folder / SETTINGS).stat().st_mode)  # the engine lets only the owner read some of its files
    return name


def _entries(
    folder: Path, segments: Sequence[str], removed: str | None, bm25: str | None, old: Manifest | None
) -> dict[str, FileEntry]:
    names = [
        SETTINGS,
        *segments,
        *([removed] if removed else []),
        *([STATE_FILE] if (folder / STATE_FILE).exists() else []),
    ]
    if bm25:
        names += sorted(f"{bm25}/{path.name}" for path in (folder / bm25).iterdir() if not path.name.endswith(".lock"))
    known = dict(old.files) if old else {}
    if old and old.bm25 and bm25:  # tantivy writes a file once: what is linked is what it was
        linked = {name: name.replace(bm25, old.bm25, 1) for name in names if name.startswith(f"{bm25}/")}
        known |= {
            name: known[before]
            for name, before in linked.items()
            if before in known and (folder / before).samefile(folder / name)
        }
    for name in names:
        if name not in known:
            sync(folder / name)
    if bm25:
        sync(folder / bm25)
    return {name: known[name] if name in known else entry_of(folder / name) for name in names}


def _delete_unnamed(folder: Path, manifest: Manifest) -> None:
    """Whoever serves an older generation keeps its files open, so they may go."""
    named = {name.split("/")[0] for name in manifest.files}
    patterns = ("dense-*.faiss", "removed-*.npy", "bm25-*", "draft-*", "*.draft")
    for path in chain.from_iterable(map(folder.glob, patterns)):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _num_live(folder: Path, manifest: Manifest) -> int:
    return manifest.num_rows - len(removed_rows(folder, manifest))


def _sample(num_rows: int, size: int, seed: int) -> NDArray[np.int64]:
    """Distinct rows of `[0, num_rows)`, ascending; all of them if `size` allows."""
    if size >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, size, replace=False))


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
