"""`--generate N`: a trace of any length without data, the same for the same seed.

What makes caching easy or hard in retrieval, with the parameters below:

- topics, of which few are popular (Zipf over topics); a request asks for one of them
- chunks of a topic, of which few are retrieved often (Zipf within the topic); a request has k
  different ones, in the order drawn
- noise: some chunks of a request are of another topic
- drift: topics become popular and are forgotten, so that the number of distinct chunks grows along
  the trace

Arrivals are a Poisson process. A chunk has the same length each time. There are no conversations.

`--fusionrag N` draws chunks as FusionRAG 5.3.3 simulates storage (N = 1000 there): .6 of a
knowledge base, .3 new and shared, .1 unique. The paper says neither k nor the pools' sizes,
popularity and lengths. Here popularity in a pool is Zipf, too.

`--sys-x N` has the shape that Cache-Craft publishes of its production workload Sys-X: 5 chunks a
request, subsections of manuals of 1,000 to 20,000 tokens together, the median 3,300 (5.1.2); 75% of
the chunks were retrieved before (1), those of one request in several earlier requests (fig. 8a),
and 18% of the tokens in a prefix (5.4). A chunk that comes again is drawn from earlier requests, so
that popularity is a power law (2.3); the others are new. The paper's arrivals are those of Twitter
and its own, here a Poisson process.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import exp, log
from statistics import NormalDist

from eval.errors import CommandError
from eval.replay.trace import TraceRequest
from radix_ext import Chunk, ChunkId

K = 10
TOPICS = 2000
"""Topics that can be asked for at one time."""
CHUNKS_PER_TOPIC = 50
TOPIC_ZIPF = CHUNK_ZIPF = 1.0
"""The r-th of them is drawn in proportion to r**-zipf: the common assumption on popularity."""
NOISE = 0.1
"""Share of a request's draws that are of any topic, popular or not."""
DRIFT = 200
"""Requests after which a topic is replaced by a new one at any rank:
a topic lasts 400,000 requests on average."""
CHUNK_TOKENS = (128, 512)
"""Least and most; CRAFT calls these lengths typical."""
QUESTION_TOKENS, OUTPUT_TOKENS = (8, 48), (50, 300)
RATE = 2.0
"""Requests per second."""
GOLDEN = 0.6180339887
"""Multiples of the golden ratio spread lengths evenly."""
POOLS = {"known": 1000, "shared": 500}
"""Chunks of each. Unique ones are in no pool."""
POOL_SHARES = {"known": 0.6, "shared": 0.3, "unique": 0.1}

SYS_X_K, SYS_X_REUSED = 5, 0.75
SYS_X_STAYS = SYS_X_FIRST = 0.5
"""That the next chunk of a request is drawn from the same earlier request, and that its first one
is the first there: of 10,000 requests 74% of the chunks come again and 18% of the tokens stand in a
prefix."""
SYS_X_TOKENS = (200, 4000)
"""Least and most of a chunk, a fifth of the paper's."""
SYS_X_LENGTHS = NormalDist(log(400), 1.2)
"""Of their logarithms. The median of a request is 3,400 tokens."""


class GeneratedTrace:
    """`num_requests` requests of `k` distinct chunks. Each iteration generates them anew; equal ids
    are one `Chunk` object.

    Args:
        drift: as `DRIFT`.
    Raises:
        CommandError: a topic has fewer than k chunks.
    """

    def __init__(self, num_requests: int, *, k: int = K, seed: int = 0, drift: int = DRIFT) -> None:
        if k > CHUNKS_PER_TOPIC:
            raise CommandError(
                f"a generated request has at most {CHUNKS_PER_TOPIC} chunks but --k is {k}"
            )
        self._num_requests, self._k, self._seed, self._drift = num_requests, k, seed, drift
        self._chunks: dict[int, Chunk] = {}

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self._seed)
        draw = rng.random
        # Running sums, in which `bisect` finds a draw's rank in O(log n).
        by_rank = [*accumulate(rank**-TOPIC_ZIPF for rank in range(1, TOPICS + 1))]
        within = [*accumulate(rank**-CHUNK_ZIPF for rank in range(1, CHUNKS_PER_TOPIC + 1))]
        topics, next_topic, now = [*range(TOPICS)], TOPICS, 0.0
        for number in range(self._num_requests):
            if number % self._drift == self._drift - 1:
                del topics[int(draw() * TOPICS)]
                # The ranks between both places move by one, so popularity changes step by step.
                topics.insert(int(draw() * TOPICS), next_topic)
                next_topic += 1
            topic = topics[bisect(by_rank, draw() * by_rank[-1])]
            # A set would not keep the order drawn, which stands for the retriever's.
            drawn: dict[int, None] = {}
            while len(drawn) < self._k:
                source = topic if draw() >= NOISE else topics[int(draw() * TOPICS)]
                drawn[source * CHUNKS_PER_TOPIC + bisect(within, draw() * within[-1])] = None
            now += rng.expovariate(RATE)
            yield TraceRequest(
                tuple(map(self._chunk, drawn)),
                True,
                timestamp=round(now, 3),
                question_tokens=_between(QUESTION_TOKENS, draw()),
                output_tokens=_between(OUTPUT_TOKENS, draw()),
            )

    def _chunk(self, number: int) -> Chunk:
        chunk = self._chunks.get(number)
        if chunk is None:
            # By the number, not by `rng`: an id has its length whatever was drawn before.
            length = _between(CHUNK_TOKENS, number * GOLDEN % 1)
            topic, index = divmod(number, CHUNKS_PER_TOPIC)
            chunk = self._chunks[number] = Chunk(ChunkId(f"t{topic}-{index}"), length)
        return chunk


