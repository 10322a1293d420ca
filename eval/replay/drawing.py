"""SVG that fits any width: lengths along x are percentages, texts keep their size. Numbers and
words in, elements out; every string is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

BAR, GAP = 14, 3
PLOT, STRIP, TEXT = 190, 44, 17
"""Heights of a line chart's parts, in pixels."""
INSIDE = 0.85
"""From this share on a bar's number is in the bar."""
TOPS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


class Bar(NamedTuple):
    """`share` in the colour of `style`, and up to `of`, if larger, in a lighter one."""

    share: float
    style: str
    says: str
    of: float = 0.0


def row(label: str, note: str, bars: Sequence[Bar], *, mark: float | None = None) -> str:
    """A name with its bars, from 0 to 100%, and a line at `mark`."""
    height = len(bars) * (BAR + GAP)
    drawn, texts = [], []
    for index, bar in enumerate(bars):
        y = index * (BAR + GAP)
        drawn += [_rect("track", y, 1), _rect("lost", y, bar.of), _rect(bar.style, y, bar.share)]
        end = max(bar.share, bar.of)
        style, shift = ("value", 6) if end < INSIDE else ("inside", -6)
        texts.append(
            f'<text class="{style}" x="{end:.2%}" dx="{shift}" y="{y + BAR - 3}">'
            f"{escape(bar.says)}</text>"
        )
    if mark is not None:
        drawn.append(f'<line class="mark" x1="{mark:.2%}" x2="{mark:.2%}" y1="0" y2="{height}"/>')
    drawn += texts
    said = f"{label}: {'; '.join(bar.says for bar in bars)} {note}"
    svg = (
        f'<svg class="bars" width="100%" height="{height}" role="img" aria-label="{escape(said)}">'
        f"{''.join(drawn)}</svg>"
        if bars
        else ""
    )
    return (
        f'<div class="row"><div class="label">{escape(label)}'
        f' <span class="soft">{escape(note)}</span></div>{svg}</div>'
    )


def axis() -> str:
    """Below rows."""
    ticks = [(0, "0%", "start"), (25, "25%", "middle"), (50, "50%", "middle")]
    ticks += [(75, "75%", "middle"), (100, "100%", "end")]
    texts = (
        f'<text x="{at}%" y="12" text-anchor="{anchor}">{text}</text>' for at, text, anchor in ticks
    )
    return f'<svg class="axis" width="100%" height="16" aria-hidden="true">{"".join(texts)}</svg>'


class Point(NamedTuple):
    """A slot: its place, a share for each line, how many requests, and what a pointer reads."""

    number: int
    shares: tuple[float, ...]
    requests: int
    says: str


def lines(
    points: Sequence[Point],
    styles: Sequence[str],
    ticks: Iterable[tuple[float, str]],
    *,
    label: str,
) -> str:
    """Shares along slots, above how many requests each has. ticks: (share of the width, text)."""
    width = points[-1].number + 1
    most = max(max(point.shares) for point in points)
    top = next((each for each in TOPS if each >= most), 1.0)
    busiest = max(point.requests for point in points)
    drawn = [
        f'<line class="grid" x1="0" x2="100%" y1="{y:.0f}" y2="{y:.0f}"/>'
        f'<text x="0" dx="-6" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>'
        for share in (0, top / 2, top)
        for y in [TEXT + PLOT * (1 - share / top)]
    ]
    plots = "".join(
        f'<path class="{style}" d="{_path(points, index, top)}"/>'
        for index, style in enumerate(styles)
    )
    drawn.append(
        f'<svg x="0" y="{TEXT}" width="100%" height="{PLOT}" viewBox="0 0 {width} 1000"'
        f' preserveAspectRatio="none" class="plot">{plots}</svg>'
    )
    base = 2 * TEXT + PLOT + STRIP
    for point in points:
        tall = STRIP * point.requests / busiest
        x, wide = f"{point.number / width:.2%}", f"{0.85 / width:.2%}"
        drawn.append(
            f'<g><title>{escape(point.says)}</title><rect class="count" x="{x}" width="{wide}"'
            f' y="{base - tall:.1f}" height="{tall:.1f}"/><rect class="touch" x="{x}"'
            f' width="{1 / width:.2%}" y="{TEXT}" height="{base - TEXT}"/></g>'
        )
    for at, text in ticks:
        anchor = "start" if at < 0.05 else "end" if at > 0.95 else "middle"
        drawn.append(
            f'<text x="{at:.2%}" y="{base + TEXT - 3}" text-anchor="{anchor}">{escape(text)}</text>'
        )
    return (
        f'<svg class="lines" width="100%" height="{base + TEXT}" role="img"'
        f' aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    )


# Private, in order of use


def _rect(style: str, y: float, width: float) -> str:
    wide = min(1.0, max(0.0, width))
    return f'<rect class="{style}" y="{y}" width="{wide:.2%}" height="{BAR}" rx="2"/>'


def _path(points: Sequence[Point], index: int, top: float) -> str:
    """Through the slots' middles; a slot without requests interrupts it."""
    steps, before = [], None
    for point in points:
        step = "L" if point.number - 1 == before else "M"
        y = 1000 * (1 - point.shares[index] / top)
        x = point.number + 0.5
        # a slot alone is a short line
        alone = f"M{x - 0.4:g} {y:.0f}H{x:g}" if step == "M" else ""
        steps.append(alone or f"L{x:g} {y:.0f}")
        before = point.number
    return "".join(steps)
