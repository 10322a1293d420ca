"""One arm in one cell: its histories, its clock, and a block of requests sent as the load says.

due    when load and preceding turn allow the request to be sent; all times of a sample count from
       here
sent   when the client sent it: later than due only if this process is too slow, which the times
       then include
late   due minus the arrival time of the load: how long a turn waited for the previous answer
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from eval.serve.arms import Arm, create_reorderer, request_body
from eval.serve.bystanders import bystanders
from eval.serve.client import Answer, Message, open_session, send
from eval.serve.latency import cached_tokens, lane_name, moved_tokens
from eval.serve.plan import Cell, Plan
from eval.serve.server_pool import ServerPool, key_of
from eval.serve.workload import Load, arrivals
from eval.stats import quantile

Sample = dict[str, Any]
MAX_NEW_TOKENS = 8
"""Maximum length of an answer, if neither the request nor the plan has one."""


class Lane:
    """Sends its cell's requests to its arm's server, block by block;
    each arm sees its own answers in later turns."""

    def __init__(self, arm: Arm, cell: Cell, plan: Plan, servers: ServerPool) -> None:
        self.arm, self.cell, self._plan = arm, cell, plan
        self.name, self.server = lane_name(cell.label, arm.name), key_of(arm, cell)
        self.url = servers.open(self.server, arm)
        self._reports_cache = servers.facts[str(self.server)]["enable_cache_report"]
        """A missing count of cached tokens then means zero: SGLang omits a zero."""
        self._session = uuid.uuid4().hex[:8]
        """Part of the conversations' ids, so that no other cell or run continues them."""
        self._body = {"model": servers.model(self.server)} | request_body(
            arm, plan.body, cell.reuse
        )
        self.reorderer = create_reorderer(arm, contextpilot_python=plan.contextpilot_python)
        self._offsets = arrivals(
            cell.load, [request.arrival_s for request in cell.requests], seed=plan.seed
        )
        self._before: list[int] = []
        """For each request the number of the turn before it;
        -1 for a single request or the first turn."""
        last: dict[str, int] = {}
        for number, request in enumerate(cell.requests):
            # \0: an id that no conversation has
            talk = request.conversation or f"\0{number}"
            self._before.append(last.get(talk, -1))
            last[talk] = number
        self._histories: dict[str, list[Message]] = {}
        self.clock_s = 0.0
        """Seconds that this lane has been under load."""
        self.num_answers, self.ttft_s = 0, 0.0
        """Answers of this process, warm-up included, and the sum of their times to first token."""

    async def run(self, numbers: Sequence[int]) -> list[Sample]:
        """Send these requests of the cell, each turn after its predecessor; returns their samples
        in order.

        With bystanders one more sample follows, of their block. Raises CommandError if a bystander
        fails.
        """
        async with bystanders(self._plan.bystanders, self.url) as gaps:
            start = time.perf_counter()
            taken = await self._send_all(numbers, self.cell.load, self._offsets)
            # before the streams are aborted, which is no load
            loaded_s = time.perf_counter() - start
        samples = [self._sample(number, *taken[number], start) for number in numbers]
        # filled when the streams have ended
        if gaps:
            p50, p99 = (quantile(gaps, q) for q in (0.5, 0.99))
            row = self._row(f"bystanders:{numbers[0]}", numbers[0])
            row |= {
                "due_s": self.clock_s,
                "done_s": self.clock_s + loaded_s,
                "gaps_s": [round(gap, 6) for gap in gaps],
            }
            samples.append(
                row | {"metrics": {"itl_bystander_p50_s": p50, "itl_bystander_p99_s": p99}}
            )
        self.clock_s += loaded_s
        return samples

    async def replay(self, numbers: Sequence[int]) -> None:
        """Send earlier requests again, several at a time, to restore the server's cache and the
        histories."""
        # a closed loop whatever the load: cache and histories depend on the order alone
        await self._send_all(numbers, Load(clients=max(self.cell.load.clients, 4)), None)

    # Private, in order of use

    async def _send_all(
        self, numbers: Sequence[int], load: Load, offsets: Sequence[float] | None
    ) -> dict[int, tuple[float, float, float, Answer]]:
        """Number -> (planned, due, sent, answer), in seconds of `time.perf_counter`."""
        taken: dict[int, tuple[float, float, float, Answer]] = {}
        done = {number: asyncio.Event() for number in numbers}
        async with open_session() as session, asyncio.TaskGroup() as tasks:

            async def one(number: int, planned: float) -> None:
                due = planned
                # else a first turn, or one whose predecessor's block has ended
                if (before := self._before[number]) in done:
                    await done[before].wait()
                    due = max(planned, taken[before][2] + taken[before][3].e2e_s)
                sent = time.perf_counter()
                taken[number] = (planned, due, sent, await self._send(session, number))
                # also after a failure, which `send` returns: else later turns would wait for ever
                done[number].set()

            async def client() -> None:
                # a turn waits for one that was taken before it, so one client is always at work
                for number in waiting:
                    await one(number, time.perf_counter())

            if offsets is None:
                waiting = iter(numbers)
                for _ in range(load.clients):
                    tasks.create_task(client())
            else:
                # the first is due at once: other arms' blocks lie between it and the one before
                start = time.perf_counter() - offsets[numbers[0]]
                for number in numbers:
                    await asyncio.sleep(max(0.0, start + offsets[number] - time.perf_counter()))
                    tasks.create_task(one(number, start + offsets[number]))
        return taken

    async def _send(self, session: Any, number: int) -> Answer:
        request = self.cell.requests[number]
        body, talk = dict(self._body), request.conversation
        limit = min(
            filter(None, (request.max_new_tokens, self._plan.max_new_tokens)),
            default=MAX_NEW_TOKENS,
        )
        history = [] if talk is None else self._histories.setdefault(talk, [])
        if talk is not None and self.arm.route == "rag":
            body["conversation_id"] = f"{self._session}/{self.name}/{talk}"
        answer = await send(
            session,
            self.url,
            self.arm,
            request,
            history,
            max_new_tokens=limit,
            reorderer=self.reorderer,
            body=body,
        )
        if answer.ttft_s is not None:
            self.num_answers, self.ttft_s = self.num_answers + 1, self.ttft_s + answer.ttft_s
        if self._reports_cache and answer.prompt_tokens is not None:
            answer.cached_tokens = answer.cached_tokens or 0
        # a failed turn is not shown: the user has seen no answer
        if answer.error is None:
            history += [answer.message, {"role": "assistant", "content": answer.text}]
        return answer

    def _sample(
        self, number: int, planned: float, due: float, sent: float, answer: Answer, start: float
    ) -> Sample:
        request = self.cell.requests[number]
        sample = self._row(request.id, number) | {
            "sent_s": self.clock_s + sent - start,
            "due_s": self.clock_s + due - start,
            "late_s": due - planned,
            "done_s": self.clock_s + sent + answer.e2e_s - start,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": answer.completion_tokens,
            "num_chunks": len(request.chunks),
            "fates": answer.fates,
            "metrics": {},
        }
        if answer.error is not None:
            return sample | {"error": answer.error}
        sample["metrics"] = _times(answer, sent - due) | _shares(
            answer, is_alone=request.conversation is None
        )
        sample["ttft_sent_s"], sample["first_text_s"] = answer.ttft_s, answer.first_text_s
        if answer.reorder_s is not None:
            sample["reorder_s"] = answer.reorder_s
        if (cache := answer.chunkcache) is not None:
            kept = ("chunks_hit", "chunks_planned", "predicted_exact", "turns_reused", "fallbacks")
            sample["chunkcache"] = {name: cache.get(name) for name in kept}
            if "loaded" in cache:  # tokens of `fates["exact"]` that came from host memory
                sample["chunkcache"]["loaded"] = cache["loaded"]
            sample["chunkcache"]["num_dropped"] = len(cache.get("dropped") or ())
            reuse = cache.get("reuse") or {}
            sample["chunkcache"]["fused_hit"] = reuse.get("fused_hit") or 0
            sample["chunkcache"]["sampled"] = bool(reuse.get("sampled"))
            if cfo := [each["cfo"] for each in reuse.get("sources") or () if each["from"] != "gap"]:
                sample["chunkcache"]["cfo"] = cfo
            sample["chunkcache"] |= {
                name: reuse[name]
                for name in ("selected_by", "estimated_ms", "ms")
                if reuse.get(name)
            }
        return sample

    def _row(self, request: str, number: int) -> Sample:
        is_warm_up = number < self._plan.warm_up
        return {
            "arm": self.arm.name,
            "cell": dict(self.cell.label),
            "request": request,
            "warm_up": is_warm_up,
        }


