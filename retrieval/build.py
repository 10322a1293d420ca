"""Builds an index directory from documents: creates, continues or extends it, and removes passages.

    read     documents -> passages -> PassageStore      a transaction every few thousand documents
    prune    what was not read is marked as removed      if wished; one transaction, after all has
                                                        been read
    fit      the embedded encoder, on a sample           once per directory
    encode   passages -> VectorFile                      in batches, after the last row in the file
    index    VectorFile -> FAISS, PassageStore -> BM25   generation.py: new files, then the manifest
                                                        that names them

Each stage continues from the files in the directory: after a killed build, or to add documents, run
the same command again. The served generation changes in the last step only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np

from retrieval.dense import check_factory
from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.generation import num_live, publish, sample_rows
from retrieval.hashed_encoder import STATE_FILE, fit_default
from retrieval.index import check_encoder, check_rows
from retrieval.manifest import (
    MANIFEST,
    PASSAGES,
    VECTORS,
    check_files,
    read_manifest,
    removed_rows,
    sync,
    write_atomically,
    writer_lock,
)
from retrieval.passage import Document, Passage
from retrieval.progress import Progress
from retrieval.scripts import is_unspaced
from retrieval.settings import SETTINGS, BuildOptions, IndexSettings, read_settings
from retrieval.splitter import Splitter
from retrieval.store import PassageStore
from retrieval.tokens import Tokens
from retrieval.vectors import VectorFile

READ_DOCUMENTS = 5000
"""Documents per transaction; each transaction waits for the disk."""
READ_CHARS = 1 << 26
"""Characters per transaction, reached first if documents are long."""

T = TypeVar("T")


@dataclass
class BuildReport:
    """Counts of one run. `documents`, `unspaced` (of them, in scripts without spaces), `unchanged`,
    `changed` and `pruned` count documents, the others passages; removed ones are of documents that
    changed or went."""

    documents: int = 0
    unspaced: int = 0
    unchanged: int = 0
    changed: int = 0
    pruned: int = 0
    added: int = 0
    duplicates: int = 0
    removed: int = 0
    encoded: int = 0
    passages: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Pruning:
    """The wish that documents go which are not among those that are read.

    Attributes:
        unread: files and folders whose documents stay, since they are there and could not be read
            (`corpus.Reading.unread`). Looked at after the documents have been read.
        even_most: go also if they are more than half of what is served.
    """

    unread: Collection[str]
    even_most: bool


@dataclass(frozen=True)
class Gone:
    """Documents that are not there any more, and how many passages of each are served;
    why they are too many to be removed."""

    documents: list[tuple[str, int]]
    refusal: str | None


def build_index(
    documents: Iterable[Document],
    folder: Path,
    settings: IndexSettings,
    *,
    tokens: Tokens,
    encoder: Encoder | None,
    options: BuildOptions,
    progress: Progress,
    pruning: Pruning | None = None,
) -> BuildReport:
    """Add documents to the index in `folder`, which is created if needed. A changed document
    replaces its earlier version.

    Args:
        encoder: of `settings.encoder`; None: the embedded one, fitted here if the directory has
            none.
        pruning: remove other documents than these; None: they stay.
    Raises:
        RetrievalError: the directory has other settings, another process writes it, the documents
            have no text, or too many would be removed. What is served has not changed then.
        CorruptIndexError: the directory is damaged.
    """
    # refuse invalid settings before they are written to the directory
    cut = _cutter(settings, tokens)
    check_factory("Flat" if settings.factory == "auto" else settings.factory, settings.dim)
    if settings.bm25_language is not None:
        # only here: an index without BM25 does not need tantivy
        from retrieval.bm25 import create_analyzer

        create_analyzer(settings.bm25_language)
    folder.mkdir(parents=True, exist_ok=True)
    with writer_lock(folder):
        if not (folder / SETTINGS).exists():
            if (folder / PASSAGES).exists() or (folder / MANIFEST).exists():
                raise RetrievalError(
                    f"{folder} holds files of an index but no {SETTINGS}; use another directory"
                )
            # first: a killed build continues from the others
            write_atomically(folder / SETTINGS, settings.to_json())
        with _opened(folder, settings) as (store, vectors):
            _settle_settings(folder, settings, has_rows=store.num_rows > 0)
            _check_served(folder, store, vectors)
            # Rows are on disk before their vectors, so that no interruption leaves more vectors.
            if vectors.num_rows > store.num_rows:
                raise CorruptIndexError(
                    f"{store.path}: holds {store.num_rows} of {vectors.num_rows} passages"
                )
            num_served = read_manifest(folder).num_rows if (folder / MANIFEST).exists() else 0
            report = _read(documents, store, cut, progress, pruning, num_served)
            if not store.num_rows:
                raise RetrievalError("these documents contain no text")
            encoder = encoder or _embedded(folder, settings, store, options, progress)
            # Before the first new vector: what two encoders wrote to one file cannot be told apart.
            if vectors.num_rows:
                check_encoder(store, vectors, encoder)
            report.encoded = _encode(store, vectors, encoder, options, progress)
            manifest = publish(folder, settings, store, vectors, options=options, progress=progress)
    return replace(report, passages=num_live(folder, manifest), generation=manifest.generation)


def find_gone(documents: Iterable[Document], folder: Path, pruning: Pruning) -> Gone:
    """What a build of these documents would remove. Changes nothing.

    Raises:
        RetrievalError: another process writes the directory.
        CorruptIndexError: there is no finished index, or it is damaged.
    """
    num_served = read_manifest(folder).num_rows
    with writer_lock(folder), _opened(folder, read_settings(folder)) as (store, vectors):
        _check_served(folder, store, vectors)
        before = store.num_in(num_served)
        store.begin()  # and never committed
        run = store.begin_run()
        for document in documents:
            store.mark(document, run)
        return _gone(store, run, pruning, num_served, before)


def remove_passages(
    folder: Path,
    ids: Sequence[str],
    *,
    load: Callable[[], Encoder],
    options: BuildOptions,
    progress: Progress,
) -> int:
    """Remove passages from the served index. A document's id selects all its passages. Returns the
    number of passages.

    A later build that reads their document again adds them again.

    Args:
        load: loads the index's encoder; called only if a duplicate of another document replaces a
            removed passage.
    Raises:
        RetrievalError: an unknown id (nothing is removed then), or another process writes the
            directory.
    """
    settings = read_settings(folder)
    with writer_lock(folder), _opened(folder, settings) as (store, vectors):
        _check_served(folder, store, vectors)
        rows: set[int] = set()
        store.begin()
        for name in ids:
            found = store.rows_of(name) or _unserved(folder, store, name)
            if not store.forget(name) and not found:
                raise RetrievalError(f"{folder}: no passage and no document has the id {name!r}")
            rows.update(found)
        store.remove(sorted(rows))
        # Before the commit: if the model cannot be loaded, nothing is removed.
        encoder = load() if store.num_rows > vectors.num_rows else None
        store.commit()
        if encoder:
            check_encoder(store, vectors, encoder)
            _encode(store, vectors, encoder, options, progress)
        publish(folder, settings, store, vectors, options=options, progress=progress)
    return len(rows)


# Private, in order of use


@contextmanager
def _opened(folder: Path, settings: IndexSettings) -> Iterator[tuple[PassageStore, VectorFile]]:
    store = PassageStore(folder / PASSAGES, writable=True)
    try:
        yield store, VectorFile(folder / VECTORS, dim=settings.dim)
    finally:
        store.close(checkpoint=True)


def _unserved(folder: Path, store: PassageStore, name: str) -> list[int]:
    """Rows of this id that are still served although an interrupted removal has marked them."""
    waiting = np.setdiff1d(
        store.removed_rows(), removed_rows(folder, read_manifest(folder))
    ).tolist()
    passages = zip(waiting, store.get(waiting), strict=True)
    return [row for row, passage in passages if name in (passage.id, passage.document_id)]


def _check_served(folder: Path, store: PassageStore, vectors: VectorFile) -> None:
    """Refuse to build on a damaged index, by the same checks as when it is opened for searching."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        check_files(folder, manifest, {}, verify=False)
        check_rows(store, vectors, manifest)


