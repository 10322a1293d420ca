"""`python -m eval report` on runs that are made up. Run: pytest tests/eval/test_report.py"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.recorded import read_recorded
from eval.report.chapter import Chapter
from eval.report.tables import figure
from eval.run import read_record
from tests.eval.made_runs import (
    HOSTILE,
    make_failed,
    make_permutation,
    make_ratio,
    make_served,
    summarize,
    write_replay,
    write_run,
    write_served,
)


def write_report(*runs: Path, out: Path) -> str:
    """The page of these runs."""
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return (out / "index.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every tag with its attributes, and the text outside style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


BOTH = {"stock-lpm": 1.5, "ours": 1.0}
EMPTY: dict[str, Any] = {"cells": [], "contrasts": [], "verdict": []}


def chapter_of(run: Path) -> Chapter:
    return Chapter(read_recorded(run))


@pytest.fixture(scope="module")
def served_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of serve at two rates: its folder and the page."""
    folder = tmp_path_factory.mktemp("served")
    samples = make_served(BOTH, cells=[{"rate": r} for r in (1, 2)], requests=14)
    note = {"note": "random weights measure time alone"}
    run = write_served(folder / "run", samples, against="stock-lpm", results=note)
    return run, write_report(run, out=folder / "report")


def test_page_needs_nothing_else(served_page: tuple[Path, str]) -> None:
    """It is mailed around and opened without network."""
    tags = Tags(served_page[1])
    names = ("src", "href", "srcset", "xlink:href")
    links = [attrs[name] or "" for _, attrs in tags.tags for name in names if name in attrs]
    assert links
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in links)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert "url(" not in served_page[1]
    assert "@import" not in served_page[1]
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def test_every_figure_of_the_results_is_on_the_page(served_page: tuple[Path, str]) -> None:
    """What a chart shows can be read off a table."""
    run, page = served_page
    results = read_record(run)["results"]
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", page))
    numbers = {number for cell in cells for number in re.findall(r"[-\d.e]+", cell)}
    for one in results["cells"]:
        for name, found in one["metrics"].items():
            shown = found if name.endswith("_s") else ("mean", "low", "high")
            assert {figure(found[key]) for key in shown} <= numbers
        assert {figure(value) for value in one["throughput"].values()} <= cells
    for one in results["contrasts"]:
        assert {figure(one[key]) for key in ("value", "low", "high", "n")} <= cells


def test_page_tells_what_was_run(served_page: tuple[Path, str]) -> None:
    """Command, model, versions, machine, backend, counts, seeds, state, verdict and notes."""
    run, page = served_page
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    record = read_record(run)
    told = "python -m eval serve --seed 3|0.5.21|torch_native|bfloat16|cores 2|seed 3|complete"
    told += "|48 measured, 8 of warm-up, 0 failed|0123456789ab|Not run: lmcache: needs CUDA"
    for expected in (*told.split("|"), "random weights measure", *record["results"]["verdict"]):
        assert expected in text, expected


def write_kind(kind: str, folder: Path) -> Path:
    """A run of serve, with rates or windows, of replay, or of a mode of quality."""
    if kind == "replay":
        return write_replay(folder)
    if kind == "permutation":
        return write_run(folder, "quality", [], make_permutation())
    if kind in ("ratio", "answers"):
        samples = make_ratio()
        if kind == "answers":
            taken = [each for each in samples if each["cell"].get("ratio", 0.15) == 0.15]
            samples = [{**sample, "cell": {}} for sample in taken]
        return write_run(folder, "quality", samples, summarize(samples, against="random"))
    samples = make_served(BOTH, cells=[{kind: n} for n in (1, 10)], requests=9)
    return write_served(folder, samples, against="stock-lpm")


@pytest.mark.parametrize(
    ("kind", "pictures"),
    [
        ("replay", ["Capacity varied"]),
        ("window", ["Time to first token", "Window varied"]),
        ("rate", ["Time to first token", "Rate varied"]),
        ("ratio", ["Ratio varied: kind linked"]),
        ("answers", []),
        ("permutation", []),
    ],
)
def test_every_kind_has_its_charts_and_tables(
    tmp_path: Path, kind: str, pictures: list[str]
) -> None:
    """A mix of records needs no options."""
    run = write_kind(kind, tmp_path / "run")
    chapter = chapter_of(run)
    assert [picture.title for picture in chapter.pictures] == pictures
    page = write_report(run, out=tmp_path / "out")
    assert page.count("<img") == len(pictures)
    assert chapter.tables
    for table in chapter.tables:
        assert f"<h3>{table.title}</h3>" in page


