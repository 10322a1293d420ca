"""The front's state, and what every request adds to it, takes of it and gives back.

    begin     count the chunks, expect the chain in the tree, take the rank's load, write down what
              the scheduler is told; a context manager: leaving it gives back all that was taken,
              whatever happened
    observe   the answer's first token: the rank's events go to its mirror, its report or
              `cached_tokens` become fates

Holds no KV and no HTTP. One event loop, so nothing here is locked; nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from radix_ext import ChunkPrefixTree, KvAware, RoundRobin, Router, TenantTables
from radix_ext.audit import Audit, AuditDecision, AuditState, Change
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.conversations import Conversations
from sglang_chunkcache.front.event_mirror import EventMirror
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.page.history import History
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.front.reasons import Reasons, counts, fallbacks, missed
from sglang_chunkcache.front.request import Planned, RagRequest
from sglang_chunkcache.front.stock_mirror import StockMirror
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer, Fallback
from sglang_chunkcache.wire.spans import RequestSpans, pack

logger = logging.getLogger(__name__)

MEANING = {
    AuditState.ASKED: "requests are served as they ask",
    AuditState.PAUSED: "nothing is moved for such requests",
    AuditState.PROBATION: "a tenth of such requests is moved, and each of these is audited",
}


class Bookkeeper:
    """Access tables, global tree, mirrors, router, conversations, counters.

    Args:
        num_ranks: DP ranks.
        prometheus: whether SGLang serves metrics.
        tells_adapter: whether SGLang's KV events, which are listened to, say adapters.
            None: nobody listens.
    """

    def __init__(
        self,
        config: ChunkCacheConfig,
        *,
        num_ranks: int,
        prometheus: bool,
        tells_adapter: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock, self._tells_adapter = config, clock, tells_adapter
        self.kind = "stock" if config.is_stock else "chunk"
        """Of tree."""
        self.tree = ChunkPrefixTree(max_nodes=config.max_tree_nodes)
        self.mirrors = [self._mirror(rank) for rank in range(num_ranks)]
        self.router: Router = (
            KvAware(num_ranks, max_load_ratio=config.max_load_ratio)
            if config.routing == "kv_aware"
            else RoundRobin(num_ranks)
        )
        self.metrics = Metrics(prometheus=prometheus)
        self.metrics.show_tree(self.kind)
        self.history = History(clock)
        self.audit = (
            Audit(
                share=config.audit_share,
                target=config.audit_agreement,
                pause=config.audit_pause,
                # a secret, so that no client can tell which of its requests are audited
                seed=config.secret,
                server=fused_request(config, ReuseIn(mode="fused")),
                max_tenants=config.max_tenants,
            )
            if config.reuse == "fused" and config.audit_share
            else None
        )
        self.forget()

    def forget(self) -> None:
        """Forget which chunks were asked for, where they were cached, and what conversations were
        like. The cache stays, and the tree that mirrors it."""
        self.tables = TenantTables(
            window=self._config.window_requests,
            max_tenants=self._config.max_tenants,
            max_entries=self._config.max_access_entries,
        )
        self.reasons = Reasons(self._config, self.tree, self.tables)
        self.conversations = Conversations(self._config, clock=self._clock)

    @contextmanager
    def begin(self, rag: RagRequest) -> Iterator[RagRequest]:
        """Count the request, take what it takes, and give that back at the end of the block."""
        planned = rag.planned
        # First: the counts that spans_of reads are to include this request.
        self._count_request(planned)
        spans = self.spans_of(planned)
        if not self._config.is_stock:  # nobody would read it
            rag.custom_params = self.packed(spans)
        with ExitStack() as taken:
            rag.plan = self.tree.plan(planned.namespace, planned.chain, rank=planned.rank)
            # Registered one by one: an error in between gives back what was taken, and no more.
            taken.callback(self.tree.release, rag.plan)
            ids = (span.chunk for span in planned.area)
            self.tree.mark_promoted(planned.namespace, ids, promoted_len=spans.promoted_len)
            self.router.begin(planned.rank, len(planned.input_ids))
            taken.callback(self.router.end, planned.rank, len(planned.input_ids))
            taken.callback(self._end, rag)
            self.conversations.keep(rag)
            for reason in planned.fallbacks:
                self._fall_back(rag, reason)
            # here, not when the decision is made: explain plans requests that never run
            if self.audit and planned.terms and (change := self.audit.begin(planned.terms)):
                _tell(change, self._config)
                self.metrics.show_audit(self.audit)  # a pause ends without an answer
            yield rag

    def spans_of(self, planned: Planned, *, is_counted: bool = True) -> RequestSpans:
        """What the scheduler gets of a request. Counts nothing.
        `is_counted`: its chunks have been; else as if they had."""
        fusion, is_preprocessing = planned.fusion, planned.draft.is_preprocessing
        table = self.tables.of(planned.draft.identity.tenant)
        keep = frozenset[int]()
        if fusion is not None and is_preprocessing:
            keep = fusion.fresh
        elif self._config.reuse == "fused":
            # chunks that are asked for often enough to be worth host memory
            ids = (span.chunk for span in planned.spans)
            keep = table.frequent(ids, self._config.store_threshold)
        area = (span.chunk for span in planned.area)
        # uncounted, each chunk is one access short of what its request would see
        threshold = self._config.promotion_threshold - (not is_counted)
        return RequestSpans(
            spans=planned.spans,
            namespace=planned.namespace,
            promoted_len=table.promoted_run(area, threshold) if threshold else len(planned.area),
            ack=self.mirrors[planned.rank].acknowledgement,
            keep=keep,
            is_preprocessing=is_preprocessing,
            fusion=fusion,
            is_later_turn=planned.draft.num_turns + planned.draft.num_rendered > 0,
            grows=planned.grows,
        )

    def packed(self, spans: RequestSpans) -> dict[str, str]:
        """`spans` as the scheduler believes it."""
        return pack(spans, secret=self._config.secret)

    def observe(
        self, rag: RagRequest, output: dict[str, Any], *, index: int = 0, incremental: bool
    ) -> None:
        """Take what is ours out of one output of SGLang's, and learn from it.
        `index`: which of the n answers it is of."""
        meta = output["meta_info"]
        # a list: SGLang's `customized_info` has a value per token, the rank sends one in all
        entry = meta.pop(ANSWER_KEY, None)
        if rag.served_by is None:
            rag.served_by = meta.get("dp_rank") or 0
        text = entry[0] if entry else None
        answer = self._read(rag, text)
        is_over = (meta.get("finish_reason") or {}).get("type") in ("stop", "length")
        has_tokens = meta.get("completion_tokens", 0) > 0
        if not rag.is_answered and (has_tokens or is_over):
            rag.is_answered, rag.answered_at = True, time.perf_counter()
            was_heard = text is not None or self._config.is_stock
            self._book_answer(rag, answer, meta, was_heard=was_heard)
        if index == 0:
            ids = output.get("output_ids") or []
            if incremental:  # in place: a long answer has an output a token
                rag.output_ids.extend(ids)
            else:
                rag.output_ids = ids
            if meta.get("finish_reason"):
                rag.finish_reason = meta["finish_reason"]["type"]
                # `matched`: an int is a stop token, a str a stop string, which SGLang cuts off
                rag.is_cut = isinstance(meta["finish_reason"].get("matched"), str)

    def audited(self, terms: AuditDecision, agreement: float) -> None:
        """An answer was compared with an exact prefill."""
        assert self.audit is not None
        if change := self.audit.observe(terms, agreement):
            _tell(change, self._config)
        self.metrics.show_audit(self.audit)

    def stats(self) -> dict[str, Any]:
        """The front's part of `/chunkcache/stats`."""
        tree = self.tree
        return {
            "tree": {
                "kind": self.kind,
                "nodes": len(tree.nodes),
                "promoted": tree.num_promoted,
                "namespaces": len(tree.nodes.roots),
                "open_plans": tree.num_open_plans,
                "trimmed": tree.num_trimmed,
                "unknown_notices": tree.num_unknown_notices,
            },
            "tables": {"tenants": len(self.tables), "entries": self.tables.num_entries},
            "conversations": self.conversations.stats(),
            "prompt_tokens_in_flight": list(self.router.in_flight),
            "reuse": self._config.reuse,
            **self.metrics.stats(),
        }

    # Private, in order of use

    def _mirror(self, rank: int) -> RankMirror:
        if not self._config.is_stock:
            return RankMirror(self.tree, rank)
        if self._tells_adapter is None:
            return StockMirror(self.tree, rank)
        return EventMirror(
            self.tree,
            rank,
            tells_adapter=self._tells_adapter,
            dropped=lambda reason: self.metrics.count("mirrors_dropped", reason),
        )

    def _count_request(self, planned: Planned) -> None:
        draft = planned.draft
        self.metrics.observe_order(planned.order_seconds)
        # nobody has asked for these chunks: counted, they would be promoted
        if draft.is_preprocessing:
            return
        self.tables.observe(draft.identity.tenant, list(draft.labels))
        for kind, amount in (
            ("retrieved", len(draft.labels)),
            ("repeated", len(draft.repeated)),
            ("empty", len(draft.empty)),
            ("dropped", len(draft.dropped)),
            ("planned", planned.planned_len),
        ):
            self.metrics.count("chunks", kind, amount)

    def _end(self, rag: RagRequest) -> None:
        self.metrics.count("requests", rag.outcome)
        if rag.is_answered:
            mirror = self.mirrors[rag.served_by or 0]
            mirror.ended(rag.planned, rag.num_cached or 0, len(rag.output_ids))
        self.history.add(rag)

    def _read(self, rag: RagRequest, text: str | None) -> Answer | None:
        """The rank's encoded answer, its events applied.
        None: it sent none, or one that cannot be read."""
        if text is None:
            return None
        if text != rag.heard:
            # noted before it is decoded, so that an unreadable one is logged once, not per output
            rag.heard, rag.decoded = text, None
            try:
                rag.decoded = decode(text, Answer)
            # A mirror that lacks events costs hits, never an answer.
            except ValueError as error:
                logger.warning(
                    "chunk cache: the answer of rank %s cannot be read: %s", rag.served_by, error
                )
            else:
                mirror = self.mirrors[rag.served_by or 0]
                mirror.apply(rag.decoded.events)
                mirror.host_worth = rag.decoded.host_worth
                rag.epoch = rag.decoded.events.epoch
        return rag.decoded

    def _book_answer(
        self, rag: RagRequest, answer: Answer | None, meta: dict[str, Any], *, was_heard: bool
    ) -> None:
        """At the first token. Without a token SGLang drops the rank's answer, which is no fault."""
        mirror = self.mirrors[rag.served_by or 0]
        num_answers = rag.planned.draft.options.num_answers
        # of a retracted request SGLang may count tokens of the answer as cached, too
        cached = min(int(meta.get("cached_tokens", 0)), len(rag.planned.input_ids))
        mirror.answered(rag.planned, cached if num_answers == 1 else None)
        if self._config.is_stock:
            rag.epoch = mirror.acknowledgement.epoch
        if rag.epoch is not None:  # else nobody is known to have the turn's KV
            self.conversations.keep(rag)
        fusion, has_tokens = rag.planned.fusion, meta.get("completion_tokens", 0) > 0
        # the rank could not read our spans; its log says why
        is_plain = has_tokens and not was_heard
        rag.report = answer.report if answer and fusion else None
        is_unread = is_plain or (has_tokens and rag.epoch is None and fusion is None)
        if is_unread:
            self._fall_back(rag, Fallback.PLAIN_TEXT)
        elif has_tokens and fusion and rag.report is None:
            self._fall_back(rag, Fallback.NO_REPORT)
        # SGLang fills the cache with a request of its own first, which all n answers then find.
        if num_answers > 1:
            self._fall_back(rag, Fallback.PARALLEL_SAMPLING)
            self.reasons.learn(rag)
            return
        if rag.report:
            rag.known = {
                "exact": rag.report.exact,
                "relocated": rag.report.relocated,
                "recomputed": rag.report.recomputed,
            }
            for reason in rag.report.fallbacks:
                self._fall_back(rag, reason)
            for source in rag.report.sources:
                self.metrics.count("sources", source.where)
            for phase, milliseconds in rag.report.ms.items():
                self.metrics.observe("reuse_seconds", phase, milliseconds / 1000)
        elif fusion is None or is_plain:  # else what SGLang counts as cached may be moved KV
            rag.known = {"exact": cached, "relocated": 0, "recomputed": 0}
        if rag.known is not None:
            self._book_known(rag, rag.known["exact"], is_unread=is_unread)
        if not is_unread:
            self.reasons.learn(rag)

    def _book_known(self, rag: RagRequest, num_exact: int, *, is_unread: bool) -> None:
        planned = rag.planned
        for fate, amount in (rag.fates() or {}).items():
            self.metrics.count("prompt_tokens", fate, amount)
        if not planned.draft.is_preprocessing:
            assert rag.plan is not None
            rag.hit_len = sum(planned.is_found(span, num_exact) for span in planned.area)
            # from fused_from on the plan's chain has fused nodes, which exact KV does not hit
            self.tree.count_hits(rag.plan, min(rag.hit_len, planned.fused_from))
            self.metrics.count("chunks", "hit", rag.hit_len)
        rag.missed = missed(planned, num_exact, is_plain=is_unread)
        for reason in fallbacks(planned, rag.missed):
            # those of the plan were counted when the request began
            if reason not in rag.fallbacks:
                self._fall_back(rag, reason)
        if rag.missed is not None:
            for label, (num_chunks, num_tokens) in counts(planned, rag.missed).items():
                self.metrics.count("chunks_by_reason", label, num_chunks)
                self.metrics.count("tokens_by_reason", label, num_tokens)

    def _fall_back(self, rag: RagRequest, reason: Fallback) -> None:
        rag.fallbacks.append(reason)
        self.metrics.count("fallbacks", reason.value)


def _tell(change: Change, config: ChunkCacheConfig) -> None:
    """Log a new state, loudly where nothing is moved any more on the server's own terms."""
    tenant, selector, ratio = change.whose
    is_loud = change.after is AuditState.PAUSED and tenant is None
    logger.log(
        logging.ERROR if is_loud else logging.WARNING,
        "chunk cache: selector %s at ratio %s (%s) is %s (was %s): of %d audited answers %d"
        " agree with an exact prefill at less than %g of their tokens; %s",
        selector,
        ratio,
        "the server's terms" if tenant is None else f"terms of tenant {tenant}",
        change.after.value,
        change.before.value,
        change.samples,
        change.below,
        config.audit_agreement,
        MEANING[change.after],
    )
