"""Samples of a replay -> shares with intervals and contrasts with the retriever's order: a pure
function.

Shares are sums over the measured requests. Intervals come from a moving-block bootstrap over
consecutive requests: they show how much a figure depends on the choice of requests. They do not
include other histories of the cache, since every cell is replayed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from eval.replay import days
from eval.replay.bootstrap import moving_block_share
from eval.replay.cells import CHUNK_COUNTS, HOST_COUNTS, TOKEN_COUNTS
from eval.replay.fused_cell import fused_entry, fused_table
from eval.replay.grid import baseline_of, craft_of, policy_name, without_host
from eval.replay.overlap import Recurrence
from eval.replay.ranks import ranks_table
from eval.replay.verdict import capacity_name, verdict

Sample = Mapping[str, Any]
MIN_BLOCKS = 10
"""With fewer there is no interval."""
METRICS = {"chunks": "saved_share", "tokens": "token_saved_share"}
COUNTS = {"chunks": CHUNK_COUNTS[1:], "tokens": TOKEN_COUNTS[1:]}
"""Found cached, left out as shown before, computed again in histories."""
Share = Callable[..., dict[str, float]]
"""(sample, counts, unit) -> the counts' share of the unit with its interval."""
_HOST_NOTE = (
    "From host: of all, part of those found. Offloaded, loaded: tokens copied to host memory and"
    " back (chunks, if the trace has no lengths), left host: chunks; warm-up too."
)


