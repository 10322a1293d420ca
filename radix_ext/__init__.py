"""What a RAG cache decides: chunk identity, the access table, the chunk-prefix tree, order, rank
and conversations.

Standard library only, no KV, no clock and no numbers of its own; see README.md in this folder.
"""

from radix_ext.access_table import AccessTable
from radix_ext.chain_node import ChainNode, Tier
from radix_ext.chunk import (
    ChainId,
    Chunk,
    ChunkId,
    Span,
    check_spans,
    chunk_id,
    extend_chain,
    fused_chunk,
    is_fused_chunk,
    leading_area,
    root_chain,
    text_before,
)
from radix_ext.conversation import (
    ConversationKey,
    ConversationMap,
    Home,
    Turn,
    running_hashes,
)
from radix_ext.errors import (
    CallerError,
    ChunkError,
    IntegrityError,
    LimitError,
    MessageError,
    SpanError,
)
from radix_ext.eviction import Aging
from radix_ext.fusion_request import FusionRequest, Need
from radix_ext.heads import Heads, Outline, Parting
from radix_ext.homes import held_history
from radix_ext.order import (
    ORDER_POLICIES,
    Ordering,
    OrderPolicy,
    order_chunks,
)
from radix_ext.places import Place, Places
from radix_ext.prefix_tree import ChunkPrefixTree, Plan, snapshot
from radix_ext.route import KvAware, RoundRobin, Router
from radix_ext.tenant_tables import TenantTables

__all__ = [
    "ORDER_POLICIES",
    "AccessTable",
    "Aging",
    "CallerError",
    "ChainId",
    "ChainNode",
    "Chunk",
    "ChunkError",
    "ChunkId",
    "ChunkPrefixTree",
    "ConversationKey",
    "ConversationMap",
    "FusionRequest",
    "Heads",
    "Home",
    "IntegrityError",
    "KvAware",
    "LimitError",
    "MessageError",
    "Need",
    "OrderPolicy",
    "Ordering",
    "Outline",
    "Parting",
    "Place",
    "Places",
    "Plan",
    "RoundRobin",
    "Router",
    "Span",
    "SpanError",
    "TenantTables",
    "Tier",
    "Turn",
    "check_spans",
    "chunk_id",
    "extend_chain",
    "fused_chunk",
    "held_history",
    "is_fused_chunk",
    "leading_area",
    "order_chunks",
    "root_chain",
    "running_hashes",
    "snapshot",
    "text_before",
]
