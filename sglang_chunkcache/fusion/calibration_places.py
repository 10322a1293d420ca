"""Prompts of a calibration: prefilled as a whole, with chunks moved from other places, and with
some tokens recomputed.

    full    head | A | B | C | question | answer   ordinary prefill, and the answer that follows
                                                   from it, greedily
    apart   head | C | B | A, and each alone       the chunks' KV as it is computed in other places
    moved   head | A | B | C | question | answer   moved from there, some tokens recomputed,
                                                   question and answer as in full

Everything is read and written in slots of the trial's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.chunk import ChunkId
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.masked import Observer, SequenceAttention
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    Head,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.recompute import run_pass, run_virtual
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved
from sglang_chunkcache.fusion.selectors import critical
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.fusion.selectors.top_k import highest, jointly_highest, num_critical
from sglang_chunkcache.fusion.trial_rows import Row, logits_of
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.wire.state import CalibrationPrompt

MAX_ANSWER = 12
"""Tokens of an answer that are compared."""
NUM_ROWS, NUM_PLACES = 3, 2
"""Prompts whose KV is there at a time.
Where a prompt's chunks are computed before they are moved: in turned order, and alone."""


@dataclass(frozen=True)
class Means:
    """What the trial runs with: SGLang's ModelRunner, its pools,
    and how the server moves and recomputes."""

    runner: Any
    table: RotaryTable
    params: Any
    sparse: SparseAttention | None
    window: int
    pricing: Pricing


class Agreement(NamedTuple):
    """With full prefill's answer: KL of its tokens, mean and maximum;
    as a gain, the share of either that is restored."""

    kl: float
    kl_max: float

    @classmethod
    def mean(cls, each: Iterable[Agreement]) -> Agreement:
        """Over answers; rounded, for people."""
        return cls(*(round(fmean(column), 6) for column in zip(*each, strict=True)))


class Trial:
    """One prompt, prefilled as a whole and answered."""

    def __init__(self, means: Means, prompt: CalibrationPrompt, rows: Sequence[Row]) -> None:
        self.means, self.prompt = means, prompt
        self.full, self.apart, self.moved = rows
        self.ids = [
            *prompt.head,
            *(token for chunk in prompt.chunks for token in chunk),
            *prompt.question,
        ]
        self.start, self.num_tokens = len(prompt.head), len(self.ids)
        borders = list(accumulate(map(len, prompt.chunks), initial=self.start))
        self.spans, self.end = list(pairwise(borders)), borders[-1]
        self.answer, self.expected = self._answer()

    def places(self, slots: Sequence[Tensor]) -> Iterator[Place]:
        """Its chunks computed in turned order, and alone; each keeps its KV in slots of its own."""
        num_chunks = len(self.spans)
        for groups, part in zip(
            ([[*reversed(range(num_chunks))]], [[i] for i in range(num_chunks)]), slots, strict=True
        ):
            yield Place(self, part, groups)

    def agreement(self) -> Agreement:
        """Of the answer behind the moved row with that behind full prefill."""
        # The answer is given, not decoded anew: each token follows what full prefill has said.
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
            # One token a pass, over the row's KV of all before it.
            hidden = self.prefill(self.full, ids, len(ids) - 1)

    def prefill(self, row: Row, ids: Sequence[int], start: int = 0) -> Tensor:
        return run_virtual(
            self.means.runner, req_pool_index=row.number, runs=[(start, len(ids))], token_ids=ids
        )


