"""FusionRAG's offline stage: a cell's chunks are in the server's store before its first request.

system message    its requests' distinct texts: each alone, then behind the other one that is
                  nearest to it by words
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.data.nearest import ranker
from eval.errors import CommandError
from eval.task import Request, TextChunk
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.preprocess import DEFAULT_BATCH, TOP_N, preprocess

TOLD = ("top_n", "batch", "alone", "behind_neighbors", "lost", "no_room", "evicted")
"""Of what the command says: with the seconds of both passes, and the chunks that were refused."""


def preprocess_chunks(url: str, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Preprocess all chunks of these requests, behind each of their system messages in turn.

    Raises:
        CommandError: a server that does not answer, or moves no KV.
    """
    texts: dict[str, dict[str, TextChunk]] = {}
    for request in requests:
        # by text: to a server equal texts are one chunk, whatever ids a data set gives them
        texts.setdefault(request.system, {}).update({c.text: c for c in request.chunks})
    return [_told(url, system, [*chunks.values()]) for system, chunks in texts.items() if chunks]


def _told(url: str, system: str, chunks: Sequence[TextChunk]) -> dict[str, Any]:
    rank, names = ranker(chunks), {chunk.text: str(n) for n, chunk in enumerate(chunks)}
    near = {
        # the chunk itself is among the nearest
        name: [names[c.text] for c in rank(text, TOP_N + 1) if c.text != text][:TOP_N]
        for text, name in names.items()
    }
    corpus = {name: text for text, name in names.items()}
    client = Client(url, None, max_connections=DEFAULT_BATCH)
    try:
        found = preprocess(client, corpus, near, top_n=TOP_N, system=system or None)
    except ServerError as error:
        raise CommandError(str(error)) from None
    return {name: found[name] for name in TOLD}
