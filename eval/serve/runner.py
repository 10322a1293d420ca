"""The measurement: sends blocks of requests to all arms in turn; each arm keeps the cache that its own traffic filled.

    block   1            2            3            4
            stock ours   ours stock   ours stock   stock ours        one arm at a time, the others idle

Machine noise that lasts longer than a block affects all arms alike, and no arm is always first. Cells whose servers can run at
the same time are interleaved in the same way; the others are measured one after the other, each with its own arms interleaved.

Only complete blocks are kept: after an interruption a block is repeated from its start.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eval.errors import CommandError
from eval.progress import Bar, progress
from eval.run import Run, read_samples
from eval.serve.arms import Arm, skip_reason
from eval.serve.lane import Lane
from eval.serve.latency import lane_name
from eval.serve.plan import Cell, Plan
from eval.serve.server_pool import Key, ServerPool, key_of
from eval.serve.workload import arrivals, cut

if TYPE_CHECKING:
    from eval.task import Request

T = TypeVar("T")
FACTS = "facts.json"


def measure(run: Run, plan: Plan, cells: Sequence[Cell]) -> None:
    """Take every sample of `cells` x `plan.arms` that `run` does not hold yet; starts and stops the servers it needs.

    A sample is `{"key", "arm", "cell", "request", "warm_up", "metrics", "fates", "error"?, "block", "sent_s", ...}`.
    `plan.facts` is filled and stored in `<run.folder>/facts.json`, which `load_facts` reads.

    Raises:
        CommandError: a server does not start, is not reachable or dies; an arm's server lacks our cache; the plan's arms or
            servers cannot serve a cell.
    """
    arms = _usable(plan)
    if (count := sum(arm.url is None for arm in arms)) > plan.max_servers:
        raise CommandError(f"{count} arms need {count} servers at once, more than --max-servers {plan.max_servers}")
    check(plan, cells)
    if len(cells) > 1 and not plan.flush and (there := [arm.name for arm in arms if arm.url is not None]):
        told = "later cells reuse the cache of earlier ones; --flush empties it"
        print(f"eval: {', '.join(there)}: {told}", file=sys.stderr)
    _drop_incomplete(run, plan, arms, cells)
    if run.samples:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        plan.facts.setdefault("resumed_at", []).append({"date": now, "samples": len(run.samples)})
    with (
        progress("requests", sum(len(cell.requests) * len(arms) for cell in cells), initial=len(run.samples)) as bar,
        asyncio.Runner() as loop,
        ServerPool(plan, run.folder / "logs") as servers,
    ):
        try:
            for together in side_by_side(cells, arms, max_servers=plan.max_servers):
                _Turns(run, plan, servers, loop, bar).take(together, arms)
        finally:
            (run.folder / FACTS).write_text(json.dumps(plan.facts, indent=1) + "\n", encoding="utf-8")


def check(plan: Plan, cells: Sequence[Cell]) -> None:
    """Raise CommandError for cells that cannot run, before a folder is created or a server is started."""
    for cell in cells:
        arrivals(cell.load, [request.arrival_s for request in cell.requests], seed=plan.seed)
        for arm in plan.arms:
            key_of(arm, cell)


def load_facts(folder: Path) -> dict[str, Any]:
    """The stored facts about servers of an earlier part of the run; {} for a new run, or one without samples."""
    try:
        return dict(json.loads((folder / FACTS).read_text(encoding="utf-8"))) if read_samples(folder) else {}
    except (CommandError, OSError, ValueError):
        return {}


def side_by_side(cells: Sequence[Cell], arms: Sequence[Arm], *, max_servers: int) -> Iterator[list[Cell]]:
    """Groups of consecutive cells that share no server and need at most `max_servers`; a cell that needs more is alone."""
    together: list[Cell] = []
    keys: set[Key] = set()
    for cell in cells:
        needed = {key_of(arm, cell) for arm in arms}
        if together and (keys & needed or len(keys | needed) > max_servers):
            yield together
            together, keys = [], set()
        together.append(cell)
        keys |= needed
    if together:
        yield together


def turned(items: Sequence[T], number: int) -> list[T]:
    """The items in block `number`'s order: over the blocks each is equally often in each place, and before each other."""
    first = number // 2 % len(items)
    order = [*items[first:], *items[:first]]
    return order[::-1] if number % 2 else order


# Private, in order of use


def _usable(plan: Plan) -> list[Arm]:
    """The arms that can run here; the others are named once, and in the facts."""
    usable = []
    for arm in plan.arms:
        reason = skip_reason(arm, contextpilot_python=plan.contextpilot_python)
        if reason is None:
            usable.append(arm)
            continue
        plan.facts.setdefault("skipped", {})[arm.name] = reason
        print(f"eval: {arm.name} is skipped: {reason}", file=sys.stderr)
    if not usable:
        raise CommandError("no arm can run here")
    return usable


