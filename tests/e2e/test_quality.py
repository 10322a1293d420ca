"""`python -m eval quality` on a real engine: orders of chunks, asked of the session's server.

python -m pytest tests/e2e/test_quality.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.quality.command import main
from eval.run import read_record, read_samples
from eval.server import Server

pytestmark = pytest.mark.engine


def test_permutation_of_two_requests(rag_server: Server, tmp_path: Path) -> None:
    """Right answers in any order of the chunks: the bundled model reads facts at any position."""
    argv = ["permutation", "--requests", "2", "--orders", "5", "--k", "4"]
    argv += ["--arm", f"ours={rag_server.url},rag"]
    assert main([*argv, "--weights", "real", "--out", str(tmp_path / "run")]) == 0
    record = read_record(tmp_path / "run")
    assert record["complete"]
    rows = read_samples(tmp_path / "run")
    assert [row["permutation"] for row in rows] == [*range(6), *range(6)]
    assert not any("error" in row for row in rows)
    cells = record["results"]["cells"]
    em = {cell["cell"]["order"]: cell["metrics"]["em"]["mean"] for cell in cells}
    assert em == {"retriever": 1.0, "random": 1.0}
    # Distributions came back, and another order is another prompt.
    assert any(row["metrics"].get("kl_given", 0) > 0 for row in rows)
    assert record["results"]["within_sd"]["em"] == 1.0


def test_full_prefill_finds_nothing_cached(rag_server: Server, tmp_path: Path) -> None:
    """Every prompt is sent again under a unique salt, after an arm that has just cached it."""
    argv = ["answers", "--requests", "4", "--k", "4", "--arms", f"ours={rag_server.url},rag"]
    argv += ["--weights", "real"]
    assert main([*argv, "--reference", rag_server.url, "--out", str(tmp_path / "run")]) == 0
    ours = [row for row in read_samples(tmp_path / "run") if row["arm"] == "ours"]
    assert len(ours) == 4
    assert all(row["metrics"]["same"] == 1 for row in ours)
    full = [row for row in read_samples(tmp_path / "run") if row["arm"] == "full-prefill"]
    assert all(row["fates"]["exact"] == 0 and row["cached_tokens"] == 0 for row in full)