@pytest.mark.parametrize(("kind", "title"), [("bench", "bench tree"), ("recall", "recall")])
def test_tables_of_a_record_are_shown_as_they_are(tmp_path: Path, kind: str, title: str) -> None:
    rows = [{"nodes": 1000, "p50": 17.25, "of": {"deep": 2}}, {"nodes": 100_000, "p50": 96}]
    tables = [{"title": "Decisions", "rows": rows, "note": "CPU time."}]
    told = {"verdict": ["17 us a decision."], "tables": tables}
    spec = {"bench": "tree"} if kind == "bench" else {}
    chapter = chapter_of(write_run(tmp_path / "run", kind, [], told, spec=spec))
    (table,) = chapter.tables
    shown = {"nodes": ["1000", "100000"], "p50": ["17.2", "96"], "of deep": ["2", ""]}
    assert table.frame.to_dict("list") == shown
    assert table.numbers == shown.keys()
    assert (table.note, chapter.verdict, chapter.kind) == ("CPU time.", told["verdict"], title)


def test_settings_of_zero_are_told(tmp_path: Path) -> None:
    """`seed 0` is a seed; what is off or not given is none."""
    folder = write_served(tmp_path / "run", make_served(BOTH), against="stock-lpm")
    run = read_recorded(folder)
    spec = {"seed": 0, "rate": 0.0, "arms": [], "shared": False, "url": None}
    run = replace(run, record={**run.record, "spec": spec})
    assert Chapter(run).facts["settings"] == "seed 0, rate 0.0"


def test_interruptions_stand_where_a_reader_looks_first(tmp_path: Path) -> None:
    samples, resumed = make_served(BOTH, requests=9), {"date": "2026-01-02T03:00:00", "samples": 31}
    conditions: dict[str, Any] = {"complete": False, "results": {"resumed_at": [resumed]}}
    run = write_served(tmp_path / "run", samples, against="stock-lpm", **conditions)
    page = write_report(run, out=tmp_path / "out")
    assert 'class="kind partial">partial</span>' in page
    assert "The run was interrupted: these are the figures of the samples so far." in page
    assert "went on (2026-01-02T03:00:00)" in page[: page.index("</nav>")]


def test_record_without_samples_has_a_page(tmp_path: Path) -> None:
    """A run that was interrupted at once, or that failed in every request."""
    empty = write_run(tmp_path / "empty", "serve", [], EMPTY)
    failed = write_served(tmp_path / "failed", make_failed("ours"), against="ours")
    page = write_report(empty, failed, out=tmp_path / "out")
    assert "10 requests failed" in page
    assert page.count("<img") == 0


def test_missing_and_infinite_figures_are_empty(tmp_path: Path) -> None:
    """None and NaN come from metrics that could not be computed; they are no zero and no crash."""
    samples = make_served({"ours": 1.0}, requests=4)
    samples[2]["metrics"] = {"ttft_s": math.nan, "hit_share": None}
    nan = {"mean": math.nan, "p50": math.nan, "p90": None, "p99": None, "low": None, "high": None}
    one = {"arm": "ours", "cell": {}, "n": 1, "errors": 0}
    one |= {"metrics": {"ttft_s": {**nan, "p50": 0.25}, "em": nan}}
    run = write_run(tmp_path / "run", "serve", samples, EMPTY | {"cells": [one]})
    frame = chapter_of(run).tables[0].frame
    assert frame.to_dict("records") == [
        {"arm": "ours", "n": "1", "time to first token (s)": "0.25", "exact match": ""}
    ]
    assert ">nan<" not in write_report(run, out=tmp_path / "out")


def test_contents_have_one_entry_a_record_with_its_verdict_first(tmp_path: Path) -> None:
    """Forty must fit: two sentences each, a replay's verdict before its figures."""
    said = [*(f"Sentence {n}." for n in range(11)), "Verdict: worth it."]
    results = EMPTY | {"verdict": said}
    runs = [write_run(tmp_path / kind, kind, [], results) for kind in ("bench", "replay", "serve")]
    page = write_report(*runs, out=tmp_path / "out")
    top, rest = page[: page.index("</nav>")], page[page.index("</nav>") :]
    assert re.findall(r'<a href="#record-\d">(\w+)</a>', top) == ["replay", "serve", "bench"]
    assert re.findall("<li>([SV][^<]*)</li>", top) == ["Verdict: worth it.", "Sentence 0."] * 3
    assert all(rest.count(f"<li>{text}</li>") == 3 for text in said)


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    """Arm names, notes and folders come from users and models."""
    samples = make_served({HOSTILE: 1.0, "$\\frac{": 2.0}, requests=10)
    folder, note = tmp_path / "<img src=x> & 漢字", {"note": HOSTILE}
    run = write_served(folder, samples, against=HOSTILE, results=note)
    tags = Tags(write_report(run, out=tmp_path / "out"))
    assert "script" not in {tag for tag, _ in tags.tags}
    assert all((attrs["src"] or "").startswith("data:") for tag, attrs in tags.tags if tag == "img")
    assert HOSTILE in "".join(tags.text)


