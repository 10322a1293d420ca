"""Fills promised slots: move KV, choose the critical tokens, run them through the model. All
requests of a batch together.

    move      every moved piece: gather, rotate keys to their new positions, scatter. What comes
              from host memory does so layer by layer, beside the passes below
              (scheduler/layer_loads.py)
    choose    read-only passes measure what a selector needs (measure.py), then the selector decides
    compute   one pass over critical tokens and gaps (recompute.py)

It knows slots and positions, no tree: the caller keeps sources and targets locked. After an error
the whole region is computed by SGLang's own attention instead, as in an ordinary prefill.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from radix_ext import FusionRequest, Need
from radix_ext.cfo import Scored
from radix_ext.costs import Phase, Work, seconds, through
from radix_ext.fusion_request import asked_layers, question_tokens
from radix_ext.moved_plan import Piece
from radix_ext.sources import DeviceCopy, HostCopy
from sglang_chunkcache.attention import choice
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    QuestionProbe,
    ScoreProbe,
    deviation_evidence,
    question_evidence,
    score_chunks,
    scores_of,
)
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.outward import OutwardWatch
from sglang_chunkcache.fusion.recompute import PlanError, run_pass, run_virtual
from sglang_chunkcache.fusion.relocate import BlobTarget, RotaryTable, copy_moved, read_blob
from sglang_chunkcache.fusion.selectors import focus
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selector
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob, Offload
from sglang_chunkcache.scheduler.host_slots import HostSlots, Slots
from sglang_chunkcache.scheduler.layer_loads import Copy, LayerLoads, copied_ahead
from sglang_chunkcache.scheduler.node import joined
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.storage.codec import CODECS, NONE, Codec, Sizes
from sglang_chunkcache.wire.report import Fallback

logger = logging.getLogger(__name__)

RESCUE_PIECE = 512
"""Tokens at a time when a region is computed after all."""


@dataclass(frozen=True, eq=False)
class Capture:
    """A chunk in the pool, with all before it."""

    token_ids: array[int]
    """Up to the chunk's end."""
    slots: Tensor
    """Like `token_ids`."""
    start: int
    prefix: tuple[tuple[int, int], ...]
    """`[start, end)` of the chunks before it."""
    scored: Scored = Scored.NOTHING
    """How much is to be measured of it."""
    scores: ChunkScores | None = None
    """Measured before."""

    @property
    def is_to_be_scored(self) -> bool:
        """Whether less is known than is asked for."""
        return self.scored > (self.scores.scored if self.scores else Scored.NOTHING)


class Captured:
    """A chunk's KV and scores on their way to host memory.

    Args:
        kv: keys and values on the device; what is copied is what the codec makes of them.
        scores: known before; None: not, or measured with this copy.
        measured: the probe, and `score_chunks`' sums on the device.
    """

    def __init__(
        self,
        kv: tuple[Tensor, Tensor],
        scores: ChunkScores | None,
        measured: tuple[ScoreProbe, Tensor] | None = None,
        codec: Codec = NONE,
    ) -> None:
        self._scores, self._probe = scores, measured and measured[0]
        self._codec, parts = codec, codec.encode(*kv)
        self._num_parts = len(parts)
        # Scores travel with the KV: one event tells that both have arrived.
        self._offload = Offload(parts if measured is None else (*parts, measured[1]))

    def is_done(self) -> bool:
        """Whether it can be read. Does not wait."""
        return self._offload.is_done()

    def wait(self) -> None:
        """Until it can be read."""
        self._offload.wait()

    def read(self) -> tuple[HostBlob, ChunkScores | None]:
        """What has arrived.

        Raises:
            ValueError: the codec cannot keep it.
        """
        arrived = self._offload.read()
        parts, sums = arrived[: self._num_parts], arrived[self._num_parts :]
        scores = self._scores if self._probe is None else scores_of(self._probe, *sums)
        return HostBlob(*parts, codec=self._codec), scores


