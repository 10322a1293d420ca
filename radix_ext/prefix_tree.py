"""The global chunk-prefix tree (CRAFT 4.1): which chains of chunks the ranks hold, as far as the
front process knows.

It holds metadata only, no KV, and mirrors the ranks' own trees from the events in their answers. A
wrong mirror costs speed, never correctness, so a notice about an unknown chain is ignored and
counted.

```
namespace "a" ── C1 ─┬─ C2 ── C5   one node is one chunk after one particular chain
                     └─ C4         a node's path, root downward, is the chain; ChainId finds it
```
Invariants (`check_integrity`): what a rank holds or plans below a node, it holds or plans at the
node; a node that no rank holds or plans does not exist; a parent was used no earlier than its
children, so the least recently used node is a leaf.

`held` nodes have KV on some rank. `planned` ones belong to requests under way; they influence the
order only and vanish when the request ends, unless a rank holds them by then.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from radix_ext.chain_node import (
    PLAN_BITS,
    ChainNode,
    Tier,
    held_mask,
    node_as_json,
    node_violations,
)
from radix_ext.chunk import ChainId, Chunk, ChunkId, extend_chain, root_chain
from radix_ext.errors import IntegrityError, LimitError, check_at_least


class Plan:
    """A request under way: the chain that `rank` will hold once it has served the request.
    End it once, by `cancel`."""

    __slots__ = ("is_open", "node", "rank")

    def __init__(self, rank: int, node: ChainNode | None) -> None:
        self.rank = rank
        self.node = node
        self.is_open = True


class HeldStats(NamedTuple):
    """What one rank holds in one tier."""

    rank: int
    tier: str
    num_nodes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TreeStats:
    """A tree at one moment; `num_hits` and what follows are counters that run since the tree was
    made."""

    num_nodes: int
    num_promoted: int
    num_namespaces: int
    num_open_plans: int
    held: tuple[HeldStats, ...]
    num_hits: int
    num_trimmed: int
    num_unknown_notices: int
    num_collisions: int


class ChunkPrefixTree:
    """The mirror: at most `max_nodes` nodes besides planned ones, the least recently used leaves
    are forgotten first.

    Ranks are small integers from 0; chunk lists are the whole chain from the root of the namespace.
    Every operation is O(chain) dict steps except `drop_rank`, `snapshot` and `check_integrity`, and
    `evict`, which is O(nodes dropped).

    Raises (all methods):
        LimitError: a negative rank, or max_nodes < 1.
    """

    def __init__(self, *, max_nodes: int) -> None:
        check_at_least("max_nodes", max_nodes, 1)
        self.max_nodes = max_nodes
        self._roots: dict[str, ChainNode] = {}
        self._nodes: dict[ChainId, ChainNode] = {}
        # Circular list through all nodes, least recently used first: _ends.newer is the oldest,
        # _ends.older the newest.
        self._ends = ChainNode(ChainId(0), ChunkId(""), 0, None)
        self._newest: ChainNode | None = None
        """The last node of the path that was used last."""
        self._clock = 0
        self._held: dict[tuple[int, int], list[int]] = {}
        self._digests: dict[int, int] = {}
        self._num_promoted = self._num_open_plans = 0
        self._num_hits = self._num_trimmed = self._num_unknown_notices = self._num_collisions = 0

    @property
    def clock(self) -> int:
        """Number of the last request."""
        return self._clock

    def __len__(self) -> int:
        """Nodes, planned ones included, roots not."""
        return len(self._nodes)

    def root(self, namespace: str) -> ChainNode | None:
        """Where the chains of a namespace begin, None if there are none."""
        return self._roots.get(namespace)

    @property
    def roots(self) -> tuple[ChainNode, ...]:
        """Where chains begin, one for each namespace that has some. O(namespaces)."""
        return tuple(self._roots.values())

    def find(self, chain: ChainId) -> ChainNode | None:
        """The node at the end of a chain, held or planned."""
        return self._nodes.get(chain)

    def match(
        self, namespace: str, ids: Iterable[ChunkId], *, rank: int | None = None
    ) -> tuple[ChainNode, ...]:
        """Longest leading run of `ids` that this rank (None: any one rank) holds, as nodes. Changes
        nothing.

        A prefix of a longer chain matches too (CRAFT's "prefix slicing").
        """
        mask, nodes, node = held_mask(rank), [], self._roots.get(namespace)
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
        self._check_rank(rank)
        path = self._reach(namespace, chunks)
        self._hold(path, rank, tier, promoted_len, len(path) if hit_len is None else hit_len)
        self._trim()
        return self._nodes.get(path[-1].chain) if path else None

    def extend(
        self, chain: ChainId, chunks: Sequence[Chunk], *, rank: int, tier: Tier, promoted_len: int
    ) -> ChainNode | None:
        """Like `insert`, for a chain that goes on from a known one by `chunks`; `promoted_len`
        counts in these.

        None, counted as an unknown notice, if the rank does not hold `chain`.
        """
        base = self._held_node(chain, rank)
        if base is None:
            return None
        path = self._descend(base, chunks)
        self._hold(path, rank, tier, promoted_len, len(path))
        # as a chain that is told node by node: what is above was used last
        if base is self._newest:
            self._touch(path, below=base)
        else:
            self._touch((*base.path(), *path))
        self._trim()
        return self._nodes.get((path[-1] if path else base).chain)

    def mark_promoted(self, namespace: str, ids: Iterable[ChunkId], *, promoted_len: int) -> None:
        """Set the marks along a chain as `insert` would:
        promoted before `promoted_len`, not promoted from there on."""
        node = self._roots.get(namespace)
        for index, chunk in enumerate(ids):
            node = node.child(chunk) if node is not None else None
            if node is None:
                break
            self._mark(node, index < promoted_len)

    def plan(self, namespace: str, chunks: Sequence[Chunk], *, rank: int) -> Plan:
        """A request with this chain is under way to `rank`.
        Its nodes exist from now on, as planned."""
        self._check_rank(rank)
        path = self._reach(namespace, chunks)
        for node in path:
            node.plans += 1 << PLAN_BITS * rank
        # Only now may the tree be trimmed: planned nodes stay, these among them.
        self._num_open_plans += 1
        self._trim()
        return Plan(rank, path[-1] if path else None)

    def cancel(self, plan: Plan) -> None:
        """The request was answered, failed or was aborted: nodes that only it planned and no rank
        holds vanish.

        A plan cancelled before: no effect.
        """
        if not plan.is_open:
            return
        plan.is_open = False
        self._num_open_plans -= 1
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
        path = plan.node.path()[:num_chunks] if plan.node is not None else ()
        for node in path:
            node.hits += 1
        self._num_hits += len(path)

    def count_use(self, node: ChainNode) -> None:
        """The node's KV was read for a prompt that has the chunk elsewhere:
        the latest access, and no hit."""
        self._touch(node.path(), is_request=False)

    def evict(self, chain: ChainId, *, rank: int) -> int:
        """`rank` no longer holds this chain, nor any node below it.
        Returns the number of nodes it lost."""
        top = self._held_node(chain, rank)
        if top is None:
            return 0
        lost = [top]
        for node in lost:  # grows meanwhile
            if node.children is not None:
                lost += [child for child in node.child_nodes() if child.is_held(rank)]
        for node in lost:
            self._set_tier(node, rank, 0)
        self._drop_unused(lost)
        return len(lost)

    def move(self, chain: ChainId, *, rank: int, tier: Tier) -> bool:
        """`rank` keeps this one node's KV in `tier` from now on.
        False, and counted, if it does not hold the chain."""
        node = self._held_node(chain, rank)
        if node is None:
            return False
        self._set_tier(node, rank, tier)
        return True

    def drop_rank(self, rank: int) -> int:
        """`rank` lost everything (flush, restart, missed notices) but its plans.
        Returns the number of nodes it lost."""
        self._check_rank(rank)
        # Parents before children, as `_drop_unused` needs them: a parent was used no earlier.
        lost = [node for node in self._newest_first() if node.is_held(rank)]
        for node in lost:
            self._set_tier(node, rank, 0)
        self._drop_unused(lost)
        return len(lost)

    @property
    def stats(self) -> TreeStats:
        """Sizes and counters, O(ranks)."""
        held = (
            HeldStats(rank, Tier(tier).name.lower(), nodes, tokens)
            for (rank, tier), (nodes, tokens) in sorted(self._held.items())
            if nodes
        )
        return TreeStats(
            num_nodes=len(self._nodes),
            num_promoted=self._num_promoted,
            num_namespaces=len(self._roots),
            num_open_plans=self._num_open_plans,
            held=tuple(held),
            num_hits=self._num_hits,
            num_trimmed=self._num_trimmed,
            num_unknown_notices=self._num_unknown_notices,
            num_collisions=self._num_collisions,
        )

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the nodes that a rank holds, summed over ranks and tiers. O(ranks)."""
        return sum(num_tokens for _, num_tokens in self._held.values())

    def held(self, rank: int, tier: Tier) -> tuple[int, int]:
        """(nodes, tokens) that this rank holds in this tier. O(1)."""
        num_nodes, num_tokens = self._held.get((rank, tier), (0, 0))
        return num_nodes, num_tokens

    def digest(self, rank: int) -> tuple[int, int]:
        """(number of nodes this rank holds, exclusive or of their chain ids):
        equal digests, equal trees. O(1)."""
        num_nodes = sum(nodes for (held_by, _), (nodes, _) in self._held.items() if held_by == rank)
        return num_nodes, self._digests.get(rank, 0)

    def snapshot(self, *, depth: int, max_nodes: int) -> dict[str, object]:
        """The first `depth` levels, at most `max_nodes` nodes, level by level, as JSON-able data.

        Each node: chunk, tokens, hits, promoted, planned, ranks {rank: tier}, num_children,
        children.
        """
        namespaces: list[dict[str, object]] = []
        pending: deque[tuple[ChainNode, list[dict[str, object]], int]] = deque()
        for namespace, root in islice(self._roots.items(), max_nodes):
            below: list[dict[str, object]] = []
            namespaces.append({"namespace": namespace, "children": below})
            pending.append((root, below, depth))
        num_left = max_nodes
        while pending:
            node, shown, levels = pending.popleft()
            for child in node.child_nodes()[: num_left if levels > 0 else 0]:
                num_left -= 1
                below = []
                shown.append(node_as_json(child, below))
                pending.append((child, below, levels - 1))
        return {
            "num_nodes": len(self._nodes),
            "num_namespaces": len(self._roots),
            "num_shown": max_nodes - num_left,
            "namespaces": namespaces,
        }

    def check_integrity(self) -> None:
        """Check every invariant and counter; O(nodes), for tests and idle moments.

        Raises:
            IntegrityError: with all violations.
        """
        violations = list(self._violations())
        if violations:
            raise IntegrityError(violations)

    def _reach(self, namespace: str, chunks: Sequence[Chunk]) -> list[ChainNode]:
        """The chain's nodes, made where missing and marked as just used.
        Ends early where a chain id collides."""
        root = self._roots.get(namespace)
        if root is None:
            root = ChainNode(root_chain(namespace), ChunkId(namespace), 0, None)
        path = self._descend(root, chunks)
        # A root goes with its last child, so one without any would stay for ever.
        if path:
            self._roots[namespace] = root
        self._touch(path)
        return path

    def _descend(self, node: ChainNode, chunks: Sequence[Chunk]) -> list[ChainNode]:
        path = []
        for chunk in chunks:
            child = node.child(chunk.id) or self._create(node, chunk)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _create(self, parent: ChainNode, chunk: Chunk) -> ChainNode | None:
        chain = extend_chain(parent.chain, chunk.id)
        # Another path's node has the id: without its entry it could be neither found nor trimmed.
        if chain in self._nodes:
            self._num_collisions += 1
            return None
        node = ChainNode(chain, chunk.id, chunk.num_tokens, parent)
        self._nodes[chain] = node
        siblings = parent.children
        if siblings is None:
            parent.children = node
        elif isinstance(siblings, dict):
            siblings[node.chunk_id] = node
        else:
            parent.children = {siblings.chunk_id: siblings, node.chunk_id: node}
        return node

    def _hold(
        self, path: Sequence[ChainNode], rank: int, tier: Tier, promoted_len: int, hit_len: int
    ) -> None:
        mask = held_mask(rank)
        for index, node in enumerate(path):
            if index < hit_len and node.tiers & mask:
                node.hits += 1
                self._num_hits += 1
            self._set_tier(node, rank, tier)
            # Taken back as well: the window may have forgotten what had promoted the node.
            self._mark(node, index < promoted_len)

    def _mark(self, node: ChainNode, promoted: bool) -> None:
        if promoted is not node.promoted:
            self._num_promoted += promoted - node.promoted
            node.promoted = promoted

    def _set_tier(self, node: ChainNode, rank: int, tier: int) -> None:
        """The one place that writes `tiers`; 0 for not held."""
        old = node.tiers >> 2 * rank & 3
        if tier == old:
            return
        node.tiers += (tier - old) << 2 * rank
        if not old or not tier:
            # Exclusive or undoes itself and knows no order, so a digest costs O(1) a change.
            self._digests[rank] = self._digests.get(rank, 0) ^ node.chain
        if old:
            self._count_held((rank, old), -1, -node.num_tokens)
        if tier:
            self._count_held((rank, tier), 1, node.num_tokens)

    def _count_held(self, key: tuple[int, int], num_nodes: int, num_tokens: int) -> None:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = [0, 0]
        held[0] += num_nodes
        held[1] += num_tokens

    def _held_node(self, chain: ChainId, rank: int) -> ChainNode | None:
        self._check_rank(rank)
        node = self._nodes.get(chain)
        if node is None or not node.is_held(rank):
            self._num_unknown_notices += 1
            return None
        return node

    def _touch(
        self, path: Sequence[ChainNode], *, is_request: bool = True, below: ChainNode | None = None
    ) -> None:
        """Make these nodes, given parents first, the most recently used; parents end up newer than
        their children.

        `below`: the last node of the path that was touched last, which the nodes follow. It stays
        newer, with what is above it.
        """
        if below is None:
            self._clock += is_request  # a copied source is as recent as the request, and is none
        newer = self._ends if below is None else below
        for node in path:
            node.last_access = self._clock
            node.older.newer, node.newer.older = node.newer, node.older
            node.older, node.newer = newer.older, newer
            newer.older.newer = newer.older = node  # from left to right: the old neighbour first
            newer = node
        self._newest = path[-1] if path else None

    def _trim(self) -> None:
        """Forget least recently used unplanned nodes while there are too many;
        each is a leaf when its turn comes."""
        node = self._ends.newer
        while len(self._nodes) > self.max_nodes and node is not self._ends:
            newer = node.newer  # read before `_remove` unlinks the node
            if not node.plans:
                for rank, _ in tuple(node.held_by()):
                    self._set_tier(node, rank, 0)
                self._remove(node)
                self._num_trimmed += 1
            node = newer

    def _drop_unused(self, nodes: Sequence[ChainNode]) -> None:
        """Remove those of `nodes`, parents before children, that no rank holds or plans any
        more."""
        for node in reversed(nodes):
            if not node.tiers and not node.plans:
                self._remove(node)

    def _remove(self, node: ChainNode) -> None:
        """Unlink a leaf that no rank holds or plans."""
        assert node.children is None
        assert node.parent is not None
        self._mark(node, False)
        del self._nodes[node.chain]
        node.older.newer, node.newer.older = node.newer, node.older
        # pointing at itself it would wait for the garbage collector
        node.older = node.newer = self._ends
        parent = node.parent
        siblings = parent.children
        if isinstance(siblings, dict):
            del siblings[node.chunk_id]
            # Back to the short form: else each node that ever had two children would keep a dict.
            if len(siblings) == 1:
                parent.children = next(iter(siblings.values()))
        else:
            parent.children = None
            if parent.parent is None:
                del self._roots[parent.chunk_id]

    def _newest_first(self) -> Iterator[ChainNode]:
        node = self._ends.older
        while node is not self._ends:
            yield node
            node = node.older

    def _violations(self) -> Iterator[str]:
        reached: set[ChainId] = set()
        tallies: dict[tuple[int, int], list[int]] = {}
        pending = list(self._roots.values())
        for namespace, root in self._roots.items():
            if root.children is None or root.chain != root_chain(namespace):
                yield f"root {namespace!r} is empty or misnamed"
        while pending:
            parent = pending.pop()
            for node in parent.child_nodes():
                reached.add(node.chain)
                pending.append(node)
                yield from node_violations(node, parent)
                for rank, tier in node.held_by():
                    tally = tallies.setdefault((rank, tier), [0, 0])
                    tally[0] += 1
                    tally[1] += node.num_tokens
        if reached != self._nodes.keys():
            yield f"{len(reached)} nodes are below the roots but {len(self._nodes)} are indexed"
        listed = [node.chain for node in self._newest_first()]
        if len(listed) != len(reached) or set(listed) != reached:
            yield (
                f"{len(reached)} nodes are below the roots but {len(listed)} are in the order"
                " of use"
            )
        counted = {key: held for key, held in self._held.items() if held[0] or held[1]}
        if tallies != counted:
            yield f"held nodes and tokens are {tallies} but were counted as {counted}"
        for rank, digest in self._digests.items():
            found = 0
            for node in self._nodes.values():
                found ^= node.chain if node.is_held(rank) else 0
            if found != digest:
                yield f"the digest of rank {rank} is {found} but was counted as {digest}"
        num_promoted = sum(node.promoted for node in self._nodes.values())
        if num_promoted != self._num_promoted:
            yield f"{num_promoted} nodes are promoted but {self._num_promoted} were counted"
        num_unplanned = sum(not node.plans for node in self._nodes.values())
        if len(self._nodes) > self.max_nodes and num_unplanned:
            yield (
                f"{len(self._nodes)} nodes exceed {self.max_nodes} and {num_unplanned} of them"
                " could go"
            )

    @staticmethod
    def _check_rank(rank: int) -> None:
        if rank < 0:
            raise LimitError(f"rank must be at least 0 but got {rank}")
