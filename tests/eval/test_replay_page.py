"""A replay drawn: its figures are the replay's, and nothing in it is a text of the log."""

from __future__ import annotations

import json
import random
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay.breakdown import MAX_HEADS
from eval.run import read_record
from tests.eval.logs.made_logs import START_S, Row, write

MAX_BYTES = 300_000


def draw(folder: Path, rows: list[Row], options: str, *, kind: str = "--log") -> tuple[str, Row]:
    """The page's text, and the results."""
    log = write(folder / "log.jsonl", rows)
    out, html = folder / f"run{len([*folder.iterdir()])}", folder / "page.html"
    files = [kind, str(log), "--out", str(out), "--html", str(html)]
    assert main(["replay", *files, *options.split()]) == 0
    return html.read_text(encoding="utf-8"), dict(read_record(out)["results"])


def words(page: str) -> str:
    """Without its elements."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)).split())


def calls(n: int, *, system: str = "Answer.", label: str = "", sets: int = 5) -> list[Row]:
    """Each with 3 passages of one of some sets, in any order, a minute after the other."""
    rng, rows = random.Random(0), []
    for at in range(n):
        number = rng.randrange(sets)
        names = rng.sample([f"{number}-{i}" for i in range(4)], 3)
        passages = [f"{label.format(i)}secret-{name} " + "w" * 30 for i, name in enumerate(names)]
        said = [system.format(at), "\n\n".join(["Read.", *passages, f"Question {at}?"])]
        messages = [
            {"role": r, "content": c} for r, c in zip(("system", "user"), said, strict=True)
        ]
        rows.append({"timestamp": START_S + 60 * at, "user": f"u{at % 3}", "messages": messages})
    return rows


def costs(results: Row) -> dict[str, tuple[float, bool]]:
    """Of each mistake: the share found, and whether the log has it."""
    told = results["page"]["mistakes"]
    return {one["mistake"]: (one["saved"] / one["total"], one["kind"] != "put_in") for one in told}


def test_figures_are_the_replays(tmp_path: Path) -> None:
    """The page's shares, its parts' sums, and those of the same requests in a trace of ids."""
    rows = calls(120)
    page, results = draw(tmp_path, rows, r"--separator \n\n --capacity-tokens 200")
    ours = next(
        c for c in results["cells"] if c["cell"]["order"] == "tree" and c["cell"]["eviction"]
    )
    stock = next(
        c for c in results["cells"] if c["cell"]["order"] == "retriever" and c["cell"]["eviction"]
    )
    shares = re.findall(r'<b class="\w+">([\d.]+%)', page)
    assert shares == [f"{each['saved']['tokens']['value']:.1%}" for each in (ours, stock)]
    assert ours["saved"]["tokens"]["value"] > stock["saved"]["tokens"]["value"] > 0
    for cell, told in zip((stock, ours), results["page"]["replays"], strict=True):
        for part in ("slots", "heads", "ages"):
            *_, totals, saved = zip(*told[part], strict=True)
            assert sum(saved) / sum(totals) == cell["saved"]["tokens"]["value"]
    trace = []
    for row in rows:
        texts = row["messages"][1]["content"].split("\n\n")[1:-1]
        trace.append({"passages": texts, "lengths": [len(text) // 4 for text in texts]})
    _, same = draw(tmp_path, trace, "--capacity-tokens 200", kind="--trace")
    assert [c["chunk_hit_rate"] for c in same["cells"]] == [
        c["chunk_hit_rate"] for c in results["cells"]
    ]
    assert [c["token_hit_rate"] for c in same["cells"]] == [
        c["token_hit_rate"] for c in results["cells"]
    ]


def test_passages_are_shown_at_the_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong cut is told on the page, and seen at the terminal."""
    rows = calls(120)
    for at, row in enumerate(rows):
        text = row["messages"][1]["content"].removeprefix("Read.")
        row["messages"][1]["content"] = f"secret passage {'abcdef'[at % 6]}{text}"
    page, results = draw(tmp_path, rows, r"--separator \n\n")
    told = capsys.readouterr().out
    assert re.search(r"before the passages +\d+ characters: secret passage a\n", told)
    for text in ("3 passages each", "behind the same system message: a passage is probably in it"):
        assert text in told
        assert text in words(page)
    assert "secret" not in page + json.dumps(results)


def test_age_in_which_stock_finds_more_is_explained(tmp_path: Path) -> None:
    """A seldom chunk that a retriever puts first stands behind the others in our order."""
    often = [{"passages": ["a", "b", f"{at}"]} for at in range(110)]
    rows = [{"passages": ["seldom"]}, *often, {"passages": ["seldom", "a", "b"]}]
    explained = "puts chunks first that are retrieved often"
    page, results = draw(tmp_path, rows, "", kind="--trace")
    stock, ours = ({name: sums for name, *sums in r["ages"]} for r in results["page"]["replays"])
    assert (stock["101 to 1,000 requests"], ours["101 to 1,000 requests"]) == ([1, 1], [1, 0])
    assert explained in words(page)
    assert explained not in words(draw(tmp_path, rows[:-1], "", kind="--trace")[0])


