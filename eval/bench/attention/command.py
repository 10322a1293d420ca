"""Attention of scattered tokens: how fast are ours, and how fast is what one would use without them?

    python -m eval bench attention [--contexts 8192 ...] [--batches 1 4 8] [--ratios 0.02 ...]
    python -m eval bench attention --device cpu --quick            everything once in a small size, without a GPU
    python -m eval bench attention --device cpu --arms             our layouts alone, over the whole grid

A layer of Llama-3-8B's shape (32 query and 8 KV heads of 128, bfloat16) over a paged KV pool, page size 1; the plan is timed
apart. `arms.py` lists what is compared, `cells.py` which tokens are recomputed, `eval/bench/timing.py` how times are taken.
Every arm is checked against the float32 reference, on all rows of a small cell first and on some of every cell; one that fails,
is wrong or runs out of memory is left out with its reason: of all cells if it failed the first check.

After --limit-s seconds no further cell is begun, and the same command with the same --out goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eval.bench.attention.arms import Arm, arms_of
from eval.bench.attention.cells import PATTERNS, Cell, cells_of, layouts_of, make_requests, work_of
from eval.bench.attention.figures import summarize
from eval.bench.attention.measure import Settings, check_arms, measure_cell, measure_roof
from eval.bench.timing import create_timer
from eval.errors import CommandError
from eval.outcome import add_out_option, open_run, tell
from eval.run import Run, Sample
from sglang_chunkcache.attention.base import HeadShape
from sglang_chunkcache.attention.flashinfer_cuda import unsupported_shape

FULL: dict[str, Any] = {
    "contexts": [8192, 16_384, 32_768],
    "batches": [1, 4, 8],
    "ratios": [0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0],
    "repetitions": 5,
    "heads": [32, 8, 128],
}
QUICK: dict[str, Any] = {
    "contexts": [256, 512],
    "batches": [1, 2],
    "ratios": [0.05, 0.15, 1.0],
    "repetitions": 3,
    "heads": [8, 2, 64],
}
CHECKED = Cell("scattered", 640, 2, 0.15), Cell("clustered", 640, 2, 0.5)


class _LimitReached(Exception):
    """Cells are left for the same command to go on with."""


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print."""
    options = _parse(argv)
    settings = _settings(options)
    arms = _arms(options, settings)
    if reason := unsupported_shape(settings.shape, page_size=settings.page_size):
        print(f"No layouts, since our kernels cannot be used: {reason}.")
    run = open_run("attention", options, summarize, without=("limit_s",))
    try:
        with run:
            _measure(run, options, arms, settings)
    except _LimitReached:
        print(f"{options.limit_s:g} s are over: the same command with --out {run.folder} goes on", file=sys.stderr)
    tell(run)
    return 0


def _measure(run: Run, options: argparse.Namespace, arms: Sequence[Arm], settings: Settings) -> None:
    started = time.monotonic()
    cells = cells_of(options.patterns, options.contexts, options.batches, options.ratios)
    missing = [cell for cell in cells if f"{cell.name}/work/0" not in run]
    timed = create_timer(settings.device)
    wrong: dict[str, str] = {}
    if missing and arms:
        wrong = check_arms(CHECKED, arms, settings)
        if "roof" not in run:
            about = {"arm": "roof", "cell": {}, "request": "0"}
            run.add("roof", {**about, "metrics": measure_roof(settings, timed)})
    for number, cell in enumerate(missing):
        if options.limit_s and time.monotonic() - started > options.limit_s:
            raise _LimitReached
        samples = [*_work(cell, settings), *(measure_cell(cell, arms, settings, timed, wrong) if arms else ())]
        run.add_all((f"{cell.name}/{one['arm']}/{one['request']}", one) for one in samples)
        print(f"{len(cells) - len(missing) + number + 1}/{len(cells)} {cell.name}", file=sys.stderr, flush=True)


def _work(cell: Cell, settings: Settings) -> Iterator[Sample]:
    """What has to be done in a cell, and what our layouts of it take."""
    about = {"cell": vars(cell), "request": "0", "device": settings.device.type}
    requests = make_requests(cell, page_size=settings.page_size)
    work = work_of(requests, settings.shape, page_size=settings.page_size)
    whole = make_requests(cell, page_size=settings.page_size, whole=True)
    dense = work_of(whole, settings.shape, page_size=settings.page_size)
    yield {"arm": "work", **about, "metrics": {**work, "dense_flops": dense["flops"], "dense_bytes": dense["bytes"]}}
    for kernel, found in layouts_of(requests, settings.shape, page_size=settings.page_size).items():
        yield {"arm": f"layout {kernel}", **about, "metrics": found}


def _settings(options: argparse.Namespace) -> Settings:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("no CUDA here; --device cpu goes through everything without it")
    num_qo_heads, num_kv_heads, head_dim = options.heads
    return Settings(
        shape=HeadShape(num_qo_heads, num_kv_heads, head_dim, getattr(torch, options.dtype)),
        device=torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"),
        page_size=options.page_size,
        repetitions=options.repetitions,
    )


def _arms(options: argparse.Namespace, settings: Settings) -> list[Arm]:
    arms = arms_of(settings.shape, device=settings.device, page_size=settings.page_size)
    if options.arms is None:
        return arms
    known = {arm.name: arm for arm in arms}
    if unknown := [name for name in options.arms if name not in known]:
        raise CommandError(f"--arms {' '.join(unknown)}: on {options.device} there are {', '.join(known)}")
    return [known[name] for name in known if name in options.arms]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval bench attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--quick", action="store_true", help="small sizes, where no flag says otherwise")
    add("--contexts", type=int, nargs="+", metavar="N", help="tokens of each request")
    add("--batches", type=int, nargs="+", metavar="N", help="requests")
    add("--ratios", type=float, nargs="+", metavar="R", help="share of the tokens that is recomputed, above 0 to 1")
    add("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    add("--arms", nargs="*", metavar="ARM", help="default: all of the device; none: layouts alone")
    add("--heads", type=int, nargs=3, metavar="N", help="query heads, KV heads, head size")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--page-size", type=int, default=1)
    add("--repetitions", type=int, help="of each arm and cell")
    add("--limit-s", type=float, help="seconds after which no further cell is begun")
    add_out_option(parser)
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not all(0 < ratio <= 1 for ratio in options.ratios):
        parser.error("--ratios: expected numbers above 0, up to 1")
    numbers = [*options.contexts, *options.batches, *options.heads, options.page_size, options.repetitions]
    if min(numbers) < 1:
        parser.error("lengths, batches, heads, page size and repetitions: expected at least 1")
    if options.heads[0] % options.heads[1]:
        parser.error("--heads: query heads are expected to be a multiple of KV heads")
    return options
