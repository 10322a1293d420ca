"""Copies of chunks on their way into the store:
made after a later forward, in the order of radix_ext/capture_queue.py."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from radix_ext import FusionRequest
from radix_ext.capture_queue import CaptureQueue, Waiting
from radix_ext.cfo import Scored
from radix_ext.costs import copied_within
from radix_ext.sources import ChunkCopies
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.config import (
    MAX_CAPTURED_TOKENS,
    MAX_KEPT_S,
    MAX_WAITING_CAPTURES,
    ChunkCacheConfig,
)
from sglang_chunkcache.fusion.fill import Capture, Captured, FusionPass, Saved
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import facts, identity_of, joined

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

logger = logging.getLogger(__name__)


class Captures(CaptureQueue):
    """The queue of one rank, and its way into the store.

    When a copy arrives depends on the device. Tensor-parallel ranks, which fused reuse refuses so
    far, would have to agree on it.
    """

    def __init__(self, copies: ChunkCopies, fusion_pass: FusionPass, store: VariantIndex) -> None:
        super().__init__(
            copies,
            store,
            lambda node: len(node.key),
            scored=_own_request(fusion_pass.config).scored,
            max_waiting=MAX_WAITING_CAPTURES,
            max_tokens=self._num_copied,
            token_bytes=fusion_pass.stored_token_bytes,
        )
        self._pass = fusion_pass
        self._under_way: deque[tuple[Waiting, Captured]] = deque()
        self._num_failed = 0
        """Not told yet."""

    def run(self) -> int:
        """Store what has arrived, in order, then score and copy what comes first in the queue.
        Waits for nothing.

        One batch is under way at a time, which bounds the memory that its copies take on the
        device.

        Returns:
            How many chunks could not be copied since the last time.
        """
        self.put_arrived()
        if batch := [] if self._under_way else self.next_batch():
            with self._guard(batch):
                captured = self._pass.capture([_capture_of(entry) for entry in batch])
                self._under_way.extend(zip(batch, captured, strict=True))
        self.put_arrived()
        num_failed, self._num_failed = self._num_failed, 0
        return num_failed

    def drain(self) -> int:
        """As `run`, until nothing is left. Waits for copies."""
        num_failed = self.run()
        while self._queue or self._under_way:
            for _, captured in self._under_way:
                captured.wait()
            num_failed += self.run()
        return num_failed

    def clear(self) -> None:
        super().clear()
        for entry, captured in self._under_way:
            self.give_up([entry])
            if isinstance(captured, Saved):
                captured.give_back()
        self._under_way.clear()

    def stats(self) -> dict[str, int]:
        """Chunks under way are pending, too."""
        stats = super().stats()
        return {**stats, "pending": stats["pending"] + len(self._under_way)}

    def put_arrived(self) -> None:
        """Store what has arrived, in order. Waits for nothing."""
        while self._under_way and self._under_way[0][1].is_done():
            entry, captured = self._under_way.popleft()
            with self._guard([entry]):
                found: tuple[HostBlob | HostSlots | None, ChunkScores | None] = captured.read()
                blob, scores = found
                if blob is None:
                    self.num_dropped += 1
                    self.give_up([entry])
                else:
                    self.put(entry, blob, scores)
            # not by what `put` returned: a watcher may have raised once the variant was there
            if isinstance(captured, Saved) and not self._is_kept(entry, captured):
                captured.give_back()

    # Private, in order of use

    def _num_copied(self, scored: Scored) -> int:
        """In one batch. What scoring takes no load says."""
        num_tokens = None if scored else copied_within(self._pass.pricing.agreed, MAX_KEPT_S)
        return MAX_CAPTURED_TOKENS if num_tokens is None else num_tokens

    def _is_kept(self, entry: Waiting, saved: Saved) -> bool:
        known, identity = facts(entry.node), identity_of(entry.node)
        variant = self._store.get(identity, known.head, known.prefix)
        return variant is not None and variant.blob is saved.blob

    @contextmanager
    def _guard(self, batch: Sequence[Waiting]) -> Iterator[None]:
        """The answers are there; the store can wait."""
        try:
            yield
        except Exception:
            logger.exception("chunk cache: storing %d chunk(s) failed", len(batch))
            self.give_up(batch)
            self._num_failed += len(batch)


def _own_request(config: ChunkCacheConfig) -> FusionRequest:
    """With the server's own selector."""
    return FusionRequest(
        config.selector,
        config.recompute_ratio,
        own_needs=own_needs(config.selector, config.selectors),
    )


def _capture_of(entry: Waiting) -> Capture:
    """The chunk with all that precedes it."""
    node, path = entry.node, []
    above: TreeNode | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    path.reverse()
    ids = array("q")
    for each in path:
        ids.extend(each.key.token_ids)
    return Capture(
        token_ids=ids,
        slots=joined([each.value for each in path]),
        start=facts(node).start,
        prefix=tuple(
            (facts(each).start, facts(each).start + len(each.key))
            for each in path[:-1]
            if facts(each).chunk is not None
        ),
        scored=entry.scored,
        scores=facts(node).scores,
    )
