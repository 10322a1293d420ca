"""Two tensor-parallel ranks keep one tree: what comes back from host memory or from their storages
comes back on both, at one request. Ranks that disagreed would wait for each other until SGLang's
watchdog ends them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.http import post
from eval.server import Server
from eval.world.world import World
from tests.e2e.asking import EXPLAIN, ask, body_of, drained, logprobs_of, text_of
from tests.e2e.conftest import STRICT, TIGHT
from tests.e2e.crowding import QUESTION, check_that_chain_comes_back, crowd_out

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_chain_comes_back_on_both_ranks(tmp_path: Path) -> None:
    flags = [*TIGHT, "--tp-size", "2", "--enable-metrics"]
    with Server(flags, log=tmp_path / "tp.log", env=STRICT) as server:
        check_that_chain_comes_back(server)
        assert server.is_running, server.log_tail(40)


def test_chain_outlives_both_ranks(tmp_path: Path) -> None:
    """What both have kept is there at the next start. What one of them has lost is computed."""
    where = json.dumps({"directory": str(tmp_path / "storage")})
    flags = [*TIGHT, "--tp-size", "2", "--chunkcache-storage-backend", "file"]
    flags += ["--chunkcache-storage-backend-extra-config", where]
    passages = World(77, 20).passages[:4]
    with Server(flags, log=tmp_path / "first.log", env=STRICT) as server:
        reply = [ask(server, passages, QUESTION) for _ in range(3)][-1]
        assert drained(server)["written"] == 5, "the head and four chunks"
        told = post(server.url + EXPLAIN, body_of(passages, QUESTION))
        chunks = told["spans"][-1]["end"]
    with Server(flags, log=tmp_path / "second.log", env=STRICT) as server:
        back = ask(server, passages, QUESTION)
        assert back["chunkcache"]["fates"]["exact"] == back["chunkcache"]["loaded"] == chunks
        assert text_of(back) == text_of(reply)
        assert logprobs_of(back) == pytest.approx(logprobs_of(reply), abs=1e-5)
        crowd_out(server, "crowd")
        assert drained(server)["written"] > 0
    for entry in (tmp_path / "storage" / "rank0-001of002" / "entries").iterdir():
        entry.unlink()
    with Server(flags, log=tmp_path / "third.log", env=STRICT) as server:
        assert drained(server)["num_entries"] == 0, "what one rank has lost the other has deleted"
        assert text_of(ask(server, passages, QUESTION)) == text_of(reply)
        assert server.is_running, server.log_tail(40)
