"""In which order a request's chunks go into the prompt, so that as many as possible continue a
cached chain.

```
retriever   as the retriever ranked them
frequency   descending count in the access table, ties by rank (CRAFT 4.2)
tree        the deepest cached chain made of this request's chunks only, then the rest: chunks that
            the window has seen first, by rank among them and among the others; of a fused request
            only the one that its exact chain may grow by comes before what the window has not
            seen (exact_growth.py)
```
The search for the deepest chain goes level by level and looks into at most `max_visits` nodes.
Where that is enough it is exact. On larger trees each level keeps the nodes with most hits, and
some chain is always followed to its end.

A request that moves KV by a recipe without the question follows the fused chains of this recipe too
(CRAFT fig. 16), from where the exact chain ends, as a rank matches them:

    namespace ── A ─┬─ B                    an exact request for D, C, B, A   A B, then D C
                    └─ fused C ── fused D   a fused one for D, C, A           A C D
                                            a fused one for D, C, B, A        A B, then D C: exact
                                                                              chunks come first
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Literal, NamedTuple, get_args

from radix_ext.access_table import AccessTable
from radix_ext.chain_node import ChainNode, Tier, held_mask, planned_mask
from radix_ext.chunk import Chunk, ChunkId, fused_chunk
from radix_ext.errors import ChunkError
from radix_ext.exact_growth import growing_tail
from radix_ext.prefix_tree import ChunkPrefixTree

OrderPolicy = Literal["retriever", "frequency", "tree"]
ORDER_POLICIES: tuple[OrderPolicy, ...] = get_args(OrderPolicy)

_EXACT_WORTH = 1 << 32  # of a token, when a fused one counts 1
_WORTH_PARTS = 1 << 10  # worths are integers, so that equally long chains stay equal
_LEVEL_SHARE = 4  # a level may spend a quarter of the visits left, so that deep levels get some too


class Ordering(NamedTuple):
    """A decision: `chunks[:held_len]` are held, the next `planned_len` are only planned by requests
    under way.

    The last `num_fused` of these are expected fused, by the request's recipe, the others exact.
    """

    chunks: tuple[Chunk, ...]
    held_len: int
    planned_len: int
    held_tokens: int
    planned_tokens: int
    num_fused: int
    host_tokens: int  # of the held ones those in host memory, or behind it

    @property
    def cached_tokens(self) -> int:
        """Tokens that need no computing if every plan comes true."""
        return self.held_tokens + self.planned_tokens

    def worth(self, host_worth: float) -> int:
        """What a router compares: `cached_tokens`, one in host memory as `host_worth`."""
        return self.cached_tokens - round((1 - host_worth) * self.host_tokens)


def order_chunks(
    policy: OrderPolicy,
    tree: ChunkPrefixTree,
    table: AccessTable,
    namespace: str,
    chunks: Sequence[Chunk],
    *,
    rank: int | None,
    max_visits: int,
    recipe: str | None = None,
    grows_from: float | None = None,
    host_worth: float = 1.0,
) -> Ordering:
    """Order one request's chunks, given in retriever order, for `rank` (None: any). Changes neither
    tree nor table.

    Args:
        table: without this request, or all of its chunks would count as seen.
        max_visits: nodes that the search looks into, or the number of chunks where that is more.
        recipe: has made the fused chains that the request may follow. None: exact chains alone.
        grows_from: accesses of a chunk that a fused request's exact chain may grow by, infinite if
            by none; matters for `tree`. None: an exact request.
        host_worth: what a token that `rank` has in host memory counts, of one on the device:
            1 - time to load / time to compute it.
    Raises:
        ChunkError: a chunk twice in one request.
    """
    by_id = {chunk.id: chunk for chunk in chunks}
    if len(by_id) != len(chunks):
        raise ChunkError(
            f"the chunks of a request must differ but {len(chunks) - len(by_id)} are repeated"
        )
    fused = {} if recipe is None else {fused_chunk(recipe, chunk.id): chunk.id for chunk in chunks}
    root = tree.nodes.root(namespace)
    path: Sequence[ChainNode]
    if policy == "tree":
        path = _longest_chain(root, tuple(by_id), tuple(fused), rank, max_visits, host_worth)
        ordered = [by_id.pop(fused.get(node.chunk_id, node.chunk_id)) for node in path]
        is_exact = not path or path[-1].chunk_id not in fused
        ordered += _tail(list(by_id.values()), table, grows_from if is_exact else None)
    else:
        ordered = list(chunks)
        if policy == "frequency":
            ordered.sort(key=lambda chunk: -table.count(chunk.id))
        path = _usable_path(root, ordered, rank, recipe)
    mask, on_device = held_mask(rank), None if rank is None else Tier.DEVICE << 2 * rank
    held_len = held_tokens = planned_tokens = host_tokens = 0
    for node in path:
        if tier := node.tiers & mask:
            held_len += 1
            held_tokens += node.num_tokens
            host_tokens += node.num_tokens if on_device not in (None, tier) else 0
        else:
            planned_tokens += node.num_tokens
    planned_len = len(path) - held_len
    num_fused = sum(node.chunk_id in fused for node in path) if fused else 0
    lens = held_len, planned_len, held_tokens, planned_tokens, num_fused, host_tokens
    return Ordering(tuple(ordered), *lens)


# Private, in order of use


def _longest_chain(
    root: ChainNode | None,
    ids: Sequence[ChunkId],
    fused_ids: Sequence[ChunkId],
    rank: int | None,
    max_visits: int,
    host_worth: float,
) -> tuple[ChainNode, ...]:
    """The chain of held or planned nodes, made only of `ids` (in retriever order), with most exact
    tokens, then most tokens, then most chunks; of equal ones that which prefers the retriever's
    first. Exact unless a level had to be narrowed for `max_visits`.

    Args:
        fused_ids: the same chunks as the request's recipe has fused them; none of an exact request.
        host_worth: of any rank (None) all tokens count alike.
    """
    if root is None:
        return ()
    held, planned = held_mask(rank), planned_mask(rank)
    names = (*ids, *fused_ids)
    rank_of = {name: position for position, name in enumerate(names)}
    # A chunk and its fused name share a bit: no chain may have both.
    bits = [1 << position for position in range(len(ids))] * 2
    # An exact token is worth more than all fused ones.
    worths = [_EXACT_WORTH if fused_ids else 1] * len(ids) + [1] * len(fused_ids)
    slower = () if rank is None else (Tier.HOST << 2 * rank, Tier.DISK << 2 * rank)
    host_parts = round(host_worth * _WORTH_PARTS)
    best, best_worth, best_len = root, 0, 0
    # One level of the search: (node, bit set of the chunks used on the way, worth of their tokens),
    # in retriever order.
    level = [(root, 0, 0)]
    depth, visits_left = 0, max_visits
    while level and depth < len(ids):
        # A visit is kept for each level to come, so that some chain is followed to its end.
        width = max(1, (visits_left - (len(ids) - depth)) // _LEVEL_SHARE)
        if len(level) > width:
            level = _most_hit(level, width)
        visits_left -= len(level)
        depth += 1
        below = []
        for node, used, worth in level:
            for position, child in _children_among(node, rank_of, names):
                if used & bits[position] or not (child.tiers & held or child.plans & planned):
                    continue
                parts = host_parts if child.tiers & held in slower else _WORTH_PARTS
                child_worth = worth + child.num_tokens * worths[position] * parts
                # A leaf may be the best end, and takes no place on the next level.
                if child.children is not None:
                    below.append((child, used | bits[position], child_worth))
                # Strictly more: of equal chains the retriever's order finds its own first.
                if child_worth > best_worth or (child_worth == best_worth and depth > best_len):
                    best, best_worth, best_len = child, child_worth, depth
        level = below
    return best.path()


def _children_among(
    node: ChainNode, rank_of: dict[ChunkId, int], names: Sequence[ChunkId]
) -> list[tuple[int, ChainNode]]:
    """(position in `names`, child) for each child whose chunk is in the request, by position."""
    children = node.children
    if children is None:
        return []
    if isinstance(children, ChainNode):
        position = rank_of.get(children.chunk_id)
        return [] if position is None else [(position, children)]
    # Over the smaller one: a popular head has thousands of children, a request a dozen chunks.
    if len(children) < len(names):
        among = [(rank_of[chunk], child) for chunk, child in children.items() if chunk in rank_of]
        among.sort(key=itemgetter(0))  # by position alone: nodes do not compare
        return among
    return [
        (position, children[chunk]) for position, chunk in enumerate(names) if chunk in children
    ]


def _most_hit(
    level: list[tuple[ChainNode, int, int]], width: int
) -> list[tuple[ChainNode, int, int]]:
    """The `width` entries with most hits, in retriever order: they have much below them."""
    kept = sorted(range(len(level)), key=lambda index: -level[index][0].hits)[:width]
    return [level[index] for index in sorted(kept)]


def _tail(chunks: list[Chunk], table: AccessTable, grows_from: float | None) -> list[Chunk]:
    if grows_from is not None:
        return growing_tail(chunks, table, grows_from)
    return sorted(chunks, key=lambda chunk: table.count(chunk.id) == 0)


def _usable_path(
    root: ChainNode | None, chunks: Sequence[Chunk], rank: int | None, recipe: str | None
) -> list[ChainNode]:
    """Leading run of this very order that is held or planned: exact chunks, then fused ones from
    where exact ones end, or from where held ones do, whichever goes further."""
    path = _usable_run(root, [chunk.id for chunk in chunks], rank)
    if recipe is None:
        return path
    fused_ids = [fused_chunk(recipe, chunk.id) for chunk in chunks]
    ends = (len(path), sum(node.is_held(rank) for node in path))
    return max(
        (
            path[:end] + _usable_run(path[end - 1] if end else root, fused_ids[end:], rank)
            for end in ends
        ),
        key=len,
    )


def _usable_run(
    node: ChainNode | None, names: Sequence[ChunkId], rank: int | None
) -> list[ChainNode]:
    held, planned = held_mask(rank), planned_mask(rank)
    run: list[ChainNode] = []
    for name in names:
        node = node.child(name) if node is not None else None
        if node is None or not (node.tiers & held or node.plans & planned):
            break
        run.append(node)
    return run