def _drop_incomplete(run: Run, plan: Plan, arms: Sequence[Arm], cells: Sequence[Cell]) -> None:
    """Drop incomplete blocks, written when the run was killed, so that they are measured again."""
    incomplete: set[str] = set()
    for cell in cells:
        for block in _blocks(cell, plan):
            for arm in arms:
                keys = {_key(arm, cell, cell.requests[number]) for number in block}
                if any(key not in run for key in keys):
                    incomplete |= keys
    run.drop(incomplete)


@dataclass(frozen=True)
class _Turns:
    """Measures cells side by side."""

    run: Run
    plan: Plan
    servers: ServerPool
    loop: asyncio.Runner
    bar: Bar

    def take(self, cells: Sequence[Cell], arms: Sequence[Arm]) -> None:
        """Take the missing samples of all arms in the cells; the servers of others are stopped."""
        missing = [
            (arm, cell)
            for cell in cells
            for arm in arms
            if any(_key(arm, cell, r) not in self.run for r in cell.requests)
        ]
        self.servers.keep({key_of(arm, cell) for arm, cell in missing})
        with ExitStack() as stack:
            lanes, before = [], []
            for arm, cell in missing:
                lanes.append(lane := Lane(arm, cell, self.plan, self.servers))
                stack.callback(lane.close)
                self.servers.flush(lane.server, lane.url)
                before.append(self.servers.seconds(lane.server, lane.url))
            for lane in lanes:
                self._restore(lane)
            self._alternate(lanes)
            for lane, started in zip(lanes, before, strict=True):
                if counts := lane.counts():
                    self.plan.facts.setdefault("adapters", {})[lane.name] = counts
                if started and (ended := self.servers.seconds(lane.server, lane.url)):
                    overhead = _overhead(lane, ended[0] - started[0], ended[1])
                    self.plan.facts.setdefault("overhead", {})[lane.name] = overhead

    def _restore(self, lane: Lane) -> None:
        """After an interruption, continue the lane's clock and send its last requests again to the server."""
        requests = lane.cell.requests
        served = [number for number in range(len(requests)) if lane.key(number) in self.run]
        if not served:
            return
        mine = [s for s in self.run.samples if s["arm"] == lane.arm.name and s["cell"] == dict(lane.cell.label)]
        lane.clock_s = max(sample["done_s"] for sample in mine)
        missing = set(range(len(requests))) - set(served)
        recent = set(served[max(0, len(served) - self.plan.resume_warm_up) :])
        # A turn needs the turns before it.
        talks = {requests[number].conversation for number in missing | recent} - {None}
        again = [number for number in served if number in recent or requests[number].conversation in talks]
        print(f"eval: {lane.arm.name}: sending {len(again)} requests again, unmeasured", file=sys.stderr)
        if again:
            self.loop.run(lane.replay(again))

    def _alternate(self, lanes: Sequence[Lane]) -> None:
        """Send each lane's next block, lane by lane in rotating order, to the end of all."""
        blocks = [_blocks(lane.cell, self.plan) for lane in lanes]
        for number in range(max(map(len, blocks), default=0)):
            for lane, own in turned(list(zip(lanes, blocks, strict=True)), number):
                if number < len(own) and lane.key(own[number][0]) not in self.run:
                    samples = self.loop.run(lane.run(own[number]))
                    self._check(samples, lane)
                    self.run.add_all((f"{lane.name}/{s['request']}", {**s, "block": number}) for s in samples)
                    self.bar.update(len(own[number]))

    def _check(self, samples: Sequence[Mapping[str, Any]], lane: Lane) -> None:
        """Raise CommandError if requests failed because the server is gone; other failures are printed and kept."""
        errors = [sample["error"] for sample in samples if "error" in sample]
        if errors:
            self.servers.check(lane.server, lane.url)
            told = f"{len(errors)} of {len(samples)} requests failed: {errors[0]}"
            print(f"eval: {lane.arm.name}: {told}", file=sys.stderr)


def _overhead(lane: Lane, tree_s: float, order_s: float) -> dict[str, float | None]:
    """Seconds of our tree and of the order decisions of what the lane sent, and their share of the times to first token."""
    order_s *= lane.num_answers
    share = (tree_s + order_s) / lane.ttft_s if lane.ttft_s else None
    return {"tree_s": tree_s, "order_s": order_s, "ttft_s": lane.ttft_s, "share": share}


def _blocks(cell: Cell, plan: Plan) -> list[range]:
    return cut(len(cell.requests), warm_up=plan.warm_up, block=plan.block)


def _key(arm: Arm, cell: Cell, request: Request) -> str:
    return f"{lane_name(cell.label, arm.name)}/{request.id}"
