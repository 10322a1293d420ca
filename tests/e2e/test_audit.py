"""The audit on a server under load, with a selector that is made to fail.

    launch/test.sh -m nightly tests/e2e/test_audit.py

The pool is tiny and poisoned, prefill pieces are smaller than two chunks, SGLang's checks are on,
and every request with moved KV is audited. Questions are about sentences that only the passage
before explains, so an answer is right only if the right tokens are recomputed.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eval.http import post
from eval.server import Server
from eval.world.world import World, linked_questions
from tests.e2e.asking import (
    CHAT,
    EXPLAIN,
    GENERATE,
    Reply,
    chat,
    chunks_of,
    metrics_of,
    stats_of,
    stream,
    user,
)
from tests.e2e.failing_selector import LOG_VAR, PAUSE, SWITCH_VAR
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.nightly]

SOUND = {"mode": "fused", "selector": "deviation", "depth": 3, "ratio": 0.3}
WORLD = World(4711, links=True)
_numbers = count()


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the selector `deviation` fails."""
    return tmp_path_factory.mktemp("failing") / "switch"


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line a comparison."""
    return tmp_path_factory.mktemp("failing") / "audits.jsonl"


@pytest.fixture(scope="module")
def audited_server(
    tmp_path_factory: pytest.TempPathFactory, switch: Path, audits: Path
) -> Iterator[Server]:
    """Every request with moved KV is audited; a pause is short."""
    log = tmp_path_factory.mktemp("servers") / "audited.log"
    env = {**STRICT, "OMP_NUM_THREADS": "1", SWITCH_VAR: str(switch), LOG_VAR: str(audits)}
    flags = [*mixed_load.FLAGS, "--enable-metrics", "--chunkcache-audit-share", "1"]
    with Server(flags, log=log, launcher=("-m", "tests.e2e.failing_selector"), env=env) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == []


def moved_body(
    reuse: Mapping[str, Any] | None = None, *, send: Callable[[Reply], Any], **fields: Any
) -> Reply:
    """A request whose four chunks are cached in another order,
    by a request that `send` sends now."""
    number = next(_numbers)
    rng = random.Random(number)
    passages = WORLD.linked_context(4, rng)
    question = rng.choice(linked_questions(passages)).question
    body: Reply = {"messages": [user(question)], "chunks": chunks_of(passages)}
    body |= {"order": "retriever", "cache_salt": fields.pop("cache_salt", f"audit{number}")}
    body |= {"temperature": 0, "max_tokens": 24}
    send({**body, "chunks": body["chunks"][::-1], "max_tokens": 1})
    return {**body, "reuse": dict(reuse or SOUND), **fields}


def moved(server: Server, reuse: Mapping[str, Any] | None = None, **fields: Any) -> Reply:
    return moved_body(reuse, send=lambda body: post(server.url + CHAT, body), **fields)


def ask(server: Server, reuse: Mapping[str, Any] | None = None, **fields: Any) -> Reply:
    """The reply to a request with moved KV."""
    return post(server.url + CHAT, moved(server, reuse, **fields))


def audit_of(server: Server) -> Reply:
    """The audit's part of the stats, once nothing waits."""
    return until(lambda: None if (found := stats_of(server)["audit"])["waiting"] else dict(found))


def lines_of(audits: Path) -> list[Reply]:
    lines = audits.read_text(encoding="utf-8").splitlines() if audits.exists() else []
    return [json.loads(line) for line in lines]


@contextmanager
def load(server: Server, num_clients: int) -> Iterator[None]:
    """Other requests meanwhile: exact ones and plain ones, each client one at a time."""
    stop = threading.Event()

    def run(client: int) -> None:
        rng = random.Random(f"load {client}")
        while not stop.is_set():
            passages, question = WORLD.linked_context(4, rng), "Which passage comes last?"
            chat(server, question, chunks_of(passages), max_tokens=32)
            body = {"messages": [user(question)], "temperature": 0, "max_tokens": 32}
            post(server.url + "/v1/chat/completions", body)

    with ThreadPoolExecutor(num_clients) as pool:
        running = [pool.submit(run, client) for client in range(num_clients)]
        try:
            yield
        finally:
            stop.set()
    for each in running:
        each.result()


# What a check computes


