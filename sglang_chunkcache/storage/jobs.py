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


@dataclass(eq=False, kw_only=True)
class _Job:
    done: Callable[[Any], None] = lambda job: None  # for whoever polls
    is_done: bool = False  # polled
    problem: str = ""  # why it came to nothing
    seconds: float = 0.0  # what it took. 0: nobody knows
    ended: float = 0.0  # by the thread's clock


@dataclass(eq=False)
class Load(_Job):
    name: str
    size: int  # its bytes
    num_tokens: int
    layout: Layout
    into: Callable[[Entry], None] | None = None
    """The thread gives it the entry, which is no entry where that fails."""
    is_late: bool = False  # its request did not wait for it
    entry: Entry | None = None


@dataclass(eq=False)
class Write(_Job):
    row: Row  # without the number of bytes, which it gets with them
    entry: Callable[[], Entry]  # called by the thread, once
    size: int  # its bytes, about
    is_confirmed: bool = False
    is_own: bool = True  # False: another server has written it, and `row` is what that one tells


@dataclass(eq=False)
class Lookup(_Job):
    """What other servers on the storage have of some chunks."""

    chunks: Sequence[StoredChunk]
    found: dict[StoredChunk, list[Row]] = field(default_factory=dict)
    """Of the chunks that were asked for."""

    @property
    def size(self) -> int:
        return len(self.chunks) * MAX_POINTERS * POINTER_BYTES


Job = Load | Write | Lookup
