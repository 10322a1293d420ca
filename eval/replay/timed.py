"""`python -m eval replay --reuse fused --model-shape M --machine X`: times to first token of the
arms below, by bytes, operations and rates (eval/machines.py). No tensors, no model.

    stock      the retriever's order, LRU, the device alone
    hicache    the same, and all exact chains that leave the device in host memory
    exact      ours: order, eviction, host memory, the disk, if there is one
    fused      and every request with moved KV, by the server's own plans at these costs
    fusionrag  with --preprocessed and no disk: the retriever's order, all that can be moved is, the
               question chooses 15% (eval/serve/arms.py); each chunk is stored alone, and behind one
               that is asked for with it, since a trace has no nearest ones

A request is served alone, and answers take no time, but where --clients or --rates name a load
(queueing.py): then times are those of a queue, found tokens still those of one after the other. A
pass takes its floor (weights read, layers launched) and its arithmetic one after the other, a load
from host memory is not hidden behind a forward: at most the smaller of both too much.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.errors import CommandError
from eval.machines import (
    ATTENTION_SHARE,
    BUS_SHARE,
    CODEC_BITS,
    GEMM_SHARE,
    LAUNCH_S,
    LAYER_LAUNCHES,
    MACHINES,
    MEMORY_SHARE,
    SCATTERED_SHARE,
    SHAPES,
    Machine,
    Shape,
)
from eval.metrics import MIN_FOR_P99
from eval.replay.disk import Disk, Stored
from eval.replay.fused import FusedReplay, Timing
from eval.replay.grid import Cell
from eval.replay.queueing import Job, Step, figures
from eval.replay.trace import TraceFacts, TraceRequest
from eval.serve.arms import FUSIONRAG
from eval.serve.workload import Load
from radix_ext.backlog import Bounds
from radix_ext.costs import Costs, Line, Phase
from radix_ext.pool_slots import PoolSlots
from radix_ext.variants import Variant
from sglang_chunkcache import ChunkCacheConfig
from sglang_chunkcache.config import (
    MAX_SHARE,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    MAX_WAITING_S,
)

ARMS = {
    "stock": Cell("retriever", eviction="lru", host_admission=None),
    "hicache": Cell("retriever", eviction="lru", host_admission="all"),
    "exact": Cell(eviction="reused"),
    "fused": Cell(eviction="reused"),
    "fusionrag": Cell("retriever", eviction="reused"),
}
MOVING = ("fused", "fusionrag")
QUESTION_TOKENS = 64
"""Where the trace says nothing."""
HOST_RATIO = 2
"""Host memory over the device's pool, as a server's default on a machine with much of it."""
POOL_SHARE = 0.85
"""Of the GPU's memory for weights and KV, as SGLang leaves it."""


def add_timed_options(parser: argparse.ArgumentParser) -> None:
    """The options of the time model."""
    group = parser.add_argument_group(
        "times to first token by arithmetic; pools from --capacity-tokens and --host, one each, by"
        " default the machine's"
    )
    group.add_argument("--model-shape", choices=SHAPES, help="needs --reuse fused and --machine")
    group.add_argument("--machine", choices=MACHINES, help="GPU and bus")
    text = (
        "a storage that reads and writes so many GB a second; default: none. By their data sheets"
        " NVMe drives on PCIe 3.0 x4 read about 3.3 (Samsung PM1725a), on 4.0 6.5 to 7 (PM9A3)"
    )
    group.add_argument("--disk-gbps", type=float, help=text)
    group.add_argument("--disk-gib", type=int, default=1024, help="default: %(default)s")
    text = "how moved KV is kept; then host memory has no exact chains; default: none"
    group.add_argument("--codec", choices=CODEC_BITS, default="none", help=text)
    group.add_argument("--storage-wait", type=float, default=ChunkCacheConfig.storage_wait)
    text = (
        "each chunk of the trace is in the disk, or without one in host memory, before it begins;"
        " the latter adds the arm fusionrag"
    )
    group.add_argument("--preprocessed", action="store_true", help=text)
    text = "requests come at the trace's times; default: as the one before is done"
    group.add_argument("--arrivals", action="store_true", help=text)
    text = "also under a load: so many requests in flight"
    group.add_argument("--clients", nargs="+", type=int, default=[], metavar="N", help=text)
    text = "also under a load: so many requests a second, Poisson"
    group.add_argument("--rates", nargs="+", type=float, default=[], metavar="R", help=text)
    text = "of an answer, where the trace says nothing; default: %(default)s"
    group.add_argument("--output-tokens", type=int, default=64, help=text)


