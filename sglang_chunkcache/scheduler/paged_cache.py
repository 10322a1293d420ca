"""The cache over a pool of pages: nodes that own whole pages, and chunk nodes that own none."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchResult
from sglang.srt.mem_cache.radix_cache import TreeNode
from torch import Tensor

from sglang_chunkcache import compat
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.page_rests import PageRests
from sglang_chunkcache.scheduler.paged_key import PagedKey
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class PagedRadixCache(ChunkRadixCache):
    """Of one rank. SGLang's own walks end where a key has no slots left: these go on through
    chunks that are shorter than a page."""

    needs_forward = True

    def __init__(self, *args: Any) -> None:
        """As its base."""
        super().__init__(*args)
        self._rests = PageRests(self, self.tiers.host)

    def _admit(
        self, req: Req, key: ChunkKey, up_to: int, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        result, known = super()._admit(req, key, up_to, spans, result), state(req)
        node = result.last_device_node
        known.rest = None if known.is_put_off else self._rests.of(node, up_to)
        if known.rest is None:
            return result
        found = {"num_tokens": compat.num_matched(result), "host_hit_length": len(known.rest.slots)}
        return compat.rematched(self, result, node, **found)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[Any, TreeNode]:
        """Keep what `match_prefix` promised: the rest of a chunk, in a page of the request's."""
        known = state(params.req)
        is_loaded = known.rest is not None and known.rest.host is not None
        slots = known.promised = self._rests.commit(params.req)
        if slots is not None:
            known.loaded += len(slots) * is_loaded
            params.req.host_hit_length = 0  # SGLang would count it as of host memory
        return compat.loaded(self, slots, params.best_match_node)

    @contextmanager
    def around_forward(self, batch: ScheduleBatch) -> Iterator[None]:
        self._rests.copy()
        with super().around_forward(batch):
            yield

    def reset(self) -> None:
        super().reset()
        if "_rests" in vars(self):  # as in its base
            self._rests.reset()

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