def test_results_without_a_table_of_their_own_are_shown(tmp_path: Path) -> None:
    """The storage simulation has neither cells nor a chart, but figures."""
    rate = {"value": 0.758, "low": 0.7, "high": 0.8}
    figures = {"backtracking": {"storage_reduction": 0.665, "hit_rate": rate}}
    storage = {
        "paper": {"storage_reduction": 0.71},
        "runs": [{"key": "seed=0", "figures": figures}],
    }
    results = EMPTY | {"storage": storage, "num_warm_up": 3}
    tables = chapter_of(write_run(tmp_path / "run", "replay", [], results)).tables
    runs, further = (table.frame.to_dict("records") for table in tables)
    assert [table.title for table in tables] == ["Storage runs", "Further results"]
    assert [*runs[0].values()] == ["seed=0", "0.665", "0.758 [0.7, 0.8]"]
    assert further == [
        {"result": "storage paper storage reduction", "value": "0.71"},
        {"result": "num warm up", "value": "3"},
    ]


def test_verdict_begins_with_our_arm(tmp_path: Path) -> None:
    """Of forty sentences the first are read."""
    arms = {"stock-lpm": 3.0, "no-cache": 4.0, "zeta": 9.0, "ours": 1.0}
    run = write_served(tmp_path / "run", make_served(arms, requests=30), against="stock-lpm")
    said = chapter_of(run).verdict
    assert said[0].startswith("ours reaches the first token")
    assert sorted(said) == sorted(read_record(run)["results"]["verdict"])


def test_folders_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Two `out` folders of different places each have their own chapter and charts."""
    samples = make_served(BOTH, requests=9)
    runs = [write_served(tmp_path / place / "run", samples, against="ours") for place in "ab"]
    page = write_report(*runs, out=tmp_path / "out")
    assert len(set(re.findall('<a href="(#[^"]*)"', page))) == 2
    ids = [attrs["id"] for _, attrs in Tags(page).tags if "id" in attrs]
    assert page.count("<img") == 2
    assert len(set(ids)) == len(ids)


def test_foreign_folder_is_not_written_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out pointed at one's home must not fill it; an older report may be replaced."""
    run = write_run(tmp_path / "run", "serve", [], EMPTY)
    assert main(["report", str(run), "--out", str(run)]) == 2
    assert "is not the folder of a report" in capsys.readouterr().err
    for _ in range(2):
        write_report(run, out=tmp_path / "out")


def test_conditions_that_changed_are_caveats(tmp_path: Path) -> None:
    """They explain a difference as well as reuse does."""
    samples = make_served(BOTH)
    ours = {"model": "a-1b", "dtype": "bfloat16", "device": "cpu", "flushed": False}
    stock = {**ours, "model": "b-8b", "device": "cuda", "flushed": True}
    results = {"servers": {"ours": ours, "stock-lpm": stock}}
    git = {"sha": "0" * 40, "dirty": False, "resumed_with": ["f" * 40]}
    conditions: dict[str, Any] = {"results": results, "git": git, "spec": {"load": "poisson"}}
    run = write_served(tmp_path / "run", samples, against="stock-lpm", **conditions)
    caveats = chapter_of(run).caveats
    for expected in (
        "with other code: ffffffffffff.",
        "not emptied before each cell: ours.",
        "differ in model: ours a-1b, stock-lpm b-8b.",
        "Load poisson: every block begins with an idle server",
    ):
        assert any(expected in text for text in caveats), expected
    plain = write_served(tmp_path / "plain", samples, against="stock-lpm", spec={"load": "closed"})
    assert chapter_of(plain).caveats == ["Not run: lmcache: needs CUDA"]


def test_few_blocks_and_failures_are_no_verdict(tmp_path: Path) -> None:
    """Neither has shown that the arms are alike, and older records hold no sentence on it."""
    few = make_served({"stock-lpm": 9.0, "ours": 1.0}, requests=20)
    failed = make_served({"stock-lpm": 9.0, "ours": 1.0})
    for sample in failed:
        if sample["arm"] == "ours" and sample["request"] >= "made:3":
            sample |= {"metrics": {}, "error": "timeout"}
    for samples, said, shown in (
        (few, "too few blocks of requests: 5", "too few"),
        (failed, "ours failed", "failures"),
    ):
        results = {**summarize(samples, against="stock-lpm"), "verdict": []}
        chapter = chapter_of(write_run(tmp_path / shown, "serve", samples, results))
        assert said in chapter.verdict[0]
        assert "No difference" not in " ".join(chapter.verdict)
        frame = next(table.frame for table in chapter.tables if "beyond chance" in table.frame)
        assert set(frame["beyond chance"]) == {shown}
