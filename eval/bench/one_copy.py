"""How many more requests fit into a KV pool in which a chunk has one copy, at any position?

    python -m eval bench one-copy --trace requests.jsonl.gz --components components.jsonl.gz
    python -m eval bench one-copy --generate 2000

Batches of consecutive requests, all running at once, over the server's own table of slots and rows
(sglang_chunkcache/attention/slot_map.py) and no tensors. Nothing was cached before. Counted at the
end, when each request has its answer, where the trace tells lengths:

    off        exact prefixes are shared; whatever else a request has is its own
    one copy   what another request of the batch has anywhere is shared, too, but for the share that
               is recomputed

Chunks are in the order of the product (`--order tree`, over what the batch has) or the retriever's.
`ratio` is rows off over rows with one copy, the tables counted as rows of `--token-bytes`; `times`
the whole requests that fit, one after another, into as many bytes as the batch takes off.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from eval.errors import CommandError
from eval.outcome import add_out_option, open_run, table, tell
from eval.progress import progress
from eval.replay.generated import PooledTrace
from eval.replay.trace import TraceFile, TraceRequest
from eval.run import Sample
from radix_ext import AccessTable, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks
from retrieval.command_line import Parser
from sglang_chunkcache import ChunkCacheConfig
from sglang_chunkcache.attention.slot_map import SlotMap

BATCHES = (8, 16, 32, 64, 128)
LLAMA3_8B = 131_072
"""Bytes of a token's KV in bfloat16."""
SLOTS_PER_ROW = ChunkCacheConfig().virtual_slots
Order = Callable[[Sequence[Chunk]], Sequence[Chunk]]


@dataclass
class _Node:
    """A chunk of a chain in the pool; `fused`: behind a moved one, or one itself."""

    slots: Tensor
    start: int
    is_moved: bool
    below: dict[ChunkId, _Node] = field(default_factory=dict)
    fused_below: dict[ChunkId, _Node] = field(default_factory=dict)


class Pool:
    """What a batch has in a pool of so many rows. `ratio` None: no chunk is moved."""

    def __init__(self, num_rows: int, ratio: float | None) -> None:
        self.slot_map, self._ratio = SlotMap(num_rows, SLOTS_PER_ROW * num_rows), ratio
        self._root = _Node(torch.empty(0, dtype=torch.int64), 0, is_moved=False)
        self._sources = dict[ChunkId, _Node]()
        self._next = 1

    def admit(self, chunks: Sequence[Chunk], num_own: int) -> bool:
        """The request's rows; False: they are not there. `num_own`: its question and answer."""
        node, at, position = self._root, 0, 0
        is_fused = False
        while at < len(chunks):
            chain = node.fused_below if is_fused else node.below
            found = chain.get(chunks[at].id)
            if found is None and not is_fused and self._ratio is not None:
                found = node.fused_below.get(chunks[at].id)
                is_fused = found is not None
            if found is None:
                break
            node, at, position = found, at + 1, position + chunks[at].num_tokens
        rest = chunks[at:]
        moved = [self._ratio is not None and each.id in self._sources for each in rest]
        num_shared = sum(each.num_tokens for each, is_in in zip(rest, moved, strict=True) if is_in)
        num_recomputed = math.ceil((self._ratio or 0.0) * num_shared)
        total = sum(each.num_tokens for each in rest)
        if total - num_shared + num_recomputed + num_own > self.slot_map.num_free:
            return False
        self.slot_map.reserve(num_recomputed)
        left = num_recomputed
        for chunk, is_in in zip(rest, moved, strict=True):
            slots = self._take(chunk.num_tokens)
            if is_in:
                self._share(slots, self._sources[chunk.id], position)
                share = min(left, math.ceil((self._ratio or 0.0) * len(slots)))
                left = self.slot_map.own(slots[:share], reserved=left)
            else:
                self.slot_map.assign(slots)
            is_fused = is_fused or is_in
            new = _Node(slots, position, is_moved=is_in)
            (node.fused_below if is_fused else node.below)[chunk.id] = new
            if not is_in:
                self._sources.setdefault(chunk.id, new)
            node, position = new, position + chunk.num_tokens
        self.slot_map.release(left)
        self.slot_map.assign(self._take(num_own))
        return True

    def _share(self, slots: Tensor, source: _Node, position: int) -> None:
        at = torch.arange(len(slots))
        rows = self.slot_map.rows(source.slots)
        self.slot_map.share(slots, rows, old=source.start + at, new=position + at)

    def _take(self, num_slots: int) -> Tensor:
        self._next += num_slots
        return torch.arange(self._next - num_slots, self._next)


