"""The chapter of one record on the page: settings, charts with a reading, tables, and caveats.

    Recorded -> create_chapter -> Chapter(facts, servers, verdict, pictures, tables, caveats)

Knows neither HTML nor Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from matplotlib.figure import Figure

from eval.contrast import sentences, shortage, verdict
from eval.recorded import Cell, Recorded, cell_name, varied
from eval.report import charts, readings, tables
from eval.report.charts import Look
from eval.report.tables import Table

MAX_PICTURES = 6
"""Maximum number of charts of one varied setting if other settings vary, too."""
CURVES = {"quality": ("em", "f1", "same", "kl")}
SERVE_CURVES = ("ttft_s", "hit_share", "expected_hit_share", "cached_share")
KNOWN_ARMS = ("ours", "stock-lpm", "no-cache", "craft", "fused", "stock-fcfs", "cacheblend", "contextpilot")
"""They have the same colour on every page."""
OF_STARTED_SERVERS = ("model_path", "params", "threads", "max_total_tokens", "max_servers", "server_flags")
"""Settings that do not apply to a server that already runs."""
SAME_SERVERS = ("model", "dtype", "attention_backend", "version")
"""Settings that should be the same for two arms' servers: a difference here may explain a difference of the figures."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart. `reading`: one sentence; `draw`: makes the chart for a background."""

    name: str
    title: str
    reading: str
    draw: Callable[[Look], Figure]
    table: Table


@dataclass(frozen=True, slots=True)
class Chapter:
    """The content of one record, for HTML and Markdown."""

    name: str
    kind: str
    is_complete: bool
    verdict: Sequence[str]
    facts: Sequence[tuple[str, str]]
    versions: Sequence[tuple[str, str]]
    servers: Table | None
    pictures: Sequence[Picture]
    tables: Sequence[Table]
    caveats: Sequence[str]


def create_chapter(run: Recorded, name: str) -> Chapter:
    """The chapter of one record. `name`: the folder's, made unique in the report."""
    pictures = {"replay": _replay, "quality": _quality}.get(run.kind, _served)(run)
    drawn = {picture.table.caption for picture in pictures}
    more = [tables.metric_table(run.cells, metric) for metric in tables.metric_names(run.cells)]
    found = [tables.contrast_table(run), tables.storage_table(run), *more, tables.throughput_table(run.cells)]
    return Chapter(
        name=name,
        kind=run.kind,
        is_complete=run.record.get("complete") is True,
        verdict=_verdict(run),
        facts=_facts(run),
        versions=[(str(key), tables.plain(value)) for key, value in run.record["versions"].items() if value],
        servers=tables.servers_table(run),
        pictures=pictures,
        tables=[table for table in found if table is not None and table.caption not in drawn],
        caveats=_caveats(run),
    )


def colours(runs: Sequence[Recorded]) -> list[dict[str, int]]:
    """For each record its arms' colours. An arm has one colour on the whole page, or if the page has too many, in a record."""
    arms = [[str(one["arm"]) for one in [*run.samples, *run.cells]] for run in runs]
    shared = places(arm for found in arms for arm in found)
    return [shared if len(shared) <= len(charts.LIGHT) else places(found) for found in arms]


def places(names: Iterable[str]) -> dict[str, int]:
    """Name -> number of its colour: known arms have fixed colours, the others get the remaining ones."""
    names = list(dict.fromkeys(names))
    known = {name: place for place, name in enumerate(KNOWN_ARMS) if name in names}
    free = (place for place in count() if place not in known.values())
    return known | {name: next(free) for name in names if name not in known}


# Private: the charts of each kind


def _replay(run: Recorded) -> list[Picture]:
    pictures = []
    for rate, of in (("chunk_hit_rate", "chunks"), ("token_hit_rate", "chunk tokens")):
        cells = [one for one in run.cells if isinstance(one.get(rate), dict)]
        if cells:
            title = f"Share of {of} found cached"
            table, reading = tables.hits_table(cells, rate, title), readings.hits_reading(cells, rate, of)
            draw = partial(charts.hit_rates, cells, rate=rate)
            pictures.append(Picture(of, title, reading, draw, table))
    return pictures


def _served(run: Recorded) -> list[Picture]:
    pictures = []
    timed = [one for one in run.measured if "ttft_s" in one["metrics"]]
    if timed and run.kind == "serve":
        table, reading = tables.metric_table(run.cells, "ttft_s"), readings.cdf_reading(timed)
        pictures.append(Picture("ttft", "Time to first token", reading, partial(charts.ttft_cdf, timed), table))
    pictures += _swept(run, SERVE_CURVES) + _throughput(run)
    fated = [one for one in run.measured if one.get("fates") and isinstance(one.get("sent_s"), int | float)]
    if fated:
        sums = _fate_sums(fated)
        table, reading = tables.fates_table(sums), readings.fates_reading(sums)
        draw = partial(charts.fates_over_time, fated)
        pictures.append(Picture("fates", "Fates of the prompt tokens", reading, draw, table))
    return pictures


