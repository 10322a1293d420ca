"""The charts: what a reader needs is on them. No display, no file. Run: pytest tests/eval/test_charts.py"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from eval.recorded import read_recorded
from eval.report import charts
from eval.report.charts import Arms, svg
from tests.eval.made_runs import HOSTILE, make_ratio, make_served, summarize, write_replay

ARMS = Arms(["ours", "stock-lpm", "random", "query", "first", "full-prefill", "retriever", "tree"])
SERVED = make_served({"stock-lpm": 1.5, "ours": 1.0}, cells=[{"rate": r} for r in (1, 2)], requests=12)
WINDOWS = make_served({"stock-lpm": 1.5, "ours": 1.0}, cells=[{"window": w} for w in (10, 100, 1000)], requests=10)


def draw(make: Callable[[Arms], Figure], arms: Arms = ARMS) -> Figure:
    """The figure; it is also written, so that whatever fails at that point fails here."""
    figures: list[Figure] = []

    def kept() -> Figure:
        figures.append(make(arms))
        return figures[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Glyph")
        ElementTree.fromstring(svg(kept, salt=""))
    return figures[0]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def all_charts(tmp_path: Path) -> dict[str, Callable[[Arms], Figure]]:
    """Every chart on made-up samples."""
    cells = summarize(SERVED, against="stock-lpm")["cells"]
    windows = summarize(WINDOWS, against="stock-lpm")["cells"]
    hits = read_recorded(write_replay(tmp_path / "replay")).cells
    return {
        "cdf": lambda arms: charts.ttft_cdf(SERVED, arms),
        "hits": lambda arms: charts.curves(hits, arms, setting="capacity", metrics=["saved_share"]),
        "curves": lambda arms: charts.curves(windows, arms, setting="window", metrics=["ttft_s", "hit_share"]),
        "scores": lambda arms: charts.scores(cells, arms, metrics=["hit_share", "ttft_s"]),
    }


@pytest.mark.parametrize("name", ["cdf", "hits", "curves", "scores"])
def test_every_axis_says_what_it_shows(tmp_path: Path, name: str) -> None:
    """A chart without labels and units is a picture."""
    figure = draw(all_charts(tmp_path)[name])
    assert figure.axes
    for ax in figure.axes:
        assert ax.get_xlabel()
        assert ax.get_ylabel() or name == "scores"  # there the arms' names are on the axis
        assert "(" in ax.get_xlabel() + ax.get_ylabel(), "no unit"


def test_colours_are_the_pages() -> None:
    """A chart on dark paper has light ink: every colour is a variable of the page, and ids of two charts differ."""
    texts = [svg(lambda: charts.ttft_cdf(SERVED, ARMS), salt=salt) for salt in "ab"]
    assert not re.findall(r"(?<!, )#[0-9a-f]{6}", texts[0])
    assert {"var(--ink, #1b1f24)", "var(--c0, #0072b2)", "var(--c1, #d55e00)"} <= set(
        re.findall(r"var[^)]*\)", texts[0])
    )
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in texts]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_cdf_has_a_line_an_arm_and_a_panel_a_cell() -> None:
    """Each line ends at 1 and is as long as its samples."""
    figure = draw(lambda arms: charts.ttft_cdf(SERVED, arms))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["rate 1", "rate 2"]
    assert legend(figure) == ["ours", "stock-lpm"]
    for ax in figure.axes:
        assert [len(line.get_xdata()) for line in ax.lines] == [12, 12]  # type: ignore[arg-type]
        assert {line.get_ydata()[-1] for line in ax.lines} == {1.0}  # type: ignore[index]


def test_an_arm_has_one_colour_in_all_charts() -> None:
    """Else a reader carries the wrong line over."""
    cells = summarize(WINDOWS, against="stock-lpm")["cells"]
    curve = draw(lambda arms: charts.curves(cells, arms, setting="window", metrics=["ttft_s"]))
    steps = draw(lambda arms: charts.ttft_cdf(SERVED, arms))
    assert curve.axes[0].lines[0].get_color() == steps.axes[0].lines[0].get_color() == charts.LIGHT[0]


def test_curves_draw_the_median_of_times_in_the_order_of_x() -> None:
    """Values are those of the cells, and a band is around them."""
    cells = list(reversed(summarize(WINDOWS, against="stock-lpm")["cells"]))
    figure = draw(lambda arms: charts.curves(cells, arms, setting="window", metrics=["ttft_s"]))
    ours = figure.axes[0].lines[0]
    expected = {one["cell"]["window"]: one["metrics"]["ttft_s"]["p50"] for one in cells if one["arm"] == "ours"}
    assert list(ours.get_xdata()) == [10, 100, 1000]  # type: ignore[arg-type]
    assert list(ours.get_ydata()) == [expected[x] for x in (10, 100, 1000)]  # type: ignore[arg-type]
    assert len(figure.axes[0].collections) == 2


def test_a_level_arm_is_a_level_line() -> None:
    """Full prefill has no ratio: it is what the curves are to reach."""
    cells = summarize(make_ratio(), against="random")["cells"]
    level = [one for one in cells if one["arm"] == "full-prefill"]
    moving = [one for one in cells if one["arm"] != "full-prefill"]
    figure = draw(lambda arms: charts.curves(moving, arms, setting="ratio", metrics=["f1"], level=level))
    flat = figure.axes[0].lines[-1]
    assert set(flat.get_ydata()) == {level[0]["metrics"]["f1"]["mean"]}  # type: ignore[arg-type]
    assert "full-prefill" in legend(figure)


def test_a_replays_sizes_are_in_order_and_no_limit_is_the_last(tmp_path: Path) -> None:
    """Heights are the record's shares."""
    cells = read_recorded(write_replay(tmp_path / "replay")).cells
    ax = draw(lambda arms: charts.curves(cells, arms, setting="capacity", metrics=["saved_share"])).axes[0]
    heights = sorted(y for line in ax.lines for y in np.asarray(line.get_ydata()).tolist())
    assert heights == sorted(one["saved"]["chunks"]["value"] for one in cells)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["50", "1000", "no limit"]