def costs_of(machine: Machine, shape: Shape, codec: str = "none") -> Costs:
    """What the phases take: seconds a call, a token, a pair."""
    weights_s = shape.weight_bytes / machine.memory_bytes_s / MEMORY_SHARE
    each = shape.token_flops / machine.flops / GEMM_SHARE
    dense, scattered = (
        shape.pair_flops / machine.flops / share for share in (ATTENTION_SHARE, SCATTERED_SHARE)
    )
    own = Line(max(weights_s, LAUNCH_S * LAYER_LAUNCHES * shape.num_layers), each, scattered)
    copied = 2 * shape.token_bytes() / machine.memory_bytes_s / MEMORY_SHARE
    bus = machine.bus_bytes_s * BUS_SHARE
    return {
        Phase.EXTEND: Line(weights_s, each, dense),
        Phase.RECOMPUTE: own,
        Phase.QUESTION: own,
        Phase.DEVIATION: own,
        Phase.DEVICE: Line(each=copied),
        Phase.HOST: Line(each=shape.token_bytes(codec) / bus),
        Phase.LOAD: Line(each=shape.token_bytes() / bus),
    }


def step_of(machine: Machine, shape: Shape) -> Step:
    """Decoding: weights and all KV are read."""
    costs = costs_of(machine, shape)[Phase.EXTEND]
    read = shape.token_bytes() / machine.memory_bytes_s / MEMORY_SHARE
    return lambda num_requests, num_tokens: (
        costs.fixed + costs.each * num_requests + read * num_tokens
    )


def arms_of(options: argparse.Namespace) -> list[str]:
    """Those of `ARMS` that the options have."""
    # its server compares no load with computing: `FusedDisk` always does
    has_fusionrag = options.preprocessed and options.disk_gbps is None
    return [name for name in ARMS if name != "fusionrag" or has_fusionrag]


def loads_of(options: argparse.Namespace) -> list[Load]:
    """Those that are asked for."""
    closed = [Load(clients=each) for each in options.clients]
    return [*closed, *(Load("poisson", rate=each) for each in options.rates)]


