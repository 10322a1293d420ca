"""The cache over a pool of pages: nodes that own whole pages, and chunk nodes that own none."""

from __future__ import annotations

import time
from array import array
from typing import Any

from sglang.srt.mem_cache.radix_cache import TreeNode
from torch import Tensor

from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.paged_key import PagedKey
from sglang_chunkcache.wire.spans import RequestSpans


class PagedRadixCache(ChunkRadixCache):
    """Of one rank. SGLang's own walks end where a key has no slots left: these go on through
    chunks that are shorter than a page."""

    def key_of(
        self,
        req: Any,
        token_ids: array[int],
        spans: RequestSpans,
        up_to: int,
        fused: Fused | None = None,
    ) -> ChunkKey:
        return PagedKey.of(
            token_ids,
            spans.spans,
            up_to,
            page_size=self.page_size,
            prompt=req.origin_input_ids,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )

    def _match_prefix_helper(self, node: TreeNode, key: Any) -> tuple[list[Tensor], TreeNode]:
        if not isinstance(key, PagedKey):
            return super()._match_prefix_helper(node, key)  # type: ignore[no-any-return]
        node.last_access_time = now = time.monotonic()
        found, start = list[Tensor](), 0
        while start < key.num_tokens:
            rest = key.part(start, key.num_tokens)
            child = node.children.get(rest.child_key())
            if child is None:
                break
            child.last_access_time = now
            num_slots = child.key.match(rest)
            if num_slots < len(child.key):
                node = self._split_node(child.key, child, num_slots)
                found.append(node.value)
                break
            node, start = child, start + child.key.num_tokens
            found.append(node.value)
        return found, node

    def _insert_helper(
        self, node: TreeNode, key: Any, value: Tensor, priority: int = 0, *counted: Any
    ) -> tuple[int, TreeNode]:
        if len(key) or not isinstance(key, PagedKey):
            return super()._insert_helper(  # type: ignore[no-any-return]
                node, key, value, priority, *counted
            )
        child = node.children.get(name := key.child_key())
        if child is None:
            child = node.children[name] = TreeNode(priority=priority)
            child.parent, child.key, child.value = node, key, value.clone()
            self._update_leaf_status(node)
            self._update_leaf_status(child)
        node.last_access_time = child.last_access_time = time.monotonic()
        return 0, child
