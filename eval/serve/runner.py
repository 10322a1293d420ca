"""The measurement: sends blocks of requests to all arms in turn; each arm keeps the cache that its
own traffic filled.

    block   1            2            3            4
            stock ours   ours stock   ours stock   stock ours     one arm at a time, the others idle

Machine noise that lasts longer than a block affects all arms alike, and no arm is always first.
Cells whose servers can run at the same time are interleaved in the same way; the others are
measured one after the other, each with its own arms interleaved.

Only complete blocks are kept: after an interruption a block is repeated from its start.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from eval.errors import CommandError
from eval.progress import Bar, progress
from eval.run import Run, read_samples
from eval.serve.arms import Arm, skip_reason
from eval.serve.lane import Lane
from eval.serve.latency import lane_name
from eval.serve.peaks import peaks
from eval.serve.plan import Cell, Plan
from eval.serve.preprocessed import preprocess_chunks
from eval.serve.server_pool import Key, ServerPool, key_of
from eval.serve.workload import cut

T = TypeVar("T")
FACTS = "facts.json"
MAX_SERVERS = 6
"""Servers at a time, if one cell alone does not need more."""


def measure(run: Run, plan: Plan, cells: Sequence[Cell]) -> None:
    """Take every sample of `cells` x `plan.arms` that `run` does not hold yet; starts and stops the
    servers it needs.

    A sample is `{"key", "arm", "cell", "request", "warm_up", "metrics", "fates", "error"?, "block",
    "sent_s", ...}`. `plan.facts` is filled and stored in `<run.folder>/facts.json`, which
    `load_facts` reads.

    Raises:
        CommandError: a server does not start, is not reachable or dies; an arm's server lacks our
            cache; the plan's arms or servers cannot serve a cell.
    """
    arms = _usable(plan)
    if (
        len(cells) > 1
        and not plan.flush
        and (there := [arm.name for arm in arms if arm.url is not None])
    ):
        told = "later cells reuse the cache of earlier ones; --flush empties it"
        print(f"eval: {', '.join(there)}: {told}", file=sys.stderr)
    _drop_incomplete(run, plan, arms, cells)
    if run.samples:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        plan.facts.setdefault("resumed_at", []).append({"date": now, "samples": len(run.samples)})
    with (
        progress(
            "requests",
            sum(len(cell.requests) * len(arms) for cell in cells),
            initial=len(run.samples),
        ) as bar,
        asyncio.Runner() as loop,
        ServerPool(plan, run.folder / "logs") as servers,
    ):
        try:
            for together in side_by_side(cells, arms):
                # a group that has all its samples starts no server
                pairs = [(arm, cell) for cell in together for arm in arms]
                if missing := [
                    pair for pair in pairs if any(key not in run for key in _keys(*pair))
                ]:
                    _take(run, plan, servers, loop, bar, missing)
        finally:
            # also after Ctrl-C: the run that goes on reads what this part has learned
            (run.folder / FACTS).write_text(
                json.dumps(plan.facts, indent=1) + "\n", encoding="utf-8"
            )


def load_facts(folder: Path) -> dict[str, Any]:
    """The stored facts about servers of an earlier part of the run;
    {} for a new run, or one without samples."""
    try:
        return (
            dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
            # facts without samples are of a run that begins anew
            if read_samples(folder)
            else {}
        )
    except (CommandError, OSError, ValueError):
        return {}


def side_by_side(cells: Sequence[Cell], arms: Sequence[Arm]) -> Iterator[list[Cell]]:
    """Groups of consecutive cells that share no server and need at most MAX_SERVERS;
    a cell that needs more is alone."""
    together: list[Cell] = []
    keys: set[Key] = set()
    for cell in cells:
        needed = {key_of(arm, cell) for arm in arms}
        # a shared server would let one cell find what another has filled
        if together and (keys & needed or len(keys | needed) > MAX_SERVERS):
            yield together
            together, keys = [], set()
        together.append(cell)
        keys |= needed
    yield together


def turned(items: Sequence[T], number: int) -> list[T]:
    """The items in block `number`'s order: over the blocks each is equally often in each place,
    and before each other."""
    first = number // 2 % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if number % 2 else order


# Private, in order of use


def _usable(plan: Plan) -> list[Arm]:
    """The arms that can run here; the others are named once, and in the facts."""
    reasons = {
        arm.name: skip_reason(arm, contextpilot_python=plan.contextpilot_python)
        for arm in plan.arms
    }
    for name, reason in reasons.items():
        if reason is not None:
            plan.facts.setdefault("skipped", {})[name] = reason
            print(f"eval: {name} is skipped: {reason}", file=sys.stderr)
    if None not in reasons.values():
        raise CommandError("no arm can run here")
    return [arm for arm in plan.arms if reasons[arm.name] is None]


def _drop_incomplete(run: Run, plan: Plan, arms: Sequence[Arm], cells: Sequence[Cell]) -> None:
    """Drop incomplete blocks, written when the run was killed, so that they are measured again."""
    keys = {(arm.name, n): _keys(arm, cell) for n, cell in enumerate(cells) for arm in arms}
    blocks = [
        keys[arm.name, n][b.start : b.stop]
        for n, c in enumerate(cells)
        for b in _blocks(c, plan)
        for arm in arms
    ]
    run.drop({key for block in blocks if not all(key in run for key in block) for key in block})


def _take(
    run: Run,
    plan: Plan,
    servers: ServerPool,
    loop: asyncio.Runner,
    bar: Bar,
    pairs: Sequence[tuple[Arm, Cell]],
) -> None:
    """Take the missing samples of these arms in their cells, side by side;
    the servers of others are stopped."""
    # before others start: idle servers hold memory
    servers.keep({key_of(arm, cell) for arm, cell in pairs})
    with ExitStack() as stack:
        lanes, before = [], []
        for arm, cell in pairs:
            lanes.append(lane := Lane(arm, cell, plan, servers))
            if lane.reorderer:
                stack.callback(lane.reorderer.close)
            servers.flush(lane.server, lane.url)
            # before the replay, whose answers the lane counts as well
            before.append(servers.seconds(lane.server, lane.url))
        for lane in lanes:
            if lane.arm.preprocesses:
                told = preprocess_chunks(lane.url, lane.cell.requests)
                plan.facts.setdefault("preprocessed", {})[lane.name] = told
            _restore(run, loop, lane)
        blocks = [_blocks(lane.cell, plan) for lane in lanes]
        for number in range(max(map(len, blocks))):
            for lane, own in turned(list(zip(lanes, blocks, strict=True)), number):
                # blocks are complete or dropped, so the first key tells
                if number < len(own) and _keys(lane.arm, lane.cell)[own[number][0]] not in run:
                    _take_block(run, servers, loop, lane, own[number], number, plan.peaks)
                    bar.update(len(own[number]))
        for lane, started in zip(lanes, before, strict=True):
            if tiers := servers.tiers(lane.server, lane.url):
                plan.facts.setdefault("tiers", {})[lane.name] = tiers
            if lane.reorderer:
                plan.facts.setdefault("adapters", {})[lane.name] = lane.reorderer.counts
            if started and (ended := servers.seconds(lane.server, lane.url)):
                tree_s, order_s = ended[0] - started[0], ended[1] * lane.num_answers
                share = (tree_s + order_s) / lane.ttft_s if lane.ttft_s else None
                overhead = {
                    "tree_s": tree_s,
                    "order_s": order_s,
                    "ttft_s": lane.ttft_s,
                    "share": share,
                }
                plan.facts.setdefault("overhead", {})[lane.name] = overhead


def _restore(run: Run, loop: asyncio.Runner, lane: Lane) -> None:
    """After an interruption, continue the lane's clock and send what it has served again to the
    server, unmeasured."""
    served = [number for number, key in enumerate(_keys(lane.arm, lane.cell)) if key in run]
    if served:
        label = dict(lane.cell.label)
        # else the new blocks would lie at the times of the earlier ones
        lane.clock_s = max(
            s["done_s"] for s in run.samples if s["arm"] == lane.arm.name and s["cell"] == label
        )
        print(
            f"eval: {lane.arm.name}: sending {len(served)} requests again, unmeasured",
            file=sys.stderr,
        )
        loop.run(lane.replay(served))


def _take_block(
    run: Run,
    servers: ServerPool,
    loop: asyncio.Runner,
    lane: Lane,
    numbers: Sequence[int],
    block: int,
    has_peaks: bool,
) -> None:
    """Measure a block. Raises CommandError if requests failed because the server is gone;
    other failures are kept."""
    with peaks(lane.url) if has_peaks else nullcontext() as pool:
        samples = loop.run(lane.run(numbers))
    if pool is not None:
        samples[0]["pool"] = pool
    if errors := [sample["error"] for sample in samples if "error" in sample]:
        # raises before the block is kept: what a dead server failed is measured again
        servers.check(lane.server, lane.url)
        told = f"{len(errors)} of {len(samples)} requests failed: {errors[0]}"
        print(f"eval: {lane.arm.name}: {told}", file=sys.stderr)
    run.add_all(
        (f"{lane.name}/{sample['request']}", {**sample, "block": block}) for sample in samples
    )


def _keys(arm: Arm, cell: Cell) -> list[str]:
    return [f"{lane_name(cell.label, arm.name)}/{request.id}" for request in cell.requests]


def _blocks(cell: Cell, plan: Plan) -> list[range]:
    return cut(len(cell.requests), warm_up=plan.warm_up, block=plan.block)
