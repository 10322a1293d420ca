"""Fused replays as cells of `python -m eval replay`: their options, samples and figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from eval.errors import CommandError
from eval.replay.cells import ReplayCell, Sample
from eval.replay.fused import FusedReplay
from eval.replay.fused_count import FusedCount
from eval.replay.grid import DEFAULTS, Cell
from eval.replay.trace import TraceFacts, TraceRequest
from eval.replay.verdict import capacity_name
from sglang_chunkcache import ChunkCacheConfig
from sglang_chunkcache.config import help_texts

KNOBS = (
    "selector",
    "recompute_ratio",
    "store_chunks",
    "store_variants",
    "store_threshold",
    "max_pass_tokens",
    "max_gap_tokens",
)
"""Settings of the server that a fused replay has too, with the same defaults."""
NUMBERS = (
    (
        "kv-bytes-per-token",
        131_072,
        "bytes of one token's KV in the store; the default is Llama-3-8B's in bfloat16",
    ),
    (
        "store-mib",
        1024,
        "the store, in MiB, whose default on a server is the machine's; with --host that memory is"
        " the store, for exact chains, too",
    ),
    (
        "prefill-budget",
        8192,
        "SGLang's --chunked-prefill-size, which bounds a pass unless --max-pass-tokens does",
    ),
    ("chunk-tokens", 500, "length of a chunk where the trace has no lengths"),
    ("fused-share", 1.0, "share of the requests that opt into moved KV, evenly spread"),
)
OVER_TIME = 16
"""Times at which the store is looked at."""
COPIED = (
    "num_requests",
    "num_evicted",
    "peak_nodes",
    "store",
    "variants",
    "store_over_time",
    "fallbacks",
)
FATES = ("exact", "relocated", "recomputed", "computed", "dropped")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a fused replay."""
    group = parser.add_argument_group(
        "moved KV: settings of a server with --reuse fused, and its defaults"
    )
    group.add_argument(
        "--reuse",
        choices=("exact", "fused"),
        default="exact",
        help="fused: also with every request fused",
    )
    for field in fields(ChunkCacheConfig):
        if field.name in KNOBS:
            kind, choices = type(field.default), field.metadata["choices"]
            text = f"{help_texts()[field.name][0]}; default: %(default)s"
            name = f"--{field.name.replace('_', '-')}"
            group.add_argument(name, type=kind, default=field.default, choices=choices, help=text)
    for name, default, text in NUMBERS:
        group.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{text}; default: %(default)s"
        )


def server_config(options: argparse.Namespace) -> ChunkCacheConfig | None:
    """The server's; None without moved KV.

    Raises:
        CommandError: an option is out of range, or applies to moved KV only.
    """
    numbers = {name: getattr(options, name.replace("-", "_")) for name, _, _ in NUMBERS}
    if options.reuse == "exact":
        changed = [name for name, default, _ in NUMBERS if numbers[name] != default]
        knobs = [knob for knob in fields(ChunkCacheConfig) if knob.name in KNOBS]
        changed += [
            knob.name.replace("_", "-")
            for knob in knobs
            if getattr(options, knob.name) != knob.default
        ]
        if changed:
            raise CommandError(f"--{changed[0]} needs --reuse fused")
        return None
    if not 0 < numbers.pop("fused-share") <= 1:
        raise CommandError("--fused-share must be over 0 and at most 1")
    if too_small := [name for name, value in numbers.items() if value < 1]:
        raise CommandError(f"--{too_small[0]} must be at least 1")
    try:
        return ChunkCacheConfig(reuse="fused", **{name: getattr(options, name) for name in KNOBS})
    except ValueError as error:
        raise CommandError(str(error).replace("--chunkcache-", "--")) from None


