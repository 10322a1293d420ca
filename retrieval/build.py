"""Builds an index directory from documents: creates, continues or extends it, and removes passages.

    read     documents -> passages -> PassageStore      a transaction every few thousand documents
    prune    what was not read is marked as removed     if wished; one transaction
    fit      the embedded encoder, on a sample          once per directory
    encode   passages -> VectorFile                     in batches, after the last row in the file
    index    VectorFile -> FAISS, texts -> BM25         generation.py: files, then their manifest

Each stage continues from the files in the directory: after a killed build, or to add documents, run
the same command again. The served generation changes in the last step only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np

from retrieval.dense import check_factory, sample_rows
from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.generation import publish
from retrieval.hashed_encoder import STATE_FILE, fit_default
from retrieval.index import Directory
from retrieval.manifest import (
    MANIFEST,
    NOTHING,
    PASSAGES,
    VECTORS,
    read_manifest,
    removed_rows,
    replaced,
    write_atomically,
    writer_lock,
)
from retrieval.passage import Document, Passage
from retrieval.progress import Progress
from retrieval.settings import SETTINGS, IndexSettings, read_settings
from retrieval.splitter import Splitter
from retrieval.store import PassageStore
from retrieval.tokens import Tokens
from retrieval.vectors import VectorFile

READ_DOCUMENTS = 5000
"""Documents per transaction; each transaction waits for the disk."""
READ_CHARS = 1 << 26
"""Characters per transaction, reached first if documents are long."""
FIT_PASSAGES = 100_000
"""Size of the sample on which the embedded encoder is fitted."""
ENCODE_BATCH = 1024
"""Passages per call of the encoder."""

T = TypeVar("T")


@dataclass
class BuildReport:
    """Counts of one run: of documents down to `pruned`; then of passages, removed ones of documents
    that changed or went."""

    documents: int = 0
    unchanged: int = 0
    changed: int = 0
    pruned: int = 0
    added: int = 0
    duplicates: int = 0
    removed: int = 0
    encoded: int = 0
    passages: int = 0
    generation: int = 0


class Pruning(NamedTuple):
    """The wish that documents go which are not among those that are read; those in `unread` files
    and folders stay (`Corpus.unread`, looked at after the documents have been read).
    `even_most`: also if they are more than half of what is served."""

    unread: Collection[str]
    even_most: bool


class Gone(NamedTuple):
    """Documents that are not there any more, with the number of each one's served passages.
    `refusal`: why they are too many to be removed."""

    documents: list[tuple[str, int]]
    refusal: str | None = None


def build_index(
    documents: Iterable[Document],
    folder: Path,
    settings: IndexSettings,
    *,
    tokens: Tokens,
    encoder: Encoder | None,
    progress: Progress,
    pruning: Pruning | None = None,
    seed: int = 0,
) -> BuildReport:
    """Add documents to the index in `folder`, which is created if needed; a changed one replaces
    its earlier version.

    Args:
        encoder: of `settings.encoder`; None: the embedded one, fitted here if there is none yet.
        pruning: remove other documents than these; None: they stay.
        seed: of the samples and of the embedded encoder.
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
                what = f"holds files of an index but no {SETTINGS}"
                raise RetrievalError(f"{folder} {what}; use another directory")
            # first: a killed build continues from the others
            write_atomically(folder / SETTINGS, settings.to_json())
        with _opened(folder, settings) as directory:
            store, vectors = directory.store, directory.vectors
            _settle_settings(directory)
            directory.check(verify=False)
            # Rows are on disk before their vectors, so that no interruption leaves more vectors.
            if vectors.num_rows > store.num_rows:
                numbers = f"{store.num_rows} of {vectors.num_rows}"
                raise CorruptIndexError(f"{store.path}: holds {numbers} passages")
            report = _read(documents, directory, cut, progress, pruning)
            if not store.num_rows:
                raise RetrievalError("these documents contain no text")
            encoder = encoder or _embedded(directory, seed, progress)
            # Before the first new vector: what two encoders wrote to one file cannot be told apart.
            if vectors.num_rows:
                directory.check_encoder(encoder)
            report.encoded = _encode(directory, encoder, progress)
            manifest = publish(directory, seed=seed, progress=progress)
    report.passages = manifest.num_rows - len(removed_rows(folder, manifest))
    report.generation = manifest.generation
    return report