class Saved(Captured):
    """A chunk's KV in the host pool, and scores on their way.

    Args:
        blob: holds the KV for what reads it on this stream. None: there was no room.
        scores, measured: as of `Captured`.
    """

    def __init__(
        self,
        blob: HostSlots | None,
        scores: ChunkScores | None,
        measured: tuple[ScoreProbe, Tensor] | None = None,
    ) -> None:
        self.blob, self._scores, self._probe = blob, scores, measured and measured[0]
        self._num_parts = 0
        self._offload = Offload([torch.empty(0)] if measured is None else [measured[1]])

    def read(self) -> tuple[HostSlots | None, ChunkScores | None]:  # type: ignore[override]
        """What has arrived."""
        if self._probe is None:
            return self.blob, self._scores
        return self.blob, scores_of(self._probe, *self._offload.read())

    def give_back(self) -> None:
        """It comes into no store."""
        if self.blob is not None:
            self.blob.give_back()


class Host(Protocol):
    """What `HostNodes` does for captures."""

    @property
    def pool(self) -> Slots: ...
    def room(self, num_tokens: int) -> HostSlots | None: ...


class FusionPass:
    """The tensor side of one rank.

    Args:
        attention: as `choice.create` returns it, which is asked where it is None.
        pricing: learns what the phases take.
        host: has the store's KV. None: each variant has tensors of its own.
    """

    def __init__(
        self,
        runner: Any,
        table: RotaryTable,
        config: ChunkCacheConfig,
        attention: tuple[SparseAttention | None, dict[str, Any]] | None = None,
        pricing: Pricing | None = None,
        host: Host | None = None,
    ) -> None:
        self.runner, self.table, self.config, self._host = runner, table, config, host
        self.sparse, self.attention = attention or choice.create(runner, config.recompute_attention)
        self.pricing = pricing or Pricing(runner)
        self.calibration = Calibration()
        self.outward = OutwardWatch(self)
        self.num_unplanned = 0
        self.pool = runner.token_to_kv_pool
        self.loads, self.layers_ahead, self.num_copied_again = LayerLoads.of(self.pool), 0, 0
        self._is_overlapped = False
        self.codec = CODECS[config.store_codec]
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_tokens: Counter[str] = Counter()

    @torch.no_grad()
    def run(self, moves: Sequence[Move]) -> None:
        """Fill the slots of every move. Work is queued on the current stream."""
        before = dict(self.seconds)
        # No phase: its parts teach the costs, and the whole is compared with the plan's estimate.
        with self.pricing.timed(None, Work(1)) as filling:
            try:
                with self._timed("relocate"):
                    self._move(moves)
                with self._timed("select"):
                    critical = self._choose(moves)
                with self._timed("recompute"):
                    self._compute(moves, critical)
                    # A pass that stops early, or runs nothing, has not waited for the last layers.
                    self._settle()
            except Exception:
                logger.exception(
                    "chunk cache: moving chunk KV failed, %d prompt(s) are computed instead",
                    len(moves),
                )
                # what matters is that nothing comes into slots that are computed
                with suppress(Exception):
                    self._settle()
                self._compute_all(moves)
        for move in moves:
            # A batch's time says nothing of one plan's estimate.
            move.filling = filling if len(moves) == 1 else None
            move.ms = {
                phase: 1000 * (self.seconds[phase] - before.get(phase, 0.0))
                for phase in ("relocate", "select", "recompute")
            }

    @torch.no_grad()
    def capture(self, captures: Sequence[Capture]) -> list[Captured]:
        """Copies for the store, with the scores that are asked for.
        Queued only: the pool may be written afterwards."""
        probes = {i: _score_probe(each) for i, each in enumerate(captures) if each.is_to_be_scored}
        measured: dict[int, tuple[ScoreProbe, Tensor]] = {}
        if probes:
            with self._timed("score"):
                sums = score_chunks(self.runner, list(probes.values()))
            measured = {i: (probes[i], each) for i, each in zip(probes, sums, strict=True)}
            self.num_tokens["scored"] += sum(len(probe.token_ids) for probe in probes.values())
        if self._host is not None:
            return self._save(captures, measured, self._host)
        captured = list[Captured]()
        with self._timed("capture"):
            for index, capture in enumerate(captures):
                slots = capture.slots[capture.start :]
                positions = torch.arange(capture.start, len(capture.slots), device=slots.device)
                # Keys stay as they are: turned where they are moved to, they are rounded once.
                kv = read_blob(self.pool, self.table, slots, positions)
                captured.append(Captured(kv, capture.scores, measured.get(index), self.codec))
        return captured

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of one token in the store."""
        if self._host is not None:
            return self._host.pool.token_bytes
        keys, values = self.pool.k_buffer, self.pool.v_buffer
        _, heads, key_dim = keys[0].shape
        return self.codec.nbytes(
            Sizes(len(keys), 1, heads, key_dim, values[0].shape[-1], self.pool.dtype)
        )

    def stats(self) -> dict[str, Any]:
        """Seconds and tokens since the start, by phase; what the pass attends with, and how often
        it had to do without; how the store keeps KV, and how far an element may be off by it
        (`Codec.max_error`); layers of the last load from host memory that were copied before the
        passes, and loads whose copies failed beside them and were made again."""
        return {
            "codec": {"name": self.codec.name, "max_error": self.codec.max_error(self.pool.dtype)},
            "layers_ahead": self.layers_ahead,
            "copied_again": self.num_copied_again,
            "attention": {**self.attention, "fallbacks": self.num_unplanned},
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
            "tokens": dict(self.num_tokens),
        }

    # Private, in order of use

    def _save(
        self,
        captures: Sequence[Capture],
        measured: Mapping[int, tuple[ScoreProbe, Tensor]],
        host: Host,
    ) -> list[Captured]:
        saved = list[Captured]()
        with self._timed("capture"), ExitStack() as taken:
            for index, capture in enumerate(captures):
                slots = capture.slots[capture.start :]
                each = Saved(host.room(len(slots)), capture.scores, measured.get(index))
                taken.callback(each.give_back)
                if each.blob is not None:
                    host.pool.save(slots, each.blob.slots)
                saved.append(each)
            taken.pop_all()  # nothing has failed
        return saved

    def _move(self, moves: Sequence[Move]) -> None:
        copies: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        blobs: list[tuple[HostBlob | HostSlots, Tensor, Tensor, Tensor]] = []
        for move in moves:
            self.num_tokens["moved_other_head"] += sum(
                each.end - each.start for each in move.moved if each.other_head
            )
            for piece in move.moved:
                source = piece.source
                target = move.slots[piece.start : piece.end]
                assert isinstance(source, DeviceCopy | HostCopy)
                positions, origin = (
                    torch.arange(start, start + len(target), device=target.device)
                    for start in (piece.start, source.start)
                )
                if isinstance(source, DeviceCopy):
                    copies.append((source.node.value, origin, target, positions))
                else:
                    blobs.append((source.variant.blob, origin, target, positions))
                self.num_tokens[f"moved_{source.where}"] += piece.end - piece.start
        if copies:  # all layers at once: what is loaded beside this pass has to be there
            self.pool.get_kv_buffer(self.pool.layer_num - 1)
        # Without a call `timed` learns nothing: the block is empty where all comes from the host.
        with self.pricing.timed(
            Phase.DEVICE, Work(bool(copies), sum(len(target) for _, _, target, _ in copies))
        ):
            if copies:
                # All requests' pieces in one launch, and the turn once for all of them.
                slots, origins, targets, positions = (
                    joined(column) for column in zip(*copies, strict=True)
                )
                copy_moved(
                    self.pool,
                    self.table,
                    source_slots=slots,
                    source_positions=origins,
                    target_slots=targets,
                    target_positions=positions,
                )
        if blobs:
            self._load(moves, blobs)

    def _load(
        self,
        moves: Sequence[Move],
        blobs: Sequence[tuple[HostBlob | HostSlots, Tensor, Tensor, Tensor]],
    ) -> None:
        """From host memory to slots and positions, in layers, of which some come beside the passes
        (Cache-Craft 3.4.2)."""
        work = Work(len(blobs), sum(len(slots) for _, _, slots, _ in blobs))
        # `LayerLoads` calls it again after a failure: it only overwrites slots of these moves.
        copy = self._from_blobs(blobs) if self._host is None else self._from_pool(blobs, self._host)

        num_ahead = self._num_ahead(moves, work)
        self.layers_ahead = self.loads.start(
            copy, Phase.HOST, work, num_ahead=num_ahead, clock=self.pricing
        )
        # Loads that others have begun, as of exact chains, end after their own forward.
        self._is_overlapped = self.layers_ahead < self.loads.num_layers

    def _from_blobs(self, blobs: Sequence[tuple[Any, Tensor, Tensor, Tensor]]) -> Copy:
        targets = [(blob, BlobTarget(self.pool, self.table, *place)) for blob, *place in blobs]

        def copy(layers: range) -> None:
            for blob, target in targets:
                keys, values = blob.read(target.device, layers)
                target.write(keys, values, layers)

        return copy

    def _from_pool(self, blobs: Sequence[tuple[Any, Tensor, Tensor, Tensor]], host: Host) -> Copy:
        """One launch for all chunks of a layer, and another one that turns their keys in place."""
        held = host.pool.prepare(torch.cat([blob.slots for blob, *_ in blobs]))
        origins, slots, positions = (
            joined(column) for column in zip(*(place for _, *place in blobs), strict=True)
        )
        target = BlobTarget(self.pool, self.table, origins, slots, positions)

        def copy(layers: range) -> None:
            host.pool.copy(held, slots, layers)
            target.turn(layers)

        return copy

    def _settle(self) -> None:
        """All that was loaded for these moves is there."""
        if self._is_overlapped:
            self._is_overlapped = False
            self.num_copied_again += self.loads.settle()

    def _num_ahead(self, moves: Sequence[Move], work: Work) -> int:
        """By equation 16, as if the passes were one; all where none follows, or a thread beside it
        would take a second team of torch's threads."""
        costs, num_layers = self.pricing.agreed, self.loads.num_layers
        passes = (Phase.QUESTION, Phase.DEVIATION, Phase.RECOMPUTE)
        compute: float = sum(
            seconds(costs, {phase: move.plan.works.get(phase, Work()) for phase in passes})
            for move in moves
        )
        if not compute or (not self.loads.is_cuda and torch.get_num_threads() > 1):
            return num_layers
        return copied_ahead(num_layers, load=costs[Phase.HOST].seconds(work), compute=compute)

    def _choose(self, moves: Sequence[Move]) -> list[list[int]]:
        """Positions to compute, per move: the selector's critical tokens and all of the gaps."""
        choosers = [self._selector_of(move.fusion) for move in moves]
        needs = [set(chooser.needs) for chooser in choosers]
        for move, need in zip(moves, needs, strict=True):
            if move.fusion.focus != "off" and move.fusion.is_choice:
                need.add(Need.QUESTION)  # focus reads the question whatever the selector reads
        chunks_of = [[_chunk_of(piece) for piece in move.moved] for move in moves]
        evidence = self._measure(moves, needs, chunks_of)
        critical = []
        for move, chooser, seen, chunks in zip(moves, choosers, evidence, chunks_of, strict=True):
            selection = chooser.select(chunks, move.fusion, seen)
            if move.fusion.focus != "off" and seen.question_by_layer is not None:
                # In fewer layers than the window no split settles, and all chunks would be focused.
                window = min(focus.WINDOW, len(seen.question_by_layer))
                focused, _ = focus.focused_chunks(seen.question_by_layer, window=window)
                selection = focus.spare_unfocused(selection, focused)
                move.focused = [int(move.moved[i].span or 0) for i in sorted(focused)]
            move.fallbacks += selection.fallbacks
            positions = [
                chunk.start + int(i)
                for chunk, o in zip(chunks, selection.offsets, strict=True)
                for i in o
            ]
            move.recomputed_len = len(positions)
            for piece in move.plan.pieces:
                if piece.source is None:
                    positions += range(piece.start, piece.end)
            # Gaps lie between chosen tokens, and `SparseRequest` takes ascending positions alone.
            critical.append(sorted(positions))
        return critical

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
        layers = self.pool.layer_num
        shares = [asked_layers(moves[i].fusion, layers) / layers for i in asking]
        work = _sum(
            through(share, len(p.token_ids), p.end) for share, p in zip(shares, asked, strict=True)
        )
        with self.pricing.timed(Phase.QUESTION, work):
            questions = question_evidence(self.runner, asked)
        evidence = [Evidence()] * len(moves)
        for i, (question, by_layer) in zip(asking, questions, strict=True):
            evidence[i] = Evidence(question, by_layer)
        deviating = [i for i, need in enumerate(needs) if Need.DEVIATION in need]
        probes = []
        for i in deviating:
            named = self._selector_of(moves[i].fusion).candidates(
                chunks_of[i], moves[i].fusion, evidence[i]
            )
            probes.append(_deviation_probe(moves[i], named))
        with self.pricing.timed(Phase.DEVIATION, _sum(map(self._deviation_work, probes))):
            deviations = deviation_evidence(self.runner, probes)
        for i, deviation in zip(deviating, deviations, strict=True):
            evidence[i] = replace(evidence[i], deviation=deviation)
        return evidence

    def _selector_of(self, fusion: FusionRequest) -> Selector:
        """The selector asked for; `first` in its place where nothing or everything is taken,
        which needs no measuring."""
        name = fusion.selector if fusion.is_choice or not fusion.recomputes else "first"
        return selectors.get(name, self.config.selectors)

    def _deviation_work(self, probe: DeviationProbe) -> Work:
        # Gaps run beside the candidates: tokens after them attend to their KV.
        num_gaps = len(probe.token_ids) - sum(end - start for start, end in probe.chunks)
        num_tokens = (
            len(probe.token_ids) if probe.candidates is None else num_gaps + len(probe.candidates)
        )
        return through(
            min(probe.depth, self.pool.layer_num) / self.pool.layer_num, num_tokens, probe.end
        )

    def _question_probe(self, move: Move) -> QuestionProbe:
        num_tokens = question_tokens(
            move.fusion, len(move.question_ids), window=self.config.question_window
        )
        ids = torch.tensor(move.question_ids[-num_tokens:], dtype=torch.int64)
        start = move.question_start + len(move.question_ids) - num_tokens
        # Slots of gaps still hold what their last owner left there.
        visible = _filled(move).nonzero().flatten()
        return QuestionProbe(
            token_ids=ids,
            positions=torch.arange(start, start + num_tokens),
            kv_slots=move.slots[upload(visible, move.slots.device)],
            kv_positions=visible,
            chunks=_spans(move),
            end=move.plan.end,
            layers=_layers_read(move.fusion, self.pool.layer_num),
            in_all_layers=move.fusion.focus != "off",
        )

    def _compute(self, moves: Sequence[Move], critical: Sequence[list[int]]) -> None:
        work = [
            (move, positions) for move, positions in zip(moves, critical, strict=True) if positions
        ]
        self.num_tokens["recomputed"] += sum(move.recomputed_len for move in moves)
        self.num_tokens["gap"] += sum(move.plan.gap_len for move in moves)
        if not work:
            return
        sequences = [_sequence(move, positions) for move, positions in work]
        with (
            self.pricing.timed(
                Phase.RECOMPUTE,
                _sum(through(1, len(positions), move.plan.end) for move, positions in work),
            ),
            self.outward.watch_pass(work) as watch,
        ):
            try:
                run_pass(self.runner, sequences, sparse=self.sparse, watch=watch)
            except PlanError:
                if not self.num_unplanned:
                    logger.warning(
                        "chunk cache: no plan for sparse attention, masked in its place",
                        exc_info=True,
                    )
                # Nothing is written yet, so the same pass can run again.
                self.num_unplanned += 1
                run_pass(self.runner, sequences, watch=watch)

    def _compute_all(self, moves: Sequence[Move]) -> None:
        """An ordinary prefill of every promised region, in batch order and in pieces,
        since memory may have been short."""
        for move in moves:
            start, end = move.plan.start, move.plan.end
            # No slot keeps moved KV, whatever the selector had chosen.
            move.recomputed_len = move.plan.moved_len
            run_virtual(
                self.runner,
                req_pool_index=move.row_index(),
                runs=[(at, min(at + RESCUE_PIECE, end)) for at in range(start, end, RESCUE_PIECE)],
                token_ids=move.token_ids,
                max_sequences=1,  # one piece at a time bounds the activations
            )
            move.fallbacks.append(Fallback.PASS_FAILED)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


