"""`python -m eval replay`: what share of a trace's chunks an order, a capacity and an eviction policy would find cached.

    python -m eval replay --trace FILE.jsonl.gz --order tree --capacity 3000 --eviction promoted --json

It needs Python alone, no model and no server. The trace format is in eval/trace.py and in `--help`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eval import trace as trace_format
from eval.errors import CommandError
from eval.trace import Trace, read_trace
from radix_ext import (
    ADMISSION_POLICIES,
    EVICTION_POLICIES,
    ORDER_POLICIES,
    TAIL_POLICIES,
    CallerError,
    ReplayResult,
    ReplaySettings,
    overlap,
    replay_trace,
)


def main(argv: Sequence[str]) -> int:
    """Replay one trace under one setting and print a table, or with --json one JSON object as the last line."""
    options = _parser().parse_args(argv)
    try:
        settings = ReplaySettings(
            order=options.order,
            tail=options.tail,
            eviction=options.eviction,
            admission=options.admission,
            capacity=options.capacity or None,
            window=options.window,
            threshold=options.threshold,
            max_visits=options.max_visits,
        )
        trace = read_trace(options.trace, k=options.k, max_requests=options.max_requests)
        report = _report(options, trace, replay_trace(trace.requests, settings))
    except CallerError as error:
        raise CommandError(str(error)) from None
    print(json.dumps(report) if options.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval replay",
        description="Replay a trace of retrieved chunks against a cache of limited size.",
        epilog=trace_format.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, help="JSON Lines, plain or .gz; format below")
    parser.add_argument("--order", choices=ORDER_POLICIES, default="tree", help="default: %(default)s")
    parser.add_argument(
        "--tail", choices=TAIL_POLICIES, default="rank", help="the rest under tree; default: %(default)s"
    )
    parser.add_argument("--capacity", type=_at_least(0), default=0, help="nodes (chunks) in the cache, 0 for no limit")
    parser.add_argument("--eviction", choices=EVICTION_POLICIES, default="lru", help="default: %(default)s")
    parser.add_argument("--admission", choices=ADMISSION_POLICIES, default="all", help="default: %(default)s")
    parser.add_argument("--window", type=_at_least(1), default=1000, help="requests counted; default: %(default)s")
    parser.add_argument("--threshold", type=_at_least(1), default=2, help="promotion count; default: %(default)s")
    parser.add_argument("--max-visits", type=_at_least(1), default=64, help="bound of the search; default: %(default)s")
    parser.add_argument("--k", type=_at_least(1), help="use only the first K chunks of each request")
    parser.add_argument("--max-requests", type=_at_least(1), help="use only the first so many requests")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def _at_least(minimum: int) -> "type[int]":
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum} but got {value}")
        return value

    parse.__name__ = "integer"  # argparse says "invalid integer value"
    return parse  # type: ignore[return-value]


def _report(options: argparse.Namespace, trace: Trace, result: ReplayResult) -> dict[str, object]:
    prefix, total = overlap([[chunk.id for chunk in request] for request in trace.requests])
    has_lengths = trace.has_lengths
    return {
        "chunk_hit_rate": result.chunk_hit_rate,
        "token_hit_rate": result.token_hit_rate if has_lengths else None,
        "num_requests": result.num_requests,
        "num_chunks": result.num_chunks,
        "num_chunk_hits": result.num_chunk_hits,
        "num_tokens": result.num_tokens if has_lengths else None,
        "num_token_hits": result.num_token_hits if has_lengths else None,
        "num_evicted": result.num_evicted,
        "peak_nodes": result.peak_nodes,
        "order_us_p50": round(result.order_us_p50, 2),
        "order_us_p99": round(result.order_us_p99, 2),
        "prefix_overlap": prefix,
        "total_overlap": total,
        "settings": {
            name: str(value) if name == "trace" else value for name, value in vars(options).items() if name != "json"
        },
    }


def _table(report: dict[str, object]) -> str:
    settings = report["settings"]
    assert isinstance(settings, dict)
    rows = [
        (name, value)
        for name, value in [*settings.items(), *report.items()]
        if name != "settings" and value is not None
    ]
    return "\n".join(
        f"{name:<16} {value:.4f}" if isinstance(value, float) else f"{name:<16} {value}" for name, value in rows
    )


if __name__ == "__main__":
    sys.exit("run it as: python -m eval replay")
