"""Attention of scattered tokens: how fast are ours, and how fast is what one would use without
them?

    python -m eval bench attention [--contexts 8192 ...] [--batches 1 4 8] [--ratios 0.02 ...]
    python -m eval bench attention --device cpu --quick   everything small, without a GPU
    python -m eval bench attention --device cpu --arms    our layouts alone, over the whole grid

A layer of Llama-3-8B's shape (32 query and 8 KV heads of 128, bfloat16) over a paged KV pool, page
size 1; the plan is timed apart. `arms.py` lists what is compared, `cells.py` which tokens are
recomputed, `eval/bench/rounds.py` how times are taken. Every arm is checked against the float32
reference on some rows of every cell; one that fails, is wrong or runs out of memory is left out of
the cell with its reason.

After --limit-s seconds no further cell is begun, and the same command with the same --out goes on.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.bench.attention.arms import Arm, arms_of
from eval.bench.attention.cells import Cell, cells_of, layouts_of, make_requests, pairs_of
from eval.bench.attention.figures import summarize
from eval.bench.rounds import Take, Timer, create_timer, take_rounds
from eval.errors import CommandError
from eval.outcome import add_out_option, open_run, tell
from eval.run import Run, Sample
from retrieval.command_line import Parser
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.reference import attend

FULL: dict[str, Any] = {
    "contexts": [8192, 16_384, 32_768],
    "batches": [1, 4, 8],
    "ratios": [0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0],
    "repetitions": 5,
}
QUICK: dict[str, Any] = {
    "contexts": [256, 512],
    "batches": [1, 2],
    "ratios": [0.05, 0.15, 1.0],
    "repetitions": 3,
}
SHAPE, QUICK_SHAPE = HeadShape(32, 8, 128, torch.bfloat16), HeadShape(8, 2, 64, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
"""Absolute and relative, against float32: what rounding inputs of length 1 and outputs leaves."""
CHECKED_ROWS = 8
"""Of each request at least, evenly over its queries, the last one among them."""
PLAN_REPEATS = 3


class Prepared:
    """An arm that is planned for a cell, has its KV and queries, and is right.

    Raises (on creation):
        ValueError: it differs from the reference.
    """

    def __init__(self, arm: Arm, cell: Cell, shape: HeadShape, device: torch.device) -> None:
        self._shape, self._attention = shape, arm.make()
        self._requests = make_requests(cell, whole=arm.whole, contiguous=arm.contiguous)
        times = []
        # the first plan may compile and allocate: the median leaves it out
        for _ in range(PLAN_REPEATS):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            order = self._attention.plan(self._requests)
            times.append(time.perf_counter() - start)
        self.figures = {"plan_s": median(times), **getattr(self._attention, "figures", {})}
        generator = torch.Generator(device).manual_seed(0)
        num_queries = sum(request.positions.numel() for request in self._requests)
        kv_size, query_size = (
            (cell.batch * cell.context, shape.num_kv_heads),
            (num_queries, shape.num_qo_heads),
        )
        self._keys, self._values, self._queries = (
            torch.randn(
                *size, shape.head_dim, dtype=shape.dtype, device=device, generator=generator
            )
            for size in (kv_size, kv_size, query_size)
        )
        self._order = (
            torch.arange(num_queries, device=device) if order is None else order.to(device)
        )
        self._check()
        # once, not in each run: `run` gets its queries in the plan's order
        self._queries = self._queries[self._order]

    def run(self) -> Tensor:
        """One layer."""
        return self._attention.run(self._queries, self._keys, self._values)

    def _check(self) -> None:
        out = self._attention.run(self._queries[self._order], self._keys, self._values)
        # back in the requests' order, which the reference has
        out = torch.empty_like(out).index_copy_(0, self._order, out)
        start, chosen, asked = 0, [], []
        for request in self._requests:
            count = request.positions.numel()
            # counted from the end: the last query, which sees most keys, is among them
            step = torch.arange(count - 1, -1, -max(1, count // CHECKED_ROWS)).flip(0)
            chosen.append(start + step)
            asked.append(SparseRequest(request.positions[step], request.kv_slots))
            start += count
        rows, scale = torch.cat(chosen).to(out.device), self._shape.head_dim**-0.5
        expected, _ = attend(self._queries[rows], self._keys, self._values, asked, scale=scale)
        difference = (out[rows].float() - expected).abs()
        allowed = TOLERANCES[self._shape.dtype] * (1 + expected.abs())
        if not bool((difference <= allowed).all()):  # NaN is no agreement either
            raise ValueError(
                f"wrong: differs from the reference by up to {float(difference.max()):.2g}"
            )


def measure_cell(
    run: Run,
    cell: Cell,
    arms: Mapping[str, Arm],
    num_rounds: int,
    shape: HeadShape,
    device: torch.device,
) -> None:
    """Add the rounds of the arms that are right;
    then the work, our layouts, and an `error` of each arm that failed."""
    timed = create_timer(device)
    takes, failed = dict[str, Take](), dict[str, str]()
    for name, arm in arms.items():
        try:
            takes[name] = partial(_take, Prepared(arm, cell, shape, device), timed)
        # whatever a library raises costs its arm this cell, not the others
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            failed[name] = (
                "out of memory"
                if isinstance(error, torch.OutOfMemoryError)
                else text.splitlines()[0][:200]
            )
            if device.type == "cuda":
                # raises where the device is lost with the arm: leave it out by --arms
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
    if takes:
        take_rounds(run, vars(cell), takes, num_rounds)
    work: dict[str, Mapping[str, float]] = {"work": _work(cell, shape)}
    work |= {
        f"layout {kernel}": found
        for kernel, found in layouts_of(make_requests(cell), shape).items()
    }
    about: Sample = {"cell": vars(cell), "request": "0", "device": device.type}
    run.add_all(
        (f"{cell}/{arm}", {"arm": arm, **about, "metrics": metrics})
        for arm, metrics in work.items()
    )
    run.add_all(
        (f"{cell}/{arm}", {"arm": arm, **about, "metrics": {}, "error": why})
        for arm, why in failed.items()
    )


def _take(prepared: Prepared, timed: Timer, number: int) -> Sample:
    return {"metrics": {"layer_s": timed(prepared.run), **prepared.figures}}


def _work(cell: Cell, shape: HeadShape) -> dict[str, float]:
    """Query-key pairs, their FLOPs, and those of dense prefill."""
    pairs, all_pairs = (pairs_of(make_requests(cell, whole=whole)) for whole in (False, True))
    flops = 4 * shape.head_dim * shape.num_qo_heads
    return {"pairs": pairs, "flops": flops * pairs, "dense_flops": flops * all_pairs}


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print."""
    options = _parse(argv)
    shape, device = QUICK_SHAPE if options.quick else SHAPE, torch.device(options.device)
    # raises without CUDA, before a folder is made
    create_timer(device)
    arms = arms_of(shape, device)
    if options.arms is not None:
        if unknown := [name for name in options.arms if name not in arms]:
            raise CommandError(
                f"--arms {' '.join(unknown)}: on {options.device} there are {', '.join(arms)}"
            )
        arms = {name: arm for name, arm in arms.items() if name in options.arms}
    run = open_run("attention", options, summarize, without=("limit_s",))
    started, limit_s = time.monotonic(), options.limit_s or math.inf
    try:
        with run:
            for cell in cells_of(options.contexts, options.batches, options.ratios):
                if f"{cell}/work" not in run:
                    if time.monotonic() - started > limit_s:
                        # raised inside the run: its record is then not complete, and it can go on
                        raise _LimitReached
                    measure_cell(run, cell, arms, options.repetitions, shape, device)
    except _LimitReached:
        print(
            f"{limit_s:g} s are over: the same command with --out {run.folder} goes on",
            file=sys.stderr,
        )
    tell(run)
    return 0


class _LimitReached(Exception):
    """Cells are left for the same command to go on with."""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add(
        "--quick",
        action="store_true",
        help="a small shape, and small sizes where no flag says otherwise",
    )
    add("--contexts", type=int, nargs="+", metavar="N", help="tokens of each request")
    add("--batches", type=int, nargs="+", metavar="N", help="requests")
    add(
        "--ratios",
        type=float,
        nargs="+",
        metavar="R",
        help="share of the tokens that is recomputed, above 0 to 1",
    )
    add("--arms", nargs="*", metavar="ARM", help="default: all of the device; none: layouts alone")
    add("--repetitions", type=int, metavar="N", help="of each arm and cell, after a warm-up")
    add("--limit-s", type=float, help="seconds after which no further cell is begun")
    add_out_option(parser)
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not all(0 < ratio <= 1 for ratio in options.ratios):
        parser.error("--ratios: expected numbers above 0, up to 1")
    return options