def find_gone(documents: Iterable[Document], folder: Path, pruning: Pruning) -> Gone:
    """What a build of these documents would remove. Changes nothing.

    Raises:
        RetrievalError: another process writes the directory.
        CorruptIndexError: there is no finished index, or it is damaged.
    """
    read_manifest(folder)  # first: the lock would be a file in a folder that is no index
    with writer_lock(folder), _opened(folder, read_settings(folder)) as directory:
        directory.check(verify=False)
        store = directory.store
        before = store.num_in(directory.manifest.num_rows)
        store.begin()  # and never committed
        run = store.begin_run()
        for document in documents:
            store.mark(document, run)
        return _gone(directory, run, pruning, before)


def remove_passages(
    folder: Path, ids: Sequence[str], *, load: Callable[[], Encoder], progress: Progress
) -> int:
    """Remove passages from the served index, by their ids or their documents'. Returns how many.
    A later build that reads their document again adds them again.

    Args:
        load: the index's encoder; called only if another document's duplicate replaces a passage.
    Raises:
        RetrievalError: an unknown id (nothing is removed then), or another process writes there.
    """
    settings = read_settings(folder)
    with writer_lock(folder), _opened(folder, settings) as directory:
        directory.check(verify=False)
        store, rows = directory.store, set[int]()
        store.begin()
        for name in ids:
            found = store.rows_of(name) or _unserved(directory, name)
            if not store.forget(name) and not found:
                raise RetrievalError(f"{folder}: no passage and no document has the id {name!r}")
            rows.update(found)
        store.remove(sorted(rows))
        # Before the commit: if the model cannot be loaded, nothing is removed.
        encoder = load() if store.num_rows > directory.vectors.num_rows else None
        store.commit()
        if encoder:
            directory.check_encoder(encoder)
            _encode(directory, encoder, progress)
        publish(directory, seed=0, progress=progress)
    return len(rows)


# Private, in order of use


@contextmanager
def _opened(folder: Path, settings: IndexSettings) -> Iterator[Directory]:
    store = PassageStore(folder / PASSAGES, writable=True)
    try:
        vectors = VectorFile(folder / VECTORS, dim=settings.dim)
        manifest = read_manifest(folder) if (folder / MANIFEST).exists() else NOTHING
        yield Directory(folder, settings, manifest, store, vectors)
    finally:
        store.close(checkpoint=True)


def _settle_settings(directory: Directory) -> None:
    """Refuse other settings than the directory's; those that no file depends on yet may change."""
    folder, settings = directory.folder, directory.settings
    has_rows = directory.store.num_rows > 0
    there = read_settings(folder) if has_rows else settings
    names = there.differences(settings)
    may_change = directory.manifest is NOTHING and set(names) <= {"factory", "bm25_language"}
    if not has_rows or (names and may_change):
        write_atomically(folder / SETTINGS, settings.to_json())
    elif names:
        then, now = (getattr(each, names[0]) for each in (there, settings))
        what = f"was built with {names[0]} {then!r}, not {now!r}"
        how = "an index keeps its settings, so use another directory"
        raise RetrievalError(f"{folder}: {what}; {how}")


def _unserved(directory: Directory, name: str) -> list[int]:
    """Rows of this id that are still served although an interrupted removal has marked them."""
    hidden = removed_rows(directory.folder, read_manifest(directory.folder))
    waiting = np.setdiff1d(directory.store.removed_rows(), hidden).tolist()
    passages = zip(waiting, directory.store.get(waiting), strict=True)
    return [row for row, passage in passages if name in (passage.id, passage.document_id)]


