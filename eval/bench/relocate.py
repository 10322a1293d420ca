"""How near does moving KV come to the rate at which the device copies?

    python -m eval bench relocate [--device cuda | cpu] [--quick]

Moves random KV, in a pool with SGLang's layout (SGLang need not be installed), to other slots and
positions. Slots are in order (`contiguous`) or random (`scattered`):

    move   to other slots, keys rotated
    turn   in place: what came from host memory

each by the kernel and by torch, layer by layer; on the CPU by torch alone. A rate is the number of
bytes of KV read and written, each counted once, over the time; the share is that rate over the rate
of a plain copy of as many bytes in the same round. Every round measures all arms
in a rotating order; shares are of medians, with 95% bootstrap intervals over rounds.

If both run, kernel and torch must give the same bits, or the command fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.bench.rounds import by_cell, create_timer, take_rounds, told_ratio
from eval.outcome import add_out_option, open_run, table, tell
from eval.run import Sample
from retrieval.command_line import Parser
from sglang_chunkcache.fusion.relocate import KeyTurn, RotaryTable, copy_moved

SEED = 0
ROPE_BASE = 500_000.0
SHAPES = {"llama3-8b": (32, 8, 128), "small": (4, 2, 64)}
"""Layers, KV heads on one rank, head size; bfloat16."""
TOKENS = {"cuda": (256, 1024, 4096, 16_384), "cpu": (256, 1024)}
SLOTS = ("contiguous", "scattered")
ROUNDS = 30


@dataclass(frozen=True)
class Pool:
    """The attributes of SGLang's pool that relocate.py uses:
    [slots, num_kv_heads, head_dim] per layer; slot 0 is not used."""

    k_buffer: list[Tensor]
    v_buffer: list[Tensor]
    dtype: torch.dtype = torch.bfloat16


class Arm(NamedTuple):
    """One way of moving bytes, how many it reads and writes, and the name of the plain copy of as
    many that it is compared with (None: it is one itself)."""

    work: Callable[[], object]
    num_bytes: int
    against: str | None


class Bench:
    """A pool, a blob and two lists of tokens, and the arms that move them."""

    def __init__(self, shape: str, num_tokens: int, slots: str, device: torch.device) -> None:
        num_layers, *head = SHAPES[shape]
        # slot 0 is SGLang's own, and no source slot is a target
        sizes = (2, num_layers, 1 + 2 * num_tokens, *head)
        keys, values = (
            list(side) for side in torch.randn(sizes, dtype=torch.bfloat16, device=device)
        )
        self.pool, self.buffers = Pool(keys, values), [*keys, *values]
        frequencies = ROPE_BASE ** (-torch.arange(0, head[1], 2) / head[1])
        angles = (torch.arange(2 * num_tokens)[:, None] * frequencies).to(device)
        self.table = RotaryTable(angles.cos(), angles.sin(), is_neox=True)
        order = torch.arange(2 * num_tokens)
        if slots == "scattered":
            # drawn on the CPU, so that every device moves the same slots
            order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(SEED))
        self.source, self.target = (1 + order).to(device).chunk(2)
        old, new = torch.arange(2 * num_tokens, device=device).chunk(2)
        self._from = {"source_slots": self.source, "source_positions": old}
        self._to = {"target_slots": self.target, "target_positions": new}
        plain = torch.stack([buffer[self.source] for buffer in self.buffers])
        self.plain = torch.empty_like(plain), plain
        self.num_bytes = 2 * plain.nbytes

    def move(self, *, use_kernel: bool) -> None:
        copy_moved(self.pool, self.table, **self._from, **self._to, use_kernel=use_kernel)

    def turn(self, *, use_kernel: bool) -> None:
        places = self._from["source_positions"], *self._to.values()
        turn = KeyTurn(self.pool, self.table, *places, use_kernel=use_kernel)
        for layer in range(len(self.pool.k_buffer)):
            turn(range(layer, layer + 1))

    def arms(self) -> dict[str, Arm]:
        """The arms by name; without CUDA those of torch only."""
        (target, plain), keys = self.plain, len(self.pool.k_buffer)
        arms = {
            "copy": Arm(partial(target.copy_, plain), self.num_bytes, None),
            "copy of keys": Arm(
                partial(target[:keys].copy_, plain[:keys]), self.num_bytes // 2, None
            ),
        }
        for path in ("kernel", "torch") if self.source.is_cuda else ("torch",):
            how = {"use_kernel": path == "kernel"}
            arms[f"move/{path}"] = Arm(partial(self.move, **how), self.num_bytes, "copy")
            turn = partial(self.turn, **how)
            arms[f"turn/{path}"] = Arm(turn, self.num_bytes // 2, "copy of keys")
        return arms

    def wrong(self) -> list[str]:
        """The operations for which kernel and torch give other bits."""
        found = []
        for name, work in (("move", self.move), ("turn", self.turn)):
            one, other = (
                self._outcome(partial(work, use_kernel=use_kernel)) for use_kernel in (True, False)
            )
            if not all(map(torch.equal, one, other)):
                found.append(name)
        return found

    def _outcome(self, work: Callable[[], None]) -> Sequence[Tensor]:
        # else an operation that writes nothing would agree with the one before
        for buffer in self.buffers:
            buffer[self.target] = 1
        work()
        return [buffer[self.target] for buffer in self.buffers]


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """GB/s of each arm and its share of the plain copy's rate;
    `wrong`: where kernel and torch give other bits."""
    rows = []
    for cell, arms in by_cell(samples):
        for arm, taken in arms.items():
            rate = taken[0]["bytes"] / median(one["metrics"]["moved_s"] for one in taken) / 1e9
            row = {**cell, "arm": arm, "GB/s": float(f"{rate:.3g}")}
            if (against := taken[0]["against"]) is not None:
                row["share of a plain copy"] = told_ratio(arms[against], taken, "moved_s")
            rows.append(row)
    wrong = sorted({f"{one['cell']}: {name}" for one in samples for name in one["wrong"]})
    verdict = [f"{where}: kernel and torch give other bits" for where in wrong]
    verdict += [
        f"{row['tokens']} tokens, {row['slots']}: the kernel moves at"
        f" {row['share of a plain copy']} of a copy's rate."
        for row in rows
        if row["arm"] == "move/kernel"
    ]
    if any(one["device"] == "cpu" for one in samples):
        verdict.append("Measured on the CPU, torch alone: the GPU figures are missing.")
    return {
        "verdict": verdict,
        "tables": [table("Rates of moving KV", rows)] if rows else [],
        "wrong": wrong,
    }


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print; returns 1 if kernel and torch disagree."""
    parser = Parser(
        prog="python -m eval bench relocate", description="Rate of moving KV."
    )
    parser.add_argument(
        "--device", choices=TOKENS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the small shape, 256 tokens, 3 rounds: does it run?"
    )
    add_out_option(parser)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    timed = create_timer(device)
    shapes, tokens, num_rounds = (
        (("small",), (256,), 3) if args.quick else (SHAPES, TOKENS[args.device], ROUNDS)
    )
    with open_run("relocate", args, summarize) as run:
        for shape, num_tokens, slots in product(shapes, tokens, SLOTS):
            bench = Bench(shape, num_tokens, slots, device)
            about = {
                "device": args.device,
                "wrong": bench.wrong() if device.type == "cuda" else [],
            }

            # bound as a default: the loop gives `about` another value
            def take(number: int, arm: Arm, about: Sample = about) -> Sample:
                about = {**about, "bytes": arm.num_bytes, "against": arm.against}
                return {**about, "metrics": {"moved_s": timed(arm.work)}}

            arms = {name: partial(take, arm=arm) for name, arm in bench.arms().items()}
            take_rounds(
                run, {"shape": shape, "tokens": num_tokens, "slots": slots}, arms, num_rounds
            )
    return 1 if tell(run)["wrong"] else 0
