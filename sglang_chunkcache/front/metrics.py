"""Counters of the front process: plain integers for `/chunkcache/stats`, and Prometheus under
SGLang's `/metrics`.

`prometheus_client` decides on its multiprocess mode when it is imported, and SGLang sets that up
only while it starts. So the import waits until the first count, and with metrics off never happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from radix_ext.audit import Audit

COUNTERS = {
    "requests": (
        "outcome",
        "RAG requests by outcome: finished, aborted, refused, unsearched (its search failed)",
    ),
    "prompt_tokens": ("fate", "prompt tokens by fate: exact, relocated, recomputed, computed"),
    "chunks": (
        "kind",
        "chunks by kind: retrieved, repeated (in one request), empty, dropped (already seen),"
        " planned, hit",
    ),
    "sources": (
        "source",
        "chunks of fused requests after their exact prefix, by source: device, host, gap (none)",
    ),
    "searches": (
        "outcome",
        "searches of the index by outcome: found, empty, refused, failed, cancelled, full (queue)",
    ),
    "guarded": (
        "field",
        "requests refused because SGLang would have ended, on any endpoint, by field",
    ),
    "audit_skips": ("reason", "requests drawn for an audit that were not compared, by reason"),
    "chunks_by_reason": (
        "reason",
        "chunks of exact requests, by why they were computed; found: they were not",
    ),
    "tokens_by_reason": ("reason", "tokens of these chunks, likewise"),
    "misplaced": (
        "field",
        "requests to /v1 with chunks, which only /rag/v1 reads, by field: chunks, messages.chunks",
    ),
    "mirrors_dropped": (
        "reason",
        "views of a rank's tree given up because its KV events failed, by reason: gap, malformed,"
        " foreign, repeated, silent",
    ),
    "fallbacks": ("reason", "things that were computed because reuse was not possible, by reason"),
}
"""Name -> (label, help). Every count is a number of requests, tokens, chunks or searches,
as its name says."""

RETRIEVAL_STATES = ("up", "stale", "down")
"""See `search_queue.RetrievalState`."""

_STEPS_S = [float(f"{step}e{power}") for power in range(-5, 1) for step in (1, 2, 5)]
BUCKETS_S = {
    # orders are decided on the event loop, which serves nobody meanwhile: 10 ms would be felt
    "order_seconds": [each for each in _STEPS_S if each <= 1e-2],
    "reuse_seconds": [each for each in _STEPS_S if each >= 1e-4],
    "retrieval_seconds": [*(each for each in _STEPS_S if each >= 1e-4), 10.0],
}

AUDITED = "selector ratio tenant"
"""Labels of an audit's figures."""
FIGURES: dict[str, tuple[str, str, str]] = {
    **{name: ("Counter", label, text) for name, (label, text) in COUNTERS.items()},
    "order_seconds": ("Histogram", "", "time of one order and route decision"),
    "reuse_seconds": (
        "Histogram",
        "phase",
        "time that a fused request's reuse took, by phase: lookup, relocate, select, recompute,"
        " extend",
    ),
    "retrieval_seconds": (
        "Histogram",
        "phase",
        "time that retrieval took, by phase: queued, rerank (a request); encode, dense, bm25, read"
        " (a batch)",
    ),
    "audits": (
        "Counter",
        f"{AUDITED} target",
        "answers compared with an exact prefill, by target: met, below",
    ),
    # a Summary's sum and count give the mean; buckets would multiply with tenants and ratios
    "audit_agreement": (
        "Summary",
        AUDITED,
        "share of an audited answer's positions whose best token is that of an exact prefill",
    ),
    "audit_kl": (
        "Summary",
        AUDITED,
        "KL(exact || moved) of an audited answer in nats, mean of its positions",
    ),
    "audit_state": (
        "Gauge",
        "selector state",
        "1 for the state of the server's terms: asked, paused, probation; 0 for the others",
    ),
    "audit_own_terms": (
        "Gauge",
        "state",
        "terms of tenants' own (another selector, ratio or option) by state: asked, paused,"
        " probation",
    ),
    "tree": ("Gauge", "kind", "1 for the tree that has the KV: chunk (ours) or stock (SGLang's)"),
    "retrieval_state": (
        "Gauge",
        "state",
        "1 for the state of retrieval: up, stale (an index that was replaced answers), down; 0 for"
        " the others",
    ),
}
"""Of Prometheus: name -> (kind of metric, labels, help)."""


