"""Arrival times of requests, as a pure function of load and seed, and the division into blocks.

| kind | a request is sent |
|---|---|
| closed | when one of `clients` is free: at most `clients` are in flight |
| poisson | at its time, gaps exponential with mean 1 / `rate` |
| bursty | at its time, gaps Gamma with mean 1 / `rate` and `burstiness` times the variance of poisson's |
| trace | at its `arrival_s` / `speed` |

All kinds except closed are open loops: a slow server also gets the next request on time, so waiting in its queue is measured.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from eval.errors import CommandError

if TYPE_CHECKING:
    from eval.task import Request

Kind = Literal["closed", "poisson", "bursty", "trace"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive. Each field applies to the kinds that use it in the table above."""

    kind: Kind = "closed"
    clients: int = 1
    rate: float = 1.0
    """Requests per second, on average."""
    burstiness: float = 4.0
    """Variance of the gaps over that of poisson's with the same rate: 1 is poisson, more is burstier, less is more even."""
    speed: float = 1.0
    """Seconds of the trace per second."""

    def __post_init__(self) -> None:
        for name in ("clients", "rate", "burstiness", "speed"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CommandError(f"{name} must be a finite number above 0 but is {getattr(self, name)}")


def arrivals(load: Load, times: Sequence[float | None], *, seed: int) -> list[float] | None:
    """Seconds from the first request's arrival to each request's, non-decreasing; None for a closed loop.

    Args:
        load: kind and numbers.
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
                "--load trace needs requests with arrival times (arrival_s); use closed, poisson or bursty"
            )
        if known != sorted(known):
            raise CommandError("--load trace: arrival times decrease; sort the trace by them")
        return [(time - known[0]) / load.speed for time in known]
    shape = 1.0 if load.kind == "poisson" else 1 / load.burstiness
    rng = random.Random(f"arrivals {seed}")
    offsets, now = [], 0.0
    for _ in times:
        offsets.append(now)
        now += rng.gammavariate(shape, 1 / (shape * load.rate))
    return offsets


def cut(count: int, *, warm_up: int, block: int) -> list[range]:
    """The numbers 0 to count - 1 as blocks of at most `block` (0: no limit); no block crosses the end of `warm_up`."""
    warm_up = min(warm_up, count)
    edges = [0, *range(block, warm_up, block), warm_up, *range(warm_up + block, count, block), count] if block else []
    edges = edges or [0, warm_up, count]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def interleave(requests: Sequence[Request], at_once: int) -> list[Request]:
    """The requests with `at_once` conversations at a time, one turn of each in rotation, like concurrent users of a server.

    A request without a conversation is a conversation of one turn. Turns stay in order; with 1 the list is unchanged if the
    turns of each conversation are consecutive.
    """
    conversations: dict[str, deque[Request]] = {}
    for request in requests:
        conversations.setdefault(request.conversation or f"\0{request.id}", deque()).append(request)
    waiting = deque(conversations.values())
    going_on: deque[deque[Request]] = deque()
    order = []
    while waiting or going_on:
        while waiting and len(going_on) < at_once:
            going_on.append(waiting.popleft())
        turns = going_on.popleft()
        order.append(turns.popleft())
        if turns:
            going_on.append(turns)
    return order


def predecessors(requests: Sequence[Request]) -> list[int]:
    """For each request the number of the turn before it; -1 for a single request or the first turn."""
    last: dict[str | None, int] = {}
    before = []
    for number, request in enumerate(requests):
        before.append(last.get(request.conversation, -1))
        if request.conversation is not None:
            last[request.conversation] = number
    return before


def fresh(requests: Sequence[Request]) -> list[Request]:
    """The requests with chunks of their own, so that none occurs twice and nothing can be reused: what reuse costs then."""
    return [
        replace(request, chunks=tuple(replace(c, id=f"{n} {c.id}", text=f"{n} {c.text}") for c in request.chunks))
        for n, request in enumerate(requests)
    ]