class TreeOrder:
    """The product's order, over what the batch has so far."""

    def __init__(self) -> None:
        self._tree, self._accesses = ChunkPrefixTree(max_nodes=200_000), AccessTable(1000)

    def __call__(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        ordered = order_chunks(
            *("tree", self._tree, self._accesses, "", chunks), rank=0, max_visits=64
        ).chunks
        self._accesses.observe(chunk.id for chunk in chunks)
        self._tree.insert("", ordered, rank=0, tier=Tier.DEVICE, promoted_len=0)
        return ordered


def batches(requests: Sequence[TraceRequest], size: int, most: int) -> Iterator[int]:
    """Where so many requests begin, evenly over the trace; as many again follow."""
    starts = range(0, len(requests) - 2 * size + 1, size)
    yield from starts[:: max(1, math.ceil(len(starts) / most))]


def measure(
    requests: Sequence[TraceRequest], start: int, size: int, options: argparse.Namespace
) -> dict[str, float]:
    """Of the batch that begins there."""
    batch = requests[start : start + size]
    order: Callable[[], Order] = TreeOrder if options.order == "tree" else lambda: lambda x: x
    most = sum(map(_num_tokens, batch))
    off = _filled(requests[start : start + size], order(), Pool(most, None))
    one = _filled(requests[start : start + size], order(), Pool(most, options.ratio))
    used = off.slot_map.num_used
    table_rows = math.ceil(SlotMap(used, SLOTS_PER_ROW * used).nbytes / options.token_bytes)
    fitting = _num_fitting(requests[start:], order(), Pool(used - table_rows, options.ratio))
    return {
        "alone": most,
        "off": used,
        "one_copy": one.slot_map.num_used + table_rows,
        "times": fitting / size,
    }


def _num_tokens(request: TraceRequest) -> int:
    return sum(chunk.num_tokens for chunk in request.chunks) + _num_own(request)


def _num_own(request: TraceRequest) -> int:
    return (request.question_tokens or 0) + (request.output_tokens or 0)


def _filled(requests: Sequence[TraceRequest], order: Order, pool: Pool) -> Pool:
    for request in requests:
        assert pool.admit(order(request.chunks), _num_own(request)), "rows for each are there"
    return pool


def _num_fitting(requests: Sequence[TraceRequest], order: Order, pool: Pool) -> int:
    for number, request in zip(count(), requests, strict=False):
        if not pool.admit(order(request.chunks), _num_own(request)):
            return number
    return len(requests)


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Over all batches of a size."""
    rows: list[dict[str, Any]] = []
    for size in dict.fromkeys(one["cell"]["batch"] for one in samples):
        found = [one["metrics"] for one in samples if one["cell"]["batch"] == size]
        off, shared, alone = (
            sum(each[name] for each in found) for name in ("off", "one_copy", "alone")
        )
        rows.append(
            {
                "batch": size,
                "batches": len(found),
                "rows alone": round(alone / len(found)),
                "rows off": round(off / len(found)),
                "rows one copy": round(shared / len(found)),
                "ratio": round(off / shared, 3),
                "times": round(fmean(each["times"] for each in found), 3),
            }
        )
    verdict = [f"Batches of {row['batch']}: {row['ratio']} times the rows without." for row in rows]
    return {"verdict": verdict, "tables": [table("Rows of the KV pool at the peak", rows)]}


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = Parser(prog="python -m eval bench one-copy", description="Rows in use at the peak.")
    parser.add_argument("--trace", type=Path, help="as of `eval replay`")
    parser.add_argument("--components", type=Path, help="lengths by id, RAGPulse's own file")
    parser.add_argument("--generate", type=int, metavar="N", help="recurring chunks, no data")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--ratio", type=float, default=0.15, help="share that is recomputed")
    parser.add_argument("--order", choices=("tree", "retriever"), default="tree")
    parser.add_argument("--most", type=int, default=20, help="batches of each size")
    parser.add_argument("--token-bytes", type=int, default=LLAMA3_8B, help="of a token's KV")
    add_out_option(parser)
    options = parser.parse_args(argv)
    if (options.trace is None) == (options.generate is None):
        raise CommandError("one of --trace and --generate is required")
    trace: Any = (
        PooledTrace(options.generate)
        if options.trace is None
        else TraceFile(options.trace, components=options.components)
    )
    requests = [request for request in trace if request.chunks]
    torch.set_num_threads(1)
    todo = [(size, at) for size in options.batch for at in batches(requests, size, options.most)]
    with open_run("one-copy", options, summarize) as run, progress("filling", len(todo)) as bar:
        for size, start in todo:
            if (key := f"{size}/{start}") not in run:
                metrics = measure(requests, start, size, options)
                cell = {"batch": size}
                run.add(key, {"arm": "one copy", "cell": cell, "request": key, "metrics": metrics})
            bar.update()
    tell(run)
    return 0
