"""Mixed load on a tiny poisoned pool: does fused reuse ever read KV of a free slot, lose a slot, or
change an exact answer?

The server is tests/e2e/poisoned_server.py, in whose pool every free slot holds NaN, with prefill
pieces smaller than two chunks. Clients send exact requests and fused ones with every selector and
many ratios: streams, parallel answers, conversations, plain and explain requests; some disconnect
early. Hints tell what some of them will need of the storage. `soak` sends the load and notes as
problems: log probabilities that are not finite, fates that do not add up, slots that are neither
free nor evictable, and what is left of hints. `check_exact` compares exact answers with full
prefill.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eval.errors import CommandError
from eval.http import get, post
from eval.world.world import World, order_questions
from sglang_chunkcache.config import SELECTORS
from tests.polling import DEADLINE_S
from tests.soak.answers import (
    LOGPROBS,
    Answer,
    answer_of,
    differences,
    logprob_difference,
    prompt_ids,
    run_stock,
)

POISONED = ("-m", "tests.e2e.poisoned_server")
POOL_TOKENS = 1600
FLAGS = [
    *("--model-path", "bundled", "--reuse", "fused", "--max-total-tokens", str(POOL_TOKENS)),
    *("--chunked-prefill-size", "32", "--max-running-requests", "8", "--random-seed", "0"),
    *("--chunkcache-move", "always", "--chunkcache-max-pass-tokens", "1000"),
]
"""The pool holds about a dozen prompts, and all moved chunks of a request may be recomputed."""
TIGHT_POOL_TOKENS = 800
TIGHT = [
    *(*FLAGS, "--max-total-tokens", str(TIGHT_POOL_TOKENS)),
    *("--chunkcache-store-chunks", "2"),
]
"""So small that requests wait for slots, promises are declined,
and the store evicts chunks that are being moved."""

REQUEST_HINT, STRANGE_HINT = "hint", "hint of what nobody asks for"
REFUSED_HINT = "hint that is refused"

ACTS = {"send": 40, "again": 10, "stream": 15, "parallel": 5, "hang up": 10, "conversation": 10}
ACTS |= {"plain": 5, "explain": 5}
"""What a client does, and how often of a hundred times."""
RATIOS = (0.0, 0.15, 0.5, 1.0)
NUM_PASSAGES = 20
MAX_NEW_TOKENS = 24
TIE = 0.126
"""Two best tokens closer than this, in nats, may swap: bfloat16 rounding depends on the batch and
on the CPU's kernels. The model's logits are mostly between 8 and 16, where adjacent bfloat16 values
are 0.0625 apart, and each of two may move by one."""


@dataclass(frozen=True)
class Task:
    """Work of one client: a request, or the turns of a conversation. `act` names how."""

    act: str
    turns: tuple[dict[str, Any], ...]


@dataclass
class Found:
    """The observations of a run. `problems` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    exact: list[tuple[list[int], Answer, int]] = field(default_factory=list)
    """Prompt ids, answer, tokens asked for."""
    problems: list[str] = field(default_factory=list)


def soak(url: str, num_requests: int, *, clients: int, seed: int, pool_tokens: int) -> Found:
    """Send the load, wait until no request is running, and check that `pool_tokens` slots are free
    or evictable. A server with a storage is flushed then, and gets the load again: what it needs is
    in the storage alone."""
    found, is_stored = Found(), "storage" in get(url + "/chunkcache/stats")["ranks"][0]
    tasks = with_hints(make_tasks(num_requests, seed), seed, takes_hints=is_stored)
    for is_again in (False, True) if is_stored else (False,):
        if is_again:
            post(url + "/flush_cache")
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda task: _run(url, task, found), tasks))
        found.problems += leftovers(url, pool_tokens)
    return found


def make_tasks(num_requests: int, seed: int) -> list[Task]:
    """Requests about a small world, so that chunks recur. Four fifths are fused."""
    world, rng = World(seed, NUM_PASSAGES, num_kinds=1), random.Random(seed)
    asked = [question for question in world.questions if question.hop == 1]
    tasks: list[Task] = []
    total = 0
    while total < num_requests:
        act = rng.choices(list(ACTS), list(ACTS.values()))[0]
        turns = []
        for number in range(3 if act == "conversation" else 1):
            question = rng.choice(asked)
            passages = world.context(question, rng.randint(2, 6), rng)
            if rng.random() < 0.4:  # a question that moved KV answers wrongly
                question = rng.choice(order_questions(passages))
            turns.append(_body(rng, question.question, passages[: 2 if number else None], act))
        if act == "conversation":
            turns = [{**turn, "conversation_id": f"soak{len(tasks)}"} for turn in turns]
        if act == "again":  # in another order, moved, then exact: that must not match moved KV
            exact = {key: value for key, value in turns[0].items() if key != "reuse"}
            exact |= {"order": "retriever", "cache_salt": f"again{len(tasks)}"}
            exact["max_tokens"] = MAX_NEW_TOKENS
            exact["messages"] = [{"role": "user", "content": "Which passage comes last?"}]
            moved = {"mode": "fused", "selector": rng.choice(SELECTORS), "ratio": 0.0}
            turns = [exact | {"chunks": exact["chunks"][::-1]}, exact | {"reuse": moved}, exact]
        tasks.append(Task(act, tuple(turns)))
        total += len(turns)
    return tasks


