"""Requests that wait for each other, by arithmetic."""

from __future__ import annotations

import pytest

from eval.replay.queueing import Job, figures, served
from eval.serve.workload import Load, arrivals

STEP = 0.25


def step(_num_requests: int, _num_tokens: int) -> float:
    return STEP


def test_who_waits_is_prefilled_before_the_next_step() -> None:
    """Two clients: prefill, prefill, step; the third begins when the first is done."""
    jobs = [Job(1.0, 10, 2), Job(2.0, 10, 3), Job(4.0, 10, 1)]
    ttft, seconds = served(jobs, Load(clients=2), step, room=100, seed=0)
    # 1, 3, step to 3.25: the first is done; its client's next until 7.25; the second's last step
    assert ttft == [1.0, 3.0, 4.0]
    assert seconds == 7.5


def test_who_has_no_room_waits_for_those_that_run() -> None:
    jobs = [Job(1.0, 10, 5), Job(1.0, 10, 1), Job(1.0, 1000, 1)]
    ttft, seconds = served(jobs, Load(clients=3), step, room=20, seed=0)
    assert ttft[:2] == [1.0, 1.0 + 4 * STEP + 1.0]
    assert ttft[2] == seconds == 4.0, "alone it has the pool"


def test_a_step_is_given_what_runs() -> None:
    asked = list[tuple[int, int]]()

    def step(num_requests: int, num_tokens: int) -> float:
        asked.append((num_requests, num_tokens))
        return STEP

    served([Job(1.0, 10, 2), Job(1.0, 20, 3)], Load(clients=2), step, room=100, seed=0)
    assert asked == [(2, 32), (1, 22)], "prompts and the tokens that are there"


def test_poisson_arrivals_are_those_of_a_measured_load() -> None:
    """And an idle server serves each alone."""
    load, jobs = Load("poisson", rate=0.001), [Job(0.5, 10, 1)] * 20
    ttft, seconds = served(jobs, load, step, room=100, seed=3)
    due = arrivals(load, [None] * 20, seed=3)
    assert due is not None
    assert ttft == pytest.approx([0.5] * 20)
    assert seconds == pytest.approx(due[-1] + 0.5)


def test_queue_grows_with_the_rate() -> None:
    """Of a server that is half busy the mean wait of equal prefills is half of one (M/D/1)."""
    jobs = [Job(1.0, 10, 1)] * 20_000
    half, more = (
        figures(jobs, Load("poisson", rate=rate), step, room=100, seed=1) for rate in (0.5, 0.8)
    )
    assert half["mean_s"] == pytest.approx(1.5, rel=0.03)
    assert more["mean_s"] == pytest.approx(3.0, rel=0.1)
    assert half["p99_s"] > half["mean_s"] > half["p50_s"] >= 1.0
    assert "p99_s" not in figures(jobs[:999], Load(clients=1), step, room=100, seed=1)
    assert figures(jobs, Load(clients=4), step, room=100, seed=1)["requests_per_s"] == 1.0
