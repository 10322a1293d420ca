"""What a request finds beyond the tree on the device, tier by tier, in the order that they are
called in.

    admission    wait for the storage ──► host memory (load back) ──► moved KV (promises)
    a forward    load back ──► move ──► forward ──► capture chunks ──► write back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from sglang_chunkcache import compat
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.node import HostNode, state
from sglang_chunkcache.scheduler.promiser import Promiser
from sglang_chunkcache.scheduler.waiting import Reason
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import Cleared

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.scheduler.stored_chains import StoredChains
    from sglang_chunkcache.storage.storage import Storage
    from sglang_chunkcache.storage.waits import PendingLoads


class NoStorage:
    """In place of a `Storage`."""

    def poll(self, *, is_round: bool = False) -> None: ...
    def awaits(self, *asked: PendingLoads | None) -> bool:
        return False

    def watch(self, *asked: PendingLoads | None) -> Callable[[], bool]:
        return lambda: True

    def stop(self) -> None: ...
    def close(self) -> None: ...
    def clear(self) -> Cleared:
        return Cleared(0, 0, 0)

    def stats(self) -> dict[str, Any]:
        return {}


class NoStoredChains:
    """In place of `StoredChains`."""

    def arrived(self, req: Req, key: ChunkKey, spans: RequestSpans) -> None: ...
    def planned(self, req: Req) -> None: ...
    def saved(self, host: HostNode, node: TreeNode) -> None: ...
    def stored(self, key: ChunkKey, spans: RequestSpans) -> tuple[int, bool]:
        return 0, True

    def reset(self) -> None: ...


class Tiers:
    """Of one rank.

    Args:
        host: with a pool without slots, if there is no host memory.
    """

    def __init__(
        self,
        host: HostChains,
        *,
        storage: Storage | NoStorage | None = None,
        stored: StoredChains | NoStoredChains | None = None,
        promiser: Promiser | None = None,
    ) -> None:
        self.host = host
        self.storage, self.stored = storage or NoStorage(), stored or NoStoredChains()
        self.promiser = promiser or Promiser()
        self.line = host.tree.line
        self._watch: Callable[[ScheduleBatch], AbstractContextManager[Any]] = self.promiser.watch
        if promiser is None and host.pool.num_slots:
            self._watch = host.watch

    def arrived(self, req: Req, key: ChunkKey, spans: RequestSpans) -> None:
        """The request waits from now on: what it needs of the storage is loaded."""
        self.stored.arrived(req, key, spans)
        self.promiser.arrived(req, spans)

    def admit(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """An exact match of a request that could be admitted, with what else it finds: nothing, if
        it is put off."""
        known, start = state(req), compat.num_matched(result)
        asked = (None if _is_here(known.chain, start) else known.chain), known.loads
        if not (known.is_asked_only or known.must_go) and self.storage.awaits(*asked):
            self.line.put_off(req, Reason.LOADS, self.storage.watch(*asked))
            return result
        self.stored.planned(req)
        if known.is_asked_only:
            known.loaded = self.host.load_back.num_loadable(key, spans, start)
        else:
            result = self.host.load_back.load(key, spans, result, req.priority or 0)
            known.loaded = max(known.loaded, compat.num_matched(result) - start)
        if spans.fusion is not None:
            result = self.promiser.match(req, key, spans, result)
        return result

    @contextmanager
    def around_forward(self, batch: ScheduleBatch, *, is_ahead: bool) -> Iterator[None]:
        """Around a batch's forward, on its stream: what it needs of host memory is loaded, what it
        was promised is filled first, and what is worth keeping is copied last. `is_ahead`: all of
        it was sent ahead of requests."""
        is_extend = batch.forward_mode.is_extend()
        self.line.num_forwards += 1
        self.host.load_back.before(batch)
        self.promiser.before(batch)
        with self._watch(batch):
            yield
        self.host.load_back.queued()
        self.promiser.after(first_tokens_wait=is_extend and not is_ahead, is_ahead=is_ahead)
        for host, node in self.host.after(first_tokens_wait=is_extend):
            self.stored.saved(host, node)
        self.storage.poll(is_round=True)

    def reset(self) -> None:
        """The tree is empty, and the weights may have changed."""
        self.host.reset()
        self.stored.reset()
        self.promiser.reset()

    def close(self) -> None:
        """The process ends."""
        self.storage.close()  # it may read host memory until then
        self.host.close()

    def stats(self) -> dict[str, Any]:
        """Counts for `/chunkcache/stats`."""
        storage = self.storage.stats()
        return {
            **({"host": self.host.stats()} if self.host.pool.num_slots else {}),
            **({"storage": storage} if storage else {}),
            **self.promiser.stats(),
        }


def _is_here(chain: PendingLoads | None, num_cached: int) -> bool:
    return chain is not None and chain.end is not None and chain.end <= num_cached
