"""Arrival times of requests, as a pure function of load and seed, and the division into blocks.

| kind | a request is sent |
|---|---|
| closed | when one of `clients` is free: at most `clients` are in flight |
| poisson | at its time, gaps exponential with mean 1 / `rate` |
| trace | at its `arrival_s` / `speed` |

All kinds except closed are open loops: a slow server also gets the next request on time, so waiting
in its queue is measured.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from eval.errors import CommandError
from eval.replay.days import NUM_DAYS

if TYPE_CHECKING:
    from eval.task import Request, TextChunk


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive. Each number applies to the kind that uses it in the table above,
    and is above 0."""

    kind: Literal["closed", "poisson", "trace"] = "closed"
    clients: int = 1
    rate: float = 1.0
    """Requests per second, on average."""
    speed: float = 1.0
    """Seconds of the trace per second."""


def arrivals(load: Load, times: Sequence[float | None], *, seed: int) -> list[float] | None:
    """Seconds from the first request's arrival to each request's, non-decreasing; None for a closed
    loop.

    Args:
        times: `arrival_s` of each request; used for a trace only.
        seed: equal seeds give equal arrivals, and a longer list begins with the shorter one.
    Raises:
        CommandError: a trace in which a request has no time, or times decrease.
    """
    if load.kind == "closed":
        return None
    if load.kind == "trace":
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            raise CommandError(
                "--load trace needs requests with arrival times (arrival_s); use closed or poisson"
            )
        if known != sorted(known):
            raise CommandError("--load trace: arrival times decrease; sort the trace by them")
        return [(time - known[0]) / load.speed for time in known]
    # a word with the seed: no other generator of the same seed draws the same numbers
    rng = random.Random(f"arrivals {seed}")
    return list(accumulate((rng.expovariate(load.rate) for _ in times[1:]), initial=0.0))


def cut(count: int, *, warm_up: int, block: int) -> list[range]:
    """The numbers 0 to count - 1 as blocks of at most `block` (0: no limit);
    no block crosses the end of `warm_up`."""
    block, warm_up = block or max(1, count), min(warm_up, count)
    return [
        range(a, b)
        # `range(warm_up, ...)` begins at `warm_up`, so a block ends there
        for a, b in pairwise([*range(0, warm_up, block), *range(warm_up, count, block), count])
    ]


def interleave(requests: Sequence[Request], at_once: int) -> list[Request]:
    """The requests with `at_once` conversations at a time, one turn of each in rotation, like
    concurrent users of a server.

    A request without a conversation is a conversation of one turn. Turns stay in order; with 1 the
    list is unchanged if the turns of each conversation are consecutive.
    """
    conversations: dict[str, deque[Request]] = {}
    for request in requests:
        # \0: no conversation of a data set has such an id
        conversations.setdefault(request.conversation or f"\0{request.id}", deque()).append(request)
    waiting = list(conversations.values())
    active, waiting = deque(waiting[:at_once]), waiting[at_once:]
    order = []
    while active:
        order.append((turns := active.popleft()).popleft())
        if turns:
            active.append(turns)
        elif waiting:
            active.append(waiting.pop(0))
    return order


def fresh(requests: Sequence[Request]) -> list[Request]:
    """The requests with chunks of their own, so that none occurs twice and nothing can be reused:
    what reuse costs then."""
    return [
        replace(request, chunks=_renamed(request.chunks, n)) for n, request in enumerate(requests)
    ]


def days(requests: Sequence[Request], change: Literal["documents", "prompt"]) -> list[Request]:
    """The requests three times, each time another day (`eval replay --days`): all chunks
    are new ones, or the system prompt was edited."""
    return [
        replace(
            request,
            id=f"{request.id} day {day}",
            conversation=request.conversation and f"{day} {request.conversation}",
            arrival_s=None,
            **(
                {"system": f"{day} {request.system}"}
                if change == "prompt"
                else {"chunks": _renamed(request.chunks, day)}
            ),
        )
        for day in range(1, NUM_DAYS + 1)
        for request in requests
    ]


def _renamed(chunks: Sequence[TextChunk], prefix: object) -> tuple[TextChunk, ...]:
    # in front: a text that differs at its end only would share its first tokens
    return tuple(replace(c, id=f"{prefix} {c.id}", text=f"{prefix} {c.text}") for c in chunks)
