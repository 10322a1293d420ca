"""`python -m eval serve` with real servers:
what it starts, measures and records, and that no process remains."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.packed import pack_results, unpack_results
from eval.run import read_record, read_samples

REQUESTS, WARM_UP = 12, 2


@pytest.mark.engine
@pytest.mark.nightly
def test_serve_measures_stock_and_ours_on_the_bundled_model(tmp_path: Path) -> None:
    """Both arms answer every request; ours says what it reused."""
    command = [sys.executable, "-m", "eval", "serve", "--model-path", "bundled", "--threads", "1"]
    command += ["--out", "run", "--clients", "2", "--max-total-tokens", "4000"]
    command += ["--requests", str(REQUESTS), "--warm-up", str(WARM_UP)]
    command += ["--", "--max-running-requests", "4"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 400, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=env, **told)
    assert done.returncode == 0, done.stderr
    record, samples = read_record(tmp_path / "run"), read_samples(tmp_path / "run")
    results = record["results"]
    assert record["complete"] is True
    printed = json.loads(done.stdout.splitlines()[-1])
    assert unpack_results(pack_results(printed)) == results  # less quantiles that nobody reads
    assert not [sample["error"] for sample in samples if "error" in sample]
    assert len(samples) == 2 * REQUESTS
    cells = {cell["arm"]: (cell["n"], cell["errors"]) for cell in results["cells"]}
    assert cells == dict.fromkeys(("stock-lpm", "ours"), (REQUESTS - WARM_UP, 0))
    for sample in samples:
        assert 0 < sample["metrics"]["ttft_s"] <= sample["metrics"]["e2e_s"]
        if sample["arm"] == "ours":
            assert sum(sample["fates"].values()) == sample["prompt_tokens"]
            assert sample["fates"]["exact"] == sample["cached_tokens"]
    servers = results["servers"]
    assert (servers["stock-lpm"]["chunk_cache"], servers["ours"]["chunk_cache"]) == (False, True)
    for server in servers.values():
        assert server["attention_backend"]
        assert server["max_total_num_tokens"] == 4000
        assert server["flags"][-2:] == ["--max-running-requests", "4"]
    for log in (tmp_path / "run" / "logs").glob("*.log"):
        port = re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())
        assert port is not None
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port[1]))), f"{log.stem} was left running"
