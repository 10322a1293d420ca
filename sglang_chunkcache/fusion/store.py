"""The tensors in host memory of radix_ext/variants.py's index, which decides what stays: a chunk's KV, un-rotated, and scores."""

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
    """With what selectors choose tokens by.

    Raises:
        ValueError: lengths or shapes disagree.
    """

    context: Tensor
    """[num_tokens] float32, CPU: mass of each token on all chunks of the prefix (Cache-Craft eq. 14)."""
    received: Tensor | None = None
    """[num_tokens] float32, CPU: mass each token receives from later tokens of this chunk. None: not measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context.dim() != 1 or any(each.shape != self.context.shape for each in self._tensors()):
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


@dataclass(frozen=True, eq=False)
class HostBlob:
    """One chunk's KV: plain CPU tensors, keys un-rotated.

    Raises:
        ValueError: not [num_layers, num_tokens, num_kv_heads, head_dim], sizes disagree, not on the CPU, or a view of
            something larger, which would stay in memory uncounted.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3] or self.values.dim() != 4:
            shapes = f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            raise ValueError(
                f"keys and values must be [num_layers, num_tokens, num_kv_heads, head_dim] but got {shapes}"
            )
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor.device != torch.device("cpu"):
                raise ValueError(f"{name} must be on the cpu but are on {tensor.device}")
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                held = tensor.untyped_storage().nbytes()
                raise ValueError(f"{name} must own their memory but are {tensor.nbytes} of {held} bytes")

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Host memory of keys and values: of pinned memory, torch takes a power of two for each."""
        return sum(1 << (each.nbytes - 1).bit_length() if each.is_pinned() else each.nbytes for each in self.read())

    def read(self) -> tuple[Tensor, Tensor]:
        """(keys, values): the tensors themselves, not to be written."""
        return self.keys, self.values


class Offload:
    """Tensors on their way to pinned host memory, on a stream beside the current one. CPU tensors are there at once.

    Args:
        tensors: on one device, own memory, complete when the current stream gets here; not written afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: tuple[Tensor, ...] = tuple(tensors)
        self._arrived: Any = None
        if not self._tensors[0].is_cuda:
            return
        stream = _offload_stream(self._tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
            for copy, each in zip(copies, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
                each.record_stream(stream)  # else its memory is given to others before it has been read
            self._tensors, self._arrived = tuple(copies), stream.record_event()

    def is_done(self) -> bool:
        """Whether all of it has arrived. Does not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        """Until all of it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> tuple[Tensor, ...]:
        """The tensors in host memory; to be read once they have arrived."""
        return self._tensors


@cache
def _offload_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
