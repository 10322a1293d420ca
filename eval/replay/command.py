"""`python -m eval replay`: the share of a trace's chunks that is found cached, by order, capacity
and eviction policy.

    python -m eval replay --trace FILE                stock, CRAFT and ours at three sizes
    ... --order tree --capacity 3000 --json           one replay
    ... --order frequency --window 10 100 1000        every combination
    ... --ranks 4                                     of a server with --dp-size 4 (ranks.py)
    ... --reuse fused                                 also with each request's KV moved (fused.py)
    ... --reuse fused --model-shape M --machine X     times to first token by arithmetic (timed.py)
    ... --days documents --eviction lru reused        three days, each with new documents (days.py)
    python -m eval replay --generate 1000000 ...      no data at hand
    python -m eval replay --log FILE --html page.html a log of model calls (eval/logs), drawn

Needs Python alone, no model and no server. The trace format is in eval/replay/trace.py and in
`--help`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.logs import openai, spans
from eval.logs.log_file import LogFile, unread_text
from eval.logs.passages import BYTES_PER_TOKEN, Passages, Splitter
from eval.progress import progress
from eval.replay import days, generated
from eval.replay import trace as trace_format
from eval.replay.breakdown import Breakdown
from eval.replay.cells import ReplayCell, Sample, TraceCell, measure
from eval.replay.eviction_queue import EVICTION_POLICIES
from eval.replay.exact import ADMISSION_POLICIES, DEDUP_POLICIES
from eval.replay.fused_cell import FusedCell, add_options, server_config
from eval.replay.generated import GeneratedTrace, PooledTrace, SysXTrace
from eval.replay.grid import (
    AXES,
    SMALL_POOL,
    Cell,
    baseline_of,
    comparison,
    derived_capacities,
    grid,
    room_text,
)
from eval.replay.mistakes import MistakeCell, mistakes_of
from eval.replay.offloading import HOST_ADMISSIONS
from eval.replay.ordering import TAIL_POLICIES
from eval.replay.page import About, write_page
from eval.replay.ranks import RanksReplay
from eval.replay.summary import MIN_BLOCKS, summarize
from eval.replay.survey import Survey, survey
from eval.replay.task_trace import GENERATED_REQUESTS, task_requests
from eval.replay.timed import (
    TimedArm,
    add_timed_options,
    arms_of,
    check_timed,
    summarize_timed,
)
from eval.replay.trace import TraceFacts, TraceFile, TraceRequest, scan
from eval.run import Run, new_folder
from eval.task import TASKS
from radix_ext import ORDER_POLICIES, CallerError
from retrieval.command_line import Parser
from retrieval.errors import RetrievalError
from retrieval.tokens import load_tokens
from sglang_chunkcache import ChunkCacheConfig

BLOCK = 50
IN_FLIGHT_PER_RANK = 16
SMALL_POOL_CHUNKS = SMALL_POOL // 256
"""Of a usual length: a page draws no smaller cache."""
MAX_BLOCKS = 1000
"""More do not make an interval more exact, but slower to compute."""
Trace = Iterable[TraceRequest]
"""Iterated several times: for the facts, and for each cell."""
Create = Callable[[], TraceCell | ReplayCell | TimedArm | MistakeCell]


def main(argv: Sequence[str]) -> int:
    """Replay a trace in one cell or several;
    prints a table and a verdict, or with --json one JSON object."""
    options = _parser().parse_args(argv)
    try:
        trace = _of_days(options, _trace(options))
        facts = scan(_with_bar(trace))
        is_timed = any((options.machine, options.model_shape, options.clients, options.rates))
        measured = (_timed if is_timed else _measured)(options, facts, trace)
        told = _drawn(options, facts, trace, measured) if options.html else None
        if options.warm_up >= facts.num_counted:
            raise CommandError(
                f"--warm-up {options.warm_up} leaves none of {facts.num_counted} requests to"
                " measure"
            )
        options.block = _block(options.block, facts.num_counted - options.warm_up)
        folder = options.out or new_folder("replay")
        unread = {"unread": trace.unread} if isinstance(trace, LogFile) else {}
        spec = {**vars(options), "json": None, "html": bool(options.html) or None}
        spec["trace_sha256"] = facts.sha256
        summary = partial(summarize_timed if is_timed else summarize, spec)

        def results_of(taken: Sequence[Sample]) -> dict[str, Any]:
            return summary(taken) | unread

        with Run(folder, kind="replay", spec=spec, summarize=results_of) as run:
            todo = {key: create for key, create in measured.items() if key not in run}
            with progress("replay", len(todo) * facts.num_requests) as bar:
                for key, create in todo.items():
                    run.add(key, measure(create(), trace, bar))
            results = run.results()
    except CallerError as error:
        raise CommandError(str(error)) from None
    is_named = is_timed or any(getattr(options, name) for name in AXES)
    room = room_text(facts) if facts.has_lengths and not is_named else ""
    if told is not None:
        is_estimated = options.log is not None and options.tokenizer is None
        source, num_chunks = _source(options), facts.distinct_chunks
        about = About(source, told, num_chunks, is_estimated, options.worth, room)
        write_page(options.html, results, about)
    if options.json:
        print(json.dumps(results))
    else:
        said = [*map(_text, results["tables"]), *filter(None, [room]), ""]
        said += [*results["verdict"], ""]
        if isinstance(trace, LogFile):
            said += [*unread_text(results["unread"]), *trace.example, ""]
        said += [f"page: {options.html}"] if options.html else []
        print("\n".join([*said, f"record: {folder}"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval replay",
        description=(
            "Replay a trace of retrieved chunks against a cache of limited size. Without any"
            " setting of the grid it compares stock, CRAFT and ours, with unlimited capacity and"
            " with capacity for a quarter and an eighth of the distinct chunks, in tokens for at"
            f" least {SMALL_POOL:,}; for conversations also stock with an application that leaves"
            " out chunks already shown."
        ),
        epilog="\n".join(str(each.__doc__) for each in (trace_format, openai, spans, generated)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON Lines, plain or .gz; format below")
    text = "JSON Lines of model calls, plain or .gz: OpenAI requests, spans, our handlers' lines"
    source.add_argument("--log", type=Path, help=text)
    source.add_argument(
        "--generate", metavar="N", type=_at_least(1), help="N made requests; parameters below"
    )
    source.add_argument(
        "--fusionrag",
        metavar="N",
        type=_at_least(1),
        help="N made as FusionRAG's storage simulation; below",
    )
    source.add_argument(
        "--sys-x", metavar="N", type=_at_least(1), help="N made as Cache-Craft's workload; below"
    )
    text = (
        "use a task's requests, without lengths, instead of a trace; `python -m eval serve --help`"
        " lists tasks"
    )
    source.add_argument("--task", metavar="NAME", choices=TASKS, help=text)
    add = parser.add_argument
    add("--data", type=Path, help="folder that holds the task's folder")
    text = "conversations of a task under way, whose turns come in any order (--seed); default: 1"
    add("--at-once", metavar="N", type=_at_least(1), default=1, help=text)
    add("--components", type=Path, help="lengths by chunk id, as RAGPulse has them; format below")
    text = f"use only the first N requests; default: all, of generated tasks {GENERATED_REQUESTS}"
    add("--max-requests", type=_at_least(1), help=text)
    text = (
        "what stands between passages in a message of --log, a regular expression; what is before"
        " the first and after the last one is no passage, unless --between says where all stand"
    )
    add("--separator", metavar="REGEX", help=text)
    text = "the texts before and after all passages of a message, regular expressions"
    add("--between", nargs=2, metavar="REGEX", help=f"{text}; $ is the end, a first - is [-]")
    text = f"words, a tokenizer.json, a model's name; default: {BYTES_PER_TOKEN} bytes are a token"
    add("--tokenizer", help=f"counts the tokens of --log: {text}")
    add("--html", type=Path, help="draw the results as a page in this file")
    add("--seed", type=int, default=0, help="of made requests; default: %(default)s")
    text = (
        "three days of the trace, each with other documents, or another system prompt; topics: half"
        " of those of --generate are replaced each day"
    )
    add("--days", choices=days.CHANGES, help=text)
    _add_axes(parser)
    add_options(parser)
    add_timed_options(parser)
    text = "data-parallel ranks, each with a cache of its own; default: %(default)s"
    add("--ranks", type=_at_least(1), default=1, help=text)
    text = (
        f"requests under way at once, with several ranks; default: {IN_FLIGHT_PER_RANK} for each of"
        " them"
    )
    add("--in-flight", metavar="N", type=_at_least(1), help=text)
    add(
        "--warm-up",
        type=_at_least(0),
        default=0,
        help="serve the first N requests without measuring them",
    )
    text = (
        f"in requests; default: {BLOCK}, at least a {MAX_BLOCKS}th and at most a {MIN_BLOCKS}th of"
        " those measured"
    )
    add("--block", type=_at_least(1), help=f"block length of the bootstrap, {text}")
    add(
        "--worth",
        type=float,
        default=0.01,
        help="minimum gain, as a share, that is worth it; default: %(default)s",
    )
    add("--out", type=Path, help="the run's folder; default: runs/<time>-replay")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _add_axes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the grid: each takes one value or several, all combinations are replayed"
    )
    group.add_argument("--order", nargs="+", choices=ORDER_POLICIES, help="default: tree")
    text = "order of the remaining chunks under tree; default: seen"
    group.add_argument("--tail", nargs="+", choices=TAIL_POLICIES, help=text)
    group.add_argument("--eviction", nargs="+", choices=EVICTION_POLICIES, help="default: lru")
    group.add_argument("--admission", nargs="+", choices=ADMISSION_POLICIES, help="default: all")
    text = (
        "whether a conversation drops chunks already shown; default: off for the retriever's order,"
        " else shown"
    )
    group.add_argument("--dedup", nargs="+", choices=DEDUP_POLICIES, help=text)
    text = (
        "which chunks are copied to host memory: found cached before, promoted, either of them,"
        " all; default: either"
    )
    group.add_argument("--host-admission", nargs="+", choices=HOST_ADMISSIONS, help=text)
    text = (
        "of a token in host memory, when an order is chosen: 1 - time to load / time to compute;"
        " default: 0.9"
    )
    group.add_argument("--host-worth", nargs="+", type=float, metavar="SHARE", help=text)
    for name, minimum, text in (
        ("host", 0, "room in host memory, in the unit of the capacity, 0 for none; default: 0"),
        ("capacity", 0, "chunks (nodes) in the cache, 0 for no limit"),
        (
            "capacity-tokens",
            0,
            "tokens of chunks in the cache, 0 for no limit; alone it sets the comparison's sizes",
        ),
        ("window", 1, "requests counted; default: 1000"),
        ("threshold", 1, "promotion count; default: 2"),
        ("page-size", 1, "slots of a page of the KV pool, as the server's; default: 1"),
        ("k", 1, "first K chunks of each request; default: all, generated: 10"),
    ):
        group.add_argument(f"--{name}", nargs="+", type=_at_least(minimum), help=text)
    text = "with pages, also with chunks that one token fills up to whole pages"
    group.add_argument("--padded", action="store_const", const=(False, True), help=text)


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum} but got {text}")
        return int(text)

    return integer


def _trace(options: argparse.Namespace) -> Trace:
    """The source that the options name."""
    if options.data is not None and options.task is None:
        raise CommandError("--data requires --task; --trace names a trace")
    if options.at_once > 1 and options.task is None:
        raise CommandError("--at-once requires --task")
    if options.components is not None and options.trace is None:
        raise CommandError("--components requires --trace")
    if options.log is not None:
        return _log(options)
    if options.separator or options.between or options.tokenizer:
        raise CommandError("--separator, --between and --tokenizer require --log")
    if options.trace is not None:
        return TraceFile(
            options.trace, max_requests=options.max_requests, components=options.components
        )
    made = (
        (options.generate, GeneratedTrace, generated.K),
        (options.fusionrag, PooledTrace, generated.K),
        (options.sys_x, SysXTrace, generated.SYS_X_K),
    )
    for number, make, usual_k in made:
        if number is not None:
            num_requests = min(number, options.max_requests or number)
            more: dict[str, Any] = {}
            if make is PooledTrace and options.machine is not None:
                more = {"chunk_tokens": (options.chunk_tokens, options.chunk_tokens)}
            k = max(options.k or [usual_k])
            return make(num_requests, k=k, seed=options.seed, **more)
    return task_requests(options)


def _log(options: argparse.Namespace) -> LogFile:
    if options.between and not options.separator:
        raise CommandError("--between requires --separator")
    splitter = Splitter(options.separator, options.between) if options.separator else None
    try:
        tokens = load_tokens(options.tokenizer) if options.tokenizer else None
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    passages = Passages(splitter, tokens and (lambda text: len(tokens.offsets(text))))
    return LogFile(options.log, passages, max_requests=options.max_requests)


def _of_days(options: argparse.Namespace, trace: Trace) -> Trace:
    if options.days is None:
        return trace
    if options.days != "topics":
        return days.Days(trace, options.days)
    if options.generate is None:
        raise CommandError("--days topics requires --generate")
    drift = max(1, options.generate // (generated.TOPICS // 2))
    num_requests, k = days.NUM_DAYS * options.generate, max(options.k or [generated.K])
    return GeneratedTrace(num_requests, k=k, seed=options.seed, drift=drift)


def _with_bar(trace: Trace) -> Iterator[TraceRequest]:
    with progress("read", None) as bar:
        for request in trace:
            yield request
            bar.update()


def _block(block: int | None, num_requests: int) -> int:
    """Requests per block. Raises CommandError if too few blocks remain."""
    most = max(1, num_requests // MIN_BLOCKS)
    if block is not None and block > most:
        raise CommandError(
            f"--block {block} leaves fewer than {MIN_BLOCKS} blocks of {num_requests} requests:"
            f" give at most {most}"
        )
    return block or min(max(BLOCK, num_requests // MAX_BLOCKS), most)


def _timed(options: argparse.Namespace, facts: TraceFacts, trace: Trace) -> dict[str, Create]:
    check_timed(options, facts)
    config = server_config(options)
    assert config is not None
    names = arms_of(options)
    return {name: partial(TimedArm, name, facts, options, config, trace) for name in names}


def _measured(options: argparse.Namespace, facts: TraceFacts, trace: Trace) -> dict[str, Create]:
    """Key of a sample -> what measures it: first the trace itself, once per k, then the cells."""
    config = server_config(options)
    if options.in_flight is not None and options.ranks == 1:
        raise CommandError("--in-flight needs --ranks 2 or more")
    if config is not None and options.ranks > 1:
        raise CommandError("--ranks is not replayed with --reuse fused")
    cells = _cells(options, facts)
    found: dict[str, Create] = {}
    for cell in cells:
        found[f"trace/k={cell.k}"] = partial(TraceCell, cell.k, facts, warm_up=options.warm_up)
    for cell in cells:
        found[cell.key] = partial(_replay_cell, cell, facts, options)
    if config is not None:
        found |= {
            f"fused/{cell.key}": partial(FusedCell, cell, facts, options, config) for cell in cells
        }
    return found


def _drawn(
    options: argparse.Namespace, facts: TraceFacts, trace: Trace, measured: dict[str, Create]
) -> Survey:
    """Adds what a page shows to what is measured: breakdowns of stock and ours with the first
    limited capacity that a server could have, or none, and the mistakes."""
    if options.days or options.ranks > 1 or options.reuse != "exact" or options.model_shape:
        raise CommandError("--html goes without --days, --ranks, --reuse and --model-shape")
    cells = _cells(options, facts)
    ours = [cell for cell in cells if cell.order == "tree"]
    limited = [cell for cell in ours if cell.capacity_tokens or cell.capacity >= SMALL_POOL_CHUNKS]
    mine = next(iter([*limited, *ours]), None)
    labels = [{"cell": cell.label} for cell in cells]
    stock = None if mine is None else baseline_of(mine.label, labels)
    if mine is None or stock is None:
        raise CommandError("--html draws the comparison: leave the settings of the grid out")
    told, theirs = survey(trace), Cell(**stock["cell"])
    for cell in (theirs, mine):
        drawn = Breakdown(told, by_tokens=facts.has_lengths, warm_up=options.warm_up)
        measured[cell.key] = partial(
            ReplayCell, cell, facts, warm_up=options.warm_up, breakdown=drawn
        )
    for mistake in mistakes_of(told)[0]:
        served = replace(theirs, dedup=theirs.dedup and "off") if mistake.by_stock else mine
        measured[f"mistake/{mistake.name}"] = partial(
            MistakeCell, mistake, served, facts, warm_up=options.warm_up
        )
    return told


def _source(options: argparse.Namespace) -> str:
    path = options.log or options.trace
    return path.name if path else f"task {options.task}" if options.task else "made requests"


def _replay_cell(cell: Cell, facts: TraceFacts, options: argparse.Namespace) -> ReplayCell:
    replay = None
    if options.ranks > 1:
        in_flight = options.in_flight or IN_FLIGHT_PER_RANK * options.ranks
        ratio = ChunkCacheConfig.max_load_ratio
        replay = RanksReplay(
            cell.settings, num_ranks=options.ranks, in_flight=in_flight, max_load_ratio=ratio
        )
    return ReplayCell(cell, facts, warm_up=options.warm_up, replay=replay)


def _cells(options: argparse.Namespace, facts: TraceFacts) -> list[Cell]:
    axes = {name: getattr(options, name) for name in AXES}
    tokens = axes["capacity_tokens"]
    if tokens and not facts.has_lengths:
        raise CommandError(
            "--capacity-tokens needs a trace with lengths on every request, or --components"
        )
    if tokens and axes["capacity"]:
        raise CommandError("give --capacity or --capacity-tokens, not both")
    if max(axes["page_size"] or (1,)) > 1 and (not facts.has_lengths or options.reuse == "fused"):
        raise CommandError("--page-size needs a trace with lengths, and --reuse exact")
    if axes["padded"] and any(axes["host"] or ()):
        raise CommandError("--padded goes without --host")
    if any(axes["host"] or ()) and not any(tokens or axes["capacity"] or ()):
        raise CommandError(
            "--host needs --capacity or --capacity-tokens: nothing leaves an unlimited cache"
        )
    if wrong := [worth for worth in axes["host_worth"] or () if not 0 <= worth <= 1]:
        raise CommandError(f"--host-worth must be from 0 to 1 but got {wrong[0]:g}")
    has_conversations = bool(facts.num_turns)
    if any(values for name, values in axes.items() if name != "capacity_tokens"):
        return grid(axes, has_conversations=has_conversations)
    capacities = [(0, 0), *((0, size) for size in tokens)] if tokens else derived_capacities(facts)
    cells = comparison(capacities, has_conversations=has_conversations)
    return [cell for cell in cells if cell.order == "tree" or options.reuse == "exact"]


def _text(table: Mapping[str, Any]) -> str:
    """A table of the results, one line per row, columns aligned, its note below;
    without a package."""
    rows: Sequence[Mapping[str, str]] = table["rows"]
    lines = [[*rows[0]], *([row[column] for column in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    said = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*said, *([table["note"]] if table.get("note") else [])])
