"""Samples of a replay -> shares with intervals and contrasts with the retriever's order: a pure function.

Shares are sums over requests, without the warm-up. Intervals come from a moving-block bootstrap over consecutive requests: they
show how much a figure depends on the choice of requests. They do not include other histories of the cache, since every cell is
replayed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.intervals import moving_block_share
from eval.replay.grid import baseline_of, craft_of, policy_name
from eval.replay.verdict import verdict

Sample = Mapping[str, Any]
MIN_BLOCKS = 10
"""With fewer there is no interval."""
METRICS = {"chunks": "saved_share", "tokens": "token_saved_share"}


def summarize(spec: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """`results` of a replay's record, from the samples taken so far.

    Args:
        spec: `warm_up` requests are not measured; `block` requests form a block of the bootstrap; `worth` is for the verdict;
            `left_out`: a sentence on sizes that were not replayed, or None.
        samples: one per cell, and one with `overlap` per k.
    """
    shares = _Shares(spec["warm_up"], spec["block"])
    cells = [sample for sample in samples if "cell" in sample]
    contrasts = []
    for find in (baseline_of, craft_of):
        for sample in cells:
            other = find(sample["cell"], cells)
            contrasts += shares.contrasts(other, sample) if other is not None else []
    overlap = [shares.overlap(sample) for sample in samples if "overlap" in sample]
    results: dict[str, Any] = {
        "cells": [shares.cell(sample) for sample in cells],
        "overlap": overlap[0] if overlap else None,
        "overlap_by_k": overlap,
        "contrasts": contrasts,
    }
    return results | {"verdict": verdict(results, worth=spec["worth"], left_out=spec.get("left_out"))}


class _Shares:
    """Shares over the requests after the warm-up."""

    def __init__(self, warm_up: int, block: int) -> None:
        self._warm_up, self._block = warm_up, block

    def cell(self, sample: Sample) -> dict[str, Any]:
        """An entry of `results["cells"]`."""
        saved = {unit: (_saved(sample, unit), sample[unit]) for unit in METRICS if sample[unit]}
        figures: dict[str, Any] = {
            "cell": sample["cell"],
            "chunk_hit_rate": self._share(sample["hits"], sample["chunks"]),
            "token_hit_rate": self._share(sample["token_hits"], sample["tokens"]) if sample["tokens"] else None,
            "saved": {unit: self._share(*both) for unit, both in saved.items()},
            "saved_in_second_half": {unit: self._second_half(*both) for unit, both in saved.items()},
        }
        if sample["cell"]["dedup"] is not None:
            figures["reduction"] = {unit: self._reduction(sample, unit) for unit in saved}
        measured = sample["chunks"][self._warm_up :]
        kept = {name: sample[name] for name in ("num_evicted", "peak_nodes", "order_us_p50", "order_us_p99")}
        return figures | {"num_requests": len(measured), "num_chunks": sum(measured)} | kept

    def contrasts(self, baseline: Sample, other: Sample) -> list[dict[str, Any]]:
        """The difference of saved shares, `other` less `baseline`, of chunks and, with lengths, of tokens."""
        found = []
        for unit, metric in METRICS.items():
            if not other[unit]:
                continue
            differences = [b - a for a, b in zip(_saved(baseline, unit), _saved(other, unit), strict=True)]
            found.append(
                {
                    "cell": other["cell"],
                    "metric": metric,
                    "a": policy_name(baseline["cell"]),
                    "b": policy_name(other["cell"]),
                    "statistic": "difference of shares",
                    **self._share(differences, other[unit]),
                    "n": len(other[unit][self._warm_up :]),
                    "p": None,
                }
            )
        return found

    def overlap(self, sample: Sample) -> dict[str, Any]:
        """CRAFT's prefix and total of the whole trace, and the share of chunks (tokens) retrieved before."""
        seen = {unit: self._share(sample[f"seen_{unit}"], sample[unit]) for unit in METRICS if sample[unit]}
        return {
            "k": sample["k"],
            **sample["overlap"],
            "seen_before": seen["chunks"],
            "seen_before_tokens": seen.get("tokens"),
        }

    def _reduction(self, sample: Sample, unit: str) -> dict[str, Any]:
        """CRAFT fig. 12's two parts of the saved chunks, and the chunks computed again because a history left the cache."""
        parts = zip(("general", "conversation_scoped", "history_lost"), _parts(sample, unit), strict=True)
        return {name: self._share(counts, sample[unit]) for name, counts in parts}

    def _share(self, parts: Sequence[float], wholes: Sequence[float]) -> dict[str, float]:
        wholes = wholes[self._warm_up :]
        value, low, high = moving_block_share(parts[self._warm_up :], wholes, block=self._block)
        return {"value": value, "low": low, "high": high}

    def _second_half(self, parts: Sequence[float], wholes: Sequence[float]) -> float:
        middle = (self._warm_up + len(wholes)) // 2
        return sum(parts[middle:]) / max(1, sum(wholes[middle:]))


def _saved(sample: Sample, unit: str) -> list[int]:
    """Per request: prefix hits and chunks left out as already shown, less chunks that are computed again."""
    return [hits + dropped - lost for hits, dropped, lost in zip(*_parts(sample, unit), strict=True)]


def _parts(sample: Sample, unit: str) -> tuple[list[int], list[int], list[int]]:
    names = ("hits", "dropped", "lost") if unit == "chunks" else ("token_hits", "dropped_tokens", "lost_tokens")
    hits, dropped, lost = (sample[name] for name in names)
    return hits, dropped, lost
