"""How the attention bench takes times: arms of one cell interleaved, each checked on a few rows before it is timed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from eval.bench.attention.arms import Arm
from eval.bench.attention.cells import Cell, make_kv, make_queries, make_requests
from eval.bench.timing import Timer
from eval.errors import CommandError
from eval.run import Sample
from sglang_chunkcache.attention.base import HeadShape, SparseAttention, SparseRequest
from sglang_chunkcache.attention.reference import attend

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative, against float32: what rounding inputs of length 1 and outputs leaves."""
CHECKED_ROWS = 8
"""Of each request at least, evenly over its queries, the last one among them."""
PLAN_REPEATS = 3
ROOF_SIDE = {"cuda": 8192, "cpu": 512}
ROOF_COPY_BYTES = {"cuda": 1 << 30, "cpu": 16 << 20}


@dataclass(frozen=True)
class Settings:
    """What all cells of a run have in common."""

    shape: HeadShape
    device: torch.device
    page_size: int
    repetitions: int


def measure_cell(
    cell: Cell, arms: Sequence[Arm], settings: Settings, timed: Timer, excluded: Mapping[str, str]
) -> Iterator[Sample]:
    """A sample of each repetition of each arm, with `layer_s` and `plan_s`; one with an `error` for an arm that failed."""
    pool = _Pool(cell, settings)
    failed = {arm.name: excluded[arm.name] for arm in arms if arm.name in excluded}
    prepared: dict[str, _Prepared] = {}
    for arm in arms:
        if arm.name not in failed:
            with _Guard(arm.name, cell, failed, settings.device):
                prepared[arm.name] = _Prepared(arm, pool)
                prepared[arm.name].check(CHECKED_ROWS)
    rng = random.Random(cell.name)
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(settings.repetitions):
        for name in rng.sample(sorted(times.keys() - failed.keys()), len(times.keys() - failed.keys())):
            with _Guard(name, cell, failed, settings.device):
                times[name].append(timed(prepared[name].run))
    for name, taken in times.items():
        for number, seconds in enumerate(taken) if name not in failed else ():
            metrics = {"layer_s": seconds, "plan_s": prepared[name].plan_s, **prepared[name].figures()}
            yield {"arm": name, "cell": vars(cell), "request": str(number), "metrics": metrics}
    for name, reason in failed.items():
        yield {"arm": name, "cell": vars(cell), "request": "0", "metrics": {}, "error": reason}


def check_arms(cells: Sequence[Cell], arms: Sequence[Arm], settings: Settings) -> dict[str, str]:
    """Every arm on all rows of small cells: name -> what is wrong with it."""
    wrong: dict[str, str] = {}
    for cell in cells:
        pool = _Pool(cell, settings)
        for arm in arms:
            if arm.name not in wrong:
                with _Guard(arm.name, cell, wrong, settings.device):
                    _Prepared(arm, pool).check(None)
    return wrong


def measure_roof(settings: Settings, timed: Timer) -> dict[str, float]:
    """FLOP/s of a matrix product in the arms' dtype and bytes/s of a copy: what the machine reaches at best."""
    kind, dtype = settings.device.type, settings.shape.dtype
    side, size = ROOF_SIDE[kind], ROOF_COPY_BYTES[kind]
    left, right = (torch.randn(side, side, device=settings.device).to(dtype) for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    product_s, copy_s = (
        min(timed(work) for _ in range(settings.repetitions))
        for work in (lambda: torch.mm(left, right), lambda: target.copy_(source))
    )
    return {"flops_per_s": 2 * side**3 / product_s, "bytes_per_s": 2 * size / copy_s}


class _Pool:
    """A cell's keys, values and queries: the arms share them."""

    def __init__(self, cell: Cell, settings: Settings) -> None:
        self.cell, self.settings = cell, settings
        self.keys, self.values = make_kv(cell, settings.shape, page_size=settings.page_size, device=settings.device)
        self._queries: dict[int, Tensor] = {}

    def queries(self, count: int) -> Tensor:
        """[count, num_qo_heads, head_dim]."""
        if count not in self._queries:
            self._queries[count] = make_queries(count, self.settings.shape, device=self.settings.device)
        return self._queries[count]


class _Prepared:
    """An arm that is planned and has its queries."""

    def __init__(self, arm: Arm, pool: _Pool) -> None:
        self._attention: SparseAttention = arm.make()
        self._pool = pool
        self._requests = make_requests(
            pool.cell, page_size=pool.settings.page_size, whole=arm.whole, contiguous=arm.contiguous
        )
        times = []
        for _ in range(PLAN_REPEATS):
            if pool.keys.is_cuda:
                torch.cuda.synchronize(pool.keys.device)
            start = time.perf_counter()
            order = self._attention.plan(self._requests)
            times.append(time.perf_counter() - start)
        self._order = order
        self.plan_s = median(times)
        self._tokens = pool.queries(sum(request.positions.numel() for request in self._requests))
        self._queries = self._tokens if order is None else self._tokens[order.to(self._tokens.device)]

    def run(self) -> Tensor:
        """One layer."""
        return self._attention.run(self._queries, self._pool.keys, self._pool.values)

    def figures(self) -> dict[str, float]:
        """MiB that the plan took, as far as the arm tells."""
        found: dict[str, int] = getattr(self._attention, "figures", {})
        return {name.replace("_bytes", "_mib"): size / 2**20 for name, size in found.items()}

    def check(self, num_rows: int | None) -> None:
        """Raises ValueError where `num_rows` rows of each request, or all, differ from the reference."""
        out = self.run()
        if self._order is not None:
            out = torch.empty_like(out).index_copy_(0, self._order.to(out.device), out)
        start, chosen, asked = 0, [], []
        for request in self._requests:
            count = request.positions.numel()
            step = torch.arange(count - 1, -1, -max(1, count // (num_rows or count))).flip(0)
            chosen.append(start + step)
            asked.append(
                SparseRequest(request.positions[step], request.kv_pages, request.num_keys, request.kv_positions)
            )
            start += count
        rows = torch.cat(chosen).to(out.device)
        shape, pool = self._pool.settings.shape, self._pool
        expected, _ = attend(
            self._tokens[rows],
            pool.keys,
            pool.values,
            asked,
            page_size=pool.settings.page_size,
            scale=shape.head_dim**-0.5,
        )
        tolerance = TOLERANCES[shape.dtype]
        difference = (out[rows].float() - expected).abs()
        if not bool((difference <= tolerance * (1 + expected.abs())).all()):  # NaN is no agreement either
            raise ValueError(f"wrong: differs from the reference by up to {float(difference.max()):.2g}")


class _Guard:
    """Notes why an arm failed instead of raising it. Raises CommandError where the device is lost with it."""

    def __init__(self, name: str, cell: Cell, failed: dict[str, str], device: torch.device) -> None:
        self._name, self._cell, self._failed, self._device = name, cell, failed, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        text = str(error).strip() or type(error).__name__
        reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else text.splitlines()[0][:200]
        self._failed[self._name] = reason
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
            except RuntimeError as lost:
                raise CommandError(
                    f"{self._cell.name}: {self._name} took the device with it ({reason}): leave it out by --arms"
                ) from lost
        return True
