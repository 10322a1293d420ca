"""Contract 1: reuse never changes an answer. The long run is tests/soak/test_exactness.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.server import Server
from eval.tasks.world import world_requests
from tests.soak.answers import NEVER_REUSE, differences, run_ours, run_stock

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
"""The fast test is test_reuse.py::test_soak:
exact answers under eviction equal those without reuse on the same server."""


def test_answers_equal_stock_without_reuse(rag_server: Server, tmp_path: Path) -> None:
    """Under eviction, in pieces smaller than a chunk."""
    prompts, ours, reused = run_ours(rag_server.url, world_requests(40, seed=7), 12)
    with Server(
        ["--stock", "--model-path", "bundled"], log=tmp_path / "stock.log", env=NEVER_REUSE
    ) as stock:
        reference = [run_stock(stock.url, ids, 12) for ids in prompts]
    assert reused > 1000
    assert differences(reference, ours) == []
