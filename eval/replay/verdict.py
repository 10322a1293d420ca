"""Sentences on a replay's results: the shares found by the stock prefix cache, by ours and at most
by any reuse, and the verdict.

`worth` is the smallest gain that justifies an installation, as a share of chunk tokens. The verdict
is "worth it" if the whole interval is above it, "not worth it" if the whole interval is below, and
otherwise that the trace cannot tell. An application can drop chunks already shown with stock SGLang
too, so that gain is not ours: it is reported separately, and ours is judged only against stock with
the same deduplication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.replay.grid import baseline_of, craft_of, is_stock

MIN_REQUESTS = 100
"""With fewer requests there is no verdict:
an interval needs at least ten blocks of ten requests."""
HEADS = ("requests", "headed", "heads")
"""Of a trace: requests, those that name a head, different heads."""
SHORT_TRACE = 200
TREND = 0.02
"""A larger difference of the second half from the whole shows that the cache is still filling,
or that the traffic changes."""

_CONVERSATIONS = (
    "Our server leaves out chunks already shown: if your application does not, that gain is added. "
    "Below zero, histories that left the cache cost more than was saved."
)
_NO_VERDICT = (
    "No verdict: an application can leave out chunks already shown with stock SGLang too, and that"
    " was not replayed (--dedup off shown)."
)
_LIMITS = (
    "This counts cached chunks, not time: `python -m eval serve --task trace --data FILE` measures"
    " time to first token. Another order is another prompt: `python -m eval quality permutation`"
    " measures its effect on answers."
)
_TREND = (
    "The shares change along the trace (the cache starts empty): --warm-up N leaves the first N"
    " out."
)

_POLICIES = (
    "tail",
    "eviction",
    "admission",
    "dedup",
    "window",
    "threshold",
    "k",
    "host",
    "host_admission",
    "page_size",
    "padded",
)
_WHAT = {"tokens": "chunk tokens", "chunks": "chunks"}

Results = Mapping[str, Any]


def verdict(results: Results, *, worth: float) -> list[str]:
    """One sentence per entry; none unless the retriever's order and ours were replayed with the
    same capacity."""
    return _Verdict(results, worth).sentences()


def answer(contrast: Mapping[str, Any], *, worth: float) -> str:
    """worth it | not worth it | cannot be told from this trace."""
    if contrast["n"] >= MIN_REQUESTS:
        # With `--worth 0` an interval that begins at 0 is no gain.
        if contrast["low"] >= worth and contrast["low"] > 0:
            return "worth it"
        if contrast["high"] < worth or contrast["high"] <= 0:
            return "not worth it"
    return "cannot be told from this trace"


def capacity_name(cell: Mapping[str, Any]) -> str:
    """The cell's capacity for people."""
    if cell["capacity_tokens"]:
        return f"capacity for {cell['capacity_tokens']:,} tokens"
    return f"capacity for {cell['capacity']:,} chunks" if cell["capacity"] else "unlimited capacity"


def replay_name(cell: Mapping[str, Any]) -> str:
    """Of a replay in the retriever's order, for people."""
    name = "stock SGLang" if is_stock(cell) else "the retriever's order"
    return (
        f"{name} with an application that leaves out chunks already shown"
        if cell["dedup"] == "shown"
        else name
    )


