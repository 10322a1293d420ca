"""How much of the bundled model's KV can be fused, and does Fast Fusion's analysis predict it?

    python -m eval joint [--quick]

Variants of one chunk, different chunks, and requests of a batch are cut into blocks and fused at
rising thresholds, in each layer (eval/joint). A ratio is the number of blocks
over that of shared blocks, all layers and draws together; `bytes` counts norms, table and tails,
too; `all layers` is the share of blocks that are over the threshold with one block of another unit
in every layer: only these could share slots on a device, where a token has one for all layers. Of
blocks that share one: `key error` and `value error` are the mean distance of decoded blocks over
their norm, `below` is the share that is less similar to what it is decoded from than the threshold.

Predictions come from other draws than the measured ones, from the similarities of blocks of
different units: how many are over the threshold by counting, by a kernel density (eq. 1), by its
extreme-value form (eq. 2), by a Gaussian. Pairs are spread over blocks at random; `corollary` is
counted, too, and takes each pair for a block that joins (corollary 5.2).

The attention of each request's last tokens over fused keys gives the drift, the most that a logit
moved (`epsilon`), and how far it may have moved by the errors of the blocks or, as proposition 5.3
has it, by the threshold. The controller's table says what the thresholds for a ratio give in draws
that it has not seen.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.bench.rounds import by_cell
from eval.joint.drift import distance, least_drift_bound, logit_scale
from eval.joint.encoding import JointLayer, decode, encode, relative_errors
from eval.joint.fast_fusion import NEVER, cosine, normalize
from eval.joint.fusion_rate import (
    expected_blocks,
    expected_joins,
    extreme_rate,
    gaussian_rate,
    kernel_rate,
    most_joins,
    no_fusion,
    normal_bandwidth,
    num_pairs,
    unit_similarities,
)
from eval.joint.kv import ModelKv
from eval.joint.thresholds import LayerStatistics, ThresholdController
from eval.joint.units import DRAWN, Sizes, Units
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.progress import tracked
from eval.recorded import grouped
from eval.run import Run, Sample
from retrieval.command_line import Parser
from sglang_chunkcache.bundled_model import model_dir

BLOCK_SIZES = (4, 8, 16, 32)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
RATIOS = (1.1, 1.5, 2.0)
"""That the controller is asked for."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
SAMPLED = 20_000
"""Similarities of a layer from which predictions are made."""
SAID_BLOCK, SAID_THRESHOLDS = 16, (0.8, 0.95)
"""Of the verdict."""
DRIFT = "Largest drift of attention over fused keys in any layer, L1"
DRIFT_NOTE = "Over an epsilon of .55 proposition 5.3 allows a drift of 2, which is all there is."
LAST = 8
"""Tokens of a request whose attention is measured."""
METHODS = ("counted", "corollary", "kernel", "extreme", "gaussian")


