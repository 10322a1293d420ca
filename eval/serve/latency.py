"""Results of a load's samples: times, throughput, reuse and errors of each arm in each cell. Pure
functions of the samples.

Throughput is over the time under load: of each block, from its first request's due time to its last
answer. Warm-up is left out; failed requests are counted as errors and have no times. A block's
bystanders are one sample, with `gaps_s`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from eval.contrast import Contrast, contrast_arms, has_enough, sentences
from eval.metrics import METRICS
from eval.outcome import interval
from eval.recorded import cell_name, grouped
from eval.serve.peaks import over_blocks
from eval.serve.plan import SERVER
from eval.stats import quantile, rates, summary

Sample = Mapping[str, Any]
Row = dict[str, Any]
FATES = ("exact", "relocated", "recomputed", "computed")
TIMES = ("ttft_s", "e2e_s")
CONTRASTED = (*TIMES, "cached_share", "prefill_tokens")
RATES = ("requests_per_s", "output_tokens_per_s")
BYSTANDERS = ("itl_bystander_p50_s", "itl_bystander_p99_s")
NOTE = (
    "seconds; others' itl: between tokens of requests that only decode; missed: planned hits that"
    " did not come true; in use: by requests, the most of a block, means"
)


def summarize(
    samples: Sequence[Sample], *, facts: Mapping[str, Any], against: str
) -> dict[str, Any]:
    """`results` of a serve run.

    Args:
        samples: of `eval.serve.runner.measure`.
        facts: `servers`, `skipped`, `adapters`, `overhead`, `preprocessed`, ..., of `measure`.
        against: the arm to compare all others with, cell by cell.
    """
    samples = [_of_any_server(sample) for sample in samples]
    by_arm = _grouped(samples, lambda sample: sample["arm"])
    rows = cell_rows(samples)
    for row in rows:
        row["overhead_share"] = (
            (facts.get("overhead") or {}).get(lane_name(row["cell"], row["arm"]), {}).get("share")
        )
    contrasts = [
        contrast
        for arm in by_arm
        for other in _references(by_arm, arm, against)
        for contrast in _contrasts(
            by_arm[other], by_arm[arm], a=other, b=arm, full=other == against
        )
    ]
    cfo = [*filter(None, (_cfo_row(arm, taken) for arm, taken in by_arm.items()))]
    return {
        "cells": rows,
        "contrasts": contrasts,
        "verdict": sentences(contrasts),
        "tables": [*tables(rows, contrasts), *([_cfo_table(cfo)] if cfo else [])],
        "cfo": cfo,
        "num_warm_up": sum(bool(sample["warm_up"]) for sample in _requests(samples)),
        **facts,
    }


def lane_name(cell: Mapping[str, Any], arm: str) -> str:
    """An arm in a cell as one word: "rate=2,k=5/ours", or the arm alone without a sweep."""
    return "/".join(filter(None, (",".join(f"{key}={value}" for key, value in cell.items()), arm)))


def cell_rows(samples: Sequence[Sample]) -> list[Row]:
    """One row for each arm in each cell, in the order of their first samples."""
    groups = _grouped(samples, lambda sample: (json.dumps(sample["cell"]), sample["arm"])).values()
    measured = ([sample for sample in group if not sample["warm_up"]] for group in groups)
    return [_row(group) for group in measured if group]


def throughput(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Throughput of one arm in one cell per second of load;
    None if the server does not count tokens, or without answers."""
    has_answers, loaded = any("error" not in sample for sample in samples), loaded_s(samples)
    return {
        name: amount / loaded if has_answers and amount is not None else None
        for name, amount in _amounts(samples).items()
    }


def loaded_s(samples: Sequence[Sample]) -> float:
    """Seconds under load: over the blocks of the arm's servers, first due to last done."""
    # blocks of two servers of an arm have the same numbers and other clocks
    blocks = _grouped(samples, lambda sample: (sample.get(SERVER), sample["block"])).values()
    return float(
        sum(max(s["done_s"] for s in block) - min(s["due_s"] for s in block) for block in blocks)
    )


def cached_tokens(fates: Mapping[str, int] | None, reported: int | None) -> int | None:
    """Tokens that were not computed: by fates if there are any,
    because SGLang's count includes recomputed tokens."""
    return fates["exact"] + fates["relocated"] if fates else reported


def moved_tokens(fates: Mapping[str, int] | None, fused_hit: int | None) -> int:
    """Tokens that this request moved, recomputed ones included.
    `fused_hit`: those of earlier requests' moves."""
    return fates["relocated"] + fates["recomputed"] - (fused_hit or 0) if fates else 0


def tables(rows: Sequence[Row], contrasts: Sequence[Row]) -> list[Row]:
    """The figures as tables, times in seconds; columns without any figure are left out."""
    figures = [_figures_of(row) for row in rows]
    kept = {name for row in figures for name, value in row.items() if value not in (None, "")}
    of_times = _ratios(contrasts, (*TIMES, *BYSTANDERS))
    of_rates = _ratios(contrasts, RATES)
    shown = [{name: value for name, value in row.items() if name in kept} for row in figures]
    found = [
        {"title": "Arms under load", "rows": shown, "note": NOTE},
        {"title": "Ratios of times (above 1, the second is faster)", "rows": of_times},
        {"title": "Ratios of rates (above 1, the first is faster)", "rows": of_rates},
    ]
    return [table for table in found if table["rows"] or table is found[0]]


