"""Exact chains that left the device and came back from host memory:
their answers are those of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.http import post
from eval.server import Server
from eval.world.world import World
from tests.e2e.asking import CHAT, assistant, chunks_of, drained, rank_of, text_of, user
from tests.e2e.conftest import STRICT, TIGHT
from tests.e2e.crowding import QUESTION, check_that_chain_comes_back, crowd_out

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


def test_chain_comes_back_from_the_host(tmp_path: Path) -> None:
    """On a server of its own: after others' loads of a few tokens it may price this one too dear to
    be made."""
    with Server([*TIGHT, "--enable-metrics"], log=tmp_path / "log", env=STRICT) as server:
        check_that_chain_comes_back(server)


@pytest.mark.nightly
@pytest.mark.parametrize("page", [1, 16])
def test_conversation_goes_on_where_it_was(tmp_path: Path, page: int) -> None:
    """Others have filled the device, then the server starts again: all that the conversation has
    shown is loaded, up to its last documents, and its answers are those of before."""
    where = json.dumps({"directory": str(tmp_path / "kept")})
    flags = [*TIGHT, "--page-size", str(page), "--chunkcache-storage-backend", "file"]
    flags += ["--chunkcache-storage-backend-extra-config", where]
    passages, messages, answers = World(77, 20).passages, list[Any](), list[str]()

    def ask(server: Server, number: int) -> Any:
        shown = chunks_of(passages[3 * number : 3 * number + 3])
        asked = [*messages, {**user(f"{number}: {QUESTION}"), "chunks": shown}]
        body = {"messages": asked, "conversation_id": "c", "temperature": 0, "max_tokens": 16}
        reply = post(server.url + CHAT, body)
        answers.append(text_of(reply))
        messages[:] = [*asked, assistant(answers[-1])]
        return reply["chunkcache"]

    with Server(flags, log=tmp_path / "first.log", env=STRICT) as server:
        for number in range(3):
            told = ask(server, number)
        seen = told["fates"]["exact"]
        crowd_out(server, "crowd")
        told = ask(server, 3)
        assert told["turns_unknown"] == 0
        assert told["loaded"] > seen > 150, told
        drained(server)
    last, before = messages[:-2], answers[-1]
    with Server(flags, log=tmp_path / "second.log", env=STRICT) as server:
        messages[:] = last
        told = ask(server, 3)
        assert told["fates"]["exact"] > seen, (told, rank_of(server)["storage"])
        assert answers[-1] == before
