"""Which exact chains are copied to host memory before they leave the device, and in which order
(CRAFT 4.1): what is worth it, after a forward, a chain's first chunk before its second one.

    offer ──► waits ──► save_some ──► ExactChains.add, copy, keep

A node that waits is not locked. One that has left meanwhile is missed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic

from radix_ext.exact_chains import ChainCounts, ChainPlace, ExactChains, Node

MUCH_LARGER = 3
"""Than the device's pool: a smaller one that has captured variants, too, would hold in their place
what the device has (eval/LOG.md)."""


class WriteBackQueue(Generic[Node]):
    """Of one rank. A subclass knows the tree.

    Args:
        facts_of: a node's `CopyFacts`, with its `chain`, its `hits`, whether it is `promoted`, and
            its copy in host memory or None as `host`.
        save_tokens: after one forward nothing more is copied once so many were, by now.
        max_waiting: nodes that wait. More are not taken: they come again with their next hit.
        keeps: False: no chain is kept in host memory.
        only_lost: a full pool turns a chain away until the device has lost it and computed it anew.
    """

    def __init__(
        self,
        nodes: ExactChains[Node, Any],
        facts_of: Callable[[Any], Any],
        counts: ChainCounts,
        *,
        save_tokens: Callable[[], int],
        max_waiting: int,
        keeps: bool = True,
        only_lost: bool = False,
    ) -> None:
        self._nodes, self._facts_of, self._counts = nodes, facts_of, counts
        self._save_tokens, self._max_waiting, self._keeps = save_tokens, max_waiting, keeps
        self._only_lost = only_lost
        self._turned_away: OrderedDict[Hashable, None] = OrderedDict()
        self._waiting: OrderedDict[Any, None] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offer(self, chunks: Sequence[Any], *, is_later_turn: bool = False) -> None:
        """A request has used these exact nodes, from its first chunk on: note those that are worth
        keeping. Of a conversation that goes on all are: its next turn asks for them again.

        The end first: of nodes that were used alike the index evicts the one that was used least
        recently."""
        for node in reversed(chunks):
            if (host := self._facts_of(node).host) is not None:
                self._nodes.touch(host, self._facts_of(node).hits)
        for node in chunks if self._keeps else ():
            known = self._facts_of(node)
            if not is_later_turn and not self._is_worth_it(
                hits=known.hits, promoted=known.promoted
            ):
                return
            is_wanted = known.host is None or self._lacks_text(node, known.host)
            if is_wanted and len(self._waiting) < self._max_waiting:
                self._waiting[node] = None

    def takes(self, node: Any) -> bool:
        """Whether host memory has the node with its chain, or is about to."""
        return self._facts_of(node).host is not None or node in self._waiting

    def save_some(self) -> Iterator[tuple[Node, Any]]:
        """Save some of what waits. Yields each node: what is saved next may evict it."""
        most = self._counts.saved_tokens + self._save_tokens()
        while self._waiting and self._counts.saved_tokens < most:
            node = self._waiting.popitem(last=False)[0]
            if (host := self._save(node)) is not None:
                yield host, node

    def reset(self) -> None:
        self._waiting.clear()
        self._turned_away.clear()

    # For subclasses

    def _is_worth_it(self, *, hits: int, promoted: bool) -> bool:
        """Whether a node is kept whose parent is: `hits` requests have found it cached."""
        return hits > 0 or promoted

    def _place(self, node: Any) -> ChainPlace | None:
        """Of the node. None: it has left the tree."""
        raise NotImplementedError

    def _lacks_text(self, node: Any, host: Node) -> bool:
        """Whether the tokens before the node's first chunk are not here although it is."""
        return False

    def _precede(self, node: Any) -> None:
        """Save the tokens before the node's first chunk, if there are any and they are not here."""

    def _source(self, node: Any) -> Any:
        """The node's KV, whose length is its number of tokens."""
        raise NotImplementedError

    def _copy(self, source: Any, host: Node) -> bool:
        """Copy KV. False: it failed, and the node was dropped."""
        raise NotImplementedError

    def _copied(self, place: ChainPlace, source: Any) -> Node | None:
        """A new node with a copy of that KV. None: it does not fit, or the copy failed."""
        host = self._nodes.add(place, len(source))
        if host is None or not self._copy(source, host) or not self._nodes.keep(host):
            return None
        self._counts.saved_tokens += len(source)
        return host

    # Private

    def _save(self, node: Any) -> Node | None:
        """None: it has been saved before, or is missed."""
        known = self._facts_of(node)
        if known.host is not None:
            # else others may have its slots by now
            if self._lacks_text(node, known.host) and self._place(node) is not None:
                self._precede(node)
            return None
        if (place := self._place(node)) is not None:
            host = self._nodes.get(place.chain_key)
            if host is None and self._may_displace(place, source := self._source(node), known):
                self._precede(node)
                host = self._copied(place, source)
            known.host = host if host is not None and host.is_here else None
        found: Node | None = known.host
        if found is None:
            self._counts.missed += 1
            return None
        found.chain, found.node = known.chain, node
        self._nodes.touch(found, known.hits)
        self._nodes.index.held.learn(found, known.scores, known.outward)
        return found

    def _may_displace(self, place: ChainPlace, source: Any, known: Any) -> bool:
        pool, index = self._nodes.pool, self._nodes.index
        if not self._only_lost or len(source) <= pool.num_free:
            return True
        if place.chain_key in self._turned_away and not known.is_turned_away:
            del self._turned_away[place.chain_key]
            return True
        index.turned_away(len(source) * pool.token_bytes)
        known.is_turned_away, self._turned_away[place.chain_key] = True, None
        while len(self._turned_away) > len(index.held):
            self._turned_away.popitem(last=False)
        return False
