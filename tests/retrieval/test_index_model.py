"""An index directory against a list of passages, through builds, removals and crashes: opened anew
it finds what the list has; what was opened earlier answers as it did.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from retrieval import build as build_module
from retrieval import generation as generation_module
from retrieval.build import Pruning, find_gone
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.manifest import MANIFEST, VECTORS, read_manifest
from retrieval.passage import Document
from retrieval.retriever import Retriever
from retrieval.splitter import Splitter
from tests.examples import examples
from tests.reference.naive_index import NaiveIndex, Served
from tests.retrieval.small_index import DIM, TOKENS, WordEncoder, build, delete, remove

ENCODER = WordEncoder()
WORDS = ["ash", "birch", "cedar", "elm"]
READ_DOCUMENTS = 2
STARTS = [(start, step) for start in range(4) for step in (1, 3)]
SENTENCES = [
    " ".join(WORDS[(at + step * n) % 4] for n in range(6)) + " oak." for at, step in STARTS
]
"""As long as a passage may be: each becomes one."""
documents = st.builds(
    Document,
    st.sampled_from([f"doc{number}" for number in range(5)]),
    st.sampled_from(["", "", "elm title"]),
    st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=4).map(" ".join),
    st.sampled_from(["a.jsonl", "sub/a.jsonl", "sub/b.txt", None]),
)
corpora = st.lists(documents, min_size=1, max_size=5, unique_by=lambda document: document.id)
JUNK = [MANIFEST + ".draft", "dense-2-0.faiss", "removed-3.npy", "draft-encoder.npz"]
STAGES = ["write_faiss", "_index_texts", "_entries", "write_atomically", "_delete_unnamed"]


class Killed(BaseException):
    pass


@dataclass
class Opened:
    """What was opened once, and what it must go on answering."""

    index: Index
    served: Served


class DyingEncoder(WordEncoder):
    batches_left = 0

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches_left -= 1
        if self.batches_left < 0:
            raise Killed
        return super().encode_passages(texts)


class IndexMachine(RuleBasedStateMachine):
    """One directory without BM25."""

    changes: ClassVar[dict[str, Any]] = {"is_split": True, "max_tokens": 8, "bm25_language": None}

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.naive = NaiveIndex(Splitter(TOKENS, max_tokens=8, overlap_tokens=0).split)
        self.opened: list[Opened] = []
        self.is_clean = True
        self.patches = ExitStack()
        self.patches.enter_context(patch("os.fsync"))  # no power is cut here
        self.patches.enter_context(patch.object(build_module, "READ_DOCUMENTS", READ_DOCUMENTS))

    def teardown(self) -> None:
        self.patches.close()
        for opened in self.opened:
            opened.index.store.close()
        delete(self.folder)

    def _build(self, corpus: Iterable[Document], **options: Any) -> Any:
        return build(self.folder, corpus, **options, **self.changes)

    @initialize(corpus=corpora)
    def first_build(self, corpus: list[Document]) -> None:
        self.build(corpus)
        index = Index.open(self.folder, verify=True)
        self.retriever = Retriever(index, ENCODER, verify=True, threads=1)

    @rule(corpus=corpora)
    def build(self, corpus: list[Document]) -> None:
        counts, before, generation = self.naive.read(corpus), self.naive.served, self._generation()
        live = {self.naive.passages[row].content for row in self.naive.live}
        assert self.naive.texts() <= live, "a text is lost"
        report = self._build(corpus)
        self.naive.publish()
        for name, number in counts.items():
            assert getattr(report, name) == number, name
        assert report.passages == len(self.naive.live)
        assert report.generation == generation + (before != self.naive.served)
        self.is_clean = True

    @rule(
        corpus=corpora,
        unread=st.sets(st.sampled_from(["a.jsonl", "sub", "sub/b.txt"])),
        even_most=st.booleans(),
    )
    def prune(self, corpus: list[Document], unread: set[str], even_most: bool) -> None:
        """What a dry run tells is what goes, unless it is more than half of what was served."""
        before, generation = self.naive.num_served(), self._generation()
        pruning = Pruning(unread, even_most=even_most)
        told = find_gone(corpus, self.folder, pruning)
        assert [name for name, _ in told.documents] == sorted(self.naive.gone(corpus, unread))
        served = self.naive.served
        counts = self.naive.read(corpus)
        gone = self.naive.gone(corpus, unread)
        going = sum(number > 0 for number in gone.values()), sum(gone.values())
        if not even_most and (2 * going[0] > before[0] or 2 * going[1] > before[1]):
            with pytest.raises(RetrievalError, match="more than half: nothing is removed"):
                self._build(corpus, pruning=pruning)
            assert self._generation() == generation
            return
        self.naive.drop(gone)
        report = self._build(corpus, pruning=pruning)
        self.naive.publish()
        assert (report.pruned, report.passages) == (len(gone), len(self.naive.live))
        assert report.generation == generation + (served != self.naive.served)
        assert report.documents == counts["documents"]
        self.is_clean = True

    @rule(
        pick=st.integers(0, 99),
        whole=st.booleans(),
        dies_at=st.none() | st.sampled_from(STAGES),
        after=st.booleans(),
    )
    def remove(self, pick: int, whole: bool, dies_at: str | None, after: bool) -> None:
        """Only rows that have vectors are served: a crash may have left some without."""
        if not self.naive.live:
            return
        passage = self.naive.passages[sorted(self.naive.live)[pick % len(self.naive.live)]]
        name = passage.document_id if whole else passage.id
        rows = self.naive.rows_of(name)
        self.naive.remove(rows)
        with dying(dies_at, after=after) as death:
            assert remove(self.folder, name) == len(rows)
        if death.is_published:
            stored = (self.folder / VECTORS).stat().st_size // (2 * DIM)
            live = frozenset(row for row in self.naive.live if row < stored)
            self.naive.served = Served(tuple(self.naive.passages[:stored]), live)
        self.is_clean = not death.has_died

    @rule(corpus=corpora, num_read=st.integers(0, 5))
    def die_reading(self, corpus: list[Document], num_read: int) -> None:
        """The source breaks off: whole transactions are there, and nothing else."""

        def broken() -> Iterator[Document]:
            yield from corpus[:num_read]
            raise Killed

        with pytest.raises(Killed):
            self._build(broken())
        self.naive.read(corpus[: min(num_read, len(corpus)) // READ_DOCUMENTS * READ_DOCUMENTS])

    @rule(corpus=corpora, num_batches=st.integers(0, 3), torn=st.binary(max_size=2 * DIM - 1))
    def die_encoding(self, corpus: list[Document], num_batches: int, torn: bytes) -> None:
        """Some vectors are there, and half of one."""
        encoder = DyingEncoder()
        encoder.batches_left = num_batches
        try:
            self._build(corpus, encoder=encoder)
        except Killed:
            with open(self.folder / VECTORS, "ab") as file:
                # a writer goes on here, not after half a row
                file.truncate(file.tell() // (2 * DIM) * (2 * DIM))
                file.write(torn)
            self.naive.read(corpus)
        else:
            self.naive.read(corpus)
            self.naive.publish()
            self.is_clean = True

    @rule(corpus=corpora, stage=st.sampled_from(STAGES), after=st.booleans(), prunes=st.booleans())
    def die_publishing(self, corpus: list[Document], stage: str, after: bool, prunes: bool) -> None:
        """Only the manifest's replacement serves what is new, and hides what has gone."""
        self.naive.read(corpus)
        if prunes:
            self.naive.drop(self.naive.gone(corpus, ()))
        with dying(stage, after=after) as death:
            self._build(corpus, pruning=Pruning((), even_most=True) if prunes else None)
        if death.is_published:
            self.naive.publish()
        self.is_clean = not death.has_died

    @rule(names=st.sets(st.sampled_from(JUNK)))
    def leave_junk(self, names: set[str]) -> None:
        junk = [name for name in names if not (self.folder / name).exists()]
        for name in junk:
            (self.folder / name).write_bytes(b"junk")
        self.is_clean = self.is_clean and not junk

    @precondition(lambda self: len(self.opened) < 3)
    @rule()
    def open(self) -> None:
        self.opened.append(Opened(Index.open(self.folder, verify=False), self.naive.served))

    @rule()
    def refresh(self) -> None:
        """A server follows."""
        is_newer = self.retriever.index.manifest.generation < self._generation()
        assert self.retriever.refresh() == is_newer
        served = self.naive.served
        check(Opened(self.retriever.index, served))
        hits = self.retriever.search(["elm"], k=3, mode="dense", nprobe=1).hits[0]
        expected = served.search("elm", ENCODER.encode_queries, k=len(served.passages) + 1)
        by_id = {served.passages[row].id: (served.passages[row], score) for row, score in expected}
        assert [hit.passage for hit in hits] == [by_id[hit.passage.id][0] for hit in hits]
        scores = [hit.score for hit in hits]
        np.testing.assert_allclose(scores, [score for _, score in expected[:3]], atol=1e-3)
        np.testing.assert_allclose(scores, [by_id[hit.passage.id][1] for hit in hits], atol=1e-3)

    def _generation(self) -> int:
        return read_manifest(self.folder).generation if (self.folder / MANIFEST).exists() else 0

    @invariant()
    def serves_what_the_model_says(self) -> None:
        if not (self.folder / MANIFEST).exists():
            return
        index = Index.open(self.folder, verify=True)
        check(Opened(index, self.naive.served))
        index.store.close()
        for opened in self.opened:
            check(opened)

    @invariant()
    def no_file_is_left(self) -> None:
        if self.is_clean and (self.folder / MANIFEST).exists():
            index = Index.open(self.folder, verify=False)
            named = {name.split("/")[0] for name in index.manifest.files}
            index.store.close()
            there = {path.name for path in self.folder.iterdir()}
            unnamed = there - named - {"lock", MANIFEST, "passages.sqlite", "vectors.f16"}
            assert unnamed <= {"passages.sqlite-wal", "passages.sqlite-shm"}  # while somebody reads


