"""Times of work on a device: `triton.testing.do_bench` on CUDA (events, L2 overwritten before each call), wall time elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from eval.errors import CommandError

Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call."""
WARM_UP_MS, REP_MS = 1, 20
"""Short, since a bench repeats all of its arms in turn; the median of the calls within them is one measured time."""


def create_timer(device: torch.device) -> Timer:
    """How work on the device is timed. Raises CommandError without CUDA if it is asked for."""
    if device.type != "cuda":
        return _wall_s
    if not torch.cuda.is_available():
        raise CommandError("there is no CUDA device; --device cpu goes through everything without it")
    from triton.testing import do_bench

    return lambda work: float(do_bench(work, warmup=WARM_UP_MS, rep=REP_MS, return_mode="median")) / 1000


def _wall_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
