"""The charts of a record: samples or cells in, a figure out; `embedded` makes it an image of the
page.

Colours are Okabe and Ito's, which people with any colour vision can distinguish; arms also differ
in dashes and markers.
"""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from eval.metrics import METRICS, label
from eval.recorded import cell_name, grouped, middle, setting_name

Rows = Sequence[Mapping[str, Any]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#b8a800")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KNOWN_ARMS = (
    "ours",
    "stock-lpm",
    "no-cache",
    "craft",
    "fused",
    "stock-fcfs",
    "cacheblend",
    "contextpilot",
)
"""They have the same colour on every page."""
UNITS = {
    "rate": "request rate (1/s)",
    "window": "window (requests)",
    "threshold": "promotion threshold (requests)",
    "ratio": "share of moved tokens recomputed",
    "k": "chunks a request",
    "clients": "requests in flight",
    "capacity": "capacity of the cache (chunks)",
    "capacity_tokens": "capacity of the cache (tokens)",
}
MAX_PANELS = 12
WIDTH = 7.2  # Inches: 10 points are then as large as the page's text.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,  # An arm may be called "$x$".
    "svg.fonttype": "none",
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "grid.color": "#d5d9de",
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Lines = Mapping[str, Mapping[str, Any]]
"""Arm -> its line, in the order of legends."""


def lines_of(arms: Iterable[str]) -> Lines:
    """The line of each arm of a record, the same in all of its charts."""
    names = list(dict.fromkeys(arms))
    known = {name: place for place, name in enumerate(KNOWN_ARMS) if name in names}
    free = (place for place in range(len(names) + len(KNOWN_ARMS)) if place not in known.values())
    places = known | {name: next(free) for name in names if name not in known}
    return {name: _line(*divmod(place, len(COLOURS))) for name, place in places.items()}


def embedded(make: Callable[[], Figure]) -> str:
    """The figure as an address that holds all of it, for an image of the page."""
    # An image of its own, since matplotlib's SVGs share ids, such as figure_1, within a page.
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        make().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + b64encode(buffer.getvalue()).decode()


def ttft_cdf(samples: Rows, lines: Lines) -> Figure:
    """Share of requests answered within a time: a panel per cell, a line per arm.
    samples: with times, no warm-up."""
    cells = grouped(samples, lambda sample: sample["cell"])
    figure, panels = _panels(len(cells))
    times = [sample["metrics"]["ttft_s"] for sample in samples]
    # There are at most MAX_PANELS panels: further cells are in the tables only.
    for ax, (cell, rows) in zip(panels, cells, strict=False):
        for arm, line in lines.items():
            if values := [sample["metrics"]["ttft_s"] for sample in rows if sample["arm"] == arm]:
                ax.ecdf(values, **line, markevery=max(1, len(values) // 20))
        ax.set(
            title=_short(cell_name(cell), 48),
            xlabel=_axis("ttft_s"),
            ylabel="share of requests",
            ylim=(0, 1.03),
        )
        if min(times) > 0 and max(times) / min(times) > 30:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=8))
            # matplotlib's own has markup, which is switched off
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_xlim(left=0)
    return _with_legend(figure, samples, lines)


def curves(cells: Rows, lines: Lines, *, setting: str, metrics: Sequence[str]) -> Figure:
    """A varied setting along x, its values at equal distances;
    a panel per metric, a line per arm with its intervals."""
    figure, panels = _panels(len(metrics))
    values = sorted(
        dict.fromkeys(one["cell"][setting] for one in cells),
        key=lambda value: _place(setting, value),
    )
    for ax, metric in zip(panels, metrics, strict=False):
        for arm, line in lines.items():
            mine = [(values.index(one["cell"][setting]), one) for one in cells if one["arm"] == arm]
            points = sorted(
                (x, *found)
                for x, one in mine
                if (found := middle(metric, one["metrics"].get(metric)))
            )
            if points:
                xs, ys, lows, highs = zip(*points, strict=True)
                ax.plot(xs, ys, **line)
                ax.vlines(xs, lows, highs, colors=line["color"], linewidth=1.2)
        ax.set_xticks(
            range(len(values)), [_short(setting_name(setting, value), 16) for value in values]
        )
        ax.set(xlabel=UNITS.get(setting, setting.replace("_", " ")), ylabel=_axis(metric))
        if metric not in METRICS or METRICS[metric].unit:
            ax.set_ylim(bottom=0)
    return _with_legend(figure, cells, lines)


# Private, in order of use


def _line(row: int, column: int) -> dict[str, Any]:
    # Shifted by the row, so that arms of one colour differ in their markers, too.
    marker = MARKERS[(column + row) % len(MARKERS)]
    look = {"color": COLOURS[column], "linestyle": DASHES[row % len(DASHES)], "marker": marker}
    return look | {"linewidth": 1.8, "markersize": 4.5}


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    shown, columns = min(count, MAX_PANELS), min(count, 2)
    rows = math.ceil(shown / columns)
    # Not pyplot's, which keeps every figure until it is closed.
    figure = Figure(figsize=(WIDTH, 2.9 * rows + 0.3), layout="constrained")
    if count > shown:
        figure.supxlabel(
            f"the first {shown} of {count} panels; all figures are in the table", fontsize=9
        )
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(shown)]


def _place(setting: str, value: Any) -> float:
    """Numbers in their order, no limit last; texts stay as they are."""
    if setting.startswith("capacity") and not value:
        return math.inf
    return value if isinstance(value, int | float) else 0.0


def _short(text: str, limit: int) -> str:
    # An arm's name may hold line breaks, which would add lines to legend and titles.
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _axis(metric: str) -> str:
    return fill(
        f"{label(metric)} ({METRICS[metric].unit or '0 to 1'})" if metric in METRICS else metric, 24
    )


def _with_legend(figure: Figure, rows: Rows, lines: Lines) -> Figure:
    arms = [arm for arm in lines if arm in {row["arm"] for row in rows}]
    names = [_short(arm, 44) for arm in arms]
    columns = max(1, min(len(names), 88 // (max(map(len, names)) + 8)))
    # The legend's rows are added: the constrained layout would take them from the panels.
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    figure.legend(
        [Line2D([], [], **lines[arm]) for arm in arms],
        names,
        loc="outside upper left",
        ncols=columns,
    )
    return figure
