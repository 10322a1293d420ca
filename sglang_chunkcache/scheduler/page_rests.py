"""What a match in pages lacks of its last chunk: it lies in the first page of whatever follows the
chunk elsewhere (paged_key.py), on the device or in host memory, and is copied from there.

    page size 4   a a a a a a . .     a chunk that is found: one page is its own
                  b b . .             of two that follow it: `a a b b`, `a a c c`
    the request   a a a a a a d d     copies two slots into a page of its own

admission   the source is found, and promised as SGLang's host memory promises
commit      a page of the request's own
a forward   all are copied first, on its stream: nothing has written to a source yet, even if it was
            evicted since. From host memory they come with what else is loaded (load_back.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang_chunkcache import compat
from sglang_chunkcache.scheduler.node import Rest, facts, joined, state, up_from

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
    from sglang_chunkcache.scheduler.host_chains import HostChains


class PageRests:
    """Of one rank. A request that has committed runs in the next batch."""

    def __init__(self, tree: ChunkTree, host: HostChains) -> None:
        self._tree, self._host = tree, host
        self._pool: Any = tree.token_to_kv_pool_allocator.get_kvcache()
        # with decode context parallelism a slot is in the pool of one rank, by another number
        self._is_on = self._pool.page_size == tree.page_size and _copies_rows(self._pool)
        self._pending: list[tuple[Req, int, Tensor | None, Tensor]] = []
        """Request, where its rest begins, slots to copy (None: of host memory), slots to fill."""

    def of(self, node: TreeNode, up_to: int) -> Rest | None:
        """What the pages down to this node lack of its chunks, at most up to this token. None: it
        is no chunk, ends with a page, or nothing that follows it here has the KV."""
        if not self._is_on or facts(node).chunk is None:
            return None
        end = sum(each.key.num_tokens for each in up_from(node))
        border = end - end % self._tree.page_size
        while facts(node).chunk is not None and min(end, up_to) > border:
            for slots in self._behind(node):
                return Rest(slots[: min(end, up_to) - border], None)
            copy = facts(node).host
            for host in self._host.nodes.behind(copy) if copy is not None else ():
                return Rest(host.blob.slots[: min(end, up_to) - border], host)
            if len(node.value):
                break
            # a page of what precedes it may have been kept for another chunk
            node, end = node.parent, end - node.key.num_tokens
        return None

    def commit(self, req: Req) -> Tensor | None:
        """A page of its own for what it was promised. None: there is none."""
        rest, state(req).rest = state(req).rest, None
        assert rest is not None
        self._tree.make_room(self._tree.page_size)
        page: Tensor | None = self._tree.token_to_kv_pool_allocator.alloc(self._tree.page_size)
        if page is None:
            return None
        slots = page[: len(rest.slots)]
        fill = self._host.load_back.fill
        if rest.host is not None and not fill(rest.host, rest.slots, slots):
            self._tree.token_to_kv_pool_allocator.free(page)
            return None
        start = sum(len(each.key) for each in up_from(req.last_node))
        self._pending.append((req, start, rest.slots if rest.host is None else None, slots))
        return slots

    def copy(self) -> None:
        """A forward comes next."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for req, start, *_ in pending:
            compat.keep_own(req, start)
        pairs = [(slots, rest) for *_, rest, slots in pending if rest is not None]
        if pairs:
            self._pool.move_kv_cache(*map(joined, zip(*pairs, strict=True)))

    def reset(self) -> None:
        self._pending.clear()

    def _behind(self, node: TreeNode) -> Iterator[Tensor]:
        for below in node.children.values():
            if not len(below.value):  # shorter than a page
                yield from self._behind(below)
            elif not self._host.load_back.is_empty(below):
                yield below.value


def _copies_rows(pool: Any) -> bool:
    """Whether `move_kv_cache` of this pool copies all of a slot. By its exact name: subclasses have
    scales and other layouts."""
    name = type(pool).__name__
    if name != "MHATokenToKVPool":
        return name == "MLATokenToKVPool"
    # by torch: SGLang prepares its kernel for speculative decoding only
    pool.use_native_move_kv_cache = True
    return pool.kv_cache_layout in ("nhd", "hnd")