def _settle_settings(folder: Path, settings: IndexSettings, *, has_rows: bool) -> None:
    """Compare the settings with those in the directory.
    Those that no file depends on yet may still change."""
    there = read_settings(folder) if has_rows else settings
    names = there.differences(settings)
    if not has_rows or (
        names and not (folder / MANIFEST).exists() and set(names) <= {"factory", "bm25_language"}
    ):
        write_atomically(folder / SETTINGS, settings.to_json())
    elif names:
        name = names[0]
        raise RetrievalError(
            f"{folder}: was built with {name} {getattr(there, name)!r}, not"
            f" {getattr(settings, name)!r}; an index keeps its settings, so use another directory"
        )


def _cutter(settings: IndexSettings, tokens: Tokens) -> Callable[[Document], Iterable[Passage]]:
    if settings.is_split:
        splitter = Splitter(
            tokens, max_tokens=settings.max_tokens, overlap_tokens=settings.overlap_tokens
        )
        return splitter.split

    def whole(document: Document) -> list[Passage]:
        num_tokens = len(tokens.offsets(document.text))
        return [
            Passage(
                document.id, document.id, document.title, document.text, 0, num_tokens, num_tokens
            )
        ]

    return whole


def _read(
    documents: Iterable[Document],
    store: PassageStore,
    cut: Callable[[Document], Iterable[Passage]],
    progress: Progress,
    pruning: Pruning | None,
    num_served: int,
) -> BuildReport:
    report, run, removed_before = BuildReport(), store.begin_run(), len(store.removed_rows())
    # Reading removes rows of changed documents.
    before = store.num_in(num_served) if pruning else (0, 0)
    num_chars = 0
    store.begin()
    for document in documents:
        report.documents += 1
        report.unspaced += is_unspaced(document.text)
        if (is_known := store.is_known(document, run)) is not None:
            report.unchanged += is_known
            report.changed += not is_known
        if not is_known:
            added, duplicates = store.put(document, cut(document), run)
            report.added += added
            report.duplicates += duplicates
        num_chars += len(document.text)
        if report.documents % READ_DOCUMENTS == 0 or num_chars >= READ_CHARS:
            num_chars = 0
            store.commit()
            store.begin()
            progress("read", report.documents, None)
    store.commit()
    progress("read", report.documents, None)
    if pruning:
        gone = _gone(store, run, pruning, num_served, before)
        if gone.refusal:
            raise RetrievalError(gone.refusal)
        store.begin()
        store.drop([name for name, _ in gone.documents])
        store.commit()
        report.pruned = len(gone.documents)
    report.removed = len(store.removed_rows()) - removed_before
    return report


