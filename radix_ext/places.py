"""Where each tenant's chunks were cached last, so that a chunk which is not found can be told apart
from a new one.

    (text, chunk)   -> the chain that the chunk ended there, and its rank: with the same text
                       before it, the chunk is in another order, or gone
    (tenant, chunk) -> the text that it was last behind: another text is before it

`text` names what is before a chunk and is no chunk (`text_before`), its tenant included. Knows no
KV and no tree: whether a place is still cached, the tree says.
"""

from collections import OrderedDict
from typing import NamedTuple

from radix_ext.chunk import ChunkId


class Place(NamedTuple):
    """`chain` names the chunks before a chunk and itself;
    `rank` has computed it there, into the cache of that `epoch`."""

    chain: int
    rank: int
    epoch: int


class Places:
    """At most `max_places` of each kind, the least recently noted ones leave. O(1) each, and about
    500 bytes for both kinds.

    Keys are Python's own 61-bit hashes, as in `AccessTable`: should two ever be equal, a reason is
    wrong and no answer.
    """

    def __init__(self, *, max_places: int) -> None:
        self.max_places = max_places
        self._places: OrderedDict[int, Place] = OrderedDict()
        self._texts: OrderedDict[int, str] = OrderedDict()

    def note(self, tenant: str, text: str, chunk: ChunkId, place: Place) -> None:
        """The tenant's chunk is cached there."""
        # `text` names the tenant.
        self._places[here := hash((text, chunk))] = place
        self._places.move_to_end(here)
        self._texts[there := hash((tenant, chunk))] = text
        self._texts.move_to_end(there)
        for kept in (self._places, self._texts):
            if len(kept) > self.max_places:
                kept.popitem(last=False)

    def behind(self, text: str, chunk: ChunkId) -> Place | None:
        """The chunk's last place behind this text. None: it had none."""
        return self._places.get(hash((text, chunk)))

    def last_text(self, tenant: str, chunk: ChunkId) -> str | None:
        """The text that the tenant's chunk was last behind. None: the tenant had no such chunk."""
        return self._texts.get(hash((tenant, chunk)))

    def __len__(self) -> int:
        """Places behind a text."""
        return len(self._places)
