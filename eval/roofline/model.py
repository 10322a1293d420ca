"""Seconds of each step of a moved request, from what it does.

    copy        moved KV within the device
    question    its last tokens over all that is moved
    deviation   proposed tokens through the layers before the compared one
    choose      host alone
    recompute   critical tokens, over all before them
    extend      SGLang's prefill of the question
    wait        until the host goes on, behind what it reads back
    load        moved KV from host memory, in place of `copy`: beside the first pass

    seconds = max(device's work, host's launches) + host's work that nothing is beside

The device's work is products, or the weights and KV they read where that takes longer, and then
attention. A request is alone, answers take no time, the front process and SGLang's scheduler none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from eval.machines import (
    ATTENTION_SHARE,
    BUS_SHARE,
    GEMM_SHARE,
    GRAPH_LAYER_S,
    LAUNCH_S,
    MASKED_SHARE,
    MEMORY_SHARE,
    WAIT_S,
    Machine,
    Shape,
)
from eval.roofline.build import Build, Points
from radix_ext import FusionRequest
from radix_ext.fusion_request import proposed_share

if TYPE_CHECKING:
    from torch import Tensor

QUESTION_TOKENS, WINDOW_TOKENS = 64, 32
"""Of the question, and of its end that chooses (ChunkCacheConfig.question_window)."""
CHUNK_TOKENS = 512
DEPTH = 2
"""Layer whose KV is compared, from 1."""


class Prompt(NamedTuple):
    """All chunks are moved, a share of their tokens is recomputed."""

    num_tokens: int
    ratio: float

    @property
    def num_chunks(self) -> int:
        return ceil(self.num_tokens / CHUNK_TOKENS)

    @property
    def num_critical(self) -> int:
        return ceil(self.ratio * self.num_tokens)

    @property
    def num_candidates(self) -> int:
        share = sum(proposed_share(FusionRequest("critical", self.ratio)))
        return int(min(1.0, share) * self.num_tokens)


class Step(NamedTuple):
    """What is done, and how long it takes."""

    flops: float = 0.0
    device_bytes: float = 0.0
    """Read and written in the device's memory."""
    bus_bytes: float = 0.0
    launches: float = 0.0
    host_s: float = 0.0
    """Launches, and what nothing runs beside."""
    device_s: float = 0.0
    seconds: float = 0.0

    @property
    def bound(self) -> str:
        """What takes most of its time."""
        return "-" if not self.seconds else "device" if self.device_s > self.host_s else "host"


EVIDENCE = ("question", "deviation")
STEPS = ("copy", *EVIDENCE, "choose", "recompute", "extend", "wait", "load")