def _gone(
    store: PassageStore, run: int, pruning: Pruning, num_served: int, before: tuple[int, int]
) -> Gone:
    """Of what was served before the run, (documents, passages),
    since documents that a refused run has added save none."""
    unseen = store.unseen(run, num_served)
    documents = [
        (name, number) for name, file, number in unseen if not _is_unread(file, pruning.unread)
    ]
    going = sum(number > 0 for _, number in documents), sum(number for _, number in documents)
    # By documents and by passages, since a few documents may have most of the passages.
    if pruning.even_most or all(
        2 * some <= every for some, every in zip(going, before, strict=True)
    ):
        return Gone(documents, None)
    return Gone(
        documents,
        f"{going[0]} of {before[0]} documents with {going[1]} of {before[1]} passages are not there"
        " any more, more than half: nothing is removed; --prune-all removes them",
    )


def _is_unread(file: str | None, unread: Collection[str]) -> bool:
    """Whether the file, or a folder that it is in, is there and was not read.
    One that is not known may be any of them."""
    if file is None:
        return bool(unread)
    return file in unread or any(str(folder) in unread for folder in PurePosixPath(file).parents)


def _embedded(
    folder: Path,
    settings: IndexSettings,
    store: PassageStore,
    options: BuildOptions,
    progress: Progress,
) -> Encoder:
    path = folder / STATE_FILE
    if not path.exists():
        if (folder / VECTORS).exists():
            raise CorruptIndexError(
                f"{path}: missing, and a new one would not fit the vectors in the directory"
            )
        progress("fit", 0, None)
        rows = sample_rows(store.num_rows, options.fit_passages, options.seed)
        contents = [p.content for part in _batches(rows.tolist(), 1000) for p in store.get(part)]
        encoder = fit_default(contents, dim=settings.dim, seed=options.seed)
        # A state that is there is whole: the vectors of all later builds depend on it.
        draft = path.with_name("draft-" + path.name)
        encoder.save(draft)
        sync(draft)
        draft.replace(path)
    return load_encoder(
        settings.encoder, folder=folder, override=None, device=None, batch_size=options.encode_batch
    )


def _encode(
    store: PassageStore,
    vectors: VectorFile,
    encoder: Encoder,
    options: BuildOptions,
    progress: Progress,
) -> int:
    first, num_rows = vectors.num_rows, store.num_rows
    for batch in _batches(store.iterate(first, num_rows), options.encode_batch):
        vectors.append(encoder.encode_passages([passage.content for _, passage in batch]))
        progress("encode", vectors.num_rows, num_rows)
    return num_rows - first


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
