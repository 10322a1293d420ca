"""Exact chains that are copied to host memory before they leave the device (CRAFT 4.1), as
radix_ext/write_back.py decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from radix_ext import ChunkId, root_chain
from radix_ext.costs import copied_within
from radix_ext.exact_chains import ChainPlace
from radix_ext.write_back import WriteBackQueue
from sglang_chunkcache.config import MAX_KEPT_S, MAX_SAVED_TOKENS, MAX_WAITING_SAVES
from sglang_chunkcache.scheduler.host_nodes import (
    HostCounts,
    HostNodes,
    below,
    chunks_to,
    follows_text,
    head_of,
)
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts, identity_of, joined

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
    from sglang_chunkcache.scheduler.pricing import Pricing


class WriteBack(WriteBackQueue[HostNode]):
    """Of one rank. `copy_failed` is called with what a copy raised."""

    def __init__(
        self,
        tree: ChunkTree,
        nodes: HostNodes,
        counts: HostCounts,
        pricing: Pricing,
        copy_failed: Callable[[Exception], None],
        *,
        keeps: bool = True,
        only_lost: bool = False,
    ) -> None:
        super().__init__(
            nodes,
            facts,
            counts,
            save_tokens=self._num_saved,
            max_waiting=MAX_WAITING_SAVES,
            keeps=keeps,
            only_lost=only_lost,
        )
        self._tree, self._pool, self._copy_failed = tree, nodes.pool, copy_failed
        self._pricing, self._was_put_off = pricing, False

    def offer(self, chunks: Sequence[TreeNode], *, is_later_turn: bool = False) -> None:
        exact = [*takewhile(lambda node: node.key.fused is None, chunks)]
        super().offer(exact, is_later_turn=is_later_turn)

    def after(self, *, first_tokens_wait: bool) -> Iterator[tuple[HostNode, TreeNode]]:
        """`save_some`: after decoding, and after a prefill only if the one before was one, too."""
        self._was_put_off = first_tokens_wait and not self._was_put_off
        if not self._was_put_off:
            yield from self.save_some()

    def _num_saved(self) -> int:
        num_tokens = copied_within(self._pricing.agreed, MAX_KEPT_S)
        return MAX_SAVED_TOKENS if num_tokens is None else num_tokens

    def _place(self, node: TreeNode) -> ChainPlace | None:
        if node.parent.children.get(node.key.child_key()) is not node:
            return None
        path = chunks_to(node)
        known = facts(node)
        first = head_of(path[0])[0]
        before = reduce(below, (facts(each).chunk for each in path[:-1]), first)
        is_later = len(known.prefix) >= len(path)  # in no global tree
        return ChainPlace(
            below(before, known.chunk),
            before,
            root_chain(first.hex())
            if is_later
            else facts(node.parent).chain or root_chain(known.head),
            known.start,
            identity_of(node),
            known.head,
            known.prefix,
        )

    def _lacks_text(self, node: TreeNode, host: HostNode) -> bool:
        return follows_text(node) and self._nodes.get(host.before) is None

    def _precede(self, node: TreeNode) -> None:
        first = chunks_to(node)[0]
        before, above = head_of(first)
        if not follows_text(first) or self._nodes.get(before) is not None:
            return
        text = [*takewhile(lambda each: facts(each).chunk is None, reversed(above))][::-1]
        chunk = self._place(above[-1 - len(text)]) if len(text) < len(above) else None
        if chunk is not None and self._nodes.get(chunk.chain_key) is None:
            return
        nothing = torch.empty((0,), dtype=torch.int64, device=self._tree.device)
        slots, start = joined([nothing, *(each.value for each in text)]), facts(first).start
        identity = ChunkIdentity(ChunkId(""), node.key.extra_key, node.key.cache_salt)
        place = ChainPlace(
            before,
            chunk.chain_key if chunk is not None else None,
            root_chain(before.hex() if chunk is not None else facts(node).head),
            start - start % self._tree.page_size - len(slots),
            identity,
            before.hex(),
            (),
            is_text=True,
        )
        self._copied(place, slots)

    def _source(self, node: TreeNode) -> Tensor:
        return node.value  # type: ignore[no-any-return]

    def _copy(self, source: Tensor, host: HostNode) -> bool:
        try:
            self._pool.save(source, host.blob.slots)
        except Exception as error:
            self._nodes.drop(host)
            self._copy_failed(error)
            return False
        return True
