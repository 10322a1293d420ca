"""Promised slots that can neither be filled nor computed: their request gets an error, on every
release of SGLang, and the server goes on without a trace of it. The pool is poisoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.server import Server
from eval.world.world import World
from tests.e2e.asking import CHAT, ask, assert_clean, body_of, fused, send, stream, text_of
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


def test_request_gets_an_error_and_the_next_one_its_answer(tmp_path: Path) -> None:
    """Whole and streamed."""
    switch = tmp_path / "sabotage"
    env = {**STRICT, "OMP_NUM_THREADS": "1", "POISONED_SERVER_SABOTAGE": str(switch)}
    log, launcher = tmp_path / "log", mixed_load.POISONED
    world = World(11, 30, num_kinds=1)
    first, second = world.passages[:4], world.passages[3::-1]
    question = next(
        q for q in world.questions if q.hop == 1 and q.gold_passage_ids[0] == first[1].id
    )
    with Server([*mixed_load.FLAGS], log=log, launcher=launcher, env=env) as server:
        ask(server, first, question)
        body = body_of(second, question, reuse=fused())
        switch.write_text("planted")
        status, text = send(server.url + CHAT, body)
        assert (status, "nor computed" in text) == (503, True), text
        assert "nor computed" in str(list(stream(server, body)))
        switch.unlink()
        told = ask(server, second, question, reuse=fused())
        assert told["chunkcache"]["fates"]["relocated"] > 0
        assert text_of(told) in question.answers
        assert_clean(server, mixed_load.POOL_TOKENS)
    assert "memory leak" not in log.read_text(errors="replace")
