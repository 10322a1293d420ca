"""Fills promised slots: move KV, choose the critical tokens, run them through the model. All
requests of a batch together.

    move      every moved piece, in part beside what follows (moving.py)
    choose    the critical tokens (choosing.py)
    compute   one pass over critical tokens and gaps (recompute.py), and over what follows them, if
              the batch is of nothing else (tail.py)

It knows slots and positions, no tree: the caller keeps sources and targets locked. After an error
the whole region is computed by SGLang's own attention instead, as in an ordinary prefill.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radix_ext.cfo import Scored
from radix_ext.costs import Phase, Work, through
from sglang_chunkcache.attention.base import PassSequence, SparseAttention
from sglang_chunkcache.attention.per_pass import KernelPerPass
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.choosing import Chooser, ids_of, one_call
from sglang_chunkcache.fusion.measure import ScoreProbe, score_chunks, scores_of
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.moving import Mover
from sglang_chunkcache.fusion.outward import OutwardWatch
from sglang_chunkcache.fusion.recompute import PlanError, run_extend, run_pass
from sglang_chunkcache.fusion.relocate import RotaryTable
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.fusion.store import ChunkScores, Offload
from sglang_chunkcache.scheduler.host_nodes import HostNodes
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import joined
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.wire.report import Fallback

logger = logging.getLogger(__name__)

RESCUE_PIECE = 512
"""Tokens at a time when a region is computed after all."""


@dataclass(frozen=True, eq=False)
class Capture:
    """A chunk in the pool, with all before it."""

    token_ids: array[int]
    slots: Tensor
    """Like `token_ids`, up to the chunk's end."""
    start: int
    prefix: tuple[tuple[int, int], ...]
    """`[start, end)` of the chunks before it."""
    scored: Scored = Scored.NOTHING
    """How much is to be measured of it."""
    scores: ChunkScores | None = None
    """Measured before."""

    @property
    def is_to_be_scored(self) -> bool:
        return self.scored > (self.scores.scored if self.scores else Scored.NOTHING)


class Captured:
    """A chunk's KV and scores on their way to host memory.

    Args:
        slots: of the host pool, which have the KV for what reads them on this stream. None: it had
            no room.
        scores: known before; None: not, or measured with this copy.
        measured: the probe, and `score_chunks`' sums on the device.
        are_kept: as `HostPool.save` returns.
    """

    def __init__(
        self,
        slots: HostSlots | None,
        scores: ChunkScores | None,
        measured: tuple[ScoreProbe, Tensor] | None = None,
        are_kept: Sequence[Tensor] = (),
    ) -> None:
        self.slots, self._scores, self._probe = slots, scores, measured and measured[0]
        self._num_kept = len(are_kept)
        self._offload = Offload([*are_kept, *(measured[1:] if measured else ())])
        self.is_done, self.wait = self._offload.is_done, self._offload.wait

    def read(self) -> tuple[HostSlots | None, ChunkScores | None]:
        """What has arrived. Raises ValueError: the codec cannot keep it."""
        arrived = self._offload.read()
        if not all(arrived[: self._num_kept]):
            raise ValueError("a codec keeps no KV that is not finite")
        sums = arrived[self._num_kept :]
        return self.slots, self._scores if self._probe is None else scores_of(self._probe, *sums)

    def arrived(self, *, is_stored: bool) -> None:
        """Its slots are the store's from now on, or given back."""
        if self.slots is not None:
            if not is_stored:
                self.slots.give_back()
            self.slots.let_go()


