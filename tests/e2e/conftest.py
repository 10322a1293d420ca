"""Real servers, one per session: 20-40 s each to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.server import Server

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}
"""SGLang's checks: it kills the server where KV slots do not add up."""
TIGHT = [
    "--model-path",
    "bundled",
    "--max-total-tokens",
    "2400",
    "--chunked-prefill-size",
    "32",
    "--max-running-requests",
    "8",
]
"""A pool that evicts, and prefill pieces smaller than a chunk."""


@pytest.fixture(scope="session")
def rag_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server on the bundled model, with a pool that evicts and every check on."""
    log = tmp_path_factory.mktemp("servers") / "rag.log"
    with Server([*TIGHT, "--enable-metrics"], log=log, env=STRICT) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"


@pytest.fixture
def retracting_server(tmp_path: Path) -> Iterator[Server]:
    """Like `rag_server`, but SGLang takes running requests back every few steps, as it does when the pool runs out."""
    with Server(TIGHT, log=tmp_path / "retract.log", env={**STRICT, "SGLANG_TEST_RETRACT": "1"}) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"


@pytest.fixture(scope="module")
def dp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks, each with a tree of its own. One module only: SGLang's DP controller never sleeps and takes a core."""
    log: Path = tmp_path_factory.mktemp("servers") / "dp.log"
    with Server(["--model-path", "bundled", "--dp-size", "2"], log=log, env=STRICT, timeout_s=300) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
