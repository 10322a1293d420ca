"""Whose tree has the KV: the same requests through ours and SGLang's own, in pages, with models of
several kinds. Answers are SGLang's own to the same tokens, computed from nothing: under a salt that
nobody has used."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from eval.http import post
from eval.server import Server
from eval.task import Request, TextChunk
from eval.tasks.world import world_requests
from eval.world.world import World
from tests import models
from tests.e2e.asking import (
    CHAT,
    EXPLAIN,
    ask,
    assistant,
    body_of,
    chat,
    chunks_of,
    flush,
    logprobs_of,
    metrics_of,
    rank_of,
    stats_of,
    text_of,
    user,
)
from tests.e2e.conftest import STRICT
from tests.e2e.cpu_server import HOST_POOLS
from tests.e2e.crowding import QUESTION, check_that_chain_comes_back, crowd_out
from tests.reference.tiny_tokenizer import make_tokenizer
from tests.soak import mixed_load
from tests.soak.answers import (
    LOGPROBS,
    NEVER_REUSE,
    Answer,
    answer_of,
    differences,
    logprob_difference,
    prompt_ids,
    rag_body,
    run_stock,
)

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

PAGE = 16
PAGED = ["--page-size", str(PAGE)]
LARGE_POOL = ["--max-total-tokens", "8192"]
POOL = ["--max-total-tokens", "2400", "--chunked-prefill-size", "32", "--max-running-requests", "8"]
ON_CPU = ("-m", "tests.e2e.cpu_server")
INTERPRETED = ("-m", "tests.e2e.interpreted_server")
_numbers = count()


@pytest.fixture(scope="module", params=["chunk", "stock"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In pages, with a pool that evicts, and whose free pages hold NaN; ours with host memory of
    twice its size."""
    log = tmp_path_factory.mktemp("servers") / "paged.log"
    flags = ["--model-path", "bundled", *PAGED, *POOL, "--chunkcache-tree", request.param]
    flags += ["--chunkcache-host-mib", "10"] if request.param == "chunk" else []
    flags.append("--enable-metrics")
    with Server(flags, log=log, env=STRICT, launcher=mixed_load.POISONED) as server:
        yield server
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"


def fresh() -> str:
    return f"tree{next(_numbers)}"


def run(server: Server, requests: Sequence[Request], **fields: Any) -> list[dict[str, Any]]:
    body = {**LOGPROBS, **fields}
    return [post(server.url + CHAT, rag_body(each, 12, **body)) for each in requests]


def answers_of(replies: Sequence[dict[str, Any]]) -> list[Answer]:
    return [answer_of(reply["choices"][0]["meta_info"]) for reply in replies]


def whole(server: Server, replies: Sequence[dict[str, Any]]) -> list[Answer]:
    """SGLang's answers to the same tokens, of which nothing is cached."""
    return [run_stock(server.url, prompt_ids(each), 12, cache_salt=fresh()) for each in replies]


def exact_of(reply: dict[str, Any]) -> int:
    return int(reply["chunkcache"]["fates"]["exact"])


def is_stock(server: Server) -> bool:
    return bool(stats_of(server)["tree"]["kind"] == "stock")


def test_pages_come_back_from_host_memory(paged: Server) -> None:
    """First, while nothing says that a load is slow."""
    if is_stock(paged):
        pytest.skip("SGLang's tree has none on a CPU")
    check_that_chain_comes_back(paged, PAGE)


