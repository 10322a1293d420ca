"""The chapter of one record on the page: verdict, charts, tables, settings and caveats. Knows no HTML.

Verdict, tables, settings and caveats are there for every kind of record; charts where samples or cells are of a known form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from eval.contrast import sentences, shortage, verdict
from eval.metrics import is_time
from eval.recorded import Cell, Recorded, cell_name, varied
from eval.report import charts
from eval.report.charts import KNOWN_ARMS, Arms, grouped
from eval.report.tables import metric_names, plain, servers_table, tables_of, words

MAX_FIRST = 2
"""Verdict sentences in the contents, those that begin with "Verdict" first; the chapter has all."""
MAX_CURVES, MAX_PANELS = 6, 8
"""Maximum number of charts of one varied setting if other settings vary, too."""
CURVES = (
    *("ttft_s", "itl_s", "requests_per_s", "output_tokens_per_s", "hit_share", "expected_hit_share", "cached_share"),
    *("saved_share", "token_saved_share", "em", "f1", "same", "kl"),
)
"""Metrics of a sweep's charts; if a record has none of them, its first two."""
PARTIAL = "The run was interrupted: these are the figures of the samples so far."
BAND = "Times are medians, other metrics means; bands are 95% intervals."
OF_STARTED_SERVERS = ("model_path", "params", "threads", "max_total_tokens", "max_servers", "server_flags")
"""Settings that do not apply to a server that already runs."""
SAME_SERVERS = ("model", "dtype", "attention_backend", "version")
"""Settings that should be the same for two arms' servers: a difference here may explain a difference of the figures."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart: title, how to read it, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[], Figure]


class Chapter:
    """The content of one record. `first`: the sentences for the contents; `kind`: with the bench's name."""

    def __init__(self, run: Recorded) -> None:
        self.name = run.name
        self.kind = " ".join(filter(None, [run.kind, str(run.record["spec"].get("bench") or "")]))
        self.is_complete = run.record.get("complete") is True
        self.verdict = _verdict(run)
        self.first = sorted(self.verdict, key=lambda text: not text.startswith("Verdict"))[:MAX_FIRST]
        self.facts = _facts(run)
        self.servers = servers_table(run)
        self.pictures = pictures_of(run)
        self.tables = tables_of(run)
        self.caveats = _caveats(run)


def pictures_of(run: Recorded) -> list[Picture]:
    """The charts that the record's samples and cells allow: times to the first token, swept settings, or the arms' scores."""
    arms = Arms(str(one["arm"]) for one in [*run.samples, *run.cells])
    pictures = []
    if timed := [one for one in run.measured if "ttft_s" in one["metrics"]]:
        caption = "Share of requests that have their first token within a time; further left is faster."
        pictures.append(Picture("Time to first token", caption, partial(charts.ttft_cdf, timed, arms)))
    pictures += _swept(run, arms)
    metrics = [metric for metric in metric_names(run.cells) if not is_time(metric)][:MAX_PANELS]
    if metrics and not pictures and len(arms.places) > 1:
        draw = partial(charts.scores, run.cells, arms, metrics=metrics)
        pictures.append(Picture("Scores", "Means with 95% intervals.", draw))
    return pictures


# Private: charts


def _swept(run: Recorded, arms: Arms) -> list[Picture]:
    """A chart for each setting that gives a curve, and for each combination of the other settings.

    If several settings vary, only a numeric one with at least three values gives a curve; all figures are in the tables.
    """
    pictures = []
    settings = varied(one["cell"] for one in run.cells)
    for setting in settings:
        moving = [one for one in run.cells if one["cell"].get(setting) is not None]
        still = [one for one in run.cells if setting not in one["cell"]]
        groups = grouped(moving, partial(_others, setting=setting))
        curves = [group for group in groups if _is_curve(group[1], setting, alone=len(settings) == 1)]
        for rest, cells in curves[:MAX_CURVES]:
            level = [one for one in still if _others(one, setting).items() <= rest.items()]
            names = metric_names(cells)
            metrics = [metric for metric in CURVES if metric in names] or names[:2]
            title = f"{words(setting).capitalize()} varied" + (f": {cell_name(rest)}" if rest else "")
            points = [*cells, *_shared_ends(run, cells)]
            draw = partial(charts.curves, points, arms, level=level, setting=setting, metrics=metrics)
            pictures += [Picture(title, BAND, draw)] if metrics else []
    return pictures


def _shared_ends(run: Recorded, cells: Sequence[Cell]) -> list[Cell]:
    """Points that run once for many arms, such as ratios 0 and 1, as points of each of these arms' curves."""
    names, ends = dict.fromkeys(one["arm"] for one in cells), run.results.get("ends") or {}
    return [{**one, "arm": arm} for one in cells for arm in names if one["arm"] in ends.get(arm, ())]


