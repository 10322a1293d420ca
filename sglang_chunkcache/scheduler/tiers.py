"""What a request finds beyond the tree on the device, tier by tier, in the order of the calls.

admission    wait for the storage ──► host memory (load back) ──► moved KV (promises)
a forward    load back ──► move ──► forward ──► capture chunks ──► write back
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_chunkcache import compat
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.waiting import Reason
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    from sglang_chunkcache.scheduler.stored_chains import StoredChains
    from sglang_chunkcache.storage.storage import Storage
    from sglang_chunkcache.storage.waits import PendingLoads


class Tiers:
    """Of one rank.

    Args:
        host: with `NoSlots`, if there is no host memory.
        stored: None: exact chains are not kept in the storage.
        fuser: a `fusion.promise.Fuser`. None: nothing is moved.
        metrics: of requests that wait.
    """

    def __init__(
        self,
        host: HostChains,
        *,
        storage: Storage | None = None,
        stored: StoredChains | None = None,
        fuser: Any = None,
        metrics: RankMetrics = NO_METRICS,
    ) -> None:
        self.host, self.storage, self.stored, self.fuser = host, storage, stored, fuser
        self.line, self._metrics = host.tree.line, metrics

    def arrived(self, req: Req, key: ChunkKey, spans: RequestSpans) -> None:
        """The request waits from now on: what it needs of the storage is loaded."""
        if self.stored is not None:
            self.stored.arrived(req, key, spans)
        if self.fuser is not None:
            self.fuser.arrived(req, spans)

    def admit(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """An exact match at an admission, with what else is found: nothing, if it is put off."""
        known, start = state(req), compat.num_matched(result)
        if self.storage is not None and not (known.is_asked_only or known.must_go):
            parts = None if _is_here(known.chain, start) else known.chain, known.loads
            asked = [each for each in parts if each is not None]
            if known.loads is not None:
                self.fuser.estimate_loads(req, key, spans, result)
            if self.storage.awaits(asked):
                self.line.put_off(req, Reason.LOADS, partial(self.storage.is_over, asked))
                return result
        if self.stored is not None:
            self.stored.planned(req)
        if known.is_asked_only:
            known.loaded = self.host.load_back.num_loadable(key, start)
        else:
            result = self.host.load_back.load(key, spans, result, req.priority or 0)
            known.loaded = max(known.loaded, compat.num_matched(result) - start)
        if spans.fusion is not None and self.fuser is not None:
            result = self.fuser.match(req, key, spans, result)
        return result

    @contextmanager
    def around_forward(self, batch: ScheduleBatch, *, is_ahead: bool) -> Iterator[None]:
        """Around a batch's forward, on its stream: what it needs of host memory is loaded, what it
        was promised is filled first, and what is worth keeping is copied last. `is_ahead`: all of
        it was sent ahead of requests."""
        is_extend = batch.forward_mode.is_extend()
        self.line.forward()
        self.host.load_back.before(batch)
        hidden = None if self.fuser is None else self.fuser.promises.fill(batch)
        with self.watch(batch, hidden):
            yield
        self.host.load_back.queued()
        if self.fuser is not None:
            self.fuser.after(first_tokens_wait=is_extend and not is_ahead, is_ahead=is_ahead)
        for host, node in self.host.after(first_tokens_wait=is_extend):
            if self.stored is not None:
                self.stored.saved(host, node)
        if self.storage is not None:
            self.storage.poll(is_round=True)
        if self._metrics.is_due:
            self._metrics.show({"waits": self.line.waits})

    def watch(self, batch: ScheduleBatch, hidden: Any = None) -> AbstractContextManager[None]:
        """Learn what the batch's extend takes, if anything goes by that. `hidden`: as
        `Promises.fill` returns it."""
        # a decoding batch still has the lengths of its prefill
        if not batch.forward_mode.is_extend() or not (self.fuser or self.host.pool.num_slots):
            return nullcontext()
        return self.host.watch(batch) if self.fuser is None else self.fuser.watch(batch, hidden)

    def reset(self) -> None:
        """The tree is empty, and the weights may have changed."""
        for each in (self.host, self.stored, self.fuser):
            if each is not None:
                each.reset()

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close()  # it may read host memory until then
        pools = {self.host.pool}
        if self.fuser is not None:
            pools.add(self.fuser.fusion_pass.host.pool)
        for pool in pools:
            pool.close()

    def stats(self) -> dict[str, Any]:
        return {
            **({"host": self.host.stats()} if self.host.pool.num_slots else {}),
            **({"storage": self.storage.stats()} if self.storage is not None else {}),
            **(self.fuser.stats() if self.fuser is not None else {}),
        }


def _is_here(chain: PendingLoads | None, num_cached: int) -> bool:
    return chain is not None and chain.end is not None and chain.end <= num_cached