class Blocks(NamedTuple):
    """Units cut into blocks of one size."""

    units: Units
    block_size: int

    @property
    def lens(self) -> list[int]:
        """Blocks of each unit."""
        return [length // self.block_size for length in self.units.lens]

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, size] of a layer, without tails."""
        parts = torch.split(self.units.keys[layer], self.units.lens)
        # `encode` cuts tails off likewise: predictions are of the blocks that it compares.
        whole = [
            part[: length * self.block_size] for part, length in zip(parts, self.lens, strict=True)
        ]
        return torch.cat(whole).reshape(sum(self.lens), -1)

    def encoded(self, layer: int, threshold: float) -> JointLayer:
        units = self.units
        return encode(
            units.keys[layer],
            units.values[layer],
            units.lens,
            block_size=self.block_size,
            threshold=threshold,
        )


class Predictor:
    """Of one layer, from the similarities of other draws."""

    def __init__(self, drawn: Sequence[Blocks], layer: int) -> None:
        found = torch.cat([unit_similarities(each.keys(layer), each.lens) for each in drawn])
        # The similarities come draw by draw: the first `SAMPLED` would be those of the first draws.
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
        self.similarities = found[order[:SAMPLED]]
        # Equal similarities have a bandwidth of 0, by which a kernel would divide.
        self._bandwidth = max(normal_bandwidth(self.similarities), 1e-6)

    def exceedance(self, method: str, threshold: float) -> float:
        """Probability of a pair to be over the threshold; by eq. 2 that may be over 1."""
        similarities, num = self.similarities, len(self.similarities)
        if method in ("counted", "corollary"):
            return float((similarities > threshold).double().mean())
        if method == "gaussian":
            # `gaussian_rate` divides by it, and of equal similarities it is 0.
            std = max(float(similarities.double().std(correction=0)), 1e-9)
            return gaussian_rate(threshold, float(similarities.double().mean()), std, num) / num
        rate = kernel_rate if method == "kernel" else extreme_rate
        # Eq. 2 overflows to infinity, and infinity times a unit without blocks would be NaN.
        return min(rate(threshold, similarities, self._bandwidth) / num, 1e9)

    def quantiles(self) -> Row:
        found = self.similarities.quantile(torch.tensor(QUANTILES)).tolist()
        return {
            f"{share:.0%}": round(each, 4) for share, each in zip(QUANTILES, found, strict=True)
        }


def measured(drawn: Blocks, threshold: float) -> Row:
    """What fusing leaves and what it changes, of all layers; `shared` by layer."""
    shared, kept, keys, values, below = [], 0, [], [], []
    for layer in range(len(drawn.units.keys)):
        found = drawn.encoded(layer, threshold)
        is_fused = found.references[found.table] > 1
        shared.append(len(found.keys))
        kept += found.nbytes
        errors = relative_errors(found, drawn.units.keys[layer], drawn.units.values[layer])
        keys += errors[0][is_fused].tolist()
        # Blocks with zero keys never fuse, but their values may be zeros, whose error is NaN.
        values += errors[1][is_fused].nan_to_num().tolist()
        # bfloat16 rounds by up to .004
        below += (errors[0][is_fused] > distance(threshold) + 0.01).tolist()
    errors_of = {"key_error": keys, "value_error": values, "below": below}
    metrics = {name: round(mean(map(float, each)), 5) for name, each in errors_of.items() if each}
    before = drawn.units.keys.nbytes + drawn.units.values.nbytes
    blocks = len(shared) * sum(drawn.lens)
    metrics["in_all_layers"] = round(
        float((similar_in_all_layers(drawn) > threshold).float().mean()), 4
    )
    metrics |= {
        "blocks": blocks,
        "shared": sum(shared),
        "bytes": before,
        "kept": kept,
        "fused": len(keys),
    }
    return {"metrics": metrics, "shared": shared}


def similar_in_all_layers(drawn: Blocks) -> Tensor:
    """[num_blocks] float32: of each block's pairs with blocks of other units the largest similarity
    that holds in every layer."""
    unit = torch.repeat_interleave(torch.arange(len(drawn.lens)), torch.tensor(drawn.lens))
    least = torch.full((len(unit), len(unit)), torch.inf)
    for layer in range(len(drawn.units.keys)):
        keys = normalize(drawn.keys(layer))
        least = torch.minimum(least, cosine(keys, keys))
    # Blocks of one unit are never compared, so their similarity saves nothing.
    return least.masked_fill(unit[:, None] == unit, -1.0).amax(1)


def predicted(
    predictors: Sequence[Predictor], lens: Sequence[int], threshold: float
) -> dict[str, list[float]]:
    """Shared blocks of each layer by each method."""
    found = {}
    for method in METHODS:
        joins = most_joins if method == "corollary" else expected_joins
        shared = [
            expected_blocks(lens, each.exceedance(method, threshold), joins) for each in predictors
        ]
        found[method] = [round(each, 2) for each in shared]
    return found


def drifts(drawn: Blocks, threshold: float) -> Iterator[Row]:
    """Of each layer: the largest drift of a request's attention over its fused keys,
    and how far a logit moved or may have."""
    units = drawn.units
    for layer, query_norm in enumerate(units.query_norms()):
        found = drawn.encoded(layer, threshold)
        pairs = zip(
            *(torch.split(each, units.lens) for each in (units.keys[layer], decode(found)[0])),
            strict=True,
        )
        moved, drift = [], []
        for request, (keys, decoded) in zip(units.requests, pairs, strict=True):
            before, after = (
                logits(request.queries[layer][-LAST:], each) for each in (keys, decoded)
            )
            # Later tokens have -inf in both, and the difference of these is NaN.
            moved.append(float((after - before)[before > -torch.inf].abs().max()))
            drift.append(float((after.softmax(-1) - before.softmax(-1)).abs().sum(-1).max()))
        block_norms = torch.linalg.vector_norm(drawn.keys(layer).float(), dim=1)
        errors, _ = relative_errors(found, units.keys[layer], units.values[layer])
        scale = query_norm / units.keys.shape[-1] ** 0.5
        row = {
            "drift": max(drift),
            "epsilon": max(moved),
            "epsilon by errors": scale * float((block_norms * errors).max()),
            "epsilon by threshold": scale * float(block_norms.max()) * distance(threshold),
        }
        yield {name: float(f"{each:.4g}") for name, each in row.items()}


def logits(queries: Tensor, keys: Tensor) -> Tensor:
    """[num_heads, n, num_tokens] float32: of the last n of as many tokens as there are keys;
    -inf for what comes later."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    grouped = queries.float().view(len(queries), num_kv_heads, -1, head_dim)
    found: Tensor = (
        torch.einsum("qhgd,khd->hgqk", grouped, keys.float()).flatten(0, 1) / head_dim**0.5
    )
    later = torch.arange(num_tokens) > torch.arange(num_tokens - len(queries), num_tokens)[:, None]
    return found.masked_fill(later, -torch.inf)


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Similarities, ratios, drift and what the controller reached."""
    by_arm = dict(grouped(samples, itemgetter("arm")))
    fused = [(cell, arms["fused"]) for cell, arms in by_cell(by_arm.get("fused", []))]
    ratios = [_compression(cell, taken) for cell, taken in fused]
    reached = [
        _reached(cell, arms["controller"]) for cell, arms in by_cell(by_arm.get("controller", []))
    ]
    tables = {
        "Similarity of blocks of different units: quantiles": [
            {**one["cell"], **one["metrics"]} for one in by_arm.get("similarity", [])
        ],
        "Blocks over shared blocks, measured and predicted from other draws": ratios,
        DRIFT: [_drift(cell, taken) for cell, taken in fused if taken[0]["drift"]],
        "Thresholds of the controller, and the ratio in draws it has not seen": reached,
    }
    said = [
        f"{row['of']}, {row['keys']}, blocks of {row['block']}, threshold {row['threshold']:g}:"
        f" {row['measured']:.3f}, predicted {row['counted']:.3f} by counting,"
        f" {row['corollary']:.3f} by corollary 5.2."
        for row in ratios
        if row["threshold"] in SAID_THRESHOLDS and row["block"] == SAID_BLOCK
    ]
    shown = [
        table(title, rows, DRIFT_NOTE if title == DRIFT else None)
        for title, rows in tables.items()
        if rows
    ]
    return {"verdict": said, "tables": shown}


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    sizes = Sizes(args.variants, args.chunks, args.requests, args.passages)
    model = ModelKv(args.model_path)
    with open_run("joint", args, summarize) as run:
        for (of, keys), draw in DRAWN.items():
            cells = [{"of": of, "keys": keys, "block": size} for size in args.blocks]
            # `_take` keeps all samples of a cell in one write, so its first key stands for all.
            if missing := [cell for cell in cells if _key("similarity", cell, 0, 0) not in run]:
                rngs = [random.Random(f"{args.seed} {number}") for number in range(2 * args.draws)]
                drawn = [draw(model, rng, sizes) for rng in tracked(f"{of}, {keys}", rngs)]
                for cell in missing:
                    _take(
                        run,
                        [Blocks(units, cell["block"]) for units in drawn],
                        cell,
                        args.thresholds,
                    )
    tell(run)
    return 0


# Private, in order of use


def _compression(cell: Row, taken: Sequence[Sample]) -> Row:
    total = {
        name: sum(one["metrics"].get(name, 0) for one in taken)
        for name in ("blocks", "shared", "bytes", "kept", "fused")
    }
    by_layer = [sum(each) for each in zip(*(one["shared"] for one in taken), strict=True)]
    row = {
        **cell,
        "measured": _ratio(total["blocks"], total["shared"]),
        "bytes": _ratio(total["bytes"], total["kept"]),
    }
    row["by layer"] = " ".join(f"{total['blocks'] / len(by_layer) / each:.2f}" for each in by_layer)
    row["all layers"] = round(mean(one["metrics"]["in_all_layers"] for one in taken), 3)
    row |= {
        method: _ratio(total["blocks"], sum(sum(one["predicted"][method]) for one in taken))
        for method in METHODS
    }
    # Corollary 5.2 gives this share of layers as exp(-rate), which the next column has.
    none = [
        each * len(by_layer) == one["metrics"]["blocks"] for one in taken for each in one["shared"]
    ]
    row |= {"nothing fused": round(mean(none), 3)}
    row |= {"predicted": round(mean(each for one in taken for each in one["no_fusion"]), 3)}
    for name in ("key_error", "value_error", "below"):
        # Weighted by fused blocks, or a draw with one would count like a draw with hundreds.
        found = sum(one["metrics"].get(name, 0) * one["metrics"]["fused"] for one in taken)
        row[name.replace("_", " ")] = round(found / total["fused"], 3) if total["fused"] else None
    return row


def _drift(cell: Row, taken: Sequence[Sample]) -> Row:
    found = [each for one in taken for each in one["drift"]]
    worst = {name: max(each[name] for each in found) for name in found[0]}
    bound = {"drift": worst["drift"], "allowed by epsilon": least_drift_bound(worst["epsilon"])}
    return {**cell, **{name: float(f"{each:.3g}") for name, each in (bound | worst).items()}}


def _reached(cell: Row, taken: Sequence[Sample]) -> Row:
    total = {name: sum(one["metrics"][name] for one in taken) for name in ("blocks", "shared")}
    thresholds = " ".join(
        "skip" if each == NEVER else f"{each:.3f}" for each in taken[0]["thresholds"]
    )
    return {
        **cell,
        "reached": _ratio(total["blocks"], total["shared"]),
        "thresholds by layer": thresholds,
    }


def _ratio(before: float, after: float) -> float:
    return round(before / after, 3)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval joint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--draws",
        type=int,
        default=8,
        help="measured of each kind; predictions come from as many others",
    )
    add("--blocks", type=int, nargs="+", default=BLOCK_SIZES, help="tokens of a block")
    add("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    add("--variants", type=int, default=5, help="of a chunk")
    add("--chunks", type=int, default=4, help="of a prompt")
    add("--passages", type=int, default=2, help="of a chunk; about 30 tokens each")
    add("--requests", type=int, default=8, help="of a batch")
    add("--seed", type=int, default=0)
    add("--model-path", type=Path, default=model_dir())
    add("--threads", type=int, default=1)
    add("--quick", action="store_true", help="one draw, blocks of 8, two thresholds: does it run?")
    add_out_option(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.draws, args.blocks, args.thresholds, args.requests = 1, (8,), (0.8, 0.95), 2
    return args


def _take(
    run: Run, drawn: Sequence[Blocks], cell: Mapping[str, Any], thresholds: Sequence[float]
) -> None:
    """All samples of a kind of units and a block size, at once:
    the first half is measured, the other one predicts."""
    fresh, known = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    if not all(num_pairs(each.lens) for each in drawn):
        return  # units without a whole block
    predictors = [Predictor(known, layer) for layer in range(len(fresh[0].units.keys))]
    rows = dict[str, Sample]()

    def keep(
        arm: str, about: Mapping[str, Any], number: int, setting: float, found: Mapping[str, Any]
    ) -> None:
        rows[_key(arm, cell, number, setting)] = {
            "arm": arm,
            "cell": {**cell, **about},
            "request": str(number),
            **found,
        }

    for layer, each in enumerate(predictors):
        keep("similarity", {"layer": layer}, 0, layer, {"metrics": each.quantiles()})
    # `product` reads `enumerate` to its end first, so each threshold has all draws.
    for threshold, (number, blocks) in product(thresholds, enumerate(fresh)):
        found = measured(blocks, threshold) | {
            "predicted": predicted(predictors, blocks.lens, threshold)
        }
        pairs = num_pairs(blocks.lens)
        found["no_fusion"] = [
            round(no_fusion(pairs * one.exceedance("counted", threshold)), 4) for one in predictors
        ]
        # Only `cached_requests` draws whole prompts, with the queries that read them.
        found["drift"] = list(drifts(blocks, threshold)) if blocks.units.requests else []
        keep("fused", {"threshold": threshold}, number, threshold, found)
    layers = _statistics(known, predictors)
    for ratio, (number, blocks) in product(RATIOS, enumerate(fresh)):
        # A drift of 2 is all that two distributions can differ by: no bound.
        by_layer = ThresholdController(layers, blocks.lens, ratio=ratio, drift=2).thresholds
        shared = [
            len(blocks.encoded(layer, threshold).keys) for layer, threshold in enumerate(by_layer)
        ]
        metrics = {"blocks": len(shared) * sum(blocks.lens), "shared": sum(shared)}
        keep(
            "controller",
            {"asked": ratio},
            number,
            ratio,
            {"metrics": metrics, "thresholds": by_layer},
        )
    run.add_all(rows.items())


def _statistics(known: Sequence[Blocks], predictors: Sequence[Predictor]) -> list[LayerStatistics]:
    """Of the units with requests, with their queries; else all layers count alike."""
    found = []
    for layer, each in enumerate(predictors):
        scale = 1.0
        if known[0].units.requests:
            norm = max(
                float(torch.linalg.vector_norm(one.keys(layer).float(), dim=1).max())
                for one in known
            )
            query_norm = max(one.units.query_norms()[layer] for one in known)
            scale = logit_scale(norm, query_norm, known[0].units.keys.shape[-1])
        found.append(LayerStatistics(each.similarities, scale))
    return found


def _key(arm: str, cell: Mapping[str, Any], number: int, setting: float) -> str:
    return "/".join(map(str, (arm, *cell.values(), setting, number)))
