"""300 requests of real traffic through our tree and SGLang's own, in pages: what each finds, one by
one, and what the order gains in SGLang's.

    CHUNKCACHE_DATA=DIR .venv/bin/python -m pytest -m nightly -s tests/e2e/test_tree_data.py

Text is cut to a quarter, and the pools evict nothing, so that all six trees see the same prompts.
`-s` shows the table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eval.http import post
from eval.random_model import SHAPES, write_random_model
from eval.server import Server
from eval.task import Request, Source, load_task, requests_of
from tests.e2e.asking import CHAT, EXPLAIN, flush
from tests.polling import until
from tests.soak.answers import (
    LOGPROBS,
    NEVER_REUSE,
    Answer,
    answer_of,
    differences,
    prompt_ids,
    rag_body,
    run_stock,
)

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TASKS = ("ragpulse", "mtrag")
TREES = (("chunk", 1), ("chunk", 16), ("chunk", 64), ("stock", 1), ("stock", 16), ("stock", 64))
NEW = 2
"""Tokens of each answer."""


class Seen(NamedTuple):
    """One request of one tree."""

    found: int
    border: int
    """Where the chunks end that are found."""
    prompt: list[int]
    answer: Answer


@pytest.fixture(scope="module")
def requests() -> dict[str, list[Request]]:
    data = os.environ.get("CHUNKCACHE_DATA")
    if data is None:
        pytest.skip("CHUNKCACHE_DATA names no directory")
    sources = [Source(task, data=Path(data), requests=300, scale=4) for task in TASKS]
    made = {each.task: requests_of(each, load_task(each), retriever="given") for each in sources}
    return {task: [each for each in listed if each.chunks] for task, listed in made.items()}


@pytest.fixture(scope="module")
def model(
    requests: dict[str, list[Request]], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    texts = {
        chunk.text: None for listed in requests.values() for each in listed for chunk in each.chunks
    }
    path = write_random_model(tmp_path_factory.mktemp("model"), SHAPES[1], texts)
    return ["--model-path", str(path), "--max-total-tokens", "1000000"]


def sent(server: Server, requests: Sequence[Request], order: str) -> list[Seen]:
    flush(server)
    found = list[Seen]()
    for request in requests:
        body = rag_body(request, NEW, order=order)
        reply = post(server.url + CHAT, {**body, **LOGPROBS})
        told = reply["chunkcache"]
        # SGLang's events may come after the answer
        until(lambda: _num_planned(server, body) == len(told["order"]), every_s=0.002)  # noqa: B023
        found.append(
            Seen(
                told["fates"]["exact"],
                told["predicted_exact"],
                prompt_ids(reply),
                answer_of(reply["choices"][0]["meta_info"]),
            )
        )
    return found


def _num_planned(server: Server, body: dict[str, Any]) -> int:
    """Chunks that the front takes for cached."""
    return int(post(server.url + EXPLAIN, body)["chunks_planned"])


Runs = dict[tuple[str, int, str, str], list[Seen]]


@pytest.fixture(scope="module")
def runs(
    requests: dict[str, list[Request]], model: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """By tree, page size, task and order. One server after the other."""
    logs, made = tmp_path_factory.mktemp("servers"), Runs()
    for tree, page in TREES:
        flags = [*model, "--chunkcache-tree", tree, "--page-size", str(page)]
        with Server(flags, log=logs / f"{tree}{page}.log") as server:
            for task, listed in requests.items():
                for order in ("tree", "retriever"):
                    made[tree, page, task, order] = sent(server, listed, order)
    return made


@pytest.mark.parametrize("task", TASKS)
def test_stock_tree_finds_what_ours_does(runs: Runs, task: str) -> None:
    """In pages of p up to p - 1 tokens less, at the one border of a match."""
    ours = runs["chunk", 1, task, "tree"]
    assert sum(each.found for each in ours) > 0
    for tree, page in TREES:
        theirs = runs[tree, page, task, "tree"]
        pairs = [(one.found, other.found) for one, other in zip(theirs, ours, strict=True)]
        short = [(i, *pair) for i, pair in enumerate(pairs) if pair[0] < pair[1] - (page - 1)]
        print(f"{task} {tree} page {page}: found by request: {[each.found for each in theirs]}")
        print(f"{task} {tree} page {page}: less than ours by over {page - 1}: {short}")
        assert [each.prompt for each in theirs] == [each.prompt for each in ours]
        assert not short


@pytest.mark.parametrize("task", TASKS)
def test_order_gains_in_a_stock_tree(runs: Runs, task: str) -> None:
    for tree, page in TREES:
        shares = [
            sum(each.found for each in seen) / sum(len(each.prompt) for each in seen)
            for order in ("retriever", "tree")
            for seen in [runs[tree, page, task, order]]
        ]
        print(f"{task} {tree} page {page}: found in the retriever's, the tree's order: {shares}")
        assert shares[1] > shares[0]


def test_answers_are_stock_sglangs(runs: Runs, model: list[str], tmp_path: Path) -> None:
    """Without us and without reuse, over the same tokens. Rounding may part two that are close."""
    with Server(["--stock", *model], log=tmp_path / "log", env=NEVER_REUSE) as server:
        for task in TASKS:
            reference = [
                run_stock(server.url, each.prompt, NEW) for each in runs["chunk", 1, task, "tree"]
            ]
            for tree, page in TREES:
                answers = [each.answer for each in runs[tree, page, task, "tree"]]
                parted = differences(reference, answers)
                print(f"{task} {tree} page {page}: {len(parted)} of {len(answers)} part: {parted}")
                assert all(each.gap < 2e-2 for each in parted)
