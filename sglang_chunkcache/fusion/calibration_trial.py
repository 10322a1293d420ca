"""Measures, on prompts, which layers and heads of the loaded model tell the tokens that matter.

    full     head | A | B | C | question | answer     ordinary prefill, and the answer that follows from it, greedily
    apart    head | C | B | A, and each alone         the chunks' KV as it is computed in other places
    moved    head | A | B | C | question | answer     moved from there, some tokens recomputed, question and answer as in full

    gain = 1 - KL(full, moved and recomputed) / KL(full, moved)       mean over the answer's tokens

A choice of `ratio` of the tokens is tried for the deviation at each depth and for the question's attention in each layer (in a
deep model at every few, then beside the best). Chosen are those that gain most per second that the request takes with them, by
the cost model. Heads are chosen by how many of the tokens that deviate most at that depth are among the `BY_CONTEXT` tokens that
look beyond their chunk most. Then tokens are recomputed down to less and less deviation, which tells how much of it may stay
(ratio "auto"). Everything is read and written in slots of the trial's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.chunk import ChunkId
from radix_ext.costs import NOMINAL, Phase, extend_work, seconds, through
from radix_ext.fusion_request import BY_CONTEXT, MAX_AUTO
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.masked import Observer, SequenceAttention
from sglang_chunkcache.fusion.calibration import Calibration, Step, file_of, load, save
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    Head,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.pricing import Pricing
from sglang_chunkcache.fusion.recompute import run_pass, run_virtual
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved
from sglang_chunkcache.fusion.selectors import critical
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.fusion.selectors.top_k import highest, jointly_highest, num_critical
from sglang_chunkcache.fusion.store import ChunkScores
from sglang_chunkcache.fusion.trial_rows import Row, logits_of, rows_of, slots_of
from sglang_chunkcache.wire.state import CalibrationPrompt

logger = logging.getLogger(__name__)

MAX_ANSWER = 12
"""Tokens of an answer that are compared."""
NUM_ROWS, NUM_PLACES = 3, 2
"""Prompts whose KV is there at a time. Where a prompt's chunks are computed before they are moved: in turned order, and alone."""
MAX_TRIED = 8
"""Depths, and layers, that are tried before the neighbours of the best."""
MAX_HEADS = 4
MIN_RECALL = 0.05
"""What a further head must add. With .01 the bundled model's second one cost other questions .05 of exact match (eval/LOG.md)."""
SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
"""Of all tokens: the shares whose least deviation is tried as the limit."""
MAX_SECONDS = 30
"""About: fewer prompts are tried, one at least, where all of them would take longer. Fewer prompts find less, but SGLang's health
check fails after 20 s in which nothing is answered."""
MIN_KL, MIN_GAIN = 1e-4, 0.1
"""Below, there is nothing to restore, or no depth, or no layer that restores it: the paper's stays."""
MIN_KEPT = 0.9
"""Share of what comparing all tokens gains that comparing the proposed ones must; else all are compared."""


@dataclass(frozen=True)
class Means:
    """What the trial runs with: SGLang's ModelRunner, its pools, and how the server moves and recomputes."""

    runner: Any
    table: RotaryTable
    params: Any
    sparse: SparseAttention | None
    window: int
    pricing: Pricing


class Calibrator:
    """Measures the loaded model, and remembers what it found.

    ratio: share of the tokens that choices are tried with. keeps: whether weights with the same fingerprint are the same.
    """

    def __init__(self, means: Means, ratio: float, *, keeps: bool) -> None:
        self._means, self._ratio, self._keeps = means, ratio, keeps

    def num_slots(self, prompts: Sequence[CalibrationPrompt], room: int) -> int:
        """KV slots that measuring takes.

        Raises:
            ValueError: no prompt, one longer than the context, or more than `room` slots; with the figures.
        """
        if not prompts:
            raise ValueError("calibration needs prompts")
        longest = max(prompt.num_tokens for prompt in prompts) + MAX_ANSWER
        needed = NUM_ROWS * longest + NUM_PLACES * sum(prompt.num_tokens for prompt in prompts)
        if longest > self._means.runner.model_config.context_len or needed > room:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens need {needed} KV slots, {room} can be had"
            )
        return needed

    def kept(self, weights: int) -> Calibration:
        """What was found with these weights (their fingerprint); the papers' layers if nothing was."""
        kept = load(self._file(weights)) if self._keeps else None
        if kept is not None:
            logger.info("chunk cache: selection was calibrated on these weights before: %s", kept.as_dict())
        return kept or Calibration()

    def measure(self, prompts: Sequence[CalibrationPrompt], weights: int) -> Calibration:
        """See `calibrate`. What was found is kept, too."""
        found = calibrate(self._means, prompts, self._ratio)
        if self._keeps and found.is_found:
            save(self._file(weights), found)
        return found

    def _file(self, weights: int) -> Path:
        return file_of(self._means.runner.model_config.hf_config, weights)


