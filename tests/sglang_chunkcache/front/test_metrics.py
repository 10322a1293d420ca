"""Counters: plain totals always, Prometheus only when asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from radix_ext.audit import Audit
from radix_ext.fusion_request import FusionRequest
from sglang_chunkcache.front.metrics import COUNTERS, Metrics


@pytest.fixture
def exported() -> Iterator[Metrics]:
    """Metrics that Prometheus shows, until the test ends."""
    registry = pytest.importorskip("prometheus_client").REGISTRY
    metrics = Metrics(prometheus=True)
    yield metrics
    for collector in metrics._exported.values():
        registry.unregister(collector)


def shown(name: str, **labels: str) -> float | None:
    """What Prometheus reads."""
    from prometheus_client import REGISTRY

    value: float | None = REGISTRY.get_sample_value(f"chunkcache:{name}", labels)
    return value


def test_counts_add_up_by_label() -> None:
    """They show what happened, not what did not."""
    metrics = Metrics(prometheus=False)
    for num in (1, 2):
        metrics.count("requests", "finished", num)
        metrics.observe_order(0.25)
        metrics.observe("reuse_seconds", "select", 0.25)
        metrics.observe("retrieval_seconds", "select", 0.5)
    metrics.count("sources", "host", 0)
    totals = {name: counts for name, counts in metrics.totals().items() if counts}
    assert totals == {"requests": {"finished": 3}}
    assert metrics.totals().keys() == COUNTERS.keys()
    assert (metrics.order_seconds, metrics.num_orders) == (0.5, 2)
    assert metrics.seconds("reuse_seconds") == {"select": 0.5}
    assert metrics.seconds("retrieval_seconds") == {"select": 1.0}
    with pytest.raises(KeyError):
        metrics.count("nonsense", "x")


def test_prometheus_shows_the_same_counts(exported: Metrics) -> None:
    exported.count("prompt_tokens", "exact", 7)
    exported.observe_order(1e-5)
    exported.observe("reuse_seconds", "select", 0.25)
    exported.observe("retrieval_seconds", "queued", 0.5)
    assert shown("retrieval_seconds_sum", phase="queued") == 0.5
    assert shown("reuse_seconds_sum", phase="select") == 0.25
    assert shown("prompt_tokens_total", fate="exact") == 7
    assert shown("order_seconds_count") == 1


def test_state_of_retrieval_is_one_of_its_names(exported: Metrics) -> None:
    """An alarm is on `chunkcache:retrieval_state{state="down"} == 1`."""
    for state in ("up", "down", "stale"):
        exported.show_retrieval(state)
    assert [shown("retrieval_state", state=state) for state in ("up", "stale", "down")] == [0, 1, 0]


def test_audits_are_shown_by_selector_ratio_and_tenant(exported: Metrics) -> None:
    """Means are sum by count."""
    rows: list[Any] = [("query", 0.15, 0.5, 0.25), ("query", 0.15, 1.0, 0.5)]
    rows += [("none", None, 1.0, 0.0), ("critical", "auto", 1.0, 0.0)]
    for selector, ratio, agreement, kl in rows:
        exported.observe_audit(selector, ratio, "t", agreement, kl, is_below=agreement < 1)
    server = FusionRequest("query", 0.15)
    audit = Audit(share=1, target=0.9, pause=9, seed="", server=server, max_tenants=9)
    exported.show_audit(audit)
    for fusion in [server] * 5 + [FusionRequest("first", n / 10) for n in range(3)]:
        terms = audit.decide(fusion, "t")
        audit.begin(terms)
        audit.observe(terms, 0.0)
    exported.show_audit(audit)
    labels = {"selector": "query", "ratio": "0.15", "tenant": "t"}
    assert [shown("audits_total", target=each, **labels) for each in ("below", "met")] == [1, 1]
    for selector, told in (("none", "none"), ("critical", "auto")):
        assert shown("audits_total", target="met", selector=selector, ratio=told, tenant="t") == 1
    assert shown("audit_agreement_sum", **labels) == 1.5
    assert shown("audit_agreement_count", **labels) == 2
    assert shown("audit_kl_sum", **labels) == 0.75
    assert shown("audit_state", selector="query", state="paused") == 1
    assert shown("audit_state", selector="query", state="asked") == 0
    assert shown("audit_state", selector="first", state="asked") is None
    assert shown("audit_own_terms", state="asked") == 3


def test_prometheus_is_not_imported_unasked() -> None:
    """It decides on its multiprocess mode when imported; SGLang sets that up later."""
    code = """if True:
        import sys
        from sglang_chunkcache.front.metrics import Metrics
        metrics = Metrics(prometheus=False)
        metrics.count("requests", "x"); metrics.observe_order(1)
        metrics.observe("reuse_seconds", "select", 1)
        Metrics(prometheus=True)
        sys.exit("prometheus_client" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
