"""Opens what `--index` names: the directory of an index, or a Milvus collection."""

from __future__ import annotations

from pathlib import Path

from retrieval.hits import Searcher
from retrieval.milvus import MilvusRetriever, place_of


def open_searcher(
    name: str, *, encoder: str | None, device: str | None, verify: bool, threads: int | None
) -> Searcher:
    """The retriever. Arguments and errors are those of `Retriever.open` and
    `MilvusRetriever.open`."""
    if place_of(name) is not None:
        return MilvusRetriever.open(name, encoder=encoder, device=device)
    # needs FAISS, which a collection does not
    from retrieval.retriever import Retriever

    return Retriever.open(
        Path(name), encoder=encoder, device=device, verify=verify, threads=threads
    )
