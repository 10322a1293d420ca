"""Counters: plain totals always, Prometheus only when asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_chunkcache.front.metrics import COUNTERS, Metrics


def test_counts_add_up_by_label() -> None:
    """Totals for `/chunkcache/stats`."""
    metrics = Metrics(prometheus=False)
    metrics.count("requests", "finished")
    metrics.count("requests", "finished", 2)
    metrics.count("chunks", "hit", 5)
    assert metrics.totals() == {
        "requests": {"finished": 3},
        "prompt_tokens": {},
        "chunks": {"hit": 5},
        "sources": {},
        "searches": {},
        "guarded": {},
        "audit_skips": {},
        "chunks_by_reason": {},
        "tokens_by_reason": {},
        "misplaced": {},
        "fallbacks": {},
    }


def test_count_of_zero_leaves_no_label() -> None:
    """Stats show what happened, not what did not."""
    metrics = Metrics(prometheus=False)
    metrics.count("chunks", "hit", 0)
    assert metrics.totals()["chunks"] == {}


def test_unknown_counter_is_an_error() -> None:
    """A misspelt name must not vanish."""
    with pytest.raises(KeyError):
        Metrics(prometheus=False).count("nonsense", "x")


def test_order_times_are_summed() -> None:
    """The mean in the stats comes from these."""
    metrics = Metrics(prometheus=False)
    metrics.observe_order(0.5)
    metrics.observe_order(0.25)
    assert (metrics.order_seconds, metrics.num_orders) == (0.75, 2)


def test_phase_times_are_summed() -> None:
    """By phase."""
    metrics = Metrics(prometheus=False)
    for phase, seconds in (("select", 0.5), ("relocate", 1.0), ("select", 0.25)):
        metrics.observe_phase(phase, seconds)
    assert metrics.phase_seconds == {"select": 0.75, "relocate": 1.0}


def test_state_of_retrieval_is_one_of_its_names() -> None:
    """An alarm is on `chunkcache:retrieval_state{state="down"} == 1`."""
    code = (
        "from prometheus_client import generate_latest\n"
        "from sglang_chunkcache.front.metrics import Metrics\n"
        "metrics = Metrics(prometheus=True)\n"
        "for state in ('up', 'down', 'stale'):\n"
        "    metrics.show_retrieval(state)\n"
        "print(generate_latest().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = {
        line for line in done.stdout.splitlines() if line.startswith("chunkcache:retrieval_state")
    }
    assert shown == {
        f'chunkcache:retrieval_state{{state="{n}"}} {v}'
        for n, v in (("up", 0.0), ("stale", 1.0), ("down", 0.0))
    }


def test_search_times_are_summed() -> None:
    """Apart from those of reuse, whose phases may be named alike."""
    metrics = Metrics(prometheus=False)
    for phase, seconds in (("queued", 0.5), ("encode", 1.0), ("queued", 0.25)):
        metrics.observe_search(phase, seconds)
    assert metrics.search_seconds == {"queued": 0.75, "encode": 1.0}
    assert metrics.phase_seconds == {}


def test_prometheus_shows_the_same_counts() -> None:
    """Counts once, shows twice."""
    registry = pytest.importorskip("prometheus_client").REGISTRY
    metrics = Metrics(prometheus=True)
    metrics.count("prompt_tokens", "exact", 7)
    metrics.observe_order(1e-5)
    metrics.observe_phase("select", 0.25)
    metrics.observe_search("queued", 0.5)
    assert registry.get_sample_value("chunkcache:retrieval_seconds_sum", {"phase": "queued"}) == 0.5
    assert registry.get_sample_value("chunkcache:reuse_seconds_sum", {"phase": "select"}) == 0.25
    assert (
        registry.get_sample_value(
            "chunkcache:prompt_tokens_total", {COUNTERS["prompt_tokens"][0]: "exact"}
        )
        == 7
    )
    assert registry.get_sample_value("chunkcache:order_seconds_count") == 1


def test_prometheus_is_not_imported_unasked() -> None:
    """It decides on its multiprocess mode when imported; SGLang sets that up later."""
    code = (
        "import sys; from sglang_chunkcache.front.metrics import Metrics; m ="
        " Metrics(prometheus=False);m.count('requests', 'x'); m.observe_order(1);"
        " m.observe_phase('select', 1);Metrics(prometheus=True); sys.exit('prometheus_client' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_audits_are_shown_by_selector_ratio_and_tenant() -> None:
    """Means are sum by count; the server's terms are in one state,
    and those that clients invent are no labels."""
    code = (
        "from prometheus_client import generate_latest\n"
        "from radix_ext.audit import Audit\n"
        "from radix_ext.fusion_request import FusionRequest\n"
        "from sglang_chunkcache.front.metrics import Metrics\n"
        "metrics = Metrics(prometheus=True)\n"
        "metrics.observe_audit('query', 0.15, 't', 0.5, 0.25, is_below=True)\n"
        "metrics.observe_audit('query', 0.15, 't', 1.0, 0.5, is_below=False)\n"
        "metrics.observe_audit('none', None, 't', 1.0, 0.0, is_below=False)\n"
        "metrics.observe_audit('critical', 'auto', 't', 1.0, 0.0, is_below=False)\n"
        "server = FusionRequest('query', 0.15)\n"
        "audit = Audit(share=1, target=0.9, pause=9, seed='', server=server, max_tenants=9)\n"
        "metrics.show_audit(audit)\n"
        "for fusion in [server] * 5 + [FusionRequest('first', n / 10) for n in range(3)]:\n"
        "    terms = audit.terms(fusion, 't')\n"
        "    audit.begin(terms), audit.observe(terms, 0.0)\n"
        "metrics.show_audit(audit)\n"
        "print(generate_latest().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = dict(
        line.rsplit(" ", 1)
        for line in done.stdout.splitlines()
        if line.startswith("chunkcache:audit")
    )
    labels = 'ratio="0.15",selector="query",tenant="t"'
    wanted = {
        'chunkcache:audits_total{ratio="0.15",selector="query",target="below",tenant="t"}': 1,
        'chunkcache:audits_total{ratio="none",selector="none",target="met",tenant="t"}': 1,
        'chunkcache:audits_total{ratio="auto",selector="critical",target="met",tenant="t"}': 1,
        f"chunkcache:audit_agreement_sum{{{labels}}}": 1.5,
        f"chunkcache:audit_agreement_count{{{labels}}}": 2,
        f"chunkcache:audit_kl_sum{{{labels}}}": 0.75,
        'chunkcache:audit_state{selector="query",state="paused"}': 1,
        'chunkcache:audit_state{selector="query",state="asked"}': 0,
        'chunkcache:audit_own_terms{state="asked"}': 3,
    }
    assert {name: float(shown[name]) for name in wanted} == wanted
    assert not [name for name in shown if "first" in name]
