"""The charts: what a reader needs is on them. No display, no file."""

from __future__ import annotations

import warnings
from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.figure import Figure

from eval.recorded import read_recorded
from eval.report import charts
from eval.report.chapter import Chapter
from eval.report.charts import embedded, lines_of
from tests.eval.made_runs import (
    HOSTILE,
    make_ratio,
    make_served,
    summarize,
    write_replay,
    write_run,
)

LINES = lines_of(["ours", "stock-lpm", "retriever", "tree"])
ARMS = {"stock-lpm": 1.5, "ours": 1.0}
SERVED = make_served(ARMS, cells=[{"rate": r} for r in (1, 2)], requests=12)
WINDOWS = make_served(ARMS, cells=[{"window": w} for w in (10, 100, 1000)], requests=10)


def draw(make: Callable[[], Figure]) -> Figure:
    """The figure; it is also written, so that whatever fails at that point fails here."""
    figure = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Glyph")
        kind, content = embedded(make).split(",")
        assert kind == "data:image/svg+xml;base64"
        ElementTree.fromstring(b64decode(content))
    return figure


def curve(cells: Sequence[Any], setting: str, metric: str) -> Any:
    """The only panel."""
    return draw(lambda: charts.curves(cells, LINES, setting=setting, metrics=[metric])).axes[0]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_cdf_has_a_line_an_arm_and_a_panel_a_cell() -> None:
    figure = draw(lambda: charts.ttft_cdf(SERVED, LINES))
    assert [ax.get_title() for ax in figure.axes] == ["rate 1", "rate 2"]
    assert legend(figure) == ["ours", "stock-lpm"]
    for ax in figure.axes:
        assert [len(line.get_xdata()) for line in ax.lines] == [13, 13]  # type: ignore[arg-type]
        assert {line.get_ydata()[-1] for line in ax.lines} == {1.0}  # type: ignore[index]


def test_curves_draw_the_median_of_times_in_the_order_of_x() -> None:
    cells = list(reversed(summarize(WINDOWS, against="stock-lpm")["cells"]))
    ax = curve(cells, "window", "ttft_s")
    ours = {one["cell"]["window"]: one["metrics"] for one in cells if one["arm"] == "ours"}
    assert [text.get_text() for text in ax.get_xticklabels()] == ["10", "100", "1000"]
    expected = [ours[x]["ttft_s"]["p50"] for x in (10, 100, 1000)]
    assert list(ax.lines[0].get_ydata()) == expected
    assert len(ax.collections) == 2


def test_an_arm_without_the_setting_is_a_level_line(tmp_path: Path) -> None:
    """Full prefill has no ratio: it is what the curves are to reach."""
    results = summarize(make_ratio(), against="random")
    chapter = Chapter(read_recorded(write_run(tmp_path / "run", "quality", make_ratio(), results)))
    figure = draw(chapter.pictures[0].draw)
    full = next(one for one in results["cells"] if one["arm"] == "full-prefill")
    flat = next(line for line in figure.axes[-1].lines if len({*np.asarray(line.get_ydata())}) == 1)
    assert list(flat.get_ydata()) == [full["metrics"]["f1"]["mean"]] * 4  # type: ignore[arg-type]
    assert "full-prefill" in legend(figure)


def test_a_replays_sizes_are_in_order_and_no_limit_is_the_last(tmp_path: Path) -> None:
    cells = read_recorded(write_replay(tmp_path / "replay")).cells
    ax = curve(cells, "capacity", "saved_share")
    heights = sorted(y for line in ax.lines for y in np.asarray(line.get_ydata()).tolist())
    assert heights == sorted(one["saved"]["chunks"]["value"] for one in cells)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["50", "1000", "no limit"]


def test_any_name_can_be_drawn() -> None:
    names = [HOSTILE, "_hidden", "$\\frac{", "line\nbreak", *(f"arm {i}" for i in range(16))]
    samples = make_served(dict.fromkeys(names, 1.0), requests=3)
    lines = lines_of(names)
    figure = draw(lambda: charts.ttft_cdf(samples, lines))
    assert len(legend(figure)) == 20
    assert "_hidden" in legend(figure)
    assert all(len(text) <= 44 for text in legend(figure))
    assert len({(line["color"], line["linestyle"]) for line in lines.values()}) == 20


def test_many_panels_are_cut_with_a_word() -> None:
    samples = make_served({"ours": 1.0}, cells=[{"rate": r} for r in range(14)], requests=2)
    figure = draw(lambda: charts.ttft_cdf(samples, LINES))
    assert len(figure.axes) == charts.MAX_PANELS
    assert "first 12 of 14" in str(figure.get_supxlabel())
