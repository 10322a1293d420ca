"""KV events of our tree in SGLang's formats, for routers outside (`--kv-events-config`).

A chunk's node is no plain text: it is found only by a request that brings the same chunks, so a
reader that knows tokens alone must not count on it. What it can tell apart is `cache_salt`:

    head          chunkcache//SALT          SALT: the request's own, or nothing
    a chunk       chunkcache/CHUNK/SALT     CHUNK: its id, a digest of its tokens
    text behind   chunkcache//SALT

Hashes are of these nodes alone: with other borders the same tokens have others. A reader that knows
chunks finds a node by its parent's hash and its tokens; events of two nodes are joined only where
no chunk is between. Nodes of plain requests are told as ever.

Not told: what is fused, which no exact request finds; what has an `extra_key`, for which an event
has no room; and host memory.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import TreeNode
from sglang.srt.mem_cache.utils import hash_str_to_int64

from sglang_chunkcache.scheduler.chunk_key import TAG, ChunkKey


class ChunkEvents(KVCacheEventRecorder):  # type: ignore[misc]
    """SGLang's recorder, which goes on with what `theirs` has recorded."""

    def __init__(self, theirs: KVCacheEventRecorder) -> None:
        self.__dict__.update(vars(theirs))

    def record_store(self, node: TreeNode, *stock: Any, **named: Any) -> None:
        if not isinstance(node.key, ChunkKey):
            super().record_store(node, *stock, **named)
        elif self.enabled and _is_told(node.key):
            salt = salt_of(node.key)
            parent = None if node.parent.parent is None else node.parent.event_hash_value[-1]
            # SGLang splits it with the node
            node.event_hash_value = _hashes(node.key, parent or salt)
            self.enqueue(
                BlockStored(
                    block_hashes=_as_ints(node),
                    parent_block_hash=parent and hash_str_to_int64(parent),
                    token_ids=node.key.token_ids.tolist(),
                    block_size=1,
                    lora_id=None,
                    medium=StorageMedium.GPU,
                    cache_salt=salt,
                )
            )

    def record_remove(self, node: TreeNode, *stock: Any, **named: Any) -> None:
        if not isinstance(node.key, ChunkKey):
            super().record_remove(node, *stock, **named)
        elif self.enabled and _is_told(node.key):
            self.enqueue(BlockRemoved(block_hashes=_as_ints(node), medium=StorageMedium.GPU))


def salt_of(key: ChunkKey) -> str:
    """What a node's events have for their salt."""
    ((*_, chunk),) = key.segments()
    return f"{TAG}/{chunk or ''}/{key.cache_salt or ''}"


def _is_told(key: ChunkKey) -> bool:
    return key.fused is None and key.extra_key is None


def _hashes(key: ChunkKey, before: str) -> list[str]:
    """One for each token, in SGLang's form."""
    ((*_, chunk),) = key.segments()
    if chunk is not None:  # where it begins counts
        before = f"{before}/{chunk}"
    found, last = list[str](), before.encode()
    for token in key.token_ids:
        last = sha256(last + token.to_bytes(8, "little", signed=True)).hexdigest().encode()
        found.append(last.decode())
    return found


def _as_ints(node: TreeNode) -> list[int]:
    return [hash_str_to_int64(each) for each in node.event_hash_value]
