"""What is measured of chunks beside their KV, and its way to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from radix_ext.cfo import Attention, Scored


@dataclass(frozen=True, eq=False)
class ChunkScores(Attention):
    """With what selectors choose tokens by. Raises ValueError: lengths or shapes disagree."""

    context: Tensor
    """[num_tokens] float32, CPU: each token's mass on the prefix's chunks (Cache-Craft eq. 14)."""
    received: Tensor | None = None
    """[num_tokens] float32, CPU: mass from later tokens of this chunk. None: not measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context.dim() != 1 or any(
            each.shape != self.context.shape for each in self._tensors()
        ):
            shapes = ", ".join(str(tuple(each.shape)) for each in self._tensors())
            raise ValueError(f"context and received must both be [num_tokens] but got {shapes}")

    @property
    def num_tokens(self) -> int:
        return len(self.context)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._tensors())

    @property
    def scored(self) -> Scored:
        return Scored.MASSES if self.received is None else Scored.ALL

    def _tensors(self) -> list[Tensor]:
        return [each for each in (self.context, self.received) if each is not None]


class Offload:
    """Tensors on their way to pinned host memory, on another stream; on the CPU, there at once.

    Args:
        tensors: any number, on one device, own memory, complete when the current stream gets here;
            not written afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: tuple[Tensor, ...] = tuple(tensors)
        self._arrived: Any = None
        if not (self._tensors and self._tensors[0].is_cuda):
            return
        stream = _offload_stream(self._tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
            for copy, each in zip(copies, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
                # else its memory is given to others before it has been read
                each.record_stream(stream)
            self._tensors, self._arrived = tuple(copies), stream.record_event()

    def is_done(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, once they have arrived."""
        return self._tensors


@cache
def _offload_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
