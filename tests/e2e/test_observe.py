"""What launch/observe has for Prometheus and Grafana: every metric exists, and against the real
Prometheus every query of the dashboard finds data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from eval.http import get, post
from eval.server import Server, free_port
from sglang_chunkcache.front.metrics import FIGURES
from sglang_chunkcache.scheduler import host_metrics
from sglang_chunkcache.storage import metrics as storage_metrics
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

OBSERVE = Path(__file__).parents[2] / "launch/observe"
DASHBOARD = json.loads((OBSERVE / "dashboard.json").read_text())
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed"
)


def test_metrics_exist() -> None:
    """Ours by what makes them, recorded ones by the rules."""
    known = {*FIGURES, "waits"}
    for prefix, module in (("host", host_metrics), ("storage", storage_metrics)):
        known |= {f"{prefix}_{name}" for name in (*module.GAUGES, *module.COUNTERS)}
    rules = (OBSERVE / "rules.yml").read_text()
    recorded = set(re.findall(r"record: chunkcache:(\S+)", rules))
    texts = [rules, *(query for _, query in QUERIES)]
    named = {name for text in texts for name in re.findall(r"chunkcache:([a-z_0-9:]+)", text)}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} <= known | recorded


@NEEDS_PROMETHEUS
def test_files_are_prometheuss() -> None:
    for what in (["config", "prometheus.yml"], ["rules", "rules.yml"]):
        done = subprocess.run(
            ["promtool", "check", *what], cwd=OBSERVE, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.engine
@NEEDS_PROMETHEUS
def test_dashboard_finds_data(tmp_path: Path, index: Path) -> None:
    """Of a server with all tiers, retrieval and audits, under load."""
    storage = ["--chunkcache-storage-backend", "file", "--chunkcache-storage-mib", "64"]
    flags = [*mixed_load.FLAGS, "--enable-metrics", "--index", str(index), *storage]
    flags += ["--chunkcache-audit-share", "1", "--chunkcache-host-mib", "1"]
    env = {**STRICT, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    with Server(flags, log=tmp_path / "log", env=env) as server:
        with prometheus(server, tmp_path) as url:
            for seed in range(2):
                mixed_load.soak(
                    server.url, 60, clients=4, seed=seed, pool_tokens=mixed_load.POOL_TOKENS
                )
                post(server.url + "/rag/v1/retrieve", {"query": "Who makes clocks?"})
            time.sleep(3)  # two more scrapes
            empty = [
                (title, query)
                for title, query in QUERIES
                if not found(url, query.replace("$__rate_interval", "1m"))
            ]
        assert empty == []


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """Its URL; it reads the server's metrics twice a second."""
    config = (OBSERVE / "prometheus.yml").read_text().replace(": 5s", ": 500ms")
    config = config.replace("127.0.0.1:30000", server.url.removeprefix("http://"))
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(OBSERVE / "rules.yml", folder)
    at = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={at}"]
    with (folder / "prometheus.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: found(f"http://{at}", "up == 1"))
        yield f"http://{at}"
    finally:
        running.terminate()
        running.wait()


def found(url: str, query: str) -> bool:
    """Whether a query has a number."""
    try:
        answer = get(f"{url}/api/v1/query?query={quote(query)}")
    except Exception:
        return False  # it is starting
    values = [float(each["value"][1]) for each in answer["data"]["result"]]
    return any(value == value for value in values)  # NaN: 0 / 0
