"""How near does moving KV come to the rate at which the device copies?

    python -m eval bench relocate [--device cuda | cpu] [--quick] [--shapes llama3-8b small] [--tokens 256 1024 4096 16384]
                                  [--rounds 30]

Moves random KV, in a pool with SGLang's layout (SGLang need not be installed), to other slots and positions. Slots are in order
(`contiguous`) or random (`scattered`):

    move     pool to pool, keys rotated             write    a blob on the device into the pool, keys rotated
    read     pool to blob, keys rotated back        load     as `write`, from host memory: pageable, as in the store, and
                                                             pinned

each by the kernel and by torch, layer by layer; on the CPU by torch alone. A rate is the number of bytes read and written, each
counted once, over the time; the share is that rate over the rate of a plain copy of as many bytes (`load`: to the device) in the
same round. Every round measures all arms in a rotating order; shares are of medians, with 95% bootstrap intervals over rounds.

If both run, kernel and torch must give the same bits, or the command fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.bench.timing import Timer, create_timer
from eval.outcome import add_out_option, interval, open_run, table, tell
from eval.run import Sample
from eval.stats import contrast
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved, read_blob, write_blob

SEED = 0
ROPE_BASE = 500_000.0
SLOTS = ("contiguous", "scattered")


@dataclass(frozen=True)
class Shape:
    """A model's KV on one rank, bfloat16."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return 2 * 2 * self.num_layers * self.num_heads * self.head_dim


SHAPES = {"llama3-8b": Shape(32, 8, 128), "small": Shape(4, 2, 64)}


@dataclass(frozen=True)
class Pool:
    """The attributes of SGLang's pool that relocate.py uses: [slots, num_kv_heads, head_dim] per layer; slot 0 is not used."""

    k_buffer: list[Tensor]
    v_buffer: list[Tensor]
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Arm:
    """One way of moving the bytes, and the name of the plain copy that it is compared with (None: it is one itself)."""

    work: Callable[[], object]
    against: str | None


class Bench:
    """A pool, a blob and two lists of tokens, and the arms that move them."""

    def __init__(self, shape: Shape, num_tokens: int, slots: str, device: torch.device) -> None:
        self.num_bytes = 2 * num_tokens * shape.token_bytes
        generator = torch.Generator().manual_seed(SEED)
        sizes = (1 + 2 * num_tokens, shape.num_heads, shape.head_dim)
        sides = [
            [torch.randn(sizes, dtype=torch.bfloat16, device=device) for _ in range(shape.num_layers)] for _ in range(2)
        ]
        self.pool = Pool(sides[0], sides[1])
        self.buffers = [*sides[0], *sides[1]]
        self.table = _table(shape.head_dim, 2 * num_tokens, device)
        order = 1 + torch.arange(2 * num_tokens)
        if slots == "scattered":
            order = 1 + torch.randperm(2 * num_tokens, generator=generator)
        self.source, self.target = (part.to(device) for part in order.chunk(2))
        old, new = (part.to(device) for part in torch.arange(2 * num_tokens).chunk(2))
        self._from = {"source_slots": self.source, "source_positions": old}
        self._to = {"target_slots": self.target, "target_positions": new}
        self.blob = self.read(use_kernel=False)
        plain = torch.stack(self.blob)
        self.plain = torch.empty_like(plain), plain

    def move(self, *, use_kernel: bool) -> None:
        copy_moved(self.pool, self.table, **self._from, **self._to, use_kernel=use_kernel)

    def read(self, *, use_kernel: bool) -> tuple[Tensor, Tensor]:
        return read_blob(self.pool, self.table, *self._from.values(), use_kernel=use_kernel)

    def write(self, blob: tuple[Tensor, Tensor], *, use_kernel: bool) -> None:
        write_blob(self.pool, self.table, *blob, **self._to, use_kernel=use_kernel)

    def arms(self) -> dict[str, Arm]:
        """The arms by name; without CUDA those of torch only."""
        arms = {"copy": Arm(partial(self.plain[0].copy_, self.plain[1]), None)}
        is_cuda = self.source.is_cuda
        for path, use_kernel in (("kernel", True), ("torch", False))[0 if is_cuda else 1 :]:
            arms[f"move/{path}"] = Arm(partial(self.move, use_kernel=use_kernel), "copy")
            arms[f"write/{path}"] = Arm(partial(self.write, self.blob, use_kernel=use_kernel), "copy")
            arms[f"read/{path}"] = Arm(partial(self.read, use_kernel=use_kernel), "copy")
        if not is_cuda:
            return arms
        pageable = self.blob[0].cpu(), self.blob[1].cpu()
        for memory, blob in (("pageable", pageable), ("pinned", (pageable[0].pin_memory(), pageable[1].pin_memory()))):
            arms[f"upload/{memory}"] = Arm(partial(self._upload, blob), None)
            arms[f"load/{memory}"] = Arm(partial(self.write, blob, use_kernel=True), f"upload/{memory}")
        return arms

    def check(self) -> dict[str, bool]:
        """For each operation, whether kernel and torch give the same bits."""
        works: dict[str, Callable[[bool], Sequence[Tensor]]] = {
            "move": lambda use: self._targets_after(lambda: self.move(use_kernel=use)),
            "write": lambda use: self._targets_after(lambda: self.write(self.blob, use_kernel=use)),
            "read": lambda use: self.read(use_kernel=use),
        }
        return {
            name: all(torch.equal(a, b) for a, b in zip(work(True), work(False), strict=True))
            for name, work in works.items()
        }

    def _targets_after(self, work: Callable[[], None]) -> list[Tensor]:
        for buffer in self.buffers:
            buffer[self.target] = 0
        work()
        return [buffer[self.target] for buffer in self.buffers]

    def _upload(self, blob: tuple[Tensor, Tensor]) -> None:
        for part, host in zip(self.plain[0], blob, strict=True):
            part.copy_(host, non_blocking=True)


