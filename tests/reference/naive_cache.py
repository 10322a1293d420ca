"""What `ChunkRadixCache` holds, as a dict from a path of units to the slots of its last unit.

A unit is one token, or one whole chunk; a path begins with the namespace (kind, extra_key,
cache_salt). Slow and obviously right: no nodes, no splits, no locks. In pages a unit has the slots
of the pages that end in it: it may have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Unit = tuple[Any, ...]
Path = tuple[Unit, ...]


def units(
    token_ids: Sequence[int],
    spans: Sequence[tuple[int, int]] | None,
    up_to: int,
    extra_key: str | None,
    salt: str | None,
    page_size: int = 1,
) -> Path:
    """The first `up_to` tokens as units; a chunk whose pages would be cut is left out with all
    after it."""
    path: list[Unit] = [("plain" if spans is None else "chunks", extra_key, salt)]
    starts = dict(spans or ())
    position = 0
    while position < up_to:
        end = starts.get(position, position + 1)
        if end - end % page_size > up_to:
            break
        path.append(("chunk" if position in starts else "token", *token_ids[position:end]))
        position = end
    return tuple(path)


def num_tokens(path: Path) -> int:
    return sum(len(unit) - 1 for unit in path[1:])


class NaiveCache:
    """Paths with slots, and the promotion marks and hits of chunk paths."""

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.slots: dict[Path, tuple[int, ...]] = {}
        self.marks: dict[Path, bool] = {}
        self.hits: dict[Path, int] = {}

    def num_slots(self, path: Path) -> int:
        """Whole pages."""
        return num_tokens(path) // self.page_size * self.page_size

    def match(self, path: Path) -> Path:
        """The longest leading part of `path` that is held."""
        length = 1
        while length < len(path) and path[: length + 1] in self.slots:
            length += 1
        return path[:length]

    def rest(self, path: Path, up_to: int) -> int:
        """Tokens of its last chunks, up to this one, that lie in a page of what follows."""
        start = self.num_slots(path)
        while len(path) > 1 and self.num_slots(path[:-1]) == start and not self._behind(path):
            path = path[:-1]
        if path[-1][0] != "chunk" or not self._behind(path):
            return 0
        return max(0, min(num_tokens(path), up_to) - start)

    def insert(self, path: Path, slots: Sequence[int]) -> None:
        """Hold `path`; what was there keeps its slots."""
        position = 0
        for length in range(2, len(path) + 1):
            end = self.num_slots(path[:length])
            self.slots.setdefault(path[:length], tuple(slots[position:end]))
            position = end

    def _behind(self, path: Path) -> bool:
        """Whether what follows the chunk has a page."""
        pages = (self.num_slots(each) for each in self.slots if each[: len(path)] == path)
        return path[-1][0] == "chunk" and any(each > self.num_slots(path) for each in pages)

    def mark(self, path: Path, promoted_len: int, area_len: int, *, counts_hits: bool) -> None:
        """Marks along the first chunk area of `path`; a chunk that had one is hit once more."""
        chunks = [path[: i + 1] for i, unit in enumerate(path) if unit[0] == "chunk"]
        for index, chunk_path in enumerate(chunks[:area_len]):
            self.hits[chunk_path] = (
                self.hits[chunk_path] + counts_hits if chunk_path in self.marks else 0
            )
            self.marks[chunk_path] = index < promoted_len

    def evict(self, freed: Iterable[int], chunks: Iterable[Path]) -> None:
        """These slots are gone, and with them their paths; and these chunks, which may have had
        none."""
        gone = set(freed)
        for path in [path for path, slots in self.slots.items() if gone.intersection(slots)]:
            del self.slots[path]
        for path in chunks:
            self.slots.pop(path, None)
            self.marks.pop(path, None)
            self.hits.pop(path, None)
        for path in sorted(self.slots, key=len):
            if len(path) > 2 and path[:-1] not in self.slots:
                assert not self.slots.pop(path), f"{path} lost its prefix"

    def is_promoted(self, path: Path) -> bool:
        """The mark of the nearest chunk of the first area, at `path` or above; True without one."""
        marks = (self.marks[path[:n]] for n in range(len(path), 1, -1) if path[:n] in self.marks)
        return next(marks, True)

    def slots_of(self, path: Path) -> list[int]:
        return [slot for n in range(2, len(path) + 1) for slot in self.slots[path[:n]]]
