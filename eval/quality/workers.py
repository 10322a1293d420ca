"""Threads for several requests at a time that an interruption stops at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that drops its pending work on an exception; the pool's own exit would first finish all of it."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
