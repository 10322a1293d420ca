"""Retrieves chunks for requests without any: the k best passages by words, vectors or both, with the `retrieval` package.

Each domain gets an index in a temporary folder, built and searched like a served one. A request searches its own domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from eval.errors import CommandError
from eval.progress import progress
from eval.task import Request, TaskData, TextChunk

if TYPE_CHECKING:
    from retrieval.progress import Progress
    from retrieval.retriever import Retriever

SEARCH_BATCH = 64
"""Questions searched together."""


def retrieve(
    data: TaskData, requests: Sequence[Request], *, k: int, mode: Literal["bm25", "dense", "fusion"], seed: int
) -> list[Request]:
    """The requests with the k best passages of their domain, best first. Single questions without results are left out.

    Raises:
        CommandError: the retrieval package's libraries are missing, or no index can be built of these passages.
    """
    by_domain: dict[str, list[TextChunk]] = {}
    for passage in data.passages:
        by_domain.setdefault(data.domains.get(passage.id, ""), []).append(passage)
    found: dict[str, tuple[TextChunk, ...]] = {}
    for domain in dict.fromkeys(data.domains.get(request.id, "") for request in requests):
        asked = [request for request in requests if data.domains.get(request.id, "") == domain]
        if domain not in by_domain:
            raise CommandError(f"{asked[0].id} searches domain {domain!r}, which has no passages")
        with TemporaryDirectory(prefix="eval-retrieve-") as folder:
            found.update(_search(by_domain[domain], asked, Path(folder), k=k, mode=mode, seed=seed))
    chosen = [replace(request, chunks=found[request.id]) for request in requests]
    return [request for request in chosen if request.chunks or request.conversation]


# Private, in order of use


def _search(
    passages: Sequence[TextChunk],
    asked: Sequence[Request],
    folder: Path,
    *,
    k: int,
    mode: Literal["bm25", "dense", "fusion"],
    seed: int,
) -> dict[str, tuple[TextChunk, ...]]:
    try:
        from retrieval import RetrievalError
        from retrieval.defaults import NPROBE

        retriever = _index(passages, folder, mode=mode, seed=seed)
    except ImportError as error:
        raise CommandError(f"--retriever {mode} needs the extra `retrieval` ({error})") from None
    except RetrievalError as error:
        raise CommandError(f"--retriever {mode}: {error}") from None
    found: dict[str, tuple[TextChunk, ...]] = {}
    with progress("searching", len(asked)) as bar:
        for first in range(0, len(asked), SEARCH_BATCH):
            batch = asked[first : first + SEARCH_BATCH]
            hits = retriever.search([request.question for request in batch], k=k, mode=mode, nprobe=NPROBE).hits
            for request, best in zip(batch, hits, strict=True):
                found[request.id] = tuple(TextChunk(hit.passage.id, hit.passage.text) for hit in best)
            bar.update(len(batch))
    return found


def _index(passages: Sequence[TextChunk], folder: Path, *, mode: str, seed: int) -> Retriever:
    from retrieval import Document
    from retrieval.build import BuildOptions, build_index
    from retrieval.defaults import BM25_MEMORY_MIB, DIM, ENCODE_BATCH, FIT_PASSAGES
    from retrieval.index import IndexSettings
    from retrieval.retriever import Retriever
    from retrieval.tokens import load_tokens

    settings = IndexSettings(
        tokens="words",
        tokens_name="words",
        is_split=False,
        max_tokens=0,
        overlap_tokens=0,
        encoder={"kind": "hashed", "dim": DIM},
        factory="Flat",
        bm25_language=None if mode == "dense" else "english",
    )
    options = BuildOptions(
        fit_passages=FIT_PASSAGES, encode_batch=ENCODE_BATCH, bm25_memory_bytes=BM25_MEMORY_MIB << 20, seed=seed
    )
    # A chunk's text already begins with its title.
    documents = (Document(passage.id, "", passage.text) for passage in passages)
    with _bar() as report:
        build_index(
            documents, folder, settings, tokens=load_tokens("words"), encoder=None, options=options, progress=report
        )
    return Retriever.open(folder, encoder=None, device=None, verify=False, threads=None)


@contextmanager
def _bar() -> Iterator[Progress]:
    """One bar for all stages of a build; each stage counts from 0."""
    with progress("indexing passages", None) as bar:
        done: dict[str, int] = {}

        def report(stage: str, count: int, total: int | None) -> None:
            bar.update(count - done.get(stage, 0))
            done[stage] = count

        yield report