class TimedArm:
    """One of `ARMS`, as a cell.

    Args:
        trace: its chunks are preprocessed, where that is asked for.
    """

    def __init__(
        self,
        name: str,
        facts: TraceFacts,
        options: argparse.Namespace,
        config: ChunkCacheConfig,
        trace: Iterable[TraceRequest],
    ) -> None:
        self._name, self._options = name, options
        machine, shape = MACHINES[options.machine], SHAPES[options.model_shape]
        num_slots = pool_tokens(options)
        num_host = (options.host or [HOST_RATIO * num_slots])[0]
        codec = options.codec if name in MOVING else "none"
        is_shared = codec == "none" and name != "stock"
        token_bytes = shape.token_bytes(codec)
        cell = replace(ARMS[name], capacity_tokens=num_slots, host=num_host if is_shared else 0)
        host_bytes = max(1, num_host * shape.token_bytes())
        bounds = Bounds(MAX_WAITING, MAX_WAITING_S, MAX_WAITING_BYTES, int(MAX_SHARE * host_bytes))
        has_disk = options.disk_gbps is not None and name in ("exact", "fused")
        config = replace(config, storage_wait=options.storage_wait)
        if name == "fusionrag":
            selector, ratio = FUSIONRAG["selector"], FUSIONRAG["ratio"]
            config = replace(config, selector=selector, recompute_ratio=ratio, move="always")
        self._replay = FusedReplay(
            cell.settings,
            config,
            kv_bytes=token_bytes,
            store_bytes=host_bytes,
            prefill_budget=options.prefill_budget,
            chunk_tokens=facts.distinct_tokens / facts.distinct_chunks,
            share=options.fused_share if name in MOVING else 0.0,
            timing=Timing(
                costs_of(machine, shape, codec),
                shape.num_layers,
                options.prefill_budget,
                Disk(1e9 * options.disk_gbps, bounds) if has_disk else None,
                options.disk_gib << 30,
            ),
        )
        self._jobs = list[Job]()
        self._room = num_slots
        self._counts: list[int] = []
        self._first: dict[str, Any] = {}
        if name in MOVING and options.preprocessed:
            self._preprocess(trace, token_bytes, is_behind=False)
            if name == "fusionrag":
                self._preprocess(trace, token_bytes, is_behind=True)

    def step(self, request: TraceRequest) -> None:
        """Serve the request."""
        chunks = request.chunks[: (self._options.k or [None])[0]]
        if not chunks:
            return
        count = self._replay.step(
            chunks,
            head=request.head,
            arrival=request.timestamp if self._options.arrivals else None,
            question_len=request.question_tokens or QUESTION_TOKENS,
        )
        if not self._jobs:
            disk = self._replay.disk
            self._first = {
                "chunks": count.num_chunks,
                "tokens": count.tokens,
                "from_host": count.from_host,
                "ttft_s": self._replay.ttft_s,
                **(dict(disk.counts) if disk else {}),
            }
            self._counts = [0] * len(count)
        answer = max(1, request.output_tokens or self._options.output_tokens)
        question = request.question_tokens or QUESTION_TOKENS
        self._jobs.append(Job(self._replay.ttft_s, count.tokens + question, answer))
        self._counts = [a + b for a, b in zip(self._counts, count, strict=True)]

    @property
    def sample(self) -> dict[str, Any]:
        """Times in seconds, tokens by fate, the first prompt, and what the disk did."""
        replay, times = self._replay, sorted(job.prefill_s for job in self._jobs)
        fates = dict(zip(("num_chunks", "tokens"), self._counts, strict=False))
        names = ("exact", "relocated", "recomputed", "computed")
        fates |= dict(zip(names, self._counts[2:], strict=False))
        told: dict[str, Any] = {
            "arm": self._name,
            "num_requests": len(times),
            "mean_s": sum(times) / len(times),
            "p50_s": times[len(times) // 2],
            **({"p99_s": times[int(0.99 * len(times))]} if len(times) >= MIN_FOR_P99 else {}),
            **fates,
            "first": self._first,
        }
        if loads := loads_of(self._options):
            step = step_of(MACHINES[self._options.machine], SHAPES[self._options.model_shape])
            more: dict[str, Any] = {"room": self._room, "seed": self._options.seed}
            told["loads"] = [figures(self._jobs, load, step, **more) for load in loads]
        if (disk := replay.disk) is not None:
            told["disk"] = {
                **{name: disk.counts[name] for name in DISK_COUNTS},
                "busy_s": disk.disk.busy_s,
                "wait_s": disk.wait_s,
                "ms_per_mib": 1e3 * (disk.disk.loads.times.seconds(1 << 20) or 0.0),
            }
        return told

    def _preprocess(
        self, trace: Iterable[TraceRequest], token_bytes: int, *, is_behind: bool
    ) -> None:
        """Each chunk behind its first head, as `sglang_chunkcache.preprocess` leaves it: alone, or
        behind the chunk before it, a prompt's first one behind its last."""
        replay, seen = self._replay, set[Any]()
        for request in trace:
            for index, chunk in enumerate(request.chunks):
                neighbor = request.chunks[index - 1].id
                if chunk.id in seen or (is_behind and neighbor == chunk.id):
                    continue
                seen.add(chunk.id)
                nbytes, head = chunk.num_tokens * token_bytes, request.head or ""
                blob: Any = Stored(nbytes, chunk.num_tokens)
                store = replay.store if replay.disk is None else replay.disk.index
                if replay.disk is None and replay.host is not None:
                    blob = replay.host.nodes.room(chunk.num_tokens)
                if blob is None:
                    continue
                prefix = (neighbor,) if is_behind else ()
                variant = Variant(prefix, blob, preprocessed=is_behind, head=head)
                if not store.put(chunk.id, variant) and isinstance(blob, PoolSlots):
                    blob.give_back()


DISK_COUNTS = ("found", "loaded", "late", "left", "skipped", "tried", "written", "unwritten")


def pool_tokens(options: argparse.Namespace) -> int:
    """Of the device.

    Raises:
        CommandError: the model leaves no room.
    """
    if options.capacity_tokens:
        return int(options.capacity_tokens[0])
    machine, shape = MACHINES[options.machine], SHAPES[options.model_shape]
    left = POOL_SHARE * machine.memory_bytes - shape.weight_bytes
    if left <= 0:
        raise CommandError(f"{options.model_shape} does not fit an {options.machine}")
    return int(left / shape.token_bytes())


def check_timed(options: argparse.Namespace, facts: TraceFacts) -> None:
    """Raises CommandError: options that do not go together, or a trace that has no times."""
    if options.machine is None or options.model_shape is None or options.reuse != "fused":
        raise CommandError("--model-shape and --machine need each other, and --reuse fused")
    if options.days or options.ranks > 1 or facts.num_turns or not facts.has_lengths:
        raise CommandError(
            "times need lengths, one rank and days as they are, and requests without conversations"
        )
    if options.disk_gbps is not None and options.disk_gbps <= 0:
        raise CommandError("--disk-gbps must be over 0")
    amounts = (options.output_tokens, *options.clients, *options.rates)
    if not all(0 < each < math.inf for each in amounts):
        raise CommandError("--clients, --rates and --output-tokens must be over 0, and finite")
    if loads_of(options) and (options.arrivals or options.disk_gbps is not None):
        # a wait for a disk would hold up all that decode, which it does not on a server
        raise CommandError("--clients and --rates go neither with --arrivals nor with --disk-gbps")


def summarize_timed(
    spec: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`results`: a table, and in words what the disk did not bring."""
    rows = []
    stock = next((each for each in samples if each["arm"] == "stock"), None)
    for each in samples:
        first, disk = each["first"], each.get("disk", {})
        fates = ("exact", "relocated", "recomputed", "computed")
        rows.append(
            {
                "arm": each["arm"],
                "mean s": f"{each['mean_s']:.3f}",
                "p50": f"{each['p50_s']:.3f}",
                "p99": f"{each['p99_s']:.3f}" if "p99_s" in each else "-",
                "stock / arm": f"{stock['mean_s'] / each['mean_s']:.2f}" if stock else "-",
                **{fate: f"{each[fate] / each['tokens']:.1%}" for fate in fates},
                "first prompt s": f"{first['ttft_s']:.3f}",
                "from host memory": f"{first['from_host'] / first['tokens']:.1%}",
                "of chunks": str(first["chunks"]),
                "loaded": str(first.get("loaded", 0)) if disk else "-",
                **{f"disk: {name}": str(disk.get(name, "-")) for name in DISK_COUNTS},
            }
        )
    note = (
        "Seconds to the first token by arithmetic. First prompt: what the first request found."
        " Disk: chunks found there alone, loaded in time, late, left without room, skipped as"
        " computing is estimated sooner (per try), tried all the same."
    )
    under_load = [
        {
            "load": f"{load['clients']} clients" if "clients" in load else f"{load['rate']:g}/s",
            "arm": each["arm"],
            "mean s": f"{load['mean_s']:.3f}",
            "p50": f"{load['p50_s']:.3f}",
            "p99": f"{load['p99_s']:.3f}" if "p99_s" in load else "-",
            "requests/s": f"{load['requests_per_s']:.2f}",
        }
        for number in range(len(samples[0].get("loads", ())) if samples else 0)
        for each in samples
        for load in [each["loads"][number]]
    ]
    told = [_told(each) for each in samples if each.get("disk") and each["arm"] == "fused"]
    tables = [{"title": "Times to the first token", "rows": rows, "note": note}]
    if under_load:
        note = "By arithmetic, with waiting; what is found is as without a load."
        tables.append({"title": "Under load", "rows": under_load, "note": note})
    return {"tables": tables, "verdict": told, "arms": list(samples)}


def _told(sample: Mapping[str, Any]) -> str:
    disk = sample["disk"]
    if not disk["found"]:
        return "The disk had nothing that was not nearer."
    share = disk["loaded"] / disk["found"]
    if disk["skipped"] and disk["loaded"] + disk["late"] + disk["left"] < disk["found"] / 2:
        return (
            f"Computing is faster than this disk for most chunks: {share:.1%} of those found there"
            " were loaded."
        )
    return f"{share:.1%} of the chunks found on disk alone came in time."