def test_pages_find_what_slots_do(paged: Server, rag_server: Server) -> None:
    """Request by request, less what is lost at the one border of a match, which ends with a page.
    The order is the same: all mirrors know what is cached."""
    requests, salt = 2 * world_requests(8, seed=3), fresh()
    for server in (paged, rag_server):
        flush(server)
    ours = run(rag_server, requests, cache_salt=salt)
    in_pages = run(paged, requests, cache_salt=salt)
    assert [each["chunkcache"]["order"] for each in in_pages] == [
        each["chunkcache"]["order"] for each in ours
    ]
    pairs = [(exact_of(one), exact_of(other)) for one, other in zip(in_pages, ours, strict=True)]
    assert all(one >= other - (PAGE - 1) for one, other in pairs), pairs
    assert sum(one for one, _ in pairs) > 500
    for reply in in_pages:
        told = reply["chunkcache"]
        assert told["chunks_hit"] == told["chunks_planned"]
        assert "evicted" not in told["fallbacks"]
    assert differences(answers_of(ours), answers_of(in_pages)) == []
    mirror = rank_of(paged)["mirror"]
    assert mirror["corrections"] == 0 if is_stock(paged) else mirror["agrees"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang's tree at page size 1, with a pool that evicts. Its events are published as a user
    says, who asks for none of them again."""
    flags = ["--model-path", "bundled", "--chunkcache-tree", "stock", *POOL]
    log = tmp_path_factory.mktemp("servers") / "stock.log"
    with tempfile.TemporaryDirectory() as folder:
        theirs = {"publisher": "zmq", "endpoint": f"ipc://{folder}/inproc"}
        flags += ["--kv-events-config", json.dumps(theirs)]
        with Server(flags, log=log, env=STRICT) as server:
            yield server


def test_answers_under_eviction_are_those_without_reuse(paged: Server) -> None:
    check_eviction(paged)


@pytest.mark.nightly
def test_so_they_are_in_a_stock_tree_without_pages(stock: Server) -> None:
    check_eviction(stock)


def check_eviction(server: Server) -> None:
    """And what SGLang evicts is known, whoever's requests take the room: what is expected is
    found."""
    requests = world_requests(40, seed=7)
    replies = run(server, requests)
    assert sum(map(exact_of, replies)) > 1000
    if not is_stock(server):
        assert rank_of(server)["host"]["loaded_tokens"] > 0
        assert differences(whole(server, replies), answers_of(replies)) == []
        return
    before = rank_of(server)["mirror"]
    assert (before["is_told"], before["assumed_evictions"]) == (True, 0)
    # each fills the pool with prompts of no chunks
    assert differences(whole(server, replies), answers_of(replies)) == []
    again = run(server, requests[-1:])[0]["chunkcache"]
    assert again["chunks_planned"] == again["chunks_hit"]
    assert "evicted" in again["fallbacks"]
    mirror = rank_of(server)["mirror"]
    assert mirror["events"] > before["events"]
    # what a decode evicts may be told when the next request is planned already
    assert mirror["corrections"] <= 4
    flush(server)
    (_, second) = run(server, 2 * requests[:1])
    assert second["chunkcache"]["chunks_planned"] == len(second["chunkcache"]["order"])


@pytest.mark.nightly
def test_without_events_the_least_recent_use_is_assumed(tmp_path: Path) -> None:
    """A user publishes to somebody else: answers correct what was expected too much."""
    log = tmp_path / "log"
    theirs = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:9"}'
    flags = ["--model-path", "bundled", "--kv-events-config", theirs, *PAGED, *POOL]
    flags += ["--chunkcache-tree", "stock"]
    with Server(flags, log=log, env=STRICT) as server:
        assert "no KV events can be heard" in log.read_text()
        requests = world_requests(40, seed=7)
        replies = run(server, requests)
        mirror = rank_of(server)["mirror"]
        assert mirror["assumed_evictions"] > 0
        assert 0 < mirror["assumed_tokens"] <= 2400
        whole(server, replies)  # which nobody has seen
        again = run(server, requests[-1:])[0]["chunkcache"]
        assert again["chunks_planned"] > again["chunks_hit"]
        assert rank_of(server)["mirror"]["corrections"] > mirror["corrections"]


def test_moved_kv_is_off_and_said(paged: Server) -> None:
    """In the answer, in an explanation, in the figures."""
    if not is_stock(paged):
        pytest.skip("SGLang's tree says it")
    (request,) = world_requests(1, seed=9)
    (reply,) = run(paged, [request], reuse="fused", cache_salt=(salt := fresh()))
    assert reply["chunkcache"]["fallbacks"][0] == "stock_tree"
    assert reply["chunkcache"]["reuse"] is None
    explained = post(
        paged.url + EXPLAIN, rag_body(request, 12, cache_salt=salt, reuse={"mode": "fused"})
    )
    assert explained["fallbacks"] == ["stock_tree"]
    prompt_len = reply["usage"]["prompt_tokens"]
    assert prompt_len - PAGE <= explained["exact"] < prompt_len
    stats = stats_of(paged)
    assert (stats["tree"]["kind"], stats["ranks"][0]["tree"]) == ("stock", "UnifiedRadixCache")
    assert metrics_of(paged)['chunkcache:tree{kind="stock"}'] == 1


@pytest.mark.nightly
def test_our_trees_chunks_are_told_apart_from_plain_text(tmp_path: Path) -> None:
    """A user's router listens to our tree, which is taken all the same."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/inproc"
        theirs = json.dumps({"publisher": "zmq", "endpoint": address})
        flags = ["--model-path", "bundled", "--kv-events-config", theirs]
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        with Server(flags, log=tmp_path / "log", env=STRICT) as server, socket:
            assert stats_of(server)["tree"]["kind"] == "chunk"
            (reply,) = run(server, world_requests(1, seed=3))
            ids, chunked, plain = prompt_ids(reply), list[int](), list[int]()
            while len(chunked) < len(ids):  # the question comes last
                for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
                    is_ours = (event.get("cache_salt") or "").startswith("chunkcache/")
                    (chunked if is_ours else plain).extend(event.get("token_ids", ()))
            assert chunked[: len(ids)] == ids
            assert len(plain) < 50, "the warm-up's"


@pytest.mark.nightly
def test_ranks_and_conversations_in_a_stock_tree(tmp_path: Path) -> None:
    """Each rank's tree is mirrored by its events; a conversation stays on its rank, and shows no
    chunk twice."""
    flags = ["--model-path", "bundled", *PAGED, *POOL, "--chunkcache-tree", "stock"]
    with Server([*flags, "--dp-size", "2"], log=tmp_path / "log", env=STRICT) as server:
        requests = world_requests(12, seed=3)
        again = run(server, [*requests, *requests])[len(requests) :]
        assert sum(map(exact_of, again)) > 500
        told = [rank["mirror"] for rank in stats_of(server)["ranks"]]
        assert len(told) == 2
        assert all(each["is_told"] and each["events"] for each in told)
        turns, chunks = [user(requests[0].question)], chunks_of(requests[0].chunks)
        first = chat(server, turns, chunks, conversation_id="c")
        turns += [assistant(first["choices"][0]["message"]["content"]), user("And where?")]
        second = chat(server, turns, chunks, conversation_id="c")
        assert len(second["chunkcache"]["dropped"]) == len(chunks)
        assert second["chunkcache"]["fates"]["exact"] > PAGE


def make_requests(seed: int, num: int = 12) -> list[Request]:
    """Chunks that recur, as words of no meaning."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    chunks = [TextChunk(f"c{i}", " ".join(draw.choices(words, k=25))) for i in range(6)]
    return [
        Request(f"r{i}", " ".join(draw.choices(words, k=4)), tuple(draw.sample(chunks, 3)))
        for i in range(num)
    ]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> the path of a random model. In float32: answers differ by rounding alone."""

    def make(family: str) -> Path:
        path: Path = tmp_path_factory.mktemp(family)
        tokenizer = make_tokenizer(vocab_size=1024)
        models.write_model(path, family, vocab_size=len(tokenizer), num_layers=4)
        tokenizer.save_pretrained(path)
        return path

    return make


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "flags", "kind"),
    [
        ("llama", [], "chunk"),
        ("gemma3", [], "chunk"),
        ("qwen3_moe", [], "chunk"),
        ("deepseek_v2", [], "chunk"),
        ("deepseek_v2", PAGED, "chunk"),
        ("llama", ["--chunkcache-tree", "stock"], "stock"),
        ("mellum", [], "stock"),
        ("gemma3", PAGED, "chunk"),
        ("qwen3_moe", ["--page-size", "64"], "chunk"),
    ],
)
def test_random_model(
    family: str,
    flags: list[str],
    kind: str,
    model_of: Any,
    tmp_path: Path,
    tolerances: dict[str, float],
) -> None:
    """Under `auto`: dense, sliding windows shorter than the prompts with one KV pool and with one
    of their own, mixtures of experts, MLA."""
    # by default SGLang computes a float32 model in float16
    given = ["--model-path", str(model_of(family)), "--dtype", "float32", *LARGE_POOL, *flags]
    with Server(given, log=tmp_path / "log", env=STRICT) as server:
        assert stats_of(server)["tree"]["kind"] == kind
        replies = run(server, make_requests(4))
        reference, got = whole(server, replies), answers_of(replies)
        assert sum(map(exact_of, replies)) > 1000
        assert len({round(each.logprobs[0], 2) for each in got}) > 6, "prompts do not matter"
        assert differences(reference, got) == []
        worst = max(map(logprob_difference, reference, got))
        assert worst < tolerances["float32"]
        assert server.is_running


