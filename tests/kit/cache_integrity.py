"""What must hold of a rank's trees whenever nothing is half done. Walks all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import xor

from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import IntegrityError
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.chunk_tree import chunk_len
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.node import HostNode, facts
from tests.kit.integrity import of_chains


def check_integrity(cache: ChunkRadixCache) -> None:
    """Raise IntegrityError with every violated invariant."""
    host = cache.tiers.host
    violations = [*_of_tree(cache), *of_chains(host.nodes), *_of_host(host), *_of_loads(host)]
    if violations:
        raise IntegrityError("; ".join(violations))


def nodes_of(cache: ChunkRadixCache) -> Iterator[TreeNode]:
    stack = list(cache.root_node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def hosted_only(host: HostChains) -> list[HostNode]:
    """Nodes that the front knows and the device has not."""
    nodes = host.nodes._nodes.values()
    return [each for each in nodes if each.chain is not None and each.node is None]


def _of_tree(cache: ChunkRadixCache) -> list[str]:
    nodes = list(nodes_of(cache))
    found = _of_slots(cache, nodes)
    chains = [each.chain for each in hosted_only(cache.tiers.host) if each.chain is not None]
    tokens = promoted = 0
    for node in nodes:
        if len(node.key) != len(node.value):
            found.append(f"node {node.id} owns {len(node.key)}, has {len(node.value)} slots")
        if isinstance(node.key, ChunkKey) and len(list(node.key.segments())) != 1:
            found.append(f"node {node.id}: more than one segment: {list(node.key.segments())}")
        known = facts(node)
        if (chain := known.chain) is not None:
            chains.append(chain)
            tokens, promoted = tokens + chunk_len(node), promoted + known.promoted
            if facts(node.parent).chunk is not None and facts(node.parent).chain is None:
                found.append(
                    f"node {node.id} has a place in the global tree but the chunk above has none"
                )
        if known.host is not None and known.host.node is not node:
            found.append(f"node {node.id} and its copy in host memory do not know each other")
        if cache.copies.holds(node) != _is_copy(node):
            found.append(f"node {node.id}: findable as a source is {cache.copies.holds(node)}")
    if len(cache.copies) != sum(map(_is_copy, nodes)):
        found.append(f"{len(cache.copies)} sources are booked, the tree has another number")
    num_alike = sum(node.num_alike for node in cache.log._held.values())
    counted = (len(chains), reduce(xor, {*chains}, 0), tokens, promoted)
    booked = (num_alike, cache.log.digest, cache.num_chunk_tokens, cache.num_promoted)
    if counted != booked:
        found.append(
            f"chunk nodes, digest, tokens, promoted are {counted} but were booked as {booked}"
        )
    return found


def _of_slots(cache: ChunkRadixCache, nodes: Sequence[TreeNode]) -> list[str]:
    owners, protected = Counter[int](), set[int]()
    for node in nodes:
        owners.update(slots := node.value.tolist())
        if node.lock_ref > 0:
            protected.update(slots)
    found = []
    if twice := [slot for slot, num_owners in owners.items() if num_owners > 1]:
        found.append(f"slots with two owners: {twice[:8]}")
    counted = len(owners) - len(protected), len(protected)
    booked = cache.evictable_size_, cache.protected_size()
    if counted != booked:
        found.append(f"evictable, protected are booked as {booked}, the tree has {counted}")
    return found


def _of_host(host: HostChains) -> Iterator[str]:
    for key, each in host.nodes._nodes.items():
        if each.node is not None and facts(each.node).host is not each:
            yield f"host node {key!r} and its node on the device do not know each other"
        if each.node is None and each.is_here and each.identity.chunk:
            is_found = not each.prefix or host.tree.log.holds(each.above)
            if is_found != (each.chain is not None):
                yield f"host node {key!r} is known to the front although no request comes to it"


def _of_loads(host: HostChains) -> Iterator[str]:
    for node, part in host.load_back._loads.items():
        is_there = node.parent.children.get(node.key.child_key()) is node
        if len(part) != len(node.value) or not is_there:
            yield f"node {node.id} is to be loaded into other slots than its own"


def _is_copy(node: TreeNode) -> bool:
    return facts(node).chunk is not None and not facts(node).is_moved
