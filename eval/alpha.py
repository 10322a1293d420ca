"""`python -m eval alpha --url URL FILE`: Cache-Craft's alpha from a validation set (eq. 13), for a
request's `reuse`.

The least recomputation of `context` whose answers reach a target F1:

    alpha* = argmin E[CFO_alpha]  subject to  F1_alpha >= target * F1 of full prefill

E[CFO] grows with alpha, so alpha* is the least alpha that reaches the target. Quality need not grow
with every step, so alpha is first raised along a grid until the target is reached, then bisected
between the last two. Each example's chunks are first served twice in another order, so that the
store has variants computed after other chunks, then requested with moved KV.

    FILE   {"question": "...", "chunks": ["...", ...], "answers": ["...", ...]}   one JSON object a
           line

The last line of stdout is one JSON object. Exit code 1 where no alpha reaches the target.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.progress import tracked
from retrieval.command_line import Parser
from sglang_chunkcache.chunk_files import Example, read_examples
from sglang_chunkcache.client import Client, ServerError, settle

GRID = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""CFO is at most alpha. Above 1, the end of the paper's scale,
chunks that depend on their context are recomputed whole."""
NUM_HALVINGS = 4


def main(argv: Sequence[str]) -> int:
    """Print the steps and one JSON object; returns the exit code."""
    parser = Parser(
        prog="python -m eval alpha",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="questions, one JSON object a line")
    parser.add_argument("--url", required=True, help="a running server with --reuse fused")
    parser.add_argument("--api-key", metavar="KEY", help="the API key of the server")
    parser.add_argument(
        "--f1",
        type=float,
        default=0.95,
        help="F1 to reach, as a share of full prefill's: %(default)s",
    )
    args = parser.parse_args(argv)
    try:
        result = calibrate(Client(args.url, args.api_key), read_examples(args.file), target=args.f1)
    except ServerError as error:
        raise CommandError(str(error)) from None
    print(f"{'alpha':>8} {'mean CFO':>9} {'F1':>6} {'share of full':>14}")
    for step in result["steps"]:
        share = step["f1"] / result["full_f1"] if result["full_f1"] else 0.0
        print(f"{step['alpha']:8.3f} {step['mean_cfo']:9.3f} {step['f1']:6.3f} {share:14.3f}")
    print(json.dumps(result))
    return 0 if result["alpha"] is not None else 1


def calibrate(client: Client, examples: Sequence[Example], *, target: float) -> dict[str, Any]:
    """Solve for alpha on a running server.

    Args:
        target: share of full prefill's F1 to reach.
    Returns:
        `alpha` (None if no alpha reaches the target), `full_f1`, and `steps`: alpha, mean CFO
        (recomputed share of the moved tokens) and F1 of each step.
    Raises:
        ServerError: the server refuses a request, or moves no KV.
    """
    # Else an earlier run's KV, stored after other chunks, would be found for these examples.
    salt = f"calibrate-{time.time_ns()}"
    reads_scores = {
        "reuse": {"mode": "fused", "selector": "context"}
    }  # all is found as it stands, and scored when stored
    for fields in ({}, reads_scores):  # the store takes a chunk at its second use
        for example in tracked("storing", examples):
            # In this order it caches no prefix of the later requests, whose chunks are then moved.
            turned = [*example.chunks[1:], example.chunks[0]]
            _ask(client, example, turned, cache_salt=salt, max_tokens=1, **fields)
    # Captures wait for a rank's next forward: the first steps would find a store half full.
    settle(client)
    # Another salt shares no KV with the requests above, and without `reuse` nothing is moved.
    whole = tracked("computing", examples)
    full_f1 = _mean(
        [_f1(_ask(client, e, e.chunks, cache_salt=f"{salt}-full")[0], e) for e in whole]
    )
    steps: list[dict[str, float]] = []

    def suffices(alpha: float) -> bool:
        scores, num_moved, num_recomputed = [], 0, 0
        for example in tracked(f"alpha {alpha:g}", examples):
            reuse = {"mode": "fused", "selector": "context", "alpha": alpha}
            text, info = _ask(client, example, example.chunks, cache_salt=salt, reuse=reuse)
            scores.append(_f1(text, example))
            num_recomputed += info["fates"]["recomputed"]
            num_moved += info["fates"]["recomputed"] + info["fates"]["relocated"]
        if not num_moved:
            raise ServerError(
                "no chunk was moved: short chunks are not worth it unless the server runs with"
                " --chunkcache-move always"
            )
        steps.append({"alpha": alpha, "mean_cfo": num_recomputed / num_moved, "f1": _mean(scores)})
        return steps[-1]["f1"] >= target * full_f1

    # Bisecting the whole grid could miss a low alpha that suffices, as quality may fall in between.
    enough = next((i for i, alpha in enumerate(GRID) if suffices(alpha)), None)
    best = None if enough is None else GRID[enough]
    if enough:
        low, high = GRID[enough - 1], GRID[enough]
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        best = high
    return {
        "alpha": best,
        "target": target,
        "full_f1": full_f1,
        "examples": len(examples),
        "steps": steps,
    }


def token_f1(answer: str, gold: str) -> float:
    """F1 of the words of two texts, case, punctuation and articles aside (SQuAD's measure).
    Two empty texts agree."""
    mine, theirs = _words(answer), _words(gold)
    if not mine or not theirs:
        return float(mine == theirs)
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs))


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(answer: str, example: Example) -> float:
    return max(token_f1(answer, gold) for gold in example.answers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ask(
    client: Client, example: Example, chunks: Sequence[str], *, max_tokens: int = 64, **fields: Any
) -> tuple[str, Mapping[str, Any]]:
    answer = client.post(
        "/rag/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": example.question}],
            "chunks": [{"text": text} for text in chunks],
            "order": "retriever",
            "temperature": 0,
            "max_tokens": max_tokens,
            **fields,
        },
    )
    return answer["choices"][0]["message"]["content"] or "", answer["chunkcache"]
