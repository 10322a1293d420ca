"""Requests that end a stock server: here that they do, and that ours refuses them on every endpoint
and goes on.

The list is tests/e2e/lethal.py. What the guard lets pass:
tests/sglang_chunkcache/front/guard/test_lethal.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from eval.http import get, post
from eval.server import Server, free_port
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.front.guard.lethal import REQUEST_RULES, SAMPLING_RULES
from tests import models
from tests.e2e.asking import CHAT, GENERATE, metrics_of, send, stats_of, user
from tests.e2e.conftest import STRICT
from tests.e2e.lethal import LETHAL, TEXT, Lethal

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0
"""In which a server that lives answers a request of one token, on any machine."""
GOOD = {"text": TEXT, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


@pytest.mark.nightly
@pytest.mark.parametrize("case", LETHAL, ids=lambda case: case.id)
def test_stock_server_ends(case: Lethal, tmp_path: Path) -> None:
    """On the releases that the rule names: if it names none any more, it should go."""
    rules = [*REQUEST_RULES.values(), *SAMPLING_RULES.values()]
    named = next(rule.versions for rule in rules if rule.field == case.field)
    flags = ["--stock", "--model-path", "bundled", "--enable-metrics"]
    if case.has_adapters:
        models.write_adapter(tmp_path / "a", model_dir())
        flags += ["--lora-paths", f"a={tmp_path / 'a'}", "--lora-backend", "torch_native"]
    if not case.is_alone:
        pytest.importorskip("nixl")
        flags += ["--disaggregation-mode", case.mode, "--disaggregation-transfer-backend", "nixl"]
        flags += ["--disaggregation-bootstrap-port", str(free_port())]
    env = {"OMP_NUM_THREADS": STRICT["OMP_NUM_THREADS"]}
    launcher = (
        "-m",
        "tests.e2e.cpu_server" if case.is_for_gpus else "sglang_chunkcache.launch_server",
    )
    with Server(flags, log=tmp_path / "stock.log", env=env, launcher=launcher) as server:
        good = [("/generate", GOOD)] if case.is_alone else []
        for path, body in (*good, *case.before):
            assert send(server.url + path, body)[0] == 200
        if case.overlapped:
            background(server, "/generate", case.overlapped)
            wait_until(lambda: "Decode batch" in server.log.read_text(errors="replace"))
        request = background(server, *case.sent())
        wait_until(lambda: has_ended(server) or not request.is_alive())
        ended = has_ended(server) or not answers(server)
        assert ended == (version("sglang") in named), server.log_tail()


@pytest.mark.parametrize(
    "case",
    [
        LETHAL[0],
        *(pytest.param(case, marks=pytest.mark.nightly) for case in LETHAL[1:] if case.is_alone),
    ],
    ids=lambda case: case.id,
)
def test_ours_refuses(rag_server: Server, case: Lethal) -> None:
    """By name, whole and streamed, and the next request is answered. That each is refused at all is
    shown without a server."""
    path, body = case.sent(stream=False)
    status, text = send(rag_server.url + path, body)
    assert (status, json.loads(text)["error"]["message"].split(":")[0]) == (400, case.field)
    path, body = case.sent(stream=True)
    status, text = send(rag_server.url + path, body)
    assert status in (200, 400)
    assert case.field in text
    assert post(rag_server.url + "/generate", GOOD)["meta_info"]["completion_tokens"] == 1


ASKED = {"messages": [user(TEXT)]}
BIG = {"top_k": 2**31}
OTHER_DOORS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [-1], "model": "m"}, "input_ids"),
    ("/v1/chat/completions", ASKED | BIG, "sampling_params.top_k"),
    ("/v1/messages", ASKED | BIG | {"model": "m", "max_tokens": 4}, "sampling_params.top_k"),
    ("/v1/responses", {"input": TEXT, "model": "m"} | BIG, "sampling_params.top_k"),
    ("/api/generate", {"prompt": TEXT, "model": "m", "options": BIG}, "sampling_params.top_k"),
    (CHAT, ASKED | {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (CHAT, ASKED | BIG, "top_k"),
    (GENERATE, {"parts": [TEXT], "sampling_params": BIG}, "sampling_params.top_k"),
    (GENERATE, {"parts": [TEXT], "return_logprob": True, "logprob_start_len": -5}, "start_len"),
]


@pytest.mark.parametrize(("path", "body", "field"), OTHER_DOORS)
def test_every_door_refuses(
    rag_server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    """They all come to the same place in SGLang."""
    if "model" in body:
        model = get(rag_server.url + "/v1/models")["data"][0]["id"]
        body = {**body, "stream": False, "model": model}
    status, text = send(rag_server.url + path, body)
    assert status == 400, text
    assert field in text
    assert post(rag_server.url + "/generate", GOOD)["meta_info"]["completion_tokens"] == 1


def test_refusals_are_counted(rag_server: Server) -> None:
    """By field, in the stats and for Prometheus."""
    count = stats_of(rag_server)["guarded"].get("priority", 0)
    send(rag_server.url + "/generate", {**GOOD, "priority": 2**63})
    assert stats_of(rag_server)["guarded"]["priority"] == count + 1
    assert metrics_of(rag_server)['chunkcache:guarded_total{field="priority"}'] == count + 1


def background(server: Server, path: str, body: dict[str, Any]) -> threading.Thread:
    """A request whose client waits as long as it takes: SGLang would abort it otherwise."""

    def run() -> None:
        # the server has ended, or answers nothing any more
        with contextlib.suppress(OSError, http.client.HTTPException):
            send(server.url + path, body, timeout_s=600.0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_until(holds: Any) -> None:
    """Return when it holds, or has not for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def has_ended(server: Server) -> bool:
    """Whether one of its processes has died: the others may wait a minute for it."""
    return not server.is_running or "hit an exception" in server.log.read_text(errors="replace")


def answers(server: Server) -> bool:
    """Whether it answers a good request and is still there a moment later."""
    try:
        status, _ = send(server.url + "/generate", GOOD, timeout_s=PATIENCE_S)
    except (OSError, http.client.HTTPException):
        return False
    time.sleep(1)
    return status == 200 and not has_ended(server)
