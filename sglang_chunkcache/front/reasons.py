"""Why a chunk was not found cached in its place, for every chunk of an exact request: exactly one
reason each.

    before the request runs                                   by the tree, and by what the tenant's
                                                              answers had
      in the tree in its place                                evicted (the tree was behind),
                                                              must_compute
      seen behind the same text      still there, elsewhere   other_order, other_rank
                                     gone                     evicted
      seen behind other text alone                            other_head, and where the two texts
                                                              part
      never seen                                              new_chunk; new_tenant, where the
                                                              tenant is new
    with its answer                                           what was not found takes its reason;
                                                              all is noted

Text means all before the chunk that is no chunk (`text_before`), as with moved KV. So the chunks of
a conversation's later turns, which follow its history, are `other_head` if they were seen
elsewhere; the texts part where the first area ends.

Everything is read of the request's own tenant: nothing here differs with what another one has
cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

from radix_ext import (
    ChunkPrefixTree,
    Heads,
    Parting,
    Place,
    Places,
    Span,
    TenantTables,
    extend_chain,
    root_chain,
    text_before,
)
from sglang_chunkcache.config import MAX_HEAD_BYTES, MAX_HEAD_TOKENS, MAX_HEADS, ChunkCacheConfig
from sglang_chunkcache.front.request import (
    Draft,
    Expected,
    Missed,
    Planned,
    RagRequest,
    Reason,
)
from sglang_chunkcache.wire.report import Fallback

OF = {fallback: Reason(fallback) for fallback in Fallback}

HISTORY = "+"
"""In front of the names of texts that begin with a first area's chunks."""


class Reasons:
    """What tells reasons apart, of all tenants, within bounds."""

    def __init__(
        self, config: ChunkCacheConfig, tree: ChunkPrefixTree, tables: TenantTables
    ) -> None:
        self._tree, self._tables, self._is_stock = tree, tables, config.is_stock
        self._places = Places(max_places=config.max_tree_nodes)
        self._heads = Heads(
            max_heads=MAX_HEADS, max_tokens=MAX_HEAD_TOKENS, max_bytes=MAX_HEAD_BYTES
        )

    def expect(
        self,
        draft: Draft,
        namespace: str,
        ids: Sequence[int],
        spans: Sequence[Span],
        *,
        area_len: int,
        held_len: int,
        rank: int,
        epochs: Sequence[int],
    ) -> Expected:
        """Why each chunk would be computed. Changes nothing.

        Args:
            ids: the prompt, as array 'i'.
            area_len: chunks of the first area.
            held_len: of these, leading ones that `rank` is expected to hold in this place.
            epochs: of each rank's cache, now.
        """
        tenant = draft.identity.tenant
        texts = _texts(namespace, spans, ids, area_len)
        prefixes = () if area_len == len(spans) else tuple(_prefixes(spans))
        # SGLang matches no further: it needs the last token's logits, and those of asked logprobs
        logprob_start = draft.options.logprob_start
        must_from = len(ids) - 1 if logprob_start is None else min(len(ids) - 1, logprob_start)
        # who names no tenant shares with all who name none, and is nobody new
        is_new = draft.identity.is_named and tenant not in self._tables
        new = OF[Fallback.NEW_TENANT if is_new else Fallback.NEW_CHUNK]
        reasons = [
            OF[Fallback.MUST_COMPUTE if span.end > must_from else Fallback.EVICTED]
            for span in spans
        ]
        others = dict[int, str]()
        for index in range(held_len, len(spans)):
            chunk = spans[index].chunk
            if (place := self._places.behind(texts[index], chunk)) is None:
                reasons[index] = new
                if (seen := self._places.last_text(tenant, chunk)) is not None:
                    others[index] = seen
                continue
            # The tree ends with the first area. Of chunks behind it only their place is known.
            if index < area_len:
                other = self._elsewhere(place, rank, draft, namespace, spans[: index + 1])
            else:
                other = _elsewhere(place, prefixes[index], rank, epochs)
            if other is not None:
                reasons[index] = OF[other]
        for index, reason in self._other_heads(draft, namespace, spans, area_len, others):
            reasons[index] = reason
        return Expected(tuple(reasons), texts)

    def learn(self, rag: RagRequest) -> None:
        """The request is answered, so its chunks are cached where they stand."""
        planned, draft = rag.planned, rag.planned.draft
        if draft.is_preprocessing or rag.plan is None:
            return
        tenant, rank = draft.identity.tenant, rag.served_by or 0
        epoch = rag.epoch or 0
        # from `fused_from` on KV is moved: no place of exact KV
        path = rag.plan.node.path()[: planned.fused_from] if rag.plan.node is not None else ()
        for node in path:
            self._places.note(
                tenant, planned.namespace, node.chunk_id, Place(node.chain, rank, epoch)
            )
        if path:
            self._heads.note(tenant, planned.namespace, draft.head, draft.outline)
        if planned.expected is not None and len(planned.area) < len(planned.spans):
            new = set(range(len(planned.area), len(planned.spans)))
            if rag.missed is not None:  # what was found has been noted
                new &= {i for each in rag.missed for i in each.spans}
            texts, prefixes = planned.expected.texts, tuple(_prefixes(planned.spans))
            for i in sorted(new):
                place = Place(prefixes[i], rank, epoch)
                self._places.note(tenant, texts[i], planned.spans[i].chunk, place)

    # Private, in order of use

    def _elsewhere(
        self, place: Place, rank: int, draft: Draft, namespace: str, chain: Sequence[Span]
    ) -> Fallback | None:
        """Of the last chunk of `chain`, in the first area, which the tree knows. None: gone."""
        if self._is_stock and draft.identity.extra_key is not None:  # of which no event tells
            here = reduce(extend_chain, (span.chunk for span in chain), root_chain(namespace))
            return None if place.chain == here else Fallback.OTHER_ORDER
        node = self._tree.nodes.find(place.chain)  # type: ignore[arg-type]
        if node is None or not node.is_held():
            return None
        is_here = [each.chunk_id for each in node.path()] == [span.chunk for span in chain]
        return Fallback.OTHER_RANK if is_here and not node.is_held(rank) else Fallback.OTHER_ORDER

    def _other_heads(
        self,
        draft: Draft,
        namespace: str,
        spans: Sequence[Span],
        area_len: int,
        others: dict[int, str],
    ) -> Iterator[tuple[int, Reason]]:
        """Index and reason of chunks that were seen behind these other texts."""
        # texts that go on after an area are no heads, and none of them is kept
        heads = {text for text in others.values() if not text.startswith(HISTORY)} - {namespace}
        parting = None
        if heads:
            tenant = draft.identity.tenant
            parting = self._heads.parting(tenant, namespace, draft.head, draft.outline, among=heads)
        for index, text in others.items():
            if text in heads:
                yield index, Reason(Fallback.OTHER_HEAD, parting)
            else:  # one of the two texts goes on where the other one ends
                end = spans[0].start if index < area_len else spans[area_len - 1].end
                yield index, Reason(Fallback.OTHER_HEAD, Parting("history", end))


