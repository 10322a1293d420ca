"""In which order a request's chunks go into the prompt, so that as many as possible continue a cached chain.

```
retriever   as the retriever ranked them
frequency   descending count in the access table, ties by rank (CRAFT 4.2)
tree        the deepest cached chain made of this request's chunks only, then the rest by `tail`:
            seen       chunks that the window has seen first, by rank among them and among the others; of a fused request
                       only those that its exact chain grows by come before what the window has not seen (invest.py)
            rank       as the retriever ranked them
            frequency  descending count, ties by rank
```
The search for the deepest chain goes level by level and looks into at most `max_visits` nodes. Where that is enough
it is exact. On larger trees each level keeps the nodes with most hits, and some chain is always followed to its end.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from radix_ext.access_table import AccessTable
from radix_ext.chain_node import ChainNode, held_mask, planned_mask
from radix_ext.chunk import Chunk, ChunkId
from radix_ext.errors import ChunkError, check_at_least, check_choice
from radix_ext.invest import Growth
from radix_ext.prefix_tree import ChunkPrefixTree

OrderPolicy = Literal["retriever", "frequency", "tree"]
TailPolicy = Literal["seen", "rank", "frequency"]
ORDER_POLICIES: tuple[OrderPolicy, ...] = get_args(OrderPolicy)
TAIL_POLICIES: tuple[TailPolicy, ...] = get_args(TailPolicy)

_LEVEL_SHARE = 4  # a level may spend a quarter of the visits left, so that deep levels get some too


class Ordering(NamedTuple):
    """A decision: `chunks[:held_len]` are held, the next `planned_len` are only planned by requests under way."""

    chunks: tuple[Chunk, ...]
    held_len: int
    planned_len: int
    held_tokens: int
    planned_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that need no computing if every plan comes true; what a router compares."""
        return self.held_tokens + self.planned_tokens


def order_chunks(
    policy: OrderPolicy,
    tail: TailPolicy,
    tree: ChunkPrefixTree,
    table: AccessTable,
    namespace: str,
    chunks: Sequence[Chunk],
    *,
    rank: int | None,
    max_visits: int,
    growth: Growth | None = None,
) -> Ordering:
    """Order one request's chunks, given in retriever order, for `rank` (None: any). Changes neither tree nor table.

    `tail` matters for `tree` only. Of equally long chains (tokens, then chunks) the one that prefers the retriever's
    first wins. `table` must not yet have observed this request, or all of its chunks would count as seen. `growth` matters for
    the tail `seen` only; None: an exact request.

    Raises:
        PolicyError: unknown policy or tail.
        ChunkError: a chunk twice in one request.
        LimitError: max_visits < 1.
    """
    check_choice("policy", policy, ORDER_POLICIES)
    check_choice("tail", tail, TAIL_POLICIES)
    by_id = {chunk.id: chunk for chunk in chunks}
    if len(by_id) != len(chunks):
        raise ChunkError(f"the chunks of a request must differ but {len(chunks) - len(by_id)} are repeated")
    path: Sequence[ChainNode]
    if policy == "tree":
        path = longest_chain(tree, namespace, tuple(by_id), rank=rank, max_visits=max_visits)
        ordered = [by_id.pop(node.chunk_id) for node in path]
        ordered += _tail(tail, list(by_id.values()), table, growth)
    else:
        ordered = _by_frequency(chunks, table) if policy == "frequency" else list(chunks)
        path = _usable_path(tree, namespace, ordered, rank)
    return _ordering(ordered, path, rank)


def order_per_rank(
    policy: OrderPolicy,
    tail: TailPolicy,
    tree: ChunkPrefixTree,
    table: AccessTable,
    namespace: str,
    chunks: Sequence[Chunk],
    *,
    ranks: Iterable[int],
    max_visits: int,
    growth: Growth | None = None,
) -> dict[int, Ordering]:
    """The ordering each rank would get: a router compares their `cached_tokens`, the chosen one is ready for use."""
    return {
        rank: order_chunks(
            policy, tail, tree, table, namespace, chunks, rank=rank, max_visits=max_visits, growth=growth
        )
        for rank in ranks
    }


