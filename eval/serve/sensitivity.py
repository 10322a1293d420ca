"""`python -m eval sensitivity`: measures with one setting varied, as in CRAFT's figures 13 to 15.

    python -m eval sensitivity --parameter window --task ragpulse --data DIR --requests 300      all other options are serve's

It is `python -m eval serve` with one sweep, and adds:

- defaults for --values and --arms: the papers' values, and the arms to which a parameter applies;
- for arms whose server runs our cache with exact reuse, the share of chunks that a replay of the same requests finds cached
  (`expected_hit_share`) in addition to the measured one (`hit_share`). Both are of single requests and first turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from eval.errors import CommandError
from eval.serve import command as serve
from eval.serve import latency
from eval.serve.arms import parse_arms
from eval.serve.expected import expected_hit_share, first_turns
from eval.serve.options import split_flags
from eval.serve.server_pool import key_of

if TYPE_CHECKING:
    from eval.run import Sample
    from eval.serve.plan import Cell
    from eval.task import Request


@dataclass(frozen=True)
class Parameter:
    """The varied setting: `option` is serve's; `values` and `arms` are defaults. Without `values` the user must give them."""

    summary: str
    option: str
    values: tuple[str, ...]
    arms: tuple[str, ...]


POLICIES = ("no-cache", "stock-lpm", "craft", "ours")
PARAMETERS = {
    "rate": Parameter("requests per second (CRAFT fig. 13a)", "--rates", (), POLICIES),
    "batch": Parameter("requests in flight (CRAFT fig. 13b)", "--clients", ("1", "2", "4", "8"), POLICIES),
    "k": Parameter("chunks of a request (CRAFT fig. 13c)", "--ks", ("2", "5", "10"), POLICIES),
    "window": Parameter(
        "requests that the access table counts (CRAFT fig. 14)",
        "--windows",
        ("10", "100", "1000", "1000000"),
        ("craft", "ours"),
    ),
    "threshold": Parameter(
        "accesses that promote a chunk (CRAFT fig. 15)", "--thresholds", ("1", "2", "3", "5"), ("craft",)
    ),
    "ratio": Parameter(
        "share of moved tokens that is recomputed (FusionRAG, Cache-Craft)",
        "--ratios",
        ("0", "0.05", "0.15", "0.3", "0.5", "1"),
        ("stock-lpm", "fused", "cacheblend", "epic"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print a table and the verdict; returns the exit code."""
    args = parse(argv)
    requests = serve.load(args)
    figures = partial(summarize, arms=args.arms, cells=serve.cells(args, requests))
    return serve.run(args, requests, kind="sensitivity", summarize=figures)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """serve's options, with `parameter`. Raises CommandError."""
    argv, flags = split_flags(argv)
    own, rest = _parser().parse_known_args(argv)
    parameter = PARAMETERS[own.parameter]
    values = own.values or parameter.values
    if not values:
        raise CommandError(f"--parameter {own.parameter} needs --values: {parameter.summary}")
    default = ["--arms", *parameter.arms] if "--arms" not in rest else []
    default += ["--load", "poisson"] if own.parameter == "rate" and "--load" not in rest else []
    args = serve.parse([*default, *rest, parameter.option, *values, "--", *flags])
    args.parameter = own.parameter
    return args


def summarize(
    samples: Sequence[Sample],
    *,
    facts: Mapping[str, Any],
    against: str,
    arms: Sequence[str],
    cells: Sequence[Cell],
) -> dict[str, Any]:
    """serve's results, with `hit_share` in the cells and `expected_hit_share` among their metrics if they are known.

    Args:
        arms: those of `--arms`.
        cells: the measured cells; their requests in any order.
    """
    results = latency.summarize(samples, facts=facts, against=against)
    known = {arm.name: arm for arm in parse_arms(arms)}
    for row in results["cells"]:
        arm, cell = known[row["arm"]], next(cell for cell in cells if cell.label == row["cell"])
        own = [s for s in samples if (s["arm"], s["cell"]) == (row["arm"], row["cell"]) and "error" not in s]
        by_id = {request.id: request for request in cell.requests}
        sent = replace(cell, requests=[by_id[sample["request"]] for sample in own])
        firsts = list(compress(zip(own, sent.requests, strict=True), first_turns(sent.requests)))
        row["hit_share"] = _hit_share([(sample, request) for sample, request in firsts if not sample["warm_up"]])
        server = facts.get("servers", {}).get(str(key_of(arm, cell)), {})
        row["pool_chunks"] = _pool_chunks(own, server)
        expected = expected_hit_share(
            arm,
            sent,
            flags=server.get("flags", ()),
            warm_up=sum(sample["warm_up"] for sample in own),
            capacity=row["pool_chunks"],
        )
        found = {"hit_share": row["hit_share"], "expected_hit_share": expected}
        row["metrics"] = {name: {"mean": share} for name, share in found.items() if share is not None} | row["metrics"]
    return results


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval sensitivity",
        description=__doc__,
        epilog="All options of `python -m eval serve` are accepted too; see its --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = "; ".join(f"{name}: {parameter.summary}, as {parameter.option}" for name, parameter in PARAMETERS.items())
    parser.add_argument("--parameter", required=True, choices=PARAMETERS, help=names)
    parser.add_argument("--values", nargs="+", metavar="V", help="values of the parameter")
    return parser


def _hit_share(taken: Sequence[tuple[Sample, Request]]) -> float | None:
    """Chunks that the server found cached over distinct chunks; None if the server does not report them."""
    told = [(s, request) for s, request in taken if (s.get("chunkcache") or {}).get("chunks_hit") is not None]
    num_chunks = sum(len({chunk.id for chunk in request.chunks}) for _, request in told)
    return sum(sample["chunkcache"]["chunks_hit"] for sample, _ in told) / num_chunks if num_chunks else None


def _pool_chunks(samples: Sequence[Sample], server: Mapping[str, Any]) -> int | None:
    """Capacity of the server's pool in chunks, each with its share of its request's other tokens; None if unknown."""
    pool, counted = server.get("max_total_num_tokens"), [s for s in samples if s["prompt_tokens"] and s["num_chunks"]]
    tokens = sum(sample["prompt_tokens"] + (sample["completion_tokens"] or 0) for sample in counted)
    return max(1, int(pool * sum(sample["num_chunks"] for sample in counted) / tokens)) if pool and tokens else None
