"""`python -m eval report` on runs that are made up. Run: pytest tests/eval/test_report.py"""

from __future__ import annotations

import base64
import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.recorded import read_recorded
from eval.report import command as report
from eval.report.chapter import colours, create_chapter
from eval.report.tables import figure
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

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "DPI", 30)


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


@pytest.fixture(scope="module")
def served_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """A run of serve at two rates: its folder, the page and the report's folder."""
    folder = tmp_path_factory.mktemp("served")
    samples = make_served({"stock-lpm": 1.5, "ours": 1.0}, cells=[{"rate": r} for r in (1, 2)], requests=14)
    run = write_served(
        folder / "run", samples, against="stock-lpm", results={"note": "random weights measure time alone"}
    )
    before, report.DPI = report.DPI, 30
    page = write_report(run, out=folder / "report")
    report.DPI = before
    return run, page, folder / "report"


def test_page_needs_nothing_else(served_page: tuple[Path, str, Path]) -> None:
    """It is mailed around and opened without network: no script, no address in any src, href, srcset or style."""
    tags = Tags(served_page[1])
    links = [
        value or "" for _, attrs in tags.tags for name, value in attrs.items() if name in ("src", "href", "srcset")
    ]
    assert links
    assert all(link.startswith(("#record-", "data:image/png;base64,")) for link in links)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert "url(" not in served_page[1]
    assert "@import" not in served_page[1]


def test_pictures_are_png_inside_and_beside_and_told_in_words(served_page: tuple[Path, str, Path]) -> None:
    """Each chart is on the page for light and dark, and a file; its alternative text has its sentence."""
    _, page, out = served_page
    images = [attrs for tag, attrs in Tags(page).tags if tag == "img"]
    assert {path.name for path in out.glob("*.png")} == {
        "run-ttft.png",
        "run-rate-1.png",
        "run-throughput.png",
        "run-fates.png",
    }
    assert len(images) == 4
    for attrs in images:
        assert base64.b64decode((attrs["src"] or "").partition(",")[2]).startswith(PNG)
        assert len(attrs["alt"] or "") > 60
    assert page.count("(prefers-color-scheme: dark)") == 4 + 1
    assert all(path.read_bytes().startswith(PNG) for path in out.glob("*.png"))


def test_every_figure_of_the_results_is_on_the_page_and_in_the_summary(served_page: tuple[Path, str, Path]) -> None:
    """What a picture shows can be read off a table."""
    run, page, out = served_page
    results = json.loads((run / "record.json").read_text())["results"]
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", page))
    summary = (out / "summary.md").read_text()
    for one in results["cells"]:
        for found in one["metrics"].values():
            for value in found.values():
                assert figure(value) in cells
                assert figure(value) in summary
        assert {figure(value) for value in one["throughput"].values()} <= cells
    for one in results["contrasts"]:
        assert {figure(one[key]) for key in ("value", "low", "high", "n")} <= cells


def test_page_tells_what_was_run(served_page: tuple[Path, str, Path]) -> None:
    """Command, model, versions, machine, backend, counts, seeds, state, verdict and notes."""
    run, page, out = served_page
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    record = json.loads((run / "record.json").read_text())
    for expected in (
        *("python -m eval serve --seed 3", "0.5.21", "torch_native", "bfloat16", "cores 2", "seed 3", "complete"),
        *(
            "48 measured, 8 of warm-up, 0 failed",
            "0123456789ab",
            "Not run: lmcache: needs CUDA",
            "random weights measure",
        ),
        *record["results"]["verdict"][:3],
    ):
        assert expected in text, expected
    assert json.loads((out / "records" / "run" / "record.json").read_text()) == record


