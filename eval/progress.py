"""Progress bars on stderr, at a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from retrieval.progress import bar

T = TypeVar("T")


class Bar(Protocol):
    """What `progress` gives."""

    def update(self, n: int = 1) -> object:
        """Report `n` more items as done."""


@contextmanager
def progress(label: str, total: int | None, *, initial: int = 0, **look: Any) -> Iterator[Bar]:
    """A bar, which stays if it took two seconds; none without tqdm, as in the system's Python."""
    if find_spec("tqdm") is None:
        yield _NoBar()
        return
    with bar(label, total, initial=initial, **look) as drawn:
        yield drawn


def tracked(label: str, items: Collection[T]) -> Iterator[T]:
    """The items, with a bar."""
    with progress(label, len(items)) as shown:
        for item in items:
            yield item
            shown.update()


class _NoBar:
    def update(self, n: int = 1) -> None:
        pass
