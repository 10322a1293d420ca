"""What of a request's chunks comes into the store in host memory, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import sub
from typing import TYPE_CHECKING, Any

from radix_ext import text_before
from radix_ext.cfo import Scored
from radix_ext.sources import ChunkCopies, ChunkSources
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.fusion.capture import Captures
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.outcome import outcome_of
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.rank_metrics import RankMetrics
from sglang_chunkcache.scheduler.node import ChunkIdentity, facts, identity_of, state
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import Cleared

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

KINDS = ("captured", "preprocessed", "exact")
"""Of KV in the store."""
GAUGES = {
    "bytes": ("bytes", "livesum", "bytes of KV in the store, by kind: captured, preprocessed"),
    "saved_bytes": (
        "saved_bytes",
        "livesum",
        "how many fewer these are than in the pool's dtype, by kind",
    ),
}
"""What Prometheus is told of `stats`."""


class StoreKeeper:
    """Of one rank.

    Args:
        tier: below the store. None: what leaves the store is gone.
        metrics: shown what `stats` says of the store.
        in_host_memory: whether the store has, or is about to have, a node of the tree as a part of
            its exact chain. None: exact chains are not in the store.
    """

    def __init__(
        self,
        copies: ChunkCopies,
        store: VariantIndex,
        sources: ChunkSources,
        fusion_pass: FusionPass,
        tier: StorageTier | None,
        metrics: RankMetrics,
        in_host_memory: Callable[[TreeNode], bool] | None,
    ) -> None:
        self._store, self._sources, self._tier, self._metrics = store, sources, tier, metrics
        self._outward, self._token_bytes = fusion_pass.outward, fusion_pass.host.pool.token_bytes
        self.captures = Captures(copies, fusion_pass, store)
        self._in_host_memory = in_host_memory or (lambda node: False)
        self._kv_bytes, self._saved_bytes = (dict.fromkeys(KINDS, 0) for _ in range(2))
        self._was_put_off = False
        store.watchers.append(self._changed)

    def keep(self, req: Req, path: Sequence[TreeNode]) -> None:
        """Tell the store what was asked for, and queue the chunks that have earned it: none that is
        preprocessed after neighbours which were computed, as all are after a failed pass."""
        spans, move = state(req).spans, outcome_of(req).move
        assert spans is not None
        chunks = [node for node in path if facts(node).chunk is not None]
        self._outward.tell(req, chunks)
        if spans.is_preprocessing:
            is_filled = move is not None and Fallback.PASS_FAILED not in move.fallbacks
            moved = {piece.span for piece in move.moved} if move and is_filled else set()
            if not moved.issuperset(range(1, len(spans.spans) - 1)):
                return
        else:
            asked = [
                (identity, facts(node).head, facts(node).prefix)
                for node in chunks
                if (identity := identity_of(node))
            ]
            self._store.ask(asked)
            if self._tier is not None:
                self._tier.count_asked(asked)
        scored = spans.fusion.scored if spans.fusion else Scored.NOTHING
        keep: Collection[int] = spans.keep
        if not self.captures.at_least(scored):
            # else it would be copied and written twice, as a chunk and as a part of its chain
            keep = [i for i in keep if i < len(chunks) and not self._in_host_memory(chunks[i])]
        self.captures.add(chunks, keep, is_preprocessing=spans.is_preprocessing, scored=scored)

    def after(self, *, first_tokens_wait: bool, is_ahead: bool) -> None:
        """Score and store some of what waits: after decoding, and after a prefill only if the
        forward before was one, too. After one that was ahead of requests all of it: there as much
        comes with each forward, and nothing else makes room."""
        self._was_put_off = first_tokens_wait and not self._was_put_off
        if self._was_put_off:
            return
        if self._metrics.is_due:
            self.stats()
        if is_ahead:
            self.captures.drain()
        else:
            self.captures.run()

    def look_ahead(self, req: Req, spans: RequestSpans) -> tuple[bool, bool]:
        """(whether it is stored what the chunk is to become, whether to ask again before sending).
        What the store alone has is written, with the next try if the storage's queue is full."""
        assert spans.fusion is not None
        heads, tier = text_before(spans.namespace, spans.spans, req.origin_input_ids), self._tier
        chunks = tuple(span.chunk for span in spans.spans)
        scored = self.captures.at_least(spans.fusion.scored)
        is_behind = tier is not None and tier.storage.writes.is_behind
        must_wait = False
        for index in spans.keep:
            identity = ChunkIdentity(chunks[index], req.extra_key, req.cache_salt)
            place = identity, heads[index], chunks[:index]
            if tier is not None and tier.has(*place, scored):
                continue
            variant = self._store.get(*place)
            if (
                variant is None
                or not (variant.is_exact or variant.preprocessed == (index > 0))
                or variant.scored < scored
            ):
                if tier is None:
                    return False, False
                num_tokens = spans.spans[index].end - spans.spans[index].start
                is_coming = tier.fetch(req, spans, self._sources)
                return False, is_coming or not tier.reserve(*place, num_tokens)
            if tier is not None and not variant.is_exact:
                tier.write(identity, variant)
                must_wait |= is_behind
        return True, must_wait

    def clear_store(self) -> Cleared:
        """Empty the store and what waits for it, preprocessed chunks, too. Exact chains stay."""
        self.captures.clear()
        before = self._store.stats()
        self._store.clear(keep=lambda variant: variant.is_exact)
        # chunks, variants, bytes
        return Cleared(*map(sub, before[:3], self._store.stats()[:3]))

    def stats(self) -> dict[str, Any]:
        found = {
            **self._store.stats()._asdict(),
            "bytes": dict(self._kv_bytes),
            "saved_bytes": dict(self._saved_bytes),
            "max_bytes": self._store.held.max_bytes,
            "max_entries": self._store.held.max_entries,
            "max_variants": self._store.max_variants,
            "token_bytes": self._token_bytes,
            **self.captures.stats(),
        }
        self._metrics.show(found)
        return found

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        kind = kind_of(variant)
        sign = 1 if is_here else -1
        self._kv_bytes[kind] += sign * variant.blob.nbytes
        self._saved_bytes[kind] += sign * variant.blob.saved_bytes
        if is_here and self._tier is not None and not (variant.is_exact or variant.is_below):
            assert isinstance(identity, ChunkIdentity)
            self._tier.write(identity, variant)


def kind_of(variant: Variant) -> str:
    if variant.is_exact:
        return "exact"
    return "preprocessed" if variant.preprocessed else "captured"