def _layers_read(fusion: FusionRequest, num_layers: int) -> range:
    """Layers, from 0, whose attention from the question counts."""
    last = min(fusion.layer or num_layers, num_layers)
    return range(num_layers) if Need.ALL_LAYERS in fusion.needs else range(last - 1, last)


def _sum(works: Iterable[Work]) -> Work:
    """One call for all of them."""
    calls, tokens, pairs = map(sum, zip(Work(), *works, strict=True))
    return Work(calls > 0, tokens, pairs)


def _ids(token_ids: array[int]) -> Tensor:
    """[n] int64, without a copy: of 32,000 numbers one takes milliseconds."""
    return torch.frombuffer(token_ids, dtype=torch.int64)


def _sequence(move: Move, critical: Sequence[int]) -> PassSequence:
    positions = torch.tensor(critical, dtype=torch.int64)
    # No token that runs sees beyond the last one of them.
    end = critical[-1] + 1
    return PassSequence(
        token_ids=_ids(move.token_ids)[positions],
        request=SparseRequest(positions, move.slots[:end], end),
        out_slots=move.slots[upload(positions, move.slots.device)],
    )


def _filled(move: Move) -> Tensor:
    """[plan.end] bool, CPU: positions that hold KV before the pass, that is, all but the gaps."""
    filled = torch.ones(move.plan.end, dtype=torch.bool)
    for piece in move.plan.pieces:
        if piece.source is None:
            filled[piece.start : piece.end] = False
    return filled