@dataclass(frozen=True)
class Model:
    """Of one machine, model shape and build."""

    machine: Machine
    shape: Shape
    build: Build

    def full(self, prompt: Prompt) -> Step:
        """SGLang's prefill of prompt and question."""
        rows = prompt.num_tokens + QUESTION_TOKENS
        return self._forward(rows, 1.0, rows * rows / 2, ATTENTION_SHARE, has_output=True)

    def steps(self, prompt: Prompt) -> dict[str, Step]:
        """By name, as `STEPS`."""
        build, kv = self.build, prompt.num_tokens * self.shape.token_bytes()
        num_waits = build.evidence_waits + build.pass_waits
        choose_s = _at(build.choose_s, prompt.num_tokens)
        wait_s = num_waits * WAIT_S
        return {
            "copy": self._copy(prompt, kv),
            "question": self._question(kv),
            "deviation": self._deviation(prompt),
            "choose": Step(host_s=choose_s, seconds=choose_s),
            "recompute": self._recompute(prompt),
            "extend": self._extend(prompt),
            "wait": Step(host_s=wait_s, seconds=wait_s),
            "load": self._load(prompt, kv),
        }

    def device_s(self, steps: Mapping[str, Step]) -> float:
        """All is on the device."""
        return sum(steps[name].seconds for name in STEPS if name != "load")

    def host_s(self, steps: Mapping[str, Step]) -> float:
        """All is in host memory: a pass may begin a layer once that is there. Launches of a load
        precede the first pass."""
        load, recompute = steps["load"], steps["recompute"]
        read_s = self.build.question_layers * load.device_s
        asked_s = max(load.host_s + steps["question"].seconds, read_s)
        chosen_s = asked_s + sum(steps[each].seconds for each in ("deviation", "choose", "wait"))
        last_s = load.device_s + recompute.seconds / self.shape.num_layers
        return max(chosen_s + recompute.seconds, last_s) + steps["extend"].seconds

    def scored_s(self, prompt: Prompt, steps: Mapping[str, Step]) -> float:
        """All is on the device and scored (`context`): no evidence is measured."""
        rest = sum(steps[name].seconds for name in ("copy", "recompute", "extend"))
        return _at(self.build.scored_s, prompt.num_tokens) + rest

    # Private, in order of use

    def _copy(self, prompt: Prompt, kv: float) -> Step:
        build = self.build
        launches = build.copy_launches + prompt.num_chunks * build.copy_chunk_launches
        host_s, device_s = launches * LAUNCH_S, 2 * kv / self._memory_rate
        return Step(0.0, 2 * kv, 0.0, launches, host_s, device_s, max(host_s, device_s))

    def _question(self, kv: float) -> Step:
        build, num_layers = self.build, self.shape.num_layers * self.build.question_layers
        launches = num_layers * build.question_launches + build.question_more
        # Products of so few tokens are less than the weights they read.
        return self._forward(
            WINDOW_TOKENS,
            build.question_layers,
            0.0,
            MASKED_SHARE,
            more_bytes=build.question_reads * kv * build.question_layers,
            launches=launches,
            layer_s=build.recompute_layer_s,
        )

    def _deviation(self, prompt: Prompt) -> Step:
        build, shape = self.build, self.shape
        num_candidates = prompt.num_candidates
        num_tokens = num_candidates if build.is_planned else prompt.num_tokens
        num_pieces = ceil(num_tokens / build.piece_tokens) if build.piece_tokens else 1
        pairs = num_candidates * prompt.num_tokens / 2
        # A piece reads what is before its end.
        seen = prompt.num_tokens * (num_pieces + 1) / 2
        layer_bytes = self.shape.token_bytes() / shape.num_layers
        launches = num_pieces * build.piece_launches
        if build.is_planned:
            assert build.piece_tokens is not None
            size = build.piece_tokens
            pairs = masked_pairs(prompt.num_tokens, num_candidates, size)
            launches += (masked_blocks(num_candidates, size) - num_pieces) * build.block_launches
        # The compared layer only projects: queries, keys and values.
        heads = shape.hidden * shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        projected = heads * shape.num_layers / shape.weights
        return self._forward(
            num_candidates,
            (DEPTH - 1 + projected) / shape.num_layers,
            # Layers before the compared one attend.
            pairs * (DEPTH - 1) / shape.num_layers,
            build.masked_share,
            more_bytes=build.piece_reads * (DEPTH - 1) * seen * layer_bytes,
            launches=launches,
            host_s=num_pieces * build.piece_s,
        )

    def _recompute(self, prompt: Prompt) -> Step:
        build, num_critical = self.build, prompt.num_critical
        pairs = num_critical * prompt.num_tokens / 2
        if build.is_planned:
            pairs = scattered_pairs(prompt.num_tokens, num_critical, self._tile_rows)
        rows = num_critical
        if not build.has_extend:
            rows += QUESTION_TOKENS
            pairs += QUESTION_TOKENS * prompt.num_tokens
        return self._forward(
            rows,
            1.0,
            pairs,
            build.recompute_share,
            launches=self.shape.num_layers * build.recompute_launches,
            layer_s=build.recompute_layer_s,
            host_s=build.recompute_s,
            has_output=not build.has_extend,
        )

    def _extend(self, prompt: Prompt) -> Step:
        if not self.build.has_extend:
            return Step()
        pairs = QUESTION_TOKENS * prompt.num_tokens
        return self._forward(
            QUESTION_TOKENS, 1.0, pairs, MASKED_SHARE, layer_s=GRAPH_LAYER_S, has_output=True
        )

    def _load(self, prompt: Prompt, kv: float) -> Step:
        build = self.build
        of_layer = build.load_launches + prompt.num_chunks * build.chunk_launches
        launches = self.shape.num_layers * of_layer
        host_s = launches * build.load_s
        device_s = kv / (self.machine.bus_bytes_s * BUS_SHARE)
        # Written; then keys are read, and written again where they are turned.
        return Step(0.0, 2 * kv, kv, launches, host_s, device_s, max(host_s, device_s))

    def _forward(
        self,
        rows: int,
        layers: float,
        pairs: float,
        share: float,
        *,
        more_bytes: float = 0.0,
        launches: float = 0.0,
        layer_s: float = 0.0,
        host_s: float = 0.0,
        has_output: bool = False,
    ) -> Step:
        """A pass of `rows` tokens.

        Args:
            layers: share of the model's.
            pairs: of a query and a key, a layer, as a mean over all layers.
            share: of the peak, in attention.
            layer_s: host time of a layer that a graph replays.
        """
        shape, machine = self.shape, self.machine
        products, attended = layers * rows * shape.token_flops, pairs * shape.pair_flops
        read = layers * 2 * shape.weights + more_bytes
        output = 2 * shape.hidden * shape.vocabulary * has_output
        work_s = max(products / machine.flops / GEMM_SHARE, read / self._memory_rate)
        work_s += attended / machine.flops / share
        launch_s = launches * LAUNCH_S + layers * shape.num_layers * layer_s
        output_s = output / self._memory_rate
        return Step(
            flops=products + attended,
            device_bytes=read + output,
            launches=launches,
            host_s=launch_s + host_s,
            device_s=work_s + output_s,
            seconds=max(work_s, launch_s) + output_s + host_s,
        )

    @property
    def _memory_rate(self) -> float:
        return self.machine.memory_bytes_s * MEMORY_SHARE

    @property
    def _tile_rows(self) -> int:
        import torch

        from sglang_chunkcache.attention.base import HeadShape
        from sglang_chunkcache.attention.flashinfer import tile_rows

        shape = self.shape
        heads = HeadShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
        return tile_rows(heads, "fa3" if self.machine.has_fa3 else "fa2")