class Place:
    """A trial's chunks with KV from one other place:
    `groups` are orders of chunks that are computed together."""

    def __init__(self, trial: Trial, slots: Tensor, groups: Sequence[Sequence[int]]) -> None:
        self.trial, self._means, self._slots = trial, trial.means, slots
        self._outward: list[Tensor] = [torch.empty(0)] * len(trial.spans)
        # All places have the head's KV of full prefill: the chunks alone are moved.
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
        """([num_layers, num_heads, n] attention of chunk tokens beyond their chunk,
        [n] 1 for that share which deviates most)."""
        trial = self.trial
        deviation = self.deviation(depth)[trial.start :]
        wanted = torch.zeros(len(deviation))
        wanted[highest(deviation, num_critical(share, len(deviation)))] = 1
        return torch.cat(self._outward, dim=-1), wanted

    def critical(self, depth: int, layer: int, heads: Sequence[Head], ratio: float) -> Measured:
        """The evidence of the selector of this name."""
        request = FusionRequest("critical", ratio, depth=depth, layer=layer)
        chunks = self._chunks(heads)
        seen = Evidence(self.question(layer))
        offsets = critical.SELECTOR.candidates(chunks, request, seen)
        named = torch.cat(
            [chunk.start + chosen for chunk, chosen in zip(chunks, offsets, strict=True)]
        )
        return Measured(chunks, Evidence(seen.question, None, self.deviation(depth, named)), named)

    def highest(self, scores: Tensor, ratio: float) -> list[int]:
        """Positions of that share of the chunk tokens."""
        chunks = self._chunks(())
        return _positions(chunks, jointly_highest(scores, chunks, ratio))

    def agreement(self, positions: Sequence[int]) -> Agreement:
        """With these tokens recomputed."""
        trial = self.trial
        self._restore()
        if positions:
            ids, at = torch.tensor(trial.ids), torch.tensor(positions)
            run_pass(
                self._means.runner,
                [PassSequence.of_row(ids, trial.moved.slots, at)],
                sparse=self._means.sparse,  # as in service, so its errors count, too
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
        # SGLang's attention shows no weights: `run_pass` runs the chunks over this KV once more.
        trial.prefill(trial.apart, ids)
        observer = _Outward(
            [
                (start, None if index == group[0] else trial.start)
                for index, start in starts.items()
            ],
            trial.start,
        )
        sequences = []
        for index, start in starts.items():
            end = start + len(trial.prompt.chunks[index])
            request = SparseRequest(torch.arange(start, end), trial.apart.slots[:end])
            sequences.append(PassSequence(torch.tensor(ids[start:end]), request, own=False))
            # Turned here, once: `_restore` then copies between equal positions, bit by bit.
            self._copy(
                trial.apart.slots, range(start, end), self._slots, range(*trial.spans[index])
            )
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
        # What was tried before has recomputed some of the moved row.
        region = range(self.trial.end)
        self._copy(self._slots, region, self.trial.moved.slots, region)

    def _chunks(self, heads: Sequence[Head]) -> list[MovedChunk]:
        chunks = []
        for index, (start, end) in enumerate(self.trial.spans):
            outward = (
                torch.stack([self._outward[index][head] for head in heads]).mean(0)
                if heads
                else None
            )
            chunks.append(
                # `critical` reads neither prefixes nor scores.
                MovedChunk(ChunkId(str(index)), start, end - start, (), (), None, outward=outward)
            )
        return chunks


@dataclass(frozen=True, eq=False)
class Measured:
    """What `critical` knows of a place: its chunks, and the deviation of the tokens that were named
    (positions)."""

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
        return _positions(
            self.chunks, critical.SELECTOR.select(self.chunks, request, self.seen).offsets
        )


class _Outward(Observer):
    """Per sequence and layer, [num_heads, n]: a chunk's attention to `[first, start)`, the chunks
    before it; to the head where there are none (`first` is None)."""

    def __init__(self, chunks: Sequence[tuple[int, int | None]], head_len: int) -> None:
        self._before = [
            (0, head_len) if first is None else (first, start) for start, first in chunks
        ]
        self.masses: list[list[Tensor]] = [[] for _ in chunks]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        seen = slice(*self._before[sequence])
        self.masses[sequence].append(
            torch.cat([part[:, :, seen].sum(-1) for _, _, part in attention.weights()], dim=1)
        )


def _positions(chunks: Sequence[MovedChunk], offsets: Sequence[Tensor]) -> list[int]:
    return [
        chunk.start + int(at)
        for chunk, chosen in zip(chunks, offsets, strict=True)
        for at in chosen
    ]