def _chunk_of(piece: Piece) -> MovedChunk:
    source = piece.source
    assert isinstance(source, DeviceCopy | HostCopy)
    assert piece.chunk is not None
    return MovedChunk(
        chunk=piece.chunk,
        start=piece.start,
        num_tokens=piece.end - piece.start,
        prefix_old=source.prefix,
        prefix_new=piece.prefix,
        scores=source.scores,
        other_head=piece.other_head,
        outward=source.outward,
    )


def _spans(move: Move) -> tuple[tuple[int, int], ...]:
    return tuple((piece.start, piece.end) for piece in move.moved)


def _deviation_probe(move: Move, named: Sequence[Tensor] | None) -> DeviationProbe:
    """named: offsets per moved chunk; None: all."""
    spans, candidates = _spans(move), None
    if named is not None:
        candidates = torch.cat(
            [offsets + start for offsets, (start, _) in zip(named, spans, strict=True)]
        )
    assert move.fusion.depth is not None, "resolved by the calibration"
    return DeviationProbe(
        _ids(move.token_ids)[move.plan.start :], move.slots, spans, move.fusion.depth, candidates
    )


def _score_probe(capture: Capture) -> ScoreProbe:
    ids = _ids(capture.token_ids)
    return ScoreProbe(
        ids[capture.start :], capture.slots, capture.prefix, capture.scored is Scored.ALL
    )
