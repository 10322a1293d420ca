"""Recent heads of each tenant: what stood in front of its chunks, and where two heads part.

A head is its token ids up to the first chunk, and an outline: the parts of the request that it was
rendered from, by name. Tokens say where two heads part, outlines in which part. Of a tenant the
last few are kept, of all tenants so many bytes.
"""

import json
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

Outline = Sequence[tuple[str, object]]
"""(name, value) of what a head is rendered from, in order. Values are JSON's."""

_HEAD_BYTES = 600  # a head and its place in the maps, besides ids and outline
_PART_BYTES = 100  # a name and a hash
_NOTHING = hash("null")  # as what another endpoint's outline does not even name


class Parting(NamedTuple):
    """The first part in which a head and another differ, and the first token. None: not known."""

    field: str | None
    token: int | None


class _Head(NamedTuple):
    ids: "array[int]"
    is_whole: bool
    parts: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return _HEAD_BYTES + self.ids.itemsize * len(self.ids) + _PART_BYTES * len(self.parts)


class Heads:
    """`max_heads` of each tenant, of each at most `max_tokens`, and `max_bytes` in all; the least
    recently noted leave.

    A head that is known costs O(1), a new one O(its length).
    """

    def __init__(self, *, max_heads: int, max_tokens: int, max_bytes: int) -> None:
        self.max_heads, self.max_tokens, self.max_bytes = max_heads, max_tokens, max_bytes
        self._tenants: OrderedDict[str, OrderedDict[str, _Head]] = OrderedDict()
        self.num_bytes = 0  # what the heads take, nearly

    def note(self, tenant: str, name: str, ids: Sequence[int], outline: Outline) -> None:
        """A chunk of the tenant's is cached behind this head. `name` stands for it."""
        heads = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if name in heads:
            heads.move_to_end(name)
            return
        heads[name] = head = self._head(ids, outline)
        self.num_bytes += head.nbytes
        if len(heads) > self.max_heads:
            self.num_bytes -= heads.popitem(last=False)[1].nbytes
        # Never the last tenant: it would lose the head that was just noted.
        while self.num_bytes > self.max_bytes and len(self._tenants) > 1:
            _, forgotten = self._tenants.popitem(last=False)
            self.num_bytes -= sum(each.nbytes for each in forgotten.values())

    def parting(
        self,
        tenant: str,
        name: str,
        ids: Sequence[int],
        outline: Outline,
        *,
        among: Collection[str],
    ) -> Parting | None:
        """Where this head parts from the one of these that it has most in common with; if none of
        them is kept, from the nearest of the tenant's others. None: the tenant has no other."""
        known = {
            other: head for other, head in self._tenants.get(tenant, {}).items() if other != name
        }
        others = [head for other, head in known.items() if other in among] or [*known.values()]
        if not others:
            return None
        mine = self._head(ids, outline)
        other = max(others, key=lambda other: _common_len(mine.ids, other.ids))
        token = _common_len(mine.ids, other.ids)
        # Equal up to a cut tells nothing of the rest; at a whole head's end they do part.
        is_known = all(token < len(head.ids) for head in (mine, other)) or any(
            head.is_whole and token == len(head.ids) for head in (mine, other)
        )
        return Parting(_first_difference(mine, other), token if is_known else None)

    def __len__(self) -> int:
        """Tenants."""
        return len(self._tenants)

    def _head(self, ids: Sequence[int], outline: Outline) -> _Head:
        # Values are only compared, and tools and system prompts are long: a hash takes 8 bytes.
        parts = tuple(
            (name, hash(json.dumps(value or None, sort_keys=True, default=str)))
            for name, value in outline
        )
        return _Head(array("i", ids[: self.max_tokens]), len(ids) <= self.max_tokens, parts)


def _common_len(first: "array[int]", second: "array[int]") -> int:
    """Leading items in common. By halving, since comparing bytes is fast."""
    one, other = memoryview(first).cast("B"), memoryview(second).cast("B")
    size = first.itemsize

    def is_over(length: int) -> bool:
        return one[: length * size] != other[: length * size]

    # The shortest part that differs, less one.
    return bisect_left(range(1, min(len(first), len(second)) + 1), True, key=is_over)


def _first_difference(mine: _Head, other: _Head) -> str | None:
    theirs = dict(other.parts)
    for name, value in mine.parts:
        if theirs.pop(name, _NOTHING) != value:
            return name
    return next((name for name, value in theirs.items() if value != _NOTHING), None)
