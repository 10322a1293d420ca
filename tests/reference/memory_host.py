"""A host pool for the schedulers of tests:
what a slot holds is an object, and a slot that was not written holds none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from radix_ext.costs import NOMINAL, Costs, Phase, Work
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.storage.codec import NONE, Codec

HEAD_DIMS = {"none": 1, "int8": 1, "int4": 2}
NUMBERS: dict[Any, int] = {}
"""Of all contents that were written to a storage."""


class MemoryHost:
    """`HostPool`. `contents()`: device slot -> what it holds, written by whoever computes."""

    token_bytes = 1
    num_layers = 4
    is_layered = True

    def __init__(
        self,
        contents: Callable[[], MutableMapping[int, Any]],
        num_slots: int,
        *,
        codec: Codec = NONE,
        token_bytes: int = token_bytes,
    ) -> None:
        self._device, self.num_slots, self.codec = contents, num_slots, codec
        self.token_bytes, self.saved_token_bytes = token_bytes, 0
        self.num_bytes = num_slots * token_bytes
        self._under_way: list[tuple[int, int]] = []
        self.clear()

    @property
    def num_free(self) -> int:
        return self.num_slots - self._num_used + len(self._free)

    def clear(self) -> None:
        self._free, self.contents = list[int](), dict[int, Any]()
        self._num_used = 0  # slots that were ever given out: a pool may have millions

    def alloc(self, num_tokens: int) -> Tensor | None:
        if num_tokens > self.num_free:
            return None
        taken, self._free = self._free[:num_tokens], self._free[num_tokens:]
        num_new = num_tokens - len(taken)
        taken += range(self._num_used, self._num_used + num_new)
        self._num_used += num_new
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: Tensor) -> None:
        assert not set(self._free).intersection(slots.tolist()), "freed twice"
        self._free += slots.tolist()
        for slot in slots.tolist():
            self.contents.pop(slot, None)  # it was on its way

    def close(self) -> None:
        self.clear()

    def follow(self) -> None:
        """There are no streams."""

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        """A slot's KV is the number of what it holds."""
        numbers = [NUMBERS.setdefault(self.contents[slot], len(NUMBERS)) for slot in slots.tolist()]
        keys = torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1, 1)
        keys = keys.expand(-1, -1, -1, HEAD_DIMS[self.codec.name])  # heads of whole bytes
        return self.codec.encode(keys, keys.clone())

    def write(self, slots: Tensor, *parts: Tensor) -> None:
        keys, values = self.codec.decode(parts)
        assert torch.equal(keys, values)
        held = list(NUMBERS)
        for slot, number in zip(slots.tolist(), keys[0, :, 0, 0].tolist(), strict=True):
            self.contents[slot] = held[round(number)]

    def save(self, device_slots: Tensor, slots: Tensor) -> list[Tensor]:
        for source, slot in zip(device_slots.tolist(), slots.tolist(), strict=True):
            self.contents[slot] = self._device().get(source)
        return []

    def prepare(self, slots: Tensor) -> Tensor:
        return slots

    def load(self, slots: Tensor, device_slots: Tensor, *, num_ahead: int, clock: Any) -> None:
        assert not self._under_way, "the load before it has not ended"
        self.num_ahead = num_ahead
        self._under_way = list(zip(slots.tolist(), device_slots.tolist(), strict=True))
        with clock.timed(Phase.LOAD, Work(1, len(slots))):
            self._copy()

    def copy(self, slots: Tensor, device_slots: Tensor, layers: range) -> None:
        for slot, target in zip(slots.tolist(), device_slots.tolist(), strict=True):
            self._device()[target] = self.contents[slot]

    def finish(self) -> bool:
        """A layer may be copied as late as this:
        by now nobody else may have written either slot."""
        self._copy()
        self._under_way.clear()
        return False

    def _copy(self) -> None:
        for slot, target in self._under_way:
            self._device()[target] = self.contents[slot]


class FixedCosts(Pricing):
    """`Pricing` that learns nothing."""

    def __init__(self, costs: Mapping[Phase, Any] = NOMINAL) -> None:
        self.agreed: Costs = costs
        self.watched: list[tuple[Phase | None, Work]] = []

    def timed(self, phase: Phase | None, work: Work) -> Any:
        self.watched.append((phase, work))
        return nullcontext(SimpleNamespace(seconds=1.0))

    def overlapped(self, watch: Any) -> Any:
        return SimpleNamespace(mark=lambda: None)

    def stall(self, load: Any) -> Any:
        return nullcontext()

    def time_extend(self, batch: Any) -> Any:
        return self.timed(Phase.EXTEND, Work())

    def refresh(self) -> None:
        """Nothing to learn."""
