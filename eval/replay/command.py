"""`python -m eval replay`: the share of a trace's chunks that is found cached, by order, capacity and eviction policy.

    python -m eval replay --trace FILE.jsonl.gz                      stock, CRAFT and ours at three sizes, and a verdict
    python -m eval replay --trace FILE.jsonl.gz --order tree --capacity 3000 --json                           one replay
    python -m eval replay --trace FILE.jsonl.gz --order frequency --window 10 100 1000 10000        every combination
    python -m eval replay --storage                                  FusionRAG's storage simulation (eval/replay/storage.py)

Needs Python alone, no model and no server. The trace format is in eval/replay/trace.py and in `--help`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.progress import Bar, progress
from eval.replay import trace as trace_format
from eval.replay.grid import AXES, DEFAULTS, Cell, comparison, derived_capacities, grid
from eval.replay.summary import MIN_BLOCKS, summarize
from eval.replay.trace import Trace, TraceRequest, read_trace
from eval.replay.verdict import capacity_name
from eval.run import Run, Sample
from radix_ext import (
    ADMISSION_POLICIES,
    DEDUP_POLICIES,
    EVICTION_POLICIES,
    ORDER_POLICIES,
    TAIL_POLICIES,
    CallerError,
    Chunk,
    ChunkId,
    overlap,
    replay_trace,
    seen_before,
)

BLOCK = 50
WORLD_REQUESTS = 1000
"""Default number of requests of the generated world, which is unlimited; of a data set all are used."""


def main(argv: Sequence[str]) -> int:
    """Replay a trace in one cell or several; prints a table, for several also a verdict, or with --json one JSON object."""
    if "--storage" in argv:
        from eval.replay import storage

        return storage.main([option for option in argv if option != "--storage"])
    options = _parser().parse_args(argv)
    try:
        trace = _read(options)
        cells, left_out = _cells(options, trace)
        if options.warm_up >= len(trace.counted):
            raise CommandError(f"--warm-up {options.warm_up} leaves none of {len(trace.counted)} requests to measure")
        options.block = _block(options.block, len(trace.counted) - options.warm_up)
        if len(cells) == 1 and options.out is None:
            return _print_one(options, [_trace_sample(trace, cells[0].k), _replay(trace, cells[0], options)])
        return _run_grid(options, trace, cells, left_out)
    except CallerError as error:
        raise CommandError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval replay",
        description="Replay a trace of retrieved chunks against a cache of limited size. Without any setting of the grid it "
        "compares stock, CRAFT and ours, with unlimited capacity and with capacity for a quarter and an eighth of the distinct "
        "chunks; for conversations also stock with an application that leaves out chunks already shown.",
        epilog=trace_format.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON Lines, plain or .gz; format below")
    source.add_argument(
        "--task",
        help="use a task's requests, without lengths, instead of a trace; `python -m eval serve --help` lists tasks",
    )
    parser.add_argument("--data", type=Path, help="folder that holds the task's folder")
    parser.add_argument("--components", type=Path, help="lengths by chunk id, as RAGPulse has them; format below")
    parser.add_argument(
        "--max-requests",
        type=_at_least(1),
        help=f"use only the first N requests; default: all, of task world {WORLD_REQUESTS}",
    )
    axes = parser.add_argument_group("the grid: each takes one value or several, all combinations are replayed")
    axes.add_argument("--order", nargs="+", choices=ORDER_POLICIES, help="default: tree")
    axes.add_argument(
        "--tail", nargs="+", choices=TAIL_POLICIES, help="order of the remaining chunks under tree; default: rank"
    )
    axes.add_argument("--capacity", nargs="+", type=_at_least(0), help="chunks (nodes) in the cache, 0 for no limit")
    axes.add_argument(
        "--capacity-tokens",
        nargs="+",
        type=_at_least(0),
        help="tokens of chunks in the cache, 0 for no limit; alone it sets the sizes of the comparison",
    )
    axes.add_argument("--eviction", nargs="+", choices=EVICTION_POLICIES, help="default: lru")
    axes.add_argument("--admission", nargs="+", choices=ADMISSION_POLICIES, help="default: all")
    axes.add_argument(
        "--dedup",
        nargs="+",
        choices=DEDUP_POLICIES,
        help="whether a conversation drops chunks already shown; default: off for the retriever's order, else shown",
    )
    axes.add_argument("--window", nargs="+", type=_at_least(1), help="requests counted; default: 1000")
    axes.add_argument("--threshold", nargs="+", type=_at_least(1), help="promotion count; default: 2")
    axes.add_argument("--k", nargs="+", type=_at_least(1), help="only the first K chunks of each request; default: all")
    parser.add_argument("--max-visits", type=_at_least(1), default=64, help="bound of the search; default: %(default)s")
    parser.add_argument(
        "--warm-up", type=_at_least(0), default=0, help="serve the first N requests without measuring them"
    )
    parser.add_argument(
        "--block",
        type=_at_least(1),
        help=f"block length of the bootstrap, in requests; default: {BLOCK}, or a tenth of the measured requests if less",
    )
    parser.add_argument(
        "--worth", type=_share, default=0.01, help="minimum gain, as a share, that is worth it; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, help="the run's folder; default for a grid: runs/<time>-replay")
    parser.add_argument("--baseline", help="name of the record to compare this one with")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _at_least(minimum: int) -> type[int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum} but got {value}")
        return value

    parse.__name__ = "integer"  # argparse says "invalid integer value"
    return parse  # type: ignore[return-value]


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1 but got {text}")
    return value


def _read(options: argparse.Namespace) -> Trace:
    """The trace, or a task's requests as a trace."""
    if options.task is None:
        if options.data is not None:
            raise CommandError("--data requires --task; --trace names a trace")
        return read_trace(options.trace, max_requests=options.max_requests, components=options.components)
    if options.components is not None:
        raise CommandError("--components requires --trace")
    from eval.task import add_task_options, load_requests  # imported here: retrievers need packages, a trace needs none

    parser = argparse.ArgumentParser()
    add_task_options(parser)
    num_requests = options.max_requests or (WORLD_REQUESTS if options.task == "world" else sys.maxsize)
    named = ["--task", options.task, "--requests", str(num_requests)]
    named += ["--k", str(max(options.k))] if options.k else []
    requests = load_requests(parser.parse_args([*named, *(["--data", str(options.data)] if options.data else [])]))
    traced = (
        TraceRequest(
            tuple(Chunk(ChunkId(name), 1) for name in dict.fromkeys(chunk.id for chunk in request.chunks)),
            has_lengths=False,
            conversation=request.conversation,
        )
        for request in requests
    )
    trace = Trace(tuple(request for request in traced if request.chunks or request.conversation is not None))
    if not trace.counted:
        raise CommandError(f"task {options.task} has no request with passages")
    return trace