def test_scores_leave_out_arms_that_were_not_scored() -> None:
    """Full prefill does not agree with itself: an empty line would look like a zero."""
    cells = [
        {"arm": arm, "cell": {}, "metrics": {"same": {"mean": value, "low": 0.1, "high": 0.9}}}
        for arm, value in (("ours", 0.5), ("full-prefill", None))
    ]
    ax = draw(lambda arms: charts.scores(cells, arms, metrics=["same"])).axes[0]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["ours"]


def test_one_request_and_equal_times_still_show() -> None:
    """A single point has no line to be seen: it needs a marker."""
    one = SERVED[:1]
    line = draw(lambda arms: charts.ttft_cdf(one, arms)).axes[0].lines[0]
    assert line.get_marker() not in (None, "None", "")
    cells = summarize(WINDOWS[2 * 2 : 2 * 3], against="ours")["cells"]
    draw(lambda arms: charts.curves(cells, arms, setting="window", metrics=["ttft_s", "hit_share"]))


def test_any_name_can_be_drawn() -> None:
    """Markup, dollar signs, leading underscores and other scripts are text, and twenty arms have twenty entries."""
    names = [HOSTILE, "_hidden", "$\\frac{", "line\nbreak", *(f"arm {i}" for i in range(16))]
    samples = make_served(dict.fromkeys(names, 1.0), requests=3)
    arms = Arms(names)
    figure = draw(lambda arms: charts.ttft_cdf(samples, arms), arms)
    assert len(legend(figure)) == 20
    assert "_hidden" in legend(figure)
    assert all(len(text) <= 44 for text in legend(figure))
    assert len({(arms.colour(name), arms.line(name)["linestyle"]) for name in names}) == 20


def test_known_arms_have_their_colours_everywhere() -> None:
    """Ours is blue in every chapter; others get the colours that are left."""
    assert Arms(["b", "stock-lpm", "ours"]).places == {"ours": 0, "stock-lpm": 1, "b": 2}
    assert Arms(["b", "craft"]).places == {"craft": 3, "b": 0}


def test_many_panels_are_cut_with_a_word() -> None:
    """No reader should think that twelve panels are all."""
    samples = make_served({"ours": 1.0}, cells=[{"rate": r} for r in range(14)], requests=2)
    figure = draw(lambda arms: charts.ttft_cdf(samples, arms))
    assert len(figure.axes) == charts.MAX_PANELS
    assert "first 12 of 14" in str(figure.get_supxlabel())
