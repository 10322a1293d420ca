"""What of a request's chunks comes into the store in host memory, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from radix_ext import text_before
from radix_ext.cfo import Scored
from radix_ext.sources import ChunkSources
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.fusion.capture import Captures
from sglang_chunkcache.fusion.metrics import StoreMetrics
from sglang_chunkcache.fusion.outcome import outcome_of
from sglang_chunkcache.fusion.outward import OutwardWatch
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.scheduler.node import ChunkIdentity, facts, identity_of, state
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import Cleared

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

KINDS = ("captured", "preprocessed", "exact")
"""Of KV in the store."""


class StoreKeeper:
    """Of one rank.

    Args:
        tier: below the store. None: what leaves the store is gone.
        metrics: shown what `stats` says of the store. None: no Prometheus.
        in_host_memory: whether the store has, or is about to have, a node of the tree as a part of
            its exact chain. None: exact chains are not in the store.
        token_bytes: of KV in the store.
    """

    def __init__(
        self,
        store: VariantIndex,
        captures: Captures,
        sources: ChunkSources,
        outward: OutwardWatch,
        *,
        tier: StorageTier | None,
        metrics: StoreMetrics | None,
        in_host_memory: Callable[[TreeNode], bool] | None,
        token_bytes: int,
    ) -> None:
        self._store, self.captures, self._sources, self._outward = store, captures, sources, outward
        self._tier, self._metrics, self._token_bytes = tier, metrics, token_bytes
        self._in_host_memory = in_host_memory or (lambda node: False)
        self._kv_bytes, self._saved_bytes = (dict.fromkeys(KINDS, 0) for _ in range(2))
        self._was_put_off = False
        self.num_failed = 0
        """Captures."""
        store.watchers.append(self._changed)

    def keep(self, req: Req, path: Sequence[TreeNode]) -> None:
        """Tell the store what was asked for, and queue the request's chunks that have earned it.

        A chunk that was to be preprocessed after neighbours is none of them if some were computed
        in context, as all are after a failed pass.
        """
        spans, move = state(req).spans, outcome_of(req).move
        assert spans is not None
        chunks = [node for node in path if facts(node).chunk is not None]
        self._outward.tell(req, chunks)
        if not spans.is_preprocessing:
            asked = [
                (identity, facts(node).head, facts(node).prefix)
                for node in chunks
                if (identity := identity_of(node))
            ]
            self._store.ask(asked)
            if self._tier is not None:
                self._tier.count_asked(asked)
        else:
            is_filled = move is not None and Fallback.PASS_FAILED not in move.fallbacks
            moved = {
                piece.span
                for piece in (move.plan.pieces if move and is_filled else ())
                if piece.source is not None
            }
            if not moved.issuperset(range(1, len(spans.spans) - 1)):
                return
        scored = spans.fusion.scored if spans.fusion else Scored.NOTHING
        keep: Collection[int] = spans.keep
        if not self.captures.at_least(scored):
            # else it would be copied and written twice, as a chunk and as a part of its chain
            keep = [i for i in keep if i < len(chunks) and not self._in_host_memory(chunks[i])]
        self.captures.add(chunks, keep, is_preprocessing=spans.is_preprocessing, scored=scored)

    def after(self, *, first_tokens_wait: bool = False, is_ahead: bool = False) -> None:
        """Score and store some of what waits: after decoding, and after a prefill only if the
        forward before was one, too.

        After one that was ahead of requests all of it: there as much comes with each forward, and
        nothing else makes room.
        """
        is_put_off = first_tokens_wait and not self._was_put_off
        self._was_put_off = is_put_off
        if is_put_off:
            return
        if self._metrics is not None and self._metrics.is_due:
            self.stats()
        self.num_failed += self.captures.drain() if is_ahead else self.captures.run()

    def look_ahead(self, req: Req, spans: RequestSpans) -> tuple[bool, bool]:
        """(whether store or storage has what the chunk is to become, whether to ask again before it
        is sent).

        What the store alone has is written, if the storage has no place for it in its queue when it
        is asked again.
        """
        assert spans.fusion is not None
        heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
        chunks, scored = (
            tuple(span.chunk for span in spans.spans),
            self.captures.at_least(spans.fusion.scored),
        )
        is_behind = self._tier is not None and self._tier.storage.writes.is_behind
        must_wait = False
        for index in spans.keep:
            identity, prefix = (
                ChunkIdentity(chunks[index], req.extra_key, req.cache_salt),
                chunks[:index],
            )
            if self._tier is not None and self._tier.has(identity, heads[index], prefix, scored):
                continue
            variant = self._store.get(identity, heads[index], prefix)
            is_kept = variant is not None and (
                variant.is_exact or variant.preprocessed == bool(prefix)
            )
            if variant is None or not is_kept or variant.scored < scored:
                is_coming = self._tier is not None and self._tier.fetch(
                    req, spans, spans.fusion, self._sources
                )
                if is_coming or self._tier is None:
                    return False, is_coming
                num_tokens = spans.spans[index].end - spans.spans[index].start
                return False, not self._tier.reserve(identity, heads[index], prefix, num_tokens)
            if self._tier is not None and not variant.is_exact:
                self._tier.write(identity, variant)
                must_wait |= is_behind
        return True, must_wait

    def clear_store(self) -> Cleared:
        """Empty the store, preprocessed chunks and those that wait for it included. Exact chains
        stay."""
        self.captures.clear()
        before = self._store.stats()
        self._store.clear(keep=lambda variant: variant.is_exact)
        after = self._store.stats()
        return Cleared(
            before.num_chunks - after.num_chunks,
            before.num_variants - after.num_variants,
            before.num_bytes - after.num_bytes,
        )

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
        if self._metrics is not None:
            self._metrics.show(found)
        return found

    # Private

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        kind = kind_of(variant)
        sign = 1 if is_here else -1
        self._kv_bytes[kind] += sign * variant.blob.nbytes
        self._saved_bytes[kind] += sign * variant.blob.saved_bytes
        if self._tier is not None and not variant.is_exact:
            self._tier.store_changed(identity, variant, is_here)


def kind_of(variant: Variant) -> str:
    """Of `KINDS`."""
    if variant.is_exact:
        return "exact"
    return "preprocessed" if variant.preprocessed else "captured"
