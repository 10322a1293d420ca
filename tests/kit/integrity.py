"""Every invariant and counter of trees, stores and replays, checked from outside; O(nodes)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radix_ext import ChainId, ChainNode, ChunkPrefixTree, IntegrityError, Tier, extend_chain
from radix_ext.chain_node import PLAN_BITS, PLAN_MASK
from radix_ext.chunk import root_chain
from radix_ext.chunk_trie import ChunkTrie
from radix_ext.exact_chains import ExactChains
from radix_ext.holdings import Holdings
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import HeldVariants

if TYPE_CHECKING:
    from eval.replay.exact import Replay
    from eval.replay.host_tier import HostTier


def check_tree(tree: ChunkPrefixTree) -> None:
    """As `ChunkPrefixTree` says.

    Raises:
        IntegrityError: with all violations.
    """
    nodes = tuple(tree.nodes.by_chain.values())
    _raise_any(
        [
            *_of_trie(tree.nodes),
            *_of_order(tree, nodes),
            *_of_holdings(tree.holdings, nodes),
            *_of_counts(tree, nodes),
        ]
    )


def check_store(store: VariantIndex) -> None:
    """As `VariantIndex` says.

    Raises:
        IntegrityError: with all violations.
    """
    violations = list(_of_variants(store.held))
    listed = sum(len(variants) for variants in store._chunks.values())
    if listed != len(store.held):
        violations.append(f"{listed} variants listed by chunk but {len(store.held)} held")
    if empty := [identity for identity, variants in store._chunks.items() if not variants]:
        violations.append(f"chunks without a variant: {empty[:8]}")
    for identity, variants in store._chunks.items():
        for place, variant in variants.items():
            if place != (variant.head, variant.prefix) or variant not in store.held:
                name = f"variant {variant.serial} of chunk {identity}"
                violations.append(f"{name} is not where its serial, head and prefix say")
    _raise_any(violations)


def check_replay(replay: Replay, rank: int = 0) -> None:
    """Tree and host tier against each other.

    Raises:
        IntegrityError: with all violations.
    """
    check_tree(replay._tree)
    host = replay._host
    violations = [*violations_of(host)] if host is not None else []
    pending = [node for root in replay._tree.nodes.roots for node in root.child_nodes()]
    for node in pending:  # grows meanwhile
        pending += node.child_nodes()
        on_device, parent = node.tier(rank) is Tier.DEVICE, node.parent
        if not on_device and (host is None or node not in host):
            violations.append(f"node {node.chain:x} is held in a tier that does not have it")
        if (
            on_device
            and parent is not None
            and parent.parent is not None
            and parent.tier(rank) is not Tier.DEVICE
        ):
            violations.append(f"node {node.chain:x} is on the device but its parent is not")
    if host is not None and len(host._nodes) != sum(node in host for node in pending):
        violations.append("host memory has nodes that left the tree")
    if replay._is_over():
        violations.append("the device holds more than its capacity")
    _raise_any(violations)


def violations_of(host: HostTier) -> Iterator[str]:
    """Of a replay's host tier alone."""
    if any(
        parent.parent is not None and parent not in host._nodes for parent in host._num_children
    ):
        yield "host memory has a node without its parent"
    if host.num_tokens != sum(node.num_tokens for node in host._nodes):
        yield f"host memory has counted {host.num_tokens} tokens"
    if host._num_children != Counter(node.parent for node in host._nodes):
        yield "host memory has counted other children than it has"
    if not host._fits(len(host._nodes), host.num_tokens):
        yield f"host memory has {len(host._nodes)} nodes of {host.num_tokens} tokens"


# Private, in order of use


def _raise_any(violations: list[str]) -> None:
    if violations:
        raise IntegrityError("; ".join(violations))


def _of_trie(trie: ChunkTrie) -> Iterator[str]:
    reached: set[ChainId] = set()
    pending = list(trie._roots.values())
    for namespace, root in trie._roots.items():
        if root.children is None or root.chain != root_chain(namespace):
            yield f"root {namespace!r} is empty or misnamed"
    while pending:
        parent = pending.pop()
        for node in parent.child_nodes():
            reached.add(node.chain)
            pending.append(node)
            yield from _of_node(node, parent)
    if reached != trie.by_chain.keys():
        yield f"{len(reached)} nodes are below the roots but {len(trie.by_chain)} are indexed"


