"""BM25 over the words of passages, on tantivy. An index is one folder of rows, without texts.

Words are runs of letters and digits, in scripts without spaces pairs of characters (scripts.py).

The constants are tantivy's:
k1 = 1.2, b = 0.75, idf = ln(1 + (N - n + 0.5) / (n + 0.5)), with a passage's length rounded down to
one of 256 steps (exact up to 40 words, within an eighth above). tests/reference/naive_bm25.py is
the slow twin.

An open index is a snapshot: its files are mapped, so its answers do not change when another writer
updates the folder or the folder is deleted. Only its own `update` changes it. N, n and the mean
length count removed passages until tantivy merges their segment, so a removal does not change other
scores at once, and a rebuild may change all of them a little.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tantivy
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError, first_line
from retrieval.manifest import ANALYZER
from retrieval.passage import utf8
from retrieval.scripts import paired

MAX_WORD_BYTES = 100
"""Longer "words" are dropped: they are encoded data, and each would be a term of its own."""
MAX_QUERY_TERMS = 1024
"""Lucene's limit for the clauses of one query.
A question has about a dozen words, so the limit affects pasted documents only."""
WRITER_BYTES = 256 << 20
"""The writer's buffer; a full one becomes a segment on disk."""


class Bm25Index:
    """A snapshot of a folder. Many threads may call `search` at once, one at a time `update`."""

    def __init__(self, folder: Path, language: str) -> None:
        """Of the last commit; without one, empty. See `create` and `open`."""
        self._analyzer = create_analyzer(language)
        # In the schema: tantivy refuses an index that another analyzer has made.
        name = f"words{ANALYZER}-{language}"
        builder = tantivy.SchemaBuilder().add_integer_field("row", indexed=True, fast=True)
        # Frequencies without positions: no phrase is searched.
        builder.add_text_field("content", tokenizer_name=name, index_option="freq")
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema, str(folder))
        self._index.register_tokenizer(name, self._analyzer)
        # A reader that reloads by itself would change the snapshot under its searches.
        self._index.config_reader("manual")
        self._searcher = self._index.searcher()

    @classmethod
    def create(cls, folder: Path, *, language: str) -> Bm25Index:
        """Create an empty index in a folder that is new or empty.
        Raises RetrievalError: there is no stemmer for `language`."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, language)

    @classmethod
    def open(cls, folder: Path, *, language: str) -> Bm25Index:
        """Open the folder's last commit, with the `language` of its creation.

        Raises:
            CorruptIndexError: the folder is missing, incomplete, truncated, or was created with
                another language. Flipped bits are not detected here but by the manifest's
                checksums.
            RetrievalError: there is no stemmer for `language`.
        """
        _check_exists(folder)
        what = f"{folder} is damaged or no BM25 index in {language!r}"
        with _damage_named(what):
            if os.access(folder, os.W_OK):
                return cls(folder, language)
            # tantivy needs a folder in which it can create a lock file; open files outlive these
            # links.
            with TemporaryDirectory() as links:
                for file in _files(folder):
                    Path(links, file.name).symlink_to(file.resolve())
                return cls(Path(links), language)

    @property
    def num_docs(self) -> int:
        """Number of searchable passages: added and not removed."""
        return int(self._searcher.num_docs)

    def update(self, add: Iterable[tuple[int, str]], remove: Iterable[int]) -> None:
        """Remove rows, then add (row, content) pairs, in one commit: all of it or, if anything
        raises, nothing.

        Args:
            add: consumed lazily; rows ascending, none of them live unless it is in `remove` too.
            remove: rows; unknown ones are ignored.
        Raises:
            RetrievalError: the folder is read-only, or another writer holds its lock. A killed
                process releases the lock, and the next commit deletes its files.
            ValueError: tantivy could not write, for example because the disk is full.
        """
        try:
            # One thread: rows stay in order inside a segment, and the thread that reads the corpus
            # keeps its core.
            writer = self._index.writer(WRITER_BYTES, 1)
        except ValueError as error:
            reason = "another writer holds its lock" if "LockBusy" in str(error) else error
            raise RetrievalError(f"the BM25 index cannot be written: {reason}") from error
        try:
            for row in remove:
                writer.delete_documents_by_term("row", row)
            for row, content in add:
                writer.add_document(tantivy.Document(row=row, content=_cut(content)))
            writer.commit()
        except BaseException:
            writer.rollback()
            raise
        finally:
            writer.wait_merging_threads()  # also releases the lock
        self._index.reload()
        self._searcher = self._index.searcher()

    def search(self, query: str, *, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The best passages with a word of the query: scores [n] and rows [n], n <= k, best first.

        The query is text, never syntax; a repeated word counts once, and of more than
        MAX_QUERY_TERMS the rarest are looked up. Equal scores are ordered by row, ascending. If
        several passages tie for the last place, their segments decide which are returned.

        Raises:
            CorruptIndexError: tantivy failed on a damaged file.
        """
        searcher = self._searcher
        with _damage_named("the BM25 index is damaged"):
            words = list(dict.fromkeys(self._analyzer.analyze(_cut(query))))
            if len(words) > MAX_QUERY_TERMS:
                frequency = {word: searcher.doc_freq("content", word) for word in words}
                # A word that no passage has would take a clause and find nothing.
                known = [word for word in words if frequency[word]]
                words = sorted(known, key=frequency.__getitem__)[:MAX_QUERY_TERMS]
            limit = min(k, searcher.num_docs)  # tantivy panics at a limit of 0
            if not words or not limit:
                return np.empty(0, np.float32), np.empty(0, np.int64)
            term = partial(tantivy.Query.term_query, self._schema, "content", index_option="freq")
            terms = [(tantivy.Occur.Should, term(word)) for word in words]
            hits = searcher.search(tantivy.Query.boolean_query(terms), limit, count=False).hits
            found = searcher.fast_field_values("row", [address for _, address in hits])
        scores, rows = np.array([score for score, _ in hits], np.float32), np.array(found, np.int64)
        order = np.lexsort((rows, -scores))
        return scores[order], rows[order]


