"""Greedy answers of our server and of stock SGLang to the same token ids, and where they differ.

Even in stock SGLang the cached length changes the rounding. Two answers may part where the best two
tokens are closer than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.http import post
from eval.task import Request

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
NEVER_REUSE = {"SGLANG_RADIX_FORCE_MISS": "1"}
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "return_meta_info": True, "return_token_ids": True}


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


def rag_body(request: Request, max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request's body for our server."""
    chunks = [{"id": chunk.id, "text": chunk.text} for chunk in request.chunks]
    messages = [{"role": "user", "content": request.question}]
    asked = {"temperature": 0, "max_tokens": max_new_tokens, **fields}
    return {"messages": messages, "chunks": chunks, **asked}


def run_ours(
    url: str, requests: Sequence[Request], max_new_tokens: int
) -> tuple[list[list[int]], list[Answer], int]:
    """Prompts' ids, answers, and tokens reused. One request after the other."""
    prompts, answers, exact = [], [], 0
    for request in requests:
        body = rag_body(request, max_new_tokens, **LOGPROBS)
        reply = post(url + "/rag/v1/chat/completions", body)
        prompts.append(prompt_ids(reply))
        answers.append(answer_of(reply["choices"][0]["meta_info"]))
        exact += reply["chunkcache"]["fates"]["exact"]
    return prompts, answers, exact


def run_stock(url: str, input_ids: list[int], max_new_tokens: int, **fields: Any) -> Answer:
    """Send the same ids through `/generate`."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens}
    body = {"input_ids": input_ids, "sampling_params": params, **fields}
    told = post(url + "/generate", {"return_logprob": True, "top_logprobs_num": 2, **body})
    return answer_of(told["meta_info"])


def prompt_ids(reply: Mapping[str, Any]) -> list[int]:
    """The prompt's token ids in a reply to `return_token_ids`."""
    return list(reply.get("prompt_token_ids") or reply["choices"][0]["prompt_token_ids"])


def answer_of(meta: Mapping[str, Any]) -> Answer:
    """The answer in a reply's `meta_info`."""
    chosen, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
    gaps = [abs(best[0][0] - best[1][0]) for best in top]
    return Answer([entry[1] for entry in chosen], [entry[0] for entry in chosen], gaps)


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
        pairs = enumerate(zip(want.tokens, got.tokens, strict=False))
        step = next((step for step, (a, b) in pairs if a != b), None)
        if step is None and len(want.tokens) != len(got.tokens):
            step = min(len(want.tokens), len(got.tokens)) - 1
        if step is not None:
            found.append(Difference(i, step, want.gaps[step]))
    return found
