"""Does reuse change an answer? Our server against stock SGLang, token by token (design contract 1).

    python -m eval.bench.exactness --model-path M [--task NAME --data DIR] [--requests 200] [--record]

Our server gets RAG requests with a pool that is too small for them (eviction), prefill pieces smaller than a chunk and
SGLang's strict memory checks. The same prompts are then sent, as token ids, to stock SGLang, and to stock SGLang without any
reuse (`SGLANG_RADIX_FORCE_MISS=1`). Even in stock SGLang the cached length changes the rounding: the tolerance is the largest
difference of a log probability between the two stock runs, up to their first different token. Our first different token is
excused only if stock's two best tokens are closer than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.http import get, post
from eval.record import make_record, write_record
from eval.server import Server
from eval.task import Request, add_task_options, load_requests

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log probabilities, and the gap to the second best at each step."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers: its step, and the reference's gap there."""

    request: int
    step: int
    gap: float


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if a difference is not excused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="bundled")
    parser.add_argument("--chat-template")
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--chunked-prefill-size", type=int, default=48)
    parser.add_argument("--max-total-tokens", type=int, default=3000)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    add_task_options(parser)
    parser.set_defaults(requests=200, k=4)
    args = parser.parse_args(argv)
    requests = load_requests(args)
    results = compare(args, requests)
    record = make_record("exactness", spec=vars(args) | {"requests": len(requests)}, results=results)
    if args.record:
        print("record:", write_record(record))
    print(json.dumps(record["results"]))
    return 1 if results["unexcused"] else 0


def compare(args: argparse.Namespace, requests: Sequence[Request]) -> dict[str, Any]:
    """Run the three servers and compare their answers."""
    model = ["--model-path", args.model_path]
    model += ["--chat-template", args.chat_template] if args.chat_template else []
    tight = [
        *model,
        "--chunked-prefill-size",
        str(args.chunked_prefill_size),
        "--max-total-tokens",
        str(args.max_total_tokens),
    ]
    with Server(tight, log=args.logs / "exactness-ours.log", env=STRICT) as server:
        prompts, ours, fates = run_ours(server.url, requests, args)
        stats = get(server.url + "/chunkcache/stats")
    with Server(["--stock", *tight], log=args.logs / "exactness-stock.log") as server:
        stock = [run_stock(server.url, ids, args) for ids in prompts]
    with Server(
        ["--stock", *tight], log=args.logs / "exactness-miss.log", env={"SGLANG_RADIX_FORCE_MISS": "1"}
    ) as server:
        miss = [run_stock(server.url, ids, args) for ids in prompts]
    tolerance = max((logprob_difference(a, b) for a, b in zip(stock, miss, strict=True)), default=0.0)
    found = differences(miss, ours)
    unexcused = [d for d in found if d.gap > tolerance]
    rank = stats["ranks"][0]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "exact_tokens": fates,
        "evicted_chunks": rank["evicted_chunks"],
        "mirror_agrees": rank["mirror"]["agrees"],
        "tolerance": tolerance,
        "stock_vs_itself": len(differences(miss, stock)),
        "ours_vs_stock": len(found),
        "unexcused": len(unexcused),
        "largest_excused_gap": max((d.gap for d in found if d not in unexcused), default=0.0),
    }


def run_ours(
    url: str, requests: Sequence[Request], args: argparse.Namespace
) -> tuple[list[list[int]], list[Answer], int]:
    """Send every request through `/rag/v1/chat/completions`, one after the other, so that the order is fixed."""
    prompts, answers, exact = [], [], 0
    for request in requests:
        body = {
            "messages": [{"role": "user", "content": request.question}],
            "chunks": [{"id": chunk.id, "text": chunk.text} for chunk in request.chunks],
            "temperature": 0,
            "max_tokens": args.max_new_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "return_meta_info": True,
            "return_token_ids": True,
        }
        reply = post(url + "/rag/v1/chat/completions", body)
        prompts.append(prompt_ids(reply))
        answers.append(answer_of(reply["choices"][0]["meta_info"]))
        exact += reply["chunkcache"]["fates"]["exact"]
    return prompts, answers, exact


def prompt_ids(reply: dict[str, Any]) -> list[int]:
    """The prompt's token ids in a reply to `return_token_ids`."""
    return list(reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"])


def run_stock(url: str, input_ids: list[int], args: argparse.Namespace) -> Answer:
    """Send the same ids through `/generate`."""
    params = {"temperature": 0, "max_new_tokens": args.max_new_tokens}
    body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    return answer_of(post(url + "/generate", body)["meta_info"])


def logprob_difference(a: Answer, b: Answer) -> float:
    """Largest difference of a log probability before the first different token."""
    worst = 0.0
    for token_a, token_b, x, y in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=False):
        if token_a != token_b:
            break
        worst = max(worst, abs(x - y))
    return worst


def differences(reference: Sequence[Answer], answers: Sequence[Answer]) -> list[Difference]:
    """The first different token of every answer that has one."""
    found = []
    for i, (want, got) in enumerate(zip(reference, answers, strict=True)):
        step = next((s for s, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=False)) if a != b), None)
        if step is None and len(want.tokens) != len(got.tokens):
            step = min(len(want.tokens), len(got.tokens)) - 1
        if step is not None:
            found.append(Difference(i, step, want.gaps[step]))
    return found


def answer_of(meta: dict[str, Any]) -> Answer:
    """The answer in a reply's `meta_info`."""
    chosen = meta["output_token_logprobs"]
    top = meta["output_top_logprobs"]
    return Answer(
        [entry[1] for entry in chosen],
        [entry[0] for entry in chosen],
        [abs(best[0][0] - best[1][0]) for best in top],
    )


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main(sys.argv[1:]))