def with_hints(tasks: Sequence[Task], seed: int, *, takes_hints: bool) -> list[Task]:
    """The tasks, and half as many hints as there are requests: of a request within the next tasks,
    of chunks that nobody asks for, and such as are refused. A server without a storage refuses
    all."""
    rng, strangers = random.Random(seed), World(seed + 1000, NUM_PASSAGES, num_kinds=1).passages
    hinted = list[Task]()
    for number, task in enumerate(tasks):
        for _ in task.turns:
            if rng.random() < 0.5:
                turn = rng.choice(tasks[number : number + 8]).turns[0]
                texts = [chunk["text"] for chunk in turn["chunks"]]
                names = turn.keys() & {"reuse", "cache_salt"}
                reuse: dict[str, Any] = {name: turn[name] for name in names}
                strange = [one.text for one in rng.sample(strangers, 3)]
                by_chunks, by_texts = {"chunks": turn["chunks"]}, {"texts": texts}
                bodies: dict[str, tuple[dict[str, Any], ...]] = {
                    REQUEST_HINT: (turn, by_chunks | reuse, by_texts | reuse),
                    STRANGE_HINT: ({"texts": strange, **reuse},),
                    REFUSED_HINT: (
                        *({"text": texts}, {"texts": texts[0]}, {"texts": []}),
                        {**turn, "texts": texts},
                    ),
                }
                act = rng.choices(list(bodies), (6, 2, 2))[0]
                kind = act if takes_hints else REFUSED_HINT
                hinted.append(Task(kind, (rng.choice(bodies[act]),)))
        hinted.append(task)
    return hinted


def check_exact(found: Found, url: str, **salt: str) -> None:
    """Compare exact answers with full prefill; what differs becomes a problem."""
    references: dict[tuple[int, ...], Answer] = {}
    for ids, answer, max_tokens in found.exact:
        if (want := references.get(tuple(ids))) is None:
            want = references[tuple(ids)] = run_stock(url, ids, MAX_NEW_TOKENS, **salt)
        want = Answer(want.tokens[:max_tokens], want.logprobs[:max_tokens], want.gaps[:max_tokens])
        if (off := logprob_difference(want, answer)) > TIE:
            found.problems.append(f"exact answer's log probabilities are off by {off:.3f}: {ids}")
        for difference in differences([want], [answer]):
            if difference.gap > TIE:
                found.problems.append(
                    f"exact answer differs at {difference.step} by {difference.gap:.3f}: {ids}"
                )


def leftovers(url: str, pool_tokens: int, timeout_s: float = DEADLINE_S) -> list[str]:
    """What is not released when the server is idle. Captures need requests meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        short = {"parts": ["Hello."], "sampling_params": {"max_new_tokens": 2}}
        post(url + "/rag/v1/generate", short)
        time.sleep(0.3)
        stats = get(url + "/chunkcache/stats")
        rank = stats["ranks"][0]
        expected = {
            "protected slots": (rank["protected"], 0),
            "free and evictable slots": (rank["free"] + rank["evictable"], pool_tokens),
            "waiting audits": (stats["audit"]["waiting"], 0),
            "pending captures": (rank["store"]["pending"], 0),
            "open plans": (stats["tree"]["open_plans"], 0),
            "prompt tokens in flight": (sum(stats["prompt_tokens_in_flight"]), 0),
            "mirror agrees": (rank["mirror"]["agrees"], True),
        }
        if "storage" in rank:
            expected["jobs of the storage"] = rank["storage"]["queue"], 0
            expected["bytes under way ahead"] = rank["storage"]["prefetch_bytes"], 0
        pairs = expected.items()
        wrong = [f"{name}: {got}, not {want}" for name, (got, want) in pairs if got != want]
        if not wrong or time.monotonic() > deadline:
            return wrong


def problems_of_log(log: Path) -> list[str]:
    """Log lines of errors, ours or SGLang's."""
    marks = ["Traceback", "IntegrityError", "moving chunk KV failed", "memory leak"]
    marks += ["Scheduler hit an exception"]
    lines = log.read_text(errors="replace").splitlines()
    return [line[:200] for line in lines if any(mark in line for mark in marks)]


def is_finite(logprobs: Sequence[Any]) -> bool:
    """Whether all are numbers. JSON has no NaN; servers write null."""
    return bool(logprobs) and all(
        isinstance(each, int | float) and each == each for each in logprobs
    )


# Private, in order of use


