"""Time to first token: our server against stock SGLang, on RAGPulse-shaped or MTRAG-shaped load.

    python -m eval.bench.ttft --data DIR --load ragpulse|mtrag|fresh [--pairs 80] [--warm-up 40] [--scale 4] [--record]

Three servers with the same flags (`--schedule-policy lpm --sleep-on-idle`) and the same threads: ours, stock SGLang, and
stock SGLang with the Python `RadixCache` that ours derives from (not stock's default tree). Each gets every request, one at a
time, in ABBA order, so that machine noise affects all alike; each keeps the cache that its own traffic filled.

Lengths are the data's divided by `--scale`; eval/tasks/ragpulse.py explains how RAGPulse becomes text. Stock servers get the
usual requests of an application: `/v1/chat/completions` with the chunks in retriever order in the user message, every turn.
Weights are random, so nothing here measures quality.

`fresh` is RAGPulse with no chunk used twice: it measures the overhead of the chunk cache if there is nothing to reuse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.http import get
from eval.intervals import bootstrap, quantile
from eval.random_model import SHAPES, write_random_model
from eval.record import make_record, write_record
from eval.server import Server
from eval.task import Request, Source, TextChunk, load_task, requests_of

OURS, STOCK, PYTHON_TREE = "ours", "stock", "stock_python_tree"
ARMS = {OURS: [], STOCK: ["--stock"], PYTHON_TREE: ["--stock", "--radix-cache-backend", "python_radix"]}


Message = dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Run all arms and print ratios with intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ragpulse/ and mtrag/")
    parser.add_argument("--load", choices=("ragpulse", "mtrag", "fresh"), required=True)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--warm-up", type=int, default=40, help="requests before the measured ones")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--params", type=int, choices=sorted(SHAPES), default=100, help="millions of parameters")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-total-tokens", type=int, default=40_000)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    args = parser.parse_args(argv)
    count = args.warm_up + args.pairs
    requests, texts = read_load(args.load, args.data, count, args.scale)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_random_model(Path(folder), SHAPES[args.params], texts)
        flags = ["--model-path", str(model), "--schedule-policy", "lpm", "--sleep-on-idle", "--enable-cache-report"]
        flags += ["--max-total-tokens", str(args.max_total_tokens)]
        env = {"OMP_NUM_THREADS": str(args.threads)}
        servers = {
            arm: stack.enter_context(Server([*extra, *flags], log=args.logs / f"ttft-{arm}.log", env=env))
            for arm, extra in ARMS.items()
        }
        rows = run(servers, requests)
        stats = get(servers[OURS].url + "/chunkcache/stats")
    results = summarize(rows[args.warm_up :]) | overhead(rows, stats)
    record = make_record(f"ttft-{args.load}", spec=vars(args), results=results)
    if args.record:
        folder_path = write_record(record)
        (folder_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print("record:", folder_path)
    print(json.dumps(results))
    return 0


def run(servers: dict[str, Server], requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Send every request through every arm, reversing the order of the arms each time (ABBA)."""
    rows = []
    histories: dict[tuple[str, str], list[Message]] = {}
    for i, request in enumerate(requests):
        arms = list(servers) if i % 2 == 0 else list(servers)[::-1]
        row = {arm: send(servers[arm].url, arm, request, histories) for arm in arms}
        rows.append(row)
        print(i, {arm: (round(r["ttft_s"], 3), r["cached"], r["prompt"]) for arm, r in row.items()}, flush=True)
    return rows


def send(url: str, arm: str, request: Request, histories: dict[tuple[str, str], list[Message]]) -> dict[str, Any]:
    """Stream one request; returns seconds to the first token, prompt and cached tokens. `histories`: those of each arm."""
    begun = (arm, request.conversation or request.id)
    history = histories.setdefault(begun, [{"role": "system", "content": request.system}])
    body: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 8 if request.conversation else 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arm == OURS:
        path = "/rag/v1/chat/completions"
        message = {"role": "user", "content": request.question}
        body["chunks"] = [{"id": chunk.id, "text": chunk.text} for chunk in request.chunks]
        body["conversation_id"] = request.conversation
    else:
        path = "/v1/chat/completions"
        text = "".join(chunk.text + "\n\n" for chunk in request.chunks) + request.question
        message = {"role": "user", "content": text}
    body["messages"] = [*history, message]
    data = json.dumps(body).encode()
    start = time.perf_counter()
    first = None
    content = ""
    usage: dict[str, Any] = {}
    post = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            # The first event only names the role; it is sent together with the first token.
            first = first or time.perf_counter() - start
            content += delta.get("content") or ""
            usage = event.get("usage") or usage
    if request.conversation:
        history += [message, {"role": "assistant", "content": content}]
    details = usage.get("prompt_tokens_details") or {}
    return {"ttft_s": first, "prompt": usage["prompt_tokens"], "cached": details.get("cached_tokens")}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratio stock / ours of medians and of p90, over pairs, with 95% bootstrap intervals: above 1, ours is faster."""
    results: dict[str, Any] = {"pairs": len(rows)}
    for arm in ARMS:
        times = [row[arm]["ttft_s"] for row in rows]
        results[arm] = {
            "median_s": statistics.median(times),
            "p90_s": quantile(times, 0.9),
            "prompt_tokens": sum(row[arm]["prompt"] for row in rows),
        }
    for arm in (STOCK, PYTHON_TREE):
        pairs = [(row[arm]["ttft_s"], row[OURS]["ttft_s"]) for row in rows]
        for name, q in (("median", 0.5), ("p90", 0.9)):
            results[f"{name}_ratio_{arm}"] = bootstrap(pairs, lambda sample, q=q: _ratio(sample, q))  # type: ignore[misc]
    return results


def overhead(rows: Sequence[dict[str, Any]], stats: dict[str, Any]) -> dict[str, Any]:
    """The share of our cache and our order decision in the time to first token of all requests."""
    rank = stats["ranks"][0]
    seconds = {
        "match": rank["match_seconds"],
        "insert": rank["insert_seconds"],
        "order": 1e-6 * (stats["order_us_mean"] or 0) * len(rows),
    }
    total = sum(row[OURS]["ttft_s"] for row in rows)
    return {"overhead_seconds": seconds, "overhead_share": sum(seconds.values()) / total}


def _ratio(pairs: Sequence[tuple[float, float]], q: float) -> float:
    return quantile([a for a, _ in pairs], q) / quantile([b for _, b in pairs], q)


def read_load(load: str, data: Path, count: int, scale: int) -> tuple[list[Request], list[str]]:
    """The first requests, every list as long as the data has it, and texts to train the tokenizer on."""
    source = Source("mtrag" if load == "mtrag" else "ragpulse", data, requests=count, k=1000, scale=scale)
    task = load_task(source)
    requests = requests_of(source, task)
    if load == "mtrag":
        requests = [replace(request, system="Answer from the passages.") for request in requests]
    if load == "fresh":
        requests = [_with_fresh_chunks(request, number) for number, request in enumerate(requests)]
    return requests, [passage.text for passage in task.passages]


def _with_fresh_chunks(request: Request, number: int) -> Request:
    chunks = tuple(TextChunk(chunk.id, f"{number} {chunk.text}") for chunk in request.chunks)
    return replace(request, chunks=chunks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
