"""One function per chart: samples or cells in, a figure out; `svg` makes it part of a page. No files, no screen, no global state.

    arms = Arms(["ours", "stock-lpm"])                an arm has the same colour in all charts of a record
    text = svg(lambda: ttft_cdf(samples, arms))       follows the page's light or dark colours

Colours are Okabe and Ito's, which people with any colour vision can distinguish; lines also differ in dashes and markers.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from eval.metrics import METRICS, is_time
from eval.recorded import cell_name, setting_name

Rows = Sequence[Mapping[str, Any]]
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#b8a800")
DARK = ("#4fa8e0", "#ff8a4c", "#2fc79a", "#e79cc8", "#f2b632", "#8ccbf2", "#bbbbbb", "#f0e442")
"""The page's variables --c0, --c1, ... have these values."""
INK, FAINT, PAPER = "#1b1f24", "#d5d9de", "#fefefe"
VARIABLES = {INK: "ink", FAINT: "line", PAPER: "paper"} | {c: f"c{i}" for i, c in enumerate(LIGHT)}
FLAT: Any = (0, (6, 2))
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KNOWN_ARMS = ("ours", "stock-lpm", "no-cache", "craft", "fused", "stock-fcfs", "cacheblend", "contextpilot")
"""They have the same colour on every page."""
UNITS = {
    "rate": "request rate (1/s)",
    "window": "window (requests)",
    "threshold": "promotion threshold (requests)",
    "ratio": "share of moved tokens recomputed",
    "k": "chunks a request",
    "chunks": "chunks a request",
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
    "text.color": INK,
    "svg.fonttype": "none",
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


class Arms:
    """Arms in the order of legends, each with its own colour. Known arms have the same one everywhere."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(dict.fromkeys(names))
        known = {name: place for place, name in enumerate(KNOWN_ARMS) if name in names}
        free = (place for place in range(len(names) + len(KNOWN_ARMS)) if place not in known.values())
        self.places = known | {name: next(free) for name in names if name not in known}

    def colour(self, arm: str) -> str:
        """The arm's."""
        return LIGHT[self.places[arm] % len(LIGHT)]

    def line(self, arm: str) -> dict[str, Any]:
        """The arm's line; dashes and markers differ where there are more arms than colours."""
        row, column = divmod(self.places[arm], len(LIGHT))
        marker = MARKERS[(column + row) % len(MARKERS)]
        style = {"color": self.colour(arm), "linestyle": DASHES[row % len(DASHES)], "marker": marker}
        return style | {"linewidth": 1.8, "markersize": 4.5}

    def of(self, rows: Rows) -> list[str]:
        """The arms of these rows, in order."""
        return sorted({row["arm"] for row in rows}, key=self.places.__getitem__)


def svg(make: Callable[[], Figure], *, salt: str) -> str:
    """The figure as an SVG element whose colours are the page's. salt: makes its ids unique on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        make().savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # matplotlib's names of parts are the same in every figure
    return re.sub("|".join(VARIABLES), lambda found: f"var(--{VARIABLES[found[0]]}, {found[0]})", text)


def ttft_cdf(samples: Rows, arms: Arms) -> Figure:
    """Share of requests answered within a time: a panel per cell, a line per arm. samples: with times, no warm-up."""
    cells = grouped(samples, lambda sample: sample["cell"])
    figure, panels = _panels(len(cells))
    times = [sample["metrics"]["ttft_s"] for sample in samples]
    is_wide = min(times) > 0 and max(times) / min(times) > 30
    for ax, (cell, rows) in zip(panels, cells, strict=False):
        for arm in arms.of(rows):
            values = sorted(sample["metrics"]["ttft_s"] for sample in rows if sample["arm"] == arm)
            shares = [(i + 1) / len(values) for i in range(len(values))]
            ax.step(values, shares, where="post", **arms.line(arm), markevery=max(1, len(values) // 20))
        ax.set_title(_short(cell_name(cell), 48))
        ax.set_ylim(0, 1.03)
        _scale(ax, is_wide)
        if not is_wide:
            ax.set_xlim(left=0)
    _label(panels, _axis("ttft_s"), "share of requests")
    return _with_legend(figure, [(Line2D([], [], **arms.line(arm)), arm) for arm in arms.of(samples)])


def curves(cells: Rows, arms: Arms, *, setting: str, metrics: Sequence[str], level: Rows = ()) -> Figure:
    """A varied setting along x, a panel per metric, a line per arm with its interval.

    cells: of results; times are drawn by their median, other metrics by the mean. `level`: cells that do not depend on the
    setting, drawn as a horizontal line.
    """
    figure, panels = _panels(len(metrics))
    values: list[Any] = list(dict.fromkeys(one["cell"][setting] for one in cells))
    is_capacity = setting.startswith("capacity")
    is_scale = not is_capacity and all(isinstance(value, int | float) for value in values)
    if is_scale or is_capacity:
        values.sort(key=lambda value: math.inf if is_capacity and not value else value)
    for ax, metric in zip(panels, metrics, strict=False):
        for name in arms.of(cells):
            points = sorted(
                (one["cell"][setting] if is_scale else values.index(one["cell"][setting]), *found)
                for one in cells
                if one["arm"] == name and (found := middle(metric, one["metrics"].get(metric)))
            )
            xs, ys, lows, highs = zip(*points, strict=True) if points else ([], [], [], [])
            ax.plot(xs, ys, **arms.line(name))
            if len(xs) > 1:
                ax.fill_between(xs, lows, highs, color=arms.colour(name), alpha=0.13, linewidth=0)
            else:
                ax.vlines(xs, lows, highs, colors=arms.colour(name), linewidth=1.5)
        for one in level:
            if found := middle(metric, one["metrics"].get(metric)):
                ax.axhline(found[0], color=arms.colour(one["arm"]), linewidth=1.4, linestyle=FLAT)
        is_wide = is_scale and values[0] > 0 and values[-1] / values[0] >= 30
        _scale(ax, is_wide)
        if not is_scale or (is_wide and len(values) <= 8):
            names = [_short(setting_name(setting, value), 16) for value in values]
            ax.set_xticks(values if is_scale else range(len(values)), names)
            ax.minorticks_off()
        _label([ax], UNITS.get(setting, _short(setting.replace("_", " "), 40)), _axis(metric))
        _limit(ax, metric)
    lines = {name: {"color": arms.colour(name), "linestyle": FLAT} for name in arms.of(level)}
    lines |= {name: arms.line(name) for name in arms.of(cells)}
    return _with_legend(figure, [(Line2D([], [], **lines[name]), name) for name in arms.of([*cells, *level])])


def scores(cells: Rows, arms: Arms, *, metrics: Sequence[str]) -> Figure:
    """A dot with its interval per arm, a panel per metric and cell. For results without a varied setting."""
    groups = [(cell, metric, rows) for metric in metrics for cell, rows in grouped(cells, lambda one: one["cell"])]
    figure, panels = _panels(len(groups), height=max(1.3, 0.32 * len(arms.of(cells)) + 0.9))
    for ax, (cell, metric, rows) in zip(panels, groups, strict=False):
        found = {one["arm"]: middle(metric, one["metrics"].get(metric)) for one in rows}
        names = [name for name in arms.of(rows) if found[name]]
        for place, name in enumerate(names):
            value, low, high = found[name]
            ax.hlines(place, low, high, colors=arms.colour(name), linewidth=1.5)
            ax.plot([value], [place], "o", color=arms.colour(name))
        ax.set_yticks(range(len(names)), [_short(name, 22) for name in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        if metric in METRICS and not METRICS[metric].unit:
            ax.set_xlim(-0.03, 1.03)
        ax.grid(axis="x")
        ax.set_title(_short(cell_name(cell), 48))
        ax.set_xlabel(_axis(metric))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def middle(metric: str, found: Mapping[str, Any] | None) -> tuple[float, ...]:
    """(value, low, high): the median of times, else the mean, with its interval; () if it was not measured."""
    value = (found or {}).get("p50" if is_time(metric) else "mean")
    if found is None or not isinstance(value, int | float) or not math.isfinite(value):
        return ()
    ends = [value if found.get(end) is None else found[end] for end in ("low", "high")]
    return float(value), *ends


def grouped(rows: Rows, key: Callable[[Mapping[str, Any]], Any]) -> list[tuple[Any, list[Mapping[str, Any]]]]:
    """The rows by a JSON key, in order of appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps(key(row)), []).append(row)
    return [(json.loads(name), taken) for name, taken in groups.items()]


