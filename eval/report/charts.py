"""One function per chart: samples or cells in, a figure out. No files, no screen, no global state of matplotlib.

    look = Look({"ours": 0, "stock-lpm": 1})          an arm's number selects its colour, the same in all charts of a page
    with look.style():
        figure = ttft_cdf(samples, look)

Colours are Okabe and Ito's, which people with any colour vision can distinguish; lines also differ in dashes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from eval.metrics import METRICS
from eval.recorded import cell_name, setting_name, varied
from eval.report.tables import middle

Rows = Sequence[Mapping[str, Any]]
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#B8A800")
DARK = ("#4FA8E0", "#FF8A4C", "#2FC79A", "#E79CC8", "#F2B632", "#8CCBF2", "#BBBBBB", "#F0E442")
DASHES = ("-", "--", ":", "-.")
LEVEL = (0, (6, 2))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FATES = ("exact", "relocated", "recomputed", "computed")
MAX_PANELS = 12
WIDTH = 7.2  # Inches: 10 points are then as large as the page's text.
_MAX_BINS = 24


@dataclass(frozen=True, slots=True)
class Look:
    """Colours for one background. `places`: arm -> number of its colour, and its position in legends."""

    places: Mapping[str, int] = field(default_factory=dict)
    dark: bool = False

    @contextmanager
    def style(self) -> Iterator[None]:
        """A context in which figures are made and saved."""
        ink, faint, paper = ("#e8e8e8", "#555b63", "#16191d") if self.dark else ("#1b1f24", "#d5d9de", "#ffffff")
        settings: Any = {
            "text.parse_math": False,  # An arm may be called "$x$".
            "font.size": 10,
            "text.color": ink,
            "axes.labelcolor": ink,
            "axes.edgecolor": faint,
            "axes.facecolor": paper,
            "figure.facecolor": paper,
            "xtick.color": ink,
            "ytick.color": ink,
            "grid.color": faint,
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
        with matplotlib.rc_context(settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # A name in a script the font has not.
            yield

    def colour(self, arm: str) -> str:
        """The arm's."""
        palette = DARK if self.dark else LIGHT
        return palette[self._place(arm) % len(palette)]

    def line(self, arm: str) -> dict[str, Any]:
        """The arm's line: colour, and dashes and marker if there are more arms than colours."""
        place = self._place(arm)
        kind = {
            "linestyle": DASHES[place // len(LIGHT) % len(DASHES)],
            "marker": MARKERS[(place + place // len(LIGHT)) % len(MARKERS)],
        }
        return {"color": self.colour(arm), "linewidth": 1.8, "markersize": 4.5, **kind}

    def _place(self, arm: str) -> int:
        return self.places.get(arm, len(self.places))


def ttft_cdf(samples: Rows, look: Look, *, metric: str = "ttft_s") -> Figure:
    """Share of requests answered within a time: a panel per cell, a line per arm. samples: with `metric`, no warm-up."""
    cells = _grouped(samples, lambda sample: _key(sample["cell"]))
    figure, panels = _panels(len(cells))
    times = [sample["metrics"][metric] for sample in samples]
    is_wide = min(times) > 0 and max(times) / min(times) > 30
    for ax, (cell, rows) in zip(panels, cells.items(), strict=False):
        for arm, taken in _by_arm(rows, look).items():
            values = sorted(sample["metrics"][metric] for sample in taken)
            shares = [(i + 1) / len(values) for i in range(len(values))]
            line = look.line(arm)
            ax.step(values, shares, where="post", **(line if len(values) <= 20 else {**line, "marker": None}))
        ax.set_title(_short(cell_name(json.loads(cell)), 48))
        ax.set_ylim(0, 1.03)
        _scale(ax, is_wide)
        if not is_wide:
            ax.set_xlim(left=0)
    _label(panels, _axis(metric), "share of requests")
    return _with_legend(figure, _lines(_arms(samples, look), look))


def hit_rates(cells: Rows, look: Look, *, rate: str = "chunk_hit_rate") -> Figure:
    """Grouped bars with intervals: capacity along x, a bar per policy, a panel per other setting. cells: of a replay."""
    settings = varied(one["cell"] for one in cells)
    along = "capacity_tokens" if any(one["cell"].get("capacity_tokens") for one in cells) else "capacity"
    others = [key for key in settings if key != along]
    groups = _grouped(cells, lambda one: _key({key: one["cell"].get(key) for key in others}))
    values = sorted({one["cell"].get(along) or math.inf for one in cells})
    arms = _arms(cells, look)
    figure, panels = _panels(len(groups), wide=len(values) * len(arms) > 10)
    width = 0.84 / len(arms)
    for ax, (group, rows) in zip(panels, groups.items(), strict=False):
        for one in rows:
            share, place = one[rate], arms.index(one["arm"])
            x = values.index(one["cell"].get(along) or math.inf) + (place - (len(arms) - 1) / 2) * width
            ax.bar(x, share["value"], width * 0.9, color=look.colour(one["arm"]))
            ends = [[max(0.0, share["value"] - share["low"])], [max(0.0, share["high"] - share["value"])]]
            ax.errorbar(x, share["value"], ends, color=matplotlib.rcParams["text.color"], linewidth=1, capsize=2)
        ax.set_title(_short(cell_name(json.loads(group)), 48))
        ax.set_xticks(range(len(values)), ["no limit" if value == math.inf else f"{value:,}" for value in values])
    unit = "tokens" if along == "capacity_tokens" else "chunks"
    _label(
        panels, f"capacity of the cache ({unit})", f"{'chunks' if rate == 'chunk_hit_rate' else 'tokens'} found (share)"
    )
    return _with_legend(figure, [(Patch(color=look.colour(arm)), arm) for arm in arms])


def curves(cells: Rows, look: Look, *, setting: str, metrics: Sequence[str], level: Rows = ()) -> Figure:
    """A varied setting along x, a panel per metric, a line per arm with its interval.

    cells: of results; times are drawn by their median, other metrics by the mean. `level`: cells that do not depend on the
    setting, drawn as a horizontal line.
    """
    figure, panels = _panels(len(metrics))
    names = _arms([*cells, *level], look)
    is_scale = all(isinstance(one["cell"][setting], int | float) for one in cells)
    values: list[Any] = sorted({one["cell"][setting] if is_scale else str(one["cell"][setting]) for one in cells})
    is_wide = is_scale and values[0] > 0 and values[-1] / values[0] >= 30
    for ax, metric in zip(panels, metrics, strict=False):
        for name in names:
            points = []
            for one in cells:
                y = middle(metric, one["metrics"].get(metric))
                if one["arm"] == name and y is not None:
                    x = one["cell"][setting] if is_scale else values.index(str(one["cell"][setting]))
                    points.append((x, y, *_ends(one["metrics"][metric], y)))
            xs, ys, lows, highs = zip(*sorted(points), strict=True) if points else ([], [], [], [])
            ax.plot(xs, ys, **look.line(name))
            if len(xs) > 1:
                ax.fill_between(xs, lows, highs, color=look.colour(name), alpha=0.13, linewidth=0)
            else:
                ax.vlines(xs, lows, highs, colors=look.colour(name), linewidth=1.5)
        for one in level:
            if (y := middle(metric, one["metrics"].get(metric))) is not None:
                ax.axhline(y, color=look.colour(one["arm"]), linewidth=1.4, linestyle=LEVEL)
        _scale(ax, is_wide)
        if not is_scale or len(values) <= 8:
            ax.set_xticks(values if is_scale else range(len(values)), [_tick(value, setting) for value in values])
            ax.minorticks_off()
        ax.set_ylabel(_axis(metric))
        ax.set_xlabel(_setting(setting))
        if metric in METRICS and not METRICS[metric].unit:
            low, high = ax.get_ylim()
            middle_y = (low + high) / 2
            ax.set_ylim(max(-0.03, min(low, middle_y - 0.1)), min(1.03, max(high, middle_y + 0.1)))
        else:
            ax.set_ylim(bottom=0)
    moving = {one["arm"] for one in cells}
    handles = [
        Line2D([], [], **(look.line(name) if name in moving else {"color": look.colour(name), "linestyle": LEVEL}))
        for name in names
    ]
    return _with_legend(figure, list(zip(handles, names, strict=True)))


def fates_over_time(samples: Rows, look: Look) -> Figure:
    """Fates of the prompt tokens during the load: stacked shares over time, a panel per arm and cell."""
    groups = _grouped(samples, lambda sample: _key([sample["arm"], sample["cell"]]))
    figure, panels = _panels(len(groups), height=2.2)
    colours = dict(zip(FATES, _fate_colours(look), strict=True))
    for ax, (group, rows) in zip(panels, groups.items(), strict=False):
        arm, cell = json.loads(group)
        end = max(sample["sent_s"] for sample in rows) or 1.0
        num_bins = max(1, min(_MAX_BINS, len(rows) // 6))
        sums: dict[int, list[float]] = {}
        for sample in rows:
            parts = sums.setdefault(min(int(sample["sent_s"] / end * num_bins), num_bins - 1), [0.0] * len(FATES))
            for place, fate in enumerate(FATES):
                parts[place] += sample["fates"].get(fate, 0)
        bins = [place for place in sorted(sums) if sum(sums[place])]
        shares = [[sums[place][i] / sum(sums[place]) for place in bins] for i in range(len(FATES))]
        if len(bins) == 1:
            bins, shares = [bins[0], bins[0] + 1], [one * 2 for one in shares]
        ax.stackplot([place * end / num_bins for place in bins], shares, colors=list(colours.values()), linewidth=0)
        ax.set_title(_short(", ".join(filter(None, [arm, cell_name(cell)])), 40))
        ax.set_ylim(0, 1)
        ax.margins(x=0)
    _label(panels, "time since the load began (s)", "share of prompt tokens")
    return _with_legend(figure, [(Patch(color=colour), fate) for fate, colour in colours.items()])


def permutation(points: Rows, look: Look, *, metric: str) -> Figure:
    """CRAFT's figure 5: a request's score in the given order, and mean and standard deviation over other orders.

    points: `{"request", "baseline", "mean", "sd"}`; drawn in the order of their baseline.
    """
    points = sorted(points, key=lambda one: (-one["baseline"], -one["mean"]))
    figure, (ax,) = _panels(1)
    given, other = (DARK if look.dark else LIGHT)[1::-1]
    xs = list(range(1, len(points) + 1))
    means, spread = [one["mean"] for one in points], [one["sd"] for one in points]
    ax.errorbar(xs, means, spread, fmt="o", color=other, markersize=5, capsize=2, linewidth=1)
    ax.plot(xs, [one["baseline"] for one in points], "_", color=given, markersize=11, markeredgewidth=2.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric in METRICS and not METRICS[metric].unit:
        ax.set_ylim(-0.03, 1.03)
    _label([ax], "request, by its score in the given order", _axis(metric))
    entries = [
        (Line2D([], [], color=given, marker="_", linestyle="", markersize=11, markeredgewidth=2.5), "given order"),
        (Line2D([], [], color=other, marker="o", linestyle=""), "other orders, mean and standard deviation"),
    ]
    return _with_legend(figure, entries)


def scores(cells: Rows, look: Look, *, metrics: Sequence[str]) -> Figure:
    """A dot with its interval per arm, a panel per metric and cell. For results without a varied setting."""
    wanted = [(_key(one["cell"]), metric) for metric in metrics for one in cells if metric in one["metrics"]]
    groups = list(dict.fromkeys(wanted))
    arms = _arms(cells, look)
    figure, panels = _panels(len(groups), height=max(1.3, 0.32 * len(arms) + 0.9))
    for ax, (cell, metric) in zip(panels, groups, strict=False):
        taken = [(one, middle(metric, one["metrics"].get(metric))) for one in cells if _key(one["cell"]) == cell]
        having = [(one, value) for one, value in taken if value is not None]
        names = _arms([one for one, _ in having], look)
        for one, value in having:
            low, high = _ends(one["metrics"][metric], value)
            spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
            line: dict[str, Any] = {"color": look.colour(one["arm"]), "capsize": 3, "linewidth": 1.5}
            ax.errorbar([value], [names.index(one["arm"])], xerr=spread, fmt="o", **line)
        ax.set_yticks(range(len(names)), [_short(name, 22) for name in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        if metric in METRICS and not METRICS[metric].unit:
            ax.set_xlim(-0.03, 1.03)
        ax.grid(axis="x")
        ax.set_title(_short(cell_name(json.loads(cell)), 48))
        ax.set_xlabel(_axis(metric))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    return figure


# Private, in order of use


def _grouped(rows: Rows, key: Callable[[Mapping[str, Any]], str]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _key(value: Any) -> str:
    return json.dumps(value)


def _panels(count: int, *, wide: bool = False, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    shown = max(1, min(count, MAX_PANELS))
    columns = 1 if wide or shown == 1 else 2
    lines = math.ceil(shown / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(WIDTH, (height + (0.5 if shown == 1 else 0)) * lines), layout=layout)
    panels = [figure.add_subplot(lines, columns, i + 1) for i in range(shown)]
    if count > shown:
        figure.supxlabel(f"the first {shown} of {count} panels; all figures are in the table", fontsize=9)
    return figure, panels


def _by_arm(rows: Rows, look: Look) -> dict[str, list[Mapping[str, Any]]]:
    groups = _grouped(rows, lambda row: row["arm"])
    return {arm: groups[arm] for arm in sorted(groups, key=look._place)}


def _arms(rows: Rows, look: Look) -> list[str]:
    return list(_by_arm(rows, look))


def _short(text: str, limit: int) -> str:
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= limit else text[: limit * 2 // 3 - 1] + "…" + text[-(limit // 3) :]


def _axis(metric: str) -> str:
    known = METRICS.get(metric)
    text = f"{known.label} ({known.unit or '0 to 1'})" if known else _short(metric, 60)
    return fill(text, 24)


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


def _lines(names: Sequence[str], look: Look) -> list[tuple[Artist, str]]:
    return [(Line2D([], [], **look.line(name)), name) for name in names]


def _with_legend(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> Figure:
    labels = [_short(label, 44) for _, label in entries]
    columns = max(1, min(len(labels), 88 // (max(map(len, labels)) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend([handle for handle, _ in entries], labels, loc="outside upper left", ncols=columns)
    return figure


def _tick(value: Any, setting: str) -> str:
    return _short(setting_name(setting, value), 16)


def _setting(setting: str) -> str:
    units = {
        "rate": "request rate (1/s)",
        "window": "window (requests)",
        "threshold": "promotion threshold (requests)",
        "ratio": "share of moved tokens recomputed",
        "k": "chunks a request",
        "chunks": "chunks a request",
        "batch": "requests in flight",
        "clients": "clients",
    }
    return units.get(setting, _short(setting.replace("_", " "), 40))


def _ends(found: Mapping[str, Any], value: float) -> tuple[float, float]:
    """The interval, or the value twice if there is none."""
    low, high = found.get("low"), found.get("high")
    return value if low is None else low, value if high is None else high


def _fate_colours(look: Look) -> tuple[str, str, str, str]:
    palette = DARK if look.dark else LIGHT
    return palette[0], palette[5], palette[4], "#4a4f57" if look.dark else "#c9ced4"
