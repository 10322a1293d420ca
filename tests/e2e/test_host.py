"""Exact chains that left the device and came back from host memory:
their answers are those of before."""

from __future__ import annotations

import pytest

from eval.server import Server
from tests.e2e.crowding import check_that_chain_comes_back

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


def test_chain_comes_back_from_the_host(rag_server: Server) -> None:
    check_that_chain_comes_back(rag_server)
