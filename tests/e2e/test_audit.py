"""The audit on a server under load, with a selector that is made to fail. `-s` shows what it found.

    launch/test.sh -m nightly tests/e2e/test_audit.py -s

The pool is tiny and poisoned, prefill pieces are smaller than two chunks, SGLang's checks are on,
and every request with moved KV is audited. Questions are about sentences that only the passage
before explains, so an answer is right only if the right tokens are recomputed.
"""

from __future__ import annotations

import json
import random
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eval.http import get, post
from eval.server import Server
from eval.world.world import World, linked_questions
from tests.e2e.failing_selector import LOG_VAR, SWITCH_VAR
from tests.polling import DEADLINE_S, until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = pytest.mark.engine

CHAT, GENERATE = "/rag/v1/chat/completions", "/rag/v1/generate"
SOUND = {"mode": "fused", "selector": "deviation", "depth": 3, "ratio": 0.3}
PAUSE = 30
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
    flags += ["--chunkcache-audit-pause", str(PAUSE)]
    with Server(flags, log=log, launcher=("-m", "tests.e2e.failing_selector"), env=env) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == []


def moved_body(
    reuse: Mapping[str, Any] | None = None, *, send: Callable[[dict[str, Any]], Any], **fields: Any
) -> dict[str, Any]:
    """A request whose four chunks are cached in another order,
    by a request that `send` sends now."""
    number = next(_numbers)
    rng = random.Random(number)
    passages = WORLD.linked_context(4, rng)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": rng.choice(linked_questions(passages)).question}],
        "chunks": [{"id": p.id, "text": p.text} for p in passages],
        "order": "retriever",
        "cache_salt": fields.pop("cache_salt", f"audit{number}"),
        "temperature": 0,
        "max_tokens": 24,
    }
    send({**body, "chunks": body["chunks"][::-1], "max_tokens": 1})
    return {**body, "reuse": dict(reuse or SOUND), **fields}


def ask(server: Server, reuse: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The reply to a request with moved KV."""
    return post(
        server.url + CHAT,
        moved_body(reuse, send=lambda body: post(server.url + CHAT, body), **fields),
    )


def audit_of(server: Server, *, settled: bool = True) -> dict[str, Any]:
    """The audit's part of the stats, once nothing waits."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = get(server.url + "/chunkcache/stats")["audit"]
        return found if not settled or not found["waiting"] else None

    return until(look)


def lines_of(audits: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in audits.read_text(encoding="utf-8").splitlines()]
        if audits.exists()
        else []
    )


@contextmanager
def load(server: Server, num_clients: int) -> Iterator[None]:
    """Other requests meanwhile: exact ones and plain ones, each client one at a time."""
    stop, errors = threading.Event(), list[BaseException]()

    def run(client: int) -> None:
        rng = random.Random(f"load {client}")
        try:
            while not stop.is_set():
                passages = WORLD.linked_context(4, rng)
                chunks = [{"id": p.id, "text": p.text} for p in passages]
                messages = [{"role": "user", "content": "Which passage comes last?"}]
                body = {"messages": messages, "temperature": 0, "max_tokens": 32}
                post(server.url + CHAT, {**body, "chunks": chunks})
                post(server.url + "/v1/chat/completions", body)
        except BaseException as error:  # told by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


# What a check computes