def _others(one: Cell, setting: str) -> dict[str, Any]:
    """The settings that must be the same in all cells of a chart."""
    return {key: value for key, value in one["cell"].items() if key != setting and value is not None}


def _is_curve(cells: Sequence[Cell], setting: str, *, alone: bool) -> bool:
    values = {json.dumps(one["cell"][setting]) for one in cells}
    is_number = all(isinstance(one["cell"][setting], int | float) for one in cells)
    return len(values) >= 2 if alone else is_number and len(values) >= 3


# Private: words


def _verdict(run: Recorded) -> list[str]:
    """The record's sentences, those about the best-known arms first. An interruption of the run is named before them."""
    said = [str(text) for text in run.results.get("verdict") or []] or sentences(run.contrasts)
    rank = {verdict(one): (*KNOWN_ARMS, one["b"]).index(one["b"]) for one in run.contrasts}
    return [*_resumed(run), *sorted(said, key=lambda text: rank.get(text, len(KNOWN_ARMS) + 1))]


def _resumed(run: Recorded) -> list[str]:
    dates = ", ".join(plain(one.get("date")) for one in run.results.get("resumed_at") or [])
    told = f"The run was interrupted and went on ({dates}); the machine and the caches may have been others."
    return [told] if dates else []


def _facts(run: Recorded) -> list[tuple[str, str]]:
    record, git = run.record, run.record.get("git") or {}
    errors = sum(bool(sample.get("error")) for sample in run.samples)
    warm_up = sum(bool(sample.get("warm_up")) for sample in run.samples)
    arms = record["spec"].get("arms") or [record["spec"].get("arm") or ""]
    # Settings for starting servers did not apply if every server was already running.
    is_started = not all("=" in str(arm) for arm in arms) or record["spec"].get("reference", "given") is None
    settings = [
        f"{key} {plain(value)}"
        for key, value in record["spec"].items()
        if value not in (None, [], False) and (is_started or key not in OF_STARTED_SERVERS)
    ]
    facts = {
        "command": plain(record.get("command")),
        "date": plain(record.get("date")),
        "samples": f"{len(run.measured)} measured, {warm_up} of warm-up, {errors} failed",
        "arms": "; ".join(run.arms),
        "machine": ", ".join(f"{key} {plain(value)}" for key, value in record["machine"].items()),
        "code": str(git.get("sha"))[:12] + (", with changes that are not committed" if git.get("dirty") else ""),
        "baseline": plain(record.get("baseline") or ""),
        "settings": ", ".join(settings),
        "versions": ", ".join(f"{key} {plain(value)}" for key, value in record["versions"].items() if value),
    }
    return [(name, value) for name, value in facts.items() if value]


def _caveats(run: Recorded) -> list[str]:
    """What a reader must know: of samples and comparisons, of conditions that changed or differed, and notes."""
    caveats = [] if run.record.get("complete") is True else [PARTIAL]
    if errors := sum(bool(sample.get("error")) for sample in run.samples):
        caveats.append(f"{errors} requests failed; they are in no figure but the count of errors.")
    caveats += [text for text in shortage(run.contrasts) if text not in _verdict(run)]
    if len(run.contrasts) >= 20:
        chance = round(0.05 * len(run.contrasts))
        caveats.append(f"Of {len(run.contrasts)} comparisons about {chance} would be beyond their intervals by chance.")
    caveats += [f"Not run: {arm}: {plain(why)}" for arm, why in (run.results.get("skipped") or {}).items()]
    caveats += _resumed(run)
    if others := (run.record.get("git") or {}).get("resumed_with"):
        caveats.append(f"It went on with other code: {', '.join(str(sha)[:12] for sha in others)}.")
    if kept := [arm for arm, one in run.servers.items() if one.get("flushed") is False]:
        caveats.append(f"Caches were not emptied before each cell: {', '.join(kept)}.")
    for key in SAME_SERVERS:
        told = {arm: plain(one[key]) for arm, one in run.servers.items() if one.get(key) is not None}
        if len(set(told.values())) > 1:
            each = ", ".join(f"{arm} {value}" for arm, value in told.items())
            caveats.append(f"The arms' servers differ in {key.replace('_', ' ')}: {each}.")
    if (load := run.record["spec"].get("load")) not in (None, "closed"):
        caveats.append(
            f"Load {load}: every block begins with an idle server, so queues are shorter than without blocks."
        )
    return [*caveats, *_notes(run.record)]


def _notes(value: Any) -> list[str]:
    """Every distinct `note` of a record; those of tables are with their tables."""
    found: dict[str, None] = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key in ("note", "notes", "caveats"):
            found |= dict.fromkeys(plain(one) for one in (inner if isinstance(inner, list) else [inner]) if one)
        elif key not in ("spec", "tables"):
            found |= dict.fromkeys(_notes(inner))
    return list(found)
