"""Contract 1: reuse never changes an answer. The long run is `python -m eval.bench.exactness`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eval.bench.exactness import differences, run_ours, run_stock
from eval.server import Server
from eval.tasks.world import world_requests

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
"""The fast test is test_reuse.py::test_soak: exact answers under eviction equal those without reuse on the same server."""


def test_answers_equal_stock_without_reuse(rag_server: Server, tmp_path: Path) -> None:
    """Under eviction, in pieces smaller than a chunk: greedy tokens as from stock SGLang that never reuses."""
    args = argparse.Namespace(max_new_tokens=12)
    prompts, ours, reused = run_ours(rag_server.url, world_requests(40, seed=7), args)
    with Server(
        ["--stock", "--model-path", "bundled"], log=tmp_path / "stock.log", env={"SGLANG_RADIX_FORCE_MISS": "1"}
    ) as stock:
        reference = [run_stock(stock.url, ids, args) for ids in prompts]
    assert reused > 1000
    assert differences(reference, ours) == []