def test_mistakes_that_are_put_in(tmp_path: Path) -> None:
    """One chunk list in 100 requests: found in all but the first, unless the mistake parts them."""
    rows = calls(100, sets=1)
    for at, row in enumerate(rows):
        row["messages"][1]["content"] = f"Read.\n\nsecret-a\n\nsecret-b\n\nQuestion {at // 2}?"
    page, results = draw(tmp_path, rows, r"--separator \n\n")
    assert costs(results) == {
        "text": (0.99, True),
        "second": (0, False),
        "user": (0.97, False),
        "salt": (0, False),
        "rank": (0.99, False),
        "score": (0.5, False),
    }
    assert "A cache_salt for each request 0.0% in place of 99.0%" in words(page)
    assert "a date in the system prompt: the log is of one day" in words(page)


def test_mistakes_of_the_log(tmp_path: Path) -> None:
    """A clock in the system prompt and ranks in the texts hide all reuse; the page says so."""
    rows = calls(150, system="It is 10:{0}.", label="[{0}] ")
    page, results = draw(tmp_path, rows, r"--separator \n\n")
    found = costs(results)
    assert (found["text"], found["times"][1], found["labels"]) == ((0, True), True, (0, True))
    assert 0 < found["times"][0] < found["both"][0]
    assert "Not worth it as the log is." in words(page)
    assert f"ranks or scores in passages: {found['both'][0]:.1%} would be found." in words(page)


def test_tenants_are_no_mistake_unless_each_request_has_one(tmp_path: Path) -> None:
    rows = calls(100, sets=1)
    for at, row in enumerate(rows):
        row["cache_salt"] = str(at % 2)
    page, results = draw(tmp_path, rows, r"--separator \n\n")
    assert "2 tenants kept apart" in page
    assert "Leave out" not in page
    for at, row in enumerate(rows):
        row["cache_salt"] = str(at)
    page, results = draw(tmp_path, rows, r"--separator \n\n")
    assert f"Leave out a cache_salt for each request: {costs(results)['salts'][0]:.1%}" in page


def test_no_text_of_the_log_is_in_the_page(tmp_path: Path) -> None:
    """Names are escaped; texts, users and tenants are not there at all."""
    rows = calls(120, system="<script>alert('secret')</script>")
    for at, row in enumerate(rows):
        row |= {
            "model": f"<script>m{at % 2}",
            "user": f"secret<script>{at % 3}",
            "cache_salt": "secret<i>",
        }
    page, results = draw(tmp_path, [*rows, "{secret"], r"--separator \n\n")  # type: ignore[list-item]
    assert "secret" not in page + json.dumps(results)
    assert "Question" not in page
    assert "<script" not in page
    assert "&lt;script&gt;m0 prompt" in page
    assert "line 121: not JSON" in words(page)
    trace = [{"passages": ["<script>"], "head": head} for head in ("<script>", "<b>" * 50)] * 10
    page, _ = draw(tmp_path, trace, "", kind="--trace")
    assert "<script" not in page
    assert "&lt;script&gt;" not in page, "it may be a text"
    assert "&lt;b&gt;" not in page


def test_page_is_small_whatever_the_log(tmp_path: Path) -> None:
    """It has a bounded number of slots, heads and lines."""
    rows: list[Any] = calls(400)
    for at, row in enumerate(rows):
        row |= {"model": f"{at:<40}<", "user": f"u{at}"}
    page, results = draw(tmp_path, rows + ["{"] * 500, r"--separator \n\n")
    assert len(page.encode()) < MAX_BYTES / 4
    ours = results["page"]["replays"][1]
    assert len(ours["heads"]) == MAX_HEADS + 1
    assert ours["heads"][-1][0] == f"{400 - MAX_HEADS:,} others together"
    assert len(re.findall("<li>", page)) == 21
    for loaded in ("http", "src=", "href=", "url(", "@import", "<script"):
        assert loaded not in page


@pytest.mark.nightly
def test_page_of_100_000_requests(tmp_path: Path) -> None:
    trace = [
        {"passages": [str(at % 999)], "head": f"head {at % 5000}", "timestamp": at}
        for at in range(100_000)
    ]
    page, _ = draw(tmp_path, trace, "", kind="--trace")
    assert len(page.encode()) < MAX_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trace t.jsonl --html p.html --reuse fused", "--html goes without"),
        ("--trace t.jsonl --html p.html --order tree", "--html draws the comparison"),
        ("--trace t.jsonl --separator x", "require --log"),
        ("--log t.jsonl --between a b", "--between requires --separator"),
        ("--log t.jsonl", "no request with passages"),
        ("--log nothing.jsonl", "does not exist"),
        ("--log t.jsonl --tokenizer nothing", "nothing"),
    ],
)
def test_mistakes_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", [{"passages": ["a", "b"]}] * 20)
    assert main(["replay", "--out", "run", *options.split()]) == 2
    assert message in capsys.readouterr().err