class FusedCell(ReplayCell):
    """A fused replay of one cell of the grid."""

    def __init__(
        self, cell: Cell, facts: TraceFacts, options: argparse.Namespace, config: ChunkCacheConfig
    ) -> None:
        # The store's threshold counts in the window, and exact chains grow by promoted chunks.
        window, threshold = (
            cell.window or DEFAULTS["window"],
            cell.threshold or DEFAULTS["threshold"],
        )
        settings = replace(cell.settings, window=window, threshold=threshold)
        self._chunk_tokens = None if facts.has_lengths else options.chunk_tokens
        self._fused = FusedReplay(
            settings,
            config,
            kv_bytes=options.kv_bytes_per_token,
            store_bytes=options.store_mib << 20,
            prefill_budget=options.prefill_budget,
            chunk_tokens=self._chunk_tokens or facts.distinct_tokens / facts.distinct_chunks,
            share=options.fused_share,
        )
        self._stride, self._over_time = (
            max(1, facts.num_counted // OVER_TIME),
            list[dict[str, float]](),
        )
        super().__init__(
            cell, facts, warm_up=options.warm_up, replay=self._fused, counts=FusedCount._fields
        )

    def step(self, request: TraceRequest) -> None:
        """As `ReplayCell.step`."""
        if self._chunk_tokens is not None:
            chunks = tuple(
                replace(chunk, num_tokens=self._chunk_tokens) for chunk in request.chunks
            )
            request = request._replace(chunks=chunks)
        super().step(request)
        if self._fused.num_requests % self._stride == 0:
            store = self._fused.store
            uses = [variant.num_uses for variant in store.held]
            self._over_time.append(
                {
                    "requests": self._fused.num_requests,
                    "variants": len(uses),
                    "chunks": store.stats().num_chunks,
                    "most_variants": max(map(len, store.chunks()), default=0),
                    "mean_uses": round(sum(uses) / max(1, len(uses)), 3),
                    "unused": round(uses.count(0) / max(1, len(uses)), 3),
                }
            )

    @property
    def sample(self) -> Sample:
        """Per bin the counts of `FusedCount`; the store at the end.

        `variants`: number of variants of a chunk -> [chunks that have so many, MiB of KV of one
        variant of each].
        """
        replay, variants = self._fused, dict[int, list[float]]()
        bins, host = self._bins.sample, replay.host
        if host is None:
            del bins["exact_from_host"]
        for found in replay.store.chunks():
            held = variants.setdefault(len(found), [0, 0.0])
            held[:] = held[0] + 1, held[1] + found[0].blob.nbytes / 2**20
        return {
            "fused": self._cell.label,
            **bins,
            **({} if host is None else {"host": asdict(host.counts)}),
            "num_evicted": replay.num_evicted,
            "peak_nodes": replay.peak_nodes,
            "store": replay.store.stats()._asdict(),
            "variants": {str(num): variants[num] for num in sorted(variants)},
            "store_over_time": self._over_time,
            "fallbacks": dict(replay.fallbacks),
        }


def fused_entry(
    sample: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    share: Callable[..., dict[str, float]],
) -> dict[str, Any]:
    """An entry of `results["fused"]`.

    Args:
        cells: entries of the exact replays.
        share: (sample, counts, unit) -> share of the unit with its interval.
    """
    exact = next((cell for cell in cells if cell["cell"] == sample["fused"]), None)
    hosted = {}
    if "host" in sample:
        hosted["exact_from_host"] = share(sample, sample["exact_from_host"], "tokens")
        hosted["host"] = sample["host"]
    moved = sum(sample["from_device"]) + sum(sample["from_host"])
    return {
        "cell": sample["fused"],
        "exact_without": exact and (exact["token_hit_rate"] or exact["chunk_hit_rate"]),
        "fates": {fate: share(sample, sample[fate], "tokens") for fate in FATES},
        "halves": _halves(sample, share),
        "behind_moved": share(sample, sample["behind"], "tokens"),
        "found_fused": share(sample, sample["fused_hit"], "tokens"),
        "from_host": sum(sample["from_host"]) / moved if moved else 0.0,
        "chains_ended": sum(sample["ended"]) / max(1, sample["num_requests"]),
        **hosted,
        **{name: sample[name] for name in COPIED if name in sample},
    }


def _halves(sample: Mapping[str, Any], share: Callable[..., dict[str, float]]) -> dict[str, Any]:
    """Exact and computed shares of the tokens of requests that opted into moved KV,
    and of the others. Empty: all opted in."""
    if "opted_tokens" not in sample or sample["opted_tokens"] == sample["tokens"]:
        return {}
    fates = ("exact", "computed")
    others = {name: _less(sample[name], sample[f"opted_{name}"]) for name in (*fates, "tokens")}
    return {
        "opted": {name: share(sample, sample[f"opted_{name}"], "opted_tokens") for name in fates},
        "others": {name: share({**sample, **others}, others[name], "tokens") for name in fates},
    }


def _less(all_of: Sequence[int], some: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(all_of, some, strict=True)]


def fused_table(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row per fused cell."""
    names = [name for name in entries[0]["cell"] if not name.startswith("capacity")]
    differs = [
        name for name in names if len({entry["cell"][name] for entry in entries} - {None}) > 1
    ]
    rows = []
    for entry in entries:
        cell, store, without = entry["cell"], entry["store"], entry["exact_without"]
        row = {"capacity": capacity_name(cell)} | {name: str(cell[name] or "-") for name in differs}
        row["exact without"] = f"{without['value']:.1%}" if without else "-"
        if halves := entry.get("halves"):
            row |= {
                f"{name}: {fate}": f"{part[fate]['value']:.1%}"
                for name, part in halves.items()
                for fate in part
            }
        has_turns = cell["dedup"] is not None
        row |= {
            fate: f"{entry['fates'][fate]['value']:.1%}"
            for fate in (FATES if has_turns else FATES[:-1])
        }
        if any("host" in other for other in entries):
            loaded = entry.get("exact_from_host")
            row["exact, from host"] = f"{loaded['value']:.1%}" if loaded else "-"
        row |= {
            "of moved, from host": f"{entry['from_host']:.1%}",
            "exact chain ended": f"{entry['chains_ended']:.1%}",
            "computed behind": f"{entry['behind_moved']['value']:.1%}",
            "evicted": f"{entry['num_evicted']:,}",
            "stored chunks": f"{store['num_chunks']:,}",
            "variants": f"{store['num_variants']:,}",
            "MiB": f"{store['num_bytes'] / 2**20:,.0f}",
            "left the store": f"{store['num_evicted']:,}",
        }
        rows.append(row)
    note = (
        "Shares of the requests' chunk tokens; moved = relocated + recomputed. Opted: requests that"
        " asked for moved KV. Exact chain ended: requests; no exact request finds what is behind"
        " moved KV. Computed behind: tokens computed there all the same. Evictions, store and"
        " fallbacks: warm-up too."
    )
    halves = any(entry.get("halves") for entry in entries)
    return {
        "title": "Some requests fused" if halves else "All requests fused",
        "rows": rows,
        "note": note,
    }
