"""Requests that could be admitted and wait, each for itself.

In a round SGLang asks for one waiting request after another whether it joins the next batch. Who
waits is passed over: nothing is taken for it, and nothing is looked up until what it waits for may
have come.

    loads      what the storage sends for it is estimated to be here sooner than computed
    no_room    what runs, or joins this batch, will free slots that a promise needs
    pass_full  this batch's pass is full, the next one is not

So many of those behind it as `MAX_OVERTAKEN` may overtake it. Then it is overdue: until it is
admitted nobody is who has arrived later or is of lower priority.

Once `MAX_PUT_OFF` were looked at in a round and put off, others whose KV may be moved are looked at
in the next ones: planning a burst of requests would keep those that run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.stages import WAIT, traced

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

MAX_OVERTAKEN = 32
MAX_PUT_OFF = 4
"""A plan takes about a third of a millisecond."""
POLL_S = 0.0002
"""Between two rounds with nothing else to do: else the loader's thread would hardly run."""


class Reason(StrEnum):
    LOADS = "loads"
    NO_ROOM = "no_room"
    PASS_FULL = "pass_full"


COUNTERS = {
    "waits": (
        "waits",
        "waits of requests that could have been admitted, by reason: loads, no_room, pass_full",
    )
}
"""What Prometheus is told of `WaitingLine.waits`."""


@dataclass(eq=False)
class _Wait:
    """Of one request, until it is admitted."""

    place: tuple[float, int]  # of two requests the one with the lower place was there before
    num_overtaken: int = 0
    reason: Reason | None = None
    begun: float = 0.0  # that reason, by `perf_counter`
    is_over: Callable[[], bool] = lambda: True  # whether what it waits for may have come
    missing: int = 0  # slots that it did not find, the last time
    until: int = 0  # as many forwards, unless there is more room before
    num_admitted: int = 0  # requests, when that began


def unranked(req: Req) -> float:
    """Nobody has a priority."""
    return 0