@pytest.mark.nightly
def test_hybrid_model(model_of: Any, tmp_path: Path, tolerances: dict[str, float]) -> None:
    """SGLang keeps a convolution's state at a request's end alone: a conversation goes on from
    there, and two prompts that begin alike share next to nothing."""
    flags = ["--model-path", str(model_of("lfm2")), "--dtype", "float32", *LARGE_POOL]
    env = {**STRICT, "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    body = {**LOGPROBS, "conversation_id": "a", "ignore_eos": True}
    passages = World(77, 20).passages
    with Server(flags, log=tmp_path / "log", env=env, launcher=INTERPRETED) as server:
        assert is_stock(server)
        first = ask(server, passages[:3], QUESTION, **body)
        said = [user(QUESTION), assistant(text_of(first)), user("Why?")]
        goes_on = chat(server, said, chunks_of(passages[1:4]), **body)
        replies = [first, goes_on]
        reference = [
            run_stock(server.url, prompt_ids(each), 24, cache_salt=fresh()) for each in replies
        ]
    assert exact_of(goes_on) >= first["usage"]["prompt_tokens"]
    assert differences(reference, answers_of(replies)) == []
    worst = max(map(logprob_difference, reference, answers_of(replies)))
    assert worst < tolerances["float32"]


@pytest.mark.nightly
@pytest.mark.parametrize("tree", ["chunk", "stock"])
def test_adapters_share_nothing(
    tree: str, model_of: Any, tmp_path: Path, tolerances: dict[str, float]
) -> None:
    """The same chunks for an adapter and the model below it: each finds its own KV, and no other's,
    in either tree."""
    model, adapter = model_of("llama"), tmp_path / "adapter"
    models.write_adapter(adapter, model)
    flags = ["--model-path", str(model), "--dtype", "float32", "--chunkcache-tree", tree]
    flags += ["--enable-lora", "--lora-paths", f"a={adapter}", "--lora-backend", "torch_native"]
    flags += LARGE_POOL
    with Server(flags, log=tmp_path / "log", env=STRICT, launcher=ON_CPU) as server:
        requests, seen = make_requests(5, 6), list[list[Answer]]()
        for lora in (None, "a"):
            first, *others = replies = run(server, requests, lora_path=lora)
            assert exact_of(first) < PAGE, "but a template's first tokens"
            assert sum(map(exact_of, others)) > 300
            reference = [
                run_stock(server.url, prompt_ids(each), 12, cache_salt=fresh(), lora_path=lora)
                for each in replies
            ]
            assert differences(reference, answers_of(replies)) == []
            worst = max(map(logprob_difference, reference, answers_of(replies)))
            assert worst < tolerances["float32"]
            seen.append(reference)
        assert all(map(differences, *([[each] for each in answers] for answers in seen)))


@pytest.mark.nightly
def test_hicache_keeps_what_leaves_the_device(tmp_path: Path) -> None:
    """SGLang's own host memory: the front is told what is there, orders by it, and answers are
    those of before."""
    pytest.importorskip(HOST_POOLS)
    hicache = ["--enable-hierarchical-cache", "--hicache-ratio", "4"]
    hicache += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
    flags = ["--model-path", "bundled", *PAGED, *POOL, *hicache]
    passages = World(77, 20).passages[:4]
    with Server(flags, log=tmp_path / "log", env=STRICT, launcher=ON_CPU) as server:
        assert is_stock(server)
        first, again = (ask(server, passages, QUESTION, cache_salt="a") for _ in range(2))
        crowd_out(server, "crowd")
        told = post(server.url + EXPLAIN, body_of(passages, QUESTION, cache_salt="a"))
        back = ask(server, passages[::-1], QUESTION, cache_salt="a", order="tree")
        other = ask(server, passages, QUESTION, cache_salt="b")
    assert told["exact"] == 0, "nothing has left the device"
    exact = again["chunkcache"]["fates"]["exact"]
    assert back["chunkcache"]["fates"]["exact"] == exact > PAGE
    assert back["chunkcache"]["order"] == again["chunkcache"]["order"]
    assert text_of(back) == text_of(first)
    assert logprobs_of(back) == pytest.approx(logprobs_of(first), abs=1e-5)
    assert other["chunkcache"]["fates"]["exact"] == 0


@pytest.mark.nightly
def test_speculation_changes_no_answer(rag_server: Server, tmp_path: Path) -> None:
    """Tokens guessed from n-grams: what is rejected is in no tree, and the front knows what is."""
    if not find_spec("sglang.srt.speculative.draft_parallel"):
        pytest.skip("before 0.5.23 it guesses on GPUs alone")
    flags = ["--model-path", "bundled", *LARGE_POOL, "--speculative-algorithm", "NGRAM"]
    # a kernel in the interpreter is slow: few guesses
    flags += ["--speculative-num-draft-tokens", "4", "--max-running-requests", "8"]
    with Server(flags, log=tmp_path / "log", env=STRICT, launcher=INTERPRETED) as server:
        assert is_stock(server)
        requests = world_requests(12, seed=8)
        replies = run(server, requests + requests[:3])
        told = post(server.url + EXPLAIN, rag_body(requests[0], 12))
    metas = [reply["choices"][0]["meta_info"] for reply in replies]
    assert sum(meta["spec_verify_ct"] for meta in metas) < sum(map(num_answered, metas))
    ids = [prompt_ids(reply) for reply in replies]
    reference = [run_stock(rag_server.url, each, 12, cache_salt=fresh()) for each in ids]
    assert differences(reference, answers_of(replies)) == []
    assert told["exact"] == exact_of(replies[-3]) > PAGE, "as the front was told"


def num_answered(meta: dict[str, Any]) -> int:
    return len(meta["output_token_logprobs"]) - 1


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], PAGED], ids=str)
def test_answers_equal_those_of_stock_servers(flags: list[str], tmp_path: Path) -> None:
    """SGLang without us, without reuse, over the tokens that ours has sent."""
    requests = world_requests(40, seed=8)
    given = ["--model-path", "bundled", *flags, *POOL]
    tree = ["--chunkcache-tree", "stock"]
    with Server([*given, *tree], log=tmp_path / "ours.log", env=STRICT) as server:
        replies = run(server, requests)
    assert sum(map(exact_of, replies)) > 1000
    with Server(["--stock", *given], log=tmp_path / "stock.log", env=NEVER_REUSE) as server:
        reference = [run_stock(server.url, prompt_ids(reply), 12) for reply in replies]
    assert differences(reference, answers_of(replies)) == []


@pytest.mark.nightly
def test_stock_tree_at_page_size_1_finds_all_that_ours_does(tmp_path: Path) -> None:
    """And more where texts of chunks begin alike."""
    requests, found = world_requests(60, seed=5), {}
    for tree in ("chunk", "stock"):
        given = ["--model-path", "bundled", "--chunkcache-tree", tree]
        with Server(given, log=tmp_path / f"{tree}.log", env=STRICT) as server:
            found[tree] = [exact_of(reply) for reply in run(server, requests)]
    pairs = list(zip(found["stock"], found["chunk"], strict=True))
    assert all(stock >= chunk for stock, chunk in pairs), pairs
