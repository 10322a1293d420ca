"""How many predicted hits come true when several requests are in flight?

    python -m eval.bench.concurrency [--clients 8] [--requests 200] [--schedule-policy fcfs lpm] [--record]

A predicted hit (`planned` in the server's statistics) is a chunk that the rank held when the order was decided, or that a
running request was about to store there. It does not come true if the chunk was evicted meanwhile, or if both requests were
prefilled in one batch. The bundled model answers questions about its generated world, closed loop; every setting gets a fresh
server and the same requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eval.http import get, post
from eval.intervals import quantile
from eval.record import make_record, write_record
from eval.server import Server
from eval.task import Request
from eval.tasks.world import world_requests


def main(argv: Sequence[str]) -> int:
    """Run every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--schedule-policy", nargs="+", default=["fcfs", "lpm"])
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    args = parser.parse_args(argv)
    requests = world_requests(args.requests, seed=4)
    results = {}
    for policy in args.schedule_policy:
        flags = ["--model-path", "bundled", "--schedule-policy", policy]
        with Server(flags, log=args.logs / f"concurrency-{policy}.log") as server:
            results[policy] = load(server.url, requests, args.clients)
    record = make_record("concurrency", spec=vars(args), results=results)
    if args.record:
        print("record:", write_record(record))
    print(json.dumps(results))
    return 0


def load(url: str, requests: Sequence[Request], clients: int) -> dict[str, Any]:
    """Send the requests from `clients` clients, closed loop. Returns the missed share of hits, exact tokens, latency."""

    def send(request: Request) -> tuple[float, dict[str, Any]]:
        chunks = [{"id": c.id, "text": c.text} for c in request.chunks]
        messages = [{"role": "user", "content": request.question}]
        start = time.perf_counter()
        reply = post(url + "/rag/v1/chat/completions", {"messages": messages, "chunks": chunks, "max_tokens": 8})
        return time.perf_counter() - start, reply["chunkcache"]

    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(send, requests))
    planned = sum(answer["chunks_planned"] for _, answer in answers)
    missed = sum(max(0, answer["chunks_planned"] - answer["chunks_hit"]) for _, answer in answers)
    exact = sum(answer["fates"]["exact"] for _, answer in answers)
    tokens = sum(sum(answer["fates"].values()) for _, answer in answers)
    return {
        "planned_chunks": planned,
        "missed_share": missed / max(1, planned),
        "exact_share": exact / tokens,
        "latency_median_s": quantile([seconds for seconds, _ in answers], 0.5),
        "mirror_agrees": get(url + "/chunkcache/stats")["ranks"][0]["mirror"]["agrees"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
