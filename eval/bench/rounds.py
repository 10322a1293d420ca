"""What the benches share: rounds in which each arm is measured once, samples by cell,
and times of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from eval.errors import CommandError
from eval.outcome import Row, interval
from eval.progress import tracked
from eval.recorded import cell_name, grouped
from eval.run import Run, Sample
from eval.stats import contrast

if TYPE_CHECKING:
    import torch

Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call."""
Take = Callable[[int], Mapping[str, Any]]
"""An arm: the number of a round -> the rest of its sample."""
WARM_UP_MS, REP_MS = 1, 20
"""Short, since a bench repeats all of its arms in turn;
the median of the calls within them is one measured time."""


def take_rounds(
    run: Run, cell: Mapping[str, Any], arms: Mapping[str, Take], num_rounds: int
) -> None:
    """Take the rounds of a cell that the run lacks, each written at once;
    round 0 is a warm-up, `num_rounds` follow. A round that lacks one of the arms is taken anew."""
    name = cell_name(cell)
    keys = [{arm: f"{name}/{n}/{arm}" for arm in arms} for n in range(num_rounds + 1)]
    missing = [n for n, of in enumerate(keys) if not all(key in run for key in of.values())]
    run.drop([key for n in missing for key in keys[n].values()])
    for number in tracked(name, missing):
        taken = {arm: arms[arm](number) for arm in turned(list(arms), number)}
        # `request` pairs the arms of a round: machine noise that lasts longer hits all of them
        about = {"cell": dict(cell), "request": str(number), "warm_up": not number}
        run.add_all((key, {"arm": arm, **about, **taken[arm]}) for arm, key in keys[number].items())


def turned(arms: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: each arm is first once in every `len(arms)` rounds,
    and odd rounds run backwards."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if number % 2 == 0 else order[::-1]


def by_cell(samples: Sequence[Sample]) -> Iterator[tuple[Row, dict[str, list[Sample]]]]:
    """Each cell and its samples by arm, without warm-up;
    arms in the order of their first samples."""
    for cell, taken in grouped(
        [one for one in samples if not one.get("warm_up")], itemgetter("cell")
    ):
        # a cell's rounds are written in order, so samples of two arms pair by their places
        yield cell, dict(grouped(taken, itemgetter("arm")))


def ratio(base: Sequence[Sample], taken: Sequence[Sample], metric: str) -> dict[str, Any]:
    """The contrast of medians of the base over those of an arm, over rounds that have both:
    above 1, the arm is faster."""
    return contrast(
        [(a["metrics"][metric], b["metrics"][metric]) for a, b in zip(base, taken, strict=True)]
    )


def told_ratio(
    base: Sequence[Sample], taken: Sequence[Sample], metric: str, digits: int = 3
) -> str:
    """`ratio` with its interval as text."""
    return interval(ratio(base, taken, metric), digits)


def create_timer(device: torch.device) -> Timer:
    """Work on CUDA by `triton.testing.do_bench` (events, L2 overwritten before each call),
    elsewhere by wall time.

    Raises CommandError without CUDA if it is asked for.
    """
    import torch

    if device.type != "cuda":
        return _wall_s
    if not torch.cuda.is_available():
        raise CommandError(
            "there is no CUDA device; --device cpu goes through everything without it"
        )
    from triton.testing import do_bench

    return lambda work: (
        # `do_bench` counts in milliseconds
        float(do_bench(work, warmup=WARM_UP_MS, rep=REP_MS, return_mode="median")) / 1000
    )


def _wall_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
