"""Sentences on a replay's results: the shares found by the stock prefix cache, by ours and at most by any reuse, and the verdict.

`worth` is the smallest gain that justifies an installation, as a share of chunk tokens. The verdict is "worth it" if the whole
interval is above it, "not worth it" if the whole interval is below, and otherwise that the trace cannot tell. An application can
drop chunks already shown with stock SGLang too, so that gain is not ours: it is reported separately, and ours is judged only
against stock with the same deduplication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.replay.grid import baseline_of, craft_of, is_stock

MIN_REQUESTS = 100
"""With fewer requests there is no verdict: an interval needs at least ten blocks of ten requests."""
SHORT_TRACE = 200
TREND = 0.02
"""A larger difference of the second half from the whole shows that the cache is still filling, or that the traffic changes."""

_CONVERSATIONS = (
    "Our server leaves out chunks already shown: if your application does not, that gain is added. "
    "Below zero, histories that left the cache cost more than was saved."
)
_NO_VERDICT = (
    "No verdict: an application can leave out chunks already shown with stock SGLang too, and that was not replayed "
    "(--dedup off shown)."
)
_LIMITS = (
    "This counts cached chunks, not time: `python -m eval serve --task trace --data FILE` measures time to first token. "
    "Another order is another prompt: `python -m eval quality permutation` measures its effect on answers.",
)
_NOTHING_TWICE = (
    "Hardly any chunk was retrieved before, so no cache can find much: there is nothing to measure further."
)

_POLICIES = ("tail", "eviction", "admission", "dedup", "window", "threshold", "k")
_WHAT = {"tokens": "chunk tokens", "chunks": "chunks"}

Results = Mapping[str, Any]


def verdict(results: Results, *, worth: float, left_out: str | None = None) -> list[str]:
    """One sentence per entry; none unless the retriever's order and ours were replayed with the same capacity.

    `left_out`: a sentence on sizes that were not replayed.
    """
    unit = "tokens" if any("tokens" in cell["saved"] for cell in results["cells"]) else "chunks"
    metric = "token_saved_share" if unit == "tokens" else "saved_share"
    contrasts = [contrast for contrast in results["contrasts"] if contrast["metric"] == metric]
    ours = [c for c in contrasts if c["cell"]["order"] == "tree" and not _is_against_craft(c)]
    against_craft = [contrast for contrast in contrasts if _is_against_craft(contrast)]
    if not ours:
        return []
    varied = [name for name in _POLICIES if len({contrast["cell"][name] for contrast in ours} - {None}) > 1]
    judged = [contrast for contrast in ours if _is_like_with_like(contrast["cell"], results["cells"])]
    is_settled = bool(judged) and all(answer(contrast, worth=worth) == "not worth it" for contrast in judged)
    is_hopeless = is_settled and _repeats_less_than(worth, results["overlap_by_k"], unit)
    return [
        *(_dropped(c, results["cells"], unit, varied) for c in contrasts if c["cell"]["order"] == "retriever"),
        *(_found(contrast, against_craft, results["cells"], unit, varied) for contrast in ours),
        *([left_out] if left_out else []),
        *(_at_most(overlap, unit) for overlap in results["overlap_by_k"]),
        *([_CONVERSATIONS] if "reduction" in results["cells"][0] else []),
        *_warnings(ours[0]["n"], results["cells"]),
        *(_answers(judged, worth, varied) if judged else [_NO_VERDICT]),
        *([_NOTHING_TWICE] if is_hopeless else _LIMITS),
    ]


def answer(contrast: Mapping[str, Any], *, worth: float) -> str:
    """worth it | not worth it | cannot be told from this trace."""
    if contrast["n"] >= MIN_REQUESTS:
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


def _is_like_with_like(cell: Mapping[str, Any], cells: Sequence[Results]) -> bool:
    baseline = baseline_of(cell, cells)
    return baseline is not None and baseline["cell"]["dedup"] == cell["dedup"]


def _is_against_craft(contrast: Mapping[str, Any]) -> bool:
    return bool(contrast["a"].split()[0] == "frequency")


def _repeats_less_than(worth: float, overlap_by_k: Sequence[Mapping[str, Any]], unit: str) -> bool:
    highs = [_seen_before(overlap, unit)["high"] for overlap in overlap_by_k]
    return all(high < worth or high == 0 for high in highs)


def _seen_before(overlap: Mapping[str, Any], unit: str) -> Mapping[str, float]:
    found: Mapping[str, float] = overlap["seen_before_tokens" if unit == "tokens" else "seen_before"]
    return found


def _dropped(contrast: Mapping[str, Any], cells: Sequence[Results], unit: str, varied: Sequence[str]) -> str:
    """A sentence on the gain of deduplication by the application, which does not need our plugin."""
    cell = contrast["cell"]
    without = baseline_of(cell, cells)
    shown = next(other for other in cells if other["cell"] == cell)
    assert without is not None
    return (
        f"{_sentence_start(cell, varied)}: {_name(cell)} saves {_value(shown, unit)} of {_WHAT[unit]}, "
        f"{_value(without, unit)} without that: deduplication alone gains {_points(contrast)}."
    )


def _found(
    contrast: Mapping[str, Any],
    against_craft: Sequence[Mapping[str, Any]],
    cells: Sequence[Results],
    unit: str,
    varied: Sequence[str],
) -> str:
    cell = contrast["cell"]
    stock = baseline_of(cell, cells)
    ours = next(other for other in cells if other["cell"] == cell)
    craft = craft_of(cell, cells)
    assert stock is not None
    also = f", CRAFT's order {_value(craft, unit)}" if craft else ""
    to_craft = "".join(f"; to CRAFT's order {_points(one)}" for one in against_craft if one["cell"] == cell)
    halves = [f"{other['saved_in_second_half'][unit]:.1%}" for other in (stock, ours)]
    name, verb = _name(stock["cell"]), "saves" if "reduction" in ours else "finds"
    return (
        f"{_sentence_start(cell, varied)}: {name} {verb} {_value(stock, unit)} of {_WHAT[unit]}{also}, "
        f"ours {_value(ours, unit)}{_of_conversations(ours, unit)}; difference {_points(contrast)}{to_craft}. "
        f"Second half alone: {halves[0]} and {halves[1]}."
    )


def _name(cell: Mapping[str, Any]) -> str:
    name = "stock SGLang" if is_stock(cell) else "the retriever's order"
    return f"{name} with an application that leaves out chunks already shown" if cell["dedup"] == "shown" else name


def _points(contrast: Mapping[str, Any]) -> str:
    low, value, high = (f"{100 * contrast[side]:+.1f}" for side in ("low", "value", "high"))
    return f"{value} points, 95% interval [{low}, {high}]"


def _value(cell: Results, unit: str) -> str:
    return f"{cell['saved'][unit]['value']:.1%}"


def _of_conversations(cell: Results, unit: str) -> str:
    """With conversations: the shares found by the order, saved by deduplication, and lost with histories."""
    if "reduction" not in cell:
        return ""
    found = {name: f"{share['value']:.1%}" for name, share in cell["reduction"][unit].items()}
    return (
        f" ({found['general']} as prefixes, {found['conversation_scoped']} left out as shown before, "
        f"{found['history_lost']} computed again in histories that left the cache)"
    )


def _at_most(overlap: Mapping[str, Any], unit: str) -> str:
    seen = _seen_before(overlap, unit)["value"]
    first = f" of the first {overlap['k']} of each request" if overlap["k"] else ""
    return f"Reuse at any position, with unlimited capacity, could find at most {seen:.1%}{first}."


def _where(cell: Mapping[str, Any], varied: Sequence[str]) -> str:
    """The capacity, and the policies in which the replays differ."""
    return ", ".join([capacity_name(cell), *(f"{name} {cell[name]}" for name in varied if cell[name] is not None)])


def _sentence_start(cell: Mapping[str, Any], varied: Sequence[str]) -> str:
    where = _where(cell, varied)
    return where[0].upper() + where[1:]


def _answers(judged: Sequence[Mapping[str, Any]], worth: float, varied: Sequence[str]) -> list[str]:
    """The verdict, grouping replays with the same one."""
    replays: dict[str, list[str]] = {}
    for contrast in judged:
        replays.setdefault(answer(contrast, worth=worth), []).append(_where(contrast["cell"], varied))
    said = [f"{text.upper()} with {'; with '.join(where)}" for text, where in replays.items()]
    num_requests = judged[0]["n"]
    few = f" on only {num_requests} requests" if num_requests < SHORT_TRACE else ""
    bound = f"{100 * worth:.1f} points"
    stock = "stock with the same deduplication" if judged[0]["cell"]["dedup"] else "stock"
    return [
        f"Verdict{few}: {'. '.join(said)}.",
        f"Worth it: the whole interval is at least {bound} above {stock}; not worth it: all of it is below {bound} (--worth).",
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
