"""The bench of a large build runs, at a small size: kills are survived, and a loss would be seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.bench.million import check, main
from eval.generated_corpus import GeneratedCorpus
from retrieval.encoder import load_encoder
from retrieval.index import Index

pytestmark = pytest.mark.nightly

TINY = ["--dim", "16", "--topics", "10", "--words", "20"]


def test_a_build_killed_while_reading_and_encoding_loses_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Checks hold, each process' memory was seen, and every mode was timed."""
    command = ["--passages", "3000", "--kill", "read", "encode", "--questions", "32", "--work", str(tmp_path)]
    assert main([*TINY, *command]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(report["checks"].values())
    assert [run["killed_in"] for run in report["builds"]][-1] is None
    assert sum(run["killed_in"] is not None for run in report["builds"]) >= 1
    assert report["builds"][-1]["report"]["passages"] == 3000
    assert all(0 < run["peak_anonymous_gib"] <= run["peak_gib"] for run in report["builds"])
    assert set(report["search"]) == {
        f"{m}/{k}/{n}" for m in ("fusion", "dense", "bm25") for k in (5, 20) for n in (1, 32)
    }
    assert report["search"]["fusion/5/1"]["on_topic"] > 0.5
    assert not list(tmp_path.iterdir())


def test_checks_see_a_lost_passage_and_a_wrong_vector(tmp_path: Path) -> None:
    """A check that cannot fail proves nothing."""
    corpus = GeneratedCorpus(num_passages=150, num_topics=10, num_words=20, seed=0)
    corpus.write(tmp_path / "c.jsonl")
    lines = (tmp_path / "c.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "c.jsonl").write_text("".join(lines[:70] + lines[71:]))
    command = ["build", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "i"), "--no-split", "--dim", "16"]
    subprocess.run([sys.executable, "-m", "retrieval", *command], check=True, capture_output=True)
    index = Index.open(tmp_path / "i", verify=True)
    encoder = load_encoder(index.settings.encoder, folder=tmp_path / "i", override=None, device=None, batch_size=1)
    short = GeneratedCorpus(num_passages=149, num_topics=10, num_words=20, seed=0)
    found = check(index, encoder, short, lambda mode, query, k: [], cuts=[])
    assert found["passages"]
    for name in ("each_once_in_order", "texts", "vectors", "found_by_marker", "found_by_text"):
        assert found[name] is False, name
