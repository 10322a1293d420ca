"""A replay's results as one page: HTML with SVG in it, no script, no address to load from.

It has shares, counts, names of heads and models. The results have no text of a chunk or a prompt.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import CommandError
from eval.logs.log_file import passages_text, warnings_text
from eval.replay.drawing import Bar, Point, axis, lines, row
from eval.replay.mistakes import mistakes_of
from eval.replay.survey import DAY_S, HOUR_S, Survey
from eval.replay.verdict import MIN_REQUESTS, answer, capacity_name, replay_name

Results = Mapping[str, Any]
MAX_ROWS = 50
"""Of the caches that are drawn; a page stays small whatever the grid."""
EPOCH_S = 1e8
"""Smaller times count from a trace's own beginning."""
STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#5b6470;--line:#d5d9de;--band:#f3f5f7;
--ours:#0b6bcb;--stock:#b4560a;--lost:#edb9b0}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e8eaed;--soft:#a3acb6;
--line:#3a4048;--band:#20252b;--ours:#62aef5;--stock:#f0994a;--lost:#74423a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:46rem;background:var(--paper);
color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .6rem}
h2{font-size:1.2rem;margin:2.4rem 0 .2rem}h3{font-size:1rem;margin:1.1rem 0 0}
p{margin:.3rem 0 .6rem}.lead{font-size:1.15rem}.lead b{font-size:1.35em;white-space:nowrap}
.soft,.key,summary{color:var(--soft);font-size:.875rem}
.note{background:var(--band);border-left:4px solid var(--stock);padding:.6rem .9rem}
.ours{color:var(--ours);fill:var(--ours)}.stock{color:var(--stock);fill:var(--stock)}
.row{margin:.65rem 0}.label{line-height:1.35;margin-bottom:.15rem}.along{padding-left:2.4rem}
svg{display:block;overflow:visible;font-size:12px;fill:var(--soft)}
.track{fill:var(--band)}.lost{fill:var(--lost)}.count{fill:var(--line)}.touch{fill:transparent}
.value{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.inside{fill:var(--paper);text-anchor:end}
.mark{stroke:var(--ink);stroke-width:2;stroke-dasharray:3 2}.grid{stroke:var(--line)}
.plot path{fill:none;stroke-width:2.5;vector-effect:non-scaling-stroke;stroke-linejoin:round}
path.ours{stroke:var(--ours)}path.stock{stroke:var(--stock);stroke-dasharray:5 3}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.3rem 0}
.key svg{display:inline-block;vertical-align:-2px;margin-right:.35rem}
table{border-collapse:collapse;font-size:.8rem;font-variant-numeric:tabular-nums}
td{padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
.scroll{overflow-x:auto}
"""


class About(NamedTuple):
    """What the results do not have.

    `source` is the trace's name; `are_estimated`: its tokens; `room` explains the capacities.
    """

    source: str
    told: Survey
    num_chunks: int
    are_estimated: bool
    worth: float
    room: str


def write_page(path: Path, results: Results, about: About) -> None:
    """Raises CommandError: the file cannot be written."""
    try:
        path.write_text(page(results, about), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


def page(results: Results, about: About) -> str:
    """Of a replay with `page` in its results."""
    drawn = _Page(results, about)
    parts = [drawn.headline(), drawn.by_size(), drawn.over_time(), drawn.by_head()]
    parts += [drawn.by_age(), drawn.mistakes(), drawn.footer()]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Chunk reuse: {escape(about.source)}</title>"
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


class _Page:
    def __init__(self, results: Results, about: About) -> None:
        self._results, self._about, self._told = results, about, about.told
        self._stock, self._ours = results["page"]["replays"]
        self._unread = results.get("unread")
        self._mistakes = results["page"]["mistakes"]
        self._unit = self._ours["unit"]
        self._what = "chunk tokens" if self._unit == "tokens" else "chunks"
        self._stock_name = replay_name(self._stock["cell"])
        self._room = _room(self._ours["cell"])
        self._found = self._saved(self._ours["cell"])

    def headline(self) -> str:
        told, contrast, cure = self._told, self._contrast(self._ours["cell"]), self._cure()
        says = answer(contrast, worth=self._about.worth)
        heading = "This log cannot tell." if says.startswith("cannot") else f"{says.capitalize()}."
        if cure and says == "not worth it":
            heading = "Not worth it as the log is."
        low, value, high = (f"{100 * contrast[side]:+.1f}" for side in ("low", "value", "high"))
        verb = "save" if "reduction" in self._entry(self._ours["cell"]) else "find"
        notes = [f"Leave out {cure[1]}: {cure[0]:.1%} would be found."] if cure else []
        if not self._results["overlap_by_k"][0]["heads"]["headed"]:
            notes.append("Assumed: the same system prompt before all chunks.")
        notes += warnings_text(self._unread) if self._unread else []
        if contrast["n"] < MIN_REQUESTS:
            notes.append(f"A verdict needs {MIN_REQUESTS} requests.")
        if self._about.are_estimated and self._unit == "tokens":
            notes.append("Tokens are estimated as a quarter of the bytes; --tokenizer counts them.")
        passages = f"{passages_text(self._unread)}, " if self._unread else ""
        is_dated = told.has_times and told.first_s > EPOCH_S
        when = f", {_date(told.first_s)} to {_date(told.last_s)} UTC" if is_dated else ""
        return (
            f'<h1>{heading}</h1><p class="lead">{self._room}, sglang-chunkcache would {verb}'
            f' <b class="ours">{self._found:.1%}</b> of this log\'s {self._what},'
            f' {escape(self._stock_name)} <b class="stock">{self._saved(self._stock["cell"]):.1%}'
            f"</b>: {value} points, 95% interval {low} to {high}.</p>"
            + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
            + f'<p class="soft">{told.num_requests:,} requests{when}, {passages}'
            f"{self._about.num_chunks:,} different chunks. Every figure is a replay by the"
            " server's own order and eviction; no model was run. What is found need not be"
            " computed; how much sooner an answer begins is not replayed.</p>"
        )

    def by_size(self) -> str:
        seen = self._results["overlap_by_k"][0]
        most = seen["seen_before_tokens" if self._unit == "tokens" else "seen_before"]["value"]
        rows = []
        for one in self._results["cells"]:
            if one["cell"]["order"] == "tree":
                contrast, ours = self._contrast(one["cell"]), self._saved(one["cell"])
                note = f"{100 * contrast['value']:+.1f} points,"
                note += f" {answer(contrast, worth=self._about.worth)}"
                bars = _bars(ours, ours - contrast["value"])
                rows.append(row(_room(one["cell"]), note, bars, mark=most))
        if more := len(rows) - MAX_ROWS:
            rows[MAX_ROWS:] = [f'<p class="soft">{more:,} more in the record</p>'] * (more > 0)
        key = self._key(f"the most that reuse could find: {most:.1%}")
        note = f'<p class="soft">{self._about.room}</p>' if self._about.room else ""
        return f"<h2>How much room the cache has</h2>{note}{key}{''.join(rows)}{axis()}"

    def over_time(self) -> str:
        told, points = self._told, []
        for (slot, requests, total, ours), (*_, stock) in self._pairs("slots"):
            shares = (_share(ours, total), _share(stock, total))
            says = f"{self._at(slot)}: {shares[0]:.1%}, {self._stock_name} {shares[1]:.1%}"
            points.append(Point(slot, shares, requests, f"{says}, {requests:,} requests"))
        width = points[-1].number + 1
        ticks = [(at / width, self._at(at)) for at in sorted({0, width // 2, width})]
        chart = lines(points, ("ours", "stock"), ticks, label="shares found along the log")
        slot = _span(told.slot) if told.has_times else f"{told.slot:,.0f} requests"
        note = f"Share of {self._what} found, per {slot}. The cache starts empty. Below: requests,"
        note += f" at most {max(point.requests for point in points):,}."
        return (
            f'<h2>Over time</h2>{self._key()}<div class="along">{chart}</div>'
            f'<p class="soft">{escape(note)}</p>'
        )

    def by_head(self) -> str:
        note = "The text before the first chunk. Chunks behind different heads share nothing."
        if len(self._ours["heads"]) == 1:
            return self._section("By head", f"{note} All requests have one.", [])
        rows = [
            row(name, f"{requests:,} requests", _bars(_share(ours, total), _share(stock, total)))
            for (name, requests, total, ours), (*_, stock) in self._pairs("heads")
        ]
        return self._section("By head", note, rows)

    def by_age(self) -> str:
        everything = sum(total for _, total, _ in self._ours["ages"])
        rows: list[str] = []
        is_less = False
        for (name, total, ours), (*_, stock) in self._pairs("ages"):
            is_less |= ours < stock
            note = f"{_share(total, everything):.1%} of {self._what}"
            bars = _bars(_share(ours, total), _share(stock, total))
            if not rows:  # the first time
                rows.append(row(name, f"{note}, which nothing could find", []))
            elif total:
                rows.append(row(name, note, bars))
        note = "How long ago a chunk was last retrieved, by anyone."
        if is_less:
            note += " sglang-chunkcache puts chunks first that are retrieved often: one retrieved"
            note += " seldom stands behind them, and is found less often than where a retriever"
            note += " puts it first."
        return self._section("By age of the chunk", note, rows)

    def mistakes(self) -> str:
        missing = "; ".join(mistakes_of(self._told)[1])
        groups: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for one in self._mistakes:
            share = _share(one["saved"], one["total"])
            is_cure = one["kind"] in ("needless", "kept")
            made, without = (self._found, share) if is_cure else (share, self._found)
            says = f"{made:.1%} in place of {without:.1%}"
            says += ", since histories are computed again" if made < 0 else ""
            bar = Bar(made, "ours", f"{100 * (made - without):+.1f} points", without)
            groups[one["kind"] != "put_in"].append((made - without, row(one["says"], says, [bar])))
        drawn = "".join(
            f"<h3>{heading}</h3>{''.join(each for _, each in sorted(groups[is_made]))}{axis()}"
            for is_made, heading in ((True, "In this log"), (False, "If it were made"))
            if groups[is_made]
        )
        return (
            f'<h2>What a mistake costs</h2><p class="soft">Share of {self._what} found with it,'
            f' and without it. {self._room}.</p><div class="key">'
            f"{_swatch('ours', 'found with the mistake')}{_swatch('lost', 'what it costs')}</div>"
            f'{drawn}<p class="soft">Not replayed: {missing}.</p>'
        )

    def footer(self) -> str:
        table = self._results["tables"][0]["rows"][: 4 * MAX_ROWS]
        rows = [[*table[0]], *([*each.values()] for each in table)]
        cells = "</tr><tr>".join("".join(f"<td>{escape(e)}</td>" for e in line) for line in rows)
        unread, told = self._unread, ""
        if unread and unread["reasons"]:
            named = [f"line {number}: {reason}" for number, reason in unread["named"]]
            count = sum(unread["reasons"].values())
            named += [f"and {count - len(named):,} more"] if count > len(named) else []
            told = (
                f"<details open><summary>Not read: {count:,} lines or calls of"
                f' {unread["lines"]:,} lines</summary><ul class="soft">'
                f"{''.join(f'<li>{escape(each)}</li>' for each in named)}</ul></details>"
            )
        return (
            '<h2>Behind the figures</h2><details><summary>All replays</summary><div class="scroll">'
            f"<table><tr>{cells}</tr></table></div></details>{told}"
            f'<p class="soft">{escape(self._about.source)}, by python -m eval replay</p>'
        )

    # Private, in order of use

    def _saved(self, cell: Results) -> float:
        return float(self._entry(cell)["saved"][self._unit]["value"])

    def _entry(self, cell: Results) -> Results:
        return next(one for one in self._results["cells"] if one["cell"] == cell)

    def _contrast(self, cell: Results) -> Results:
        """With stock SGLang."""
        metric = "token_saved_share" if self._unit == "tokens" else "saved_share"
        with_stock = (one for one in self._results["contrasts"] if one["a"].startswith("retriever"))
        return next(one for one in with_stock if (one["cell"], one["metric"]) == (cell, metric))

    def _cure(self) -> tuple[float, str] | None:
        """What the application should leave out, with what is then found, if that is worth it."""
        cures = [
            (_share(one["saved"], one["total"]), one["says"][0].lower() + one["says"][1:])
            for one in self._mistakes
            if one["kind"] == "needless"
        ]
        least = self._found + max(self._about.worth, 0.001)
        return max((each for each in cures if each[0] >= least), default=None)

    def _pairs(self, name: str) -> Any:
        """Of ours and of stock."""
        return zip(self._ours[name], self._stock[name], strict=True)

    def _section(self, title: str, note: str, rows: list[str]) -> str:
        drawn = f"{self._key()}{''.join(rows)}{axis()}" if rows else ""
        return f'<h2>{title}</h2><p class="soft">{note}</p>{drawn}'

    def _key(self, mark: str = "") -> str:
        line = '<svg width="14" height="12"><line class="mark" x1="7" x2="7" y2="12"/></svg>'
        marked = f"<span>{line}{escape(mark)}</span>" if mark else ""
        ours, stock = _swatch("ours", "sglang-chunkcache"), _swatch("stock", self._stock_name)
        return f'<div class="key">{ours}{stock}{marked}</div>'

    def _at(self, slot: int) -> str:
        told = self._told
        if not told.has_times:
            return f"{slot * told.slot:,.0f} requests"
        if told.first_s < EPOCH_S:
            return _span(slot * told.slot)
        at = told.first_s + slot * told.slot
        return _date(at, "%d %b" if told.slot >= DAY_S else "%d %b %H:%M")


def _bars(ours: float, stock: float) -> list[Bar]:
    return [Bar(ours, "ours", f"{ours:.1%}"), Bar(stock, "stock", f"{stock:.1%}")]


def _room(cell: Results) -> str:
    is_limited = cell["capacity"] or cell["capacity_tokens"]
    room = capacity_name(cell).replace("capacity", "room")
    return f"With {room}" if is_limited else "With room for everything"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _swatch(style: str, text: str) -> str:
    box = f'<svg width="14" height="12"><rect class="{style}" width="14" height="12" rx="2"/></svg>'
    return f"<span>{box}{escape(text)}</span>"


def _date(seconds: float, form: str = "%d %b %Y %H:%M") -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(form)


def _span(seconds: float) -> str:
    for size, name in ((DAY_S, "d"), (HOUR_S, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.0f} s"