class PooledTrace:
    """`num_requests` requests of `k` distinct chunks, known, shared and unique ones; as
    `GeneratedTrace`.

    Args:
        chunk_tokens: as `CHUNK_TOKENS`.
    Raises:
        CommandError: a pool has fewer than k chunks.
    """

    def __init__(
        self,
        num_requests: int,
        *,
        k: int = K,
        seed: int = 0,
        chunk_tokens: tuple[int, int] = CHUNK_TOKENS,
    ) -> None:
        if k > min(POOLS.values()):
            raise CommandError(
                f"a request of --fusionrag has at most {min(POOLS.values())} chunks but --k is {k}"
            )
        self._num_requests, self._k, self._seed = num_requests, k, seed
        self._chunk_tokens = chunk_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self._seed)
        by_rank = {
            name: [*accumulate(rank**-CHUNK_ZIPF for rank in range(1, size + 1))]
            for name, size in POOLS.items()
        }
        for number in range(self._num_requests):
            drawn: dict[Chunk, None] = {}
            for kind in rng.choices([*POOL_SHARES], [*POOL_SHARES.values()], k=self._k):
                num_drawn = len(drawn)
                # The request may have the chunk already: then another of its kind is drawn.
                while len(drawn) == num_drawn:
                    # Unique ones are numbered along the trace, so none comes twice.
                    pool = by_rank.get(kind)
                    which = (
                        bisect(pool, rng.random() * pool[-1])
                        if pool
                        else number * self._k + num_drawn
                    )
                    drawn[
                        Chunk(
                            ChunkId(f"{kind}-{which}"),
                            _between(self._chunk_tokens, which * GOLDEN % 1),
                        )
                    ] = None
            yield TraceRequest(tuple(drawn), True)


class SysXTrace:
    """`num_requests` requests of `k` distinct chunks, of which most come again; as
    `GeneratedTrace`."""

    def __init__(self, num_requests: int, *, k: int = SYS_X_K, seed: int = 0) -> None:
        self._num_requests, self._k, self._seed = num_requests, k, seed

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self._seed)
        draw = rng.random
        past: list[tuple[Chunk, ...]] = []
        num_chunks, now = 0, 0.0
        for _ in range(self._num_requests):
            drawn: dict[Chunk, None] = {}
            source: Sequence[Chunk] = ()
            while len(drawn) < self._k:
                if past and draw() < SYS_X_REUSED:
                    if not source or draw() >= SYS_X_STAYS:
                        source = past[int(draw() * len(past))]
                        first = 0 if not drawn and draw() < SYS_X_FIRST else int(draw() * self._k)
                        source = source[first:]
                    source = [chunk for chunk in source if chunk not in drawn]
                    drawn |= dict.fromkeys(source[:1])
                else:
                    drawn[_manual_section(num_chunks)] = None
                    num_chunks += 1
            past.append(tuple(drawn))
            now += rng.expovariate(RATE)
            yield TraceRequest(
                past[-1],
                True,
                timestamp=round(now, 3),
                question_tokens=_between(QUESTION_TOKENS, draw()),
                output_tokens=_between(OUTPUT_TOKENS, draw()),
            )


def _manual_section(number: int) -> Chunk:
    # Never 0 or 1, where the inverse has no value.
    share = (number + 1) * GOLDEN % 1
    least, most = SYS_X_TOKENS
    length = int(exp(SYS_X_LENGTHS.inv_cdf(share)))
    return Chunk(ChunkId(f"s{number}"), min(most, max(least, length)))


def _between(ends: tuple[int, int], share: float) -> int:
    least, most = ends
    return least + int(share * (most + 1 - least))
