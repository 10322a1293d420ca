"""Time to first token and throughput under load: several ways to serve the same requests,
interleaved.

    python -m eval serve --task trace --data my.jsonl     a random model, ours against stock SGLang
    ... --task mtrag --data DIR --model-path M --load poisson --rates 1 2 4 -- --dtype bfloat16
    ... --arms a=http://host:8000 b=http://host:30000,rag    servers that already run
    ... --windows 10 100 1000 --task ragpulse --data DIR     one setting varied
    ... --restart --arms fused --warm-up 300 --requests 400  a filled storage after a restart

One server per arm, all with the same model and flags. The requests are cut into blocks, and each
block is sent to every arm, one arm at a time, in rotating order; each arm keeps the cache that its
own traffic filled. Cells of a sweep are measured one after the other, with the caches flushed in
between (of running servers: only with --flush). Cells that need servers of their own (--windows,
--thresholds) are interleaved, too. Two servers with the same flags may differ by some hundredths
for as long as they run, which no interval of one pair shows: --servers 2 measures two of each arm.

--load closed keeps at most --clients requests in flight. With poisson and trace (the requests' own
times) requests are sent at their arrival times, so waiting in the server's queue is part of the
times. A turn of a conversation waits for the previous answer. Every block begins with an idle
server.

Time to first token is from when a request was due, including the client-side reordering of an arm
that has one, to the first event of the stream. With --bystanders N, N plain requests decode during
each block, and the times between their tokens are compared, too. The last line of stdout is the
record's results as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.metrics import MIN_BLOCKS
from eval.outcome import text
from eval.random_model import SHAPES
from eval.record import model_sha256
from eval.replay.overlap import Recurrence
from eval.run import Run, new_folder
from eval.serve.arms import HOST_MIB, Arm, add_arm_options, parse_arms
from eval.serve.latency import summarize
from eval.serve.options import DEFAULT_PARAMS, model_flags, split_flags
from eval.serve.plan import SERVER, Cell, Plan
from eval.serve.restart import measure_restart
from eval.serve.runner import load_facts, measure
from eval.serve.server_pool import key_of
from eval.serve.workload import Load, arrivals, days, fresh, interleave
from eval.task import Request, add_task_options, load_requests, requests_sha256
from radix_ext import ChunkId
from retrieval.command_line import Parser

LOADS = {"closed": "clients", "poisson": "rate", "trace": "speed"}
"""Kind of load -> its option, by default 1."""
AT_ONCE = 8
"""Conversations that take turns in an open loop; in a closed one as many as clients."""
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("warm_up", "block", "bystanders"), (0, inf)),
    **dict.fromkeys(
        ("max_new_tokens", "threads", "max_total_tokens", "servers", "host_mib"), (1, inf)
    ),
    **dict.fromkeys(("clients", "ks"), (1, 10_000)),
    **dict.fromkeys(("rate", "speed"), (1e-6, 1e9)),
    "windows": (1, 10**9),
    "thresholds": (1, 10**6),
    "ratios": (0.0, 1.0),
}
"""Least and most of the options."""


def main(argv: Sequence[str]) -> int:
    """Measure, print tables and the verdict; returns the exit code."""
    args, arms = parse(argv)
    requests = {k: _requests(args, k) for k in args.ks or [args.k]}
    everything = [request for listed in requests.values() for request in listed]
    if args.load == "closed" and all(request.arrival_s is not None for request in everything):
        print(
            "eval: --load closed does not use the requests' own times; --load trace does",
            file=sys.stderr,
        )
    folder = args.out or new_folder("serve")
    # one dict for plan and summary: what `measure` fills in is in the results
    facts = load_facts(folder)
    recurrence = {k: Recurrence() for k in requests}
    for k, listed in requests.items():
        for request in listed:
            recurrence[k].step([ChunkId(chunk.id) for chunk in request.chunks])
    facts["density"] = [{"chunks": k, "first": each.density} for k, each in recurrence.items()]
    plan = make_plan(args, arms, min(map(len, requests.values())), facts=facts)
    made = cells(args, requests)
    if args.restart and (len(made) > 1 or any(request.conversation for request in everything)):
        raise CommandError("--restart measures one cell, of requests without conversations")
    # before a folder is created or a server is started
    for cell, arm in itertools.product(made, arms):
        arrivals(cell.load, [request.arrival_s for request in cell.requests], seed=plan.seed)
        key_of(arm, cell)
    starts = any(arm.url is None for arm in arms)
    # else a run could go on with a data set or a model that has changed under its name
    spec = vars(args) | {"requests_sha256": requests_sha256(everything)}
    spec["model_sha256"] = model_sha256(args.model_path) if starts else None
    figures = partial(summarize, facts=facts, against=args.against)
    model: AbstractContextManager[list[str]] = nullcontext([])
    if starts:
        model = model_flags(args, everything, args.server_flags)
    with (
        Run(folder, kind="serve", spec=spec, summarize=figures, baseline=args.baseline) as taken,
        model as flags,
    ):
        (measure_restart if args.restart else measure)(
            taken, replace(plan, server_flags=flags), made
        )
    results = taken.results()
    print(text(results["tables"], floatfmt=".3f"))
    print(*results["verdict"], f"record: {folder}", json.dumps(results), sep="\n")
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Arm]]:
    """The checked options and arms; `server_flags` holds the flags after `--`.
    Raises CommandError."""
    # taken off first: the parser has no positional arguments and would refuse them
    argv, flags = split_flags(argv)
    args = _parser().parse_args(argv)
    args.server_flags = flags
    for name, (least, most) in RANGES.items():
        given = getattr(args, name)
        values = given if isinstance(given, list) else [given]
        if wrong := [value for value in values if value is not None and not least <= value <= most]:
            raise CommandError(
                f"--{name.replace('_', '-')}: {wrong[0]} is not between {least:,} and {most:,}"
            )
        if len(set(values)) < len(values):
            raise CommandError(f"--{name}: a value is given twice: {' '.join(map(str, values))}")
    # an option that does nothing is refused, else its value would stand in the record
    for kind, name in LOADS.items():
        if args.load != kind and getattr(args, name) is not None:
            raise CommandError(f"--{name} needs --load {kind}")
    arms = parse_arms(args.arms)
    if args.host_mib and "ours-host" not in args.arms:
        raise CommandError("--host-mib is for the arm ours-host, which is not among --arms")
    if args.host_mib:
        arms = [
            replace(arm, flags=(*arm.flags, HOST_MIB, str(args.host_mib)))
            if arm.name == "ours-host"
            else arm
            for arm in arms
        ]
    if args.servers > 1 and (running := [arm.name for arm in arms if arm.url is not None]):
        raise CommandError(
            f"--servers {args.servers} starts servers, but {', '.join(running)} runs already"
        )
    if (args.windows or args.thresholds) and not any(arm.is_ours for arm in arms):
        raise CommandError(
            "--windows and --thresholds need an arm that starts a server with our cache among"
            " --arms"
        )
    if args.restart and (len(arms) != 1 or not arms[0].is_ours):
        raise CommandError(
            "--restart measures one arm that starts a server with our cache: --arms ours, or --arms"
            " fused"
        )
    if args.restart and not args.warm_up:
        raise CommandError("--restart needs --warm-up N: the requests that fill the storage")
    if args.ratios and not any(arm.is_fused for arm in arms):
        raise CommandError("--ratios needs an arm that moves KV, such as fused, among --arms")
    # as `with_storage` names the arm on an empty storage
    names = [f"{arms[0].name}-cold"] if args.restart else [arm.name for arm in arms]
    args.against = args.against or ("stock-lpm" if "stock-lpm" in names else names[0])
    if args.against not in names:
        raise CommandError(f"--against {args.against} is not one of the arms: {', '.join(names)}")
    return args, arms


def make_plan(
    args: argparse.Namespace, arms: Sequence[Arm], num_requests: int, **more: Any
) -> Plan:
    """The plan that the options select; `more`: its other fields."""
    measured = num_requests - args.warm_up
    if measured < 1:
        raise CommandError(
            f"--warm-up {args.warm_up} leaves none of {num_requests} requests to measure; send"
            " more, or fewer to warm up"
        )
    block = (
        _default_block(args, max(1, measured // MIN_BLOCKS)) if args.block is None else args.block
    )
    blocks = -(-measured // block) if block else 1
    # told before the load, which may take an hour and could end without a verdict
    if blocks < MIN_BLOCKS and len(arms) > 1:
        enough = (
            f"--requests >= {args.warm_up + MIN_BLOCKS * block}" if block else "another --block"
        )
        print(
            f"eval: too few blocks for a verdict: {blocks}, less than {MIN_BLOCKS}; give {enough}",
            file=sys.stderr,
        )
    # options that the plan takes have its fields' names
    given = {
        field.name: getattr(args, field.name) for field in fields(Plan) if hasattr(args, field.name)
    }
    body = {"ignore_eos": True} if args.ignore_eos else {}
    return Plan(**{**given, "arms": arms, "block": block, "body": body, **more})


def cells(args: argparse.Namespace, requests: Mapping[int | None, Sequence[Request]]) -> list[Cell]:
    """Every combination of the swept options;
    `requests` by their number of chunks, that of --ks or --k."""
    made, option = [], LOADS[args.load]
    given = getattr(args, option)
    values = given if isinstance(given, list) else [given or 1]
    servers = range(1, args.servers + 1) if args.servers > 1 else [None]
    for value, k, window, threshold, ratio, server in itertools.product(
        values,
        requests,
        args.windows or [None],
        args.thresholds or [None],
        args.ratios or [None],
        servers,
    ):
        # one value is no label: runs without a sweep can be compared whatever their load
        swept = {option: value if len(values) > 1 else None, "k": k if args.ks else None}
        swept |= {"window": window, "threshold": threshold, "ratio": ratio, SERVER: server}
        knobs = {
            "--chunkcache-window-requests": window,
            "--chunkcache-promotion-threshold": threshold,
        }
        made.append(
            Cell(
                label={name: value for name, value in swept.items() if value is not None},
                requests=requests[k],
                load=Load(args.load, **{option: value}),
                flags=tuple(
                    str(x)
                    for flag, value in knobs.items()
                    if value is not None
                    for x in (flag, value)
                ),
                reuse={"ratio": ratio} if ratio is not None else {},
            )
        )
    return made


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arm_options(parser, default=["stock-lpm", "ours"])
    parser.add_argument(
        "--against",
        metavar="ARM",
        help="the arm to compare with (default: stock-lpm, or the first)",
    )
    add_task_options(parser)
    _add_load_options(parser)
    add = parser.add_argument_group("sweeps: every combination is a cell").add_argument
    add("--ks", type=int, nargs="+", metavar="K", help="chunks per request")
    add("--windows", type=int, nargs="+", metavar="N", help="--chunkcache-window-requests")
    add("--thresholds", type=int, nargs="+", metavar="N", help="--chunkcache-promotion-threshold")
    add(
        "--ratios",
        type=float,
        nargs="+",
        metavar="R",
        help="share recomputed, of arms that move KV",
    )
    add = parser.add_argument_group(
        "servers that are started; flags for all of them come after --"
    ).add_argument
    add("--model-path", default="random", metavar="M", help="a model, bundled, or random (default)")
    add(
        "--params",
        type=int,
        choices=sorted(SHAPES),
        default=DEFAULT_PARAMS,
        help="random: millions of parameters",
    )
    add(
        "--servers",
        type=int,
        default=1,
        metavar="N",
        help="of each arm, side by side: its times are their means (default: 1)",
    )
    add("--threads", type=int, default=2, help="threads of each server, without a GPU (default: 2)")
    add(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="KV pool (default: SGLang's; random: 40000)",
    )
    add(
        "--host-mib",
        type=int,
        metavar="N",
        help="exact chains in host memory, of the arm ours-host (default: 1024)",
    )
    text = (
        "measure ARM after a restart on the storage that the warm-up requests have filled, against"
        " an empty one"
    )
    add("--restart", action="store_true", help=text)
    add(
        "--flush",
        action="store_true",
        help="also empty the caches of NAME=URL servers before every cell",
    )
    add = parser.add_argument_group("the run").add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new folder, or that of a run to continue (default: runs/<date>)",
    )
    add("--baseline", metavar="RECORD", help="name of the record to compare this one with")
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--load", choices=LOADS, default="closed", help="when requests are sent; see above")
    add(
        "--clients",
        type=int,
        nargs="+",
        metavar="N",
        help="closed: requests in flight; several: swept (default: 1)",
    )
    rates = "poisson: requests per second; several: swept (default: 1)"
    add("--rates", "--rate", dest="rate", type=float, nargs="+", metavar="R", help=rates)
    add("--speed", type=float, help="trace: seconds of the trace per second (default: 1)")
    add(
        "--max-new-tokens",
        type=int,
        help="maximum length of an answer (default: the trace's, else 8)",
    )
    add("--ignore-eos", action="store_true", help="answers of exactly that length (SGLang, vLLM)")
    add(
        "--warm-up",
        type=int,
        default=10,
        metavar="N",
        help="first requests, not measured (default: 10)",
    )
    block = (
        "requests per block; 0: all. Default: 10, or fewer for at least 8 blocks; with several"
        " clients at least 4 for each, in an open loop at least 20, because concurrency, rate and"
        " queue build up within a block only"
    )
    add("--block", type=int, metavar="N", help=block)
    add(
        "--bystanders",
        type=int,
        default=0,
        metavar="N",
        help="plain requests that decode during blocks (default: 0)",
    )
    add(
        "--peaks",
        action="store_true",
        help="also requests at once, and tokens and rows of the KV pool in use, at most; how many"
        " requests were retracted. Asking takes the servers some time",
    )
    add(
        "--fresh",
        action="store_true",
        help="make every chunk unique: the costs if nothing can be reused",
    )
    add(
        "--days",
        choices=("documents", "prompt"),
        help="the requests three times, each time with other documents, or another system prompt",
    )


def _requests(args: argparse.Namespace, k: int | None) -> list[Request]:
    requests = load_requests(argparse.Namespace(**{**vars(args), "k": k}))
    requests = fresh(requests) if args.fresh else requests
    # a trace's order is that of its times
    if args.load == "trace":
        if args.days:
            raise CommandError("--days goes without --load trace: the days have no times")
        return requests
    at_once = max(args.clients or [1]) if args.load == "closed" else AT_ONCE
    requests = interleave(requests, at_once)
    return days(requests, args.days) if args.days else requests


def _default_block(args: argparse.Namespace, eighth: int) -> int:
    """A block short enough for 8 blocks, but long enough for rate,
    queue and concurrency to build up within it."""
    if args.load != "closed":
        # 20, though blocks are fewer then: a queue begins anew in each block
        return max(20, eighth)
    # with one client nothing builds up, so a block may be one request
    clients = max(args.clients or [1])
    return max(min(10, eighth), 4 * clients if clients > 1 else 1)
