"""The nodes of exact chains in host memory, by what their tokens are.

What is here, and what leaves, radix_ext/exact_chains.py decides. Other variants of its index were
captured (fusion/capture.py).

Invariants:
- `chain_key` names all tokens up to the node's end, with extra_key and cache_salt, by hashes of the
  tokens themselves.
- The front knows a node with a chain: it is on the device, or here and so is all before it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from radix_ext import ChainId, ChunkId, Span, Tier, extend_chain, leading_area, root_chain
from radix_ext.exact_chains import ChainCounts, ExactChains
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import HostNode, facts, up_from
from sglang_chunkcache.wire.events import Evicted, Inserted, Moved

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_key import ChunkKey
    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
    from sglang_chunkcache.scheduler.host_pool import HostPool

KEY_BYTES = 16
"""Two chains never share a key by chance."""


@dataclass
class HostCounts(ChainCounts):
    skipped: int = 0
    """Loads estimated to take longer than computing: one in `EXPLORATION_PERIOD` is made."""
    failed: int = 0  # copies that raised, in either direction, and loads that could not be prepared
    layers_ahead: int = 0
    """Layers of the last load that were copied before its forward began; the rest was beside it."""


class Found(NamedTuple):
    """A node that a request can have loaded."""

    host: HostNode
    slots: Tensor  # of the node's, in host memory: those that the device lacks
    end: int  # its last token in the prompt, and one


class HostNodes(ExactChains[HostNode, HostSlots]):
    """Of one rank. The tree's log has the nodes that are here alone, too."""

    pool: HostPool

    def __init__(
        self, tree: ChunkTree, pool: HostPool, index: VariantIndex, counts: HostCounts
    ) -> None:
        super().__init__(
            pool, index, counts, create_node=HostNode, create_slots=HostSlots, unlink=self._left
        )
        self._tree = tree

    def of(self, chunks: Sequence[TreeNode]) -> list[HostNode | None]:
        """The copies of a prompt's exact device nodes, from its first chunk on."""
        exact = [*itertools.takewhile(lambda node: node.key.fused is None, chunks)]
        if not self._nodes or not exact:
            return []
        names = (facts(node).chunk for node in exact)
        keys = itertools.accumulate(names, below, initial=head_of(exact[0])[0])
        return [self._here(key) for key in itertools.islice(keys, 1, None)]

    def after(self, key: ChunkKey, start: int, stop: int = 0) -> Iterator[Found]:
        """What is here of the key's chunks and the text before them, behind its first `start` slots
        and `stop` tokens, up to the first gap."""
        page = self._tree.page_size
        if not self._nodes or not key.spans or key.spans[-1].end <= start:
            return
        chain_key = None
        for area, before in chunk_areas(key.spans):
            first, text_end = before - before % page, area[0].start - area[0].start % page
            chain_key = text_key(key, before, area[0].start, chain_key)
            if start < text_end:
                host = self._here(chain_key)
                if host is None:
                    return
                yield Found(host, host.blob.slots[start - first :], area[0].start)
                start = text_end
            for span in area:
                chain_key = below(chain_key, span.chunk)
                begin = span.start - span.start % page
                if begin < start or span.end <= stop:
                    continue
                host = self._here(chain_key)
                if host is None or begin > start:
                    return
                yield Found(host, host.blob.slots, span.end)
                start = span.end - span.end % page

    def behind(self, host: HostNode) -> Iterator[HostNode]:
        """In pages: the nodes here that follow it and own the page in which it ends."""
        for each in self._after(host.chain) if host.chain is not None else ():
            if each.before != host.chain_key:
                continue
            if each.blob.num_tokens:
                yield each
            else:
                yield from self.behind(each)

    def came(self, host: HostNode, node: TreeNode | None = None) -> bool:
        """As `ExactChains.came`. `node` is the same on the device."""
        if not super().came(host):
            return False
        if not host.identity.chunk:
            return True
        if node is not None and facts(node).chain is not None:
            facts(node).host, host.chain, host.node = host, facts(node).chain, node
            self.index.held.learn(host, facts(node).scores, facts(node).outward)
        else:
            self._show(host)
        return True

    def came_to_device(self, node: TreeNode) -> None:
        """It has its place in the global tree: exact requests come to what follows it here."""
        if (chain := facts(node).chain) is not None and node.key.fused is None:
            for host in self.hidden(chain):
                self._show(host)

    def leaves_device(self, node: TreeNode) -> None:
        """Before the global tree hears of it."""
        known = facts(node)
        if known.chain is not None and known.host is None:
            self._hide(known.chain)

    def _left(self, host: HostNode) -> None:
        if host.node is not None:
            facts(host.node).host = None
        elif host.chain is not None:
            self._hide(host.chain)
            self._tree.log.append(Evicted(host.chain))

    def _here(self, chain_key: bytes) -> HostNode | None:
        host = self._nodes.get(chain_key)
        return host if host is not None and host.is_here else None

    def _show(self, host: HostNode) -> None:
        """To the front, if exact requests come to it."""
        if host.prefix and not self._tree.log.holds(host.above):
            return
        above = host.above if host.prefix else None
        num_tokens = host.blob.num_tokens
        inserted = Inserted(host.identity.chunk, num_tokens, above, host.head, promoted=False)
        host.chain = inserted.chain
        self._tree.log.append(inserted)
        self._tree.log.append(Moved(host.chain, Tier.HOST))
        for each in self.hidden(host.chain):
            self._show(each)

    def _hide(self, chain: ChainId) -> None:
        for host in self.hide(chain):
            assert host.chain is not None
            self._tree.log.append(Evicted(host.chain))


