"""Questions in scripts without spaces and in Korean find their texts with the defaults,
from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval.__main__ import main
from tests.retrieval.languages import QUESTIONS, TEXTS, write_texts


def test_questions_find_their_texts_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least seven of eight, built and asked without flags;
    and the build says what it has found."""
    assert (
        main(["build", str(write_texts(tmp_path / "docs")), "--out", str(tmp_path / "index")]) == 0
    )
    told = capsys.readouterr().out
    assert f"files: {len(TEXTS)} read" in told
    assert "scripts without spaces: 8 documents" in told
    right = 0
    for question, name in QUESTIONS.items():
        assert main(["search", str(tmp_path / "index"), question, "--json"]) == 0
        passages = json.loads(capsys.readouterr().out)["passages"]
        right += bool(passages) and passages[0]["document"] == name
    assert right >= 7