def test_check_is_an_ordinary_prefill_of_the_same_ids(audited_server: Server, audits: Path) -> None:
    """Its rows against SGLang's own `/generate` of prompt and answer, nothing reused."""
    known = len(lines_of(audits))
    ask(audited_server)
    ask(audited_server, {**SOUND, "ratio": 1.0})
    ask(audited_server, {"mode": "fused", "selector": "none"})
    ask(audited_server, temperature=0.7, seed=3)
    list(stream(audited_server, moved(audited_server)))
    generate_moved(audited_server)
    audit_of(audited_server)
    found = lines_of(audits)[known:]
    assert len(found) == 6
    for check in found:
        params = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": check["input_ids"], "sampling_params": params, "return_logprob": True}
        body |= {"logprob_start_len": check["prompt_len"] - 1, "top_logprobs_num": 20}
        body |= {"cache_salt": f"alone{next(_numbers)}"}
        meta = post(audited_server.url + "/generate", body)["meta_info"]
        assert meta["cached_tokens"] == 0
        reference = meta["input_top_logprobs"][1:]
        num_tokens = len(check["input_ids"]) - check["prompt_len"]
        assert len(check["exact"]) == len(reference) == num_tokens
        for mine, theirs in zip(check["exact"], reference, strict=True):
            expected = {token: logprob for logprob, token, _ in theirs}
            shared = [(logprob, expected[token]) for logprob, token in mine if token in expected]
            assert len(shared) >= 17  # those at the end may swap
            assert all(abs(a - b) <= mixed_load.TIE for a, b in shared if max(a, b) > -8)


def test_check_leaves_nothing(audited_server: Server) -> None:
    """What an exact request would find stays, no slot is lost, and the mirror agrees."""
    body = moved(audited_server)
    exact = {key: value for key, value in body.items() if key != "reuse"}
    before = post(audited_server.url + EXPLAIN, exact)["exact"]
    post(audited_server.url + CHAT, body)
    audit_of(audited_server)
    assert post(audited_server.url + EXPLAIN, exact)["exact"] == before
    assert mixed_load.leftovers(audited_server.url, mixed_load.POOL_TOKENS) == []


# What the client sees


def generate_moved(server: Server) -> Reply:
    """`/rag/v1/generate` over chunks that are cached in another order."""

    def send(body: Mapping[str, Any]) -> Reply:
        parts = ["Passages:\n", {"chunks": body["chunks"]}, body["messages"][0]["content"]]
        params = {"temperature": 0, "max_new_tokens": min(8, body["max_tokens"])}
        asked = {name: body[name] for name in ("order", "cache_salt", "reuse") if name in body}
        return post(server.url + GENERATE, {"parts": parts, "sampling_params": params, **asked})

    return send(moved_body(send=send))


def test_answer_says_that_it_was_sampled_and_has_nothing_else(audited_server: Server) -> None:
    """As many log probabilities as were asked for, whole, streamed and of `generate`."""
    plain = ask(audited_server)
    assert plain["chunkcache"]["reuse"]["sampled"] is True
    assert plain["choices"][0]["logprobs"] is None
    told = ask(audited_server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in told} == {2}
    events = list(stream(audited_server, moved(audited_server)))
    assert events[-1]["chunkcache"]["reuse"]["sampled"] is True
    assert not any(choice.get("logprobs") for event in events for choice in event["choices"])
    assert not [name for name in generate_moved(audited_server)["meta_info"] if "logprob" in name]


# What follows


def test_sound_selector_serves_and_broken_one_is_paused(
    audited_server: Server, switch: Path
) -> None:
    """Under load. 40 answers of the sound selector change nothing. Made to fail, the tenant's terms
    are paused within 20 samples, the server's are not: requests are served exactly and say why, log
    and metrics show it. Mended, they return from probation."""

    def state() -> str:
        """Of the one tenant's terms, at this selector and ratio."""
        return next(
            str(one["state"])
            for one in audit_of(audited_server)["terms"]["own"]
            if one["samples"] + one["pauses"]
            and (one["selector"], one["ratio"]) == (SOUND["selector"], SOUND["ratio"])
        )

    def answer() -> Reply:
        return dict(ask(audited_server, cache_salt="one")["chunkcache"])

    with load(audited_server, 2):
        for _ in range(40):
            answer()
        assert state() == "asked"
        switch.touch()
        replies = list[Reply]()
        try:
            while not replies or "audit_paused" not in replies[-1]["fallbacks"]:
                assert len(replies) <= 20, f"not paused: {audit_of(audited_server)}"
                replies.append(answer())
                audit_of(audited_server)
        finally:
            switch.unlink()
        fates = replies[-1]["fates"]
        assert replies[-1]["reuse"] is None
        assert (fates["relocated"], fates["recomputed"]) == (0, 0)
        assert {reply["reuse"]["ratio"] for reply in replies[:-1]} == {0.3}
        assert "is paused (was asked)" in audited_server.log.read_text(encoding="utf-8")
        metrics = metrics_of(audited_server)
        assert metrics['chunkcache:audit_own_terms{state="paused"}'] == 1
        assert metrics['chunkcache:audit_state{selector="critical",state="asked"}'] == 1
        below = 'chunkcache:audits_total{ratio="0.3",selector="deviation",target="below"'
        assert any(name.startswith(below) for name in metrics)
        for _ in range(PAUSE + 400):
            answer()
            if state() == "asked":
                break
        assert state() == "asked"
    assert mixed_load.leftovers(audited_server.url, mixed_load.POOL_TOKENS) == []