class WordsMachine(IndexMachine):
    """One with BM25, whose files are the most."""

    changes: ClassVar[dict[str, Any]] = {"is_split": True, "max_tokens": 8, "bm25_language": "none"}


def check(opened: Opened) -> None:
    """The index answers as brute force over `served`."""
    index, served = opened.index, opened.served
    assert (index.num_rows, index.num_live) == (len(served.passages), len(served.live))
    stored = index.store.iterate(0, index.num_rows)
    assert tuple(passage for _, passage in stored) == served.passages
    assert set(range(index.num_rows)).difference(index.removed.tolist()) == served.live
    k = index.num_rows + 1
    for query in WORDS:
        scores, rows = index.search_dense(ENCODER.encode_queries([query]), k=k, nprobe=1)
        expected = served.search(query, ENCODER.encode_queries, k=k)
        found, scores = rows[0, : len(expected)].tolist(), scores[0, : len(expected)]
        assert set(found) == served.live
        assert (rows[0, len(expected) :] == -1).all()
        np.testing.assert_allclose(scores, [score for _, score in expected], atol=1e-3)
        np.testing.assert_allclose(scores, [dict(expected)[row] for row in found], atol=1e-3)
        if index.bm25:
            assert sorted(index.bm25.search(query, k=k)[1].tolist()) == served.with_word(query)


@dataclass
class Death:
    """Of a build."""

    has_died: bool = False
    is_published: bool = True


@contextmanager
def dying(stage: str | None, *, after: bool) -> Iterator[Death]:
    """Kills before or after the stage is run, if it is."""
    death = Death()
    if stage is None:
        yield death
        return
    work = getattr(generation_module, stage)

    def die(*args: Any, **kwargs: Any) -> Any:
        death.has_died = True
        death.is_published = stage == "_delete_unnamed" or (stage == "write_atomically" and after)
        if after:
            work(*args, **kwargs)
        raise Killed

    with patch.object(generation_module, stage, die), suppress(Killed):
        yield death


TestIndexMachine: Any = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=examples(50), stateful_step_count=12)
TestWordsMachine: Any = WordsMachine.TestCase
TestWordsMachine.settings = settings(max_examples=examples(6), stateful_step_count=10)
