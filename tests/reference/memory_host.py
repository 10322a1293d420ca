"""A host pool for the schedulers of tests: what a slot holds is an object, and a slot that was not written holds none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from radix_ext.costs import NOMINAL, Costs, Phase, Work

NUMBERS: dict[Any, int] = {}
"""Of all contents that were written to a storage."""


class MemoryHost:
    """`HostPool`. `contents()`: device slot -> what it holds, written by whoever computes."""

    token_bytes = 1
    is_ready = True

    def __init__(self, contents: Callable[[], dict[int, Any]], num_slots: int) -> None:
        self._device, self.num_slots = contents, num_slots
        self.clear()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def clear(self) -> None:
        self._free, self.contents = list(range(self.num_slots)), dict[int, Any]()

    def alloc(self, num_tokens: int) -> Tensor | None:
        if num_tokens > len(self._free):
            return None
        taken, self._free = self._free[:num_tokens], self._free[num_tokens:]
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

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's KV is the number of what it holds."""
        numbers = [NUMBERS.setdefault(self.contents[slot], len(NUMBERS)) for slot in slots.tolist()]
        keys = torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1, 1)
        return keys, keys.clone()

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        assert torch.equal(keys, values)
        held = list(NUMBERS)
        for slot, number in zip(slots.tolist(), keys.flatten().tolist(), strict=True):
            self.contents[slot] = held[int(number)]

    @contextmanager
    def on_forward_stream(self) -> Iterator[None]:
        yield

    def save(self, device_slots: Tensor, slots: Tensor) -> None:
        for source, slot in zip(device_slots.tolist(), slots.tolist(), strict=True):
            self.contents[slot] = self._device().get(source)

    def load(self, slots: Tensor, device_slots: Tensor) -> None:
        for slot, target in zip(slots.tolist(), device_slots.tolist(), strict=True):
            self._device()[target] = self.contents[slot]


class FixedCosts:
    """`Pricing` that learns nothing."""

    def __init__(self, costs: Mapping[Phase, Any] = NOMINAL) -> None:
        self.agreed: Costs = costs
        self.watched: list[tuple[Phase | None, Work]] = []

    def watch(self, phase: Phase | None, work: Work) -> Any:
        self.watched.append((phase, work))
        return nullcontext(SimpleNamespace(seconds=1.0))

    def watch_extend(self, batch: Any) -> Any:
        return self.watch(Phase.EXTEND, Work())

    def refresh(self) -> None:
        """Nothing to learn."""