def _times(answer: Answer, wait: float) -> dict[str, float]:
    """Seconds under the names of eval/metrics.py. Tokens of one event are counted separately."""
    assert answer.ttft_s is not None
    times = {"ttft_s": wait + answer.ttft_s, "e2e_s": wait + answer.e2e_s}
    if answer.completion_tokens and answer.completion_tokens > 1:
        times["itl_s"] = ((answer.last_text_s or answer.ttft_s) - answer.ttft_s) / (
            answer.completion_tokens - 1
        )
    return times


def _shares(answer: Answer, *, is_alone: bool) -> dict[str, float]:
    """What was reused, as far as the server says.
    `is_alone`: the request is no turn of a conversation."""
    shares: dict[str, float] = {}
    cached = cached_tokens(answer.fates, answer.cached_tokens)
    if answer.prompt_tokens and cached is not None:
        shares["cached_share"] = cached / answer.prompt_tokens
        shares["prefill_tokens"] = answer.prompt_tokens - cached
    cache = answer.chunkcache or {}
    hit, planned, order = (cache.get(name) for name in ("chunks_hit", "chunks_planned", "order"))
    # In a conversation the server counts the first turn's chunks, in every turn.
    if is_alone and order and hit is not None:
        shares["hit_share"] = hit / len(order)
    if planned and hit is not None:
        # finding more than was planned makes up for no other miss
        shares["planned_missed"] = max(0, planned - hit) / planned
    if moved := moved_tokens(answer.fates, (cache.get("reuse") or {}).get("fused_hit")):
        assert answer.fates is not None
        shares["recomputed_share"] = answer.fates["recomputed"] / moved
    return shares
