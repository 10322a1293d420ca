"""Bytes of variants of which some are kept as what they do not have in common with another one's blob, their leader.

A leader counts while its own variant or one that is read with it is here, and once. So a leader may leave like any other
variant, and frees its bytes when the last that needs them has left.
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

    def missing(self, leader: Any) -> int:
        """Its bytes, if no variant here is read with it. None has none."""
        return 0 if leader is None or id(leader) in self._readers else leader.nbytes

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
