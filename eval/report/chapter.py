"""The chapter of one record on the page: verdict, charts, tables, settings and caveats. Knows no
HTML.

Verdict, tables, settings and caveats are there for every kind of record; charts where samples or
cells are of a known form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from eval.contrast import limits, sentences, verdict
from eval.recorded import Cell, Recorded, cell_name, grouped, varied
from eval.report import charts
from eval.report.tables import metric_names, plain, servers_table, tables_of, words

MAX_FIRST = 2
"""Verdict sentences in the contents, those that begin with "Verdict" first; the chapter has all."""
MAX_CURVES = 6
"""Maximum number of charts of one varied setting if other settings vary, too."""
CURVES = (
    *(
        "ttft_s",
        "itl_s",
        "requests_per_s",
        "output_tokens_per_s",
        "hit_share",
        "expected_hit_share",
        "cached_share",
    ),
    *("saved_share", "token_saved_share", "em", "f1", "same", "kl"),
)
"""Metrics of a sweep's charts; if a record has none of them, its first two."""
SAME_SERVERS = ("model", "dtype", "attention_backend", "version")
"""Settings that should be the same for two arms' servers:
a difference here may explain a difference of the figures."""


class Picture(NamedTuple):
    """A chart: title, how to read it, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[], Figure]


class Chapter:
    """The content of one record. `first`: the sentences for the contents;
    `kind`: with the bench's name."""

    def __init__(self, run: Recorded) -> None:
        self.name = run.name
        self.kind = " ".join([run.kind, *filter(None, [run.record["spec"].get("bench")])])
        self.is_complete = run.record["complete"]
        self.verdict = _verdict(run)
        self.first = sorted(self.verdict, key=lambda text: not text.startswith("Verdict"))[
            :MAX_FIRST
        ]
        self.facts = _facts(run)
        self.servers = servers_table(run)
        self.pictures = pictures_of(run)
        self.tables = tables_of(run)
        self.caveats = _caveats(run)


def pictures_of(run: Recorded) -> list[Picture]:
    """The charts that the record's samples and cells allow:
    times to the first token, and swept settings."""
    lines = charts.lines_of(one["arm"] for one in [*run.samples, *run.cells])
    pictures = []
    if timed := [one for one in run.measured if "ttft_s" in one["metrics"]]:
        caption = (
            "Share of requests that have their first token within a time; further left is faster."
        )
        pictures.append(
            Picture("Time to first token", caption, partial(charts.ttft_cdf, timed, lines))
        )
    settings = varied(one["cell"] for one in run.cells)
    for setting in settings:
        for rest, cells in _sweeps(run, setting, alone=len(settings) == 1)[:MAX_CURVES]:
            names = metric_names(cells)
            metrics = [metric for metric in CURVES if metric in names] or names[:2]
            title = f"{words(setting).capitalize()} varied" + (
                f": {cell_name(rest)}" if rest else ""
            )
            draw = partial(charts.curves, cells, lines, setting=setting, metrics=metrics)
            pictures.append(
                Picture(title, "Times are medians, other metrics means; with 95% intervals.", draw)
            )
    return pictures


# Private, in order of use


def _sweeps(run: Recorded, setting: str, *, alone: bool) -> list[tuple[Cell, list[Cell]]]:
    """The cells of each combination of the other settings, if there are enough values of this one
    for a curve.

    If other settings vary, only a number with at least three values gives a curve; all figures are
    in the tables.
    """
    found, ends = [], run.results.get("ends") or {}
    moving = [one for one in run.cells if one["cell"].get(setting) is not None]
    for rest, cells in grouped(moving, partial(_others, setting=setting)):
        values = list(dict.fromkeys(one["cell"][setting] for one in cells))
        is_number = all(isinstance(value, int | float) for value in values)
        if len(values) > 1 if alone else len(values) > 2 and is_number:
            # Points that run once for many arms, such as ratios 0 and 1, belong to each of these
            # arms' curves.
            shared = [
                {**one, "arm": arm} for arm in ends for one in cells if one["arm"] in ends[arm]
            ]
            # Arms to which the setting does not apply have the same figures at each of its values.
            still = [
                one
                for one in run.cells
                if setting not in one["cell"] and _others(one, setting).items() <= rest.items()
            ]
            level = [{**one, "cell": {setting: value}} for one in still for value in values]
            found.append((rest, [*cells, *shared, *level]))
    return found


