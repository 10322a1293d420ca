"""Measures the phases before a first token on the loaded model, at the start: lengths from a
chunk's to a prompt's.

Each phase runs at sizes that are far apart. The longest prompt is as long as the pool, the context,
the prefill budget and `MAX_SECONDS` allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from radix_ext.costs import Phase, Work, extend_work, through
from sglang_chunkcache.attention.slot_map import rows_of
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.recompute import run_forward
from sglang_chunkcache.fusion.relocate import KeyTurn
from sglang_chunkcache.fusion.trial_rows import Means, Row
from sglang_chunkcache.scheduler.host_nodes import HostNodes

MAX_SECONDS = 1.0
"""Of the longest prefill; all takes about twelve times as long.
With .3, lines from 260 tokens were tenfold off at 2,500."""
MIN_TOKENS, MAX_TOKENS = 128, 4096
DEPTH = 2
"""Layers that KV is compared after."""


def measure_costs(means: Means, host: HostNodes, *, max_tokens: int) -> int:
    """Fill the model of `means.pricing`. Returns the tokens of the longest prompt; 0, and nothing
    measured, where the pool holds not two of 128.

    Args:
        means: slots and rows are given back.
        host: has the KV of chunks that are moved; its slots are given back, too.
        max_tokens: SGLang's prefill budget: memory is free for no more at a time; 128 are run in
            any case.
    """
    at_most = min(max(max_tokens, MIN_TOKENS), MAX_TOKENS)
    # Two rows. One position less than the context: `_copy` turns keys to the one after theirs,
    # which the rotary table must have.
    room: int = min(
        means.params.token_to_kv_pool_allocator.available_size() // 2,
        means.runner.model_config.context_len - 1,
        at_most,
    )
    if room < MIN_TOKENS:
        return 0
    with torch.no_grad(), means.rows([room, room]) as rows:
        trial = _Trial(means, rows, host)
        longest = max(MIN_TOKENS, min(room, int(MAX_SECONDS / trial.seconds_per_token())))
        trial.run(longest, min(means.window, longest // 4))
    return longest


class _Trial:
    def __init__(self, means: Means, rows: Sequence[Row], host: HostNodes) -> None:
        self._means, self._runner, self._pool = means, means.runner, means.pool
        (self._row, self._other), self._host = rows, host
        vocab_size = means.runner.model_config.vocab_size
        self._ids = torch.arange(len(self._row.slots)) % min(vocab_size, 997)

    def seconds_per_token(self) -> float:
        """Of a short prefill."""
        return min(self._clock(partial(self._extend, 0, MIN_TOKENS)) for _ in range(2)) / MIN_TOKENS

    def run(self, longest: int, window: int) -> None:
        """All phases."""
        over = partial(through, 1)
        quarter = longest // 4
        tail = longest - quarter
        # Tokens and keys vary apart: else a fit cannot tell `each` from `attended`.
        extends = [(longest - 8, longest), (0, quarter), (quarter, 2 * quarter)]
        extends += [(tail, longest), (0, longest)]
        # First: it fills the slots that the other phases read.
        self._time(Phase.EXTEND, self._extend, extends, extend_work)
        computed = [(8, longest), (quarter // 4, quarter), (quarter // 4, longest)]
        computed += [(quarter, longest)]
        self._time(Phase.RECOMPUTE, self._recompute, computed, over)
        asked = ((window // 2, quarter), (window, quarter), (window, longest - window))
        self._time(Phase.QUESTION, self._ask, asked, over)
        regions = ((end, end) for end in (quarter, 2 * quarter, longest))
        # A model of one layer is compared in that one.
        share = DEPTH / max(DEPTH, self._pool.layer_num)
        self._time(Phase.DEVIATION, self._deviate, regions, partial(through, share))
        lengths = [(1, n) for n in (quarter // 4, quarter, longest)]
        self._time(Phase.DEVICE, self._copy, lengths, Work)
        # Beforehand: the time is that of the way to the device alone.
        pool = self._host.pool
        num_held = min(longest, pool.num_slots)
        if (held := self._host.room(num_held)) is not None:
            pool.follow()
            pool.save(self._row.slots[:num_held], held.slots)
            self._held = pool.prepare(held.slots)
            fitting = [each for each in lengths if each[1] <= num_held]
            self._time(Phase.HOST, self._load, fitting, Work)
            held.give_back()

    # Private, in order of use

    def _time(
        self,
        phase: Phase,
        run: Callable[[int, int], Any],
        sizes: Iterable[tuple[int, int]],
        work: Callable[[int, int], Work],
    ) -> None:
        """The better of two calls: what a first one compiles or allocates, or a neighbour takes,
        counts for nothing."""
        for size in sizes:
            seconds = min(self._clock(partial(run, *size)) for _ in range(2))
            self._means.pricing.model.measure(phase, work(*size), seconds)

    def _clock(self, run: Callable[[], Any]) -> float:
        self._means.synchronize()
        # Kernels are only queued: the clock waits for what came before, and for the run itself.
        started = time.perf_counter()
        run()
        self._means.synchronize()
        return time.perf_counter() - started

    def _extend(self, start: int, end: int) -> None:
        run_forward(self._runner, self._row.number, self._ids[:end].tolist(), start, end)

    def _recompute(self, num_tokens: int, end: int) -> None:
        """Tokens spread over `[0, end)`, written again."""
        positions = torch.linspace(0, end - 1, num_tokens).long().tolist()
        self._means.recompute(self._row, self._ids, [positions])

    def _ask(self, num_tokens: int, end: int) -> None:
        positions = torch.arange(end, end + num_tokens)
        visible = torch.arange(end)
        question = QuestionProbe(
            self._ids[:num_tokens], positions, self._row.slots[:end], visible, ((0, end),), end
        )
        question_evidence(self._runner, [question])

    def _deviate(self, _: int, end: int) -> None:
        probe = DeviationProbe(self._ids[:end], self._row.slots[:end], ((0, end),), DEPTH)
        deviation_evidence(self._runner, [probe])

    def _copy(self, _: int, num_tokens: int) -> None:
        positions = torch.arange(num_tokens, device=self._row.slots.device)
        source, target = (row.slots[:num_tokens] for row in (self._row, self._other))
        self._means.move(source, positions, target, positions + 1)

    def _load(self, _: int, num_tokens: int) -> None:
        """Layer by layer, as beside a pass."""
        slots = self._other.slots[:num_tokens]
        positions = torch.arange(num_tokens, device=slots.device)
        turn = KeyTurn(self._pool, self._means.table, positions, slots, positions + 1)
        rows = rows_of(self._pool)(slots)
        for layer in range(self._pool.layer_num):
            layers = range(layer, layer + 1)
            self._host.pool.copy(self._held[:num_tokens], rows, layers)
            turn(layers)
