"""Who waits, who may overtake, and who is held back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sglang_chunkcache.scheduler import waiting
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.waiting import MAX_OVERTAKEN, MAX_PUT_OFF, Reason, WaitingLine


class Queue:
    """SGLang's queue and what runs. A request of `large` waits for room, which there is when
    `comes` is set, or for its loads, which come then."""

    reason = Reason.NO_ROOM

    def __init__(self, large: int = 1) -> None:
        self.comes = self.may_have_come = False
        self.line = WaitingLine(lambda: 10 * self.comes, lambda req: req.priority)
        self._names = map(str, count())
        self.running: list[Any] = [self.arrive()]
        self.large = [self.arrive() for _ in range(large)]
        self.preempted: list[Any] = []
        self.num_looks = 0
        self.traced = list[tuple[str, str, dict[str, Any]]]()

    def arrive(self, priority: int = 0, *, is_planned: bool = False) -> Any:
        params = SimpleNamespace(max_new_tokens=16)
        req = SimpleNamespace(
            rid=next(self._names), priority=priority, sampling_params=params, output_ids=[]
        )
        req.time_stats = SimpleNamespace(
            trace_ctx=SimpleNamespace(tracing_enable=True),
            trace_slice=lambda stage, begun, ended, told: self.traced.append(
                (req.rid, stage.stage_name, told)
            ),
        )
        if is_planned:
            state(req).spans = mock.Mock()
        self.line.arrived(req)
        return req

    def round(self, *reqs: Any, preempts: bool = False) -> list[bool]:
        """Which of these are admitted, in this order. `preempts`: for each of them somebody was."""
        adder = SimpleNamespace(
            can_run_list=[],
            preempt_list=self.preempted,
            running_batch=SimpleNamespace(reqs=self.running),
        )
        self.line.forward()
        admitted = list[bool]()
        for req in reqs:
            self.preempted += ["another"] * preempts
            admitted.append(self._ask(adder, req))
        return admitted

    def put_off(self, req: Any) -> None:
        if self.reason is Reason.LOADS:
            self.line.put_off(req, self.reason, lambda: self.comes or self.may_have_come)
        else:
            assert self.line.for_room(req, 10)

    def _ask(self, adder: Any, req: Any) -> bool:
        def match() -> None:
            if not self.line.passes_over(req):
                self.num_looks += 1

        def add() -> str:
            if req in self.large and not (self.comes or state(req).must_go):
                self.put_off(req)
            else:
                adder.can_run_list.append(req)
            return "asked"

        match()
        told = self.line.add(adder, req, add, match)
        assert told == ("asked" if req in adder.can_run_list else None)
        return req in adder.can_run_list


def test_later_ones_overtake_it_so_often_and_no_more() -> None:
    queue = Queue()
    (early,), (large,) = queue.running, queue.large
    for _ in range(MAX_OVERTAKEN):
        assert queue.round(large, queue.arrive()) == [False, True]
    later, urgent = queue.arrive(), queue.arrive(priority=1)
    assert queue.round(later, large, queue.arrive(), urgent) == [False, False, False, True]
    assert queue.round(queue.arrive(priority=-1), early, large) == [False, True, False]
    queue.comes = True
    assert queue.round(large, later) == [True, True]


def test_who_was_there_before_overtakes_nobody() -> None:
    queue = Queue()
    others, late = [queue.arrive() for _ in range(MAX_OVERTAKEN)], queue.arrive()
    queue.large = [late]
    for req in others:
        assert queue.round(late, req) == [False, True]
    assert queue.round(late, queue.arrive()) == [False, True]


def test_who_was_aborted_holds_nobody_back() -> None:
    queue = Queue()
    for _ in range(MAX_OVERTAKEN):
        queue.round(*queue.large, queue.arrive())
    other = queue.arrive()
    assert queue.round(other) == [False]
    queue.line.left(queue.large[0].rid)
    assert queue.round(other) == [True]
    assert queue.line.stats()["now"] == 0


@pytest.mark.parametrize("is_overdue", [False, True])
def test_nobody_waits_where_others_were_preempted(is_overdue: bool) -> None:
    """SGLang has preempted them for the next that it asks for. Whoever comes later is held back."""
    queue = Queue()
    (large,), other = queue.large, queue.arrive()
    for _ in range(MAX_OVERTAKEN if is_overdue else 1):
        queue.round(large, queue.arrive())
    queue.preempted = [queue.running[0]]
    assert queue.round(other, queue.arrive()) == [True, not is_overdue]
    assert queue.round(large) == [True]


def test_each_for_whom_others_were_preempted_goes() -> None:
    queue = Queue(large=3)
    assert queue.round(*queue.large, preempts=True) == [True] * 3


def test_who_is_not_looked_at_becomes_overdue() -> None:
    """A burst of more urgent ones that wait comes in each round."""
    queue = Queue()
    queue.reason = Reason.LOADS
    late = queue.arrive(is_planned=True)

    def burst(*others: Any) -> list[bool]:
        urgent = [queue.arrive(1, is_planned=True) for _ in range(MAX_PUT_OFF)]
        queue.large += urgent
        *put_off, first, second = queue.round(*urgent, *others)
        assert not any(put_off)
        for req in urgent:
            queue.line.left(req.rid)
        return [first, second]

    for _ in range(MAX_OVERTAKEN):
        assert burst(late, queue.arrive()) == [False, True]
    assert burst(queue.arrive(), late) == [False, True]


def test_a_round_looks_at_few_of_those_whose_waits_are_over() -> None:
    queue = Queue(large=0)
    queue.reason = Reason.LOADS
    queue.large = [queue.arrive(is_planned=True) for _ in range(5 * MAX_PUT_OFF)]
    for _ in range(5):
        before = queue.num_looks
        assert not any(queue.round(*queue.large))
        assert queue.num_looks - before == MAX_PUT_OFF
    queue.may_have_come = True
    for _ in range(3):
        before = queue.num_looks
        assert not any(queue.round(*queue.large))
        assert queue.num_looks - before == MAX_PUT_OFF
    queue.comes = True
    assert all(queue.round(*queue.large))


@pytest.mark.parametrize("reason", [Reason.LOADS, Reason.NO_ROOM])
def test_nobody_waits_for_nothing(reason: Reason) -> None:
    """Where nothing runs nothing gives room, and a storage goes on."""
    queue = Queue()
    queue.reason = reason
    assert queue.round(*queue.large) == [False]
    queue.running.clear()
    assert queue.round(*queue.large) == [reason is not Reason.LOADS]


def test_it_is_looked_at_when_something_has_come() -> None:
    queue = Queue()
    for _ in range(5):
        queue.round(*queue.large)
    assert queue.num_looks == 1
    queue.comes = True
    assert queue.round(*queue.large) == [True]
    assert (queue.num_looks, queue.line.stats()) == (2, {"no_room": 1, "now": 0})


@pytest.mark.parametrize("num_new", [16, 512])
def test_it_waits_for_room_twice_as_long_as_the_first_answer_may_take(num_new: int) -> None:
    """However often there seemed to be some; anew when others were admitted."""
    queue = Queue()
    (large,), (first,), line = queue.large, queue.running, queue.line
    first.sampling_params.max_new_tokens, first.output_ids = num_new, [1] * 6
    other = queue.arrive()
    other.sampling_params.max_new_tokens = 1000

    def waits() -> bool:
        batch = SimpleNamespace(reqs=[first, other])
        adder: Any = SimpleNamespace(can_run_list=[], preempt_list=[], running_batch=batch)
        line.passes_over(large)
        line.add(adder, large, lambda: str(line.for_room(large, 0)), lambda: None)
        return state(large).is_put_off

    def num_waited() -> int:
        start = line.num_forwards
        while waits():
            line.forward()
        return line.num_forwards - start

    assert waits()
    line.num_forwards += 5
    queue.round(queue.arrive())
    assert [num_waited(), num_waited()] == [2 * (num_new - 6), 0]


@pytest.mark.parametrize(("running", "is_slept"), [([], True), (["other"], False)])
def test_a_round_that_admits_nobody_sleeps_once(
    monkeypatch: pytest.MonkeyPatch, running: Sequence[Any], is_slept: bool
) -> None:
    """However many wait: SGLang asks again at once, and the loader's thread needs Python."""
    slept: list[float] = []
    monkeypatch.setattr("sglang_chunkcache.scheduler.waiting.time.sleep", slept.append)
    queue = Queue(large=5)
    queue.reason, queue.running = Reason.LOADS, list(running)
    for _ in range(3):
        queue.round(*queue.large)
    assert slept == [waiting.POLL_S] * 2 * is_slept


def test_each_wait_is_in_the_trace_with_what_it_was_for() -> None:
    queue = Queue()
    (large,) = queue.large
    for reason in (Reason.LOADS, Reason.LOADS, Reason.NO_ROOM):
        queue.line.put_off(large, reason)
    queue.comes = True
    assert queue.round(large) == [True]
    told = [{"chunkcache.reason": reason} for reason in ("loads", "no_room")]
    assert queue.traced == [(large.rid, "chunkcache_wait", each) for each in told]