def calibrate(means: Means, prompts: Sequence[CalibrationPrompt], ratio: float) -> Calibration:
    """Layers and heads of the loaded model.

    Raises:
        RuntimeError: the pools have too few free slots or rows.
    """
    started = time.perf_counter()
    lens = [prompt.num_tokens for prompt in prompts]
    longest = max(lens) + MAX_ANSWER
    is_cuda = torch.device(means.runner.device).type == "cuda"
    if is_cuda:  # the attention backend's buffers may serve a batch that still runs
        torch.cuda.synchronize()
    with (
        torch.no_grad(),
        rows_of(means.params, [longest] * NUM_ROWS) as rows,
        slots_of(means.params, NUM_PLACES * sum(lens)) as slots,
    ):
        parts = torch.split(slots, [n for n in lens for _ in range(NUM_PLACES)])
        own = [parts[i : i + NUM_PLACES] for i in range(0, len(parts), NUM_PLACES)]
        places: list[_Place] = []
        for prompt, part in zip(prompts, own, strict=True):
            places += _Trial(means, prompt, rows).places(part)
            if time.perf_counter() - started > MAX_SECONDS / 3:
                break
        found = _Search(means, places, ratio).run()
        if is_cuda:
            torch.cuda.synchronize()
    figures = {**found.figures, "ratio": ratio, "seconds": round(time.perf_counter() - started, 2)}
    return replace(found, figures=figures)


class Agreement(NamedTuple):
    """With full prefill's answer: KL of its tokens, mean and maximum; as a gain, the share of either that is restored."""

    kl: float
    kl_max: float

    @classmethod
    def mean(cls, each: Iterable[Agreement]) -> Agreement:
        """Over answers; rounded, for people."""
        return cls(*(round(fmean(column), 6) for column in zip(*each, strict=True)))


