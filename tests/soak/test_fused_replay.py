"""`eval replay --reuse fused` against a real server that serves the same requests one at a time."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.http import get, post
from eval.replay.exact import ReplaySettings
from eval.replay.fused import FusedReplay
from eval.server import Server
from eval.world.world import World
from radix_ext import Chunk, ChunkId
from sglang_chunkcache import ChunkCacheConfig

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

NUM_REQUESTS, NUM_PASSAGES, BUDGET, STORE_CHUNKS, STORE_MIB = 80, 30, 256, 2, 1024
FLAGS = [
    *("--model-path", "bundled", "--max-total-tokens", "40000"),
    *("--chunked-prefill-size", str(BUDGET)),
    *("--chunkcache-audit-share", "0"),  # a check evicts what the replay knows nothing of
    *("--reuse", "fused", "--chunkcache-move", "always"),
    *("--chunkcache-store-chunks", str(STORE_CHUNKS), "--chunkcache-store-mib", str(STORE_MIB)),
]
"""With scores f_r depends on the model's attention, which a replay does not know."""


def body_of(world: World, drawn: list[int], number: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"What is number {number}?"}],
        "chunks": [{"id": str(index), "text": world.passages[index].text} for index in drawn],
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "reuse": "fused",
    }


def test_replay_predicts_a_server(tmp_path: Path) -> None:
    """Every request: the order of its chunks and their tokens by fate. At the end: the store."""
    rng, world = random.Random(0), World(77, 60)
    config = ChunkCacheConfig(reuse="fused", move="always", store_chunks=STORE_CHUNKS)
    settings = ReplaySettings(
        "tree", "seen", "reused", "all", "shown", None, None, config.window_requests, 2, 64
    )
    sizes: Any = {"kv_bytes": 1, "store_bytes": STORE_MIB << 20, "chunk_tokens": 1}
    replay = FusedReplay(settings, config, **sizes, prefill_budget=BUDGET)
    total: Counter[str] = Counter()
    with Server(FLAGS, log=tmp_path / "server.log") as server:
        for number in range(NUM_REQUESTS):
            size = rng.randint(2, 5)
            drawn = list({int(NUM_PASSAGES * rng.random() ** 1.5): None for _ in range(size)})
            body = body_of(world, drawn, number)
            spans = post(server.url + "/chunkcache/explain", body)["spans"]
            lengths = {span["chunk"]: span["end"] - span["start"] for span in spans}
            names = [str(index) for index in drawn]
            predicted = replay.step([Chunk(ChunkId(name), lengths[name]) for name in names])
            told = post(server.url + "/rag/v1/chat/completions", body)["chunkcache"]
            fates = told["fates"]
            # Where all chunks are found, the server may find words of the question, too: "What is
            # number".
            exact = min(sum(lengths.values()), max(0, fates["exact"] - told["head_tokens"]))
            expected = exact, fates["relocated"], fates["recomputed"]
            found = predicted.exact, predicted.relocated, predicted.recomputed
            assert found == expected, number
            total.update(predicted._asdict())
        store = get(server.url + "/chunkcache/stats")["ranks"][0]["store"]
    kept = replay.store.stats()._asdict()
    del kept["num_bytes"]
    assert kept == {name: store[name] for name in kept}
    assert min(total[name] for name in ("exact", "relocated", "recomputed", "computed")) > 0
    assert store["num_evicted"] > 0