class _Verdict:
    def __init__(self, results: Results, worth: float) -> None:
        self._cells: Sequence[Results] = results["cells"]
        self._overlaps: Sequence[Results] = results["overlap_by_k"]
        self._worth = worth
        self._unit = (
            "tokens" if any("tokens" in cell["saved"] for cell in self._cells) else "chunks"
        )
        metric = "token_saved_share" if self._unit == "tokens" else "saved_share"
        contrasts = [one for one in results["contrasts"] if one["metric"] == metric]
        # `policy_name` ends in "host" for a cell with a host tier.
        self._of_host = [one for one in contrasts if one["b"] == f"{one['a']} host"]
        contrasts = [one for one in contrasts if one not in self._of_host]
        # The name may go on with deduplication and host.
        self._to_craft = [one for one in contrasts if one["a"].split()[0] == "frequency"]
        self._ours = [
            one for one in contrasts if one["cell"]["order"] == "tree" and one not in self._to_craft
        ]
        # The retriever's order is compared with itself without deduplication.
        self._dropping = [one for one in contrasts if one["cell"]["order"] == "retriever"]
        # None is no value: the setting has no effect in that cell.
        self._varied = [
            name
            for name in _POLICIES
            if len({one["cell"].get(name) for one in self._ours} - {None}) > 1
        ]

    def sentences(self) -> list[str]:
        if not self._ours:
            return [*map(self._hosted, self._of_host)]
        # `baseline_of` falls back on stock with another deduplication.
        judged = [
            one
            for one in self._ours
            if self._stock(one["cell"])["cell"]["dedup"] == one["cell"]["dedup"]
        ]
        return [
            *map(self._dropped, self._dropping),
            *map(self._found, self._ours),
            *map(self._hosted, self._of_host),
            *map(self._at_most, self._overlaps),
            # A trace has conversations for all its cells, or for none.
            *([_CONVERSATIONS] if "reduction" in self._cells[0] else []),
            *(
                # Halves of a short trace differ by chance.
                [_TREND]
                if self._ours[0]["n"] >= SHORT_TRACE and any(map(_has_trend, self._cells))
                else []
            ),
            self._assumed(),
            *(self._answers(judged) if judged else [_NO_VERDICT]),
            _LIMITS,
        ]

    def _dropped(self, contrast: Results) -> str:
        """A sentence on the gain of deduplication by the application,
        which does not need our plugin."""
        cell = contrast["cell"]
        return (
            f"{self._start(cell)}: {replay_name(cell)} saves {self._value(self._of(cell))} of"
            f" {_WHAT[self._unit]}, {self._value(self._stock(cell))} without that: deduplication"
            f" alone gains {_points(contrast)}."
        )

    def _found(self, contrast: Results) -> str:
        cell = contrast["cell"]
        stock, ours, craft = self._stock(cell), self._of(cell), craft_of(cell, self._cells)
        also = f", CRAFT's order {self._value(craft)}" if craft else ""
        to_craft = "".join(
            f"; to CRAFT's order {_points(one)}" for one in self._to_craft if one["cell"] == cell
        )
        halves = [f"{other['saved_in_second_half'][self._unit]:.1%}" for other in (stock, ours)]
        verb = "saves" if "reduction" in ours else "finds"
        return (
            f"{self._start(cell)}: {replay_name(stock['cell'])} {verb} {self._value(stock)} of"
            f" {_WHAT[self._unit]}{also}, ours {self._value(ours)}; difference"
            f" {_points(contrast)}{to_craft}. Second half alone: {halves[0]} and {halves[1]}."
        )

    def _hosted(self, contrast: Results) -> str:
        cell = contrast["cell"]
        where = (
            f"{cell['order']} with {capacity_name(cell)}, host {cell['host']:,},"
            f" {cell['host_admission']}"
        )
        found = self._of(cell)["tiers"][self._unit]
        return (
            f"{where[0].upper()}{where[1:]}: {found['device']['value']:.1%} of {_WHAT[self._unit]}"
            f" found on the device, {found['host']['value']:.1%} in host memory; to the device"
            f" alone {_points(contrast)}."
        )

    def _at_most(self, overlap: Results) -> str:
        first = f" of the first {overlap['k']} of each request" if overlap["k"] else ""
        seen = overlap["seen_before_tokens" if self._unit == "tokens" else "seen_before"]
        return (
            "Reuse at any position, with unlimited capacity, could find at most"
            f" {seen['value']:.1%}{first}."
        )

    def _assumed(self) -> str:
        """Which text stands in front of the chunks: exact reuse depends on it."""
        num_requests, num_headed, num_heads = (self._overlaps[0]["heads"][name] for name in HEADS)
        if not num_headed:
            return (
                "Assumed: one system prompt for all requests, since no line names a `head`. Where a"
                " time or a user's name stands before the chunks, every request has another head"
                " and finds nothing."
            )
        others = (
            f"; {num_requests - num_headed:,} requests name none and share one"
            if num_headed < num_requests
            else ""
        )
        return (
            f"Heads: {num_heads:,} different ones in {num_headed:,} requests{others}. "
            "Chunks behind different heads share nothing."
        )

    def _answers(self, judged: Sequence[Results]) -> list[str]:
        """The verdict, grouping replays with the same one."""
        replays: dict[str, list[str]] = {}
        for one in judged:
            replays.setdefault(answer(one, worth=self._worth), []).append(self._where(one["cell"]))
        said = [f"{text.upper()} with {'; with '.join(where)}" for text, where in replays.items()]
        num_requests, bound = judged[0]["n"], f"{100 * self._worth:.1f} points"
        few = f" on only {num_requests} requests" if num_requests < SHORT_TRACE else ""
        stock = "stock with the same deduplication" if judged[0]["cell"]["dedup"] else "stock"
        return [
            f"Verdict{few}: {'. '.join(said)}.",
            f"Worth it: the whole interval is at least {bound} above {stock}; "
            f"not worth it: all of it is below {bound} (--worth).",
        ]

    def _of(self, cell: Results) -> Results:
        return next(other for other in self._cells if other["cell"] == cell)

    def _stock(self, cell: Results) -> Results:
        stock = baseline_of(cell, self._cells)
        # Cells of contrasts have a baseline.
        assert stock is not None
        return stock

    def _value(self, cell: Results) -> str:
        return f"{cell['saved'][self._unit]['value']:.1%}"

    def _where(self, cell: Results) -> str:
        """The capacity, and the policies in which the replays differ."""
        policies = [
            f"{name.replace('_', ' ')} {cell[name]}"
            for name in self._varied
            if cell[name] is not None
        ]
        return ", ".join([capacity_name(cell), *policies])

    def _start(self, cell: Results) -> str:
        where = self._where(cell)
        return where[0].upper() + where[1:]


def _points(contrast: Mapping[str, Any]) -> str:
    low, value, high = (f"{100 * contrast[side]:+.1f}" for side in ("low", "value", "high"))
    return f"{value} points, 95% interval [{low}, {high}]"


def _has_trend(cell: Results) -> bool:
    halves = cell["saved_in_second_half"]
    return any(abs(halves[unit] - share["value"]) > TREND for unit, share in cell["saved"].items())