class FusionPass:
    """The tensor side of one rank.

    Args:
        host: has the KV of chunks that are moved.
        attention: as `choice.create` returns it.
        pricing: learns what the phases take.
        sharing: None: each slot has its row.
    """

    def __init__(
        self,
        runner: Any,
        table: RotaryTable,
        config: ChunkCacheConfig,
        host: HostNodes,
        attention: tuple[SparseAttention | None, dict[str, Any]],
        pricing: Pricing,
        sharing: Sharing | None,
    ) -> None:
        self.runner, self.table, self.config, self.host = runner, table, config, host
        (self.sparse, self.attention), self.pricing = attention, pricing
        self.calibration = Calibration()
        self.outward = OutwardWatch(self)
        self.num_unplanned = 0
        self.pool = runner.token_to_kv_pool
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_tokens: Counter[str] = Counter()
        self.sharing = sharing
        parts = host, self.num_tokens, self.sharing
        self.mover = Mover(self.pool, table, self.pricing, *parts)
        self._chooser = Chooser(runner, config, self.pricing)

    def calibrated(self, by: Calibration) -> None:
        """Selectors read what it names, from now on."""
        self.calibration = by

    @torch.no_grad()
    def run(self, moves: Sequence[Move]) -> Tensor | None:
        """Fill the slots of every move, and of their tails. Work is queued on the current stream.

        Returns [n, hidden_size]: of the tails' rows, one after the other, after the final norm.
        None: the moves have none, or they are still to be computed.
        """
        before, hidden = dict(self.seconds), None
        # No phase: its parts teach the costs, and the whole is compared with the plan's estimate.
        with self.pricing.timed(None, Work(1)) as filling:
            try:
                with self._timed("relocate"):
                    self.mover.move(moves)
                with self._timed("select"):
                    critical = self._chooser.choose(moves)
                with self._timed("recompute"):
                    hidden = self._compute(moves, critical)
                    # A pass that stops early, or runs nothing, has not waited for the last layers.
                    self.mover.settle()
                if self.sharing is not None:
                    self.sharing.came(moves)
            except Exception:
                logger.exception(
                    "chunk cache: moving chunk KV failed, %d prompt(s) are computed instead",
                    len(moves),
                )
                # what matters is that nothing comes into slots that are computed
                with suppress(Exception):
                    self.mover.settle()
                hidden = None
                self._compute_all(moves)
        for move in moves:
            # A batch's time says nothing of one plan's estimate.
            move.filling = filling if len(moves) == 1 else None
            move.ms = {
                phase: 1000 * (self.seconds[phase] - before.get(phase, 0.0))
                for phase in ("relocate", "select", "recompute")
            }
        return hidden

    @torch.no_grad()
    def capture(self, captures: Sequence[Capture]) -> list[Captured]:
        """Copies for the store, scored as is asked. Queued: the pool may be written afterwards."""
        probes = {i: _score_probe(each) for i, each in enumerate(captures) if each.is_to_be_scored}
        measured: dict[int, tuple[ScoreProbe, Tensor]] = {}
        if probes:
            with self._timed("score"):
                sums = score_chunks(self.runner, list(probes.values()))
            measured = {i: (probes[i], each) for i, each in zip(probes, sums, strict=True)}
            self.num_tokens["scored"] += sum(len(probe.token_ids) for probe in probes.values())
        captured = list[Captured]()
        with self._timed("capture"), ExitStack() as taken:
            self.host.pool.follow()
            for index, capture in enumerate(captures):
                slots = capture.slots[capture.start :]
                # Keys stay as they are: turned where they are moved to, they are rounded once.
                are_kept: list[Tensor] = []
                if (kept := self.host.room(len(slots))) is not None:
                    kept.hold()  # nobody's, until it has arrived
                    taken.callback(kept.give_back)
                    taken.callback(kept.let_go)
                    are_kept = self.host.pool.save(slots, kept.slots)
                captured.append(Captured(kept, capture.scores, measured.get(index), are_kept))
            taken.pop_all()  # nothing has failed
        return captured

    def stats(self) -> dict[str, Any]:
        """Seconds and tokens since the start, by phase; what the pass attends with, how often by
        each kernel, trials included (`passes`), and how often it had to do without (`fallbacks`);
        how far an element may be off in the store."""
        codec = self.host.pool.codec
        passes = self.sparse.passes if isinstance(self.sparse, KernelPerPass) else {}
        return {
            "codec": {"name": codec.name, "max_error": codec.max_error(self.pool.dtype)},
            "layers_ahead": self.mover.layers_ahead,
            "copied_again": self.mover.num_copied_again,
            **({} if self.sharing is None else {"one_copy": self.sharing.stats()}),
            "attention": {**self.attention, "passes": {**passes}, "fallbacks": self.num_unplanned},
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
            "tokens": dict(self.num_tokens),
        }

    def _compute(self, moves: Sequence[Move], critical: Sequence[Tensor]) -> Tensor | None:
        if self.sharing is not None:
            critical = [*map(self.sharing.own, moves, critical)]
        self.num_tokens["recomputed"] += sum(move.recomputed_len for move in moves)
        self.num_tokens["gap"] += sum(move.plan.gap_len for move in moves)
        if not any(map(len, critical)):
            return None
        rows = map(_with_tail, moves, critical)
        work = [each for each in zip(moves, rows, strict=True) if len(each[1])]
        sequences = [_sequence(move, positions) for move, positions in work]
        all_work = one_call(through(1, len(found), move.plan.end) for move, found in work)
        with (
            self.pricing.timed(Phase.RECOMPUTE, all_work),
            self.outward.watch_pass(work) as watch,
        ):
            try:
                hidden = run_pass(self.runner, sequences, sparse=self.sparse, watch=watch)
            except PlanError:
                if not self.num_unplanned:
                    logger.warning(
                        "chunk cache: no plan for sparse attention, masked in its place",
                        exc_info=True,
                    )
                # Nothing is written yet, so the same pass can run again.
                self.num_unplanned += 1
                hidden = run_pass(self.runner, sequences, watch=watch)
        assert hidden is not None, "nothing has ended the pass early"
        lens = [0 if move.tail is None else len(move.tail.slots) for move, _ in work]
        if not any(lens):
            return None
        self.num_tokens["tail"] += sum(lens)
        parts = torch.split(hidden, [len(found) for _, found in work])
        return joined([part[len(part) - n :] for part, n in zip(parts, lens, strict=True)])

    def _compute_all(self, moves: Sequence[Move]) -> None:
        """An ordinary prefill of every promised region, in pieces: memory may have been short."""
        if self.sharing is not None:
            self.pool.get_kv_buffer(self.pool.layer_num - 1)  # once all that is loaded has come
        for move in moves:
            start, end = move.plan.start, move.plan.end
            # No slot keeps moved KV, whatever the selector had chosen.
            move.recomputed_len = move.plan.moved_len
            if self.sharing is not None:
                try:
                    self.sharing.own(move, torch.arange(start, end), all_of_them=True)
                except IndexError as error:
                    logger.warning("chunk cache: no room to compute what was not moved: %s", error)
                    move.is_lost = True
                    continue
            # One piece at a time bounds the activations.
            for at in range(start, end, RESCUE_PIECE):
                last = min(at + RESCUE_PIECE, end)
                run_extend(self.runner, move.row_index(), move.token_ids, at, last)
            move.fallbacks.append(Fallback.PASS_FAILED)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


def _with_tail(move: Move, positions: Tensor) -> Tensor:
    if move.tail is None:
        return positions
    end = move.plan.end
    return torch.cat([positions, torch.arange(end, end + len(move.tail.slots))])


def _sequence(move: Move, positions: Tensor) -> PassSequence:
    ids, slots = ids_of(move.token_ids), move.slots
    if move.tail is not None:
        ids = torch.cat([ids, move.tail.token_ids])
        slots = torch.cat([slots, move.tail.slots])
    return PassSequence.of_row(ids, slots, positions)


def _score_probe(capture: Capture) -> ScoreProbe:
    ids = ids_of(capture.token_ids)
    return ScoreProbe(
        ids[capture.start :], capture.slots, capture.prefix, capture.scored is Scored.ALL
    )