def summarize(spec: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """`results` of a replay's record, from the samples taken so far.

    Args:
        spec: `block` requests form a block of the bootstrap; `worth` is for the verdict.
        samples: one per cell, and one with `overlap` per k, as eval/replay/cells.py makes them.
    """
    share = partial(_share, spec["block"])
    cells = [sample for sample in samples if "cell" in sample]
    pairs = [
        (find(one["cell"], cells), one)
        for find in (baseline_of, craft_of, without_host)
        for one in cells
    ]
    overlap = [_overlap(sample, share) for sample in samples if "overlap" in sample]
    results: dict[str, Any] = {
        "cells": [_cell(sample, share) for sample in cells],
        "overlap": overlap[0] if overlap else None,
        "overlap_by_k": overlap,
        "contrasts": [
            one
            for other, cell in pairs
            if other is not None
            for one in _contrasts(other, cell, share)
        ],
    }
    fused = [
        fused_entry(sample, results["cells"], share) for sample in samples if "fused" in sample
    ]
    results["tables"] = [_table(results)] if cells else []
    if ranked := [cell for cell in results["cells"] if "ranks" in cell]:
        results["tables"].append(ranks_table(ranked, _settings(results["cells"])))
    if cells and (density := (results["overlap"] or {}).get("density")):
        results["tables"].append(_density_table(density))
    if fused:
        results |= {"fused": fused, "tables": [*results["tables"], fused_table(fused)]}
    if drawn := [sample for sample in samples if "breakdown" in sample]:
        drawn.sort(key=lambda sample: sample["cell"]["order"] == "tree")  # ours is the second
        results["page"] = {
            "replays": [{"cell": one["cell"], **one["breakdown"]} for one in drawn],
            "mistakes": [sample for sample in samples if "mistake" in sample],
        }
    if spec.get("days") and cells:
        measured = [sample for sample in samples if "cell" in sample or "fused" in sample]
        results["days"] = days.windows(measured, share)
        results["tables"].append(days.table(results["days"], _settings(results["cells"])))
    return results | {"verdict": verdict(results, worth=spec["worth"])}


def _table(results: Mapping[str, Any]) -> dict[str, Any]:
    """One row per cell: the settings that differ between cells, then the shares in percent."""
    cells = results["cells"]
    settings = _settings(cells)
    has_host = any("host" in one for one in cells)
    rows = []
    for one in cells:
        row = settings(one["cell"])
        for unit in ("chunk", "token"):
            if share := one[f"{unit}_hit_rate"]:
                row[f"{unit}s found"] = f"{share['value']:.1%}"
                # Columns are keys, so the second interval needs a name that only looks the same.
                row["95%" if unit == "chunk" else "95% "] = (
                    f"{100 * share['low']:.1f}-{100 * share['high']:.1f}"
                )
                if has_host:
                    row[f"{unit}s from host"] = (
                        f"{one['tiers'][f'{unit}s']['host']['value']:.1%}" if "host" in one else "-"
                    )
        if one["cell"]["page_size"] > 1 or "page_size" in row:
            row["slots held"] = f"{one['peak_tokens']:,}"
        for name in ("offloaded_tokens", "loaded_tokens", "evicted") if has_host else ():
            column = "left host" if name == "evicted" else name.removesuffix("_tokens")
            row[column] = f"{one['host'][name]:,}" if "host" in one else "-"
        for part in ("conversation_scoped", "history_lost") if "reduction" in one else ():
            row[part.replace("_", " ")] = f"{one['reduction']['chunks'][part]['value']:.1%}"
        rows.append(row)
    notes = [_HOST_NOTE] if has_host else []
    notes += [
        _overlap_note(overlap) for overlap in results["overlap_by_k"] if overlap["estimated_from"]
    ]
    return {"title": "Shares found cached", "rows": rows, "note": " ".join(notes)}


def _density_table(density: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    rows = [
        {
            "same first chunks": f"{row['k']}",
            "earlier requests, mean": f"{row['earlier']:.2f}",
            "requests with any": f"{row['found']:.1%}",
        }
        for row in density
    ]
    note = (
        f"How many of the {Recurrence.WINDOW:,} requests before one begin with the same chunks in"
        " the same order, so that stock SGLang finds these."
    )
    return {"title": "How often the first chunks recur", "rows": rows, "note": note}


def _settings(cells: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """What names a cell in a table's row: the settings in which these differ."""
    differs = [
        name
        for name in cells[0]["cell"]
        if len({cell["cell"][name] for cell in cells} - {None}) > 1
    ]
    # `capacity_name` tells either capacity in one column.
    shown = [name for name in differs if not name.startswith("capacity")]
    return lambda cell: {
        "capacity": capacity_name(cell),
        **{name: str(cell[name] or "-") for name in shown},
    }


def _overlap_note(overlap: Mapping[str, Any]) -> str:
    of_first = f" of the first {overlap['k']} chunks" if overlap["k"] else ""
    return (
        f"Overlap{of_first}: prefix {overlap['prefix']:.3f}, total {overlap['total']:.3f},"
        f" estimated from {overlap['estimated_from']:,} requests, each compared with some 10,000 to"
        " 20,000 before it."
    )


def _cell(sample: Sample, share: Share) -> dict[str, Any]:
    """An entry of `results["cells"]`."""
    # Tokens are None unless every request has lengths.
    saved = {unit: _saved(sample, unit) for unit in METRICS if sample[unit]}
    figures: dict[str, Any] = {
        "cell": sample["cell"],
        "chunk_hit_rate": share(sample, sample["hits"], "chunks"),
        "token_hit_rate": share(sample, sample["token_hits"], "tokens")
        if sample["tokens"]
        else None,
        "saved": {unit: share(sample, counts, unit) for unit, counts in saved.items()},
        "saved_in_second_half": {
            unit: _second_half(counts, sample[unit]) for unit, counts in saved.items()
        },
    }
    if sample["cell"]["dedup"] is not None:
        # CRAFT fig. 12's two parts, and the chunks of histories that left the cache.
        names = ("general", "conversation_scoped", "history_lost")
        figures["reduction"] = {
            unit: {
                name: share(sample, sample[counts], unit)
                for name, counts in zip(names, COUNTS[unit], strict=True)
            }
            for unit in saved
        }
    if "host" in sample:
        figures["tiers"] = {unit: _tiers(sample, unit, share) for unit in saved}
        figures["host"] = sample["host"]
    if "ranks" in sample:
        figures["ranks"] = sample["ranks"]
    kept = (
        "num_requests",
        "num_evicted",
        "peak_nodes",
        "peak_tokens",
        "order_us_p50",
        "order_us_p99",
    )
    return figures | {"num_chunks": sum(sample["chunks"])} | {name: sample[name] for name in kept}


def _tiers(sample: Sample, unit: str, share: Share) -> dict[str, Any]:
    """Shares of the unit found in each tier."""
    hits, host = sample[COUNTS[unit][0]], sample[HOST_COUNTS[unit]]
    device = [all_of - of_host for all_of, of_host in zip(hits, host, strict=True)]
    return {"device": share(sample, device, unit), "host": share(sample, host, unit)}


def _contrasts(baseline: Sample, other: Sample, share: Share) -> Iterator[dict[str, Any]]:
    """The difference of saved shares, `other` less `baseline`, of chunks and, with lengths,
    of tokens."""
    for unit, metric in METRICS.items():
        if other[unit]:
            # Both have replayed the same requests, so a bin's difference is drawn as one.
            differences = [
                b - a for a, b in zip(_saved(baseline, unit), _saved(other, unit), strict=True)
            ]
            yield {
                "cell": other["cell"],
                "metric": metric,
                "a": policy_name(baseline["cell"]),
                "b": policy_name(other["cell"]),
                "statistic": "difference of shares",
                **share(other, differences, unit),
                "n": other["num_requests"],
                # The bootstrap of runs gives an interval and no test.
                "p": None,
            }


def _overlap(sample: Sample, share: Share) -> dict[str, Any]:
    """CRAFT's prefix and total of the whole trace, and the share of chunks (tokens) retrieved
    before."""
    seen = {unit: share(sample, sample[f"seen_{unit}"], unit) for unit in METRICS if sample[unit]}
    figures = {"seen_before": seen["chunks"], "seen_before_tokens": seen.get("tokens")}
    return {"k": sample["k"], "heads": sample["heads"], **sample["overlap"], **figures}


def _share(block: int, sample: Sample, parts: Sequence[float], unit: str) -> dict[str, float]:
    # `block` counts requests, while an element is a bin of several.
    value, low, high = moving_block_share(parts, sample[unit], block=max(1, block // sample["bin"]))
    return {"value": value, "low": low, "high": high}


def _second_half(parts: Sequence[float], wholes: Sequence[float]) -> float:
    middle = len(wholes) // 2
    return sum(parts[middle:]) / max(1, sum(wholes[middle:]))


def _saved(sample: Sample, unit: str) -> list[int]:
    """Per bin: prefix hits and chunks left out as already shown,
    less chunks that are computed again."""
    counts = zip(*(sample[name] for name in COUNTS[unit]), strict=True)
    return [hits + dropped - lost for hits, dropped, lost in counts]
