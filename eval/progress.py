"""Progress bars on stderr for work that takes longer than five seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
DELAY_S = 5.0


class Bar(Protocol):
    """What `progress` gives."""

    def update(self, n: int = 1) -> object:
        """Report `n` more items as done."""


@contextmanager
def progress(label: str, total: int | None, *, initial: int = 0) -> Iterator[Bar]:
    """A bar that appears after five seconds. Without tqdm, as in the system's Python, at most one line in five seconds."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield _Lines(label, total, initial)
        return
    look: Any = {"unit": "", "delay": DELAY_S, "mininterval": 1.0, "dynamic_ncols": True, "file": sys.stderr}
    with tqdm(desc=label, total=total, initial=initial, **look) as bar:
        yield bar


def tracked(label: str, items: Collection[T]) -> Iterator[T]:
    """The items, with a bar."""
    with progress(label, len(items)) as bar:
        for item in items:
            yield item
            bar.update()


class _Lines:
    def __init__(self, label: str, total: int | None, initial: int) -> None:
        self._label, self._of, self._done = label, f" of {total}" if total else "", initial
        self._said = time.monotonic()

    def update(self, n: int = 1) -> None:
        self._done += n
        if time.monotonic() - self._said >= DELAY_S:
            self._said = time.monotonic()
            print(f"{self._label}: {self._done}{self._of}", file=sys.stderr)
