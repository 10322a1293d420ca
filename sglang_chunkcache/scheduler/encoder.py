"""What the tree asks of joint encoding, which rewrites slots of running requests (fusion/joint/slots.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Encoder(Protocol):
    """Of one rank."""

    def encode(self, batch: ScheduleBatch) -> None:
        """After an extend, on its stream: fuse blocks of those of its requests that asked for it and are prefilled now. Their
        `RequestState.joint` tells. Writes no slot that a node owns; raises nothing."""

    def stats(self) -> dict[str, Any]:
        """Counts for `/chunkcache/stats`."""
