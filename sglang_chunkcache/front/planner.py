"""From a Draft to what is sent where: the order of its chunks, the rank, token ids and spans.

Pure: reads the bookkeeper's tree, tables and router; counts and takes nothing. What explains a
request plans it and stops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import cast

from radix_ext import (
    Chunk,
    Ordering,
    OrderPolicy,
    Span,
    held_history,
    leading_area,
    order_chunks,
)
from radix_ext.audit import AuditDecision
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.fusion_options import recipe_of
from sglang_chunkcache.front.request import Draft, Options, Planned
from sglang_chunkcache.wire.spans import namespace_of


class Planner:
    """Plans of one front. `context_len` is the model's in tokens, prompt and answer together."""

    def __init__(
        self, config: ChunkCacheConfig, bookkeeper: Bookkeeper, *, context_len: int
    ) -> None:
        self._config, self._bookkeeper, self._context_len = config, bookkeeper, context_len

    def plan(self, draft: Draft) -> Planned:
        """Order and route, then assemble. A history with chunks is fixed: then only its rank is
        chosen, by who has the history.

        Raises:
            RequestError: an empty prompt, or one longer than the context; names the field.
        """
        # first: whether KV is moved decides the order, the recipe and the reasons
        draft, terms = self._on_terms(draft)
        identity = draft.identity
        namespace = namespace_of(draft.head, identity.extra_key, identity.cache_salt, identity.lora)
        start = time.perf_counter()
        policy = draft.options.order or cast(OrderPolicy, self._config.order)
        fusion = draft.options.fusion
        # only chains that the tree's order aims for: other orders stay as their papers have them
        grows_from = None
        if fusion is not None and not fusion.plain and policy == "tree":
            # `always` moves what it can
            grows_from = inf if fusion.always else self._config.promotion_threshold
        rank, ordering, is_away = self._decide(draft, namespace, policy, grows_from)
        seconds = time.perf_counter() - start
        by_id = {item.chunk.id: item for item in draft.chunks}
        ordered = (
            list(draft.chunks) if draft.history else [by_id[chunk.id] for chunk in ordering.chunks]
        )
        ids, spans = draft.assemble(ordered)
        self._check_length(len(ids), draft.options)
        area = leading_area(spans)
        mirror, held_len = self._bookkeeper.mirrors[rank], ordering.held_len
        num_exact = held_len + ordering.planned_len - ordering.num_fused
        expected = None
        if fusion is None:
            # reasons of exact reuse; with moved KV the rank's report has its own
            expected = self._bookkeeper.reasons.expect(
                draft,
                namespace,
                ids,
                spans,
                area_len=len(area),
                held_len=held_len,
                rank=rank,
                epochs=self._epochs(),
            )
        else:
            question = ids[area[-1].end :] if area else ()
            fusion = replace(fusion, recipe=recipe_of(fusion, question, draft.earlier_recipe))
        return Planned(
            draft,
            ids.tolist(),
            spans,
            area,
            namespace,
            rank,
            order=[*(draft.labels[item.chunk.id] for item in ordered), *draft.later_labels],
            planned_len=num_exact,
            fused_from=self._fused_from(draft, area, num_exact, ordering.num_fused),
            fusion=fusion,
            order_seconds=seconds,
            grows=grows_from is not None,
            terms=terms,
            expected=expected,
            is_away=is_away,
            border=mirror.border,
            held_len=held_len if held_len or mirror.holds_behind(namespace) else None,
        )

    # Private, in order of use

    def _on_terms(self, draft: Draft) -> tuple[Draft, AuditDecision | None]:
        """The draft as the audit lets it be served."""
        fusion, audit = draft.options.fusion, self._bookkeeper.audit
        if fusion is None or audit is None or draft.is_preprocessing:
            return draft, None
        terms = audit.decide(fusion, draft.identity.tenant)
        if not terms.is_moved:
            draft = replace(draft, options=replace(draft.options, fusion=None))
        return draft, terms

    def _decide(
        self, draft: Draft, namespace: str, policy: OrderPolicy, grows_from: float | None
    ) -> tuple[int, Ordering, bool]:
        """(rank, its order, whether another rank has more of the history)."""
        router, rank = self._bookkeeper.router, draft.options.rank
        by_turns, fusion = self._config.routing == "round_robin", draft.options.fusion
        # By its recipe the request may find what others have fused, unless that depends on the
        # question. `plain` prompts preprocess: each has a recipe of its own, which nothing else
        # finds.
        is_shared = fusion is not None and not fusion.asks_the_question and not fusion.plain
        ranks = (
            [rank]
            if rank is not None
            # turns depend on nothing that is cached, so one rank's order is enough
            else [router.choose({})]
            if by_turns
            else range(router.num_ranks)
        )
        worths = {mirror.rank: mirror.host_worth for mirror in self._bookkeeper.mirrors}
        is_fixed = bool(draft.history)
        # the history's chunks stay where they are: its area is only weighed
        chunks = (
            _chunks_of(leading_area(draft.history))
            if is_fixed
            else [item.chunk for item in draft.chunks]
        )
        recipe = recipe_of(fusion, (), draft.earlier_recipe) if is_shared and fusion else None
        orderings = {
            rank: order_chunks(
                "retriever" if is_fixed else policy,
                self._bookkeeper.tree,
                self._bookkeeper.tables.of(draft.identity.tenant),
                namespace,
                chunks,
                rank=rank,
                max_visits=self._config.max_search_visits,
                recipe=recipe,
                grows_from=grows_from,
                host_worth=worths.get(rank, 1.0),
            )
            for rank in ranks
        }
        history = self._held_history(draft)
        cached = {
            # not their sum: the history begins with the area that was ordered
            rank: max(ordering.worth(worths.get(rank, 1.0)), history.get(rank, 0))
            for rank, ordering in orderings.items()
        }
        if rank is None:
            rank = ranks[0] if by_turns else router.choose(cached, history)
        return rank, orderings[rank], cached[rank] < max(history.values(), default=0)

    def _epochs(self) -> list[int]:
        """Of each rank's cache."""
        return [mirror.acknowledgement.epoch for mirror in self._bookkeeper.mirrors]

    def _held_history(self, draft: Draft) -> dict[int, int]:
        """Rank -> tokens of the earlier turns that it has."""
        if draft.turn is None:
            return {}
        epochs = self._epochs()
        fusion = draft.options.fusion
        recipe = recipe_of(fusion, (), draft.earlier_recipe) if fusion is not None else ""
        # a tool loop's last step stands behind the turns and has a home of its own
        step = draft.turn.step
        turns = (*draft.turn.fitted.turns, *([step] if step else ()))
        return held_history(turns, epochs, recipe=recipe)

    def _fused_from(
        self, draft: Draft, area: Sequence[Span], num_exact: int, num_fused: int
    ) -> int:
        """From which chunk on the KV is expected fused: where fused KV is found, or at a chunk that
        was asked for before, so that there is a source of it. Whether the exact chain grows by that
        one is the rank's decision.
        """
        if draft.options.fusion is None:
            return len(area)
        if num_fused:
            return num_exact
        table = self._bookkeeper.tables.of(draft.identity.tenant)
        asked = (n for n in range(num_exact, len(area)) if table.count(area[n].chunk))
        return next(asked, len(area))

    def _check_length(self, prompt_len: int, options: Options) -> None:
        answer_len = max(1, options.max_new_tokens or 1)
        if prompt_len + answer_len > self._context_len:
            field = (
                # a shorter answer would not help where the prompt alone is too long
                options.prompt_field if prompt_len >= self._context_len else options.length_field
            )
            raise RequestError(
                f"{field}: prompt of {prompt_len} tokens and answer of {answer_len} "
                f"exceed the context of {self._context_len}"
            )
        if not prompt_len:
            raise RequestError(f"{options.prompt_field}: the prompt is empty")


def _chunks_of(spans: Sequence[Span]) -> list[Chunk]:
    return [Chunk(span.chunk, span.end - span.start) for span in spans]
