"""Copies of chunks on their way into the store: queued with their request, made after a later forward.

A queued node is not locked: on an idle server a prompt that needs its slots would wait for a forward that never comes. A node
that was evicted meanwhile is dropped.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_chunkcache.fusion.fill import Capture, FusionPass
from sglang_chunkcache.fusion.store import ChunkStore, Variant
from sglang_chunkcache.scheduler.copies import ChunkCopies
from sglang_chunkcache.scheduler.node import facts, identity_of
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Chunks that wait to enter the store. More are dropped."""

MAX_TOKENS = 512
"""Of chunks scored and stored after one forward: the answers under way wait for them."""


class Captures:
    """The queue of one rank."""

    def __init__(self, copies: ChunkCopies, fusion_pass: FusionPass, store: ChunkStore) -> None:
        self._copies, self._pass, self._store = copies, fusion_pass, store
        self._queue: deque[tuple[TreeNode, bool]] = deque()
        self._waiting: set[TreeNode] = set()
        self.num_dropped = 0

    def add(self, chunks: Sequence[TreeNode], spans: RequestSpans) -> None:
        """Queue those of a request's chunk nodes that have earned it and bring the store something new."""
        for index in sorted(spans.keep):
            if index >= len(chunks):
                break
            node = chunks[index]
            preprocessed = spans.is_preprocessing and bool(facts(node).prefix)  # alone it has seen no neighbour
            if node in self._waiting or not self._is_wanted(node, preprocessed, spans):
                continue
            if len(self._waiting) >= MAX_WAITING:
                self.num_dropped += 1
                continue
            self._waiting.add(node)
            self._queue.append((node, preprocessed))

    def run(self) -> int:
        """Score and store what comes first in the queue. Returns how many chunks could not be stored."""
        batch = self._next_batch()
        if not batch:
            return 0
        try:
            results = self._pass.capture([_capture_of(node) for node, _ in batch])
        except Exception:  # the answers are there; the store can wait
            logger.exception("chunk cache: storing %d chunk(s) failed", len(batch))
            return len(batch)
        for (node, preprocessed), (blob, scores) in zip(batch, results, strict=True):
            facts(node).scores = scores
            identity = identity_of(node)
            assert identity is not None
            self._store.put(identity, Variant(facts(node).prefix, blob, scores, preprocessed))
        return 0

    def clear(self) -> None:
        """Drop what waits."""
        self._queue.clear()
        self._waiting.clear()

    def stats(self) -> dict[str, int]:
        """Chunks that wait now, and those dropped since the start."""
        return {"pending": len(self._queue), "dropped": self.num_dropped}

    # Private, in order of use

    def _is_wanted(self, node: TreeNode, preprocessed: bool, spans: RequestSpans) -> bool:
        identity, prefix = identity_of(node), facts(node).prefix
        if identity is None or not self._copies.holds(node):
            return False
        known = [variant.prefix for variant in self._store.find(identity)]
        if not spans.is_preprocessing and len(known) >= self._pass.config.store_variants and prefix not in known:
            return False  # with all its variants a chunk gets no more: each new chain would cost a pass
        return self._store.wants(identity, prefix, scored=self._pass.config.scoring == "on", preprocessed=preprocessed)

    def _next_batch(self) -> list[tuple[TreeNode, bool]]:
        batch: list[tuple[TreeNode, bool]] = []
        num_tokens = 0
        while self._queue:
            node, preprocessed = self._queue[0]
            is_gone = not self._copies.holds(node)
            if not is_gone and batch and num_tokens + len(node.key) > MAX_TOKENS:
                break
            self._queue.popleft()
            self._waiting.discard(node)
            if is_gone:
                self.num_dropped += 1
                continue
            batch.append((node, preprocessed))
            num_tokens += len(node.key)
        return batch


def _capture_of(node: TreeNode) -> Capture:
    """The chunk with all that precedes it."""
    path = []
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
        slots=torch.cat([each.value for each in path]),
        start=facts(node).start,
        prefix=tuple(
            (facts(each).start, facts(each).start + len(each.key))
            for each in path[:-1]
            if facts(each).chunk is not None
        ),
    )
