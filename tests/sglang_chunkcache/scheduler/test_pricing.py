"""What phases take: watched, agreed between ranks, measured at the start on a real model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from radix_ext.costs import Line, Phase, Work
from sglang_chunkcache.fusion.price_trial import MIN_TOKENS, measure_costs
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.scheduler.pricing import REFRESH
from sglang_chunkcache.storage.codec import CODECS
from tests import models
from tests.kit.pricing import Group, make_pricing
from tests.kit.tensors import PoolHost, params_of, table_of


class Event:
    """CUDA's, done when `now` says so."""

    now, is_done = 0.0, False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.is_done

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_what_raises_or_does_nothing_is_not_learnt() -> None:
    """Else an error halfway through would make the phase look cheap."""
    pricing = make_pricing()
    with pytest.raises(KeyError), pricing.timed(Phase.HOST, Work(1, 5)):
        raise KeyError
    with pricing.timed(Phase.HOST, Work()):
        pass
    pricing.poll()
    assert pricing.model.num_observed[Phase.HOST] == 0
    with pricing.timed(Phase.HOST, Work(1, 5)) as watch:
        pass
    pricing.poll()
    assert pricing.model.num_observed[Phase.HOST] == 1
    assert watch.seconds is not None


def test_work_on_a_gpu_is_learnt_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, and nothing waits for it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pricing = make_pricing(device="cuda")
    with pricing.timed(Phase.EXTEND, Work(1, 100, 100)) as watch:
        Event.now += 0.5
    pricing.poll()
    assert watch.seconds is None
    monkeypatch.setattr(Event, "is_done", True)
    pricing.poll()
    assert watch.seconds == 0.5
    assert pricing.model.num_observed[Phase.EXTEND] == 1


def test_more_of_it_beside_counts_when_it_is_over() -> None:
    """A load goes on beside the forward, on another thread."""
    pricing = make_pricing()
    began = time.perf_counter()
    with pricing.timed(Phase.LOAD, Work(1, 5)) as watch:
        overlapped = pricing.overlapped(watch)
    overlapped.mark()
    pricing.poll()
    assert watch.seconds is None
    time.sleep(0.01)
    overlapped.mark()
    pricing.poll()
    assert watch.seconds is not None
    assert 0.01 <= watch.seconds <= time.perf_counter() - began
    assert pricing.model.num_observed[Phase.LOAD] == 1


def test_waiting_for_other_work_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would look like computing, and less would be copied ahead for it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pricing = make_pricing(device="cuda")
    with pricing.timed(Phase.LOAD, Work(1, 5)) as load:
        pass
    with pricing.timed(None, Work(1)) as around:
        with pricing.timed(Phase.EXTEND, Work(1, 100, 100)) as extend:
            Event.now += 0.5
            with pricing.stall(load):
                Event.now += 2.0
        with pricing.timed(Phase.HOST, Work(1, 5)) as later:
            Event.now += 0.25
    monkeypatch.setattr(Event, "is_done", True)
    pricing.poll()
    assert (extend.seconds, later.seconds, around.seconds) == (0.5, 0.25, 0.75)


def test_waiting_for_a_part_of_it_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that filling a prompt's slots takes, whose loads come beside its passes."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pricing = make_pricing(device="cuda")
    with pricing.timed(None, Work(1)) as filling:
        with pricing.timed(Phase.HOST, Work(1, 5)) as load:
            Event.now += 1.0
        with pricing.timed(Phase.RECOMPUTE, Work(1, 5)) as recompute:
            Event.now += 0.5
            with pricing.stall(load):
                Event.now += 2.0
    monkeypatch.setattr(Event, "is_done", True)
    pricing.poll()
    assert (filling.seconds, recompute.seconds) == (3.5, 0.5)


@pytest.mark.parametrize("is_measured", [True, False])
def test_all_ranks_plan_by_the_figures_of_rank_0(is_measured: bool) -> None:
    """Each measures for itself, and takes what rank 0 has sent. Plans have no costs where moves
    need not pay (`--chunkcache-move always`); what loads go by is agreed all the same."""
    line = (0.5, 0.25, 0.125)
    group = Group(2, {phase.value: line for phase in Phase})
    pricing = make_pricing(group)
    if is_measured:
        pricing.model.measure(Phase.HOST, Work(1, 5), 7.0)
        pricing.start()
    for _ in range(2 * REFRESH):
        pricing.refresh()
    assert pricing.costs == (dict.fromkeys(Phase, Line(*line)) if is_measured else None)
    assert pricing.agreed[Phase.LOAD] == Line(*line)
    assert len(group.sent) == 2 + is_measured
    if is_measured:
        assert Line(*group.sent[0]["host"]).seconds(Work(1, 5)) == pytest.approx(7.0)


@pytest.mark.parametrize("codec", CODECS)
def test_every_phase_is_measured_and_all_is_given_back(codec: str) -> None:
    """On a real model: longer work takes longer by the fitted lines."""
    runner = models.runner("llama")
    pricing = make_pricing()
    means = Means(runner, table_of(runner), params_of(runner), None, 16, pricing)
    host: Any = PoolHost(runner, codec)
    longest = measure_costs(means, host, max_tokens=600)
    assert host.pool.num_free == host.pool.num_slots
    pricing.start()
    assert longest >= MIN_TOKENS
    assert pricing.costs is not None
    for phase, line in pricing.costs.items():
        short, long = (line.seconds(Work(1, n, n * n)) for n in (64, 1024))
        # loads are observed in service alone
        assert phase is Phase.LOAD or 0 < short <= long, phase
    models.assert_given_back(runner)
