"""Requests that wait for a search of the index: many coroutines in, one worker thread, a batch at a
time.

    event loop                              worker thread                    refresher thread
    search(): append, await a future   ->   take all that wait, by settings  every refresh_s:
    _settle(): results to the futures  <-   Retriever.search, together       Retriever.refresh,
                                                                             atomic
    _rerank(): the candidates          ->   another: Reranker.rerank, a
                                            request at a time

While a batch is searched the next one gathers, so batches grow with the load and no query waits for
others. What one finds does not depend on the others of its batch. Knows queries and hits; no
messages, no HTTP. Nothing here blocks the event loop, and counts are kept on it alone. A search
that fails fails for its own request only: the worker goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from retrieval.errors import CorruptIndexError, RetrievalError, UnavailableError
from retrieval.hits import timed
from sglang_chunkcache.front.metrics import Metrics

if TYPE_CHECKING:
    from retrieval.hits import Hit, Mode, Searcher, SearchResult
    from retrieval.reranker import Reranker

logger = logging.getLogger(__name__)


class QueueFullError(Exception):
    """So many requests wait already that this one would wait too long."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one query found, best first. `ms`: how long it was queued, the phases of its batch of
    `batch_size` queries, and `rerank`, its own."""

    hits: list[Hit]
    ms: dict[str, float]
    batch_size: int


@dataclass(frozen=True, slots=True)
class RetrievalState:
    """Whether requests can be searched for."""

    name: str
    """"up"; "stale": answers come from an index that its directory does not hold any more, since
    what is there cannot be served; "down": the last search failed, or the index is damaged."""
    reason: str | None
    """Of "stale" and "down"."""
    since: datetime
    """When the state, or its reason, began."""


@dataclass(slots=True, eq=False)
class _Waiting:
    query: str
    settings: tuple[int, Mode, int]
    """k, mode, nprobe: queries that share them are searched together. k too: a larger one would
    cost the others, and may break ties anew."""
    future: asyncio.Future[Found]
    since: float


class SearchQueue:
    """Searches of one retriever. Belongs to one event loop; its threads end with the process.

    Args:
        max_batch: queries searched together.
        max_waiting: requests that may wait, without those being searched; as many for the reranker.
        refresh_s: seconds between looks for a newer generation of the index; 0: never.
        reranker: ranks what is found; it reads `rerank_depth` times k passages.
    """

    def __init__(
        self,
        retriever: Searcher,
        metrics: Metrics,
        *,
        reranker: Reranker | None = None,
        rerank_depth: int = 1,
        max_batch: int,
        max_waiting: int,
        refresh_s: float,
    ) -> None:
        self._retriever, self._metrics = retriever, metrics
        self._max_batch, self._refresh_s = max_batch, refresh_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: Queue[_Waiting] = Queue(max_waiting)
        self.num_batches = 0
        self._reranker, self._depth = reranker, rerank_depth if reranker else 1
        self._reranking = ThreadPoolExecutor(1, thread_name_prefix="rerank")
        self._num_reranking = 0
        self._failure: str | None = None  # of the last search
        self._misrank: str | None = None  # of the last reranking
        self._refusal: str | None = None  # of the last look at the index's directory
        self._noting = Lock()
        self.state = RetrievalState("up", None, datetime.now(UTC))
        """Whether requests can be searched for."""
        metrics.show_retrieval("up")
        Thread(target=self._work, name="retrieval", daemon=True).start()
        if refresh_s:
            Thread(target=self._refresh, name="retrieval-refresh", daemon=True).start()

    async def search(self, query: str, *, k: int, mode: Mode, nprobe: int) -> Found:
        """Wait for the query's turn and search, then rank again. A caller that is cancelled before
        its turn is not searched for.

        Raises:
            QueueFullError: `max_waiting` wait already.
            RetrievalError: the retriever refuses the query.
            Exception: whatever else its search, or the reranker, raised; logged.
        """
        try:
            found = await self._found(query, (k * self._depth, mode, nprobe))
            if self._reranker is not None and found.hits:
                found = await self._rerank(self._reranker, query, found, k)
        except QueueFullError:
            self._metrics.count("searches", "full")
            raise
        except asyncio.CancelledError:
            self._metrics.count("searches", "cancelled")
            raise
        except Exception as error:
            self._metrics.count("searches", "refused" if is_clients_fault(error) else "failed")
            raise
        self._metrics.count("searches", "found" if found.hits else "empty")
        return found

    @property
    def num_waiting(self) -> int:
        """Requests whose search has not begun."""
        return self._waiting.qsize()

    # Private, in order of use

    async def _found(self, query: str, settings: tuple[int, Mode, int]) -> Found:
        self._loop = asyncio.get_running_loop()
        item = _Waiting(query, settings, self._loop.create_future(), time.perf_counter())
        most = self._waiting.maxsize
        try:
            if self._num_reranking > most:
                raise Full
            self._waiting.put_nowait(item)
        except Full:
            raise QueueFullError(f"{most} searches wait already; try again later") from None
        return await item.future

    async def _rerank(self, reranker: Reranker, query: str, found: Found, k: int) -> Found:
        """The best k of the candidates, by the reranker."""
        since = time.perf_counter()

        def work() -> Found:
            ms = {**found.ms, "queued": found.ms["queued"] + 1000 * (time.perf_counter() - since)}
            with timed(ms, "rerank"):
                hits = reranker.rerank(query, found.hits, k=k)
            return Found(hits, ms, found.batch_size)

        self._num_reranking += 1
        try:
            ranked = await asyncio.get_running_loop().run_in_executor(self._reranking, work)
        except Exception as error:
            logger.exception("retrieval: the reranker failed")
            self._misrank = f"the reranker: {str(error) or repr(error)}"
            raise
        else:
            self._misrank = None
        finally:
            self._num_reranking -= 1
            self._note()
        self._metrics.observe("retrieval_seconds", "rerank", ranked.ms["rerank"] / 1000)
        return ranked

    def _work(self) -> None:
        while True:
            groups: defaultdict[tuple[int, Mode, int], list[_Waiting]] = defaultdict(list)
            for item in self._take():
                groups[item.settings].append(item)
            for items in groups.values():
                self._search(items)

    def _take(self) -> list[_Waiting]:
        """All that waits, at most a batch, as soon as something does."""
        taken = list[_Waiting]()
        with contextlib.suppress(Empty):
            while len(taken) < self._max_batch:
                item = self._waiting.get(block=not taken)
                # one that is cancelled after this is searched for in vain; `_settle` leaves it out
                if not item.future.cancelled():
                    taken.append(item)
        return taken

    def _search(self, items: Sequence[_Waiting]) -> None:
        """Search for queries of the same settings."""
        start, (k, mode, nprobe) = time.perf_counter(), items[0].settings
        outcome: SearchResult | Exception
        try:
            queries = [item.query for item in items]
            outcome = self._retriever.search(queries, k=k, mode=mode, nprobe=nprobe)
        except Exception as error:
            # one query's fault is not its neighbours': each alone
            if len(items) > 1 and not isinstance(error, UnavailableError):
                for item in items:
                    self._search([item])
                return
            if not is_clients_fault(error):
                if not isinstance(error, UnavailableError):  # its reason says all
                    logger.exception("retrieval: a search failed")
                self._failure = str(error) or repr(error)
                self._note()
            outcome = error
        else:
            self._failure = None
            self._note()
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
            self._loop.call_soon_threadsafe(self._settle, items, outcome, start)

    def _settle(
        self, items: Sequence[_Waiting], outcome: SearchResult | Exception, start: float
    ) -> None:
        """On the event loop: count, and answer the requests that still wait."""
        self.num_batches += 1
        for item in items:
            self._metrics.observe("retrieval_seconds", "queued", start - item.since)
        if isinstance(outcome, Exception):
            for item in items:  # one, unless nothing can be searched
                if not item.future.done():
                    item.future.set_exception(outcome)
            return
        for phase, ms in outcome.ms.items():
            self._metrics.observe("retrieval_seconds", phase, ms / 1000)
        for item, hits in zip(items, outcome.hits, strict=True):
            if item.future.done():  # cancelled
                continue
            queued = {"queued": 1000 * (start - item.since)}
            item.future.set_result(Found(hits, {**queued, **outcome.ms}, len(items)))

    def _refresh(self) -> None:
        while True:
            time.sleep(self._refresh_s)
            try:
                if self._retriever.refresh():
                    if (generation := self._retriever.info()["generation"]) is not None:
                        logger.info("retrieval: now serving generation %s", generation)
                    self._failure = None
                self._refusal = None
            except Exception as error:
                self._refusal = str(error) or repr(error)
            self._note()

    def _note(self) -> None:
        """Derive the state; a change is logged and exported."""
        # both threads derive it: without the lock a state could replace a newer one
        with self._noting:
            # damage first: it lasts, while the last failure may have been of one query
            damage = self._retriever.damage or self._failure or self._misrank
            refusal = self._refusal
            name, reason = "down" if damage else "stale" if refusal else "up", damage or refusal
            if (name, reason) == (self.state.name, self.state.reason):
                return
            self.state = RetrievalState(name, reason, datetime.now(UTC))
            self._metrics.show_retrieval(name)
        if name == "down":
            logger.error("retrieval: down: %s", reason)
        elif name == "stale":
            logger.warning(
                "retrieval: what the index's directory holds now is not served: %s", reason
            )
        else:
            logger.info("retrieval: up again")


def is_clients_fault(error: Exception) -> bool:
    """Whether a search failed because of what was asked.
    A damaged index, or one that does not answer, is never a client's fault."""
    ours = CorruptIndexError | UnavailableError
    return isinstance(error, RetrievalError) and not isinstance(error, ours)
