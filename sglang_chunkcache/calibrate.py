"""Cache-Craft's alpha from a validation set (eq. 13): the least recomputation whose answers reach a target F1.

    alpha* = argmin E[CFO_alpha]  subject to  F1_alpha >= target * F1 of full prefill

E[CFO] grows with alpha, so alpha* is the least alpha that reaches the target. Quality need not grow with every step, so alpha is
first raised along a grid until the target is reached, then bisected between the last two. Each example's chunks are first served
twice in another order, so that the store has variants computed after other chunks, then requested with moved KV.

    examples   {"question": "...", "chunks": ["...", ...], "answers": ["...", ...]}     one JSON object a line
"""

from __future__ import annotations

import json
import re
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_chunkcache.client import Client, ServerError, settle

GRID = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""CFO is at most alpha. Above 1, the end of the paper's scale, chunks that depend on their context are recomputed whole."""
NUM_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Example:
    """One validation question."""

    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]


def read_examples(path: Path) -> list[Example]:
    """Examples of a file. Raises ServerError naming file and line."""
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            example = Example(row["question"], tuple(row["chunks"]), tuple(row["answers"]))
        except (ValueError, TypeError, LookupError) as error:
            raise ServerError(f"{path}:{number}: needs question, chunks and answers: {error!r}") from None
        if not isinstance(row["chunks"], list) or not isinstance(row["answers"], list):
            raise ServerError(f"{path}:{number}: chunks and answers must be lists")
        texts = (example.question, *example.chunks, *example.answers)
        if not example.chunks or not example.answers or not all(isinstance(text, str) and text for text in texts):
            raise ServerError(f"{path}:{number}: question, chunks and answers must be texts that are not empty")
        examples.append(example)
    if not examples:
        raise ServerError(f"{path}: no examples")
    return examples


def calibrate(client: Client, examples: Sequence[Example], *, target: float) -> dict[str, Any]:
    """Solve for alpha on a running server.

    Args:
        target: share of full prefill's F1 to reach.
    Returns:
        `alpha` (None if no alpha reaches the target), `full_f1`, and `steps`: alpha, mean CFO (recomputed share of the moved
        tokens) and F1 of each step.
    Raises:
        ServerError: the server refuses a request, or moves no KV.
    """
    salt = f"calibrate-{time.time_ns()}"
    reads_scores = {
        "reuse": {"mode": "fused", "selector": "context"}
    }  # all is found as it stands, and scored when stored
    for fields in ({}, reads_scores):  # the store takes a chunk at its second use
        for example in examples:
            turned = [*example.chunks[1:], example.chunks[0]]
            _ask(client, example, turned, cache_salt=salt, max_tokens=1, **fields)
    settle(client)
    full_f1 = _mean([_f1(_ask(client, e, e.chunks, cache_salt=f"{salt}-full")[0], e) for e in examples])
    steps: list[dict[str, float]] = []

    def suffices(alpha: float) -> bool:
        scores, num_moved, num_recomputed = [], 0, 0
        for example in examples:
            reuse = {"mode": "fused", "selector": "context", "alpha": alpha}
            text, info = _ask(client, example, example.chunks, cache_salt=salt, reuse=reuse)
            scores.append(_f1(text, example))
            num_recomputed += info["fates"]["recomputed"]
            num_moved += info["fates"]["recomputed"] + info["fates"]["relocated"]
        if not num_moved:
            raise ServerError(
                "no chunk was moved: short chunks are not worth it unless the server runs with --chunkcache-move always"
            )
        steps.append({"alpha": alpha, "mean_cfo": num_recomputed / num_moved, "f1": _mean(scores)})
        return steps[-1]["f1"] >= target * full_f1

    enough = next((i for i, alpha in enumerate(GRID) if suffices(alpha)), None)
    best = None if enough is None else GRID[enough]
    if enough:
        low, high = GRID[enough - 1], GRID[enough]
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        best = high
    return {"alpha": best, "target": target, "full_f1": full_f1, "examples": len(examples), "steps": steps}


def token_f1(answer: str, gold: str) -> float:
    """F1 of the words of two texts, case, punctuation and articles aside (SQuAD's measure). Two empty texts agree."""
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
