"""Transfers of one kind, to or from a storage, that are asked for and not done: how many may wait.

By number, by the seconds that they are estimated to take, where nobody knows these by bytes, and by
the memory that they hold meanwhile. One is taken whatever its size.
"""

from __future__ import annotations

from typing import NamedTuple

from radix_ext.loading import LoadTimes


class Bounds(NamedTuple):
    num: int
    seconds: float
    unknown_bytes: int  # where nothing was transferred yet
    memory_bytes: int


class Backlog:
    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.times = bounds, LoadTimes()
        self.num = self.num_bytes = 0

    def has_room(self, num: int, num_bytes: int) -> bool:
        """Whether so many more, of so many bytes, may wait."""
        is_within = self.num_bytes + num_bytes <= self.max_bytes
        return self.num + num <= self.bounds.num and (is_within or self.num + num == 1)

    def begin(self, num_bytes: int) -> None:
        self.num, self.num_bytes = self.num + 1, self.num_bytes + num_bytes

    def end(self, num_bytes: int, seconds: float) -> None:
        """It is done, and took so long; 0: nobody knows."""
        self.num, self.num_bytes = self.num - 1, self.num_bytes - num_bytes
        if seconds > 0:
            self.times.observe(num_bytes, seconds)

    @property
    def max_bytes(self) -> float:
        num_bytes = self.times.bytes_within(self.bounds.seconds)
        in_time = self.bounds.unknown_bytes if num_bytes is None else num_bytes
        return min(in_time, self.bounds.memory_bytes)

    @property
    def is_full(self) -> bool:
        """Whether another one of unknown size has to wait for what is done first."""
        return self.num > 0 and not self._is_under(self.bounds.num)

    @property
    def has_spare(self) -> bool:
        """Whether half of what may wait does not."""
        return self.num == 0 or self._is_under(self.bounds.num // 2)

    def _is_under(self, num: int) -> bool:
        return self.num < num and self.num_bytes < self.max_bytes / 2
