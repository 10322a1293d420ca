"""Time to first token: our server against stock SGLang, on RAGPulse-shaped or MTRAG-shaped load.

    python -m eval.bench.ttft --data DIR --load ragpulse|mtrag|fresh [--pairs 80] [--warm-up 40] [--scale 4] [--record]

Three servers with the same flags (`--schedule-policy lpm --sleep-on-idle`) and the same threads: ours, stock SGLang, and
stock SGLang with the Python `RadixCache` that ours derives from (stock's default tree is another). Each gets every request,
one at a time, in ABBA order, so that machine noise hits all alike; each keeps the cache that its own traffic left.

Lengths are the data's divided by `--scale`. RAGPulse has no text: every component becomes that many random words, the same
wherever it occurs. Its system prompts end in a block that no other request has; in front of the chunks that would leave
nothing to reuse for anybody, so all arms get the shared first block, the chunks, then everything else. Stock servers get
what an application sends today: `/v1/chat/completions` with the chunks in retriever order in the user message, every turn.
Weights are random: nothing here says anything about quality.

`fresh` is RAGPulse with no chunk ever seen twice: what the chunk cache costs where it has nothing to give.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.http import get
from eval.intervals import bootstrap, quantile
from eval.passages import load_samples, load_texts
from eval.random_model import SHAPES, write_random_model
from eval.record import make_record, write_record
from eval.server import Server

OURS, STOCK, PYTHON_TREE = "ours", "stock", "stock_python_tree"
ARMS = {OURS: [], STOCK: ["--stock"], PYTHON_TREE: ["--stock", "--radix-cache-backend", "python_radix"]}


@dataclass
class Request:
    """One RAG request: a system prompt, chunks in retriever order, the rest of the user's text."""

    system: str
    chunks: list[tuple[str, str]]
    question: str
    conversation: str | None = None
    history: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Messages of earlier turns as each arm has seen them; shared between the turns of one conversation."""


def main(argv: Sequence[str]) -> int:
    """Run all arms and print ratios with intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the load")
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
    if args.load != "mtrag":
        requests, texts = ragpulse_requests(args.data, count, args.scale, fresh=args.load == "fresh")
    else:
        requests, texts = mtrag_requests(args.data, count, args.scale), load_texts(args.data)
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
    """Every request through every arm, the order of the arms turned round each time (ABBA)."""
    rows = []
    for i, request in enumerate(requests):
        arms = list(servers) if i % 2 == 0 else list(servers)[::-1]
        row = {arm: send(servers[arm].url, arm, request) for arm in arms}
        rows.append(row)
        print(i, {arm: (round(r["ttft_s"], 3), r["cached"], r["prompt"]) for arm, r in row.items()}, flush=True)
    return rows


def send(url: str, arm: str, request: Request) -> dict[str, Any]:
    """Stream one request; seconds to the first token, prompt and cached tokens."""
    history = request.history.setdefault(arm, [{"role": "system", "content": request.system}])
    body: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 8 if request.conversation else 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arm == OURS:
        path = "/rag/v1/chat/completions"
        message = {"role": "user", "content": request.question}
        body["chunks"] = [{"id": name, "text": text} for name, text in request.chunks]
        body["conversation_id"] = request.conversation
    else:
        path = "/v1/chat/completions"
        text = "".join(text + "\n\n" for _, text in request.chunks) + request.question
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
        request.history[arm] += [message, {"role": "assistant", "content": content}]
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
    """What our cache and our order decision took, of the time to first token of all requests."""
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


def ragpulse_requests(folder: Path, count: int, scale: int, *, fresh: bool = False) -> tuple[list[Request], list[str]]:
    """The trace's first requests with passages, every component as random words of its length / scale."""
    lengths = {(row["kind"], row["id"]): row["token_length"] for row in _rows(folder / "components.jsonl.gz")}
    words = [
        a + b + c for a in "bdfgklmnprst" for b in ("a", "e", "i", "o") for c in ("ran", "sel", "tor", "min", "dus")
    ]

    def text(kind: str, ident: int) -> str:
        rng = random.Random(f"{kind} {ident}")
        return " ".join(rng.choices(words, k=max(1, lengths.get((kind, ident), scale) // scale)))

    requests: list[Request] = []
    for row in _rows(folder / "requests.jsonl.gz"):
        if not row["passages"] or len(requests) == count:
            continue
        rest = [text("sys_prompt", i) for i in row["sys_prompt"][1:]]
        rest += [text(kind, i) for kind in ("history", "web_search", "user_input") for i in row[kind]]
        requests.append(
            Request(
                text("sys_prompt", row["sys_prompt"][0]),
                [(str(i), f"{len(requests)} " * fresh + text("passage", i)) for i in dict.fromkeys(row["passages"])],
                " ".join(rest),
            )
        )
    return requests, [" ".join(words)] * 50


def mtrag_requests(folder: Path, count: int, scale: int) -> list[Request]:
    """Conversations turn by turn; texts cut to 1/scale of their words."""

    def cut(text: str) -> str:
        words = text.split(" ")
        return " ".join(words[: max(1, len(words) // scale)])

    requests: list[Request] = []
    histories: dict[str, dict[str, list[dict[str, str]]]] = {}
    for sample in load_samples(folder, count):
        assert sample.conversation is not None
        history = histories.setdefault(sample.conversation, {})
        chunks = [(chunk.id, cut(chunk.text)) for chunk in sample.chunks]
        requests.append(Request("Answer from the passages.", chunks, sample.question, sample.conversation, history))
    return requests


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