def chunk_areas(spans: Sequence[Span]) -> Iterator[tuple[tuple[Span, ...], int]]:
    """Chunks that follow each other without text, and where those before the text end."""
    end = 0
    while area := leading_area(spans):
        yield area, end
        end, spans = area[-1].end, spans[len(area) :]


def chain_of(head: str, chunks: Sequence[ChunkId]) -> ChainId:
    return reduce(extend_chain, chunks, root_chain(head))


def chunks_to(node: TreeNode) -> list[TreeNode]:
    """The chunks of the node's area up to this one."""
    chunks = [node]
    while facts(node.parent).chunk is not None and not follows_text(node):
        chunks.append(node := node.parent)
    return chunks[::-1]


def follows_text(node: TreeNode) -> bool:
    """Whether tokens of no chunk precede this chunk: in pages the last of them are its node's."""
    above = node.parent
    is_below = above.parent is not None and facts(above).chunk is None
    return is_below or node.key.spans[0].start > 0


def head_of(node: TreeNode) -> tuple[bytes, list[TreeNode]]:
    """(chain key, nodes on the device) of all tokens before an area's first chunk, `node`.
    The nodes have whole pages of them."""
    above, before, head = [*up_from(node.parent)][::-1], None, facts(node).head_key
    text, is_first = array("q"), True
    for each in (*above, node) if head is None else ():  # no recursion: a prompt has many areas
        known, key = facts(each), each.key
        if known.chunk is None:
            text, is_first = text + key.token_ids, True
            continue
        if is_first or follows_text(each):
            if known.head_key is None:
                text += key.token_ids[: key.spans[0].start]  # in pages: a part of one
                known.head_key = root(text, key.extra_key, key.cache_salt, before)
            before = head = known.head_key
        assert before is not None
        before = below(before, known.chunk)
        text, is_first = array("q"), False
    assert head is not None
    return head, above


def text_key(key: ChunkKey, start: int, end: int, before: bytes | None) -> bytes:
    """The chain key of the tokens `[start, end)` between chunks."""
    return root(key.token_ids[start:end], key.extra_key, key.cache_salt, before)


def root(
    token_ids: array[int],
    extra_key: str | None,
    cache_salt: str | None,
    before: bytes | None = None,
) -> bytes:
    """The chain key of all tokens before an area's first chunk. They may be none.

    Args:
        token_ids: since the last chunk.
        before: that chunk's chain key. The same tokens may have other chunks in another prompt.
    """
    tenant = "".join(
        "-" if each is None else f"{len(each)}:{each}" for each in (extra_key, cache_salt)
    )
    data = tenant.encode("utf-8", "surrogatepass") + b"\0" + token_ids.tobytes()
    if before is not None:
        return blake2b(before + data, digest_size=KEY_BYTES, person=b"text").digest()
    return blake2b(data, digest_size=KEY_BYTES, person=b"head").digest()


def below(chain_key: bytes, chunk: ChunkId | None) -> bytes:
    """The chain key of a chunk that follows `chain_key`."""
    assert chunk is not None
    return blake2b(chain_key + chunk.encode(), digest_size=KEY_BYTES, person=b"chunk").digest()
