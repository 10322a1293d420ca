"""Real servers, one per session: 20-40 s each to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from eval.server import Server
from eval.world.world import World
from sglang_chunkcache.bundled_model import model_dir

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}
"""SGLang's checks: it kills the server where KV slots do not add up."""
TIGHT = [
    *("--model-path", "bundled", "--max-total-tokens", "2400", "--chunked-prefill-size", "32"),
    *("--max-running-requests", "8", "--chunkcache-host-mib", "10"),
]
"""A pool that evicts, host memory of twice its size, and prefill pieces smaller than a chunk."""


WORLD = World(11, 60)
"""What the index of `rag_server` holds."""
K = 4
"""Passages a question: what the bundled model was trained on."""


def build_index(folder: Path, passages: Sequence[Mapping[str, str]]) -> None:
    """Make or extend an index, as a user does."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(passage) + "\n" for passage in passages), encoding="utf-8")
    command = [sys.executable, "-m", "retrieval", "build", str(source), "--out", str(folder)]
    command += ["--no-split", "--dim", "64", "--tokenizer", str(model_dir())]
    subprocess.run(command, check=True, capture_output=True, timeout=600)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the world's passages."""
    pytest.importorskip("faiss")
    pytest.importorskip("tantivy")
    folder = tmp_path_factory.mktemp("retrieval") / "index"
    build_index(folder, [{"id": passage.id, "text": passage.text} for passage in WORLD.passages])
    return folder


@pytest.fixture(scope="session")
def rag_server(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server on the bundled model and an index, with a pool that evicts and every check on."""
    log = tmp_path_factory.mktemp("servers") / "rag.log"
    flags = [*TIGHT, "--enable-metrics", "--tool-call-parser", "qwen25", "--index", str(index)]
    flags += ["--chunkcache-retrieve-k", str(K), "--chunkcache-retrieve-refresh-s", "0.2"]
    with Server(flags, log=log, env=STRICT) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"


@pytest.fixture
def retracting_server(tmp_path: Path) -> Iterator[Server]:
    """Like `rag_server`, but SGLang takes running requests back every few steps."""
    env = {**STRICT, "SGLANG_TEST_RETRACT": "1"}
    with Server(TIGHT, log=tmp_path / "retract.log", env=env) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"


@pytest.fixture(scope="module")
def dp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks. One module only: SGLang's DP controller never sleeps and takes a core."""
    log: Path = tmp_path_factory.mktemp("servers") / "dp.log"
    flags = ["--model-path", "bundled", "--dp-size", "2", "--reuse", "fused"]
    flags += ["--chunkcache-move", "always", "--chunkcache-audit-share", "1"]
    with Server(flags, log=log, env=STRICT) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
