"""Retrieves chunks for requests without any: the k best passages by words, vectors or both, with
the `retrieval` package.

Each domain gets an index in a temporary folder, built and searched like a served one. A request
searches its own domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eval.errors import CommandError
from eval.progress import progress

if TYPE_CHECKING:
    from retrieval.encoder import Encoder
    from retrieval.hits import Hit, Mode
    from retrieval.retriever import Retriever
    from retrieval.settings import IndexSettings

SEARCH_BATCH = 64
"""Questions searched together."""


def retrieve(
    passages: Mapping[str, str], questions: Sequence[str], *, k: int, mode: Mode, seed: int
) -> list[list[str]]:
    """For each question the ids of its k best passages (id -> text), best first.

    Raises:
        CommandError: no index can be built of these passages.
    """
    with TemporaryDirectory(prefix="eval-retrieve-") as folder:
        from retrieval import RetrievalError
        from retrieval.settings import NPROBE, IndexSettings

        try:
            # Without words no tantivy is needed.
            language = None if mode == "dense" else "english"
            # Not split: hits must be the passages that the data set's own lists and gold ids name.
            settings = IndexSettings(is_split=False, factory="Flat", bm25_language=language)
            retriever = open_index(passages, Path(folder), settings, encoder=None, seed=seed)
        except RetrievalError as error:
            raise CommandError(f"--retriever {mode}: {error}") from None
        found = search(retriever, questions, k=k, mode=mode, nprobe=NPROBE)
        return [[hit.passage.id for hit in hits] for hits in found]


def open_index(
    passages: Mapping[str, str],
    folder: Path,
    settings: IndexSettings,
    *,
    encoder: Encoder | None,
    seed: int,
) -> Retriever:
    """Index passages (id -> text) in an empty folder, uncut. Raises RetrievalError.

    Args:
        encoder: of `settings.encoder`; None: the embedded one, fitted on these passages.
    """
    from retrieval import Document
    from retrieval.build import build_index
    from retrieval.corpus import clean
    from retrieval.index import Index
    from retrieval.progress import progress_bars
    from retrieval.retriever import Retriever
    from retrieval.tokens import load_tokens

    # A chunk's text already begins with its title.
    documents = (Document(name, "", clean(text)) for name, text in passages.items())
    tokens = load_tokens(settings.tokens)
    with progress_bars() as report:
        build_index(
            documents,
            folder,
            settings,
            tokens=tokens,
            encoder=encoder,
            progress=report,
            seed=seed,
        )
    # The embedded encoder is fitted by `build_index`; its state is in the folder.
    if encoder is None:
        return Retriever.open(folder, encoder=None, device=None, verify=False, threads=None)
    return Retriever(Index.open(folder, verify=False), encoder, verify=False, threads=None)


def search(
    retriever: Retriever, questions: Sequence[str], *, k: int, mode: Mode, nprobe: int
) -> Iterator[list[Hit]]:
    """Each question's hits, best first. Raises RetrievalError."""
    with progress("searching", len(questions)) as bar:
        for first in range(0, len(questions), SEARCH_BATCH):
            batch = questions[first : first + SEARCH_BATCH]
            yield from retriever.search(batch, k=k, mode=mode, nprobe=nprobe).hits
            bar.update(len(batch))