def _others(one: Cell, setting: str) -> dict[str, Any]:
    return {
        key: value for key, value in one["cell"].items() if key != setting and value is not None
    }


def _verdict(run: Recorded) -> list[str]:
    """The record's sentences, those about the best-known arms first.
    An interruption of the run is named before them."""
    # Older records have contrasts and no sentences.
    said = run.results.get("verdict") or sentences(run.contrasts)
    # A record's sentences are plain texts: telling a contrast again finds the one that is its.
    rank = {verdict(one): (*charts.KNOWN_ARMS, one["b"]).index(one["b"]) for one in run.contrasts}
    return [
        *_resumed(run),
        *sorted(said, key=lambda text: rank.get(text, len(rank) + len(charts.KNOWN_ARMS))),
    ]


def _resumed(run: Recorded) -> list[str]:
    dates = ", ".join(one["date"] for one in run.results.get("resumed_at") or [])
    told = (
        f"The run was interrupted and went on ({dates}); the machine and the caches may have been"
        " others."
    )
    return [told] if dates else []


def _facts(run: Recorded) -> dict[str, str]:
    record, git = run.record, run.record["git"]
    errors, warm_up = (
        sum(bool(sample.get(name)) for sample in run.samples) for name in ("error", "warm_up")
    )
    return {
        "command": record["command"],
        "date": record["date"],
        "samples": f"{len(run.measured)} measured, {warm_up} of warm-up, {errors} failed",
        "arms": "; ".join(run.arms),
        "code": git["sha"][:12] + (", with changes that are not committed" if git["dirty"] else ""),
        "baseline": record["baseline"] or "none",
        "machine": _listed(record["machine"]),
        "settings": _listed(record["spec"]),
        "versions": _listed(record["versions"]),
    }


def _listed(values: Mapping[str, Any]) -> str:
    # not `in`, to which 0 is False
    told = (
        f"{key} {plain(value)}"
        for key, value in values.items()
        if value is not None and value is not False and value != []
    )
    return ", ".join(told)


def _caveats(run: Recorded) -> list[str]:
    """What a reader must know: of samples and comparisons, of conditions that changed or differed,
    and notes."""
    results = run.results
    caveats = ["The run was interrupted: these are the figures of the samples so far."] * (
        not run.record["complete"]
    )
    if errors := sum(bool(sample.get("error")) for sample in run.samples):
        caveats.append(f"{errors} requests failed; they are in no figure but the count of errors.")
    # `sentences` ends with the limits, which are then in the verdict already.
    caveats += [text for text in limits(run.contrasts) if text not in _verdict(run)]
    caveats += [
        f"Not run: {arm}: {plain(why)}" for arm, why in (results.get("skipped") or {}).items()
    ]
    if others := run.record["git"].get("resumed_with"):
        caveats.append(f"It went on with other code: {', '.join(sha[:12] for sha in others)}.")
    if kept := [arm for arm, one in run.servers.items() if one.get("flushed") is False]:
        caveats.append(f"Caches were not emptied before each cell: {', '.join(kept)}.")
    for key in SAME_SERVERS:
        told = {
            arm: plain(one[key]) for arm, one in run.servers.items() if one.get(key) is not None
        }
        if len(set(told.values())) > 1:
            each = ", ".join(f"{arm} {value}" for arm, value in told.items())
            caveats.append(f"The arms' servers differ in {words(key)}: {each}.")
    if (load := run.record["spec"].get("load")) not in (None, "closed"):
        caveats.append(
            f"Load {load}: every block begins with an idle server, so queues are shorter than"
            " without blocks."
        )
    return [*caveats, *results.get("notes", []), *filter(None, [results.get("note")])]
