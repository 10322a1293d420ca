"""Which tokens of moved chunks are computed: read-only passes measure what a selector needs
(measure.py), then the selector decides.

Evidence stays on the device, and is sorted there. What comes back is which tokens are compared, and
which are computed: one copy each for all requests, since a pass is laid out on the host, by what
its tokens see. A device that kept them would attend to twice as many keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from radix_ext import FusionRequest, Need
from radix_ext.costs import Phase, Work, through
from radix_ext.fusion_request import asked_layers, question_tokens
from radix_ext.moved_plan import Piece
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.selectors import focus
from sglang_chunkcache.fusion.selectors.base import (
    Evidence,
    MovedChunk,
    Selector,
    positions_in,
    positions_of,
)
from sglang_chunkcache.scheduler.pricing import Pricing


class Chooser:
    """Of one rank."""

    def __init__(self, runner: Any, config: ChunkCacheConfig, pricing: Pricing) -> None:
        self._runner, self._config, self._pricing = runner, config, pricing
        self._layers: int = runner.token_to_kv_pool.layer_num

    def choose(self, moves: Sequence[Move]) -> list[Tensor]:
        """Positions to compute, per move, [n] int64 CPU, ascending: the selector's critical tokens
        and all of the gaps."""
        choosers = [self._selector_of(move.fusion) for move in moves]
        needs = [set(chooser.needs) for chooser in choosers]
        for move, need in zip(moves, needs, strict=True):
            if move.fusion.focus != "off" and move.fusion.is_choice:
                need.add(Need.QUESTION)  # focus reads the question whatever the selector reads
        chunks_of = [[_chunk_of(piece) for piece in move.moved] for move in moves]
        evidence = self._measure(moves, needs, chunks_of)
        selections, focused = [], []
        for move, chooser, seen, chunks in zip(moves, choosers, evidence, chunks_of, strict=True):
            selection = chooser.select(chunks, move.fusion, seen)
            is_focused = torch.empty(0, dtype=torch.bool)
            if move.fusion.focus != "off" and seen.question_by_layer is not None:
                # In fewer layers than the window no split settles, and all chunks would be focused.
                window = min(focus.WINDOW, len(seen.question_by_layer))
                is_focused = focus.focused_chunks(seen.question_by_layer, window=window)
                selection = focus.spare_unfocused(selection, is_focused)
            selections.append(selection)
            focused.append(is_focused)
        told = iter(_on_host([*(each.tokens for each in selections), *focused]))
        selections = [replace(each, tokens=next(told)) for each in selections]
        critical = []
        for move, chooser, selection, chunks in zip(
            moves, choosers, selections, chunks_of, strict=True
        ):
            is_focused = next(told)
            if len(is_focused):
                spans = [int(piece.span or 0) for piece in move.moved]
                move.focused = [*compress(spans, is_focused.tolist())]
            move.fallbacks += selection.fallbacks
            if chooser.makes_variants(move.fusion):
                move.whole = frozenset(
                    chunk.start
                    for chunk, offsets in zip(chunks, selection.offsets, strict=True)
                    if len(offsets) == chunk.num_tokens
                )
            positions = positions_of(chunks)[selection.chosen]
            move.recomputed_len = len(positions)
            # Gaps lie between chosen tokens, and `SparseRequest` takes ascending positions alone.
            critical.append(torch.cat([positions, _gaps(move)]).sort().values)
        return critical

    # Private, in order of use

    def _measure(
        self,
        moves: Sequence[Move],
        needs: Sequence[set[Need]],
        chunks_of: Sequence[Sequence[MovedChunk]],
    ) -> list[Evidence]:
        """The question's evidence first: a selector may name by it what is compared."""
        # A prompt that ends with its last chunk has no question, and its evidence stays None.
        asking = [
            i for i, need in enumerate(needs) if Need.QUESTION in need and moves[i].question_ids
        ]
        asked = [self._question_probe(moves[i]) for i in asking]
        shares = [asked_layers(moves[i].fusion, self._layers) / self._layers for i in asking]
        work = one_call(
            through(share, len(p.token_ids), p.end) for share, p in zip(shares, asked, strict=True)
        )
        with self._pricing.timed(Phase.QUESTION, work):
            questions = question_evidence(self._runner, asked)
        evidence = [Evidence()] * len(moves)
        for i, (question, by_layer) in zip(asking, questions, strict=True):
            evidence[i] = Evidence(question, by_layer)
        deviating = [i for i, need in enumerate(needs) if Need.DEVIATION in need]
        named = [
            self._selector_of(moves[i].fusion).candidates(
                chunks_of[i], moves[i].fusion, evidence[i]
            )
            for i in deviating
        ]
        for i, each in zip(deviating, named, strict=True):
            if each is not None and each.dtype is not torch.bool:  # the server's owner's, perhaps
                selector = moves[i].fusion.selector
                raise ValueError(f"candidates of {selector}: expected bool, got {each.dtype}")
        told = iter(_on_host([each for each in named if each is not None]))
        probes = [
            _deviation_probe(
                moves[i], None if each is None else positions_of(chunks_of[i])[next(told)]
            )
            for i, each in zip(deviating, named, strict=True)
        ]
        with self._pricing.timed(Phase.DEVIATION, one_call(map(self._deviation_work, probes))):
            max_rows = self._config.max_pass_tokens or None
            deviations = deviation_evidence(self._runner, probes, max_rows=max_rows)
        for i, deviation in zip(deviating, deviations, strict=True):
            evidence[i] = replace(evidence[i], deviation=deviation)
        return evidence

    def _selector_of(self, fusion: FusionRequest) -> Selector:
        """The selector asked for; `first`, which measures nothing, where it has no choice."""
        name = fusion.selector if fusion.is_choice or not fusion.recomputes else "first"
        return selectors.get(name, self._config.selectors)

    def _deviation_work(self, probe: DeviationProbe) -> Work:
        # Gaps run beside the candidates: tokens after them attend to their KV.
        num_gaps = len(probe.token_ids) - sum(end - start for start, end in probe.chunks)
        num_tokens = (
            len(probe.token_ids) if probe.candidates is None else num_gaps + len(probe.candidates)
        )
        return through(min(probe.depth, self._layers) / self._layers, num_tokens, probe.end)

    def _question_probe(self, move: Move) -> QuestionProbe:
        num_tokens = question_tokens(
            move.fusion, len(move.question_ids), window=self._config.question_window
        )
        ids = torch.tensor(move.question_ids[-num_tokens:], dtype=torch.int64)
        start = move.question_start + len(move.question_ids) - num_tokens
        # All but the gaps, whose slots still hold what their last owner left there.
        filled = torch.ones(move.plan.end, dtype=torch.bool)
        filled[_gaps(move)] = False
        visible = filled.nonzero().flatten()
        return QuestionProbe(
            token_ids=ids,
            positions=torch.arange(start, start + num_tokens),
            kv_slots=move.slots[upload(visible, move.slots.device)],
            kv_positions=visible,
            chunks=_spans(move),
            end=move.plan.end,
            layers=_layers_read(move.fusion, self._layers),
            in_all_layers=move.fusion.focus != "off",
        )


