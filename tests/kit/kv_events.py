"""SGLang's own radix tree, publishing KV events as SGLang encodes them, and a front that hears."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_chunkcache import compat
from sglang_chunkcache.front.event_mirror import EventMirror
from sglang_chunkcache.scheduler.stock_rank import NO_EVENTS
from sglang_chunkcache.wire.state import RankState
from tests.kit.front_bench import Bench


def encoded(events: Sequence[Any], *, rank: int | None = 0) -> bytes:
    """As `ZmqEventPublisher` does."""
    batch = KVEventBatch(ts=time.time(), events=list(events), attn_dp_rank=rank)
    return msgspec.msgpack.Encoder().encode(batch)


class PublishingRank:
    """SGLang's tree of a rank, with `page_size`; its pool is never full by itself."""

    def __init__(self, page_size: int = 1) -> None:
        pool = SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
        self.cache: Any = RadixCache.create_simulated(
            mock_allocator=pool, page_size=page_size, enable_kv_cache_events=True
        )
        self.batches = list[bytes]()
        """Published so far."""

    def run(self, ids: Sequence[int], answer: Sequence[int] = (), **names: str | None) -> int:
        """What it finds of the prompt; then prompt and answer are in the tree."""
        tokens = array("q", ids)
        found = self.cache.match_prefix(
            MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1, **names))
        )
        key = RadixKey(array("q", [*ids, *answer]), **names)
        key = key.page_aligned(self.cache.page_size)
        self.cache.insert(InsertParams(key=key))
        self.publish()
        return compat.num_matched(found)

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))
        self.publish()

    def flush(self) -> None:
        self.cache.reset()
        self.publish()

    def publish(self) -> None:
        if events := self.cache.take_events():
            self.batches.append(encoded(events))


def state(
    *, page_size: int = 1, pool: int = 10_000, is_paired: bool = False, rank: int = 0
) -> RankState:
    """What a rank says of itself."""
    counts = {"page_size": page_size, "border": page_size - 1 + is_paired, "pool": pool}
    return RankState(rank, NO_EVENTS, counts)


class HearingBench(Bench):
    """A front of one rank."""

    def __init__(self, page_size: int = 1, *, tells_adapter: bool = True, **knobs: Any) -> None:
        super().__init__(tree="stock", tells_adapter=tells_adapter, **knobs)
        self.rank = PublishingRank(page_size)
        self.mirror.hear(state(page_size=page_size))

    @property
    def mirror(self) -> EventMirror:
        mirror = self.bookkeeper.mirrors[0]
        assert isinstance(mirror, EventMirror)
        return mirror

    def listen(self) -> None:
        """All that was published."""
        for seq in range(self.mirror.next_seq, len(self.rank.batches)):
            self.mirror.take(seq, self.rank.batches[seq])
