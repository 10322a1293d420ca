"""Copies of chunks on their way into the store:
made after a later forward, in the order of radix_ext/capture_queue.py."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from radix_ext import FusionRequest
from radix_ext.capture_queue import CaptureQueue, Waiting
from radix_ext.cfo import Scored
from radix_ext.costs import Phase, copied_within, through
from radix_ext.sources import ChunkCopies
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.config import (
    MAX_CAPTURED_TOKENS,
    MAX_KEPT_S,
    MAX_SCORED_S,
    MAX_WAITING_CAPTURES,
)
from sglang_chunkcache.fusion.fill import Capture, Captured, FusionPass
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import facts, identity_of, joined, up_from

logger = logging.getLogger(__name__)


class Captures(CaptureQueue):
    """The queue of one rank, and its way into the store. When a copy arrives depends on the device:
    tensor-parallel ranks, which fused reuse refuses so far, would have to agree on it."""

    def __init__(self, copies: ChunkCopies, fusion_pass: FusionPass, store: VariantIndex) -> None:
        config = fusion_pass.config
        needs = own_needs(config.selector, config.selectors)
        own = FusionRequest(config.selector, config.recompute_ratio, own_needs=needs)
        super().__init__(
            copies,
            store,
            lambda node: len(node.key),
            scored=own.scored,
            max_waiting=MAX_WAITING_CAPTURES,
            part_of=self._part_of_batch,
            token_bytes=fusion_pass.host.pool.token_bytes,
        )
        self._pass = fusion_pass
        self._under_way: deque[tuple[Waiting, Captured]] = deque()
        self.num_failed = 0
        """Chunks that could not be copied, or not be stored."""

    def run(self) -> None:
        """Store what has arrived, in order, then score and copy what comes first in the queue: one
        batch at a time, which bounds the device's memory for copies. Waits for nothing."""
        self.put_arrived()
        if batch := [] if self._under_way else self.next_batch():
            with self._guard(batch):
                captured = self._pass.capture([_capture_of(entry) for entry in batch])
                self._under_way.extend(zip(batch, captured, strict=True))
        self.put_arrived()

    def drain(self) -> None:
        """As `run`, until nothing is left. Waits for copies."""
        self.run()
        while self._queue or self._under_way:
            for _, captured in self._under_way:
                captured.wait()
            self.run()

    def clear(self) -> None:
        super().clear()
        for entry, captured in self._under_way:
            self.give_up([entry])
            captured.arrived(is_stored=False)
        self._under_way.clear()

    def stats(self) -> dict[str, int]:
        stats = super().stats()
        return {**stats, "pending": stats["pending"] + len(self._under_way)}

    def put_arrived(self) -> None:
        while self._under_way and self._under_way[0][1].is_done():
            entry, captured = self._under_way.popleft()
            with self._guard([entry]):
                blob, scores = captured.read()
                if blob is None:
                    self.num_dropped += 1
                    self.give_up([entry])
                else:
                    self.put(entry, blob, scores)
            # not by what `put` returned: a watcher may have raised once the variant was there
            captured.arrived(is_stored=self._has(entry, captured.slots))

    def _part_of_batch(self, entry: Waiting) -> float:
        """Of its time; of its tokens, where no load was measured."""
        costs, num_tokens = self._pass.pricing.agreed, len(entry.node.key)
        most = copied_within(costs, MAX_KEPT_S)
        part = num_tokens / (MAX_CAPTURED_TOKENS if most is None else max(1, most))
        known = facts(entry.node)
        if entry.scored > (known.scores.scored if known.scores else Scored.NOTHING):
            # a pass through all layers that is observed, as a question's
            work = through(1, num_tokens, known.start + num_tokens)
            part += costs[Phase.QUESTION].seconds(work) / MAX_SCORED_S
        return part

    def _has(self, entry: Waiting, slots: HostSlots | None) -> bool:
        known, identity = facts(entry.node), identity_of(entry.node)
        variant = self._store.get(identity, known.head, known.prefix)
        return variant is not None and variant.blob is slots

    @contextmanager
    def _guard(self, batch: Sequence[Waiting]) -> Iterator[None]:
        """The answers are there; the store can wait."""
        try:
            yield
        except Exception:
            logger.exception("chunk cache: storing %d chunk(s) failed", len(batch))
            self.give_up(batch)
            self.num_failed += len(batch)


def _capture_of(entry: Waiting) -> Capture:
    node, path = entry.node, [*up_from(entry.node)][::-1]
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
