"""Copies of chunks on their way into the store: made after a later forward, in the order of radix_ext/capture_queue.py."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

import torch

from radix_ext.capture_queue import CaptureQueue
from radix_ext.sources import ChunkCopies
from radix_ext.variants import Variant, VariantIndex
from sglang_chunkcache.config import MAX_CAPTURED_TOKENS, MAX_WAITING_CAPTURES
from sglang_chunkcache.fusion.fill import Capture, FusionPass
from sglang_chunkcache.scheduler.node import facts, identity_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

logger = logging.getLogger(__name__)


class Captures(CaptureQueue):
    """The queue of one rank, and its way into the store."""

    def __init__(self, copies: ChunkCopies, fusion_pass: FusionPass, store: VariantIndex) -> None:
        super().__init__(
            copies,
            store,
            lambda node: len(node.key),
            is_scoring=fusion_pass.config.scoring == "on",
            max_waiting=MAX_WAITING_CAPTURES,
            max_tokens=MAX_CAPTURED_TOKENS,
            token_bytes=fusion_pass.token_bytes,
        )
        self._pass = fusion_pass

    def run(self) -> int:
        """Score and store what comes first in the queue. Returns how many chunks could not be stored."""
        batch = self.next_batch()
        if not batch:
            return 0
        try:
            results = self._pass.capture([_capture_of(node) for node, _ in batch])
        except Exception:  # the answers are there; the store can wait
            logger.exception("chunk cache: storing %d chunk(s) failed", len(batch))
            return len(batch)
        for (node, preprocessed), (blob, scores) in zip(batch, results, strict=True):
            known, identity = facts(node), identity_of(node)
            known.scores = scores
            assert identity is not None
            self._store.put(identity, Variant(known.prefix, blob, scores, preprocessed, known.head))
        return 0


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
        scores=facts(node).scores,
    )
