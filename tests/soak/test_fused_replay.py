"""`eval replay --reuse fused` against a real server that serves the same requests one at a time."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.http import get, post
from eval.replay.fused import FusedReplay
from eval.server import Server
from eval.world.world import World
from radix_ext import Chunk, ChunkId, ReplaySettings
from sglang_chunkcache import ChunkCacheConfig

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

NUM_REQUESTS, NUM_PASSAGES, BUDGET, STORE_CHUNKS, STORE_MIB = 80, 30, 256, 2, 1024
FLAGS = [
    "--model-path",
    "bundled",
    "--max-total-tokens",
    "40000",
    "--chunked-prefill-size",
    str(BUDGET),
]
FLAGS += ["--chunkcache-audit-share", "0"]  # a check evicts what the replay knows nothing of
FLAGS += [
    "--reuse",
    "fused",
    "--chunkcache-move",
    "always",
    "--chunkcache-store-chunks",
    str(STORE_CHUNKS),
]
FLAGS += ["--chunkcache-store-mib", str(STORE_MIB)]
"""With scores f_r depends on the model's attention, which a replay does not know."""


def body_of(world: World, drawn: list[int], number: int) -> dict[str, Any]:
    passages = [world.passages[index] for index in drawn]
    return {
        "messages": [{"role": "user", "content": f"What is number {number}?"}],
        "chunks": [
            {"id": str(index), "text": each.text}
            for index, each in zip(drawn, passages, strict=True)
        ],
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
    replay = FusedReplay(
        settings,
        config,
        kv_bytes=1,
        store_bytes=STORE_MIB << 20,
        prefill_budget=BUDGET,
        chunk_tokens=1,
    )
    total: Counter[str] = Counter()
    with Server(FLAGS, log=tmp_path / "server.log") as server:
        for number in range(NUM_REQUESTS):
            drawn = list(
                dict.fromkeys(
                    int(NUM_PASSAGES * rng.random() ** 1.5) for _ in range(rng.randint(2, 5))
                )
            )
            body = body_of(world, drawn, number)
            spans = post(server.url + "/chunkcache/explain", body)["spans"]
            lengths = {span["chunk"]: span["end"] - span["start"] for span in spans}
            predicted = replay.step(
                [Chunk(ChunkId(str(index)), lengths[str(index)]) for index in drawn]
            )
            told = post(server.url + "/rag/v1/chat/completions", body)["chunkcache"]
            fates = told["fates"]
            # Where all chunks are found, the server may find words of the question, too: "What is
            # number".
            exact = min(sum(lengths.values()), max(0, fates["exact"] - told["head_tokens"]))
            assert (predicted.exact, predicted.relocated, predicted.recomputed) == (
                exact,
                fates["relocated"],
                fates["recomputed"],
            ), number
            total.update(predicted._asdict())
        store = get(server.url + "/chunkcache/stats")["ranks"][0]["store"]
    predicted_store = replay.store.stats()._asdict()
    sizes = {name: predicted_store[name] for name in predicted_store if name != "num_bytes"}
    assert sizes == {name: store[name] for name in sizes}
    assert (
        min(
            total["exact"],
            total["relocated"],
            total["recomputed"],
            total["computed"],
            store["num_evicted"],
        )
        > 0
    )