def _block(block: int | None, num_requests: int) -> int:
    """Requests per block. Raises CommandError if too few blocks remain."""
    most = max(1, num_requests // MIN_BLOCKS)
    if block is not None and block > most:
        raise CommandError(
            f"--block {block} leaves fewer than {MIN_BLOCKS} blocks of {num_requests} requests: give at most {most}"
        )
    return block or min(BLOCK, most)


def _cells(options: argparse.Namespace, trace: Trace) -> tuple[list[Cell], str | None]:
    """The cells that the options select, and a sentence on the sizes that were left out."""
    axes = {name: getattr(options, name) for name in AXES}
    tokens = axes["capacity_tokens"]
    if tokens and not trace.has_lengths:
        raise CommandError("--capacity-tokens needs a trace with lengths on every request, or --components")
    if tokens and axes["capacity"]:
        raise CommandError("give --capacity or --capacity-tokens, not both")
    if any(values for name, values in axes.items() if name != "capacity_tokens"):
        return grid(axes, has_conversations=trace.has_conversations), None
    capacities, left_out = ([(0, 0), *((0, size) for size in tokens)], None) if tokens else derived_capacities(trace)
    return comparison(capacities, has_conversations=trace.has_conversations), left_out


def _run_grid(options: argparse.Namespace, trace: Trace, cells: Sequence[Cell], left_out: str | None) -> int:
    now = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
    folder = options.out or Path("runs") / f"{now}-replay"
    digest = hashlib.sha256(repr(trace.requests).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    spec = {**vars(options), "json": None, "trace_sha256": digest, "left_out": left_out}
    num_requests = len(trace.requests)
    with Run(folder, kind="replay", spec=spec, summarize=partial(summarize, spec), baseline=options.baseline) as run:
        for k in dict.fromkeys(cell.k for cell in cells):
            if f"trace/k={k}" not in run:
                run.add(f"trace/k={k}", _trace_sample(trace, k))
        left = [cell for cell in cells if cell.key not in run]
        with progress("replay", len(cells) * num_requests, initial=(len(cells) - len(left)) * num_requests) as bar:
            for cell in left:
                run.add(cell.key, _replay(trace, cell, options, bar))
        results = run.results()
    if not options.json:
        print(_grid_table(results))
        print("\n".join(["", *results["verdict"], *([""] if results["verdict"] else []), f"record: {folder}"]))
    print(json.dumps(results))
    return 0


def _replay(trace: Trace, cell: Cell, options: argparse.Namespace, bar: Bar | None = None) -> Sample:
    """One cell's sample: the hits of each request that has passages."""
    result = replay_trace(
        _counted(trace.requests, cell.k, bar),
        cell.settings(max_visits=options.max_visits),
        conversations=[request.conversation for request in trace.requests],
    )
    rows = [row for row in result.requests if row.num_chunks]
    return {
        "cell": cell.label,
        "hits": [row.num_hits for row in rows],
        "dropped": [row.num_dropped for row in rows],
        "lost": [row.num_lost for row in rows],
        "chunks": [row.num_chunks for row in rows],
        "token_hits": [row.num_token_hits for row in rows] if trace.has_lengths else None,
        "dropped_tokens": [row.num_dropped_tokens for row in rows] if trace.has_lengths else None,
        "lost_tokens": [row.num_lost_tokens for row in rows] if trace.has_lengths else None,
        "tokens": [row.num_tokens for row in rows] if trace.has_lengths else None,
        "num_evicted": result.num_evicted,
        "peak_nodes": result.peak_nodes,
        "order_us_p50": round(result.order_us_p50, 2),
        "order_us_p99": round(result.order_us_p99, 2),
    }


def _counted(requests: Sequence[TraceRequest], k: int | None, bar: Bar | None) -> Iterator[Sequence[Chunk]]:
    for request in requests:
        yield request.chunks[:k]
        if bar is not None:
            bar.update()


def _trace_sample(trace: Trace, k: int | None) -> Sample:
    """The overlap of the trace, which does not depend on the cache."""
    requests = [request.chunks[:k] for request in trace.counted]
    prefix, total = overlap([[chunk.id for chunk in request] for request in requests])
    seen = seen_before(requests)
    return {
        "k": k,
        "overlap": {"prefix": prefix, "total": total},
        "chunks": [len(request) for request in requests],
        "seen_chunks": [chunks for chunks, _ in seen],
        "tokens": [sum(chunk.num_tokens for chunk in request) for request in requests] if trace.has_lengths else None,
        "seen_tokens": [tokens for _, tokens in seen] if trace.has_lengths else None,
    }


def _print_one(options: argparse.Namespace, samples: Sequence[Sample]) -> int:
    """One cell: a table of everything, or its JSON."""
    results = summarize(vars(options), samples)
    (cell,), (_, sample) = results["cells"], samples
    first = options.warm_up
    tokens = sample["tokens"]
    report = {
        "chunk_hit_rate": cell["chunk_hit_rate"]["value"],
        "token_hit_rate": cell["token_hit_rate"] and cell["token_hit_rate"]["value"],
        "num_requests": cell["num_requests"],
        "num_chunks": cell["num_chunks"],
        "num_chunk_hits": sum(sample["hits"][first:]),
        "num_tokens": sum(tokens[first:]) if tokens else None,
        "num_token_hits": sum(sample["token_hits"][first:]) if tokens else None,
        "num_dropped": sum(sample["dropped"][first:]) if cell["cell"]["dedup"] else None,
        **{name: cell[name] for name in ("num_evicted", "peak_nodes", "order_us_p50", "order_us_p99")},
        "prefix_overlap": results["overlap"]["prefix"],
        "total_overlap": results["overlap"]["total"],
        "seen_before": results["overlap"]["seen_before"]["value"],
        "settings": _settings(options, cell["cell"]["dedup"]),
    }
    print(json.dumps(report) if options.json else _table(report))
    return 0


def _settings(options: argparse.Namespace, dedup: str | None) -> dict[str, Any]:
    """The options as given, or their defaults."""
    named = {
        name: value
        for name, value in vars(options).items()
        if name not in ("json", "out", "baseline", "block", "worth")
    }
    axes = {name: (named[name] or [DEFAULTS[name]])[0] for name in AXES} | {"dedup": dedup}
    return {name: axes.get(name, str(value) if isinstance(value, Path) else value) for name, value in named.items()}


def _table(report: dict[str, Any]) -> str:
    rows = [*report["settings"].items(), *((name, value) for name, value in report.items() if name != "settings")]
    return "\n".join(
        f"{name:<16} {value:.4f}" if isinstance(value, float) else f"{name:<16} {value}"
        for name, value in rows
        if value is not None
    )


def _grid_table(results: dict[str, Any]) -> str:
    """One line per cell: the settings that differ between cells, then the shares in percent."""
    cells = results["cells"]
    differs = [name for name in cells[0]["cell"] if len({cell["cell"][name] for cell in cells} - {None}) > 1]
    varied = [name for name in differs if not name.startswith("capacity")]
    head = ["capacity", *varied, "chunks", "95%", *(["tokens", "95%"] if cells[0]["token_hit_rate"] else [])]
    parts = ["conversation_scoped", "history_lost"] if "reduction" in cells[0] else []
    head += [name.replace("_", " ") for name in parts]
    rows = [head]
    for cell in cells:
        shares = [share for share in (cell["chunk_hit_rate"], cell["token_hit_rate"]) if share]
        row = [
            capacity_name(cell["cell"]),
            *("-" if cell["cell"][name] is None else str(cell["cell"][name]) for name in varied),
        ]
        for share in shares:
            row += [f"{share['value']:.1%}", f"{100 * share['low']:.1f}-{100 * share['high']:.1f}"]
        rows.append(row + [f"{cell['reduction']['chunks'][name]['value']:.1%}" for name in parts])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    sys.exit("run it as: python -m eval replay")
