"""Two tensor-parallel ranks keep one tree: what comes back from host memory comes back on both, at the same request."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.server import Server
from tests.e2e import test_host
from tests.e2e.conftest import STRICT, TIGHT

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_chain_comes_back_on_both_ranks(tmp_path: Path) -> None:
    """Ranks that disagreed would wait for each other until SGLang's watchdog ends them."""
    with Server([*TIGHT, "--tp-size", "2"], log=tmp_path / "tp.log", env=STRICT) as server:
        test_host.test_chain_comes_back_from_the_host(server)
        assert server.is_running, server.log_tail(40)
