"""What we keep on SGLang's objects: one record on each `TreeNode`, one on each `Req`, made when
first read by `facts` and `state`. Nothing else of ours is an attribute of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from radix_ext import ChainId, ChunkId
from radix_ext.exact_chains import ChainVariant
from radix_ext.sources import CopyFacts
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.scheduler.chunk_key import Fused
    from sglang_chunkcache.storage.waits import PendingLoads


class ChunkIdentity(NamedTuple):
    """A chunk of one tenant: requests that SGLang keeps apart never share one."""

    chunk: ChunkId
    extra_key: str | None
    cache_salt: str | None


@dataclass(eq=False, kw_only=True)
class HostNode(ChainVariant):
    blob: HostSlots
    identity: ChunkIdentity
    chain_key: bytes
    before: bytes | None
    node: TreeNode | None = None


class Rest(NamedTuple):
    """What a match in pages lacks of its last chunk (page_rests.py)."""

    slots: Tensor  # [num_tokens] int64, fewer than a page
    host: HostNode | None  # which has them in host memory. None: they are on the device


@dataclass(slots=True)
class ChunkFacts(CopyFacts):
    """A node of the tree. The defaults are a node of plain traffic."""

    chunk: ChunkId | None = None  # None: a token node, of which start and prefix say nothing
    is_moved: bool = False  # its KV was computed at another place
    chain: ChainId | None = None
    """The place in the global tree. None: a token node, or a chunk that the global tree does not
    hold: of a later turn, or fused for one question."""
    promoted: bool = False
    hits: int = 0  # requests that found it cached exactly
    host: HostNode | None = None  # its copy in host memory
    head_key: bytes | None = None
    """Of a prompt's first chunk: the chain key of the tokens before it. None: nobody asked yet."""
    used: int = 0  # number of the request that used it last


@dataclass(slots=True)
class RequestState:
    """A request in the scheduler."""

    is_read: bool = False  # whether `spans` has been decoded
    spans: RequestSpans | None = None  # None: a plain request
    fused: Fused | None = None  # from where on its KV is approximate
    moved: frozenset[int] = frozenset()  # where chunks begin that are moved, not computed
    promised: torch.Tensor | None = None
    """Slots behind its matched prefix: its own until it inserts them."""
    rest: Rest | None = None
    is_failed: bool = False  # they could not be filled: nothing of it gets into the tree
    is_inserted: bool = False
    inserted_len: int = 0  # tokens that are in the tree: what it inserts anew is no hit
    is_asked_only: bool = False  # explained, not served: it uses nothing
    is_kept: bool = False
    is_reported: bool = False
    loaded: int = 0
    """Tokens that came from host memory for it; of one that is only asked for: would come."""
    outward: Any = None
    """What its chunks' tokens attended to while they were prefilled (fusion/outward.py)."""
    promise: Any = None  # an `Outcome` (fusion/outcome.py), once it was matched for moved KV
    is_prefetch: bool = False  # it may come. False: it is here, or only explained
    loads: PendingLoads | None = None
    """What was asked of the storage for its moved chunks, if it was (fusion/tier.py)."""
    chain: PendingLoads | None = None  # and for its exact chain
    arrival: int = 0  # its number among all requests. 0: it was not told
    is_put_off: bool = False
    """It is not admitted in this round: it waits, or is held back (scheduler/waiting.py)."""
    must_go: bool = False  # it may not wait in this round


def facts(node: TreeNode) -> ChunkFacts:
    # On the object, not in a subclass: SGLang makes nodes itself, as in `_split_node`.
    found: ChunkFacts | None = getattr(node, "chunkcache", None)
    if found is None:
        found = node.chunkcache = ChunkFacts()
    return found


def state(req: Req) -> RequestState:
    found: RequestState | None = getattr(req, "chunkcache", None)
    if found is None:
        found = req.chunkcache = RequestState()
    return found


def identity_of(node: TreeNode) -> ChunkIdentity | None:
    """Which chunk the node holds. None: a token node."""
    chunk = facts(node).chunk
    # From the node's key: a chunk's id says nothing of its tenant.
    return None if chunk is None else ChunkIdentity(chunk, node.key.extra_key, node.key.cache_salt)


def up_from(node: TreeNode) -> Iterator[TreeNode]:
    """The node and all above it but the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def paths(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """The nodes and all above them, each once, but the root."""
    return list({each.id: each for node in nodes for each in up_from(node)}.values())


def joined(values: Sequence[Tensor]) -> Tensor:
    """One tensor, of the current stream."""
    for value in values:
        # made on another stream, where it may be gone before this one has read it
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream())
    return torch.cat(tuple(values))
