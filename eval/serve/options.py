"""Options of the commands that put servers under load, and the objects made from them: model flags, load, plan."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, get_args

from eval.errors import CommandError
from eval.random_model import SHAPES, write_random_model
from eval.serve.arms import Arm
from eval.serve.plan import History, Plan
from eval.serve.workload import KINDS, Load
from eval.stats import MIN_BLOCKS
from eval.task import Request

DEFAULT_PARAMS = 10
"""Size of the random model, with which two arms and 60 requests take two minutes on two cores."""

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("warm_up", "block", "resume_warm_up", "bystanders"), (0, inf)),
    **dict.fromkeys(("max_new_tokens", "threads", "max_servers", "max_total_tokens", "conversations"), (1, inf)),
    **dict.fromkeys(("clients", "ks"), (1, 10_000)),
    "windows": (1, 10**9),
    "thresholds": (1, 10**6),
    "ratios": (0.0, 1.0),
    "rate": (0.0, inf),
}
"""Least and most of the options; `workload` checks rates further."""


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for arrival times, blocks and history."""
    add = parser.add_argument_group("load").add_argument
    add("--load", choices=KINDS, default="closed", help="when requests are sent; see above")
    clients = "closed: requests in flight, swept if several (default: 1)"
    add("--clients", type=int, nargs="+", metavar="N", help=clients)
    rates = "poisson, bursty: requests per second, swept if several (default: 1)"
    add("--rates", "--rate", dest="rate", type=float, nargs="+", metavar="R", help=rates)
    add("--burstiness", type=float, help="bursty: variance of the gaps over poisson's (default: 4)")
    add("--speed", type=float, help="trace: seconds of the trace per second (default: 1)")
    at_once = "conversations at a time, turn by turn (default: clients, or 8 in an open loop; a trace keeps its order)"
    add("--conversations", type=int, metavar="N", help=at_once)
    history = (
        "own: later turns show each arm's own answers; reference: the data set's (all arms then get the same messages, and "
        "our server, which recognises a conversation by its own answers, treats every turn as a new request)"
    )
    add("--history", choices=get_args(History), default="own", help=history)
    add("--max-new-tokens", type=int, help="maximum length of an answer (default: the trace's, else 8)")
    add("--ignore-eos", action="store_true", help="answers of exactly that length (SGLang, vLLM)")
    add("--warm-up", type=int, default=10, metavar="N", help="first requests, not measured (default: 10)")
    block = (
        "requests per block; 0: all. Default: 10, or fewer for at least 8 blocks; with several clients at least 4 for "
        "each, in an open loop at least 20, because concurrency, rate and queue build up within a block only"
    )
    add("--block", type=int, metavar="N", help=block)
    add("--bystanders", type=int, default=0, metavar="N", help="plain requests that decode during blocks (default: 0)")
    add("--fresh", action="store_true", help="make every chunk unique: the costs if nothing can be reused")
    silence = "seconds without data from the server (default: 600)"
    add("--timeout", dest="timeout_s", type=float, default=600.0, metavar="S", help=silence)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for starting servers, for the run's folder, and for continuing a run."""
    add = parser.add_argument_group("servers that are started; flags for all of them come after --").add_argument
    add("--model-path", default="random", metavar="M", help="a model, bundled, or random (default)")
    sizes = "random: millions of parameters (default: %(default)s)"
    add("--params", type=int, choices=sorted(SHAPES), default=DEFAULT_PARAMS, help=sizes)
    add("--threads", type=int, default=2, help="threads of each server, without a GPU (default: 2)")
    add("--max-total-tokens", type=int, metavar="N", help="KV pool (default: SGLang's; random: 40000)")
    add("--max-servers", type=int, default=6, help="maximum number of servers at a time (default: 6)")
    flush = "also flush the caches of NAME=URL servers before every cell, and reset the access counts of ours"
    add("--flush", action="store_true", help=flush)
    add = parser.add_argument_group("the run").add_argument
    add("--out", type=Path, metavar="DIR", help="a new folder, or that of a run to continue (default: runs/<date>)")
    again = "a continued run first sends each arm its last N requests again, unmeasured (default: 100)"
    add("--resume-warm-up", type=int, default=100, metavar="N", help=again)
    add("--baseline", metavar="RECORD", help="name of the record to compare this one with")


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the flags after `--`."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def check_load_options(args: argparse.Namespace) -> None:
    """Set the defaults of a kind of load. Raises CommandError for values out of range and options of another kind."""
    for name, (least, most) in RANGES.items():
        option, given = f"--{name.replace('_', '-')}", getattr(args, name)
        values = given if isinstance(given, list) else [given]
        if wrong := [value for value in values if value is not None and not least <= value <= most]:
            raise CommandError(f"{option}: {wrong[0]} is not between {least:,} and {most:,}")
        if len(set(values)) < len(values):
            raise CommandError(f"{option}: a value is given twice: {' '.join(map(str, values))}")
    if not args.timeout_s > 0:
        raise CommandError(f"--timeout must be above 0 but is {args.timeout_s}")
    for name, option, kinds, default in (
        ("rate", "--rates", ("poisson", "bursty"), [1.0]),
        ("clients", "--clients", ("closed",), [1]),
        ("burstiness", "--burstiness", ("bursty",), 4.0),
        ("speed", "--speed", ("trace",), 1.0),
    ):
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.load not in kinds:
            raise CommandError(f"{option} needs --load {' or '.join(kinds)}")


