"""What the options of load-generating commands become."""

from __future__ import annotations

import pytest

from eval.serve.arms import parse_arms
from eval.serve.command import parse
from eval.serve.options import loads, make_plan, split_flags


@pytest.mark.parametrize(
    ("load", "requests", "block"),
    [("closed", 210, 10), ("closed", 50, 5), ("closed", 12, 1), ("poisson", 50, 20), ("poisson", 810, 100)],
)
def test_block_leaves_enough_blocks_and_an_open_loop_its_queue(load: str, requests: int, block: int) -> None:
    """A block of one request at a time would be a closed loop, whatever the rate."""
    args = parse(["--load", load, "--arms", "ours"])
    assert make_plan(args, (), requests).block == block
    assert make_plan(parse(["--block", "0"]), (), requests).block == 0


def test_too_few_blocks_for_a_verdict_are_said_before_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    """An hour of load that can say nothing should not be begun by mistake; the number named is enough."""
    args = parse(["--load", "poisson", "--warm-up", "10"])
    arms = parse_arms(["stock-lpm", "ours"])
    make_plan(args, arms, 100)
    assert "too few blocks for a verdict: 5, less than 8; give --requests >= 170" in capsys.readouterr().err
    make_plan(args, arms, 170)
    make_plan(args, arms[:1], 100)
    assert capsys.readouterr().err == ""


def test_block_keeps_all_clients_busy() -> None:
    """Eight clients share a block of five requests: five would be in flight, under the name of eight."""
    assert make_plan(parse(["--clients", "1", "8"]), (), 50).block == 32


def test_only_what_is_swept_is_a_label() -> None:
    """Records of runs without a sweep can then be compared whatever their load."""
    assert [label for label, _ in loads(parse(["--load", "poisson", "--rates", "2"]))] == [{}]
    swept = loads(parse(["--clients", "1", "4"]))
    assert [(label, load.clients) for label, load in swept] == [({"clients": 1}, 1), ({"clients": 4}, 4)]


def test_flags_behind_the_dashes_are_the_servers() -> None:
    assert split_flags(["--k", "3", "--", "--page-size", "1", "--"]) == (["--k", "3"], ["--page-size", "1", "--"])
    assert parse(["--k", "3", "--", "--page-size", "1"]).server_flags == ["--page-size", "1"]
