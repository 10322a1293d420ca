"""`eval replay` against the server's own tree, in a pool that is too small."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import pytest

pytest.importorskip("sglang")

from eval.replay.eviction_queue import EvictionPolicy
from eval.replay.exact import Replay, ReplaySettings
from radix_ext import Chunk, chunk_id
from sglang_chunkcache.config import ChunkCacheConfig
from tests.reference.scheduler import SECRET, FakeReq, Scheduler, marked

CAPACITY, NUM_CHUNKS, NUM_REQUESTS, PAD = 60, 30, 300, 7
TOKENS = [
    [100 * number + at for at in range(2 + number % 4)] for number in range(1, 1 + NUM_CHUNKS)
]


@pytest.mark.parametrize("eviction", ["reused", "lru"])
@pytest.mark.parametrize(
    ("drift", "page_size", "padded"), [(0, 1, False), (7, 1, False), (7, 4, False), (7, 4, True)]
)
def test_what_is_found_is_what_a_server_finds(
    eviction: EvictionPolicy, drift: int, page_size: int, padded: bool
) -> None:
    """Request by request, also while other chunks become popular. The question is a chunk of its
    own in the replay, since it takes its place in the pool; it ends with a page. What fills up a
    chunk's last page is found with it on a server, and no token of it in the replay."""
    draw, config = Random(drift), ChunkCacheConfig(secret=SECRET, eviction=eviction)
    server = Scheduler(CAPACITY, config, page_size=page_size)
    limits = None, CAPACITY, 1000, 2, 64
    pages: dict[str, Any] = {"page_size": page_size, "padded": padded, "copies_rests": True}
    settings = ReplaySettings("retriever", "seen", eviction, "all", "off", *limits, **pages)
    replay, found = Replay(settings), list[tuple[int, int]]()
    for number in range(NUM_REQUESTS):
        ranks = (int(NUM_CHUNKS * draw.random() ** 2) for _ in range(draw.randint(1, 4)))
        numbers = sorted({(rank + number // 75 * drift) % NUM_CHUNKS for rank in ranks})
        texts = [
            TOKENS[each] + [PAD] * (padded * -len(TOKENS[each]) % page_size) for each in numbers
        ]
        ends = [*accumulate(map(len, texts))]
        # a page and more: SGLang looks for nothing in less than one
        question = [10_000 + number] * (2 * page_size - sum(map(len, texts)) % page_size)
        sizes = [len(text) - text.count(PAD) for text in (*texts, question)]
        chunks = [
            Chunk(chunk_id(text), size)
            for text, size in zip((*texts, question), sizes, strict=True)
        ]
        req = FakeReq(
            [token for text in (*texts, question) for token in text],
            marked(list(zip([0, *ends], ends, strict=False))),
        )
        cached, hits = server.serve(req), replay.step(chunks).num_token_hits
        found.append((hits, cached - req.origin_input_ids[:cached].count(PAD)))
    server.check()
    assert [ours for ours, _ in found] == [theirs for _, theirs in found]
    assert sum(ours for ours, _ in found) > 0
    assert replay.num_evicted > NUM_REQUESTS
