"""Requests that wait for each other, by arithmetic: times to first token and throughput under a
load, from what each prefill takes alone (timed.py).

    due ──► waiting ── its prefill, one at a time, in order ──► running ── a step for all ──► done

As in SGLang's loop who waits is prefilled first, as long as the pool has room for prompt and
answer; else all that run decode a token. Prefills neither share a forward nor stop for a step, KV
that the tree shares takes its room once a request, and nothing is retracted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eval.metrics import MIN_FOR_P99
from eval.serve.workload import Load, arrivals

Step = Callable[[int, int], float]
"""Requests, and tokens that they read -> seconds until each has one token more."""


class Job(NamedTuple):
    """A request."""

    prefill_s: float
    prompt: int
    """Tokens."""
    answer: int
    """Tokens, at least 1; the first comes with the prefill."""


def served(
    jobs: Sequence[Job], load: Load, step: Step, *, room: int, seed: int
) -> tuple[list[float], float]:
    """Times to first token, from when a request was due, and seconds until all are answered.

    Args:
        load: closed or poisson.
        room: tokens of the pool; a request that has it alone may be larger.
    """
    given = arrivals(load, [None] * len(jobs), seed=seed)
    due = [0.0] * min(load.clients, len(jobs)) if given is None else given
    waiting, running = deque[int](), dict[int, int]()  # request -> tokens of its answer to come
    ttft, now, num_reserved, num_done = [0.0] * len(jobs), 0.0, 0, 0
    num_due = 0
    while num_done < len(jobs):
        while num_due < len(due) and due[num_due] <= now:
            waiting.append(num_due)
            num_due += 1
        size = jobs[waiting[0]].prompt + jobs[waiting[0]].answer if waiting else 0
        if waiting and (not running or num_reserved + size <= room):
            number = waiting.popleft()
            now += jobs[number].prefill_s
            ttft[number] = now - due[number]
            running[number] = jobs[number].answer - 1
            num_reserved += size
        elif running:
            now += step(len(running), num_reserved - sum(running.values()))
            running = {number: left - 1 for number, left in running.items()}
        else:
            now = due[num_due]
        for number in [number for number, left in running.items() if left <= 0]:
            del running[number]
            num_reserved -= jobs[number].prompt + jobs[number].answer
            num_done += 1
            if given is None and len(due) < len(jobs):
                due.append(now)
    return ttft, now


def figures(jobs: Sequence[Job], load: Load, step: Step, *, room: int, seed: int) -> dict[str, Any]:
    """Of one load, seconds."""
    ttft, seconds = served(jobs, load, step, room=room, seed=seed)
    ttft.sort()
    given = {"clients": load.clients} if load.kind == "closed" else {"rate": load.rate}
    return {
        **given,
        "mean_s": sum(ttft) / len(ttft),
        "p50_s": ttft[len(ttft) // 2],
        **({"p99_s": ttft[int(0.99 * len(ttft))]} if len(ttft) >= MIN_FOR_P99 else {}),
        "requests_per_s": len(jobs) / seconds,
    }
