"""Retrieval for requests: which query, searched how, and what the client sees of it.

    {"retrieve": {"turns": 2}}, messages -> query -> SearchQueue -> Retrieval: chunks to plan with,
    an object for the answer

Knows messages and the index; no HTTP and no tokens. What is found is planned like chunks that a
client sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from retrieval.errors import UnavailableError
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError, SearchFailedError
from sglang_chunkcache.front.bodies import RetrieveIn
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.prompt import text_of
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.front.search_queue import (
    Found,
    QueueFullError,
    SearchQueue,
    is_clients_fault,
)

if TYPE_CHECKING:
    from retrieval.hits import Mode, Searcher
    from retrieval.reranker import Reranker

T = TypeVar("T")

GONE_POLL_S = 0.5
"""How often a request that waits looks whether its client is still there."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A request's search: what was asked, how, and what was found."""

    query: str
    mode: Mode
    k: int
    found: Found

    @property
    def chunks(self) -> list[Passage]:
        """What was found, best first, as if the client had sent it."""
        return [Passage(hit.passage.id, hit.passage.content) for hit in self.found.hits]

    def answer(self) -> dict[str, Any]:
        """The `retrieval` object of a chat answer's `chunkcache`."""
        return {
            "query": self.query,
            "mode": self.mode,
            "k": self.k,
            "passages": [
                {
                    "id": hit.passage.id,
                    "score": round(float(hit.score), 6),
                    "mode": hit.mode,
                    "title": hit.passage.title,
                }
                for hit in self.found.hits
            ],
            "ms": {phase: round(value, 3) for phase, value in self.found.ms.items()},
            "batch": self.found.batch_size,
        }

    def listed(self, *, with_text: bool) -> dict[str, Any]:
        """The answer of `/rag/v1/retrieve`; `text` is what a chunk of the passage would hold."""
        answer = self.answer()
        for told, hit in zip(answer["passages"], self.found.hits, strict=True):
            passage = hit.passage
            told["document"] = passage.document_id
            if with_text:
                told["text"] = passage.content
            told |= {"start": passage.start, "end": passage.end, "tokens": passage.num_tokens}
        return answer


class RagSearch:
    """The server's index, as requests use it."""

    def __init__(
        self,
        retriever: Searcher,
        config: ChunkCacheConfig,
        metrics: Metrics,
        *,
        reranker: Reranker | None = None,
    ) -> None:
        self._retriever, self._config, self._metrics = retriever, config, metrics
        self._queue = SearchQueue(
            retriever,
            metrics,
            max_batch=config.retrieve_batch,
            max_waiting=config.retrieve_queue,
            refresh_s=config.retrieve_refresh_s,
            reranker=reranker,
            rerank_depth=config.rerank_depth,
        )

    async def find(
        self,
        options: RetrieveIn,
        messages: Sequence[Mapping[str, Any]],
        *,
        field: str,
        is_gone: Callable[[], Awaitable[bool]],
    ) -> Retrieval:
        """Search by a request's options.

        Args:
            messages: where the query comes from, unless the options have one.
            field: put in front of the names of the options in errors; "retrieve." in a chat
                request.
            is_gone: whether the client has disconnected; asked repeatedly while the search runs.
        Raises:
            RequestError: an option that this server or index cannot serve, or no query; names the
                field.
            SearchFailedError: too many requests wait, or the search failed.
        """
        config = self._config
        k = options.k or config.retrieve_k
        if k > config.max_chunks:
            raise RequestError(f"{field}k: {k} asked for, at most {config.max_chunks}")
        mode = options.mode or default_mode(self._retriever, config)
        if mode not in self._retriever.modes:
            raise RequestError(f"{field}mode: this index offers {', '.join(self._retriever.modes)}")
        query = query_of(options, messages, field=field, max_chars=config.max_query_chars)
        nprobe = options.nprobe or config.retrieve_nprobe
        search = self._queue.search(query, k=k, mode=mode, nprobe=nprobe)
        try:
            # the client may go meanwhile: a search that still waits is dropped then
            return Retrieval(query, mode, k, await unless_gone(search, is_gone))
        except RequestError:
            raise
        except QueueFullError as error:
            raise SearchFailedError(str(error), 503) from None
        except UnavailableError:
            raise SearchFailedError("the index does not answer; try again later", 503) from None
        except Exception as error:
            if is_clients_fault(error):
                raise RequestError(f"{field}query: {error}") from None
            # the queue has logged it; its words may name files of the server
            raise SearchFailedError("the search failed; the server's log says why", 500) from None

    def stats(self) -> dict[str, Any]:
        """The `retrieval` object of `/chunkcache/stats`."""
        info, state = self._retriever.info(), self._queue.state
        return {
            "state": state.name,
            "reason": state.reason,
            "since": state.since.isoformat(timespec="seconds"),
            **{name: info[name] for name in ("passages", "generation", "tokenizer", "modes")},
            "encoder": info["encoder"].get("model", info["encoder"]["kind"]),
            "reranker": self._config.reranker,
            "searches": sum(self._metrics.totals()["searches"].values()),
            "batches": self._queue.num_batches,
            "waiting": self._queue.num_waiting,
            "seconds": self._metrics.seconds("retrieval_seconds"),
        }


def default_mode(retriever: Searcher, config: ChunkCacheConfig) -> Mode:
    asked = config.retrieve_mode
    return retriever.modes[0] if asked == "auto" else cast("Mode", asked)


def query_of(
    options: RetrieveIn, messages: Sequence[Mapping[str, Any]], *, field: str, max_chars: int
) -> str:
    """The query of the options, or the last user messages, oldest first: as many as asked for and
    fit; of one too long, its end.

    Raises:
        RequestError: nothing to search for, or a query given that is longer than `max_chars`; names
            the field.
    """
    if options.query is not None:
        if options.turns is not None:
            raise RequestError(f"{field}turns: not together with {field}query")
        if not options.query.strip():
            raise RequestError(f"{field}query: is empty")
        if (length := len(options.query)) > max_chars:
            raise RequestError(f"{field}query: {length} characters, at most {max_chars}")
        return options.query
    texts: list[str] = []
    for index in reversed(range(len(messages))):
        if messages[index].get("role") != "user":
            continue
        text = text_of(messages[index], index)
        if not isinstance(text, str):
            raise RequestError(f"messages.{index}.content: must be text")
        # the last message alone always fits: its beginning is cut off below
        if texts and len(text) + sum(len(later) + 1 for later in texts) > max_chars:
            break
        texts.insert(0, text)
        if len(texts) == (options.turns or 1):
            break
    query = "\n".join(texts)[-max_chars:]
    if not query.strip():
        raise RequestError(f"messages: no user's text to search for; say what in {field}query")
    return query


async def unless_gone(result: Awaitable[T], is_gone: Callable[[], Awaitable[bool]]) -> T:
    """The result. If the client disconnects the work is cancelled:
    the framework does not do that."""
    task = asyncio.ensure_future(result)
    try:
        # not `wait_for`, which would cancel the work at the first timeout
        while not (await asyncio.wait({task}, timeout=GONE_POLL_S))[0]:
            if await is_gone():
                raise RequestError("body: the client has disconnected")
        return task.result()
    finally:
        task.cancel()