def link_copy(source: Path, target: Path) -> None:
    """Copy an index folder, in which no writer may be active, by hard links; where the file system
    has none, by its bytes.

    An update of one folder does not change the other, because tantivy writes every file once:
    segments are new files, `meta.json` and `.managed.json` are replaced by renaming. Lock files are
    left out: two folders with a shared one would block each other's writers.

    Raises:
        CorruptIndexError: `source` is not an index.
    """
    _check_exists(source)
    target.mkdir(parents=True)
    for file in _files(source):
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy2(file, target / file.name)


def _cut(text: str) -> str:
    """What the analyzer is given of a text, a passage's or a query's."""
    return paired(utf8(text))


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix != ".lock"]


def _check_exists(folder: Path) -> None:
    if not (folder / "meta.json").is_file():
        raise CorruptIndexError(f"{folder} is no BM25 index: it has no meta.json")


@contextmanager
def _damage_named(what: str) -> Iterator[None]:
    """Raise tantivy's errors, and Rust's panics, which are no `Exception`, as CorruptIndexError."""
    try:
        yield
    except RetrievalError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, (ValueError, OSError)):
            raise
        raise CorruptIndexError(f"{what}: {first_line(error)}") from error


def create_analyzer(language: str) -> tantivy.TextAnalyzer:
    """Cuts text into words: runs of letters and digits, lower case, without accents, stemmed unless
    `language` is "none".

    Raises:
        RetrievalError: tantivy has no stemmer for this language.
    """
    # Stemmers expect lower case.
    filters = [
        tantivy.Filter.remove_long(MAX_WORD_BYTES),
        tantivy.Filter.lowercase(),
        tantivy.Filter.ascii_fold(),
    ]
    try:
        if language != "none":
            filters.append(tantivy.Filter.stemmer(language))
        builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        for each in filters:
            builder = builder.filter(each)
        return builder.build()
    except ValueError as error:
        raise RetrievalError(f"BM25: {error}; give a language's English name, or none") from None