def _of_node(node: ChainNode, parent: ChainNode) -> Iterator[str]:
    name = f"node {node.chain:x} ({node.chunk_id})"
    if node.parent is not parent or parent.child(node.chunk_id) is not node:
        yield f"{name} and its parent do not point at each other"
    if node.chain != extend_chain(parent.chain, node.chunk_id):
        yield f"{name} has the chain id of another path"
    if not node.tiers and not node.plans:
        yield f"{name} is neither held nor planned"
    # A root is neither held, planned nor used; what follows compares a node with its parent.
    if parent.parent is None:
        return
    if node.last_access > parent.last_access:
        yield f"{name} was used at {node.last_access}, after its parent at {parent.last_access}"
    for rank, _ in node.held_by():
        if not parent.is_held(rank):
            yield f"{name} is held by rank {rank} but its parent is not"
    for rank in range(node.plans.bit_length() // PLAN_BITS + 1):
        if num_plans(node, rank) > num_plans(parent, rank):
            yield (
                f"{name} has {num_plans(node, rank)} plans on rank {rank} but its parent"
                f" {num_plans(parent, rank)}"
            )


def of_chains(nodes: ExactChains[Any, Any]) -> Iterator[str]:
    """What is wrong of what radix_ext/exact_chains.py promises."""
    index, book = nodes.index, nodes._slots
    children = {(host.above, key) for key, host in nodes._nodes.items() if not host.is_text}
    if {(above, key) for above, keys in nodes._below.items() for key in keys} != children:
        yield "host nodes have other children than were booked"
    for key, host in nodes._nodes.items():
        if host.chain_key != key:
            yield f"host node {key!r} has another chain key"
        if host.chain is not None and not host.is_here:
            yield f"host node {key!r} is known before it is here"
        if (index.get(host.identity, host.head, host.prefix) is host) != host.is_here:
            yield f"host node {key!r} is in the index although it is not here, or not"
    blobs = {each.blob for each in index.held} | {host.blob for host in nodes._nodes.values()}
    if not blobs <= book.out or any(blob.is_given_back for blob in blobs):
        yield "slots on the host are read that were given back"
    if not all(blob.is_held for blob in book.out if blob.is_given_back):
        yield "slots on the host are kept for nobody"
    num_held = sum(blob.num_tokens for blob in book.out if blob.is_held)
    if num_held != book.num_held:
        yield f"{num_held} slots on the host are held, {book.num_held} were counted"
    num_booked = sum(blob.num_tokens for blob in book.out)
    if num_booked != (num_out := nodes.pool.num_slots - nodes.pool.num_free):
        yield f"{num_booked} slots on the host are booked, {num_out} are given out"


def newest_first(tree: ChunkPrefixTree) -> list[ChainNode]:
    """In the order of use."""
    return [*tree._lru.oldest_first()][::-1]


def num_plans(node: ChainNode, rank: int) -> int:
    return node.plans >> PLAN_BITS * rank & PLAN_MASK


def _of_order(tree: ChunkPrefixTree, nodes: tuple[ChainNode, ...]) -> Iterator[str]:
    listed = {node.chain for node in tree._lru.oldest_first()}
    if listed != {node.chain for node in nodes}:
        yield f"{len(nodes)} nodes are indexed but {len(listed)} are in the order of use"


def _of_holdings(holdings: Holdings, nodes: tuple[ChainNode, ...]) -> Iterator[str]:
    tallies = defaultdict[tuple[int, int], list[int]](lambda: [0, 0])
    digests: dict[int, int] = {}
    for node in nodes:
        for rank, tier in node.held_by():
            tallies[rank, tier][0] += 1
            tallies[rank, tier][1] += node.num_tokens
            digests[rank] = digests.get(rank, 0) ^ node.chain
    keys = holdings._num_nodes.keys() | holdings._num_tokens.keys()
    counted = {key: [*held] for key in keys if any(held := holdings.held(*key))}
    if tallies != counted:
        yield f"held nodes and tokens are {dict(tallies)} but were counted as {counted}"
    for rank, digest in holdings._digests.items():
        if (found := digests.get(rank, 0)) != digest:
            yield f"the digest of rank {rank} is {found} but was counted as {digest}"


def _of_counts(tree: ChunkPrefixTree, nodes: tuple[ChainNode, ...]) -> Iterator[str]:
    num_promoted = sum(node.promoted for node in nodes)
    if num_promoted != tree.num_promoted:
        yield f"{num_promoted} nodes are promoted but {tree.num_promoted} were counted"
    num_unplanned = sum(not node.plans for node in nodes)
    if len(nodes) > tree.max_nodes and num_unplanned:
        yield f"{len(nodes)} nodes exceed {tree.max_nodes} and {num_unplanned} of them could go"


def _of_variants(held: HeldVariants) -> Iterator[str]:
    reserved = [variant for variant in held if variant.is_reserved]
    for variants, counted in ((held, held.num_bytes), (reserved, held.reserved_bytes)):
        if (num_bytes := sum(each.nbytes for each in variants)) != counted:
            yield f"num_bytes {counted} but the variants count {num_bytes}"
    if held.num_bytes > held.max_bytes:
        yield f"num_bytes {held.num_bytes} over max_bytes {held.max_bytes}"
    if len(reserved) != held.num_reserved:
        yield f"{len(reserved)} variants are reserved but {held.num_reserved} were counted"
    if len(held) > held.max_entries:
        yield f"{len(held)} variants over {held.max_entries}"
    entries = {entry[-1]: entry for entry in sorted(held._order, reverse=True)}
    for serial, (identity, variant, nbytes) in held._held.items():
        name = f"variant {serial} of chunk {identity}"
        if variant.nbytes != nbytes:
            yield f"{name} came with {nbytes} bytes and has {variant.nbytes}"
        now, listed = held._entry(variant), entries.get(serial)
        if listed is None or now < listed:
            yield f"{name} is {now} but {listed} in the eviction order"