def _throughput(run: Recorded) -> list[Picture]:
    """Throughput over the rate or the clients, if nothing else varies."""
    settings = varied(one["cell"] for one in run.cells)
    cells = [
        {**one, "metrics": {tables.rate_name(rate): {"mean": value} for rate, value in one["throughput"].items()}}
        for one in run.cells
        if isinstance(one.get("throughput"), dict)
    ]
    metrics = [tables.rate_name(rate) for rate in ("output_tokens_per_s", "requests_per_s")]
    metrics = [metric for metric in metrics if metric in tables.metric_names(cells)]
    if not metrics or settings not in (["rate"], ["clients"]):
        return []
    table = tables.swept_table(cells, settings[0], metrics, f"Throughput by {settings[0]}")
    reading = readings.sweep_reading(cells, settings[0], metrics[0])
    draw = partial(charts.curves, cells, setting=settings[0], metrics=metrics)
    return [Picture("throughput", table.caption, reading, draw, table)]


def _quality(run: Recorded) -> list[Picture]:
    pictures = _permuted(run) or _swept(run, CURVES["quality"])
    metrics = [metric for metric in tables.metric_names(run.cells) if not tables.is_time(metric)]
    if pictures or not metrics:
        return pictures
    reading = " ".join(readings.score_reading(run.cells, metric) for metric in metrics[:2])
    table, draw = tables.scores_table(run.cells, metrics), partial(charts.scores, run.cells, metrics=metrics)
    return [Picture("scores", "Scores of the answers", reading, draw, table)]


def _permuted(run: Recorded) -> list[Picture]:
    """CRAFT's figure 5 for each metric that the record has per request."""
    points: dict[str, list[dict[str, Any]]] = {}
    for one in run.results.get("requests") or []:
        for metric, found in one["metrics"].items():
            if found["baseline"] is not None:
                points.setdefault(metric, []).append({"request": str(one["request"]), **found})
    return [
        Picture(
            f"permutation-{metric}",
            f"{tables.label(metric)[:1].upper()}{tables.label(metric)[1:]} in other orders of the chunks",
            readings.permutation_reading(taken),
            partial(charts.permutation, taken, metric=metric),
            tables.permutation_table(taken, metric),
        )
        for metric, taken in points.items()
    ]


def _swept(run: Recorded, wanted: Sequence[str]) -> list[Picture]:
    """A chart for each setting that gives a curve, and for each combination of the other settings.

    If several settings vary, only a numeric one with at least three values gives a curve; all figures are in the tables.
    """
    pictures = []
    settings = varied(one["cell"] for one in run.cells)
    for setting in settings:
        groups: dict[str, list[Cell]] = {}
        for one in run.cells:
            if one["cell"].get(setting) is not None:
                groups.setdefault(json.dumps(_others(one, setting)), []).append(one)
        curves = [
            (rest, cells) for rest, cells in groups.items() if _is_curve(cells, setting, alone=len(settings) == 1)
        ]
        for place, (rest, cells) in enumerate(curves[:MAX_PICTURES], 1):
            same = json.loads(rest)
            level = [
                one for one in run.cells if setting not in one["cell"] and _others(one, setting).items() <= same.items()
            ]
            names = tables.metric_names(cells)
            metrics = [metric for metric in wanted if metric in names] or names[:2]
            if not metrics:
                continue
            title = f"{setting.capitalize()} varied" + (f": {cell_name(same)}" if same else "")
            reading = " ".join(readings.sweep_reading(cells, setting, metric) for metric in metrics[:2])
            table = tables.swept_table([*cells, *level], setting, metrics, title)
            points = [*cells, *_shared_ends(run, cells)]
            draw = partial(charts.curves, points, level=level, setting=setting, metrics=metrics)
            pictures.append(Picture(f"{setting}-{place}", title, reading, draw, table))
    return pictures


def _shared_ends(run: Recorded, cells: Sequence[Cell]) -> list[Cell]:
    """Points that run once for many arms, such as ratios 0 and 1, as points of each of these arms' curves."""
    arms, ends = dict.fromkeys(one["arm"] for one in cells), run.results.get("ends") or {}
    return [{**one, "arm": arm} for one in cells for arm in arms if one["arm"] in ends.get(arm, ())]


def _others(one: Cell, setting: str) -> dict[str, Any]:
    """The settings that must be the same in all cells of a chart."""
    return {key: value for key, value in one["cell"].items() if key != setting and value is not None}


def _is_curve(cells: Sequence[Cell], setting: str, *, alone: bool) -> bool:
    values = {json.dumps(one["cell"][setting]) for one in cells}
    is_number = all(isinstance(one["cell"][setting], int | float) for one in cells)
    return len(values) >= 2 if alone else is_number and len(values) >= 3


