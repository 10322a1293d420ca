"""Costs of the chunk-prefix tree: time of an order decision, bytes per node, bytes of the access table.

    python -m eval.bench.tree

Needs Python alone. Trees hold `--nodes` nodes. `topics` resembles retrieval: zipf-distributed topics of 20 chunks, some noise.
`permutations` is the worst case for the search: random orders of the same 10 chunks, so that it can exclude nothing. `wide` has
random orders of the same 100 chunks. Memory is counted by tracemalloc while the tree is built, chunk ids included; requests are
not kept. The last line is one JSON object.
"""

import argparse
import gc
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from time import thread_time

from eval.record import make_record, write_record
from radix_ext import AccessTable, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks

_NAMESPACE = "bench"
_WINDOW = 1000
Requests = Iterator[list[Chunk]]


def topics(seed: int, k: int) -> Requests:
    """k of the chunks of one of 2,000 zipf-distributed topics, every seventh from any topic; 128 to 512 tokens each."""
    rng = random.Random(seed)
    shares = list(accumulate(1 / (topic + 1) for topic in range(2000)))
    while True:
        topic = rng.choices(range(2000), cum_weights=shares)[0]
        near = rng.sample(range(20 * topic, 20 * topic + 20), k)
        picked = [rng.randrange(40_000) if rng.random() < 0.15 else chunk for chunk in near]
        yield [_chunk(number) for number in dict.fromkeys(picked)]


def permutations(seed: int, k: int) -> Requests:
    """The same k chunks in random orders."""
    rng = random.Random(seed)
    while True:
        yield [_chunk(number) for number in rng.sample(range(k), k)]


def chains(seed: int, k: int) -> Requests:
    """k new chunks in every request: no sharing, every node an only child, every id string used once."""
    start = seed * 1_000_000_000
    while True:
        yield [_chunk(number) for number in range(start, start + k)]
        start += k


def grow(requests: Requests, num_nodes: int) -> tuple[ChunkPrefixTree, AccessTable]:
    """Serve requests as the front would, until the tree has `num_nodes` nodes."""
    tree, table = ChunkPrefixTree(max_nodes=num_nodes), AccessTable(_WINDOW)
    while len(tree) < num_nodes:
        request = next(requests)
        ordered = order_chunks("tree", "rank", tree, table, _NAMESPACE, request, rank=0, max_visits=8).chunks
        ids = [chunk.id for chunk in ordered]
        table.observe(ids)
        tree.insert(_NAMESPACE, ordered, rank=0, tier=Tier.DEVICE, promoted_len=table.promoted_run(ids, 2))
    return tree, table


def scatter(requests: Requests, num_nodes: int) -> tuple[ChunkPrefixTree, AccessTable]:
    """Insert requests in the given order, so that an adversary's orders are all in the tree."""
    tree, table = ChunkPrefixTree(max_nodes=num_nodes), AccessTable(_WINDOW)
    for number, request in enumerate(requests):
        table.observe(chunk.id for chunk in request)
        # Truncated to alternating lengths: chains of all chunks would let the search stop early.
        cut = request[: 3 + number % (len(request) - 3)]
        tree.insert(_NAMESPACE, cut, rank=0, tier=Tier.DEVICE, promoted_len=0)
        if len(tree) >= num_nodes:
            break
    return tree, table


def decision_us(
    tree: ChunkPrefixTree, table: AccessTable, requests: Requests, *, num_decisions: int, max_visits: int
) -> dict[str, float]:
    """CPU time of `num_decisions` order decisions, microseconds, and the mean chain found, in chunks."""
    times, found = [], 0
    for _ in range(num_decisions):
        request = next(requests)
        start = thread_time()
        ordering = order_chunks("tree", "rank", tree, table, _NAMESPACE, request, rank=0, max_visits=max_visits)
        times.append((thread_time() - start) * 1e6)
        found += ordering.held_len
    times.sort()
    return {
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[len(times) * 99 // 100], 1),
        "mean_held_len": round(found / num_decisions, 2),
    }


def traced_bytes(build: Callable[[], object]) -> int:
    """Bytes of the built object and of everything that it references."""
    gc.collect()
    tracemalloc.start()
    built = build()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del built
    return size


def table_bytes(requests: Requests, *, num_requests: int) -> int:
    """Bytes of an access table after `num_requests` requests."""
    next(requests)  # so that the generator's own tables are not counted

    def build() -> AccessTable:
        table = AccessTable(_WINDOW)
        for _ in range(num_requests):
            table.observe(chunk.id for chunk in next(requests))
        return table

    return traced_bytes(build)


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench.tree", description="Cost of tree, order and table.")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--decisions", type=int, default=3_000)
    parser.add_argument("--table-requests", type=int, default=3_000)
    parser.add_argument("--max-visits", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    options = parser.parse_args(argv)
    timing = {"num_decisions": options.decisions, "max_visits": options.max_visits}
    report: dict[str, object] = {"nodes": options.nodes, **timing, "python": sys.version.split()[0]}
    tree, table = grow(topics(0, 10), options.nodes)
    report["topics_k10"] = decision_us(tree, table, topics(1, 10), **timing)
    for name, k in (("permutations_k10", 10), ("wide_k100", 100)):
        tree, table = scatter(permutations(0, k), options.nodes)
        report[name] = decision_us(tree, table, permutations(1, k), **timing)
    report["topics_bytes_per_node"] = round(traced_bytes(lambda: grow(topics(0, 10), options.nodes)[0]) / options.nodes)
    report["permutations_bytes_per_node"] = round(
        traced_bytes(lambda: scatter(permutations(0, 10), options.nodes)[0]) / options.nodes
    )
    report["chains_bytes_per_node"] = round(traced_bytes(lambda: grow(chains(0, 10), options.nodes)[0]) / options.nodes)
    report["topics_table_bytes"] = table_bytes(topics(0, 10), num_requests=options.table_requests)
    report["distinct_table_bytes"] = table_bytes(chains(0, 10), num_requests=options.table_requests)
    for name, value in report.items():
        print(f"{name:<28} {value}")
    if options.record:
        print("record:", write_record(make_record("tree", spec=vars(options), results=report)))
    print(json.dumps(report))
    return 0


def _chunk(number: int) -> Chunk:
    """A chunk with an id string of its own, as if a tokenizer had hashed it for a new request."""
    return Chunk(ChunkId(f"{number:032x}"), 128 + number * 7919 % 385)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
