"""How near does moving KV come to the rate at which the device copies?

    python -m eval.bench.relocate [--device cuda | cpu] [--quick] [--shapes llama3-8b small] [--tokens 256 1024 4096 16384]
                                  [--rounds 30] [--tune] [--record [DIR]]

Moves random KV, in a pool with SGLang's layout (SGLang need not be installed), to other slots and positions. Slots are in order
(`contiguous`) or random (`scattered`):

    move     pool to pool, keys rotated             write    a blob on the device into the pool, keys rotated
    read     pool to blob, keys rotated back        load     as `write`, from host memory: pageable, as in the store, and
                                                             pinned

each by the kernel and by torch, layer by layer; on the CPU by torch alone. A rate is the number of bytes read and written, each
counted once, over the time; the share is that rate over the rate of a plain copy of as many bytes (`load`: to the device) in the
same round. Every round measures all arms in a rotating order; medians with 95% bootstrap intervals over rounds.

On CUDA times are the device's, by events: the device is kept busy until the host has queued everything, and its L2 cache is
overwritten first. On the CPU they are wall times. If both run, kernel and torch must give the same bits, or the command fails.
`--tune` adds `move` at other block sizes and numbers of warps than the kernel's own. Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eval.errors import CommandError
from eval.intervals import bootstrap
from eval.record import RESULTS, make_record, write_record
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved, read_blob, write_blob

SEED = 0
ROPE_BASE = 500_000.0
SLOTS = ("contiguous", "scattered")
BUSY_CYCLES = 20_000_000
"""About 10 ms, longer than the host takes to queue the slowest arm."""
L2_BYTES = 256 << 20
"""Several times any L2 cache."""
TUNED = [(tile_bytes, warps) for tile_bytes in (4096, 8192, 16384, 32768) for warps in (4, 8)]


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
        order = 1 + (
            torch.randperm(2 * num_tokens, generator=generator)
            if slots == "scattered"
            else torch.arange(2 * num_tokens)
        )
        self.source, self.target = (part.to(device) for part in order.chunk(2))
        self.old, self.new = (part.to(device) for part in torch.arange(2 * num_tokens).chunk(2))
        self.blob = self.read(use_kernel=False)
        plain = torch.stack(self.blob)
        self.plain = torch.empty_like(plain), plain

    def move(self, *, use_kernel: bool) -> None:
        copy_moved(
            self.pool,
            self.table,
            source_slots=self.source,
            source_positions=self.old,
            target_slots=self.target,
            target_positions=self.new,
            use_kernel=use_kernel,
        )

    def read(self, *, use_kernel: bool) -> tuple[Tensor, Tensor]:
        return read_blob(self.pool, self.table, self.source, self.old, use_kernel=use_kernel)

    def write(self, blob: tuple[Tensor, Tensor], *, use_kernel: bool) -> None:
        keys, values = blob
        write_blob(
            self.pool,
            self.table,
            keys,
            values,
            target_slots=self.target,
            target_positions=self.new,
            use_kernel=use_kernel,
        )

    def arms(self, *, tune: bool) -> dict[str, Arm]:
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
        for tile_bytes, warps in TUNED if tune else ():
            arms[f"move/{tile_bytes}x{warps}"] = Arm(partial(self._move_tuned, tile_bytes, warps), "copy")
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

    def _move_tuned(self, tile_bytes: int, warps: int) -> None:
        from sglang_chunkcache.fusion import relocate_kernel

        with _set(relocate_kernel, TILE_BYTES=tile_bytes, OPTIONS=relocate_kernel.OPTIONS | {"num_warps": warps}):
            self.move(use_kernel=True)


def measure(
    arms: Mapping[str, Arm], rounds: int, timed: Callable[[Callable[[], object]], float]
) -> list[dict[str, float]]:
    """Seconds of every arm, by name, for each round; an additional first round is warm-up."""
    names = list(arms)
    done = []
    for number in range(rounds + 1):
        first = number % len(names)
        done.append({name: timed(arms[name].work) for name in names[first:] + names[:first]})
    return done[1:]


def summarize(done: Sequence[Mapping[str, float]], arms: Mapping[str, Arm], num_bytes: int) -> dict[str, Any]:
    """GB/s and share of the plain copy's rate, each (median, low, high)."""
    report: dict[str, Any] = {}
    for name, arm in arms.items():
        row: dict[str, Any] = {"gb_per_s": _interval([num_bytes / seconds[name] / 1e9 for seconds in done])}
        if arm.against is not None:
            row["share"] = _interval([seconds[arm.against] / seconds[name] for seconds in done])
        report[name] = row
    return report


