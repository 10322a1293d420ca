"""The model of time: the review's table first, then what differs from it, input that is refused,
and its record."""

from __future__ import annotations

import json
from itertools import pairwise
from operator import ge
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main as eval_main
from eval.machines import MACHINES, SHAPES
from eval.recorded import read_recorded
from eval.roofline.build import BUILT, LIMIT, REVIEWED, Build
from eval.roofline.command import main
from eval.roofline.measured import compared
from eval.roofline.model import STEPS, Model, Prompt, masked_pairs, scattered_pairs

COLUMNS = (
    *("full", "built", "copy", "question", "deviation", "choose", "recompute", "on device"),
    *("extend", "from the store", "no evidence", "limit"),
)
REVIEW = {
    ("llama-3.1-8b", 2048): (48, 33, 0.2, 11, 2.7, 1.3, 11, 7, 6, 42, 18, 13),
    ("llama-3.1-8b", 8192): (210, 70, 0.8, 11, 11, 4.5, 36, 33, 6.5, 106, 44, 42),
    ("llama-3.1-8b", 32_768): (1190, 304, 3.2, 11, 54, 21, 205, 202, 9, 447, 224, 221),
    # It is headed H200, but has the H100's bandwidth.
    ("qwen3-32b", 2048): (214, 89, 0.4, 24, 3.5, 1.3, 34, 31, 25, 107, 60, 53),
    ("qwen3-32b", 8192): (923, 221, 1.6, 26, 15, 4.5, 146, 143, 28, 293, 177, 171),
    ("qwen3-32b", 32_768): (5090, 1037, 6.4, 33, 78, 21, 860, 857, 39, 1324, 912, 892),
}
"""Milliseconds on one H100, 15% recomputed, a question of 64 tokens."""


def model(build: Build, shape: str = "llama-3.1-8b", machine: str = "h100") -> Model:
    return Model(MACHINES[machine], SHAPES[shape], build)


@pytest.mark.parametrize(("shape", "num_tokens"), REVIEW)
def test_table_of_the_review(shape: str, num_tokens: int) -> None:
    """Within a tenth, in every column."""
    reviewed, prompt = model(REVIEWED, shape), Prompt(num_tokens, 0.15)
    steps, limit = reviewed.steps(prompt), model(LIMIT, shape)
    found = (
        reviewed.full(prompt).seconds,
        reviewed.device_s(steps),
        *(steps[name].seconds for name in COLUMNS[2:7]),
        steps["recompute"].device_s,
        steps["extend"].seconds,
        reviewed.host_s(steps),
        reviewed.scored_s(prompt, steps),
        limit.device_s(limit.steps(prompt)),
    )
    expected = dict(zip(COLUMNS, REVIEW[shape, num_tokens], strict=True))
    got = {name: 1e3 * seconds for name, seconds in zip(COLUMNS, found, strict=True)}
    assert got == pytest.approx(expected, rel=0.1)


def test_builds_differ_by_counts_alone() -> None:
    """Prefill takes the same, and what has neither launches nor host work of ours."""
    prompt = Prompt(8192, 0.15)
    found = [model(build).full(prompt) for build in (REVIEWED, BUILT, LIMIT)]
    assert found[0] == found[1] == found[2]
    built, reviewed = (model(build).steps(prompt) for build in (BUILT, REVIEWED))
    assert built["extend"].seconds == 0 < reviewed["extend"].seconds
    assert built["copy"].device_s == reviewed["copy"].device_s
    assert built["load"].device_s == reviewed["load"].device_s


def test_nothing_is_sooner_than_the_limit() -> None:
    for machine in MACHINES:
        for num_tokens in (512, 2048, 32_768):
            prompt = Prompt(num_tokens, 0.15)
            built, limit = model(BUILT, machine=machine), model(LIMIT, machine=machine)
            found = [
                (each.device_s(steps), each.host_s(steps), each.scored_s(prompt, steps))
                for each in (built, limit)
                for steps in (each.steps(prompt),)
            ]
            assert all(map(ge, *found))


def test_more_tokens_take_longer() -> None:
    """In every step, or as long; a larger share likewise."""
    for build in (REVIEWED, BUILT, LIMIT):
        prompts = (Prompt(2000, 0.1), Prompt(2100, 0.1), Prompt(2100, 0.2), Prompt(70_000, 0.2))
        found = [model(build).steps(prompt) for prompt in prompts]
        for before, after in pairwise(found):
            assert all(before[name].seconds <= after[name].seconds for name in STEPS)


def test_step_takes_the_longer_of_device_and_host() -> None:
    steps = model(BUILT).steps(Prompt(2048, 0.15))
    assert steps["question"].bound == "host"
    assert steps["question"].seconds == pytest.approx(steps["question"].host_s)
    assert steps["load"].bound == "device"
    assert steps["load"].seconds == pytest.approx(2048 * 131_072 / (64e9 * 0.86))


