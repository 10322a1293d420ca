"""Searches passages for questions: the k best by words, vectors or both, with the `retrieval` package.

The index is built in a temporary folder and searched like a served one. Knows texts only, no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from eval.errors import CommandError
from eval.progress import progress

if TYPE_CHECKING:
    from retrieval.progress import Progress
    from retrieval.retriever import Retriever

SEARCH_BATCH = 64
"""Questions searched together."""


def search(
    passages: Mapping[str, str],
    questions: Sequence[str],
    *,
    k: int,
    mode: Literal["bm25", "dense", "fusion"],
    seed: int,
) -> list[list[str]]:
    """For each question the ids of its k best passages (id -> text), best first.

    Raises:
        CommandError: the retrieval package's libraries are missing, or no index can be built of these passages.
    """
    try:
        from retrieval import RetrievalError
        from retrieval.defaults import NPROBE
    except ImportError as error:
        raise CommandError(f"--retriever {mode} needs the extra `retrieval` ({error})") from None
    found: list[list[str]] = []
    with TemporaryDirectory(prefix="eval-retrieve-") as folder:
        try:
            retriever = _index(passages, Path(folder), mode=mode, seed=seed)
        except ImportError as error:
            raise CommandError(f"--retriever {mode} needs the extra `retrieval` ({error})") from None
        except RetrievalError as error:
            raise CommandError(f"--retriever {mode}: {error}") from None
        with progress("searching", len(questions)) as bar:
            for first in range(0, len(questions), SEARCH_BATCH):
                batch = questions[first : first + SEARCH_BATCH]
                hits = retriever.search(batch, k=k, mode=mode, nprobe=NPROBE).hits
                found += [[hit.passage.id for hit in best] for best in hits]
                bar.update(len(batch))
    return found


# Private, in order of use


def _index(passages: Mapping[str, str], folder: Path, *, mode: str, seed: int) -> Retriever:
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
    documents = (Document(name, "", text) for name, text in passages.items())
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