def _body(rng: random.Random, question: str, passages: Sequence[Any], act: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "chunks": [{"id": p.id, "text": p.text} for p in passages],
        "temperature": 0,
        "max_tokens": rng.choice((1, 2, 12, MAX_NEW_TOKENS)),
        "logprobs": True,
        "top_logprobs": 2,
    }
    if rng.random() < 0.5:
        body["order"] = "retriever"
    if rng.random() < 0.8:
        selector, ratio = rng.choice(SELECTORS), rng.choice(RATIOS)
        body["reuse"] = {"mode": "fused", "selector": selector, "ratio": ratio}
        if rng.random() < 0.2:
            body["reuse"]["focus"] = rng.choice(("off", "spare"))
        if body["reuse"]["selector"] == "context" and rng.random() < 0.5:
            body["reuse"]["alpha"] = rng.choice((0.0, 0.5, 2.0))
        if body["reuse"]["selector"] == "critical" and rng.random() < 0.3:
            body["reuse"] |= {"ratio": "auto", "quality": rng.choice((0.9, 0.99))}
    if act == "parallel":
        body |= {"n": 2, "temperature": 1.0}
    if act in ("stream", "hang up"):
        body["stream"] = True
    return body


def _run(url: str, task: Task, found: Found) -> None:
    messages: list[dict[str, str]] = []
    for turn in task.turns:
        kind = "fused" if "reuse" in turn else "exact"
        messages = [*(messages if task.act == "conversation" else ()), *turn.get("messages", ())]
        body = {**turn, "messages": messages}
        try:
            if task.act in (REQUEST_HINT, STRANGE_HINT, REFUSED_HINT):
                _hint(url, turn, is_refused=task.act == REFUSED_HINT)
            elif task.act == "plain":
                ours = ("chunks", "order", "reuse")
                plain = {key: value for key, value in body.items() if key not in ours}
                _check_choices(post(url + "/v1/chat/completions", plain), found)
            elif task.act == "explain":
                asked = {key: body[key] for key in ("messages", "chunks", "reuse") if key in body}
                post(url + "/chunkcache/explain", asked)
            elif "stream" in body:
                _stream(url, body, found, hang_up=task.act == "hang up")
            else:
                messages.append({"role": "assistant", "content": _send(url, body, found)})
        except (CommandError, OSError, http.client.HTTPException) as error:
            found.problems.append(f"{task.act}: {error}"[:300])
        found.outcomes[f"{task.act} {kind}"] += 1


def _hint(url: str, body: dict[str, Any], *, is_refused: bool) -> None:
    try:
        answer = post(url + "/chunkcache/prefetch", body)
    except CommandError as error:
        if is_refused and ": 400 " in str(error):
            return
        raise
    if is_refused or answer:
        raise CommandError(f"{body} was answered {answer}")


def _send(url: str, body: dict[str, Any], found: Found) -> str:
    reply = post(url + "/rag/v1/chat/completions", {**body, **LOGPROBS})
    _check_object(reply["chunkcache"], reply["usage"]["prompt_tokens"], found)
    if _check_choices(reply, found) and not body.keys() & {"reuse", "n"}:
        answer = answer_of(reply["choices"][0]["meta_info"])
        found.exact.append((prompt_ids(reply), answer, body["max_tokens"]))
    return reply["choices"][0]["message"]["content"] or ""


def _check_choices(reply: dict[str, Any], found: Found) -> bool:
    contents = [choice["logprobs"]["content"] for choice in reply["choices"]]
    logprobs = [token["logprob"] for content in contents for token in content]
    if not is_finite(logprobs):
        found.problems.append(f"not finite: {logprobs}, {reply.get('chunkcache')}"[:500])
        return False
    return True


def _check_object(cached: dict[str, Any], prompt_tokens: int | None, found: Found) -> None:
    fates = cached["fates"]
    if fates is not None:
        found.fates.update(fates)
        if prompt_tokens is not None and sum(fates.values()) != prompt_tokens:
            found.problems.append(f"fates do not add up to {prompt_tokens}: {cached}"[:500])
    found.fallbacks.update(cached["fallbacks"])
    if "pass_failed" in cached["fallbacks"]:
        found.problems.append(f"pass_failed: {cached}"[:500])


def _stream(url: str, body: dict[str, Any], found: Found, *, hang_up: bool) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
    try:
        header = {"Content-Type": "application/json"}
        connection.request("POST", "/rag/v1/chat/completions", json.dumps(body), header)
        if hang_up and body["max_tokens"] < 3:
            time.sleep(0.02 * body["max_tokens"])
            return  # before there is an answer
        events = _events(connection.getresponse())
        logprobs: list[Any] = []
        for event in events:
            if hang_up:
                return
            found_in = [choice.get("logprobs") or {} for choice in event["choices"]]
            logprobs += [token["logprob"] for one in found_in for token in one.get("content") or ()]
            if "chunkcache" in event:
                _check_object(event["chunkcache"], None, found)
        if not is_finite(logprobs):
            found.problems.append(f"not finite in a stream: {logprobs}, {body.get('reuse')}"[:500])
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise CommandError(f"stream: {response.status} {response.read()[:300]!r}")
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])
