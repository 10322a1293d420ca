"""Who is admitted by SGLang's own loop: its requests, its order of the queue, its budget, over our
tree and with our hook. What is admitted is computed by tests/reference."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_chunkcache import hooks
from sglang_chunkcache.fusion.planning import Planner
from sglang_chunkcache.scheduler.waiting import MAX_OVERTAKEN, MAX_PUT_OFF
from sglang_chunkcache.wire.report import Fallback
from tests import models
from tests.kit import releases
from tests.kit.fused import Rank, report
from tests.kit.requests import A, asks, fused, rag
from tests.reference.scheduler import FakeReq

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

LONG = [*range(10, 30)]
COMMON = [70, 71, 72, 73]
"""Small requests begin with it: of them more is cached than the head, which is all of the large
one's."""
_numbers = count()


@pytest.fixture(autouse=True)
def settings() -> None:
    """A server's, which the loop asks for."""
    models.runner("llama")


class Asked(Req):  # type: ignore[misc]
    """SGLang's request, with what tests/reference keeps of its own."""

    def __init__(self, like: FakeReq, *, priority: int, max_new_tokens: int) -> None:
        custom = like.sampling_params.custom_params
        params = SamplingParams(max_new_tokens=max_new_tokens, custom_params=custom)
        rid = str(next(_numbers))
        super().__init__(rid, "", like.origin_input_ids, params, priority=priority)
        self.filled = 0

    @property
    def all_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids  # type: ignore[no-any-return]


class Off(SimpleNamespace):
    """SGLang's scheduler as far as its loop is asked for: whatever else it has is off."""

    def __getattr__(self, name: str) -> None:
        return None


class Admitted(Exception):
    """In place of the batch that SGLang would make of these."""