def test_check_is_an_ordinary_prefill_of_the_same_ids(audited_server: Server, audits: Path) -> None:
    """Its rows against SGLang's own `/generate` of prompt and answer, nothing reused; answers
    whole, streamed and of parts, at a temperature, and with everything recomputed."""
    known = len(lines_of(audits))
    ask(audited_server)
    ask(audited_server, {**SOUND, "ratio": 1.0})
    ask(audited_server, {"mode": "fused", "selector": "none"})
    ask(audited_server, temperature=0.7, seed=3)
    stream_of(
        audited_server, CHAT, moved_body(send=lambda body: post(audited_server.url + CHAT, body))
    )
    generate_moved(audited_server)
    audit_of(audited_server)
    found = lines_of(audits)[known:]
    assert len(found) == 6
    for check in found:
        body = {
            "input_ids": check["input_ids"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        body |= {
            "return_logprob": True,
            "logprob_start_len": check["prompt_len"] - 1,
            "top_logprobs_num": 20,
        }
        meta = post(
            audited_server.url + "/generate", {**body, "cache_salt": f"alone{next(_numbers)}"}
        )["meta_info"]
        assert meta["cached_tokens"] == 0
        reference = meta["input_top_logprobs"][1:]
        assert (
            len(check["exact"]) == len(reference) == len(check["input_ids"]) - check["prompt_len"]
        )
        for mine, theirs in zip(check["exact"], reference, strict=True):
            expected = {token: logprob for logprob, token, _ in theirs}
            shared = [(logprob, expected[token]) for logprob, token in mine if token in expected]
            assert len(shared) >= 17  # those at the end may swap
            assert all(abs(a - b) <= mixed_load.TIE for a, b in shared if max(a, b) > -8)


def test_check_leaves_nothing(audited_server: Server) -> None:
    """What an exact request would find is what it would have found before, no slot is lost,
    and the mirror agrees."""
    body = moved_body(send=lambda body: post(audited_server.url + CHAT, body))
    exact = {key: value for key, value in body.items() if key != "reuse"}
    before = post(audited_server.url + "/chunkcache/explain", exact)["exact"]
    post(audited_server.url + CHAT, body)
    audit_of(audited_server)
    assert post(audited_server.url + "/chunkcache/explain", exact)["exact"] == before
    assert mixed_load.leftovers(audited_server.url, mixed_load.POOL_TOKENS) == []


# What the client sees


def stream_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        lines = [line[len(b"data: ") :] for line in response if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def generate_moved(server: Server, **fields: Any) -> dict[str, Any]:
    """`/rag/v1/generate` over chunks that are cached in another order."""
    url = server.url + GENERATE

    def parts_of(body: Mapping[str, Any]) -> dict[str, Any]:
        parts = ["Passages:\n", {"chunks": body["chunks"]}, body["messages"][0]["content"]]
        params = {"temperature": 0, "max_new_tokens": min(8, body["max_tokens"])}
        asked = {name: body[name] for name in ("order", "cache_salt", "reuse") if name in body}
        return {"parts": parts, "sampling_params": params, **asked}

    return post(
        url, {**parts_of(moved_body(send=lambda body: post(url, parts_of(body)))), **fields}
    )


def test_answer_says_that_it_was_sampled_and_has_nothing_else(audited_server: Server) -> None:
    """No logprobs that were not asked for, and as many of the best tokens as were,
    whole and streamed."""
    plain = ask(audited_server)
    assert plain["chunkcache"]["reuse"]["sampled"] is True
    assert plain["chunkcache"]["fates"]["relocated"] > 0
    assert plain["choices"][0]["logprobs"] is None
    told = ask(audited_server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in told} == {2}

    events = stream_of(
        audited_server, CHAT, moved_body(send=lambda body: post(audited_server.url + CHAT, body))
    )
    assert events[-1]["chunkcache"]["reuse"]["sampled"] is True
    assert not any(choice.get("logprobs") for event in events for choice in event["choices"])
    body = moved_body(
        send=lambda body: post(audited_server.url + CHAT, body), logprobs=True, top_logprobs=3
    )
    events = stream_of(audited_server, CHAT, body)
    tokens = [
        t
        for e in events
        for c in e["choices"]
        for t in (c.get("logprobs") or {}).get("content") or ()
    ]
    assert len(tokens) > 2
    assert {len(token["top_logprobs"]) for token in tokens} == {3}

    assert not [name for name in generate_moved(audited_server)["meta_info"] if "logprob" in name]
    meta = generate_moved(audited_server, return_logprob=True, top_logprobs_num=1)["meta_info"]
    assert {len(row) for row in meta["output_top_logprobs"]} == {1}
    assert (
        "output_top_logprobs"
        not in generate_moved(audited_server, return_logprob=True)["meta_info"]
    )


def test_requests_that_cannot_be_compared_are_counted(audited_server: Server) -> None:
    """By reason; their answers are as ever."""

    def skips() -> dict[str, int]:
        found: dict[str, int] = get(audited_server.url + "/chunkcache/stats")["audit_skips"]
        return found

    audit_of(audited_server)  # what still waits may be left out, too
    before = skips()
    asked: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1.0},
        {"temperature": 1.5},
        {"presence_penalty": 0.5},
    ]
    for fields in asked:
        ask(audited_server, None, **fields)
    fresh = moved_body(send=lambda body: None, logprobs=True)  # nothing is cached under its salt
    assert post(audited_server.url + CHAT, fresh)["chunkcache"]["reuse"]["sampled"] is False
    gained = {reason: n - before.get(reason, 0) for reason, n in skips().items()}
    assert {reason: n for reason, n in gained.items() if n} == {
        "several_answers": 1,
        "temperature": 1,
        "constrained": 1,
        "nothing_moved": 1,
    }


# What follows


@pytest.mark.nightly
def test_sound_selector_serves_and_broken_one_is_paused(
    audited_server: Server, switch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under load. 40 answers of the sound selector change nothing. Made to fail, the tenant's terms
    are paused within 20 samples, the server's are not: requests are served exactly and say why, log
    and metrics show it. Mended, they return from probation."""

    def terms() -> dict[str, Any]:
        """Of the one tenant, at this selector and ratio."""
        found: list[dict[str, Any]] = audit_of(audited_server)["terms"]["own"]
        names = "selector", "ratio"
        return next(
            one
            for one in found
            if one["samples"] + one["pauses"] and all(one[n] == SOUND[n] for n in names)
        )

    def ask(server: Server) -> dict[str, Any]:
        return post(
            server.url + CHAT,
            moved_body(send=lambda body: post(server.url + CHAT, body), cache_salt="one"),
        )

    with load(audited_server, 2):
        for _ in range(40):
            ask(audited_server)
        sound = audit_of(audited_server)
        assert terms()["state"] == "asked"
        switch.touch()
        replies = list[dict[str, Any]]()
        try:
            while not replies or "audit_paused" not in replies[-1]["chunkcache"]["fallbacks"]:
                assert len(replies) <= 20, (
                    f"not paused after 20 samples: {audit_of(audited_server)}"
                )
                replies.append(ask(audited_server))
                audit_of(audited_server)
        finally:
            switch.unlink()
        broken = audit_of(audited_server)
        paused = replies[-1]["chunkcache"]
        assert (paused["reuse"], paused["fates"]["relocated"], paused["fates"]["recomputed"]) == (
            None,
            0,
            0,
        )
        assert {reply["chunkcache"]["reuse"]["ratio"] for reply in replies[:-1]} == {0.3}
        text = Path(str(audited_server.log)).read_text(encoding="utf-8")
        assert re.search(
            r"selector deviation at ratio 0\.3 \(terms of tenant \w+\) is paused \(was asked\)",
            text,
        )
        with urllib.request.urlopen(
            audited_server.url + "/metrics", timeout=DEADLINE_S
        ) as response:
            metrics = response.read().decode()
        assert 'chunkcache:audit_own_terms{state="paused"} 1.0' in metrics
        assert 'chunkcache:audit_state{selector="critical",state="asked"} 1.0' in metrics
        assert 'chunkcache:audits_total{ratio="0.3",selector="deviation",target="below"' in metrics
        for _ in range(PAUSE + 400):
            ask(audited_server)
            if terms()["state"] == "asked":
                break
        assert terms()["state"] == "asked"
    with capfd.disabled():
        print(
            f"\nsound: {figures(sound)}\nbroken, paused after {len(replies) - 1}: {figures(broken)}"
        )
    assert mixed_load.leftovers(audited_server.url, mixed_load.POOL_TOKENS) == []


def figures(found: Mapping[str, Any]) -> str:
    """All tenants together, by selector and ratio:
    samples, below the target, mean agreement, mean KL."""
    sums: dict[tuple[str, float | None], list[float]] = {}
    for one in found["figures"]:
        total = sums.setdefault((one["selector"], one["ratio"]), [0, 0, 0, 0])
        for i, value in enumerate(
            (1, one["below_target"] / one["samples"], one["agreement"], one["kl"])
        ):
            total[i] += value * one["samples"]
    return "; ".join(
        f"{selector} {ratio}: {n:.0f} samples, {below:.0f} below, agreement {agreed / n:.3f}, KL"
        f" {kl / n:.3f}"
        for (selector, ratio), (n, below, agreed, kl) in sums.items()
    )
