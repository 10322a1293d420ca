"""Workloads of other projects, read from small files of their formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.errors import CommandError
from tests.eval.make_data import requests


def write_qcfuse(folder: Path) -> None:
    """Two of the seven files, in the four fields of the published ones."""
    shared = "Entity: Green. A colour."
    rows = [
        {"input": "Who?", "context": [shared, f"Text {n}.", shared], "answers": [f"a{n}", "b"], "num_chunks": 3}
        for n in range(2)
    ]
    for name in ("musique", "bird"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_qcfuse_sets_share_chunks_of_equal_text(tmp_path: Path) -> None:
    """One file, or the folder of all; a text that is shown twice is one chunk."""
    write_qcfuse(tmp_path)
    asked = requests("--task", "qcfuse", "--data", tmp_path)
    assert [r.id for r in asked] == ["qcfuse:musique:0", "qcfuse:musique:1", "qcfuse:bird:0", "qcfuse:bird:1"]
    assert [c.text for c in asked[1].chunks] == ["Entity: Green. A colour.", "Text 1."]
    assert len({r.chunks[0] for r in asked}) == 1
    assert [(r.question, r.answers, r.max_new_tokens) for r in asked[::2]] == [
        ("Who?", ("a0", "b"), 48),
        ("Who?", ("a0", "b"), 512),
    ]
    assert requests("--task", "qcfuse", "--data", tmp_path / "bird.jsonl") == asked[2:]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": "Who?", "context": "one text", "answers": []}, "context must be a list of strings"),
        ({"context": ["a"], "answers": "b"}, "input must be a non-empty string"),
    ],
)
def test_other_rows_than_qcfuses_are_refused(tmp_path: Path, row: dict[str, object], said: str) -> None:
    (tmp_path / "musique.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(CommandError, match=f"line 1: {said}"):
        requests("--task", "qcfuse", "--data", tmp_path / "musique.jsonl")
