"""Costs of the chunk-prefix tree: time of an order decision, bytes per node, bytes of the access
table.

    python -m eval bench tree [--nodes 100000] [--decisions 3000]

`topics` resembles retrieval: zipf-distributed topics of 20 chunks, some noise. `permutations` is
the worst case for the search: random orders of the same k chunks, so that it can exclude nothing.
`chains` share nothing. Memory is counted by tracemalloc while the tree is built, chunk ids
included; requests are not kept.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from time import thread_time
from typing import Any

from eval.outcome import add_out_option, open_run, table, tell
from eval.progress import progress
from eval.run import Sample
from radix_ext import AccessTable, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks
from retrieval.command_line import Parser

_NAMESPACE = "bench"
_WINDOW, _MAX_VISITS = 1000, 64
Requests = Iterator[list[Chunk]]
Load = Callable[[int, int], Requests]
"""Seed and chunks of a request -> requests without end."""
Build = Callable[[Requests, int], tuple[ChunkPrefixTree, AccessTable]]
"""Requests and a number of nodes -> a tree of that size."""


def topics(seed: int, k: int) -> Requests:
    """k of the chunks of one of 2,000 zipf-distributed topics, every seventh from any topic;
    128 to 512 tokens each."""
    rng = random.Random(seed)
    shares = list(accumulate(1 / (topic + 1) for topic in range(2000)))
    while True:
        topic = rng.choices(range(2000), cum_weights=shares)[0]
        near = rng.sample(range(20 * topic, 20 * topic + 20), k)
        picked = [rng.randrange(40_000) if rng.random() < 0.15 else chunk for chunk in near]
        # `order_chunks` refuses a chunk that a request has twice
        yield [_chunk(number) for number in dict.fromkeys(picked)]


def permutations(seed: int, k: int) -> Requests:
    """The same k chunks in random orders."""
    rng = random.Random(seed)
    while True:
        yield [_chunk(number) for number in rng.sample(range(k), k)]


def chains(seed: int, k: int) -> Requests:
    """k new chunks in every request: no sharing, every node an only child,
    every id string used once."""
    start = seed * 1_000_000_000
    while True:
        yield [_chunk(number) for number in range(start, start + k)]
        start += k


def grow(requests: Requests, num_nodes: int) -> tuple[ChunkPrefixTree, AccessTable]:
    """Serve requests as the front would, until the tree has `num_nodes` nodes."""
    tree, accesses = ChunkPrefixTree(max_nodes=num_nodes), AccessTable(_WINDOW)
    while len(tree.nodes) < num_nodes:
        request = next(requests)
        ordered = order_chunks(
            "tree", tree, accesses, _NAMESPACE, request, rank=0, max_visits=8
        ).chunks
        ids = [chunk.id for chunk in ordered]
        # behind the order, for which all chunks of the request would count as seen
        accesses.observe(ids)
        tree.insert(
            _NAMESPACE,
            ordered,
            rank=0,
            tier=Tier.DEVICE,
            promoted_len=accesses.promoted_run(ids, 2),
        )
    return tree, accesses


def scatter(requests: Requests, num_nodes: int) -> tuple[ChunkPrefixTree, AccessTable]:
    """Insert requests in the given order, so that an adversary's orders are all in the tree."""
    tree, accesses = ChunkPrefixTree(max_nodes=num_nodes), AccessTable(_WINDOW)
    for number, request in enumerate(requests):
        accesses.observe(chunk.id for chunk in request)
        # Truncated to alternating lengths: chains of all chunks would let the search stop early.
        cut = request[: 3 + number % (len(request) - 3)]
        tree.insert(_NAMESPACE, cut, rank=0, tier=Tier.DEVICE, promoted_len=0)
        if len(tree.nodes) >= num_nodes:
            break
    return tree, accesses


def decision_us(
    build: Build, load: Load, k: int, num_nodes: int, num_decisions: int
) -> dict[str, float]:
    """CPU time of order decisions, microseconds, and the mean chain found, in chunks."""
    # another seed: requests that the tree has not been built from
    grown, requests = build(load(0, k), num_nodes), load(1, k)
    times, found = [], 0
    for request in islice(requests, num_decisions):
        # CPU time of this thread: other processes of the machine do not count
        start = thread_time()
        ordering = order_chunks("tree", *grown, _NAMESPACE, request, rank=0, max_visits=_MAX_VISITS)
        times.append((thread_time() - start) * 1e6)
        found += ordering.held_len
    times.sort()
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    return {
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "held_len": round(found / num_decisions, 2),
    }


def traced_bytes(build: Callable[[], object]) -> int:
    """Bytes of the built object and of everything that it references."""
    gc.collect()
    tracemalloc.start()
    # held until the size is read, else it would be freed before
    built = build()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del built
    return size


def node_bytes(build: Build, load: Load, num_nodes: int) -> dict[str, float]:
    """Bytes of a tree, chunk ids included, over its nodes."""
    return {"bytes": round(traced_bytes(lambda: build(load(0, 10), num_nodes)[0]) / num_nodes)}


def table_bytes(load: Load, num_requests: int) -> dict[str, float]:
    """Bytes of an access table after so many requests."""
    requests = load(0, 10)
    next(requests)  # so that the generator's own tables are not counted

    def observe() -> AccessTable:
        accesses = AccessTable(_WINDOW)
        for request in islice(requests, num_requests):
            accesses.observe(chunk.id for chunk in request)
        return accesses

    return {"bytes": traced_bytes(observe)}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Tables of times and of bytes."""
    times = [{**one["cell"], **one["metrics"]} for one in samples if one["arm"] == "decision"]
    sizes = [
        {"of": one["arm"], **one["cell"], **one["metrics"]}
        for one in samples
        if one["arm"] != "decision"
    ]
    verdict = [
        f"{one['requests']}, {one['k']} chunks: {one['p50_us']:.0f} us a decision at the median,"
        f" {one['p99_us']:.0f} at p99."
        for one in times
    ]
    tables = [table("CPU time of an order decision", times), table("Memory", sizes)]
    return {"verdict": verdict, "tables": [one for one in tables if one["rows"]]}


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = Parser(prog="python -m eval bench tree", description="Cost of tree, order and table.")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument(
        "--decisions", type=int, default=3_000, help="and requests that the access table has seen"
    )
    add_out_option(parser)
    options = parser.parse_args(argv)
    nodes, decisions = options.nodes, options.decisions
    with open_run("tree", options, summarize) as run, progress("measuring", 8) as bar:

        def take(arm: str, load: Load, k: int, measure: Callable[[], dict[str, float]]) -> None:
            cell = {"requests": load.__name__, "k": k}
            if (key := f"{arm}/{load.__name__}/{k}") not in run:
                run.add(key, {"arm": arm, "cell": cell, "request": "all", "metrics": measure()})
            bar.update()

        for build, load, k in (
            (grow, topics, 10),
            (scatter, permutations, 10),
            (scatter, permutations, 100),
        ):
            take("decision", load, k, partial(decision_us, build, load, k, nodes, decisions))
        for build, load in ((grow, topics), (scatter, permutations), (grow, chains)):
            take("node", load, 10, partial(node_bytes, build, load, nodes))
        for load in (topics, chains):
            take("access table", load, 10, partial(table_bytes, load, decisions))
    tell(run)
    return 0


def _chunk(number: int) -> Chunk:
    """A chunk with an id string of its own, as if a tokenizer had hashed it for a new request."""
    # 7919 and 385 have no common factor: lengths from 128 to 512 are equally frequent
    return Chunk(ChunkId(f"{number:032x}"), 128 + number * 7919 % 385)
