"""Fused reuse as a user sees it, on a server whose pool holds NaN in every free slot.

Every answer below is asked for with log probabilities and refused where one is not a number.
`cache_salt` keeps a test's KV to itself; under a salt of its own a prompt is prefilled in full. The
bundled model answers questions about its passages and about their order, and only the latter need
attention across chunks.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eval.http import post
from eval.serve.arms import ARMS
from eval.server import Server
from eval.world.world import Passage, Question, World, order_questions
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.client import Client, settle
from sglang_chunkcache.front.calibration import CANNED
from tests.e2e.asking import (
    CHAT,
    EXPLAIN,
    ask,
    assert_clean,
    assistant,
    body_of,
    chunks_of,
    flush,
    fused,
    logprobs_of,
    metrics_of,
    preprocess,
    rank_of,
    send,
    sources_of,
    stream,
    text_of,
    user,
)
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT, answer_of, prompt_ids

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

SELECTORS = [
    *("query", "context"),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("first", "h2o", "deviation")),
]
"""One that looks at the question and one that looks at stored scores;
what a selector chooses is shown without a server."""
_numbers = count()


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, moving KV on the device does nothing; its text is raised."""
    return tmp_path_factory.mktemp("poisoned") / "sabotage"


@pytest.fixture(scope="session")
def planted() -> list[str]:
    """Errors in the server's log that a test has asked for."""
    return []


