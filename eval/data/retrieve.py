"""Retrieves chunks for requests without any: the k best passages by words, vectors or both, with the `retrieval` package.

Each domain gets an index in a temporary folder, built and searched like a served one. A request searches its own domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eval.errors import CommandError
from eval.progress import progress

if TYPE_CHECKING:
    from eval.task import Request, TaskData, TextChunk
    from retrieval.encoder import Encoder
    from retrieval.retriever import Hit, Mode, Retriever
    from retrieval.settings import IndexSettings

SEARCH_BATCH = 64
"""Questions searched together."""


def retrieve(
    data: TaskData, requests: Sequence[Request], *, k: int, mode: Mode, seed: int
) -> dict[str, tuple[str, ...]]:
    """Request id -> the ids of the k best passages of its domain, best first.

    Raises:
        CommandError: the retrieval package's libraries are missing, or no index can be built of these passages.
    """
    found: dict[str, tuple[str, ...]] = {}
    for passages, asked in by_domain(data, requests):
        with TemporaryDirectory(prefix="eval-retrieve-") as folder:
            found.update(_search(passages, asked, Path(folder), k=k, mode=mode, seed=seed))
    return found


def by_domain(data: TaskData, requests: Sequence[Request]) -> Iterator[tuple[list[TextChunk], list[Request]]]:
    """Each domain's passages, and the requests that search them. Raises CommandError for a domain without passages."""
    passages: dict[str, list[TextChunk]] = {}
    for passage in data.passages:
        passages.setdefault(data.domains.get(passage.id, ""), []).append(passage)
    for domain in dict.fromkeys(data.domains.get(request.id, "") for request in requests):
        asked = [request for request in requests if data.domains.get(request.id, "") == domain]
        if domain not in passages:
            raise CommandError(f"{asked[0].id} searches domain {domain!r}, which has no passages")
        yield passages[domain], asked


def open_index(
    passages: Sequence[TextChunk], folder: Path, settings: IndexSettings, *, encoder: Encoder | None, seed: int
) -> Retriever:
    """Index passages in an empty folder, uncut. Raises RetrievalError.

    Args:
        encoder: of `settings.encoder`; None: the embedded one, fitted on these passages.
    """
    from retrieval import Document
    from retrieval.build import build_index
    from retrieval.corpus import clean
    from retrieval.index import Index
    from retrieval.progress import progress_bars
    from retrieval.retriever import Retriever
    from retrieval.settings import BuildOptions
    from retrieval.tokens import load_tokens

    # A chunk's text already begins with its title.
    documents = (Document(passage.id, "", clean(passage.text)) for passage in passages)
    tokens, options = load_tokens(settings.tokens), BuildOptions(seed=seed)
    with progress_bars() as report:
        build_index(documents, folder, settings, tokens=tokens, encoder=encoder, options=options, progress=report)
    if encoder is None:
        return Retriever.open(folder, encoder=None, device=None, verify=False, threads=None)
    return Retriever(Index.open(folder, verify=False), encoder, verify=False, threads=None)


def search(
    retriever: Retriever, asked: Sequence[Request], *, k: int, mode: Mode, nprobe: int
) -> Iterator[tuple[Request, list[Hit]]]:
    """Each request with its hits, best first. Raises RetrievalError."""
    with progress("searching", len(asked)) as bar:
        for first in range(0, len(asked), SEARCH_BATCH):
            batch = asked[first : first + SEARCH_BATCH]
            found = retriever.search([request.question for request in batch], k=k, mode=mode, nprobe=nprobe).hits
            yield from zip(batch, found, strict=True)
            bar.update(len(batch))


# Private, in order of use


def _search(
    passages: Sequence[TextChunk],
    asked: Sequence[Request],
    folder: Path,
    *,
    k: int,
    mode: Mode,
    seed: int,
) -> dict[str, tuple[str, ...]]:
    try:
        from retrieval import RetrievalError
        from retrieval.settings import NPROBE, IndexSettings

        settings = IndexSettings(is_split=False, factory="Flat", bm25_language=None if mode == "dense" else "english")
        retriever = open_index(passages, folder, settings, encoder=None, seed=seed)
    except ImportError as error:
        raise CommandError(f"--retriever {mode} needs the extra `retrieval` ({error})") from None
    except RetrievalError as error:
        raise CommandError(f"--retriever {mode}: {error}") from None
    return {
        request.id: tuple(hit.passage.id for hit in hits)
        for request, hits in search(retriever, asked, k=k, mode=mode, nprobe=NPROBE)
    }
