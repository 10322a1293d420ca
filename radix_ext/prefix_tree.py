"""The global chunk-prefix tree (CRAFT 4.1): which chains of chunks the ranks hold, as far as the
front process knows.

It mirrors the ranks' own trees from the events in their answers. A wrong mirror costs speed, never
correctness, so a notice about an unknown chain is ignored and counted.

```
namespace "a" ── C1 ─┬─ C2 ── C5   one node is one chunk after one particular chain
                     └─ C4         a node's path, root downward, is the chain; ChainId finds it
```
Invariants: what a rank holds or plans below a node, it holds or plans at the node; a node that no
rank holds or plans does not exist; a parent was used no earlier than its children, so the least
recently used node is a leaf.

`held` nodes have KV on some rank. `planned` ones belong to requests under way; they influence the
order only and vanish when the request ends, unless a rank holds them by then. `promoted` ones begin
a chain whose chunks so far were all retrieved often of late (`AccessTable.promoted_run`, CRAFT
4.2).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from radix_ext.chain_node import PLAN_BITS, ChainNode, Tier, held_mask
from radix_ext.chunk import ChainId, Chunk, ChunkId
from radix_ext.chunk_trie import ChunkTrie
from radix_ext.holdings import Holdings
from radix_ext.lru_list import LruList


@dataclass(slots=True, eq=False)
class Plan:
    """A request under way: the chain that `rank` will hold once it has served the request.
    `ChunkPrefixTree.release` ends it, however the request ends."""

    rank: int
    node: ChainNode | None
    is_open: bool = True


class ChunkPrefixTree:
    """The mirror: at most `max_nodes` nodes besides planned ones, the least recently used leaves
    are forgotten first. Others read `nodes` and `holdings`, the tree changes them.

    Ranks are small integers from 0; chunk lists are the whole chain from the root of the namespace.
    Every operation is O(chain) dict steps except `drop_rank`, O(nodes), and `evict`, O(nodes
    dropped). Trimming is O(ranks) a forgotten node, and a step for each older planned one.
    """

    def __init__(self, *, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.clock = 0  # number of the last request
        self.nodes, self.holdings, self._lru = ChunkTrie(), Holdings(), LruList()
        self.num_promoted = self.num_open_plans = 0
        self.num_trimmed = self.num_unknown_notices = 0  # since the tree was made

    def match(
        self, namespace: str, ids: Iterable[ChunkId], *, rank: int | None = None
    ) -> tuple[ChainNode, ...]:
        """Longest leading run of `ids` that this rank (None: any one rank) holds, as nodes. Changes
        nothing.

        A prefix of a longer chain matches too (CRAFT's "prefix slicing").
        """
        mask, nodes, node = held_mask(rank), [], self.nodes.root(namespace)
        for chunk in ids:
            node = node.child(chunk) if node is not None else None
            if node is None or not node.tiers & mask:
                break
            nodes.append(node)
        return tuple(nodes)

    def insert(
        self,
        namespace: str,
        chunks: Sequence[Chunk],
        *,
        rank: int,
        tier: Tier,
        promoted_len: int,
        hit_len: int | None = None,
    ) -> ChainNode | None:
        """`rank` now holds this whole chain in `tier`; the first `promoted_len` nodes are promoted,
        the others are not.

        Nodes that the rank held before count a hit, if they are among the first `hit_len` (None:
        all). Returns the chain's last node; None for an empty chain, or if trimming already forgot
        it.
        """
        path = self._use(namespace, chunks)
        self._hold(path, rank, tier, promoted_len, len(path) if hit_len is None else hit_len)
        self._trim()
        return self.nodes.by_chain.get(path[-1].chain) if path else None

    def extend(
        self,
        chain: ChainId,
        chunks: Sequence[Chunk],
        *,
        rank: int,
        tier: Tier,
        promoted_len: int,
        is_used: bool = True,
    ) -> ChainNode | None:
        """Like `insert`, for a chain that goes on from a known one by `chunks`; `promoted_len`
        counts in these. `is_used`: by a request.

        None, counted as an unknown notice, if the rank does not hold `chain`.
        """
        base = self._held_node(chain, rank)
        if base is None:
            return None
        path = self.nodes.descend(base, chunks)
        self._hold(path, rank, tier, promoted_len, len(path))
        # Most chains arrive node by node: what is above the new node was used last already.
        if base is self._lru.last or not is_used:
            self._lru.touch(path, base.last_access, below=base)
        else:
            self.clock += 1
            self._lru.touch((*base.path(), *path), self.clock)
        self._trim()
        return self.nodes.by_chain.get((path[-1] if path else base).chain)

    def mark_promoted(self, namespace: str, ids: Iterable[ChunkId], *, promoted_len: int) -> None:
        """Set the marks along a chain as `insert` would."""
        node = self.nodes.root(namespace)
        for index, chunk in enumerate(ids):
            node = node.child(chunk) if node is not None else None
            if node is None:
                break
            self._mark(node, index < promoted_len)

    def plan(self, namespace: str, chunks: Sequence[Chunk], *, rank: int) -> Plan:
        """A request with this chain is under way to `rank`: its nodes exist, as planned."""
        path = self._use(namespace, chunks)
        for node in path:
            node.plans += 1 << PLAN_BITS * rank
        # Only now may the tree be trimmed: planned nodes stay, these among them.
        self.num_open_plans += 1
        self._trim()
        return Plan(rank, path[-1] if path else None)

    def release(self, plan: Plan) -> None:
        """End the plan of a request that was answered, failed or was aborted: nodes that only it
        planned and no rank holds vanish.

        A plan released before: no effect.
        """
        if not plan.is_open:
            return
        plan.is_open = False
        self.num_open_plans -= 1
        if plan.node is not None:
            path = plan.node.path()
            for node in path:
                node.plans -= 1 << PLAN_BITS * plan.rank
            # Planned nodes may exceed the bound; of these, what a rank holds now counts against it.
            self._drop_unused(path)
            self._trim()

    def count_hits(self, plan: Plan, num_chunks: int) -> None:
        """The request found its first `num_chunks` cached: they count a hit each."""
        # The path is whole: what is planned is not trimmed.
        for node in plan.node.path()[:num_chunks] if plan.node is not None else ():
            node.hits += 1

    def touch(self, node: ChainNode) -> None:
        """The node's KV was read for a prompt that has the chunk elsewhere: its chain is the most
        recently used one. No hit and no request is counted."""
        self._lru.touch(node.path(), self.clock)

    def evict(self, chain: ChainId, *, rank: int) -> int:
        """`rank` no longer holds this chain, nor what is below it. How many nodes it lost."""
        top = self._held_node(chain, rank)
        if top is None:
            return 0
        lost = [top]
        for node in lost:  # grows meanwhile
            if node.children is not None:
                lost += [child for child in node.child_nodes() if child.is_held(rank)]
        for node in lost:
            self.holdings.set_tier(node, rank, 0)
        self._drop_unused(lost)
        return len(lost)

    def move(self, chain: ChainId, *, rank: int, tier: Tier) -> bool:
        """`rank` keeps this one node in `tier` now. False, and counted: it does not hold it."""
        node = self._held_node(chain, rank)
        if node is None:
            return False
        self.holdings.set_tier(node, rank, tier)
        return True

    def drop_rank(self, rank: int) -> int:
        """`rank` lost everything (flush, restart, missed notices) but its plans. How many nodes."""
        # Parents before children, as `_drop_unused` needs them: a parent was made first.
        lost = [node for node in self.nodes.by_chain.values() if node.is_held(rank)]
        for node in lost:
            self.holdings.set_tier(node, rank, 0)
        self._drop_unused(lost)
        return len(lost)

    def _use(self, namespace: str, chunks: Sequence[Chunk]) -> list[ChainNode]:
        """The chain's nodes, made where missing, as used by a new request."""
        path = self.nodes.reach(namespace, chunks)
        self.clock += 1
        self._lru.touch(path, self.clock)
        return path

    def _hold(
        self, path: Sequence[ChainNode], rank: int, tier: Tier, promoted_len: int, hit_len: int
    ) -> None:
        mask, set_tier = held_mask(rank), self.holdings.set_tier
        for index, node in enumerate(path):
            if index < hit_len and node.tiers & mask:
                node.hits += 1
            set_tier(node, rank, tier)
            # Taken back as well: the window may have forgotten what had promoted the node.
            self._mark(node, index < promoted_len)

    def _mark(self, node: ChainNode, promoted: bool) -> None:
        if promoted is not node.promoted:
            self.num_promoted += promoted - node.promoted
            node.promoted = promoted

    def _held_node(self, chain: ChainId, rank: int) -> ChainNode | None:
        node = self.nodes.by_chain.get(chain)
        if node is None or not node.is_held(rank):
            self.num_unknown_notices += 1
            return None
        return node

    def _trim(self) -> None:
        """Forget the oldest unplanned nodes while there are too many. Each is a leaf by then."""
        if len(self.nodes.by_chain) <= self.max_nodes:
            return
        for node in self._lru.oldest_first():
            if not node.plans:
                for rank, _ in node.held_by():
                    self.holdings.set_tier(node, rank, 0)
                self._remove(node)
                self.num_trimmed += 1
                if len(self.nodes.by_chain) <= self.max_nodes:
                    return

    def _drop_unused(self, nodes: Sequence[ChainNode]) -> None:
        """Remove those (parents before children) that no rank holds or plans any more."""
        for node in reversed(nodes):
            if not node.tiers and not node.plans:
                self._remove(node)

    def _remove(self, node: ChainNode) -> None:
        """Unlink a leaf that no rank holds or plans."""
        if node.promoted:
            self._mark(node, False)
        self._lru.remove(node)
        self.nodes.remove(node)


def snapshot(tree: ChunkPrefixTree, *, depth: int, max_nodes: int) -> dict[str, object]:
    """The first `depth` levels, at most `max_nodes` nodes, level by level, as JSON-able data."""
    namespaces: list[dict[str, object]] = []
    pending: deque[tuple[ChainNode, list[dict[str, object]], int]] = deque()
    for root in islice(tree.nodes.roots, max_nodes):
        below: list[dict[str, object]] = []
        namespaces.append({"namespace": root.chunk_id, "children": below})
        pending.append((root, below, depth))
    num_left = max_nodes
    while pending:
        node, shown, levels = pending.popleft()
        for child in node.child_nodes()[: num_left if levels > 0 else 0]:
            num_left -= 1
            below = []
            shown.append(
                {
                    "chunk": child.chunk_id,
                    "tokens": child.num_tokens,
                    "hits": child.hits,
                    "promoted": child.promoted,
                    "planned": child.plans != 0,
                    "num_children": len(child.child_nodes()),
                    "ranks": {str(rank): tier.name.lower() for rank, tier in child.held_by()},
                    "children": below,
                }
            )
            pending.append((child, below, levels - 1))
    return {
        "num_nodes": len(tree.nodes),
        "num_namespaces": len(tree.nodes.roots),
        "num_shown": max_nodes - num_left,
        "namespaces": namespaces,
    }