class _Search:
    """What choices gain, on average over the places."""

    def __init__(self, means: Means, places: Sequence[_Place], ratio: float) -> None:
        self._means, self._ratio = means, ratio
        self._num_layers = means.runner.token_to_kv_pool.layer_num
        # Of one place: three lists of choices, and for each choice evidence, a pass, question and answer.
        num_choices = 2 * min(self._num_layers, 2 * MAX_TRIED) + len(SHARES)
        expected, moved = 0.0, list[Agreement]()
        for place in places:
            started = time.perf_counter()
            agreement = place.agreement([])
            expected += 3 * num_choices * (time.perf_counter() - started)
            if len(moved) >= NUM_PLACES and expected > MAX_SECONDS * 2 / 3:
                break
            moved.append(agreement)
        self._places, self._moved = places[: len(moved)], Agreement.mean(moved)

    def run(self) -> Calibration:
        if self._moved.kl < MIN_KL:
            return Calibration(figures=self._figures())
        depths = self._try(range(2, self._num_layers + 1), lambda place, depth: place.deviation(depth), self._deviating)
        layers = self._try(range(1, self._num_layers + 1), lambda place, layer: place.question(layer), self._asking)
        depth, layer = _best(depths, otherwise=Calibration.depth), _best(layers, otherwise=Calibration.layer)
        heads, recall = self._heads(depth)
        whole, some = (
            {place: place.critical(depth, layer, each, self._ratio) for place in self._places} for each in ((), heads)
        )
        gain_of_all, gain = (
            self._gain(measured.choose(self._ratio) for measured in each.values()) for each in (whole, some)
        )
        if gain.kl < MIN_KEPT * gain_of_all.kl:
            heads, some = (), whole
        figures = self._figures(
            gain_by_depth={at: gain._asdict() for at, (gain, _) in sorted(depths.items())},
            gain_by_layer={at: gain._asdict() for at, (gain, _) in sorted(layers.items())},
            recall_of_heads=round(recall, 4),
            gain_of_critical=gain._asdict(),
            gain_of_critical_on_all=gain_of_all._asdict(),
        )
        return Calibration(depth, layer, heads, self._steps(some.values()), figures)

    def _figures(self, **more: Any) -> dict[str, Any]:
        return {"places": len(self._places), "moved": self._moved._asdict(), **more}

    def _steps(self, measured: Collection[_Measured]) -> tuple[Step, ...]:
        """What recomputing everything above a limit gains, for limits that some share of all tokens exceeds."""
        compared = torch.cat([each.compared for each in measured]).sort(descending=True).values
        num_tokens = sum(chunk.num_tokens for each in measured for chunk in each.chunks)
        steps = []
        for share in SHARES:
            if (k := num_critical(share, num_tokens)) >= len(compared):
                break
            above = float(compared[k])
            gain = self._gain(each.choose(MAX_AUTO, above) for each in measured)
            steps.append(Step(above, gain.kl, share))
        return tuple(steps) if any(step.gain >= MIN_GAIN for step in steps) else ()

    def _try(
        self,
        choices: range,
        score_of: Callable[[_Place, int], Tensor],
        seconds_of: Callable[[int], float],
    ) -> dict[int, tuple[Agreement, float]]:
        """(gain, gain per second) of the choices that were tried."""
        tried: dict[int, tuple[Agreement, float]] = {}

        def attempt(at: int) -> None:
            if at in choices and at not in tried:
                gain = self._gain(place.highest(score_of(place, at), self._ratio) for place in self._places)
                tried[at] = gain, gain.kl / seconds_of(at)

        step = ceil(len(choices) / MAX_TRIED) or 1
        for at in choices[::step]:
            attempt(at)
        while step > 1:
            step = ceil(step / 2)
            best = max(tried, key=lambda at: tried[at][1])
            attempt(best - step)
            attempt(best + step)
            step = step if step > 1 else 0
        return tried

    def _gain(self, chosen: Iterable[Sequence[int]]) -> Agreement:
        """Of what is recomputed in each place."""
        pairs = zip(self._places, chosen, strict=True)
        left = Agreement.mean(place.agreement(positions) for place, positions in pairs)
        return Agreement(*(round(1 - part / whole, 4) for part, whole in zip(left, self._moved, strict=True)))

    def _heads(self, depth: int) -> tuple[tuple[Head, ...], float]:
        """The heads that together point at most of what deviates most, and which share of it."""
        looks = [place.looks(depth, self._ratio / 3) for place in self._places]
        num_layers, num_heads = looks[0][0].shape[:2]
        chosen: list[Head] = []
        recall = 0.0
        while len(chosen) < MAX_HEADS:
            found = torch.zeros(num_layers, num_heads)
            for outward, wanted in looks:
                sums = outward + sum((outward[at] for at in chosen), torch.zeros(()))
                k = num_critical(BY_CONTEXT, sums.shape[-1])
                ranks = sums.flatten(0, 1).sort(dim=-1, descending=True, stable=True).indices[:, :k]
                found += wanted[ranks].sum(-1).reshape(num_layers, num_heads) / wanted.sum() / len(looks)
            for at in chosen:
                found[at] = -1
            best = int(found.argmax())
            if float(found.max()) < recall + MIN_RECALL:
                break
            chosen.append((best // num_heads, best % num_heads))
            recall = float(found.max())
        return tuple(chosen), recall

    def _deviating(self, depth: int) -> float:
        return self._seconds(depth / self._num_layers, 0.0)

    def _asking(self, layer: int) -> float:
        return self._seconds(0.0, layer / self._num_layers)

    def _seconds(self, compared: float, asked: float) -> float:
        """What the trials' prompts take on average once their chunks are moved."""
        costs = self._means.pricing.costs or {
            **NOMINAL,
            Phase.QUESTION: NOMINAL[Phase.EXTEND],
            Phase.DEVIATION: NOMINAL[Phase.EXTEND],
        }
        total = 0.0
        for trial in (place.trial for place in self._places):
            num_moved, num_recomputed = trial.end - trial.start, num_critical(self._ratio, trial.end - trial.start)
            window = min(self._means.window, trial.num_tokens - trial.end)
            works = {
                Phase.QUESTION: through(asked, window if asked else 0, trial.end),
                Phase.DEVIATION: through(compared, num_moved if compared else 0, trial.end),
                Phase.RECOMPUTE: through(1, num_recomputed, trial.end),
                Phase.EXTEND: extend_work(trial.end, trial.num_tokens),
            }
            total += seconds(costs, works)
        return total / len(self._places)


class _Trial:
    """One prompt, prefilled as a whole and answered."""

    def __init__(self, means: Means, prompt: CalibrationPrompt, rows: Sequence[Row]) -> None:
        self.means, self.prompt = means, prompt
        self.full, self.apart, self.moved = rows
        self.ids = [*prompt.head, *(token for chunk in prompt.chunks for token in chunk), *prompt.question]
        self.start, self.num_tokens = len(prompt.head), len(self.ids)
        borders = list(accumulate(map(len, prompt.chunks), initial=self.start))
        self.spans, self.end = list(pairwise(borders)), borders[-1]
        self.answer, self.expected = self._answer()

    def places(self, slots: Sequence[Tensor]) -> Iterator[_Place]:
        """Its chunks computed in turned order, and alone; each keeps its KV in slots of its own."""
        num_chunks = len(self.spans)
        for groups, part in zip(
            ([[*reversed(range(num_chunks))]], [[i] for i in range(num_chunks)]), slots, strict=True
        ):
            yield _Place(self, part, groups)

    def agreement(self) -> Agreement:
        """Of the answer behind the moved row with that behind full prefill."""
        hidden = self.prefill(self.moved, [*self.ids, *self.answer[:-1]], self.end)
        got = logits_of(self.means.runner, hidden[-len(self.answer) :]).log_softmax(-1)
        kl = (self.expected.exp() * (self.expected - got)).sum(-1)
        return Agreement(float(kl.mean()), float(kl.max()))

    def _answer(self) -> tuple[list[int], Tensor]:
        hidden = self.prefill(self.full, self.ids)
        ends = set(self.means.runner.model_config.hf_eos_token_id or ())
        answer: list[int] = []
        expected = []
        while True:
            expected.append(logits_of(self.means.runner, hidden[-1:]).log_softmax(-1)[0])
            answer.append(int(expected[-1].argmax()))
            if len(answer) == MAX_ANSWER or answer[-1] in ends:
                return answer, torch.stack(expected)
            ids = [*self.ids, *answer]
            hidden = self.prefill(self.full, ids, len(ids) - 1)

    def prefill(self, row: Row, ids: Sequence[int], start: int = 0) -> Tensor:
        return run_virtual(self.means.runner, req_pool_index=row.number, runs=[(start, len(ids))], token_ids=ids)


class _Place:
    """A trial's chunks with KV from one other place: `groups` are orders of chunks that are computed together."""

    def __init__(self, trial: _Trial, slots: Tensor, groups: Sequence[Sequence[int]]) -> None:
        self.trial, self._means, self._slots = trial, trial.means, slots
        self._outward: list[Tensor] = [torch.empty(0)] * len(trial.spans)
        self._copy(trial.full.slots, range(trial.start), slots, range(trial.start))
        for group in groups:
            self._compute(group)

    def question(self, layer: int) -> Tensor:
        """[end] from the question's last tokens, at that layer; 0: the last."""
        trial, num_layers = self.trial, self._means.runner.token_to_kv_pool.layer_num
        layer = layer or num_layers
        self._restore()
        start = trial.num_tokens - min(self._means.window, trial.num_tokens - trial.end)
        probe = QuestionProbe(
            token_ids=torch.tensor(trial.ids[start:]),
            positions=torch.arange(start, trial.num_tokens),
            kv_slots=trial.moved.slots[: trial.end],
            kv_positions=torch.arange(trial.end),
            chunks=tuple(trial.spans),
            end=trial.end,
            layers=range(layer - 1, layer),
        )
        return question_evidence(self._means.runner, [probe])[0][0]

    def deviation(self, depth: int, candidates: Tensor | None = None) -> Tensor:
        """[end] at that layer, of all chunk tokens or of `candidates` (positions)."""
        trial = self.trial
        self._restore()
        ids = torch.tensor(trial.ids[trial.start : trial.end])
        slots = trial.moved.slots[: trial.end]
        probe = DeviationProbe(ids, slots, tuple(trial.spans), depth=depth, candidates=candidates)
        return deviation_evidence(self._means.runner, [probe])[0]

    def looks(self, depth: int, share: float) -> tuple[Tensor, Tensor]:
        """([num_layers, num_heads, n] attention of chunk tokens beyond their chunk, [n] 1 for that share which deviates most)."""
        trial = self.trial
        deviation = self.deviation(depth)[trial.start :]
        wanted = torch.zeros(len(deviation))
        wanted[highest(deviation, num_critical(share, len(deviation)))] = 1
        return torch.cat(self._outward, dim=-1), wanted

    def critical(self, depth: int, layer: int, heads: Sequence[Head], ratio: float) -> _Measured:
        """The evidence of the selector of this name."""
        request = FusionRequest("critical", ratio, depth=depth, layer=layer)
        chunks = self._chunks(heads)
        seen = Evidence(self.question(layer))
        offsets = critical.SELECTOR.candidates(chunks, request, seen)
        named = torch.cat([chunk.start + chosen for chunk, chosen in zip(chunks, offsets, strict=True)])
        return _Measured(chunks, Evidence(seen.question, None, self.deviation(depth, named)), named)

    def highest(self, scores: Tensor, ratio: float) -> list[int]:
        """Positions of that share of the chunk tokens."""
        chunks = self._chunks(())
        return _positions(chunks, jointly_highest(scores, chunks, ratio))

    def agreement(self, positions: Sequence[int]) -> Agreement:
        """With these tokens recomputed."""
        trial = self.trial
        self._restore()
        if positions:
            at = torch.tensor(positions)
            end = positions[-1] + 1
            request = SparseRequest(at, trial.moved.slots[:end], end)
            out = trial.moved.slots[at.to(trial.moved.slots.device)]
            run_pass(
                self._means.runner, [PassSequence(torch.tensor(trial.ids)[at], request, out)], sparse=self._means.sparse
            )
        return trial.agreement()

    # Private, in order of use

    def _compute(self, group: Sequence[int]) -> None:
        """Prefill the head and these chunks, keep what the chunks became."""
        trial = self.trial
        ids = list(trial.prompt.head)
        starts = {}
        for index in group:
            starts[index] = len(ids)
            ids += trial.prompt.chunks[index]
        trial.prefill(trial.apart, ids)
        observer = _Outward(
            [(start, None if index == group[0] else trial.start) for index, start in starts.items()], trial.start
        )
        sequences = []
        for index, start in starts.items():
            end = start + len(trial.prompt.chunks[index])
            request = SparseRequest(torch.arange(start, end), trial.apart.slots[:end], end)
            sequences.append(PassSequence(torch.tensor(ids[start:end]), request, own=False))
            self._copy(trial.apart.slots, range(start, end), self._slots, range(*trial.spans[index]))
        run_pass(self._means.runner, sequences, observer=observer)
        for number, index in enumerate(starts):
            self._outward[index] = torch.stack(observer.masses[number]).cpu()

    def _copy(self, source: Tensor, old: range, target: Tensor, new: range) -> None:
        device = source.device
        copy_moved(
            self._means.runner.token_to_kv_pool,
            self._means.table,
            source_slots=source[old.start : old.stop],
            source_positions=torch.arange(old.start, old.stop, device=device),
            target_slots=target[new.start : new.stop],
            target_positions=torch.arange(new.start, new.stop, device=device),
        )

    def _restore(self) -> None:
        region = range(self.trial.end)
        self._copy(self._slots, region, self.trial.moved.slots, region)

    def _chunks(self, heads: Sequence[Head]) -> list[MovedChunk]:
        chunks = []
        for index, (start, end) in enumerate(self.trial.spans):
            scores = None
            if heads:
                outward = torch.stack([self._outward[index][head] for head in heads]).mean(0)
                scores = ChunkScores((), (), 0.0, outward, outward=outward)
            chunks.append(MovedChunk(ChunkId(str(index)), start, end - start, (), (), scores))
        return chunks


@dataclass(frozen=True, eq=False)
class _Measured:
    """What `critical` knows of a place: its chunks, and the deviation of the tokens that were named (positions)."""

    chunks: Sequence[MovedChunk]
    seen: Evidence
    named: Tensor

    @property
    def compared(self) -> Tensor:
        """The deviations that were measured."""
        assert self.seen.deviation is not None
        return self.seen.deviation[self.named]

    def choose(self, ratio: float, above: float | None = None) -> list[int]:
        """Positions that the selector chooses."""
        request = FusionRequest("critical", ratio, above=above)
        return _positions(self.chunks, critical.SELECTOR.select(self.chunks, request, self.seen).offsets)


class _Outward(Observer):
    """Per sequence and layer, [num_heads, n]: a chunk's attention to `[first, start)`, the chunks before it; to the head where
    there are none (`first` is None)."""

    def __init__(self, chunks: Sequence[tuple[int, int | None]], head_len: int) -> None:
        self._before = [range(head_len) if first is None else range(first, start) for start, first in chunks]
        self.masses: list[list[Tensor]] = [[] for _ in chunks]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        before = self._before[sequence]
        parts = [weights[:, :, before.start : before.stop].sum(-1) for _, _, weights in attention.weights()]
        self.masses[sequence].append(torch.cat(parts, dim=1))


def _positions(chunks: Sequence[MovedChunk], offsets: Sequence[Tensor]) -> list[int]:
    return [chunk.start + int(at) for chunk, chosen in zip(chunks, offsets, strict=True) for at in chosen]


def _best(tried: Mapping[int, tuple[Agreement, float]], *, otherwise: int) -> int:
    """What gains most per second, of what gains enough."""
    return max(
        (at for at, (gain, _) in tried.items() if gain.kl >= MIN_GAIN), key=lambda at: tried[at][1], default=otherwise
    )