class WaitingLine:
    """Of one rank. `num_idle`: slots that are free or evictable. `rank_of`: a request's priority,
    the more the sooner."""

    def __init__(
        self, num_idle: Callable[[], int], rank_of: Callable[[Req], float] = unranked
    ) -> None:
        self._num_idle, self.rank_of = num_idle, rank_of
        self.num_forwards = 0
        self._adder: PrefillAdder | None = None
        self._num_arrived = self._num_admitted = 0
        self._waits: dict[str, _Wait] = {}
        self._overdue: tuple[float, int] | None = None  # the lowest place of those that are
        self.is_idle = True  # nothing runs, and nobody was admitted in this round
        self._has_put_off = False  # somebody, in this round
        # In this round: of those that were looked at, and by SGLang, for those that it asked for.
        self._num_put_off = self._num_preempted = 0
        self.waits: Counter[str] = Counter()  # begun so far, by reason

    def arrived(self, req: Req) -> None:
        """It is in SGLang's queue; if it was retracted, once more."""
        if not state(req).arrival:
            self._num_arrived += 1
            state(req).arrival = self._num_arrived

    def forward(self) -> None:
        """What runs is a forward nearer to its end."""
        self.num_forwards += 1

    def passes_over(self, req: Req) -> bool:
        """Whether nothing is to be looked up for it in this round."""
        known = state(req)
        if known.must_go or known.is_asked_only:
            known.is_put_off = False
        else:
            wait, is_later = self._waits.get(req.rid), self._is_later(req)
            if is_later and wait is None:
                self._waits[req.rid] = _Wait(self._place(req))
            is_waiting = is_later or (wait is not None and not self._is_over(wait))
            known.is_put_off = is_waiting or self._is_held_back(req)
        return known.is_put_off

    def put_off(
        self, req: Req, reason: Reason, is_over: Callable[[], bool] = lambda: True
    ) -> _Wait:
        """It is not admitted in this round, nor looked at before `is_over`."""
        wait = self._waits.setdefault(req.rid, _Wait(self._place(req)))
        if wait.reason is not reason:
            self.waits[reason] += 1
            _trace(req, wait)
            wait.begun = time.perf_counter()
        wait.reason, wait.is_over = reason, is_over
        state(req).is_put_off = True
        self._num_put_off += 1
        return wait

    def for_room(self, req: Req, missing: int) -> bool:
        """Put it off until there may be so many slots more, for twice as many forwards as the first
        of what runs needs for its answer; anew when somebody else was admitted. False: nothing
        runs, or no slots have come in that time."""
        wait, running = self._waits.get(req.rid), self._running()
        if state(req).must_go or not running:
            return False
        until = self.num_forwards + 2 * min(map(_num_left, running))
        if wait is not None and wait.until and wait.num_admitted == self._num_admitted:
            until = wait.until
        if self.num_forwards < until:
            wait = self.put_off(req, Reason.NO_ROOM)
            wait.missing, wait.until, wait.num_admitted = missing, until, self._num_admitted
        return state(req).is_put_off

    def add(
        self, adder: PrefillAdder, req: Req, add: Callable[[], Any], rematch: Callable[[], Any]
    ) -> Any:
        """What `add` says; None: it is put off. Called by our hook, in place of SGLang's. `rematch`
        looks up what it finds, as SGLang has done before."""
        known = state(req)
        if adder is not self._adder:
            self._begin(adder)
            if known.is_put_off:  # perhaps since the round before had put off enough
                rematch()
        wait = self._waits.get(req.rid)
        needs_room = wait is not None and wait.reason is Reason.NO_ROOM
        is_first = self.is_idle and needs_room and not self._is_held_back(req)
        # What is preempted is for this one: else the next would preempt again, and 0.5.21 loses
        # them if nobody is admitted.
        num_before, self._num_preempted = self._num_preempted, len(adder.preempt_list)
        known.must_go = self._num_preempted > num_before or is_first
        if known.must_go and known.is_put_off:
            rematch()
        result = None if known.is_put_off else add()
        known.must_go = False
        if known.is_put_off:
            self._has_put_off = True
            if result is not None and (wait := self._waits[req.rid]).reason is Reason.NO_ROOM:
                needed = self._num_idle() + wait.missing  # nothing is held for it any more
                wait.is_over = lambda: self._num_idle() >= needed
            return None
        if adder.can_run_list and adder.can_run_list[-1] is req:
            _trace(req, wait)
            self.left(req.rid, self._place(req))
            self.is_idle = False
        return result

    def left(self, rid: str, place: tuple[float, int] | None = None) -> None:
        """It is admitted at this place, and overtakes those before it; None: it was aborted."""
        self._waits.pop(rid, None)
        if place is not None:
            self._num_admitted += 1
            for wait in self._waits.values():
                wait.num_overtaken += wait.place < place
        overdue = [w.place for w in self._waits.values() if w.num_overtaken >= MAX_OVERTAKEN]
        self._overdue = min(overdue, default=None)

    @property
    def is_decoding(self) -> bool:
        """Whether answers are under way beside the batch that was put together last."""
        batch = None if self._adder is None else self._adder.running_batch
        return batch is not None and bool(batch.reqs)

    def num_computed(self, num_left: int) -> int:
        """Slots that the batch takes for what it computes, with a request more, of which so many
        tokens are left. Of those that are asked later SGLang knows what is free."""
        assert self._adder is not None
        most = self._adder.rem_chunk_tokens
        mine = num_left if most is None else min(num_left, most)
        return int(self._adder.memory_budget.current_offset) + mine + 1

    def stats(self) -> dict[str, int]:
        return {**self.waits, "now": len(self._waits)}

    def _is_later(self, req: Req) -> bool:
        """Whether it is looked at in a later round: not who is overdue."""
        if self._num_put_off < MAX_PUT_OFF or self._place(req) == self._overdue:
            return False
        spans = state(req).spans
        return spans is not None and spans.fusion is not None

    def _is_over(self, wait: _Wait) -> bool:
        is_late = wait.reason is Reason.NO_ROOM and self.num_forwards >= wait.until
        return is_late or wait.is_over()

    def _place(self, req: Req) -> tuple[float, int]:
        return -self.rank_of(req), state(req).arrival

    def _is_held_back(self, req: Req) -> bool:
        return self._overdue is not None and self._place(req) > self._overdue

    def _begin(self, adder: PrefillAdder) -> None:
        if self._has_put_off and self.is_idle:  # SGLang asks again at once
            time.sleep(POLL_S)
        self._adder, self._has_put_off = adder, False
        self._num_put_off = self._num_preempted = 0
        self.is_idle = not self._running()

    def _running(self) -> list[Req]:
        assert self._adder is not None
        batch = self._adder.running_batch
        return [*self._adder.can_run_list, *(batch.reqs if batch is not None else ())]


def _trace(req: Req, wait: _Wait | None) -> None:
    """What it has waited for is there, or something else is lacking now."""
    if wait is not None and wait.reason is not None:
        traced(req, WAIT, wait.begun, reason=wait.reason)


def _num_left(req: Req) -> int:
    """Tokens of its answer to come, at most."""
    return max(1, (req.sampling_params.max_new_tokens or 1) - len(req.output_ids))
