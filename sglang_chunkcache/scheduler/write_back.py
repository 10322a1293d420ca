"""Exact chains that are copied to host memory before they leave the device (CRAFT 4.1): what is
worth it, after a forward, a chain's first chunk before its second one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from radix_ext import ChunkId
from radix_ext.offloading import worth_offloading
from sglang_chunkcache.scheduler.host_nodes import HostCounts, HostNodes, below, head_of
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts, joined

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

SAVED_TOKENS = 512
"""After one forward nothing more is copied once so many were: answers under way wait for it."""
MAX_WAITING = 1024
"""Nodes that wait to be saved. More are not taken: they come again with their next hit."""


class WriteBack:
    """Of one rank.

    Args:
        keeps: False: no chain is kept in host memory.
        copy_failed: called with what a copy raised.
    """

    def __init__(
        self,
        tree: ChunkTree,
        nodes: HostNodes,
        counts: HostCounts,
        copy_failed: Callable[[Exception], None],
        *,
        keeps: bool = True,
    ) -> None:
        self._tree, self._nodes, self._keeps = tree, nodes, keeps
        self._counts, self._copy_failed = counts, copy_failed
        self._waiting: OrderedDict[TreeNode, None] = OrderedDict()
        self._was_put_off = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offer(self, chunks: Sequence[TreeNode]) -> None:
        """A request has used these nodes, from its first chunk on:
        note those that are worth keeping.

        The end first: of nodes that were used alike the index evicts the one that was used least
        recently."""
        for node in reversed(chunks):
            if (host := facts(node).host) is not None:
                self._nodes.count_hits(host, facts(node).hits)
        if not self._keeps:
            return
        for node in chunks:
            known = facts(node)
            is_worth_it = worth_offloading("either", hits=known.hits, promoted=known.promoted)
            if node.key.fused is not None or not is_worth_it:
                return
            if known.host is None and len(self._waiting) < MAX_WAITING:
                self._waiting[node] = None

    def takes(self, node: TreeNode) -> bool:
        """Whether host memory has the node with its chain, or is about to."""
        return facts(node).host is not None or node in self._waiting

    def after(self, *, first_tokens_wait: bool) -> Iterator[tuple[HostNode, TreeNode]]:
        """Save some of what waits: after decoding, and after a prefill only if the forward before
        was one, too. Yields each chunk once it is saved, with all above it in host memory: what is
        saved next may evict it, unless somebody holds it."""
        self._was_put_off = first_tokens_wait and not self._was_put_off
        before = self._counts.saved_tokens
        while (
            not self._was_put_off
            and self._waiting
            and self._counts.saved_tokens < before + SAVED_TOKENS
        ):
            node = self._waiting.popitem(last=False)[0]
            if (host := self._save(node)) is not None:
                yield host, node

    def reset(self) -> None:
        """The tree is empty."""
        self._waiting.clear()

    # Private, in order of use

    def _save(self, node: TreeNode) -> HostNode | None:
        """None: it has been saved before, or is missed."""
        known = facts(node)
        if known.host is not None:
            return None
        parent = (
            self._parent(node) if node.parent.children.get(node.key.child_key()) is node else None
        )
        if parent is not None:
            assert known.chunk is not None
            key = below(parent.chain_key, known.chunk)
            identity = ChunkIdentity(known.chunk, node.key.extra_key, node.key.cache_salt)
            host = self._nodes.get(key) or self._copied(
                key, parent, node.value, identity, known.head, known.prefix
            )
            known.host = host if host is not None and host.is_here else None
        if (host := known.host) is None:
            self._counts.missed += 1
            return None
        host.chain, host.node = known.chain, node
        self._nodes.count_hits(host, known.hits)
        self._nodes.index.held.learn(host, known.scores, known.outward)
        return host

    def _parent(self, node: TreeNode) -> HostNode | None:
        """The copy of all before the node; the tokens before a first chunk are saved if need
        be."""
        if facts(node.parent).chunk is not None:
            return facts(node.parent).host
        chain_key, above = head_of(node)
        host = self._nodes.get(chain_key)
        if host is None:
            nothing = torch.empty((0,), dtype=torch.int64, device=self._tree.device)
            slots = joined([nothing, *(each.value for each in above)])
            identity = ChunkIdentity(ChunkId(""), node.key.extra_key, node.key.cache_salt)
            host = self._copied(chain_key, None, slots, identity, chain_key.hex(), ())
        return host if host is not None and host.is_here else None

    def _copied(
        self,
        chain_key: bytes,
        parent: HostNode | None,
        device_slots: Tensor,
        identity: ChunkIdentity,
        head: str,
        prefix: tuple[ChunkId, ...],
    ) -> HostNode | None:
        """A new node with a copy of the slots' KV. None: it does not fit, or the copy failed."""
        host = self._nodes.add(chain_key, parent, len(device_slots), identity, head, prefix)
        if host is None:
            return None
        try:
            self._nodes.pool.save(device_slots, host.blob.slots)
        except Exception as error:
            self._nodes.drop(host)
            self._copy_failed(error)
            return None
        if not self._nodes.keep(host):
            return None
        self._counts.saved_tokens += host.blob.num_tokens
        return host
