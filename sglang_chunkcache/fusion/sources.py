"""Where moved KV comes from. A tier is one class here: what a plan needs to choose it, and how its KV is had.

A disk tier is another class: its blob reads from a file, and `where` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radix_ext import ChunkId
from sglang_chunkcache.fusion.scores import ChunkScores
from sglang_chunkcache.fusion.store import Variant
from sglang_chunkcache.scheduler.node import facts


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A chunk node of the tree. Locked from `commit` until its KV is copied."""

    node: Any
    """SGLang's TreeNode, with our fields."""
    where: str = "device"
    preprocessed: bool = False

    @property
    def start(self) -> int:
        return facts(self.node).start

    @property
    def prefix(self) -> tuple[ChunkId, ...]:
        return facts(self.node).prefix

    @property
    def scores(self) -> ChunkScores | None:
        scores: ChunkScores | None = facts(self.node).scores
        return scores


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A variant of the store. A plain reference: it may leave the store meanwhile."""

    variant: Variant
    where: str = "host"
    start: None = None

    @property
    def prefix(self) -> tuple[ChunkId, ...]:
        return self.variant.prefix

    @property
    def scores(self) -> ChunkScores | None:
        return self.variant.scores

    @property
    def preprocessed(self) -> bool:
        return self.variant.preprocessed