def measure(arms: Mapping[str, Arm], number: int, timed: Timer) -> dict[str, float]:
    """Seconds of every arm, by name, in round `number`; each arm is first in turn."""
    names = list(arms)
    first = number % len(names)
    return {name: timed(arms[name].work) for name in names[first:] + names[:first]}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """GB/s of each arm and its share of the plain copy's rate; `wrong`: where kernel and torch give other bits."""
    rows, groups = [], dict[tuple[Any, ...], dict[str, list[Sample]]]()
    for one in samples:
        groups.setdefault(tuple(one["cell"].items()), {}).setdefault(one["arm"], []).append(one)
    for cell, arms in groups.items():
        times = {arm: [one["metrics"]["moved_s"] for one in taken] for arm, taken in arms.items()}
        for arm, taken in arms.items():
            row = {**dict(cell), "arm": arm, "GB/s": float(f"{taken[0]['bytes'] / median(times[arm]) / 1e9:.3g}")}
            if (against := taken[0]["against"]) is not None:
                pairs = list(zip(times[against], times[arm], strict=True))
                row["share of a plain copy"] = interval(contrast(pairs))
            rows.append(row)
    wrong = sorted({f"{dict(one['cell'])}: {name}" for one in samples for name in one["wrong"]})
    on_cpu = any(one["device"] == "cpu" for one in samples)
    verdict = [f"{where}: kernel and torch give other bits" for where in wrong]
    verdict += ["Measured on the CPU, torch alone: the GPU figures are missing."] if on_cpu else []
    return {"verdict": verdict, "tables": [table("Rates of moving KV", rows)] if rows else [], "wrong": wrong}


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print; returns 1 if kernel and torch disagree."""
    args = _parse(argv)
    device = torch.device(args.device)
    timed = create_timer(device)
    with open_run("relocate", args, summarize) as run:
        for shape, num_tokens, slots in product(args.shapes, args.tokens, SLOTS):
            name = f"{shape}/{num_tokens}/{slots}"
            missing = [number for number in range(args.rounds) if f"{name}/{number}/copy" not in run]
            if not missing:
                continue
            bench = Bench(SHAPES[shape], num_tokens, slots, device)
            arms = bench.arms()
            wrong = [name for name, same in bench.check().items() if not same] if device.type == "cuda" else []
            about: Sample = {"cell": {"shape": shape, "tokens": num_tokens, "slots": slots}, "wrong": wrong}
            about |= {"bytes": bench.num_bytes, "device": args.device}
            measure(arms, 0, timed)  # warm-up
            for number in missing:
                taken = measure(arms, number, timed).items()
                rows = (
                    {"arm": arm, **about, "against": arms[arm].against, "metrics": {"moved_s": s}} for arm, s in taken
                )
                run.add_all((f"{name}/{number}/{one['arm']}", {**one, "request": str(number)}) for one in rows)
            print(f"{name}: done", file=sys.stderr, flush=True)
            del bench, arms
    return 1 if tell(run)["wrong"] else 0


def _table(head_dim: int, num_positions: int, device: torch.device) -> RotaryTable:
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return RotaryTable(angles.cos().to(device), angles.sin().to(device), is_neox=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m eval bench relocate", description="Rate of moving KV.")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--quick", action="store_true", help="256 tokens, 3 rounds: does it run?")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--tokens", nargs="+", type=int, help="default: 256 1024 4096 16384; on the CPU 256 1024")
    add("--rounds", type=int)
    add_out_option(parser)
    args = parser.parse_args(argv)
    many = [256, 1024, 4096, 16384] if args.device == "cuda" else [256, 1024]
    args.tokens = args.tokens or ([256] if args.quick else many)
    if args.rounds is None:
        args.rounds = 3 if args.quick else 30
    if min(args.tokens) < 1 or args.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")
    return args