@pytest.fixture(scope="session")
def fused_server(
    tmp_path_factory: pytest.TempPathFactory, switch: Path, planted: list[str]
) -> Iterator[Server]:
    """Fused reuse, poisoned, with a pool that evicts, pieces smaller than two chunks and every
    check on."""
    log = tmp_path_factory.mktemp("servers") / "fused.log"
    env = {**STRICT, "OMP_NUM_THREADS": "1", "POISONED_SERVER_SABOTAGE": str(switch)}
    env["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    # most tests ask for moves that do not pay
    flags = [*mixed_load.FLAGS, "--chunkcache-move", "pays"]
    flags += ["--chunkcache-audit-share", "0"]  # a check would evict what a test counts on
    flags += ["--chunkcache-selectors", "eval.selectors", "--enable-metrics"]
    with Server(flags, log=log, launcher=mixed_load.POISONED, env=env) as server:
        assert "chunk cache: ready" in log.read_text(), "healthy before it was calibrated"
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == planted


@pytest.fixture
def salt() -> str:
    return f"test{next(_numbers)}"


@pytest.fixture
def world() -> World:
    """Passages that no other test has seen."""
    return World(1000 + next(_numbers), 20, num_kinds=1)


def full_prefill(
    server: Server, passages: Sequence[Passage], question: Question | str, **fields: Any
) -> str:
    """The answer to the same prompt with nothing reused."""
    reply = ask(server, passages, question, cache_salt=f"alone{next(_numbers)}", **fields)
    assert reply["chunkcache"]["fates"]["exact"] == 0
    return text_of(reply)


def crowd_out(server: Server) -> None:
    """Other requests take the whole pool, twice over; the store keeps what it has."""
    before = rank_of(server)["evicted_chunks"]
    for number in range(8):
        passages = World(9_000_000 + next(_numbers), 20, num_kinds=1).passages
        for _ in range(2):  # what has been hit stays longer than what has not
            fields = {"max_tokens": 1, "cache_salt": f"crowd{passages[0].text}"}
            ask(server, passages, f"What is {number}?", **fields)
    assert rank_of(server)["evicted_chunks"] >= before + 60


def cached(server: Server, passages: Sequence[Passage], salt: str, question: Any = "Hello") -> None:
    """They are on the device, in this order."""
    ask(server, passages, question, cache_salt=salt, max_tokens=1)


def fact_of(passage: Passage, world: World) -> Question:
    """A question that the passage alone answers."""
    facts = (q for q in world.questions if q.hop == 1)
    return next(q for q in facts if q.gold_passage_ids[0] == passage.id)


# The poison itself


def test_reading_what_was_never_written_is_seen(
    fused_server: Server, switch: Path, world: World, salt: str
) -> None:
    """With the copy left out the answer is NaN; with it, it is not."""
    first, second = world.passages[:4], world.passages[3::-1]
    question = fact_of(first[1], world)
    ask(fused_server, first, question, cache_salt=salt)
    switch.touch()
    try:
        body = body_of(second, question, cache_salt=salt, reuse=fused())
        broken = post(fused_server.url + CHAT, body)
    finally:
        switch.unlink()
    assert broken["chunkcache"]["fates"]["relocated"] > 0
    assert None in logprobs_of(broken)
    flush(fused_server)
    ask(fused_server, first, question, cache_salt=salt)
    whole = ask(fused_server, second, question, cache_salt=salt, reuse=fused())
    assert whole["chunkcache"]["fates"]["relocated"] > 0
    assert text_of(whole) in question.answers


# Recomputing everything is a full prefill, recomputing nothing is not


@pytest.mark.parametrize("selector", SELECTORS)
def test_recomputing_everything_equals_full_prefill(fused_server: Server, selector: str) -> None:
    """Prompts about facts and order, and nothing merely moved."""
    rng = random.Random(selector)
    for number in range(2):
        world = World(random.Random(f"{selector} {number}").getrandbits(32), 20, num_kinds=1)
        fact = rng.choice([q for q in world.questions if q.hop == 1])
        before = world.context(fact, 4, rng)
        asked = before[1:] + before[:1]
        order = order_questions(asked)
        for question in (fact, order[0], order[1], rng.choice(order[2:])):
            salt = f"whole{next(_numbers)}"
            cached(fused_server, before, salt, question)
            reply = ask(fused_server, asked, question, cache_salt=salt, reuse=fused(selector, 1.0))
            told = reply["chunkcache"]
            assert told["fates"]["recomputed"] > 60
            assert (told["fates"]["relocated"], told["fallbacks"]) == (0, [])
            assert text_of(reply) == full_prefill(fused_server, asked, question)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[A-M][a-z]{3,9}"},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 3},
        {"logit_bias": {"40": 50}},
        {"frequency_penalty": 1.5, "min_tokens": 8},
    ],
    ids=str,
)
def test_what_reads_logits_reads_those_of_the_pass(
    fused_server: Server, world: World, salt: str, fields: dict[str, Any]
) -> None:
    """The question's rows are in it, and its logits are the forward's."""
    before = world.passages[:4]
    asked, question = before[1:] + before[:1], fact_of(before[2], world)
    cached(fused_server, before, salt, question)
    tail = rank_of(fused_server)["moves"]["tokens"].get("tail", 0)
    reuse = fused("critical", 1.0)
    moved = ask(fused_server, asked, question, cache_salt=salt, reuse=reuse, **fields)
    assert moved["chunkcache"]["fates"]["recomputed"] > 60
    assert rank_of(fused_server)["moves"]["tokens"]["tail"] > tail
    alone = ask(fused_server, asked, question, cache_salt=f"{salt}alone", **fields)
    assert alone["chunkcache"]["fates"]["exact"] == 0
    contents = [[each["message"]["content"] for each in r["choices"]] for r in (moved, alone)]
    assert contents[0] == contents[1]
    assert logprobs_of(moved) == pytest.approx(logprobs_of(alone), abs=1e-4)


def test_what_moving_takes_is_estimated_and_compared(
    fused_server: Server, world: World, salt: str
) -> None:
    """In the answer and beforehand; the stats say how far it was off."""
    passages, asked = world.passages[:3], fused("first", 0.15, move="pays")
    cached(fused_server, passages, salt)
    body = body_of(passages[::-1], "And first?", cache_salt=salt, reuse=asked)
    explained = post(fused_server.url + EXPLAIN, body)
    reply = post(fused_server.url + CHAT, body)["chunkcache"]
    for told in (explained["estimated_ms"], reply["reuse"]["estimated_ms"]):
        assert min(told["computed"], told["planned"]) > 0
    is_moved = told["planned"] <= 0.95 * told["computed"]
    assert (reply["reuse"]["selected_by"] == "first") == is_moved
    # also where a chunk of several is computed
    assert is_moved or "not_worth_it" in reply["fallbacks"]
    assert rank_of(fused_server)["costs"]["extend"]["observed"] > 1