class Metrics:
    """Counts once, shows twice."""

    def __init__(self, *, prometheus: bool) -> None:
        self._prometheus = prometheus
        self._totals: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
        self._exported: dict[str, Any] = {}
        self.order_seconds = 0.0
        self.num_orders = 0
        self._seconds = {name: defaultdict[str, float](float) for name in BUCKETS_S}

    def count(self, name: str, label: str, amount: int = 1) -> None:
        # a label with 0 would become a series of something that never happened
        if not amount:
            return
        self._totals[name][label] += amount
        if self._prometheus:
            self._export(name, label).inc(amount)

    def observe_order(self, seconds: float) -> None:
        self.order_seconds += seconds
        self.num_orders += 1
        if self._prometheus:
            self._export("order_seconds").observe(seconds)

    def observe(self, name: str, phase: str, seconds: float) -> None:
        """One phase of `reuse_seconds` or `retrieval_seconds`."""
        self._seconds[name][phase] += seconds
        if self._prometheus:
            self._export(name, phase).observe(seconds)

    def seconds(self, name: str) -> dict[str, float]:
        """What its phases have taken so far."""
        return {phase: round(total, 6) for phase, total in self._seconds[name].items()}

    def show_retrieval(self, state: str) -> None:
        """Which of RETRIEVAL_STATES holds."""
        if self._prometheus:
            for name in RETRIEVAL_STATES:
                self._export("retrieval_state", name).set(name == state)

    def show_tree(self, kind: str) -> None:
        if self._prometheus:
            self._export("tree", kind).set(1)

    def observe_audit(
        self,
        selector: str,
        ratio: float | str | None,
        tenant: str,
        agreement: float,
        kl: float,
        *,
        is_below: bool,
    ) -> None:
        """One answer compared with an exact prefill; a ratio of None recomputes nothing."""
        if self._prometheus:
            labels = (
                selector,
                # the caller bounds how many ratios and tenants have series of their own
                f"{ratio:g}" if isinstance(ratio, float) else ratio or "none",
                tenant,
            )
            self._export("audits", *labels, "below" if is_below else "met").inc()
            self._export("audit_agreement", *labels).observe(agreement)
            self._export("audit_kl", *labels).observe(kl)

    def show_audit(self, audit: Audit) -> None:
        """Which state holds for the server's terms, and for how many of tenants' own each does."""
        if self._prometheus:
            # all states, so that the one that was left goes back to 0
            for state, number in audit.own_states.items():
                self._export("audit_state", audit.server.selector, state.value).set(
                    state is audit.state
                )
                self._export("audit_own_terms", state.value).set(number)

    def stats(self) -> dict[str, Any]:
        """The counts' part of `/chunkcache/stats`. Hit rates are shares since the start: prompt
        tokens found cached, and chunks found cached of those retrieved; None before any."""
        tokens, chunks = self._totals["prompt_tokens"], self._totals["chunks"]
        order_s = _share(self.order_seconds, self.num_orders)
        return {
            "hit_rates": {
                "tokens": _share(tokens["exact"], tokens.total()),
                "chunks": _share(chunks["hit"], chunks["retrieved"]),
            },
            "reasons": {
                # `count` keeps no zeros, so a counter that has a label has a total
                name: {label: n / self._totals[name].total() for label, n in counts.items()}
                for name, counts in self._totals.items()
                if name in ("chunks_by_reason", "tokens_by_reason")
            },
            "order_us_mean": None if order_s is None else round(1e6 * order_s, 1),
            "reuse_seconds": self.seconds("reuse_seconds"),
            **self.totals(),
        }

    def totals(self) -> dict[str, dict[str, int]]:
        return {name: dict(counter) for name, counter in self._totals.items()}

    def _export(self, name: str, *labels: str) -> Any:
        if name not in self._exported:
            import prometheus_client

            kind, names, text = FIGURES[name]
            more: dict[str, Any] = {}
            if kind == "Gauge":
                # the default mode has a series for each process id; only the front sets ours
                more["multiprocess_mode"] = "mostrecent"
            elif kind == "Histogram":
                more["buckets"] = BUCKETS_S[name]
            create = vars(prometheus_client)[kind]
            self._exported[name] = create(f"chunkcache:{name}", text, names.split(), **more)
        return self._exported[name].labels(*labels) if labels else self._exported[name]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
