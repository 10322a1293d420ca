"""Bytes of variants of which some are kept as what they do not have in common with another one's blob, their leader.

A leader counts once, while its own variant or one that is read with it is here: a variant may leave, or be replaced, while
others are read with its blob.
"""

from __future__ import annotations

from typing import Any


class KeptBytes:
    """Of the variants of a store, or of some of them."""

    def __init__(self) -> None:
        self.num = 0
        """All, as they are in memory."""
        self.num_counted = 0
        """The sum of the variants' own. `num` is larger by the leaders that have left."""
        self._readers: dict[int, int] = {}
        """By blob's id, how many variants are read with it: its own, and those that it leads. Their blobs keep it alive."""

    def num_with(self, nbytes: int, leader: Any) -> int:
        """What `num` would be with a variant of so many bytes that is read with this one."""
        is_here = leader is None or id(leader) in self._readers
        return self.num + nbytes + (0 if is_here else leader.nbytes)

    def is_leader(self, blob: Any) -> bool:
        """Whether other variants here than its own are read with the blob of one that is here."""
        return self._readers[id(blob)] > 1

    def count(self, blob: Any, leader: Any, nbytes: int, sign: int) -> None:
        """A variant has come (1) or left (-1), with so many bytes of its own: those of its blob and of what was measured."""
        self.num_counted += sign * nbytes
        self.num += sign * (nbytes - blob.nbytes) + self._read(blob, sign)
        if leader is not None:
            self.num += self._read(leader, sign)

    def _read(self, blob: Any, sign: int) -> int:
        """By one more or one less. Returns the change in bytes."""
        before = self._readers.pop(id(blob), 0)
        if before + sign:
            self._readers[id(blob)] = before + sign
        return 0 if before and before + sign else sign * blob.nbytes
