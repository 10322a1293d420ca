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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.chunk import ChunkId
from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.attention.masked import Observer, SequenceAttention
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    Head,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.recompute import run_pass
from sglang_chunkcache.fusion.selectors import critical
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, positions_of
from sglang_chunkcache.fusion.selectors.top_k import highest, jointly_highest, num_critical
from sglang_chunkcache.fusion.trial_rows import Means, Row
from sglang_chunkcache.wire.state import CalibrationPrompt

MAX_ANSWER = 12
"""Tokens of an answer that are compared."""
NUM_ROWS, NUM_PLACES = 3, 2
"""Prompts whose KV is there at a time.
Where a prompt's chunks are computed before they are moved: in turned order, and alone."""


class Trial:
    """One prompt, prefilled as a whole and answered."""

    def __init__(self, means: Means, prompt: CalibrationPrompt, rows: Sequence[Row]) -> None:
        self.means, self.prompt = means, prompt
        self.full, self.apart, self.moved = rows
        self.ids = [*prompt.head, *chain(*prompt.chunks), *prompt.question]
        self.start, self.num_tokens = len(prompt.head), len(self.ids)
        borders = list(accumulate(map(len, prompt.chunks), initial=self.start))
        self.spans, self.end = list(pairwise(borders)), borders[-1]
        self.answer, self.expected = self._answer()

    def places(self, slots: Sequence[Tensor]) -> Iterator[Place]:
        """Its chunks computed in turned order, and alone; each keeps its KV in slots of its own."""
        chunks = range(len(self.spans))
        turned, alone = slots
        yield Place(self, turned, [chunks[::-1]])
        yield Place(self, alone, [[i] for i in chunks])

    def kl(self) -> float:
        """From full prefill's answer to that behind the moved row, mean over its tokens."""
        # The answer is given, not decoded anew: each token follows what full prefill has said.
        hidden = self.means.prefill(self.moved, [*self.ids, *self.answer[:-1]], self.end)
        got = self.means.logits(hidden[-len(self.answer) :]).log_softmax(-1)
        return float((self.expected.exp() * (self.expected - got)).sum(-1).mean())

    def _answer(self) -> tuple[list[int], Tensor]:
        hidden = self.means.prefill(self.full, self.ids)
        ends = set(self.means.runner.model_config.hf_eos_token_id or ())
        answer: list[int] = []
        expected = []
        while True:
            expected.append(self.means.logits(hidden[-1:]).log_softmax(-1)[0])
            answer.append(int(expected[-1].argmax()))
            if len(answer) == MAX_ANSWER or answer[-1] in ends:
                return answer, torch.stack(expected)
            ids = [*self.ids, *answer]
            # One token a pass, over the row's KV of all before it.
            hidden = self.means.prefill(self.full, ids, len(ids) - 1)


class Place:
    """A trial's chunks with KV from one other place: chunks of a group are computed together."""

    def __init__(self, trial: Trial, slots: Tensor, groups: Sequence[Sequence[int]]) -> None:
        self.trial, self._means, self._slots = trial, trial.means, slots
        self._outward: list[Tensor] = [torch.empty(0)] * len(trial.spans)
        # All places have the head's KV of full prefill: the chunks alone are moved.
        self._copy(trial.full.slots, range(trial.start), slots, range(trial.start))
        for group in groups:
            self._compute(group)

    def question(self, layer: int) -> Tensor:
        """[end] from the question's last tokens, at that layer; 0: the last."""
        trial, layer = self.trial, layer or self._means.pool.layer_num
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
        return question_evidence(self._means.runner, [probe])[0][0].cpu()

    def deviation(self, depth: int, candidates: Tensor | None = None) -> Tensor:
        """[end] at that layer, of all chunk tokens or of `candidates` (positions)."""
        trial = self.trial
        self._restore()
        ids = torch.tensor(trial.ids[trial.start : trial.end])
        slots = trial.moved.slots[: trial.end]
        probe = DeviationProbe(ids, slots, tuple(trial.spans), depth=depth, candidates=candidates)
        return deviation_evidence(self._means.runner, [probe])[0].cpu()

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
        named = positions_of(chunks)[critical.SELECTOR.candidates(chunks, request, seen)]
        return Measured(chunks, Evidence(seen.question, None, self.deviation(depth, named)), named)

    def highest(self, scores: Tensor, ratio: float) -> Tensor:
        """Positions of that share of the chunk tokens."""
        chunks = self._chunks(())
        return positions_of(chunks)[jointly_highest(scores, chunks, ratio)]

    def kl(self, positions: Tensor) -> float:
        """With these tokens recomputed."""
        trial = self.trial
        self._restore()
        if len(positions):
            # As in service, so the pass's errors count, too.
            self._means.recompute(trial.moved, trial.ids, [positions])
        return trial.kl()

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
        self._means.prefill(trial.apart, ids)
        # Where a chunk's attention counts: what is before it but the head, or the head alone.
        before = [
            slice(trial.start) if index == group[0] else slice(trial.start, start)
            for index, start in starts.items()
        ]
        observer = _Outward(before)
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
        places = (torch.arange(at.start, at.stop, device=source.device) for at in (old, new))
        old_at, new_at = places
        self._means.move(source[old_at], old_at, target[new_at], new_at)

    def _restore(self) -> None:
        # What was tried before has recomputed some of the moved row.
        region = range(self.trial.end)
        self._copy(self._slots, region, self.trial.moved.slots, region)

    def _chunks(self, heads: Sequence[Head]) -> list[MovedChunk]:
        outward = [
            torch.stack([masses[head] for head in heads]).mean(0) if heads else None
            for masses in self._outward
        ]
        return [
            # `critical` reads neither prefixes nor scores.
            MovedChunk(ChunkId(str(index)), start, end - start, (), (), None, outward=looks)
            for index, ((start, end), looks) in enumerate(
                zip(self.trial.spans, outward, strict=True)
            )
        ]


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

    def choose(self, ratio: float, above: float | None = None) -> Tensor:
        """Positions that the selector chooses."""
        request = FusionRequest("critical", ratio, above=above)
        selection = critical.SELECTOR.select(self.chunks, request, self.seen)
        return positions_of(self.chunks)[selection.chosen]


class _Outward(Observer):
    """Per sequence and layer, [num_heads, n]: a chunk's attention to the positions `before`."""

    def __init__(self, before: Sequence[slice]) -> None:
        self._before = before
        self.masses: list[list[Tensor]] = [[] for _ in before]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        seen = self._before[sequence]
        self.masses[sequence].append(
            torch.cat([part[:, :, seen].sum(-1) for _, _, part in attention.weights()], dim=1)
        )
