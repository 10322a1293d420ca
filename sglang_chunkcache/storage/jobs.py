"""What the loader's thread is asked to do, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_chunkcache.storage.entry import Entry, Layout
from sglang_chunkcache.storage.key import StoredChunk
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.pointer import MAX_POINTERS, POINTER_BYTES

GONE, FAILED, PAUSED = "gone", "failed", "paused"
"""Why there is no entry, beside every `Refusal`: it is not there; the backend failed;
it was not asked."""


def _nothing(job: object) -> None:
    """Nobody is told."""


@dataclass(eq=False)
class Load:
    """An entry that is asked for."""

    name: str
    num_bytes: int
    num_tokens: int
    layout: Layout
    into: Callable[[Entry], None] | None = None
    """The thread gives it the entry, which is no entry where that fails."""
    done: Callable[[Any], None] = _nothing
    """For whoever polls."""
    is_done: bool = False
    """Polled."""
    is_late: bool = False
    """Its request did not wait for it."""
    entry: Entry | None = None
    problem: str = ""
    """Why there is none."""
    seconds: float = 0.0
    """What it took, where there is one."""

    @property
    def size(self) -> int:
        return self.num_bytes


@dataclass(eq=False)
class Write:
    """An entry to be kept."""

    row: Row
    """Without the number of bytes, which it gets with them."""
    entry: Callable[[], Entry]
    """Called by the thread, once."""
    size: int
    """Its bytes, about."""
    done: Callable[[Any], None] = _nothing
    is_confirmed: bool = False
    is_own: bool = True
    """False: another server has written it, and `row` is what that one tells."""
    problem: str = ""
    seconds: float = 0.0
    """What it took, where it was written. Of ranks, whose clocks differ, 0."""


@dataclass(eq=False)
class Lookup:
    """What other servers on the storage have of some chunks."""

    chunks: Sequence[StoredChunk]
    done: Callable[[Any], None] = _nothing
    found: dict[StoredChunk, list[Row]] = field(default_factory=dict)
    """Of the chunks that were asked for."""
    is_done: bool = False
    """Polled."""

    @property
    def size(self) -> int:
        return len(self.chunks) * MAX_POINTERS * POINTER_BYTES


Job = Load | Write | Lookup