@pytest.mark.parametrize("kind", ["replay", "sensitivity", "ratio", "permutation", "answers"])
def test_every_kind_has_its_picture_and_table(tmp_path: Path, kind: str) -> None:
    """A mix of records needs no options."""
    if kind == "replay":
        run, expected = write_replay(tmp_path / "run"), "run-chunks.png"
    elif kind == "sensitivity":
        samples = make_served({"stock-lpm": 1.5, "ours": 1.0}, cells=[{"window": w} for w in (10, 100)], requests=9)
        samples = [{**sample, "fates": None} for sample in samples]
        run = write_run(tmp_path / "run", "sensitivity", samples, summarize(samples, against="stock-lpm"))
        expected = "run-window-1.png"
    elif kind == "permutation":
        run, expected = write_run(tmp_path / "run", "quality", [], make_permutation()), "run-permutation-f1.png"
    else:
        samples = make_ratio()
        if kind == "answers":
            samples = [{**sample, "cell": {}} for sample in samples if sample["cell"].get("ratio", 0.15) == 0.15]
        run = write_run(tmp_path / "run", "quality", samples, summarize(samples, against="random"))
        expected = "run-ratio-1.png" if kind == "ratio" else "run-scores.png"
    page = write_report(run, out=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.png")] == [expected]
    assert "<table>" in page
    assert "There is nothing to draw" not in page


def test_partial_empty_and_failed_runs_say_so(tmp_path: Path) -> None:
    """No reader should take half a run for a whole one, or an empty page for a good one."""
    nothing: dict[str, list[str]] = {"cells": [], "contrasts": [], "verdict": []}
    partial = write_run(tmp_path / "partial", "serve", [], nothing, complete=False)
    failed = write_served(tmp_path / "failed", make_failed("ours"), against="ours")
    page = write_report(partial, failed, out=tmp_path / "out")
    assert "partial: the run was interrupted" in page
    assert page.count("There is nothing to draw") == 2
    assert page.count("Nothing was compared.") == 2
    assert "10 requests failed" in page
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "**partial: the run was interrupted**" in summary
    assert "- Nothing was compared." in summary


def test_missing_and_infinite_figures_are_none(tmp_path: Path) -> None:
    """None and NaN come from metrics that could not be computed; they are no zero and no crash."""
    samples = make_served({"ours": 1.0}, requests=4)
    samples[2]["metrics"] = {"ttft_s": math.nan, "hit_share": None}
    nan = {"mean": math.nan, "p50": math.nan, "p90": None, "p99": None, "low": None, "high": None}
    one = {"arm": "ours", "cell": {}, "n": 1, "errors": 0, "metrics": {"ttft_s": {**nan, "p50": 0.25}, "em": nan}}
    run = write_run(tmp_path / "run", "serve", samples, {"cells": [one], "contrasts": [], "verdict": []})
    chapter = create_chapter(read_recorded(run), "run")
    assert chapter.pictures[0].table.rows == [["all", "ours", "1", "0", "0.25", *["none"] * 5]]
    assert "nan" not in " ".join(picture.reading for picture in chapter.pictures)


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    """Arm names, notes and folders come from users and models."""
    samples = make_served({HOSTILE: 1.0, "$\\frac{": 2.0}, requests=10)
    run = write_served(tmp_path / "<img src=x> & 漢字", samples, against=HOSTILE, results={"note": HOSTILE})
    out = tmp_path / "out"
    page = write_report(run, out=out)
    tags = Tags(page)
    assert "script" not in {tag for tag, _ in tags.tags}
    assert [attrs for tag, attrs in tags.tags if tag == "img" and attrs.get("src") == "x"] == []
    assert HOSTILE in "".join(tags.text)
    assert "<script" not in (out / "summary.md").read_text().replace("\\<", "")
    assert {path.name for path in (out / "records").iterdir()} == {"img-src-x"}


def test_servers_facts_that_are_objects_stay_in_the_record(tmp_path: Path) -> None:
    """A gate's thirty numbers would push everything else off the page."""
    samples = make_served({"ours": 1.0, "stock-lpm": 1.0}, requests=3)
    facts = {"ours": {"device": "cpu", "gate": {"ulps": 1}}, "stock-lpm": {"device": "cpu", "gate": None}}
    run = write_served(tmp_path / "run", samples, against="stock-lpm", results={"servers": facts})
    servers = create_chapter(read_recorded(run), "run").servers
    assert servers is not None
    assert (servers.head, servers.rows) == (["server", "ours", "stock-lpm"], [["device", "cpu", "cpu"]])


def test_storage_simulation_stands_beside_the_paper(tmp_path: Path) -> None:
    """It has no cells and no picture, but figures."""
    paper = {"storage_reduction": 0.71, "eliminated": 0.823, "hit_rate": 0.779}
    figures = {"backtracking": {"storage_reduction": 0.665, "eliminated": 0.874, "hit_rate": 0.758}}
    storage = {"paper": paper, "runs": [{"key": "seed=0", "figures": figures}]}
    results = {"cells": [], "contrasts": [], "verdict": [], "storage": storage}
    tables = create_chapter(read_recorded(write_run(tmp_path / "run", "replay", [], results)), "run").tables
    assert [list(row) for row in tables[0].rows] == [
        ["paper", "", "0.71", "0.823", "0.779"],
        ["seed=0", "backtracking", "0.665", "0.874", "0.758"],
    ]


def test_readings_are_computed(tmp_path: Path) -> None:
    """The sentence of a chart names figures of the table below it."""
    samples = make_served({"stock-lpm": 3.0, "ours": 1.0}, requests=20)
    run = read_recorded(write_served(tmp_path / "run", samples, against="stock-lpm"))
    picture = create_chapter(run, "run").pictures[0]
    medians = {row[1]: row[4] for row in picture.table.rows}
    assert picture.reading == (
        f"Half of the requests have their first token within {medians['ours']} s (ours) to {medians['stock-lpm']} s (stock-lpm)."
    )


def test_verdict_begins_with_our_arm(tmp_path: Path) -> None:
    """Of forty sentences the first are read."""
    samples = make_served({"stock-lpm": 3.0, "no-cache": 4.0, "zeta": 9.0, "ours": 1.0}, requests=30)
    run = read_recorded(write_served(tmp_path / "run", samples, against="stock-lpm"))
    assert create_chapter(run, "run").verdict[0].startswith("ours reaches the first token")
    assert sorted(create_chapter(run, "run").verdict) == sorted(run.results["verdict"])


def test_colours_are_shared_by_records_while_they_last(tmp_path: Path) -> None:
    """Ours is blue everywhere; too many arms for one page get colours record by record."""
    few = [
        read_recorded(write_served(tmp_path / n, make_served({n: 1.0, "ours": 1.0}, requests=3), against=n))
        for n in "ab"
    ]
    assert colours(few) == [{"ours": 0, "a": 1, "b": 2}] * 2
    many = make_served({f"arm {i}": 1.0 for i in range(9)}, requests=3)
    runs = [*few, read_recorded(write_served(tmp_path / "many", many, against="arm 0"))]
    assert colours(runs)[1] == {"ours": 0, "b": 1}
    assert sorted(colours(runs)[2].values()) == list(range(9))


def test_folders_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Two `out` folders of different places must not overwrite each other's pictures."""
    nothing: dict[str, list[str]] = {"cells": [], "contrasts": [], "verdict": []}
    runs = [write_run(tmp_path / place / "run", "serve", [], nothing) for place in "ab"]
    page = write_report(*runs, out=tmp_path / "out")
    assert "run (2)" in page
    assert {path.name for path in (tmp_path / "out" / "records").iterdir()} == {"run", "run-2"}


def test_foreign_folder_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--out pointed at one's home must not fill it; an older report may be replaced."""
    run = write_run(tmp_path / "run", "serve", [], {"cells": [], "contrasts": [], "verdict": []})
    assert main(["report", str(run), "--out", str(run)]) == 2
    assert "is not the folder of a report" in capsys.readouterr().err
    for _ in range(2):
        write_report(run, out=tmp_path / "out")


def test_conditions_that_changed_are_caveats(tmp_path: Path) -> None:
    """Another model, full caches, an interruption or idle servers explain a difference as well as reuse does."""
    samples = make_served({"stock-lpm": 1.5, "ours": 1.0})
    ours = {"model": "a-1b", "dtype": "bfloat16", "device": "cpu", "flushed": False}
    results = {
        "resumed_at": [{"date": "2026-01-02T03:00:00", "samples": 31}],
        "servers": {"ours": ours, "stock-lpm": {**ours, "model": "b-8b", "device": "cuda", "flushed": True}},
    }
    git = {"sha": "0" * 40, "dirty": False, "resumed_with": ["f" * 40]}
    spec = {"load": "poisson"}
    run = write_served(tmp_path / "run", samples, against="stock-lpm", results=results, git=git, spec=spec)
    caveats = create_chapter(read_recorded(run), "run").caveats
    for expected in (
        "went on (2026-01-02T03:00:00)",
        "with other code: ffffffffffff.",
        "not emptied before each cell: ours.",
        "differ in model: ours a-1b, stock-lpm b-8b.",
        "Load poisson: every block begins with an idle server",
    ):
        assert any(expected in text for text in caveats), expected
    plain = write_served(tmp_path / "plain", samples, against="stock-lpm", spec={"load": "closed"})
    assert create_chapter(read_recorded(plain), "plain").caveats == ["Not run: lmcache: needs CUDA"]


def test_replays_verdict_stands_whole_at_the_top(tmp_path: Path) -> None:
    """Its last line says that cached chunks are no time; of the many of other kinds the first are shown."""
    said = [f"Sentence {n}." for n in range(11)]
    runs = [
        write_run(tmp_path / kind, kind, [], {"cells": [], "contrasts": [], "verdict": said})
        for kind in ("replay", "serve")
    ]
    page = write_report(*runs, out=tmp_path / "out")
    top = page[page.index('id="verdict"') : page.index("What was run")]
    assert [top.count(f"<li>{text}") for text in said] == [2] * 8 + [1] * 3
    assert top.count("more below") == 1


def test_an_interruption_stands_beside_the_verdict(tmp_path: Path) -> None:
    """A reader of the first box alone must see that the run was interrupted."""
    results = {
        "cells": [],
        "contrasts": [],
        "verdict": ["ours is faster"],
        "resumed_at": [{"date": "2026-01-02T03:00:00", "samples": 31}],
    }
    page = write_report(write_run(tmp_path / "run", "serve", [], results), out=tmp_path / "out")
    top = page[page.index('id="verdict"') : page.index("What was run")]
    assert "went on (2026-01-02T03:00:00)" in top
    assert "went on (2026-01-02T03:00:00)" in (tmp_path / "out" / "summary.md").read_text().split("- command")[0]


@pytest.mark.parametrize(
    ("named", "applied"),
    [
        ({"arms": ["ours=http://a:1,rag", "b=http://a:2"]}, False),
        ({"arms": ["ours", "b=http://a:2"]}, True),
        ({"arm": "ours=http://a:1"}, False),
        ({"arms": ["b=http://a:2"], "reference": None}, True),
        ({"arms": ["b=http://a:2"], "reference": "http://a:3"}, False),
        ({"policies": ["off", "shown"]}, True),
    ],
)
def test_settings_of_servers_that_nobody_started_are_left_out(
    tmp_path: Path, named: dict[str, object], applied: bool
) -> None:
    """`model_path random` on a page of someone's own server would be read as that server's model."""
    spec = {**named, "model_path": "random", "params": 10, "threads": 2, "seed": 3}
    run = write_run(tmp_path / "run", "serve", [], {"cells": [], "contrasts": [], "verdict": []}, spec=spec)
    settings = dict(create_chapter(read_recorded(run), "run").facts)["settings"]
    assert [text in settings for text in ("model_path random", "params 10", "threads 2")] == [applied] * 3
    assert "seed 3" in settings


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
        run = read_recorded(write_run(tmp_path / shown, "serve", samples, results))
        chapter = create_chapter(run, "run")
        assert said in chapter.verdict[0]
        assert "No difference" not in " ".join(chapter.verdict)
        assert {row[5] for row in chapter.tables[0].rows} == {shown}