def _fate_sums(samples: Sequence[Cell]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for one in samples:
        counts = sums.setdefault(one["arm"], {})
        for fate, tokens in one["fates"].items():
            counts[fate] = counts.get(fate, 0) + tokens
    return sums


# Private: settings and caveats


def _verdict(run: Recorded) -> list[str]:
    """The record's sentences, those about the best-known arms first, or the reason why there are none.

    An interruption of the run is named before them, so that a reader of the verdict alone sees it.
    """
    said = [str(text) for text in run.results.get("verdict") or []] or sentences(run.contrasts)
    rank = {verdict(one): (*KNOWN_ARMS, one["b"]).index(one["b"]) for one in run.contrasts}
    ranked = sorted(said, key=lambda text: rank.get(text, len(KNOWN_ARMS) + 1)) or ["Nothing was compared."]
    return [*_resumed(run), *ranked]


def _resumed(run: Recorded) -> list[str]:
    resumed = run.results.get("resumed_at")
    if not isinstance(resumed, list) or not resumed:
        return []
    dates = ", ".join(tables.plain(one.get("date")) for one in resumed)
    return [f"The run was interrupted and went on ({dates}); the machine and the caches may have been others."]


def _facts(run: Recorded) -> list[tuple[str, str]]:
    record, git = run.record, run.record.get("git") or {}
    errors = sum(bool(sample.get("error")) for sample in run.samples)
    warm_up = sum(bool(sample.get("warm_up")) for sample in run.samples)
    facts = [
        ("command", tables.plain(record.get("command"))),
        ("date", tables.plain(record.get("date"))),
        ("samples", f"{len(run.measured)} measured, {warm_up} of warm-up, {errors} failed"),
        ("arms", "; ".join(run.arms) or "none"),
        ("machine", ", ".join(f"{key} {tables.plain(value)}" for key, value in record["machine"].items())),
        ("code", f"{str(git.get('sha'))[:12]}{', with changes that are not committed' if git.get('dirty') else ''}"),
        ("baseline", tables.plain(record["baseline"]) if record.get("baseline") else ""),
        (
            "settings",
            ", ".join(f"{k} {tables.plain(v)}" for k, v in _settings(run).items() if v not in (None, [], False)),
        ),
    ]
    return [(name, value) for name, value in facts if value]


def _settings(run: Recorded) -> dict[str, Any]:
    """The settings that applied: those for starting servers do not if every server was already running."""
    spec = dict(run.record["spec"])
    arms = spec.get("arms") or [spec.get("arm") or ""]
    is_started = not all("=" in str(arm) for arm in arms) or spec.get("reference", "given") is None
    return {key: value for key, value in spec.items() if is_started or key not in OF_STARTED_SERVERS}


def _caveats(run: Recorded) -> list[str]:
    caveats = []
    if run.record.get("complete") is not True:
        caveats.append("The run was interrupted: these are the figures of the samples so far.")
    if errors := sum(bool(sample.get("error")) for sample in run.samples):
        caveats.append(f"{errors} requests failed; they are in no figure but the count of errors.")
    caveats += [text for text in shortage(run.contrasts) if text not in _verdict(run)]
    if len(run.contrasts) >= 20:
        chance = round(0.05 * len(run.contrasts))
        caveats.append(f"Of {len(run.contrasts)} comparisons about {chance} would be beyond their intervals by chance.")
    skipped = run.results.get("skipped")
    if isinstance(skipped, dict):
        caveats += [f"Not run: {arm}: {tables.plain(why)}" for arm, why in skipped.items()]
    return [*caveats, *_conditions(run), *_notes(run.record)]


def _conditions(run: Recorded) -> list[str]:
    """Caveats on conditions that changed during the run or differed between arms, and on limits of the load."""
    caveats = _resumed(run)
    if others := (run.record.get("git") or {}).get("resumed_with"):
        caveats.append(f"It went on with other code: {', '.join(str(sha)[:12] for sha in others)}.")
    servers = run.results.get("servers")
    servers = servers if isinstance(servers, dict) else {}
    facts = {str(arm): one for arm, one in servers.items() if isinstance(one, dict)}
    if kept := [arm for arm, one in facts.items() if one.get("flushed") is False]:
        caveats.append(f"Caches were not emptied before each cell: {', '.join(kept)}.")
    for key in SAME_SERVERS:
        told = {arm: tables.plain(one[key]) for arm, one in facts.items() if one.get(key) is not None}
        if len(set(told.values())) > 1:
            each = ", ".join(f"{arm} {value}" for arm, value in told.items())
            caveats.append(f"The arms' servers differ in {key.replace('_', ' ')}: {each}.")
    if (load := run.record["spec"].get("load")) not in (None, "closed"):
        caveats.append(
            f"Load {load}: every block begins with an idle server, so queues are shorter than in a load without end."
        )
    return caveats


def _notes(value: Any) -> list[str]:
    """Every distinct `note` anywhere in a record."""
    found: dict[str, None] = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key in ("note", "notes", "caveats"):
            found |= dict.fromkeys(tables.plain(one) for one in (inner if isinstance(inner, list) else [inner]) if one)
        elif key != "spec":
            found |= dict.fromkeys(_notes(inner))
    return list(found)
