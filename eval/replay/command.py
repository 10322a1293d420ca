"""`python -m eval replay`: the share of a trace's chunks that is found cached, by order, capacity and eviction policy.

    python -m eval replay --trace FILE.jsonl.gz                      stock, CRAFT and ours at three sizes, and a verdict
    python -m eval replay --trace FILE.jsonl.gz --order tree --capacity 3000 --json                           one replay
    python -m eval replay --trace FILE.jsonl.gz --order frequency --window 10 100 1000 10000        every combination
    python -m eval replay --generate 1000000 --order retriever frequency tree --capacity 20000       no data at hand
    python -m eval replay --trace FILE.jsonl.gz --reuse fused        also with every request's KV moved (eval/replay/fused.py)
    python -m eval replay --storage                                  FusionRAG's storage simulation (eval/replay/storage.py)

Needs Python alone, no model and no server. The trace format is in eval/replay/trace.py and in `--help`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.progress import progress
from eval.replay import generated
from eval.replay import trace as trace_format
from eval.replay.cells import ReplayCell, TraceCell, measure
from eval.replay.fused_cell import FusedCell, add_options, server_config
from eval.replay.generated import GeneratedTrace
from eval.replay.grid import AXES, DEFAULTS, Cell, comparison, derived_capacities, grid
from eval.replay.summary import MIN_BLOCKS, summarize
from eval.replay.text_table import text_table
from eval.replay.trace import TraceFacts, TraceFile, TraceRequest, scan
from eval.run import Run, new_folder
from radix_ext import (
    ADMISSION_POLICIES,
    DEDUP_POLICIES,
    EVICTION_POLICIES,
    ORDER_POLICIES,
    TAIL_POLICIES,
    CallerError,
    Chunk,
    ChunkId,
)
from sglang_chunkcache import ChunkCacheConfig

BLOCK = 50
MAX_BLOCKS = 1000
"""More do not make an interval more exact, but slower to compute."""
WORLD_REQUESTS = 1000
"""Default number of requests of the generated world, which is unlimited; of a data set all are used."""
Trace = Iterable[TraceRequest]
"""Iterated several times: for the facts, and for each cell."""
Create = Callable[[], TraceCell | ReplayCell]


def main(argv: Sequence[str]) -> int:
    """Replay a trace in one cell or several; prints a table, for several also a verdict, or with --json one JSON object."""
    if "--storage" in argv:
        from eval.replay import storage

        return storage.main([option for option in argv if option != "--storage"])
    options = _parser().parse_args(argv)
    config = server_config(options)
    try:
        trace = _trace(options)
        if options.save_trace is not None:
            return _save(trace, options.save_trace)
        facts = scan(_with_bar("read", trace))
        cells, left_out = _cells(options, facts)
        if options.warm_up >= facts.num_counted:
            raise CommandError(f"--warm-up {options.warm_up} leaves none of {facts.num_counted} requests to measure")
        options.block = _block(options.block, facts.num_counted - options.warm_up)
        if len(cells) == 1 and options.out is None and config is None:
            return _print_one(options, trace, facts, cells[0])
        return _run_grid(options, trace, facts, _measured(options, facts, cells, config), left_out)
    except CallerError as error:
        raise CommandError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval replay",
        description="Replay a trace of retrieved chunks against a cache of limited size. Without any setting of the grid it "
        "compares stock, CRAFT and ours, with unlimited capacity and with capacity for a quarter and an eighth of the distinct "
        "chunks; for conversations also stock with an application that leaves out chunks already shown.",
        epilog=f"{trace_format.__doc__}\n{generated.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON Lines, plain or .gz; format below")
    source.add_argument("--generate", metavar="N", type=_at_least(1), help="N made requests; parameters below")
    text = "use a task's requests, without lengths, instead of a trace; `python -m eval serve --help` lists tasks"
    source.add_argument("--task", help=text)
    add = parser.add_argument
    add("--data", type=Path, help="folder that holds the task's folder")
    add("--components", type=Path, help="lengths by chunk id, as RAGPulse has them; format below")
    text = f"use only the first N requests; default: all, of task world {WORLD_REQUESTS}"
    add("--max-requests", type=_at_least(1), help=text)
    add("--seed", type=int, default=0, help="of --generate; default: %(default)s")
    add("--save-trace", metavar="FILE", type=Path, help="only write the requests in the trace format, .gz or not")
    _add_axes(parser)
    add_options(parser)
    add("--warm-up", type=_at_least(0), default=0, help="serve the first N requests without measuring them")
    text = f"in requests; default: {BLOCK}, at least a {MAX_BLOCKS}th and at most a {MIN_BLOCKS}th of those measured"
    add("--block", type=_at_least(1), help=f"block length of the bootstrap, {text}")
    add("--worth", type=_share, default=0.01, help="minimum gain, as a share, that is worth it; default: %(default)s")
    add("--out", type=Path, help="the run's folder; default for a grid: runs/<time>-replay")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _add_axes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the grid: each takes one value or several, all combinations are replayed")
    group.add_argument("--order", nargs="+", choices=ORDER_POLICIES, help="default: tree")
    text = "order of the remaining chunks under tree; default: seen"
    group.add_argument("--tail", nargs="+", choices=TAIL_POLICIES, help=text)
    group.add_argument("--eviction", nargs="+", choices=EVICTION_POLICIES, help="default: lru")
    group.add_argument("--admission", nargs="+", choices=ADMISSION_POLICIES, help="default: all")
    text = "whether a conversation drops chunks already shown; default: off for the retriever's order, else shown"
    group.add_argument("--dedup", nargs="+", choices=DEDUP_POLICIES, help=text)
    for name, minimum, text in (
        ("capacity", 0, "chunks (nodes) in the cache, 0 for no limit"),
        ("capacity-tokens", 0, "tokens of chunks in the cache, 0 for no limit; alone it sets the comparison's sizes"),
        ("window", 1, "requests counted; default: 1000"),
        ("threshold", 1, "promotion count; default: 2"),
        ("k", 1, "first K chunks of each request; default: all, generated: 10"),
    ):
        group.add_argument(f"--{name}", nargs="+", type=_at_least(minimum), help=text)


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


def _trace(options: argparse.Namespace) -> Trace:
    """The source that the options name."""
    if options.data is not None and options.task is None:
        raise CommandError("--data requires --task; --trace names a trace")
    if options.components is not None and options.trace is None:
        raise CommandError("--components requires --trace")
    if options.trace is not None:
        return TraceFile(options.trace, max_requests=options.max_requests, components=options.components)
    if options.generate is not None:
        num_requests = min(options.generate, options.max_requests or options.generate)
        return GeneratedTrace(num_requests, k=max(options.k or [generated.K]), seed=options.seed)
    return _task_requests(options)


def _task_requests(options: argparse.Namespace) -> list[TraceRequest]:
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
    kept = [request for request in traced if request.chunks or request.conversation is not None]
    if not any(request.chunks for request in kept):
        raise CommandError(f"task {options.task} has no request with passages")
    return kept


def _save(trace: Trace, path: Path) -> int:
    write = gzip.open if path.suffix == ".gz" else open
    try:
        with write(path, "wt", encoding="utf-8") as lines:
            lines.writelines(request.line for request in _with_bar("write", trace))
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    print(f"trace: {path}")
    return 0


def _with_bar(label: str, trace: Trace) -> Iterator[TraceRequest]:
    with progress(label, None) as bar:
        for request in trace:
            yield request
            bar.update()


def _block(block: int | None, num_requests: int) -> int:
    """Requests per block. Raises CommandError if too few blocks remain."""
    most = max(1, num_requests // MIN_BLOCKS)
    if block is not None and block > most:
        raise CommandError(
            f"--block {block} leaves fewer than {MIN_BLOCKS} blocks of {num_requests} requests: give at most {most}"
        )
    return block or min(max(BLOCK, num_requests // MAX_BLOCKS), most)


def _cells(options: argparse.Namespace, facts: TraceFacts) -> tuple[list[Cell], str | None]:
    """The cells that the options select, and a sentence on the sizes that were left out."""
    axes = {name: getattr(options, name) for name in AXES}
    tokens = axes["capacity_tokens"]
    if tokens and not facts.has_lengths:
        raise CommandError("--capacity-tokens needs a trace with lengths on every request, or --components")
    if tokens and axes["capacity"]:
        raise CommandError("give --capacity or --capacity-tokens, not both")
    has_conversations = bool(facts.num_turns)
    if any(values for name, values in axes.items() if name != "capacity_tokens"):
        return grid(axes, has_conversations=has_conversations), None
    capacities, left_out = ([(0, 0), *((0, size) for size in tokens)], None) if tokens else derived_capacities(facts)
    cells = comparison(capacities, has_conversations=has_conversations)
    if options.reuse == "fused":
        cells = [cell for cell in cells if cell.order == "tree"]
    return cells, left_out


def _run_grid(
    options: argparse.Namespace, trace: Trace, facts: TraceFacts, measured: Mapping[str, Create], left_out: str | None
) -> int:
    folder = options.out or new_folder("replay")
    spec = {**vars(options), "json": None, "trace_sha256": facts.sha256, "left_out": left_out}
    with Run(folder, kind="replay", spec=spec, summarize=partial(summarize, spec)) as run:
        todo = {key: create for key, create in measured.items() if key not in run}
        with progress("replay", len(todo) * facts.num_requests) as bar:
            for key, create in todo.items():
                run.add(key, measure(create(), trace, bar))
        results = run.results()
    if options.json:
        print(json.dumps(results))
    else:
        print("\n".join([*map(text_table, results["tables"]), "", *results["verdict"], "", f"record: {folder}"]))
    return 0


def _measured(
    options: argparse.Namespace, facts: TraceFacts, cells: Sequence[Cell], config: ChunkCacheConfig | None
) -> dict[str, Create]:
    """Key of a sample -> what measures it: first the trace itself, once per k, then the cells."""
    found: dict[str, Create] = {}
    for cell in cells:
        found[f"trace/k={cell.k}"] = partial(TraceCell, cell.k, facts, warm_up=options.warm_up)
    for cell in cells:
        found[cell.key] = partial(ReplayCell, cell, facts, warm_up=options.warm_up)
    if config is not None:
        found |= {f"fused/{cell.key}": partial(FusedCell, cell, facts, options, config) for cell in cells}
    return found


def _print_one(options: argparse.Namespace, trace: Trace, facts: TraceFacts, cell: Cell) -> int:
    """One cell: a line for each setting and figure, or its JSON."""
    measured = _measured(options, facts, [cell], None)
    with progress("replay", len(measured) * facts.num_requests) as bar:
        samples = [measure(create(), trace, bar) for create in measured.values()]
    results = summarize(vars(options), samples)
    (figures,), overlap, sample = results["cells"], results["overlap"], samples[-1]
    named = {
        "chunk_hit_rate": figures["chunk_hit_rate"]["value"],
        "token_hit_rate": figures["token_hit_rate"] and figures["token_hit_rate"]["value"],
        "num_requests": figures["num_requests"],
        "num_chunks": figures["num_chunks"],
        "num_chunk_hits": sum(sample["hits"]),
        "num_tokens": sum(sample["tokens"]) if facts.has_lengths else None,
        "num_token_hits": sum(sample["token_hits"]) if facts.has_lengths else None,
        "num_dropped": sum(sample["dropped"]) if cell.dedup else None,
        **{name: figures[name] for name in ("num_evicted", "peak_nodes", "order_us_p50", "order_us_p99")},
        "prefix_overlap": overlap["prefix"],
        "total_overlap": overlap["total"],
        "overlap_estimated_from": overlap["estimated_from"],
        "seen_before": overlap["seen_before"]["value"],
    }
    settings = _settings(options, cell.dedup)
    if options.json:
        print(json.dumps({**named, "settings": settings}))
        return 0
    for name, value in {**settings, **named}.items():
        if value is not None:
            print(f"{name:<22} {value:.4f}" if isinstance(value, float) else f"{name:<22} {value}")
    return 0


def _settings(options: argparse.Namespace, dedup: str | None) -> dict[str, Any]:
    """The options as given, or their defaults."""
    output = ("json", "out", "block", "worth", "save_trace")
    named = {name: value for name, value in vars(options).items() if name not in output}
    axes = {name: (named[name] or [DEFAULTS[name]])[0] for name in AXES} | {"dedup": dedup}
    return {name: axes.get(name, str(value) if isinstance(value, Path) else value) for name, value in named.items()}