def missed(
    planned: Planned, num_found: int, *, is_plain: bool = False
) -> tuple[Missed, ...] | None:
    """The chunks that end after the first `num_found` tokens, which were found cached, by reason.
    None: the request asked for moved KV. `is_plain`: the rank has not read where chunks are."""
    if planned.expected is None:
        return None
    if not planned.spans or planned.is_found(planned.spans[-1], num_found):
        return ()
    found: dict[Reason, list[int]] = {}
    for i, (span, reason) in enumerate(zip(planned.spans, planned.expected.reasons, strict=True)):
        if planned.is_short and reason.fallback is Fallback.EVICTED:
            reason = OF[Fallback.MUST_COMPUTE]
        if not planned.is_found(span, num_found):
            found.setdefault(OF[Fallback.PLAIN_TEXT] if is_plain else reason, []).append(i)
    lens = [span.end - span.start for span in planned.spans]
    return tuple(
        Missed(reason, tuple(spans), sum(lens[i] for i in spans)) for reason, spans in found.items()
    )


def fallbacks(planned: Planned, missed: Sequence[Missed] | None) -> Iterator[Fallback]:
    """Its reasons; one may come twice."""
    draft = planned.draft
    if planned.expected is not None and not planned.spans and not draft.is_preprocessing:
        yield Fallback.NO_CHUNKS
    yield from (each.reason.fallback for each in missed or ())


def counts(planned: Planned, missed: Sequence[Missed]) -> dict[str, tuple[int, int]]:
    """Chunks and their tokens, by reason or `found`:
    those sent with the request, and those of its history that it missed."""
    gone = {i for each in missed for i in each.spans}
    # the history's chunks are hits by construction, so they count only where they are missed
    own = range(len(planned.spans) - len(planned.order), len(planned.spans))
    by_reason = {"found": [i for i in own if i not in gone]}
    for each in missed:
        by_reason.setdefault(each.reason.fallback, []).extend(each.spans)
    lens = [span.end - span.start for span in planned.spans]
    return {
        reason: (len(spans), sum(lens[i] for i in spans)) for reason, spans in by_reason.items()
    }


def _texts(
    namespace: str, spans: Sequence[Span], ids: Sequence[int], area_len: int
) -> tuple[str, ...]:
    """Names the text before each chunk."""
    # no hash of a text where no chunk stands behind one
    if area_len == len(spans):
        return (namespace,) * area_len
    later = text_before(namespace, spans, ids)[area_len:]
    return (*(namespace,) * area_len, *(HISTORY + name for name in later))


def _prefixes(spans: Sequence[Span]) -> Iterator[int]:
    """Names the chunks up to and with each."""
    prefix = 0
    for span in spans:
        # Python's hash stays in this process; should two be equal, a reason is wrong and no answer
        prefix = hash((prefix, span.chunk))
        yield prefix


def _elsewhere(place: Place, prefix: int, rank: int, epochs: Sequence[int]) -> Fallback | None:
    """Of a chunk behind the first area, of which the tree knows nothing. None: gone."""
    # nobody tells of evictions there; the epoch tells that the cache was emptied
    if place.epoch != epochs[place.rank]:
        return None
    if place.chain != prefix:
        return Fallback.OTHER_ORDER
    # on this rank, in this place, and yet not found: evicted
    return None if place.rank == rank else Fallback.OTHER_RANK
