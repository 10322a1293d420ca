"""The compact form of a record."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.packed import (
    MIN_ROWS,
    pack_results,
    pack_samples,
    record_text,
    unpack_results,
    unpack_samples,
)
from eval.recorded import _replayed, _requests

TEXT = st.text(max_size=3)
NUMBER = st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False)
LEAF = st.none() | st.booleans() | NUMBER | TEXT
VALUE = LEAF | st.dictionaries(TEXT, LEAF, max_size=2) | st.lists(LEAF, max_size=2)
ROW = st.dictionaries(TEXT, VALUE, max_size=4)
RESULTS = st.dictionaries(
    st.sampled_from("ab"), LEAF | ROW | st.lists(ROW, max_size=5) | st.lists(st.lists(ROW))
)


@given(RESULTS)
def test_results_come_back_as_they_were(results: dict[str, Any]) -> None:
    told = json.loads(record_text({"results": pack_results(results)}))["results"]
    assert json.dumps(unpack_results(told)) == json.dumps(results)


def test_rows_are_kept_without_their_keys() -> None:
    rows = [
        {"arm": arm, "n": 8, "metrics": {"em": {"mean": value}}}
        for arm, value in zip("aabb", (1, 2, 3, 4), strict=True)
    ]
    packed = pack_results({"rows": rows, "few": rows[: MIN_ROWS - 1]})
    (shape,) = packed["rows"]["shapes"]
    assert shape["same"] == {"1": 8}
    assert shape["texts"] == {"0": ["a", "b"]}
    assert packed["rows"]["rows"] == [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 1, 4]]
    assert packed["few"] == rows[: MIN_ROWS - 1]
    assert len(record_text(packed).splitlines()) > len(rows), "a line for each"


def test_quantiles_that_nobody_reads_are_not_kept() -> None:
    figures = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "low": 0.9, "high": 1.1}
    cell = {"arm": "a", "metrics": {"em": figures, "ttft_s": figures}}
    (kept,) = unpack_results(pack_results({"cells": [cell]}))["cells"]
    assert kept["metrics"] == {"em": {"mean": 1.0, "low": 0.9, "high": 1.1}, "ttft_s": figures}


def test_samples_come_back_by_arm_and_cell() -> None:
    one = {"arm": "a", "cell": {"k": 2}, "request": 7, "block": "b1"}
    samples = [
        {**one, "warm_up": True, "metrics": {"ttft_s": 9.0}},
        {**one, "metrics": {"ttft_s": 0.1 + 0.2, "em": None}, "answer": "long"},
        {**one, "arm": "b", "metrics": {}, "error": "gone"},
        {**one, "request": "8", "metrics": {"ttft_s": float("inf"), "em": 1.0}},
        {"key": "trace", "seen_chunks": 3},
    ]
    rows = unpack_samples(pack_samples(samples, None))
    told = {"cell": {"k": 2}, "warm_up": False, "block": "b1"}
    assert rows == [
        {"arm": "a", "cell": {"k": 2}, "warm_up": True, "metrics": {}},
        {**told, "arm": "a", "request": "7", "metrics": {"ttft_s": 0.1 + 0.2}},
        {**told, "arm": "a", "request": "8", "metrics": {"em": 1.0}},
        {**told, "arm": "b", "request": "7", "metrics": {}, "error": True},
    ]


@pytest.mark.parametrize(("num", "size", "step"), [(85, 2, 5), (30, 2, 1), (40, 20, 1)])
def test_replay_keeps_the_means_of_blocks(num: int, size: int, step: int) -> None:
    rng = np.random.default_rng(num)
    counts = {name: rng.integers(0, 5, num).tolist() for name in ("hits", "dropped", "lost")}
    chunks = rng.integers(5, 9, num).tolist()
    row = {"cell": {"order": "tree"}, "bin": size, "chunks": chunks, **counts}
    (kept,) = unpack_samples(pack_samples([row], 10))
    assert (kept["num"], kept["step"], len(kept["hits"])) == (num, step, -(-num // step))
    samples = _requests(_replayed([kept])[0])
    found = (np.array(row["hits"]) + row["dropped"] - row["lost"]) / np.mean(row["chunks"])
    blocks = np.arange(num) // max(1, 10 // size)
    assert [one["block"] for one in samples] == blocks.tolist()
    for block in range(blocks[-1] + 1):
        mine = [one["metrics"]["saved_share"] for one in samples if one["block"] == block]
        assert sum(mine) == pytest.approx(found[blocks == block].sum())
