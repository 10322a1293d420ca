"""What a replay means, in sentences: found by the stock prefix cache, by ours, by any reuse at most; is it worth it?

`worth` is the gain below which nobody should bother, as a share of chunk tokens. The verdict is that ours is worth it where the
whole interval is above it, not worth it where the whole interval is below, and otherwise that the trace cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.replay.grid import is_stock, stock_of

MIN_REQUESTS = 100
"""Below, no verdict: ten blocks of ten requests are the least that an interval is made from."""
SHORT_TRACE = 200
TREND = 0.02
"""A second half that differs more from the whole shows that the cache is still filling, or that the traffic changes."""

_CONVERSATIONS = (
    "What a conversation has shown can also be left out by an application, with stock SGLang. Below zero, histories that left "
    "the cache cost more than was saved."
)
_LIMITS = (
    "This counts cached chunks, not time: `python -m eval serve --task trace --data FILE` measures time to first token. "
    "Another order is another prompt: `python -m eval quality permutation` measures what that does to answers.",
)

_POLICIES = ("tail", "eviction", "admission", "dedup", "window", "threshold", "k")
_WHAT = {"tokens": "chunk tokens", "chunks": "chunks"}

Results = Mapping[str, Any]


def verdict(results: Results, *, worth: float) -> list[str]:
    """Sentences, one an entry; none unless the retriever's order and ours were replayed with the same room."""
    unit = "tokens" if any("tokens" in cell["saved"] for cell in results["cells"]) else "chunks"
    metric = "token_hit_share" if unit == "tokens" else "hit_share"
    ours = [c for c in results["contrasts"] if c["metric"] == metric and c["b"] == "tree"]
    if not ours:
        return []
    varied = [name for name in _POLICIES if len({contrast["cell"][name] for contrast in ours} - {None}) > 1]
    return [
        *(_found(contrast, results["cells"], unit, varied) for contrast in ours),
        *(_at_most(overlap, unit) for overlap in results["overlap_by_k"]),
        *([_CONVERSATIONS] if "reduction" in results["cells"][0] else []),
        *_warnings(ours[0]["n"], results["cells"]),
        *_answers(ours, worth, varied),
        *_LIMITS,
    ]


def answer(contrast: Mapping[str, Any], *, worth: float) -> str:
    """worth it | not worth it | cannot be told from this trace."""
    if contrast["n"] >= MIN_REQUESTS:
        if contrast["low"] >= worth and contrast["low"] > 0:
            return "worth it"
        if contrast["high"] < worth or contrast["high"] <= 0:
            return "not worth it"
    return "cannot be told from this trace"


def room(cell: Mapping[str, Any]) -> str:
    """How much of the chunks the cache holds."""
    if cell["capacity_tokens"]:
        return f"room for {cell['capacity_tokens']:,} tokens"
    return f"room for {cell['capacity']:,} chunks" if cell["capacity"] else "no limit of room"


def _found(contrast: Mapping[str, Any], cells: Sequence[Results], unit: str, varied: Sequence[str]) -> str:
    cell = contrast["cell"]
    stock = stock_of(cell, cells)
    ours = next(other for other in cells if other["cell"] == cell)
    craft = [c for c in cells if c["cell"]["order"] == "frequency" and stock_of(c["cell"], cells) is stock]
    assert stock is not None
    name = "stock SGLang" if is_stock(stock["cell"]) else "the retriever's order"
    also = f", CRAFT's order {_value(craft[0], unit)}" if len(craft) == 1 else ""
    low, value, high = (f"{100 * contrast[side]:+.1f}" for side in ("low", "value", "high"))
    halves = [f"{other['saved_in_second_half'][unit]:.1%}" for other in (stock, ours)]
    where, verb = _where(cell, varied), "saves" if "reduction" in ours else "finds"
    return (
        f"{where[0].upper()}{where[1:]}: {name} {verb} {_value(stock, unit)} of {_WHAT[unit]}{also}, "
        f"ours {_value(ours, unit)}{_of_conversations(ours, unit)}; difference {value} points, 95% interval [{low}, {high}]. "
        f"Second half alone: {halves[0]} and {halves[1]}."
    )


def _value(cell: Results, unit: str) -> str:
    return f"{cell['saved'][unit]['value']:.1%}"


def _of_conversations(cell: Results, unit: str) -> str:
    """Where there are conversations: the part that an application could save itself, and what histories cost."""
    if "reduction" not in cell:
        return ""
    found = {name: f"{share['value']:.1%}" for name, share in cell["reduction"][unit].items()}
    return (
        f" ({found['general']} as prefixes, {found['conversation_scoped']} left out as shown before, "
        f"{found['history_lost']} computed again in histories that left the cache)"
    )


def _at_most(overlap: Mapping[str, Any], unit: str) -> str:
    seen = overlap["seen_before_tokens" if unit == "tokens" else "seen_before"]["value"]
    first = f" of the first {overlap['k']} of each request" if overlap["k"] else ""
    return f"Reuse at any position, with no limit of room, could find at most {seen:.1%}{first}."


def _where(cell: Mapping[str, Any], varied: Sequence[str]) -> str:
    """The room, and of the policies those in which the replays differ."""
    return ", ".join([room(cell), *(f"{name} {cell[name]}" for name in varied if cell[name] is not None)])


def _answers(ours: Sequence[Mapping[str, Any]], worth: float, varied: Sequence[str]) -> list[str]:
    """The verdict, replays with the same one together."""
    replays: dict[str, list[str]] = {}
    for contrast in ours:
        replays.setdefault(answer(contrast, worth=worth), []).append(_where(contrast["cell"], varied))
    said = [f"{text.upper()} with {'; with '.join(where)}" for text, where in replays.items()]
    bound = f"{100 * worth:.1f} points"
    return [
        f"Verdict: {'. '.join(said)}.",
        f"Worth it: the whole interval is at least {bound} above stock; not worth it: all of it is below {bound} (--worth).",
    ]


def _warnings(num_requests: int, cells: Sequence[Results]) -> list[str]:
    warnings = []
    if num_requests < SHORT_TRACE:
        warnings.append(
            f"Warning: {num_requests} requests are few; below {MIN_REQUESTS} nothing is concluded, and a cache that starts "
            "empty finds less than yours would later."
        )
    elif any(
        abs(cell["saved_in_second_half"][unit] - share["value"]) > TREND
        for cell in cells
        for unit, share in cell["saved"].items()
    ):
        warnings.append(
            "The shares change along the trace (the cache starts empty): --warm-up N leaves the first N out."
        )
    return warnings
