"""Progress bars on stderr for work that takes longer than five seconds."""

from __future__ import annotations

import sys
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
    """A bar that appears after five seconds; none without tqdm, as in the system's Python."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield _NoBar()
        return
    look: Any = {
        "unit": "",
        "delay": DELAY_S,
        "mininterval": 1.0,
        "dynamic_ncols": True,
        "file": sys.stderr,
    }
    with tqdm(desc=label, total=total, initial=initial, **look) as bar:
        yield bar


def tracked(label: str, items: Collection[T]) -> Iterator[T]:
    """The items, with a bar."""
    with progress(label, len(items)) as bar:
        for item in items:
            yield item
            bar.update()


class _NoBar:
    def update(self, n: int = 1) -> None:
        pass