class Server(Rank):
    """Each round one decoding step of all that run; who runs ends when it is told to."""

    def __init__(self, capacity: int, policy: str = "fcfs", **knobs: Any) -> None:
        how = {"capacity": capacity, "prefill_budget": 1000, "is_chunked": False, **knobs}
        super().__init__(rag(A, LONG), **how)
        self._num_small = 0
        has_priorities = policy == "priority"
        self.asked, self.told = list[Req](), list[AddReqResult]()
        """By the last round, and what our hook said of each."""
        self.cache.line.rank_of = lambda req: req.priority if has_priorities else 0
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        name = "fcfs" if has_priorities else policy
        self.sglang: Any = Off(
            waiting_queue=[],
            policy=SchedulePolicy(name, self.cache, False, has_priorities, False),
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            page_size=1,
            max_prefill_tokens=1000,
            max_prefill_bs=0,
            priority_scheduling_preemption_threshold=0,
            new_token_ratio_tracker=SimpleNamespace(current=1.0),
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None)),
            get_num_allocatable_reqs=lambda *_, **__: 100,
            get_prefill_adder_class=lambda: PrefillAdder,
        )

    def arrive(self, like: FakeReq, *, priority: int = 0, max_new_tokens: int = 4) -> Any:
        req = Asked(like, priority=priority, max_new_tokens=max_new_tokens)
        req.time_stats.wait_queue_entry_time = float(req.rid)
        self.sglang.waiting_queue.append(req)
        self.cache.arrived(req)
        return req

    def small(self, *, priority: int = 0) -> Any:
        """One of four prompts in turn: they push no source out of the tree."""
        self._num_small += 1
        return self.arrive(FakeReq([*COMMON, 1000 + self._num_small % 4]), priority=priority)

    def round(self) -> list[Any]:
        """Whom SGLang admits. Each has its first token afterwards."""
        add = PrefillAdder.add_one_req
        self.asked, self.told = [], []

        def add_or_wait(adder: Any, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
            self.asked.append(req)
            self.told.append(hooks._add_or_wait(add, adder, req, *args, **kwargs))
            return self.told[-1]

        def admit(reqs: list[Any], *_: Any, **__: Any) -> None:
            self.batch = [(req, len(req.all_ids)) for req in reqs]
            raise Admitted

        self.running_batch.reqs = self.running
        with (
            mock.patch.object(PrefillAdder, "add_one_req", add_or_wait),
            mock.patch.object(ScheduleBatch, "init_new", admit),
            suppress(Admitted),
        ):
            Scheduler._get_new_batch_prefill_raw(self.sglang, None, self.running_batch)
        admitted: list[Any] = [req for req, _ in self.batch]
        for req in admitted:
            req.filled = req.kv.kv_committed_len = req.kv.kv_allocated_len = releases.found(req)
        self.forward()
        for req in admitted:
            self.sample(req, 50)
        return admitted

    def end(self, req: Any) -> None:
        self.release(req, is_insert=True)
        self.running_batch.batch_is_full = False  # as SGLang does when somebody leaves


@pytest.mark.parametrize(
    ("policy", "first", "expected"),
    # asked before it has ever been put off, the first small one overtakes it uncounted
    [
        ("fcfs", "large", MAX_OVERTAKEN),
        ("lpm", "small", MAX_OVERTAKEN + 1),
        ("priority", "large", MAX_OVERTAKEN),
    ],
)
def test_one_large_request_under_a_stream_of_small_ones(
    policy: str, first: str, expected: int
) -> None:
    """It needs all that three hold. In each round one of these ends, and another one comes."""
    server, priority = Server(54, policy), -1 if policy == "priority" else 0
    running = [server.small() for _ in range(3)]
    assert server.round() == running
    stream = list[Any]()
    if policy == "priority":  # by its time it would be asked before, and overtake nobody
        stream.append(server.small(priority=priority))
    large = server.arrive(fused(LONG))
    if policy != "priority":
        stream.append(server.small())
    asked, num_overtaken = list[Req](), 0
    while not large.output_ids:
        assert num_overtaken <= expected
        server.end(server.running[0])
        admitted = server.round()
        asked = asked or server.asked
        num_overtaken += len(admitted) - (large in admitted)
        stream.append(server.small(priority=priority))
    assert asked == ([large, stream[0]] if first == "large" else [stream[0], large])
    assert num_overtaken == expected
    assert (report(large).relocated, report(large).fallbacks) == (len(LONG), ())
    while server.running:  # those that were held back come after it
        server.end(server.running[0])
        server.round()
    assert all(req.output_ids for req in stream)
    server.check()


COMPUTED, HELD = 54, 60
"""Slots that copies hold: there is room to compute the large request, or not even that."""


@pytest.mark.parametrize("num_held", [COMPUTED, HELD])
@pytest.mark.parametrize("has_waited", [False, True])
def test_where_copies_alone_hold_the_slots_nobody_waits_for_them_for_ever(
    num_held: int, has_waited: bool
) -> None:
    """Nothing runs that would free any: it is computed at once, or moved as soon as they are free.
    Told that there is no token, SGLang 0.5.21 takes the batch for full until somebody leaves it."""
    server = Server(100)
    if has_waited:
        running = server.small()
        assert server.round() == [running]
    copies = [server.allocator.alloc(46 if has_waited else num_held)]
    large = server.arrive(fused(LONG), max_new_tokens=16)
    if has_waited:
        assert server.round() == []
        assert server.cache.stats()["waiting"] == {"no_room": 1, "now": 1}
        server.end(running)
        copies.append(server.allocator.alloc(num_held - 46))
    if num_held == HELD:
        for _ in range(5):
            assert (server.round(), server.told) == ([], [AddReqResult.OTHER])
        for slots in copies:
            server.allocator.free(slots)
    assert server.round() == [large]
    fates = (0, (Fallback.NO_ROOM,)) if num_held == COMPUTED else (len(LONG), ())
    assert (report(large).relocated, report(large).fallbacks) == fates
    assert server.cache.stats()["waiting"]["now"] == 0
    if num_held == COMPUTED:
        for slots in copies:
            server.allocator.free(slots)
    server.end(large)
    server.check()


@pytest.mark.parametrize("is_on_device", [True, False])
@pytest.mark.parametrize(("one_copy", "num_admitted"), [("off", 1), ("on", 3)])
def test_with_one_copy_nobody_asks_for_rows_that_others_hold(
    one_copy: str, num_admitted: int, is_on_device: bool
) -> None:
    """The same 20 tokens for each, at four places."""
    server = Server(60, one_copy=one_copy)
    if not is_on_device:
        server.store_chunks(LONG)
        server.evict(60)
    reqs = [server.arrive(fused(LONG, head=[200 + n] * (2 + n))) for n in range(4)]
    assert server.round() == reqs[:num_admitted]
    server.check(server.running)
    while server.running:
        server.end(server.running[0])
        server.round()
    assert [report(req).relocated for req in reqs] == [len(LONG)] * len(reqs)
    server.check()


def test_a_round_plans_few_that_wait_for_the_next_pass() -> None:
    """And none again before there is room for it."""
    server = Server(100_000, "fcfs")
    server.sglang.max_prefill_tokens = 100_000
    promises = server.fuser.promises
    promises._limits = replace(promises._limits, max_pass_tokens=15)
    for number in range(60):
        fusion = asks("none", 0.5, f"r{number}")
        server.arrive(fused(LONG, fusion=fusion, head=[200 + number, 90, 91]), max_new_tokens=4)
    rounds, plan = list[tuple[int, int]](), Planner._plan
    while server.sglang.waiting_queue:
        with mock.patch.object(Planner, "_plan", autospec=True, side_effect=plan) as planned:
            admitted = server.round()
        rounds.append((len(admitted), planned.call_count))
        for req in list(server.running):
            server.end(req)
    assert rounds[0][0] > 1
    assert all(planned - admitted in range(MAX_PUT_OFF + 1) for admitted, planned in rounds)
    assert sum(planned - admitted for admitted, planned in rounds) < 60, "each is put off once"
