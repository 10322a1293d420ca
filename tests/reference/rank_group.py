"""A tensor-parallel group whose ranks are threads of one process,
as far as storages use SGLang's GroupCoordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")
LIMIT_S = 30.0
"""A rank that waits so long waits for one that does something else."""


class RankGroup:
    """As rank `rank_in_group` sees it: reductions are torch's own, over Gloo."""

    def __init__(
        self, rank: int, size: int, store: Any, barrier: threading.Barrier, values: list[Any]
    ) -> None:
        self.rank_in_group, self.world_size = rank, size
        self.cpu_group = torch.distributed.ProcessGroupGloo(
            store, rank, size, timedelta(seconds=LIMIT_S)
        )
        self._barrier, self._values = barrier, values

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.rank_in_group] = value
        self._barrier.wait(LIMIT_S)
        found = list(self._values)
        self._barrier.wait(LIMIT_S)
        return found


def on_ranks(live: Callable[[RankGroup], T], size: int = 2) -> list[T]:
    """What `live` returns on each, run at once."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    barrier, values = threading.Barrier(size), [None] * size
    raised: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return live(RankGroup(rank, size, store, barrier, values))
        except BaseException as error:
            raised.append(error)
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        found = [threads.submit(run, rank) for rank in range(size)]
    if raised:
        raise raised[0]  # the others have waited for that rank
    return [each.result() for each in found]