def _layers_read(fusion: FusionRequest, num_layers: int) -> range:
    """Layers, from 0, whose attention from the question counts."""
    last = min(fusion.layer or num_layers, num_layers)
    return range(num_layers) if Need.ALL_LAYERS in fusion.needs else range(last - 1, last)


def one_call(works: Iterable[Work]) -> Work:
    """One call for all of them."""
    calls, tokens, pairs = map(sum, zip(Work(), *works, strict=True))
    return Work(calls > 0, tokens, pairs)


def ids_of(token_ids: array[int]) -> Tensor:
    """[n] int64, without a copy: of 32,000 numbers one takes milliseconds."""
    return torch.frombuffer(token_ids, dtype=torch.int64)


def _chunk_of(piece: Piece) -> MovedChunk:
    source = piece.source
    assert source is not None
    assert piece.chunk is not None
    return MovedChunk(
        chunk=piece.chunk,
        start=piece.start,
        num_tokens=piece.end - piece.start,
        prefix_old=source.facts.prefix,
        prefix_new=piece.prefix,
        scores=source.facts.scores,
        other_head=piece.other_head,
        outward=source.facts.outward,
    )


def _gaps(move: Move) -> Tensor:
    """[gap_len] int64: what is computed whatever the selector chooses."""
    return positions_in([(each.start, each.end) for each in move.plan.pieces if not each.source])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[n] each, on the CPU. Of those on a device one copy is waited for, not one each."""
    away = [each for each in tensors if each.device.type != "cpu"]
    if away:
        copied = iter(torch.split(torch.cat(away).cpu(), [*map(len, away)]))
    return [each if each.device.type == "cpu" else next(copied) for each in tensors]


def _spans(move: Move) -> tuple[tuple[int, int], ...]:
    return tuple((piece.start, piece.end) for piece in move.moved)


def _deviation_probe(move: Move, candidates: Tensor | None) -> DeviationProbe:
    assert move.fusion.depth is not None, "resolved by the calibration"
    ids = ids_of(move.token_ids)[move.plan.start :]
    return DeviationProbe(ids, move.slots, _spans(move), move.fusion.depth, candidates)