# Private, in order of use


def _amounts(samples: Iterable[Sample]) -> dict[str, int | None]:
    """What throughput counts. None: an answer without a count would make the sum too low."""
    answered = [sample for sample in samples if "error" not in sample]
    each = {
        "requests_per_s": [1 for _ in answered],
        "output_tokens_per_s": [sample["completion_tokens"] for sample in answered],
        "prompt_tokens_per_s": [sample["prompt_tokens"] for sample in answered],
    }
    return {name: None if None in counts else sum(counts) for name, counts in each.items()}


def _ratios(contrasts: Sequence[Row], metrics: Collection[str]) -> list[Row]:
    """The rows of a table of those that have a value."""
    return [
        {
            "metric": METRICS[row["metric"]].label,
            "ratio": ("{b} / {a}" if row["metric"] in RATES else "{a} / {b}").format(**row),
            "cell": cell_name(row["cell"]),
            "of": row["statistic"].removeprefix("ratio of "),
            "value and interval": interval(row, 2)
            if has_enough(row)
            else f"{row['value']:.2f}, too few",
            "n": row["n"],
        }
        for row in contrasts
        if row["metric"] in metrics and row["value"] is not None
    ]


def _cfo_row(arm: str, samples: Sequence[Sample]) -> Row | None:
    """How far the KV that an arm moved depends on what was not there, over chunks."""
    moved = [
        share
        for s in samples
        if not s["warm_up"]
        for share in s.get("chunkcache", {}).get("cfo", ())
    ]
    if not moved:
        return None
    quantiles = {f"p{round(100 * q)}": quantile(moved, q) for q in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return {"arm": arm, "moved chunks": len(moved), **quantiles, "mean": fmean(moved)}


def _cfo_table(rows: Sequence[Row]) -> Row:
    note = "Cache-Craft eq. 12 with alpha 1; where nothing is scored, as if its CCI were 1"
    return {"title": "Fix overhead (CFO) of moved chunks", "rows": [*rows], "note": note}


def _of_any_server(sample: Sample) -> Sample:
    """With the cell that its server's number is no part of:
    a request that several servers answered counts with its mean."""
    cell = {name: value for name, value in sample["cell"].items() if name != SERVER}
    return {**sample, "cell": cell, SERVER: sample["cell"].get(SERVER)}


def _requests(samples: Iterable[Sample]) -> list[Sample]:
    """The samples without those of bystanders."""
    return [sample for sample in samples if "gaps_s" not in sample]


def _grouped(samples: Iterable[Sample], key: Callable[[Sample], Any]) -> dict[Any, list[Sample]]:
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups


def _references(by_arm: Mapping[str, Sequence[Sample]], arm: str, against: str) -> list[str]:
    """The arms to compare one with: `against`, and for one that moves KV also our first one that
    does not."""
    moving = {
        name
        for name, samples in by_arm.items()
        # 0: who follows a chain that others have moved answers from moved KV as well
        if any(moved_tokens(s.get("fates"), 0) for s in samples)
    }
    still = [
        name
        for name, samples in by_arm.items()
        if name not in moving and any(s.get("fates") for s in samples)
    ]
    names = dict.fromkeys([against, *(still[:1] if arm in moving else ())])
    return [name for name in names if name != arm and name in by_arm]


def _contrasts(
    left: Sequence[Sample], right: Sequence[Sample], *, a: str, b: str, full: bool
) -> list[dict[str, Any]]:
    """Of the requests and of throughput if `full`, and of the bystanders."""
    of_requests: list[Contrast] = []
    if full:
        sides = _requests(left), _requests(right)
        of_requests += contrast_arms(*sides, a=a, b=b, metrics=CONTRASTED)
        of_requests += _rate_contrasts(*sides, a=a, b=b)
    blocks = ([sample for sample in side if "gaps_s" in sample] for side in (left, right))
    of_bystanders = contrast_arms(*blocks, a=a, b=b, metrics=BYSTANDERS)
    # values are quantiles of blocks already: a p90 over blocks would be a quantile of quantiles
    return of_requests + [row for row in of_bystanders if row["statistic"] == "ratio of medians"]


def _rate_contrasts(
    left: Sequence[Sample], right: Sequence[Sample], *, a: str, b: str
) -> list[Contrast]:
    """Throughput of arm `b` over that of `a`, as `throughput` has it, over the blocks that both
    have."""
    found = []
    measured = [
        (side, sample)
        for side, arm in enumerate((left, right))
        for sample in arm
        if not sample["warm_up"]
    ]
    for cell, taken in grouped(measured, lambda row: row[1]["cell"]):
        sides = [[sample for side, sample in taken if side == which] for which in (0, 1)]
        # of all servers of an arm together: those of one number have the same requests
        of_a, of_b = (_grouped(side, lambda sample: sample["block"]) for side in sides)
        pairs = [(of_a[block], of_b[block]) for block in of_a if block in of_b]
        about = {"cell": cell, "a": a, "b": b, "n": sum(len(asked) for asked, _ in pairs)}
        for name, side in zip("ab", sides, strict=True):
            about |= {
                f"asked_{name}": len(side),
                f"failed_{name}": sum("error" in sample for sample in side),
            }
        for metric in RATES if pairs else ():
            amounts = [(_amounts(one)[metric], _amounts(other)[metric]) for one, other in pairs]
            blocks = [
                (of_one, loaded_s(one), of_other, loaded_s(other))
                for (one, other), (of_one, of_other) in zip(pairs, amounts, strict=True)
                if of_one is not None and of_other is not None
            ]
            if len(blocks) == len(pairs):
                found.append({"metric": metric, **about, **rates(blocks)})
    return found


def _row(group: Sequence[Sample]) -> Row:
    asked = _requests(group)
    errors = sum("error" in sample for sample in asked)
    told = [sample["chunkcache"] for sample in asked if sample.get("chunkcache")]
    # a plan of no chunks can miss none
    hits = [
        (c["chunks_planned"], c["chunks_hit"])
        for c in told
        if c.get("chunks_planned") and c["chunks_hit"] is not None
    ]
    moved = sum(
        moved_tokens(s["fates"], (s.get("chunkcache") or {}).get("fused_hit")) for s in asked
    )
    # a server that counts nothing has no share, which is not a share of 0
    pairs = [(cached_tokens(s["fates"], s["cached_tokens"]), s["prompt_tokens"]) for s in asked]
    known = [(cached, tokens) for cached, tokens in pairs if cached is not None and tokens]
    loaded = [cache["loaded"] for cache in told if "loaded" in cache]
    gaps = [gap for sample in group for gap in sample.get("gaps_s", ())]
    others = (
        {"p50_s": quantile(gaps, 0.5), "p99_s": quantile(gaps, 0.99), "max_s": max(gaps)}
        if gaps
        else {}
    )
    fated = [sample["fates"] for sample in asked if sample["fates"]]
    fates = {fate: sum(found[fate] for found in fated) for fate in FATES} if fated else None
    return {
        "arm": group[0]["arm"],
        "cell": group[0]["cell"],
        "n": len(asked) - errors,
        "errors": errors,
        "metrics": {name: figures for name in METRICS if (figures := _figures(name, group))},
        "fates": fates,
        "cached_share": sum(cached for cached, _ in known) / sum(tokens for _, tokens in known)
        if known
        else None,
        "loaded_share": sum(loaded) / sum(tokens for _, tokens in known)
        if loaded and known
        else None,
        "recomputed_share": fates["recomputed"] / moved if fates and moved else None,
        # as in `lane._shares`: finding more makes up for no other miss
        "planned_missed": sum(max(0, p - hit) for p, hit in hits) / sum(p for p, _ in hits)
        if hits
        else None,
        "fallbacks": dict(
            Counter(reason for cache in told for reason in cache.get("fallbacks") or ())
        ),
        "throughput": throughput(asked),
        "bystanders": {"n": len(gaps), **others} if gaps else None,
        "pool": over_blocks([sample["pool"] for sample in group if "pool" in sample]),
    }


def _figures(name: str, samples: Sequence[Sample]) -> dict[str, float] | None:
    taken = [
        (sample["metrics"][name], sample["block"])
        for sample in samples
        if name in sample["metrics"]
    ]
    if not taken:
        return None
    # Requests of a block were sent together, so their times are correlated; with too few blocks
    # single requests are resampled.
    values, blocks = zip(*taken, strict=True)
    return summary(values, blocks, of_median=METRICS[name].unit == "s", draws=1000)


def _figures_of(row: Row) -> Row:
    """A row of the first table."""
    metrics, rates, others, pool = (
        defaultdict(dict, row["metrics"]),
        row["throughput"],
        row["bystanders"] or {},
        row.get("pool") or {},
    )
    return {
        "arm": row["arm"],
        "cell": cell_name(row["cell"]),
        "n": row["n"],
        "errors": row["errors"] or None,
        **{f"ttft {of}": metrics["ttft_s"].get(of) for of in ("p50", "p90", "p99")},
        "itl": metrics["itl_s"].get("mean"),
        "e2e p50": metrics["e2e_s"].get("p50"),
        "req/s": rates["requests_per_s"],
        "out tok/s": rates["output_tokens_per_s"],
        "cached": row["cached_share"],
        "loaded": row["loaded_share"] or None,
        "recomputed of moved": row["recomputed_share"],
        "missed": row["planned_missed"],
        "found": metrics["hit_share"].get("mean"),
        "others' itl p50": others.get("p50_s"),
        "others' itl p99": others.get("p99_s"),
        "overhead": row.get("overhead_share"),
        "at once": pool.get("running"),
        "tokens in use": pool.get("tokens"),
        "rows in use": pool.get("rows", pool.get("tokens")),
        "retracted": pool.get("retracted"),
    }
