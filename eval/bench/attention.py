"""Attention of scattered tokens: how fast are ours, and how fast is what one would use without them?

    python -m eval.bench.attention [--contexts 8192 ...] [--batches 1 4 8] [--ratios 0.02 ...] [--out DIR] [--record [DIR]]
    python eval/bench/attention.py --device cpu --quick            everything once in a small size, without a GPU
    python -m eval.bench.attention --device cpu --arms             our layouts alone, over the whole grid

A layer of Llama-3-8B's shape (32 query and 8 KV heads of 128, bfloat16) over a paged KV pool, page size 1; the plan is timed
apart. `attention_arms` lists what is compared, `attention_cells` which tokens are recomputed, `attention_timing` how
times are taken. Every arm is checked against the float32 reference, on all rows of a small cell first and on some of every
cell; one that fails, is wrong or runs out of memory is left out with its reason: of all cells if it failed the first check.

Cell by cell into a run's folder: after --limit-s seconds no further cell is begun, and the same command with the same --out goes
on. Prints the tables; the last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: packages lie in the repository's root, and this folder is no place to import from
    sys.path[0] = str(Path(__file__).resolve().parents[2])
if __name__ == "__main__" and find_spec("torch") is None:
    sys.exit("attention needs torch: run it with .venv/bin/python (launch/setup.sh makes it)")

import torch

from eval.bench.attention_arms import Arm, arms_of
from eval.bench.attention_cells import PATTERNS, Cell, cells_of, make_requests, work_of
from eval.bench.attention_figures import summarize
from eval.bench.attention_plans import plan_figures
from eval.bench.attention_table import render
from eval.bench.attention_timing import Settings, Timer, check_arms, create_timer, measure_cell, measure_roof
from eval.errors import CommandError
from eval.record import RESULTS, make_record, write_record
from eval.run import Run, read_record
from sglang_chunkcache.attention.base import HeadShape
from sglang_chunkcache.attention.flashinfer_cuda import unsupported_shape

FULL: dict[str, Any] = {
    "contexts": [8192, 16_384, 32_768],
    "batches": [1, 4, 8],
    "ratios": [0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0],
    "repetitions": 20,
    "heads": [32, 8, 128],
    "dtype": "bfloat16",
}
QUICK: dict[str, Any] = {
    "contexts": [256, 512],
    "batches": [1, 2],
    "ratios": [0.05, 0.15, 1.0],
    "repetitions": 5,
    "heads": [8, 2, 64],
    "dtype": "bfloat16",
}
CHECKED = Cell("scattered", 640, 2, 0.15), Cell("clustered", 640, 2, 0.5)


class _LimitReached(Exception):
    """Cells are left for the same command to go on with."""


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, print; 2 for what cannot be, 130 where it was interrupted."""
    options = _parse(argv)
    try:
        return _run(options)
    except (CommandError, FileExistsError) as error:  # the latter: two records within a minute
        print(f"attention: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("attention: interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    settings = _settings(options)
    arms = _arms(options, settings)
    spec = {key: value for key, value in vars(options).items() if key != "limit_s"}
    cells = cells_of(options.patterns, options.contexts, options.batches, options.ratios)
    try:
        with Run(options.out, kind="attention", spec=spec, summarize=summarize) as run:
            _measure(run, cells, arms, settings, options.limit_s and started + options.limit_s)
    except _LimitReached:
        print(f"{options.limit_s:g} s are over: the same command with --out {options.out} goes on", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"the same command with --out {options.out} goes on", file=sys.stderr)
        raise
    record = read_record(options.out)
    if reason := unsupported_shape(settings.shape, page_size=settings.page_size):
        print(f"No table of plans, since our kernels cannot be used: {reason}.")
    print(render(record["results"], on_gpu=options.device == "cuda"))
    if options.record and record["complete"]:
        whole = make_record("attention", spec=spec, results=record["results"], git=record["git"])
        kept = write_record(whole, results_dir=options.record)
        shutil.copy(options.out / "samples.jsonl", kept)
        print("record:", kept)
    print(json.dumps(record["results"]))
    return 0


def _measure(run: Run, cells: Sequence[Cell], arms: Sequence[Arm], settings: Settings, deadline: float | None) -> None:
    missing = [cell for cell in cells if cell.name not in run]
    wrong: dict[str, str] = {}
    timer: Timer = create_timer(settings.device)
    if missing and arms:
        wrong = check_arms(CHECKED, arms, settings)
        number = sum(sample["kind"] == "roof" for sample in run.samples)
        run.add(f"roof/{number}", {"kind": "roof", **measure_roof(settings, timer)})
    for number, cell in enumerate(missing):
        if deadline is not None and time.monotonic() > deadline:
            raise _LimitReached
        requests = make_requests(cell, page_size=settings.page_size)
        whole = make_requests(cell, page_size=settings.page_size, whole=True)
        sample = {
            "kind": "cell",
            **vars(cell),
            "work": work_of(requests, settings.shape, page_size=settings.page_size),
            "dense_work": work_of(whole, settings.shape, page_size=settings.page_size),
            "plans": plan_figures(requests, settings.shape, page_size=settings.page_size),
            **(measure_cell(cell, arms, settings, timer, wrong) if arms else {"arms": {}, "failed": {}}),
        }
        run.add(cell.name, sample)
        print(f"{len(cells) - len(missing) + number + 1}/{len(cells)} {cell.name}", file=sys.stderr, flush=True)


def _settings(options: argparse.Namespace) -> Settings:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("no CUDA here; --device cpu goes through everything without it")
    num_qo_heads, num_kv_heads, head_dim = options.heads
    return Settings(
        shape=HeadShape(num_qo_heads, num_kv_heads, head_dim, getattr(torch, options.dtype)),
        device=torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"),
        page_size=options.page_size,
        warm_up=options.warm_up,
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
        prog="attention",
        usage="python -m eval.bench.attention [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    add("--dtype", choices=["bfloat16", "float16", "float32"])
    add("--page-size", type=int, default=1)
    add("--warm-up", type=int, default=2, help="repetitions before the measured ones")
    add("--repetitions", type=int, help="measured ones of each arm and cell")
    add("--limit-s", type=float, help="seconds after which no further cell is begun")
    add("--out", type=Path, metavar="DIR", help="new, or of the run to go on with (default: runs/<time>-attention)")
    add(
        "--record",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="DIR",
        help="where the record goes; default: eval/results/",
    )
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out = options.out or Path("runs") / f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-attention"
    if not all(0 < ratio <= 1 for ratio in options.ratios):
        parser.error("--ratios: expected numbers above 0, up to 1")
    numbers = [*options.contexts, *options.batches, *options.heads, options.page_size, options.repetitions]
    if min(numbers) < 1:
        parser.error("lengths, batches, heads, page size and repetitions: expected at least 1")
    if options.warm_up < 0:
        parser.error("--warm-up: expected at least 0")
    if options.heads[0] % options.heads[1]:
        parser.error("--heads: query heads are expected to be a multiple of KV heads")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
