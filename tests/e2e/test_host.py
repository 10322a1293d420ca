"""Exact chains that left the device and came back from host memory:
their answers are those of before."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.server import Server
from tests.e2e.conftest import STRICT, TIGHT
from tests.e2e.crowding import check_that_chain_comes_back

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


def test_chain_comes_back_from_the_host(tmp_path: Path) -> None:
    """On a server of its own: after others' loads of a few tokens it may price this one too dear to
    be made."""
    with Server([*TIGHT, "--enable-metrics"], log=tmp_path / "log", env=STRICT) as server:
        check_that_chain_comes_back(server)