def test_pairs_are_those_of_the_planners() -> None:
    """Every row of a masked piece is multiplied with all keys up to the piece's end, tiles of
    scattered rows with all up to their last row's."""
    assert masked_pairs(4096, 4096, 2048) == 1024 * (1024 + 2048 + 3072 + 4096)
    needed = 1229 * 8192 / 2
    assert 1.0 < scattered_pairs(8192, 1229, 128) / needed < 1.2
    assert scattered_pairs(8192, 1229, 32) < scattered_pairs(8192, 1229, 128)


def test_blocks_of_queries_are_launched() -> None:
    """Of 13,107 proposed tokens in two pieces 8 and 5, of which each piece has one in any case."""
    built = model(BUILT)
    few, many = (built.steps(Prompt(n, 0.15))["deviation"].launches for n in (2048, 32_768))
    assert few == BUILT.piece_launches
    assert many == 2 * BUILT.piece_launches + 11 * BUILT.block_launches


def test_records_stand_beside() -> None:
    """Prefill, attention and copies within a quarter but for one; where the host decides, the model
    is up to twice as fast."""
    rows = {row["figure"]: float(row["model / measured"]) for row in compared()["rows"]}
    hosts = {name: share for name, share in rows.items() if name.startswith(("host", "8,000"))}
    del hosts["8,000 tokens, prefill: ms"]
    off = {name: share for name, share in rows.items() if name not in hosts}
    assert all(0.45 <= share <= 1.1 for share in hosts.values())
    assert [name for name, share in off.items() if not 0.8 <= share <= 1.25] == [
        "a layer's attention at 8,192, 15%, FA3: ms"
    ]


# The command


def run(*options: str) -> int:
    return eval_main(["roofline", *options])


def test_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model-shape llama-3.1-8b --machine h100 --tokens 2048,1024 --ratio .2 --json"
    assert run(*options.split(), "--out", str(tmp_path / "run")) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    recorded = read_recorded(tmp_path / "run")
    assert recorded.results == told
    assert [row["tokens"] for row in told["tables"][0]["rows"]] == [1024, 2048]
    assert len(told["tables"]) == 3
    assert len(recorded.samples) == 8
    seconds = recorded.samples[0]["metrics"]["device_s"]
    built = model(BUILT)
    assert seconds == pytest.approx(built.device_s(built.steps(Prompt(1024, 0.2))), rel=1e-3)


def test_measured_table_is_for_its_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def titles(machine: str, shape: str) -> list[Any]:
        options = ["--machine", machine, "--model-shape", shape, "--tokens", "1024", "--json"]
        assert main([*options, "--out", str(tmp_path / machine / shape)]) == 0
        return [each["title"] for each in json.loads(capsys.readouterr().out)["tables"]]

    assert titles("h200", "llama-3.1-8b")[-1] == "Beside an H200's records"
    assert len(titles("h200", "qwen3-8b")) == len(titles("l40s", "llama-3.1-8b")) == 2


def test_choice_is_timed_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the code that serves, so a change of it shows; the record has the times."""
    pytest.importorskip("sglang")
    options = "--model-shape llama-3.1-8b --machine h100 --tokens 512 --time-choice --json"
    assert run(*options.split(), "--out", str(tmp_path / "run")) == 0
    spec = read_recorded(tmp_path / "run").record["spec"]
    ((num_tokens, seconds),), ((_, python_s),) = spec["choose_s"], spec["choose_python_s"]
    assert num_tokens == 512
    assert seconds > python_s > 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    steps = tables[1]["rows"]
    assert tables[2]["title"] == "Choosing"
    choose = next(row for row in steps if row["step"] == "choose")
    assert choose["built"] == pytest.approx(1e3 * seconds, abs=0.06)
    assert choose["reviewed"] == pytest.approx(1.3 * 512 / 2048, abs=0.06)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ratio", "0"), "--ratio must be over 0"),
        (("--ratio", "1.5"), "--ratio must be over 0"),
        (("--ratio", "nan"), "--ratio must be over 0"),
        (("--tokens", "64"), "--tokens must be from 128"),
        (("--tokens", "2048,9999999"), "--tokens must be from 128"),
        (("--tokens", "2k"), "whole numbers with commas"),
        (("--tokens", ""), "whole numbers with commas"),
        (("--machine", "b200"), "invalid choice"),
        (("--model-shape", "gpt"), "invalid choice"),
    ],
)
def test_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    base = ["--model-shape", "llama-3.1-8b", "--machine", "h100", "--out", str(tmp_path / "run")]
    try:
        code = run(*base, *options)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