def _interval(samples: Sequence[float]) -> tuple[float, float, float]:
    value, low, high = (round(x, 4) for x in bootstrap(samples, median))
    return value, low, high


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that runs work and returns its seconds."""
    if device.type == "cpu":

        def by_wall(work: Callable[[], object]) -> float:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        return by_wall
    l2 = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def by_events(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        l2.zero_()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return by_events


def _table(head_dim: int, num_positions: int, device: torch.device) -> RotaryTable:
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return RotaryTable(angles.cos().to(device), angles.sin().to(device), is_neox=True)


@contextmanager
def _set(module: Any, **names: object) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def table(results: Mapping[str, Any]) -> str:
    """One line for each arm of each configuration."""
    lines = ["| shape, tokens, slots | arm | GB/s | share of a plain copy |", "|---|---|---|---|"]
    for name, result in results.items():
        for arm, row in result["arms"].items():
            cells = [
                f"{v:.{d}f} [{lo:.{d}f}, {hi:.{d}f}]" for d, (v, lo, hi) in zip((1, 3), row.values(), strict=False)
            ]
            lines.append(f"| {name} | {arm} | {' | '.join([*cells, ''][:2])} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns 1 if kernel and torch disagree, 2 for invalid options, 130 if interrupted."""
    try:
        return _run(_parse(argv))
    except (CommandError, FileExistsError) as error:  # FileExistsError: two records within a minute
        print(f"relocate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("relocate: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    timed = clock_of(device)
    results: dict[str, Any] = {}
    samples = []
    for name in args.shapes:
        for num_tokens in args.tokens:
            for slots in SLOTS:
                bench = Bench(SHAPES[name], num_tokens, slots, device)
                arms = bench.arms(tune=args.tune)
                same = bench.check() if device.type == "cuda" else {}
                done = measure(arms, args.rounds, timed)
                key = f"{name}, {num_tokens}, {slots}"
                results[key] = {"same_bits": same, "arms": summarize(done, arms, bench.num_bytes)}
                samples += [{"of": key, "seconds": seconds} for seconds in done]
                print(f"{key}: done", file=sys.stderr, flush=True)
                del bench, arms
    print(table(results))
    missing = None if device.type == "cuda" else "measured on the CPU, torch alone: the GPU figures are missing"
    if missing:
        print(missing)
    report = {"missing": missing, "configurations": results}
    if args.record:
        folder = write_record(make_record("relocate", spec=vars(args), results=report), results_dir=args.record)
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        print("record:", folder)
    print(json.dumps(report))
    wrong = [
        f"{key}, {name}" for key, result in results.items() for name, same in result["same_bits"].items() if not same
    ]
    for where in wrong:
        print(f"relocate: {where}: kernel and torch give other bits", file=sys.stderr)
    return 1 if wrong else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m eval.bench.relocate", description="Rate of moving KV.")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--quick", action="store_true", help="256 tokens, 3 rounds: does it run?")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--tokens", nargs="+", type=int, help="default: 256 1024 4096 16384; on the CPU 256 1024")
    add("--rounds", type=int)
    add("--tune", action="store_true", help="CUDA: other block sizes and numbers of warps as well")
    add("--record", type=Path, nargs="?", const=RESULTS, metavar="DIR", help="write a record; default: eval/results/")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not cuda:
        raise CommandError("--device cuda: there is no CUDA device")
    if args.tune and args.device == "cpu":
        raise CommandError("--tune: only the kernel has block sizes and warps, and it runs on CUDA")
    many = [256, 1024, 4096, 16384] if args.device == "cuda" else [256, 1024]
    args.tokens = args.tokens or ([256] if args.quick else many)
    if args.rounds is None:
        args.rounds = 3 if args.quick else 30
    if min(args.tokens) < 1 or args.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
