"""Time to first token and throughput under load: several ways to serve the same requests, interleaved.

    python -m eval serve --task trace --data my.jsonl --requests 60            a random model, ours against stock SGLang
    python -m eval serve --task mtrag --data DIR --model-path M --load poisson --rates 1 2 4 -- --mem-fraction-static 0.4
    python -m eval serve --arms a=http://host:8000 ours=http://host:30000,rag  servers that already run
    python -m eval serve --parameter window --task ragpulse --data DIR         one setting varied, by default as in the papers

One server per arm, all with the same model and flags. The requests are cut into blocks, and each block is sent to every arm, one
arm at a time, in rotating order; each arm keeps the cache that its own traffic filled. Cells of a sweep are measured one after
the other, with the caches flushed in between (of running servers: only with --flush). Cells that need servers of their own
(--windows, --thresholds) are interleaved, too.

--load closed keeps at most --clients requests in flight. With poisson, bursty (gaps Gamma, --burstiness times the variance) and
trace (the requests' own times) requests are sent at their arrival times, so waiting in the server's queue is part of the times. A
turn of a conversation waits for the previous answer. Every block begins with an idle server.

Time to first token is from when a request was due, including the client-side reordering of an arm that has one, to the first
event of the stream. With --bystanders N, N plain requests decode during each block, and the times between their tokens are
compared, too. The last line of stdout is the record's results as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from eval.errors import CommandError
from eval.outcome import text
from eval.record import model_sha256
from eval.run import Run, new_folder
from eval.serve.arms import add_arm_options, parse_arms
from eval.serve.latency import summarize
from eval.serve.options import (
    add_load_options,
    add_server_options,
    check_load_options,
    loads,
    make_plan,
    model_flags,
    split_flags,
)
from eval.serve.plan import Cell
from eval.serve.runner import check, load_facts, measure
from eval.serve.workload import fresh, interleave
from eval.task import Request, add_task_options, load_requests, requests_sha256


@dataclass(frozen=True)
class Parameter:
    """A preset of a sweep: `option` is the swept one; `values` and `arms` are defaults, () if the user must give them."""

    summary: str
    option: str
    values: tuple[float, ...]
    arms: tuple[str, ...]


POLICIES = ("no-cache", "stock-lpm", "craft", "ours")
PARAMETERS = {
    "rate": Parameter("requests per second (CRAFT fig. 13a)", "rates", (), POLICIES),
    "batch": Parameter("requests in flight (CRAFT fig. 13b)", "clients", (1, 2, 4, 8), POLICIES),
    "k": Parameter("chunks of a request (CRAFT fig. 13c)", "ks", (2, 5, 10), POLICIES),
    "window": Parameter(
        "requests that the access table counts (CRAFT fig. 14)", "windows", (10, 100, 1000, 10**6), ("craft", "ours")
    ),
    "threshold": Parameter("accesses that promote a chunk (CRAFT fig. 15)", "thresholds", (1, 2, 3, 5), ("craft",)),
    "ratio": Parameter(
        "share of moved tokens that is recomputed (FusionRAG, Cache-Craft)",
        "ratios",
        (0, 0.05, 0.15, 0.3, 0.5, 1),
        ("stock-lpm", "fused", "cacheblend", "epic"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print tables and the verdict; returns the exit code."""
    args = parse(argv)
    arms = parse_arms(args.arms)
    requests = {k: _requests(args, k) for k in args.ks or [args.k]}
    everything = [request for listed in requests.values() for request in listed]
    if args.history == "reference" and any(r.conversation is not None and r.reply is None for r in everything):
        raise CommandError(f"--history reference: task {args.task} has turns without a reply; use own")
    if args.load == "closed" and all(request.arrival_s is not None for request in everything):
        print("eval: --load closed does not use the requests' own times; --load trace does", file=sys.stderr)
    folder = args.out or new_folder("serve")
    facts = load_facts(folder)
    plan = make_plan(args, arms, min(map(len, requests.values())), facts=facts)
    made = cells(args, requests)
    check(plan, made)
    starts = any(arm.url is None for arm in arms)
    spec = vars(args) | {"requests_sha256": requests_sha256(everything)}
    spec["model_sha256"] = model_sha256(args.model_path) if starts else None
    figures = partial(summarize, facts=facts, against=args.against, arms=arms, cells=made)
    model: AbstractContextManager[Sequence[str]] = nullcontext(())
    if starts:
        model = model_flags(args, everything, args.server_flags)
    with Run(folder, kind="serve", spec=spec, summarize=figures, baseline=args.baseline) as taken, model as flags:
        measure(taken, replace(plan, server_flags=flags), made)
    results = taken.results()
    print(text(results["tables"], floatfmt=".3f"))
    compared = results["verdict"] or (["Nothing was compared."] if len(arms) > 1 else [])
    print(*compared, f"record: {folder}", json.dumps(results), sep="\n")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The checked options; `server_flags` holds the flags after `--`. Raises CommandError."""
    argv, flags = split_flags(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    args.server_flags = flags
    if args.parameter is not None:
        args = parser.parse_args([*_preset(args, has_load="--load" in argv), *argv], args)
    elif args.values:
        raise CommandError("--values needs --parameter")
    check_load_options(args)
    arms = parse_arms(args.arms)
    if (args.windows or args.thresholds) and not any(arm.is_ours for arm in arms):
        option = "windows" if args.windows else "thresholds"
        raise CommandError(f"--{option} needs an arm that starts a server with our cache among --arms")
    if args.ratios and not any(arm.is_fused for arm in arms):
        raise CommandError("--ratios needs an arm that moves KV, such as fused, among --arms")
    names = [arm.name for arm in arms]
    args.against = args.against or ("stock-lpm" if "stock-lpm" in names else names[0])
    if args.against not in names:
        raise CommandError(f"--against {args.against} is not one of the arms: {', '.join(names)}")
    return args


def cells(args: argparse.Namespace, requests: Mapping[int | None, Sequence[Request]]) -> list[Cell]:
    """Every combination of the swept options; `requests` by their number of chunks, that of --ks or --k."""
    made = []
    for (label, load), k, window, threshold, ratio in itertools.product(
        loads(args), requests, args.windows or [None], args.thresholds or [None], args.ratios or [None]
    ):
        swept = {"k": k if args.ks else None, "window": window, "threshold": threshold, "ratio": ratio}
        knobs = {"--chunkcache-window-requests": window, "--chunkcache-promotion-threshold": threshold}
        made.append(
            Cell(
                label={**label, **{name: value for name, value in swept.items() if value is not None}},
                requests=requests[k],
                load=load,
                flags=tuple(str(x) for flag, value in knobs.items() if value is not None for x in (flag, value)),
                reuse={"ratio": ratio} if ratio is not None else {},
            )
        )
    return made


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arm_options(parser, default=["stock-lpm", "ours"])
    parser.add_argument("--against", metavar="ARM", help="the arm to compare with (default: stock-lpm, or the first)")
    add_task_options(parser)
    add_load_options(parser)
    group = parser.add_argument_group("sweeps: every combination is a cell")
    group.add_argument("--ks", type=int, nargs="+", metavar="K", help="chunks per request")
    group.add_argument("--windows", type=int, nargs="+", metavar="N", help="--chunkcache-window-requests")
    group.add_argument("--thresholds", type=int, nargs="+", metavar="N", help="--chunkcache-promotion-threshold")
    group.add_argument("--ratios", type=float, nargs="+", metavar="R", help="share recomputed, of arms that move KV")
    presets = "; ".join(f"{name}: {preset.summary}, as --{preset.option}" for name, preset in PARAMETERS.items())
    group.add_argument("--parameter", choices=PARAMETERS, help=f"one sweep with the arms it applies to: {presets}")
    group.add_argument("--values", nargs="+", metavar="V", help="of --parameter (default: the papers')")
    add_server_options(parser)
    return parser


def _preset(args: argparse.Namespace, *, has_load: bool) -> list[str]:
    """The options that --parameter stands for; those on the command line come after them and win."""
    preset = PARAMETERS[args.parameter]
    values = args.values or [f"{value:g}" if value % 1 else str(int(value)) for value in preset.values]
    if not values:
        raise CommandError(f"--parameter {args.parameter} needs --values: {preset.summary}")
    open_loop = ["--load", "poisson"] if args.parameter == "rate" and not has_load else []
    return ["--arms", *preset.arms, *open_loop, f"--{preset.option}", *values]


def _requests(args: argparse.Namespace, k: int | None) -> list[Request]:
    requests = load_requests(argparse.Namespace(**{**vars(args), "k": k}))
    requests = fresh(requests) if args.fresh else requests
    if args.load == "trace":
        return requests
    return interleave(requests, args.conversations or (max(args.clients) if args.load == "closed" else 8))