def loads(args: argparse.Namespace) -> list[tuple[dict[str, Any], Load]]:
    """The swept settings of each load, and the load."""
    if args.load == "closed":
        made = [("clients", clients, Load("closed", clients=clients)) for clients in args.clients]
    elif args.load == "trace":
        made = [("speed", args.speed, Load("trace", speed=args.speed))]
    else:
        made = [("rate", rate, Load(args.load, rate=rate, burstiness=args.burstiness)) for rate in args.rate]
    return [({name: value} if len(made) > 1 else {}, load) for name, value, load in made]


def make_plan(args: argparse.Namespace, arms: Sequence[Arm], num_requests: int, **more: Any) -> Plan:
    """The plan that the options select; `more`: its other fields."""
    measured = num_requests - args.warm_up
    if measured < 1:
        raise CommandError(
            f"--warm-up {args.warm_up} leaves none of {num_requests} requests to measure; send more, or fewer to warm up"
        )
    block = _default_block(args, max(1, measured // MIN_BLOCKS)) if args.block is None else args.block
    blocks = -(-measured // block) if block else 1
    if blocks < MIN_BLOCKS and len(arms) > 1:
        enough = f"--requests >= {args.warm_up + MIN_BLOCKS * block}" if block else "another --block"
        print(f"eval: too few blocks for a verdict: {blocks}, less than {MIN_BLOCKS}; give {enough}", file=sys.stderr)
    given = {field.name: getattr(args, field.name) for field in fields(Plan) if hasattr(args, field.name)}
    body = {"ignore_eos": True} if args.ignore_eos else {}
    return Plan(**{**given, "arms": arms, "block": block, "body": body, **more})


@contextmanager
def model_flags(args: argparse.Namespace, requests: Sequence[Request], flags: Sequence[str]) -> Iterator[list[str]]:
    """The flags that all servers share. A random model, its tokenizer trained on the requests' texts, is deleted on exit."""
    with tempfile.TemporaryDirectory(prefix="eval-model-") as folder:
        path, pool = args.model_path, args.max_total_tokens
        if path == "random":
            texts = {chunk.id: chunk.text for request in requests for chunk in request.chunks}
            pool = pool or 40_000
            path = write_random_model(
                Path(folder) / f"random-{args.params}m",
                SHAPES[args.params],
                [*texts.values(), *(request.question for request in requests)],
            )
        size = ["--max-total-tokens", str(pool)] if pool else []
        yield ["--model-path", str(path), *size, *flags]


def _default_block(args: argparse.Namespace, eighth: int) -> int:
    """A block short enough for 8 blocks, but long enough for rate, queue and concurrency to build up within it."""
    if args.load != "closed":
        return max(20, eighth)
    return max(min(10, eighth), 4 * max(args.clients) if max(args.clients) > 1 else 1)