# Exact and fused KV never meet


def test_exact_requests_do_not_see_fused_kv(fused_server: Server, world: World, salt: str) -> None:
    """They find the head only, and answer as a prefill does."""
    passages = world.passages[:4]
    question = order_questions(passages)[3]
    cached(fused_server, passages[::-1], salt)
    moved = ask(fused_server, passages, question, cache_salt=salt, reuse=fused())
    assert moved["chunkcache"]["fates"]["relocated"] > 60
    exact = ask(fused_server, passages, question, cache_salt=salt)
    assert exact["chunkcache"]["fates"]["exact"] == exact["chunkcache"]["head_tokens"]
    assert exact["chunkcache"]["fates"]["relocated"] == 0
    assert text_of(exact) == full_prefill(fused_server, passages, question)


def test_conversation_with_fused_turns(fused_server: Server, world: World, salt: str) -> None:
    """An exact turn in between recomputes the history and answers as a prefill."""
    flush(fused_server)  # what has been hit stays, and would crowd out the later turns
    passages = world.passages[:6]
    cached(fused_server, passages[::-1], salt)
    messages, told = list[dict[str, Any]](), list[dict[str, Any]]()
    asked = (passages[:4], fused()), (passages[4:], fused()), ((), None), ((), fused())
    for turn, (chunks, reuse) in enumerate(asked):
        question = order_questions(passages)[turn % 2]
        messages.append(user(question.question))
        fields = {"messages": messages, "conversation_id": "talk", "cache_salt": salt}
        reply = ask(fused_server, chunks, question, **fields, **({"reuse": reuse} if reuse else {}))
        told.append(reply["chunkcache"])
        if reuse is None:
            more = {"top_logprobs": 2, "return_token_ids": True, "return_meta_info": True}
            again = post(fused_server.url + CHAT, body_of((), question, **fields, **more))
            ids, answer = prompt_ids(again), answer_of(again["choices"][0]["meta_info"])
            found = mixed_load.Found(exact=[(ids, answer, 24)])
            mixed_load.check_exact(found, fused_server.url, cache_salt=f"alone{next(_numbers)}")
            assert found.problems == []
            assert text_of(again) == text_of(reply)
        messages.append(assistant(text_of(reply)))
    assert [each["turns_reused"] for each in told] == [0, 1, 2, 3]
    assert told[0]["fates"]["relocated"] > 60
    assert told[1]["reuse"]["fused_hit"] > 60
    assert told[1]["fates"]["relocated"] > told[1]["reuse"]["fused_hit"]
    assert told[2]["fates"]["exact"] == told[2]["head_tokens"]
    assert told[2]["fates"]["relocated"] == 0
    # what the exact turn has computed is better than what was moved
    assert told[3]["fates"]["exact"] > 100
    assert told[3]["fates"]["relocated"] == 0


# Where a chunk is found


def test_chunks_are_found_on_the_host_when_the_device_has_lost_them(
    fused_server: Server, world: World, salt: str
) -> None:
    """Same chunks, same answers."""
    passages = world.passages[:4]
    facts = [fact_of(passage, world) for passage in passages]
    for _ in range(2):
        ask(fused_server, passages, "Hello", cache_salt=salt, max_tokens=1)
    settle(Client(fused_server.url, None))
    crowd_out(fused_server)
    for number, question in enumerate(facts):
        asked = passages[::-1] if number else passages[1:] + passages[:1]
        reuse = fused("first", 0.1 + 0.1 * number)
        reply = ask(fused_server, asked, question, cache_salt=salt, reuse=reuse)
        if not number:
            assert sources_of(reply)[-4:] == [(asked[i].id, "host", (i + 1) % 4) for i in range(4)]
        assert text_of(reply) in question.answers
    turned, whole = passages[2:] + passages[:2], fused("query", 1.0)
    reply = ask(fused_server, turned, facts[0], cache_salt=salt, reuse=whole)
    assert reply["chunkcache"]["fates"]["recomputed"] > 60
    assert text_of(reply) == full_prefill(fused_server, turned, facts[0])


