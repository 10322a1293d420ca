"""`quality permutation` against a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.quality.command import main
from eval.quality.permutation import Permutation, draw_orders, in_given_order
from eval.run import read_record, read_samples
from eval.serve.arms import ARMS
from eval.task import Request, TextChunk
from tests.eval.fake_chat import Body, FakeChat, chatting

CHUNKS = tuple(TextChunk(f"p{i}", f"text {i}") for i in range(3))


def run(fake: FakeChat, out: Path, *options: str) -> dict[str, Any]:
    """The record of two questions of the world, three chunks each, ten orders."""
    argv = ["permutation", "--requests", "2", "--k", "3", "--orders", "10"]
    assert main([*argv, "--arm", f"ours={fake.url},rag", "--out", str(out), *options]) == 0
    return read_record(out)


def last_chunk(body: Body) -> str:
    """What a model that only reads the last chunk would say."""
    return f"{body['chunks'][-1]['text']}"


def test_orders_are_asked_as_drawn_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(FakeChat(last_chunk)) as fake:
        record = run(fake, tmp_path / "run")
        told = [(b["messages"][-1]["content"], b["chunks"]) for b in fake.received]
        asked = [(question, tuple(c["id"] for c in chunks)) for question, chunks in told]
        assert all(body["order"] == "retriever" for body in fake.received)
    assert len(asked) == len(set(asked)) <= 2 * 6
    assert f"eval quality: {len(asked)} requests to send" in capsys.readouterr().err.splitlines()[0]
    rows = read_samples(tmp_path / "run")
    assert len(rows) == 2 * 11
    assert [row["permutation"] for row in rows[:11]] == list(range(11))
    assert len({row["block"] for row in rows[:11]}) == 1  # 11 orders of one request are one sample
    counts = [(cell["n"], cell["num_answers"]) for cell in record["results"]["cells"]]
    assert counts == [(2, 2), (2, 20)]
    for row in rows:
        if row["permutation"]:  # this model's answers follow the last chunk
            assert row["metrics"]["same_given"] == (row["order"][-1] == 2)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    with chatting(FakeChat(last_chunk)) as fake:
        whole = run(fake, tmp_path / "whole")
        part = tmp_path / "part"
        part.mkdir()
        lines = (tmp_path / "whole" / "samples.jsonl").read_text().splitlines(keepends=True)
        (part / "samples.jsonl").write_text("".join(lines[:21]))
        (part / "record.json").write_text(json.dumps(whole | {"complete": False}))
        before = len(fake.received)
        again = run(fake, part)
        orders = {tuple(row["order"]) for row in read_samples(part)[11:]}
        assert len(fake.received) - before == len(orders)
    assert len(read_samples(part)) == 22
    assert again["results"]["requests"] == whole["results"]["requests"]


def test_orders_are_the_same_for_every_run() -> None:
    request = Request("t:1", "?", CHUNKS)
    orders = draw_orders(request, 50, seed=0)
    assert orders == draw_orders(request, 50, seed=0) != draw_orders(request, 50, seed=1)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) == 6
    assert orders[0] == (0, 1, 2)  # the retriever's


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return Permutation.__new__(Permutation).figures(rows)


def make_row(request: str, number: int, f1: float) -> dict[str, Any]:
    about = {"arm": "a", "cell": {"order": "random" if number else "retriever"}, "fates": None}
    return {**about, "request": request, "permutation": number, "metrics": {"f1": f1}}


def test_mean_and_deviation_by_hand() -> None:
    rows = [make_row("1", n, f1) for n, f1 in enumerate([0.5, 0.0, 1.0])]
    rows += [make_row("2", n, f1) for n, f1 in enumerate([1.0, 0.0, 0.0])]
    rows += [make_row("3", n, 0.3) for n in range(3)]
    results = figures_of(rows)
    assert results["requests"][0]["metrics"]["f1"] == {"baseline": 0.5, "mean": 0.5, "sd": 0.5}
    assert results["within_sd"]["f1"] == pytest.approx(2 / 3)
    (found,) = results["contrasts"]
    assert (found["n"], found["value"]) == (3, pytest.approx(-1 / 3))  # requests, not orders


def test_orders_of_one_request_are_one_sample() -> None:
    rows = [make_row(str(int(f1)), n, f1) for f1 in (0.0, 1.0) for n in range(101)]
    given, drawn = figures_of(rows)["cells"]
    found = drawn["metrics"]["f1"]
    assert (drawn["n"], drawn["num_answers"]) == (2, 200)
    assert (found["mean"], found["low"], found["high"]) == (0.5, 0, 1)
    assert given["metrics"]["f1"] == found


def test_summary_of_nothing_and_of_failures() -> None:
    assert figures_of([])["requests"] == []
    failed = make_row("1", 0, 0.5) | {"metrics": {}, "error": "refused"}
    assert figures_of([failed])["cells"][0]["errors"] == 1


def test_arms_that_reorder_are_told_not_to() -> None:
    assert in_given_order(ARMS["ours"]).body["order"] == "retriever"
    assert in_given_order(ARMS["stock-lpm"]) is ARMS["stock-lpm"]
    with pytest.raises(CommandError, match="reorders chunks itself"):
        in_given_order(ARMS["contextpilot"])


def test_nonsense_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no request has two chunks"):
        main(["permutation", "--k", "1", "--out", str(tmp_path / "run")])
    with pytest.raises(CommandError, match="--orders must be at least 1"):
        main(["permutation", "--orders", "0"])
