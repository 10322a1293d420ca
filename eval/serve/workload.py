"""When requests are sent: arrival times as a pure function of a load and a seed, and the cutting into blocks.

| kind | a request leaves |
|---|---|
| closed | when one of `clients` is free: at most so many are in flight |
| poisson | at its time, gaps exponential with mean 1 / `rate` |
| bursty | at its time, gaps Gamma with mean 1 / `rate` and `burstiness` times the variance of poisson's |
| trace | at its `arrival_s` / `speed` |

All but closed are open loops: a slow server gets the next request all the same, so waiting in its queue is measured.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from eval.errors import CommandError

if TYPE_CHECKING:
    from eval.task import Request

Kind = Literal["closed", "poisson", "bursty", "trace"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive. Each number counts for the kinds that the table names it for."""

    kind: Kind = "closed"
    clients: int = 1
    rate: float = 1.0
    """Requests per second, on average."""
    burstiness: float = 4.0
    """Variance of the gaps over that of poisson's with the same rate: 1 is poisson, more comes in bursts, less is more even."""
    speed: float = 1.0
    """A trace's seconds per second."""

    def __post_init__(self) -> None:
        for name in ("clients", "rate", "burstiness", "speed"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CommandError(f"{name} must be a finite number above 0 but is {getattr(self, name)}")


def arrivals(load: Load, times: Sequence[float | None], *, seed: int) -> list[float] | None:
    """Seconds from the first request's arrival to each one's, never falling; None for a closed loop.

    Args:
        load: kind and numbers.
        times: `arrival_s` of each request; only a trace's are read.
        seed: the same seed gives the same arrivals, and a longer list begins with the shorter one.
    Raises:
        CommandError: a trace's load with a request that has no time, or times that fall.
    """
    if load.kind == "closed":
        return None
    if load.kind == "trace":
        return _traced(times, load.speed)
    shape = 1.0 if load.kind == "poisson" else 1 / load.burstiness
    rng = random.Random(f"arrivals {seed}")
    offsets, now = [], 0.0
    for _ in times:
        offsets.append(now)
        now += rng.gammavariate(shape, 1 / (shape * load.rate))
    return offsets


def cut(count: int, *, warm_up: int, block: int) -> list[range]:
    """The numbers 0 to count - 1 as blocks of at most `block` (0: as many as there are); none holds both sides of `warm_up`."""
    warm_up = min(warm_up, count)
    edges = [0, *range(block, warm_up, block), warm_up, *range(warm_up + block, count, block), count] if block else []
    edges = edges or [0, warm_up, count]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def interleave(requests: Sequence[Request], at_once: int) -> list[Request]:
    """The requests with `at_once` conversations going on at a time, one turn of each in turn, as a server sees its users.

    A request without a conversation is one of a single turn. Turns stay in order; 1 leaves the list as it is, if a
    conversation's turns stand together there.
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


def _traced(times: Sequence[float | None], speed: float) -> list[float]:
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        raise CommandError("--load trace needs requests with arrival times (arrival_s); take closed, poisson or bursty")
    if any(late < early for early, late in itertools.pairwise(known)):
        raise CommandError("--load trace: arrival times fall; sort the trace by them")
    return [(time - known[0]) / speed for time in known]