# Private, in order of use


def _panels(count: int, *, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    shown = max(1, min(count, MAX_PANELS))
    columns = 1 if shown == 1 else 2
    lines = math.ceil(shown / columns)
    figure = Figure(figsize=(WIDTH, (height + (0.5 if shown == 1 else 0)) * lines), layout="constrained")
    panels = [figure.add_subplot(lines, columns, i + 1) for i in range(shown)]
    if count > shown:
        figure.supxlabel(f"the first {shown} of {count} panels; all figures are in the table", fontsize=9)
    return figure, panels


def _short(text: str, limit: int) -> str:
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= limit else text[: limit * 2 // 3 - 1] + "…" + text[-(limit // 3) :]


def _axis(metric: str) -> str:
    known = METRICS.get(metric)
    return fill(f"{known.label} ({known.unit or '0 to 1'})" if known else _short(metric, 60), 24)


def _label(panels: Sequence[Axes], x: str, y: str) -> None:
    for ax in panels:
        ax.set_xlabel(x)
        ax.set_ylabel(y)


def _scale(ax: Axes, is_wide: bool) -> None:
    """A logarithmic x axis with plain numbers (matplotlib's own use markup, which is switched off)."""
    if is_wide:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=8))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())


def _limit(ax: Axes, metric: str) -> None:
    """Shares stay within 0 to 1 and show at least a fifth of it; other axes begin at 0."""
    if metric not in METRICS or METRICS[metric].unit:
        ax.set_ylim(bottom=0)
        return
    low, high = ax.get_ylim()
    center = (low + high) / 2
    ax.set_ylim(max(-0.03, min(low, center - 0.1)), min(1.03, max(high, center + 0.1)))


def _with_legend(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> Figure:
    labels = [_short(label, 44) for _, label in entries]
    columns = max(1, min(len(labels), 88 // (max(map(len, labels)) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend([handle for handle, _ in entries], labels, loc="outside upper left", ncols=columns)
    return figure
