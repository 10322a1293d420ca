"""While the user reads an answer, passages like those it was made of are loaded (`--chunkcache-next-turn`), and the next turn
moves them. A server of its own: index, storage and moved KV together. Pools are poisoned, as in test_reuse.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")
pytest.importorskip("tantivy")

from eval.http import post
from eval.server import Server
from eval.world.world import Passage
from retrieval.retriever import Retriever
from tests.e2e.conftest import WORLD, K
from tests.e2e.test_reuse import CHAT, flush, fused
from tests.e2e.test_storage import chunk_of, settled, storage_of
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

NUM_AHEAD = 4


@pytest.fixture(scope="module")
def server(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every passage is in its storage, and nowhere else."""
    folder = tmp_path_factory.mktemp("next")
    flags = [
        *(
            *mixed_load.FLAGS,
            "--index",
            str(index),
            "--chunkcache-retrieve-k",
            str(K),
            "--chunkcache-retrieve-first",
            "0",
        ),
        *("--chunkcache-calibrate", "off", "--chunkcache-selector", "query", "--chunkcache-audit-share", "0"),
        *("--chunkcache-host-mib", "10", "--chunkcache-next-turn", str(NUM_AHEAD)),
        *("--chunkcache-storage-backend", "file"),
        *("--chunkcache-storage-backend-extra-config", json.dumps({"directory": str(folder / "kept")})),
    ]
    log = folder / "next.log"
    with Server(flags, log=log, launcher=mixed_load.POISONED, env={**STRICT, "XDG_CACHE_HOME": str(folder)}) as server:
        for passage in WORLD.passages:
            post(server.url + "/chunkcache/preprocess", {"chunk": chunk_of(passage)})
        settled(server)
        flush(server)
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == []


def turn(server: Server, messages: Sequence[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """An answer with moved KV."""
    reuse = fused("query", 0.25)
    body = {"messages": messages, "reuse": reuse, "temperature": 0, "max_tokens": 8, **fields}
    return post(server.url + CHAT, body)


def near(index: Path, names: Sequence[str], n: int) -> list[Passage]:
    """The passages most like these."""
    retriever = Retriever.open(index, encoder=None, device="cpu", verify=False, threads=1)
    return [WORLD.passage(each.id) for each in retriever.near(names, n=n, nprobe=128)]


def next_turns(server: Server) -> dict[str, int]:
    """What was loaded for next turns."""
    found: dict[str, int] = storage_of(server)["guesses"].get("next_turn", {"loads": 0, "used": 0})
    return found


def test_what_resembles_an_answers_passages_is_loaded_and_used(server: Server, index: Path) -> None:
    """By a conversation's turn alone. What the turn itself needs was asked for before, so that the storage has nothing to do."""
    asked = [{"role": "user", "content": WORLD.questions[0].question}]
    turn(server, asked, retrieve=True)
    settled(server)
    assert next_turns(server) == {"loads": 0, "used": 0}, "no conversation"
    first = turn(server, asked, retrieve=True, conversation_id="reads")
    ahead = near(index, first["chunkcache"]["order"], NUM_AHEAD)
    until(lambda: next_turns(server)["loads"] >= NUM_AHEAD)
    loaded = settled(server)["loaded"]
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    following = [*asked, answer, {"role": "user", "content": WORLD.questions[1].question}]
    second = turn(server, following, chunks=[chunk_of(each) for each in ahead[:2]], conversation_id="reads")
    assert second["chunkcache"]["fates"]["relocated"] > 10
    told = next_turns(server)
    assert (told["loads"], told["used"], told["wasted"]) == (NUM_AHEAD, 2, 0)
    assert settled(server)["loaded"] == loaded, "they were loaded ahead"
