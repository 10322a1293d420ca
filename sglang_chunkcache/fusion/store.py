"""The tensors in host memory of radix_ext/variants.py's index, which decides what stays: a chunk's KV, un-rotated, and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from radix_ext.cfo import Attention, Scored
from sglang_chunkcache.storage.codec import NONE, Codec, Difference, Format, StoreCodec

CPU = torch.device("cpu")


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


class _Parts:
    """Of one chunk's KV.

    Args:
        parts: CPU tensors that own their memory, as `codec` has encoded them.
    Raises:
        ValueError: they are not the codec's, or not finite where it needs that, not on the CPU, or a view of something larger,
            which would stay in memory uncounted.
    """

    def __init__(self, parts: Sequence[Tensor], codec: Format) -> None:
        for name, each in zip(("keys", "values", *("scales",) * len(parts)), parts, strict=False):
            if each.device != CPU:
                raise ValueError(f"{name} must be on the cpu but are on {each.device}")
            if each.untyped_storage().nbytes() != each.nbytes:
                held = each.untyped_storage().nbytes()
                raise ValueError(f"{name} must own their memory but are {each.nbytes} of {held} bytes")
        codec.check(parts)
        self.parts, self._format = tuple(parts), codec

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Host memory of all parts: of pinned memory, torch takes a power of two for each."""
        return self._taken(each.nbytes for each in self.parts)

    @property
    def saved_bytes(self) -> int:
        """How many fewer these are than of the same KV in the pool's dtype."""
        plain = NONE.shapes(self._format.sizes(self.parts))
        return self._taken(prod(shape) * dtype.itemsize for shape, dtype in plain) - self.nbytes

    def _to(self, device: torch.device, layers: slice) -> list[Tensor]:
        return [each[layers].to(device, non_blocking=True) for each in self.parts]

    def _taken(self, sizes: Iterable[int]) -> int:
        return sum(1 << (size - 1).bit_length() if size and self.parts[0].is_pinned() else size for size in sizes)


class HostBlob(_Parts):
    """One chunk's KV as a codec keeps it, keys un-rotated. Arguments and errors are those of its parts."""

    def __init__(self, *parts: Tensor, codec: Codec = NONE) -> None:
        super().__init__(parts, codec)
        self.codec = codec

    def alone(self) -> tuple[Tensor, ...]:
        """The parts that `codec` needs no other variant for."""
        return self.parts

    def read(self, device: torch.device = CPU, layers: range | None = None) -> tuple[Tensor, Tensor]:
        """(keys, values) of these layers, by default of all, in the pool's dtype, decoded on this device; not to be written: they
        may be the parts. From pinned memory the copy is queued."""
        return self.codec.decode(self._to(device, slice(None) if layers is None else slice(layers.start, layers.stop)))


class FollowerBlob(_Parts):
    """One chunk's KV as what it does not have in common with another variant's, which it keeps in memory and does not count."""

    def __init__(self, *parts: Tensor, difference: Difference, leader: HostBlob) -> None:
        super().__init__(parts, difference)
        assert leader.codec is not NONE, "decoding writes into what the leader reads, which must not be its parts"
        self.leader, self._difference = leader, difference

    @property
    def codec(self) -> Codec:
        """Its leader's."""
        return self.leader.codec

    def alone(self) -> tuple[Tensor, ...]:
        """As `HostBlob.alone`, of what is read: that codec's error comes on top of the difference's."""
        return self.codec.encode(*self.read())

    def read(self, device: torch.device = CPU, layers: range | None = None) -> tuple[Tensor, Tensor]:
        """As `HostBlob.read`."""
        some = slice(0, None) if layers is None else slice(max(0, layers.start - 1), max(0, layers.stop - 1))
        return self._difference.decode(self._to(device, some), self.leader.read(device, layers))


Blob: TypeAlias = HostBlob | FollowerBlob


def encoded(
    kv: tuple[Tensor, Tensor], codec: StoreCodec, leader: HostBlob | None = None
) -> tuple[tuple[Tensor, ...], Callable[..., Blob]]:
    """(parts on the KV's device, what makes a blob of them in host memory). `leader`: of another variant; None: there is none."""
    if leader is None or codec.difference is None:
        return codec.alone.encode(*kv), partial(HostBlob, codec=codec.alone)
    parts = codec.difference.encode(*kv, leader.read(kv[0].device))
    return parts, partial(FollowerBlob, difference=codec.difference, leader=leader)


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