def longest_chain(
    tree: ChunkPrefixTree, namespace: str, ids: Sequence[ChunkId], *, rank: int | None, max_visits: int
) -> tuple[ChainNode, ...]:
    """The chain of held or planned nodes, made only of `ids` (in retriever order), with most tokens, then most chunks.

    Looks into at most max(max_visits, len(ids)) nodes; exact unless a level had to be narrowed for that.

    Raises:
        LimitError: max_visits < 1.
    """
    check_at_least("max_visits", max_visits, 1)
    root = tree.root(namespace)
    if root is None:
        return ()
    held, planned = held_mask(rank), planned_mask(rank)
    rank_of = {chunk: position for position, chunk in enumerate(ids)}
    best, best_tokens, best_len = root, 0, 0
    # One level of the search: (node, bit set of the positions used on the way, tokens on the way), in retriever order.
    level = [(root, 0, 0)]
    depth, visits_left = 0, max_visits
    while level and depth < len(ids):
        width = max(1, (visits_left - (len(ids) - depth)) // _LEVEL_SHARE)
        if len(level) > width:
            level = _most_hit(level, width)
        visits_left -= len(level)
        depth += 1
        below = []
        for node, used, tokens in level:
            for position, child in _children_among(node, rank_of, ids):
                if used >> position & 1 or not (child.tiers & held or child.plans & planned):
                    continue
                child_tokens = tokens + child.num_tokens
                if child.children is not None:
                    below.append((child, used | 1 << position, child_tokens))
                if child_tokens > best_tokens or (child_tokens == best_tokens and depth > best_len):
                    best, best_tokens, best_len = child, child_tokens, depth
        level = below
    return best.path()


def _children_among(
    node: ChainNode, rank_of: dict[ChunkId, int], ids: Sequence[ChunkId]
) -> list[tuple[int, ChainNode]]:
    """(position in `ids`, child) for each child whose chunk is in the request, by position."""
    children = node.children
    if children is None:
        return []
    if isinstance(children, ChainNode):
        position = rank_of.get(children.chunk_id)
        return [] if position is None else [(position, children)]
    if len(children) < len(ids):
        among = [(rank_of[chunk], child) for chunk, child in children.items() if chunk in rank_of]
        among.sort(key=_position)
        return among
    return [(position, children[chunk]) for position, chunk in enumerate(ids) if chunk in children]


def _position(item: tuple[int, ChainNode]) -> int:
    return item[0]


def _most_hit(level: list[tuple[ChainNode, int, int]], width: int) -> list[tuple[ChainNode, int, int]]:
    """The `width` entries with most hits, still in retriever order: many requests through a node, much below it."""
    kept = sorted(range(len(level)), key=lambda index: -level[index][0].hits)[:width]
    return [level[index] for index in sorted(kept)]


def _tail(tail: TailPolicy, chunks: list[Chunk], table: AccessTable, growth: Growth | None) -> list[Chunk]:
    if tail == "seen" and growth is not None:
        return growth.tail(chunks, table)
    if tail == "seen":
        return sorted(chunks, key=lambda chunk: table.count(chunk.id) == 0)
    return _by_frequency(chunks, table) if tail == "frequency" else chunks


def _by_frequency(chunks: Sequence[Chunk], table: AccessTable) -> list[Chunk]:
    return sorted(chunks, key=lambda chunk: -table.count(chunk.id))


def _usable_path(tree: ChunkPrefixTree, namespace: str, chunks: Sequence[Chunk], rank: int | None) -> list[ChainNode]:
    """Leading run of this very order that is held or planned."""
    held, planned = held_mask(rank), planned_mask(rank)
    path: list[ChainNode] = []
    node = tree.root(namespace)
    for chunk in chunks:
        node = node.child(chunk.id) if node is not None else None
        if node is None or not (node.tiers & held or node.plans & planned):
            break
        path.append(node)
    return path


def _ordering(ordered: Sequence[Chunk], path: Sequence[ChainNode], rank: int | None) -> Ordering:
    mask = held_mask(rank)
    held_len = held_tokens = planned_tokens = 0
    for node in path:
        if node.tiers & mask:
            held_len += 1
            held_tokens += node.num_tokens
        else:
            planned_tokens += node.num_tokens
    return Ordering(tuple(ordered), held_len, len(path) - held_len, held_tokens, planned_tokens)
