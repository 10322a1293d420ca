"""A replay's results as one page: HTML with SVG in it, no script, no address to load from.

It has shares, counts, names of heads and models; no text of a chunk or a prompt is in the results.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import CommandError
from eval.replay.drawing import Bar, Point, axis, lines, row
from eval.replay.mistakes import mistakes_of
from eval.replay.survey import Survey
from eval.replay.verdict import answer, capacity_name, replay_name
from eval.replay.trace import TraceFacts

Results = Mapping[str, Any]
EPOCH_S = 1e8
"""Smaller times count from a trace's own beginning."""
LEAVE_OUT = {
    "times": "times, dates and ids in front of the chunks",
    "labels": "ranks and scores in the passages’ texts",
    "both": "times, dates and ids in front of the chunks, and ranks and scores in their texts",
}
STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#5b6470;--line:#d5d9de;--band:#f3f5f7;--ours:#0b6bcb;
--stock:#b4560a;--lost:#edb9b0}
@media (prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e8eaed;--soft:#a3acb6;--line:#3a4048;
--band:#20252b;--ours:#62aef5;--stock:#f0994a;--lost:#74423a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:46rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .6rem}
h2{font-size:1.2rem;margin:2.4rem 0 .2rem}
h3{font-size:1rem;margin:1.1rem 0 0}
p{margin:.3rem 0 .6rem}
.lead{font-size:1.15rem}
b.ours,b.stock{font-size:1.35em;white-space:nowrap}
.ours{color:var(--ours);fill:var(--ours)}.stock{color:var(--stock);fill:var(--stock)}
.soft,footer,summary{color:var(--soft);font-size:.875rem}
.note{background:var(--band);border-left:4px solid var(--stock);padding:.6rem .9rem;margin:.8rem 0}
.row{margin:.65rem 0}.label{line-height:1.35;margin-bottom:.15rem}
svg{display:block;overflow:visible;font-size:12px;fill:var(--soft)}
.track{fill:var(--band)}.lost{fill:var(--lost)}.count{fill:var(--line)}.touch{fill:transparent}
.value{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.inside{fill:var(--paper);text-anchor:end}.along{padding-left:2.4rem}
.mark,.key .mark{stroke:var(--ink);stroke-width:2;stroke-dasharray:3 2}.grid{stroke:var(--line)}
.plot path{fill:none;stroke-width:2.5;vector-effect:non-scaling-stroke;stroke-linejoin:round}
path.ours{stroke:var(--ours)}path.stock{stroke:var(--stock);stroke-dasharray:5 3}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.875rem;margin:.3rem 0}
.key svg{display:inline-block;vertical-align:-2px;margin-right:.35rem}
table{border-collapse:collapse;font-size:.8rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
.scroll{overflow-x:auto}
"""


class About(NamedTuple):
    """What the results do not have: the source's name, what it is like, how its tokens were
    counted (None: estimated, or its own lengths), what a log had that was not read."""

    source: str
    told: Survey
    facts: TraceFacts
    tokenizer: str | None
    unread: Mapping[str, Any] | None
    worth: float


def write_page(path: Path, results: Results, about: About) -> None:
    """Raises CommandError: the file cannot be written."""
    try:
        path.write_text(page(results, about), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


def page(results: Results, about: About) -> str:
    """Of a replay with `page` in its results."""
    drawn = _Page(results, about)
    title = escape(f"Chunk reuse on {about.source}")
    parts = [
        drawn.headline(),
        drawn.by_size(),
        drawn.over_time(),
        drawn.by_head(),
        drawn.by_age(),
        drawn.mistakes(),
        drawn.footer(),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


class _Page:
    def __init__(self, results: Results, about: About) -> None:
        self._results, self._about = results, about
        self._stock, self._ours = results["page"]["replays"]
        self._unit = self._ours["unit"]
        self._what = "chunk tokens" if self._unit == "tokens" else "chunks"
        self._stock_name = replay_name(self._stock["cell"])
        self._room = _room(self._ours["cell"])

    def headline(self) -> str:
        contrast = self._contrast(self._ours["cell"])
        says = answer(contrast, worth=self._about.worth)
        cure = self._cure()
        heading = {
            "worth it": "Worth it.",
            "not worth it": "Not worth it as the log is." if cure else "Not worth it.",
        }
        ours, stock = self._saved(self._ours["cell"]), self._saved(self._stock["cell"])
        low, value, high = (f"{100 * contrast[side]:+.1f}" for side in ("low", "value", "high"))
        verb = "save" if "reduction" in self._entry(self._ours["cell"]) else "find"
        lead = (
            f"{self._room}, sglang-chunkcache would {verb} <b class=ours>{ours:.1%}</b> of this log’s"
            f" {self._what}, {escape(self._stock_name)} <b class=stock>{stock:.1%}</b>:"
            f" {value} points, 95% interval {low} to {high}."
        )
        told, facts = self._about.told, self._about.facts
        when = ""
        if told.has_times and told.first_s > EPOCH_S:
            when = f", {_date(told.first_s)} to {_date(told.last_s)} (UTC)"
        scope = (
            f"{told.num_requests:,} requests{when}, {facts.distinct_chunks:,} different chunks."
            " Every figure is a replay of the log by the server’s own order and eviction; no model"
            " was run. What is found need not be computed; how much sooner an answer begins is not"
            " replayed."
        )
        return (
            f"<h1>{heading.get(says, 'This log cannot tell.')}</h1>"
            f'<p class="lead">{lead}</p>{self._notes(cure)}<p class="soft">{escape(scope)}</p>'
        )

    def by_size(self) -> str:
        seen = self._results["overlap_by_k"][0]
        most = (seen["seen_before_tokens"] if self._unit == "tokens" else seen["seen_before"])["value"]
        rows = []
        for one in self._results["cells"]:
            if one["cell"]["order"] == "tree":
                contrast = self._contrast(one["cell"])
                ours = self._saved(one["cell"])
                bars = self._bars(ours, ours - contrast["value"])
                points = f"{100 * contrast['value']:+.1f} points"
                note = f"{points}, {answer(contrast, worth=self._about.worth)}"
                rows.append(row(_room(one["cell"]), note, bars, mark=most))
        marked = f"the most that reuse could find: {most:.1%}"
        return (
            "<h2>How much room the cache has</h2>" + self._key(marked) + "".join(rows) + axis()
        )

    def over_time(self) -> str:
        told = self._about.told
        pairs = zip(self._ours["slots"], self._stock["slots"], strict=True)
        points = [
            Point(
                number,
                (_share(saved, total), _share(stock, total)),
                requests,
                f"{self._at(number)}: {_share(saved, total):.1%}, {self._stock_name}"
                f" {_share(stock, total):.1%}, {requests:,} requests",
            )
            for (number, requests, total, saved), (_, _, _, stock) in pairs
        ]
        width = points[-1].number + 1
        places = sorted({0, width // 3, 2 * width // 3, width})
        ticks = [(place / width, self._at(place)) for place in places]
        busiest = max(point.requests for point in points)
        slot = _span(told.slot) if told.has_times else f"{told.slot:,.0f} requests"
        note = (
            f"Share of {self._what} found, per {slot}. Below: requests, at most {busiest:,}."
            " The cache starts empty."
        )
        chart = lines(points, ("ours", "stock"), ticks, label="shares found along the log")
        return f'<h2>Over time</h2>{self._key()}<div class="along">{chart}</div><p class="soft">{escape(note)}</p>'

    def by_head(self) -> str:
        heads = self._ours["heads"]
        says = "The text before the first chunk. Chunks behind different heads share nothing."
        if len(heads) == 1:
            return f'<h2>By head</h2><p class="soft">{says} All requests have one.</p>'
        rows = [
            row(
                name,
                f"{requests:,} requests",
                self._bars(_share(saved, total), _share(stock, total)),
            )
            for (name, requests, total, saved), (_, _, _, stock) in zip(
                heads, self._stock["heads"], strict=True
            )
        ]
        return f'<h2>By head</h2><p class="soft">{says}</p>{self._key()}{"".join(rows)}{axis()}'

    def by_age(self) -> str:
        everything = sum(total for _, total, _ in self._ours["ages"])
        rows = []
        for (name, total, found), (_, _, stock) in zip(
            self._ours["ages"], self._stock["ages"], strict=True
        ):
            if total:
                is_new = name == "never before"
                note = f"{_share(total, everything):.1%} of {self._what}"
                bars = [] if is_new else self._bars(_share(found, total), _share(stock, total))
                rows.append(row(name, f"{note}, which nothing could find" if is_new else note, bars))
        note = "How long ago a chunk was last retrieved, by anyone."
        return f'<h2>By age of the chunk</h2><p class="soft">{note}</p>{self._key()}{"".join(rows)}{axis()}'

    def mistakes(self) -> str:
        ours = self._saved(self._ours["cell"])
        groups: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for one in self._results["page"]["mistakes"]:
            share = _share(one["saved"], one["total"])
            made, without = (ours, share) if one["is_cure"] else (share, ours)
            says = f"{made:.1%} in place of {without:.1%}"
            bar = Bar(made, "ours", f"{100 * (made - without):+.1f} points", without)
            groups[one["is_made"]].append((made - without, row(one["says"], says, [bar])))
        parts = [
            "<h2>What a mistake costs</h2>",
            f'<p class="soft">Share of {self._what} found with it, and without it. {self._room}.</p>',
            '<div class="key">' + _swatch("ours", "found with the mistake"),
            _swatch("lost", "what it costs") + "</div>",
        ]
        for is_made, heading in ((True, "In this log"), (False, "If it were made")):
            if groups[is_made]:
                rows = [drawn for _, drawn in sorted(groups[is_made])]
                parts.append(f"<h3>{heading}</h3>{''.join(rows)}{axis()}")
        missing = "; ".join(mistakes_of(self._about.told)[1])
        parts.append(f'<p class="soft">Not replayed: {escape(missing)}.</p>')
        return "".join(parts)

    def footer(self) -> str:
        table = self._results["tables"][0]
        frame = [[*table["rows"][0]], *([*each.values()] for each in table["rows"])]
        cells = [
            "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in line)
            for line, tag in zip(frame, ["th", *["td"] * len(frame)], strict=False)
        ]
        body = "".join(f"<tr>{each}</tr>" for each in cells)
        parts = [
            f'<details><summary>All replays</summary><div class="scroll"><table>{body}</table></div>'
            "</details>"
        ]
        if (unread := self._about.unread) and unread["reasons"]:
            named = "".join(
                f"<li>line {number}: {escape(reason)}</li>" for number, reason in unread["named"]
            )
            count = sum(unread["reasons"].values())
            more = count - len(unread["named"])
            parts.append(
                f"<details open><summary>Not read: {count:,} of {unread['lines']:,} lines or calls"
                f'</summary><ul class="soft">{named}{f"<li>and {more:,} more</li>" if more else ""}'
                "</ul></details>"
            )
        made = f"{self._about.source}, by <code>python -m eval replay</code>"
        return f"<h2>Behind the figures</h2>{''.join(parts)}<footer>{made}</footer>"

    # Private, in order of use

    def _cure(self) -> tuple[float, str] | None:
        """What the application should leave out, with what is then found, if that is worth it."""
        cures = [
            (_share(one["saved"], one["total"]), LEAVE_OUT[one["mistake"]])
            for one in self._results["page"]["mistakes"]
            if one["is_needless"]
        ]
        gain = self._saved(self._ours["cell"]) + max(self._about.worth, 0.001)
        return max((each for each in cures if each[0] >= gain), default=None)

    def _notes(self, cure: tuple[float, str] | None) -> str:
        """What to do, or to know, first."""
        told, notes = self._about.told, []
        if cure:
            notes.append(f"Leave out {cure[1]}: {cure[0]:.1%} would be found.")
        if not self._results["overlap_by_k"][0]["heads"]["headed"]:
            notes.append("Assumed: the same system prompt in front of all chunks.")
        if self._about.unread and self._unit == "tokens" and not self._about.tokenizer:
            notes.append("Tokens are estimated as a quarter of the bytes (--tokenizer counts them).")
        if told.num_requests < 100:
            notes.append(f"{told.num_requests} requests are too few for a verdict.")
        return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)

    def _entry(self, cell: Results) -> Results:
        return next(one for one in self._results["cells"] if one["cell"] == cell)

    def _saved(self, cell: Results) -> float:
        return float(self._entry(cell)["saved"][self._unit]["value"])

    def _contrast(self, cell: Results) -> Results:
        """With stock SGLang."""
        metric = "token_saved_share" if self._unit == "tokens" else "saved_share"
        return next(
            one
            for one in self._results["contrasts"]
            if one["cell"] == cell
            and one["metric"] == metric
            and one["a"].startswith("retriever")
        )

    def _bars(self, ours: float, stock: float) -> list[Bar]:
        return [Bar(ours, "ours", f"{ours:.1%}"), Bar(stock, "stock", f"{stock:.1%}")]

    def _key(self, mark: str | None = None) -> str:
        marked = (
            '<span><svg width="14" height="12"><line class="mark" x1="7" x2="7" y2="12"/></svg>'
            f"{escape(mark)}</span>"
            if mark
            else ""
        )
        return (
            '<div class="key">'
            + _swatch("ours", "sglang-chunkcache")
            + _swatch("stock", self._stock_name)
            + marked
            + "</div>"
        )

    def _at(self, slot: int) -> str:
        told = self._about.told
        if not told.has_times:
            return f"{slot * told.slot:,.0f}"
        at = told.first_s + slot * told.slot
        if told.first_s < EPOCH_S:
            return _span(slot * told.slot)
        time = datetime.datetime.fromtimestamp(at, datetime.UTC)
        return f"{time:%d %b}" if told.slot >= 86_400 else f"{time:%d %b %H:%M}"


def _room(cell: Results) -> str:
    name = capacity_name(cell)
    return "With room for everything" if "unlimited" in name else f"With {name.replace('capacity', 'room')}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _swatch(style: str, text: str) -> str:
    return (
        f'<span><svg width="14" height="12"><rect class="{style}" width="14" height="12" rx="2"/></svg>'
        f"{escape(text)}</span>"
    )


def _date(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%d %b %Y %H:%M}"


def _span(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.0f} s"