@cache
def scattered_pairs(num_keys: int, num_rows: int, tile_rows: int) -> int:
    """Pairs that the sparse pass executes for tokens anywhere in a prompt, a layer."""
    import torch

    from eval.bench.attention.cells import executed_pairs
    from sglang_chunkcache.attention.base import SparseRequest
    from sglang_chunkcache.attention.sparse_layout import plan_sparse

    positions = _scattered(num_keys, num_rows)
    request = SparseRequest(positions, torch.arange(int(positions[-1]) + 1))
    return executed_pairs(plan_sparse([request], tile_rows=tile_rows), tile_rows)


@cache
def masked_pairs(num_keys: int, num_rows: int, piece_tokens: int) -> int:
    """Pairs that the masked passes execute for proposed tokens anywhere in a prompt, in a layer."""
    import torch

    from sglang_chunkcache.attention.base import PassSequence, SparseRequest
    from sglang_chunkcache.attention.masked_layout import plan

    positions, pairs = _scattered(num_keys, num_rows), 0
    for run in torch.split(positions, piece_tokens):
        end = int(run[-1]) + 1
        is_seen = torch.ones(end, dtype=torch.bool)
        is_seen[run] = False
        seen = is_seen.nonzero().flatten()
        layout = plan([PassSequence(run, SparseRequest(run, seen, seen))], "cpu")
        blocks = layout.sequences[0].blocks
        pairs += sum((block.end - block.start) * block.num_keys for block in blocks)
    return pairs


def masked_blocks(num_rows: int, piece_tokens: int) -> int:
    """Of queries, in all pieces."""
    from sglang_chunkcache.attention.masked_layout import BLOCK_ROWS

    full, rest = divmod(num_rows, piece_tokens)
    return full * ceil(piece_tokens / BLOCK_ROWS) + ceil(rest / BLOCK_ROWS)


def _scattered(num_keys: int, num_rows: int) -> Tensor:
    """[num_rows] int64, ascending: the same for the same numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randperm(num_keys, generator=generator)[:num_rows].sort().values


def _at(points: Points, num_tokens: int) -> float:
    """Between two points by a line; outside in proportion to the nearest."""
    low = max((each for each in points if each[0] <= num_tokens), default=None)
    high = min((each for each in points if each[0] >= num_tokens), default=None)
    if low is None or high is None:
        length, seconds = low or high or (1, 0.0)
        return seconds * num_tokens / length
    if low == high:
        return low[1]
    share = (num_tokens - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])
