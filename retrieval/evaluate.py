"""Measures a retriever on a folder of questions: recall of the right passages, and overlap between the result lists.

    questions ── a temporary index for each domain ── Retriever ── ranked ids ── recall, overlap, co-retrieval

The index is built by `build_index` and searched by `Retriever`, like a served one. Documents are not cut: each one is a
passage, so the folder's ids are the index's ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrieval.build import BuildOptions, build_index
from retrieval.encoder import Encoder
from retrieval.errors import RetrievalError
from retrieval.index import Index, IndexSettings
from retrieval.neighbors import BATCH_ROWS, co_retrieval, nearest
from retrieval.overlap import hit_share, prefix_share, repeated_share, total_share
from retrieval.passage import Document, Passage
from retrieval.progress import Progress
from retrieval.questions import Question, QuestionSet
from retrieval.retriever import Mode, Retriever
from retrieval.tokens import load_tokens

MODES: Mapping[str, Mode] = {"bm25": "bm25", "default": "dense", "fusion": "fusion"}
"""`--retriever` -> the retriever's mode. `default` is the encoder alone: the embedded one, or that of `--encoder`."""

SEARCH_BATCH = 256
"""Questions encoded and searched together."""


def evaluate(
    asked: QuestionSet,
    *,
    k: int,
    retriever: str,
    nprobe: int,
    n_values: Sequence[int],
    settings: IndexSettings,
    encoder: Encoder | None,
    options: BuildOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Build temporary indexes, search them, and compute the figures.

    Args:
        k: passages per question, at least 1.
        retriever: one of `MODES`.
        n_values: numbers of neighbours for which `co_retrieval` is measured; empty: not measured.
        settings: of the temporary indexes. `is_split` is ignored, and `default` builds no BM25 index.
        encoder: of `settings.encoder`; None: the embedded one.

    Returns:
        The object that the command prints as JSON. `recall` is the mean, over questions with gold passages, of the share of
        them among the k; `all_gold` is the share of questions with all of theirs. Both are None if no question has gold
        passages. `repeated` is None without conversations.

    Raises:
        RetrievalError: an unknown retriever, a value below 1, or settings that no index can have.
    """
    if retriever not in MODES:
        raise RetrievalError(f"retriever must be one of {', '.join(MODES)}, got {retriever!r}")
    for name, number in (("k", k), ("nprobe", nprobe), *(("n", n) for n in n_values)):
        if number < 1:
            raise RetrievalError(f"{name} must be at least 1, got {number}")
    # `default` does not search words, so neither the BM25 index nor its library is needed.
    language = None if retriever == "default" else settings.bm25_language
    settings = replace(settings, is_split=False, bm25_language=language)
    by_domain: dict[str, list[int]] = {}
    for position, question in enumerate(asked.questions):
        by_domain.setdefault(question.domain, []).append(position)

    ranked: list[list[str]] = [[]] * len(asked.questions)
    neighbors: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    for domain, positions in by_domain.items():
        with TemporaryDirectory(prefix="retrieval-evaluate-") as name:
            folder = Path(name)
            with _timed(seconds, "build"):
                opened = _build(asked.documents[domain], folder, settings, encoder, options, progress)
            with _timed(seconds, "search"):
                queries = [asked.questions[position].query for position in positions]
                found = _search(opened, queries, k=k, mode=MODES[retriever], nprobe=nprobe, progress=progress)
            for position, ids in zip(positions, found, strict=True):
                ranked[position] = ids
            if n_values:
                with _timed(seconds, "neighbors"):
                    neighbors.update(_neighbors(opened.index, n=max(n_values), nprobe=nprobe, progress=progress))

    conversations = [question.conversation for question in asked.questions]
    return {
        "data": str(asked.data),
        "file": asked.file,
        "retriever": retriever,
        "encoder": None if retriever == "bm25" else dict(settings.encoder),
        "factory": None if retriever == "bm25" else settings.factory,
        "k": k,
        "query": asked.query,
        "seed": asked.seed,
        "passages": sum(map(len, asked.documents.values())),
        "questions": len(asked.questions),
        **_recall(asked.questions, ranked, _kept_ids(asked.documents)),
        "prefix": round(prefix_share(ranked, k=k), 4),
        "total": round(total_share(ranked, k=k), 4),
        "hit": round(hit_share(ranked), 4),
        "repeated": None if None in conversations else round(repeated_share(ranked, conversations), 4),
        **({"co_retrieval": _rounded(co_retrieval(ranked, neighbors, n_values=n_values))} if n_values else {}),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    """Format the result of `evaluate` as text, one line per figure."""
    lines = [
        f"{name:14} {value}" for name, value in result.items() if not isinstance(value, dict) and value is not None
    ]
    lines += [f"{name + ' s':14} {value}" for name, value in result["seconds"].items()]
    for reading, shares in result.get("co_retrieval", {}).items():
        lines.append(f"{'neighbors ' + reading:14} " + "  ".join(f"{n}: {share:.1%}" for n, share in shares.items()))
    return "\n".join(lines)


# Private, in order of use


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def _build(
    documents: Sequence[Document],
    folder: Path,
    settings: IndexSettings,
    encoder: Encoder | None,
    options: BuildOptions,
    progress: Progress,
) -> Retriever:
    tokens = load_tokens(settings.tokens)
    build_index(documents, folder, settings, tokens=tokens, encoder=encoder, options=options, progress=progress)
    if encoder is None:
        return Retriever.open(folder, encoder=None, device=None, verify=False, threads=None)
    return Retriever(Index.open(folder, verify=False), encoder, verify=False, threads=None)


def _search(
    retriever: Retriever, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int, progress: Progress
) -> list[list[str]]:
    ranked: list[list[str]] = []
    for first in range(0, len(queries), SEARCH_BATCH):
        hits = retriever.search(queries[first : first + SEARCH_BATCH], k=k, mode=mode, nprobe=nprobe).hits
        ranked.extend([hit.passage.id for hit in found] for found in hits)
        progress("search", len(ranked), len(queries))
    return ranked


def _neighbors(index: Index, *, n: int, nprobe: int, progress: Progress) -> dict[str, list[str]]:
    names = [passage.id for _, passage in index.store.iterate(0, index.num_rows)]
    neighbors: dict[str, list[str]] = {}
    for first in range(0, index.num_rows, BATCH_ROWS):
        last = min(first + BATCH_ROWS, index.num_rows)
        found = nearest(index, first, last, n=n, nprobe=nprobe)
        neighbors.update((names[row], [names[other] for other in others]) for row, others in found.items())
        progress("neighbors", last, index.num_rows)
    return neighbors


def _kept_ids(documents: Mapping[str, Sequence[Document]]) -> dict[str, str]:
    """Document id -> the id under which its text is indexed: of equal texts of a domain, the index keeps the first."""
    kept: dict[str, str] = {}
    for inside in documents.values():
        first: dict[bytes, str] = {}
        for document in inside:
            passage = Passage(document.id, document.id, document.title, document.text, 0, 0, 0)
            kept[document.id] = first.setdefault(passage.content_hash(), document.id)
    return kept


def _recall(
    questions: Sequence[Question], ranked: Sequence[Sequence[str]], kept_ids: Mapping[str, str]
) -> dict[str, float | int | None]:
    shares = [
        len(gold.intersection(ids)) / len(gold)
        for question, ids in zip(questions, ranked, strict=True)
        if (gold := {kept_ids[name] for name in question.gold})
    ]
    if not shares:
        return {"with_gold": 0, "recall": None, "all_gold": None}
    return {
        "with_gold": len(shares),
        "recall": round(sum(shares) / len(shares), 4),
        "all_gold": round(sum(share == 1 for share in shares) / len(shares), 4),
    }


def _rounded(shares: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {name: {str(n): round(share, 4) for n, share in by_n.items()} for name, by_n in shares.items()}
