"""What the tree asks of joint encoding, which rewrites slots of running requests (fusion/joint/slots.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from torch import Tensor

    from sglang_chunkcache.wire.report import JointReport


class Encoder(Protocol):
    """Of one rank."""

    def encode(self, batch: ScheduleBatch) -> None:
        """After an extend, on its stream: fuse blocks of those of its requests that asked for it and are prefilled now. Their
        `RequestState.joint` tells. Writes no slot that a node owns; raises nothing."""

    def explain(self, req: Req, exact: Tensor, cached: int) -> JointReport | None:
        """What it would make of the request's chunks whose KV is somewhere, of a request that was only matched. Writes nothing.

        Args:
            exact: [num_tokens] int64, the slots of its exact prefix.
            cached: tokens of that prefix with what host memory has of it.
        Returns:
            None: of a batch, which only its requests can tell, or it failed.
        """

    def stats(self) -> dict[str, Any]:
        """Counts for `/chunkcache/stats`."""