def _cutter(settings: IndexSettings, tokens: Tokens) -> Callable[[Document], Iterable[Passage]]:
    if settings.is_split:
        overlap = settings.overlap_tokens
        return Splitter(tokens, max_tokens=settings.max_tokens, overlap_tokens=overlap).split

    def whole(document: Document) -> list[Passage]:
        name, text = document.id, document.text
        num_tokens = len(tokens.offsets(text))
        return [Passage(name, name, document.title, text, 0, num_tokens, num_tokens)]

    return whole


def _read(
    documents: Iterable[Document],
    directory: Directory,
    cut: Callable[[Document], Iterable[Passage]],
    progress: Progress,
    pruning: Pruning | None,
) -> BuildReport:
    store = directory.store
    report, run, removed_before = BuildReport(), store.begin_run(), len(store.removed_rows())
    # Reading removes rows of changed documents.
    before = store.num_in(directory.manifest.num_rows) if pruning else (0, 0)
    num_chars = 0
    store.begin()
    progress("read", 0, None)
    for document in documents:
        report.documents += 1
        is_known = store.is_known(document, run)
        report.unchanged += is_known is True
        report.changed += is_known is False
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
        gone = _gone(directory, run, pruning, before)
        if gone.refusal:
            raise RetrievalError(gone.refusal)
        store.begin()
        store.drop([name for name, _ in gone.documents])
        store.commit()
        report.pruned = len(gone.documents)
    report.removed = len(store.removed_rows()) - removed_before
    return report


def _gone(directory: Directory, run: int, pruning: Pruning, before: tuple[int, int]) -> Gone:
    """Of what was served `before` the run, (documents, passages), since documents that a refused
    run has added save none."""
    unseen = directory.store.unseen(run, directory.manifest.num_rows)
    documents = [(name, num) for name, file, num in unseen if not _is_unread(file, pruning.unread)]
    going = sum(num > 0 for _, num in documents), sum(num for _, num in documents)
    # By documents and by passages, since a few documents may have most of the passages.
    is_most = any(2 * some > every for some, every in zip(going, before, strict=True))
    if pruning.even_most or not is_most:
        return Gone(documents)
    numbers = f"{going[0]} of {before[0]} documents with {going[1]} of {before[1]} passages"
    what = "are not there any more, more than half: nothing is removed; --prune-all removes them"
    return Gone(documents, f"{numbers} {what}")


def _is_unread(file: str | None, unread: Collection[str]) -> bool:
    """Whether the file, or a folder that it is in, is unread. An unknown one may be any of them."""
    if file is None:
        return bool(unread)
    return file in unread or any(str(folder) in unread for folder in PurePosixPath(file).parents)


def _embedded(directory: Directory, seed: int, progress: Progress) -> Encoder:
    folder, store, settings = directory.folder, directory.store, directory.settings
    path = folder / STATE_FILE
    if not path.exists():
        if (folder / VECTORS).exists():
            what = "missing, and a new one would not fit the vectors in the directory"
            raise CorruptIndexError(f"{path}: {what}")
        progress("fit", 0, None)
        rows = sample_rows(store.num_rows, FIT_PASSAGES, seed).tolist()
        contents = [p.content for part in _batches(rows, 1000) for p in store.get(part)]
        # A state that is there is whole: the vectors of all later builds depend on it.
        with replaced(path) as draft:
            fit_default(contents, dim=settings.dim, seed=seed).save(draft)
    return load_encoder(
        settings.encoder, folder=folder, override=None, device=None, batch_size=ENCODE_BATCH
    )


def _encode(directory: Directory, encoder: Encoder, progress: Progress) -> int:
    store, vectors = directory.store, directory.vectors
    first, num_rows = vectors.num_rows, store.num_rows
    progress("encode", first, num_rows)
    for batch in _batches(store.iterate(first, num_rows), ENCODE_BATCH):
        vectors.append(encoder.encode_passages([passage.content for _, passage in batch]))
        progress("encode", vectors.num_rows, num_rows)
    return num_rows - first


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