def test_chunk_behind_strangers_becomes_another_variant(
    fused_server: Server, world: World, salt: str
) -> None:
    """Cache-Craft 3.3, by the arm that stands for it: what is recomputed whole is kept, and taken
    where the same chunks are in front of it again, in whatever order."""
    a, b, c, d, e = world.passages[:5]
    cached(fused_server, [b, a], salt)
    for each in (c, d, e):
        cached(fused_server, [each], salt)
    arm = ARMS["cache-craft"].body
    how = {"cache_salt": salt, "order": arm["order"], "reuse": {**arm["reuse"], "move": "always"}}
    replies = []
    # nothing is scored before the first: it recomputes a fixed share
    for front in ([c, d, e], [d, c, e], [e, d, c]):
        replies.append(ask(fused_server, [*front, a], "Hello", max_tokens=1, **how))
        settle(Client(fused_server.url, None))
    _, strangers, seen = (reply["chunkcache"]["reuse"]["sources"][-1] for reply in replies)
    assert (strangers["chunk"], strangers["variant_prefix"]) == (a.id, 1)
    assert (seen["chunk"], seen["variant_prefix"]) == (a.id, 3)
    assert seen["cfo"] < strangers["cfo"]


# Ahead of requests


def test_preprocessed_chunks_are_used(fused_server: Server, world: World, tmp_path: Path) -> None:
    """The command computes each chunk after its neighbours; requests take those variants."""
    flush(fused_server)
    passages = world.passages[:4]
    near = [{"id": p.id, "neighbors": [q.id for q in passages if q is not p]} for p in passages]
    command = [sys.executable, "-m", "sglang_chunkcache.preprocess", "--top-n", "2"]
    command += ["--url", fused_server.url]
    for name, lines in (("corpus", chunks_of(passages)), ("neighbors", near)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command += [f"--{name}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["alone"]["chunks"] == result["behind_neighbors"]["chunks"] == 4
    assert result["behind_neighbors"]["neighbors"] == {"moved": 8, "computed": 0, "missing": 0}
    assert result["stores"][0]["num_variants"] >= 8
    reply = ask(fused_server, passages[1:], "Hello", reuse=fused())
    # the first was computed alone, as it is here
    assert reply["chunkcache"]["fates"]["exact"] > reply["chunkcache"]["head_tokens"]
    # what has seen most here is taken, wherever it is
    assert [(name, seen) for name, _, seen in sources_of(reply)] == [
        (p.id, 2) for p in passages[2:]
    ]
    flush(fused_server)  # preprocessed variants stay
    reply = ask(fused_server, passages[1:], "Hello", reuse=fused())
    assert sources_of(reply)[-2:] == [(p.id, "host", 2) for p in passages[2:]]


# Whatever else a client does


def test_vanished_clients_leave_nothing(fused_server: Server, world: World, salt: str) -> None:
    """Fused streams whose clients hang up at once or after the first event."""
    passages = world.passages[:6]
    cached(fused_server, passages[::-1], salt)
    rng = random.Random(0)
    for number in range(8):
        rng.shuffle(passages)
        fields = {"max_tokens": 200, "ignore_eos": True, "cache_salt": salt}
        body = body_of(passages, "Hello", **fields, reuse=fused("query", 0.3))
        events = stream(fused_server, body)
        if number % 2:
            next(events)
        events.close()
    assert mixed_load.leftovers(fused_server.url, mixed_load.POOL_TOKENS) == []


# Where the model keeps its evidence


def test_calibrated_selector_restores_what_moving_costs(fused_server: Server, salt: str) -> None:
    """Calibrated on two prompts, `critical` answers as full prefill does."""
    examples = [json.loads(line) for line in CANNED.read_text(encoding="utf-8").splitlines()]
    (rank,) = post(fused_server.url + "/chunkcache/calibrate", {"examples": examples[:2]})["ranks"]
    assert (rank["depth"], rank["layer"]) == (3, 3)
    assert rank["heads"][0]["layer"] == 2
    assert rank_of(fused_server)["calibration"]["depth"] == 3
    question, texts = examples[3]["question"], examples[3]["chunks"]
    chunks = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    moving = {"cache_salt": salt, "reuse": fused("critical", 0.15)}
    turned = body_of((), "Hello", chunks=chunks[::-1], max_tokens=1, **moving)
    for _ in range(3):
        post(fused_server.url + CHAT, turned)
    settle(Client(fused_server.url, None))
    asked = body_of((), question, chunks=chunks, **moving)
    reply = post(fused_server.url + CHAT, asked)
    found = reply["chunkcache"]
    assert (found["reuse"]["selected_by"], found["fallbacks"]) == ("critical", [])
    assert found["fates"]["recomputed"] < 0.2 * found["fates"]["relocated"]
    full = body_of((), question, cache_salt=f"{salt} full", chunks=chunks, reuse="exact")
    assert text_of(reply) == text_of(post(fused_server.url + CHAT, full))
    nothing = post(fused_server.url + CHAT, {**asked, "reuse": fused("none", 0.0)})
    assert text_of(nothing) != text_of(reply)
    reuse = {**fused("critical", "auto"), "quality": 0.9}
    auto = post(fused_server.url + CHAT, {**asked, "reuse": reuse})
    assert text_of(auto) == text_of(reply)
    found, fates = auto["chunkcache"], auto["chunkcache"]["fates"]
    assert (found["reuse"]["quality"], found["fallbacks"]) == (0.9, [])
    share = fates["recomputed"] / (fates["recomputed"] + fates["relocated"])
    assert 0 < found["reuse"]["ratio"] < 0.15
    assert found["reuse"]["ratio"] == pytest.approx(share, abs=1e-4)


# Together


def test_requests_at_once_move_what_they_move_one_by_one(
    fused_server: Server, world: World
) -> None:
    """In a pool that does not hold them all they wait for room."""
    passages, mix = world.passages[:16], random.Random(7)
    orders = [mix.sample(passages, 16) for _ in range(12)]

    def asked(order: Sequence[Passage]) -> Any:
        fields = {"cache_salt": salt, "reuse": fused("first", 0.15)}
        fields |= {"max_tokens": 16, "ignore_eos": True}  # so that they meet
        return ask(fused_server, order, f"What is {len(order)}?", **fields)["chunkcache"]

    def computed(replies: Iterable[Any]) -> int:
        found = list(replies)
        assert [each["fallbacks"] for each in found] == [[]] * len(orders)
        return sum(each["fates"]["computed"] for each in found)

    num_computed = []
    for num_threads in (1, len(orders)):
        salt = f"together{num_threads}"
        flush(fused_server)
        for passage in passages:
            cached(fused_server, [passage], salt)
        with ThreadPoolExecutor(num_threads) as threads:
            num_computed.append(computed(threads.map(asked, orders)))
    assert num_computed[1] <= 1.1 * num_computed[0]

    def is_shown() -> bool:
        cached(fused_server, passages[:1], salt)  # figures are shown after a forward
        shown, waits = metrics_of(fused_server), dict(rank_of(fused_server)["waiting"])
        assert waits.pop("now") == 0
        return all(
            shown.get(f'chunkcache:waits_total{{reason="{reason}"}}') == number
            for reason, number in waits.items()
        )

    until(is_shown, every_s=1)


# What outlives a flush


def stored(server: Server) -> int:
    return int(rank_of(server)["store"]["num_variants"])


def preprocessed(server: Server, passages: Sequence[Passage], salt: str) -> None:
    """The last passage in the store, computed after the others; and nothing else."""
    flush(server)
    post(server.url + "/chunkcache/clear_store")
    preprocess(server, passages[-1], passages[:-1], cache_salt=salt)
    settle(Client(server.url, None))
    flush(server)


def test_update_of_the_weights_leaves_nothing_old(
    fused_server: Server, world: World, salt: str, tmp_path: Path
) -> None:
    """Weights of the same shapes, and no version named: what was preprocessed with the old ones is
    gone, and a fused request answers as a full prefill does. So it is when the old ones come
    back."""
    other = tmp_path / "other"
    shutil.copytree(model_dir(), other)
    weights = other / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.k_proj.weight"))
    tensors[name] = tensors[name].flip(0)  # every value stays
    save_file(tensors, weights, metadata={"format": "pt"})
    passages = world.passages[:2]
    question = fact_of(passages[1], world)
    for path in (other, model_dir()):
        preprocessed(fused_server, passages, salt)
        assert stored(fused_server) == 1
        update = {"model_path": str(path)}
        assert post(fused_server.url + "/update_weights_from_disk", update)["success"]
        assert stored(fused_server) == 0
        reply = ask(fused_server, passages[1:], question, cache_salt=salt, reuse=fused())
        assert reply["chunkcache"]["fallbacks"] == ["no_source"]
        assert reply["chunkcache"]["fates"]["relocated"] == 0
        assert text_of(reply) == full_prefill(fused_server, passages[1:], question)
    assert text_of(reply) in question.answers


# Everything together


@pytest.mark.gpu
def test_soak(fused_server: Server) -> None:
    """tests/soak/test_reuse_soak.py in small: no NaN, no lost slot, exact answers as ever. On a GPU
    under SGLang's overlap schedule."""
    evicted = rank_of(fused_server)["evicted_chunks"]
    pool = mixed_load.POOL_TOKENS
    found = mixed_load.soak(fused_server.url, 60, clients=8, seed=3, pool_tokens=pool)
    mixed_load.check_exact(found, fused_server.url, cache_salt="soak")
    assert found.problems == []
    assert len(found.exact) > 4
    assert found.fates["relocated"] > 60
    assert found.fates["recomputed"] > 20  # how much is moved depends on which requests meet
    assert rank_of(fused_server)["evicted_chunks"] > evicted + 30


def test_promise_that_cannot_be_kept_is_an_error_and_the_next_request_gets_its_answer(
    fused_server: Server, switch: Path, planted: list[str], world: World, salt: str
) -> None:
    """Slots that can be neither filled nor computed, whole and streamed: no trace stays. Last: the
    log has errors from here on."""
    assert mixed_load.problems_of_log(fused_server.log) == planted
    first, second = world.passages[:4], world.passages[3::-1]
    question = fact_of(first[1], world)
    ask(fused_server, first, question, cache_salt=salt)
    body = body_of(second, question, cache_salt=salt, reuse=fused())
    switch.write_text("planted")
    try:
        status, text = send(fused_server.url + CHAT, body)
        assert (status, "nor computed" in text) == (503, True), text
        assert "nor computed" in str(list(stream(fused_server, body)))
    finally:
        switch.unlink()
    told = ask(fused_server, second, question, cache_salt=salt, reuse=fused())
    assert told["chunkcache"]["fates"]["relocated"] > 0
    assert text_of(told) in question.answers
    assert rank_of(fused_server)["moves"]["tokens"]["tail"] > 0  # questions in passes
    assert_clean(fused_server, mixed_load.POOL_TOKENS)
    planted += mixed_load.problems_of_log(fused_server.log)
    assert not [line for line in planted if "leak" in line or "Scheduler hit" in line]
