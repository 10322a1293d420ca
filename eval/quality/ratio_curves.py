"""`python -m eval quality ratio`: how much quality does moving chunks cost, and recomputing some of
their tokens restore?

One server of ours with `--reuse fused`. Every question is answered once with full prefill, then
once per cell (selector and ratio) over moved chunks. A capture is the way in which the chunks' KV
is computed. This happens before any cell runs and once per chunk, so that all selectors move the
same KV:

    alone          after no other chunk. The prompt's first chunk is then an exact hit
    live           in requests that mix half of the question's chunks with strangers, each after a
                   stranger; with `--rounds N` each chunk N times, behind others each time, and a
                   plan takes the best of its N variants
    preprocessed   after the top-n passages nearest to it by words, none of them in the prompt
                   (FusionRAG 3.1)

Captures are isolated: every question has unique `cache_salt`s, one per capture and one for full
prefill. A chunk that is moved from another source ends the run.
With `--from-store` what was captured has left the device before, so the store's codec (`--
--chunkcache-store-codec int4`) is part of every answer.

Ratio 0 (`full-reuse`) and ratio 1 (`all`) are the same for all selectors and run once. `context`
includes its focus (Cache-Craft algorithm 1), which skips chunks and so recomputes less than the
ratio; `context-all` runs without it. `deviation` and `query` read the papers' layers, with `@3` the
third layer, with `@calibrated` those that the server has found for its model; `critical@auto` takes
as many tokens as it finds that `QUALITIES` need. The measured shares are reported as well.
Normalised F1 is 0 at full reuse of chunks captured alone (for live: live), 1 at full prefill.

Kinds of question (`--questions`, eval/world/kinds.py) are cells of their own. A kind that full
prefill answers less often than `MEASURABLE` is named: what moving costs it cannot be told with
these weights.
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.http import post
from eval.metrics import METRICS
from eval.outcome import Row, table
from eval.quality.equal_quality import EQUAL_NOTE, equal_quality
from eval.quality.greedy import FULL_PREFILL, Endpoint, FullPrefill, Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.ratio_cases import LONG, Case, K, long_request, make_cases
from eval.quality.scores import FULL_REUSE, cells_of, rounded
from eval.recorded import grouped
from eval.run import Sample
from eval.serve.arms import ARMS, SCORED, UNAUDITED, Arm
from eval.stats import share
from eval.task import Request, TextChunk
from eval.world.kinds import KINDS

FLAGS = (
    *("--reuse", "fused"),
    *("--chunkcache-move", "always"),
    *("--chunkcache-store-threshold", "1"),
    *SCORED,
    *("--chunkcache-calibrate", "on"),
    *UNAUDITED,
)
"""Every movable chunk is moved, and every chunk enters the store at once, scored:
one capture serves all selectors."""
STORE_POOL = 3000
"""KV pool in tokens that `--from-store` fills."""
FROM_STORE = ("--chunkcache-eviction", "lru", "--chunked-prefill-size", "1024")
"""What was captured leaves before what fills the pool, and a plan's request fits into the rest."""
SELECTORS = (
    *("none", "first", "random", "h2o", "deviation", "deviation@3", "deviation@calibrated"),
    *(
        "query",
        "query@3",
        "query@calibrated",
        "prophet",
        "critical",
        "critical@auto",
        "context",
        "context-all",
    ),
)
UNROTATED = "unrotated"
"""Cache-Craft table 3, of eval/unrotated.py: by name alone, since it costs answers on purpose."""
UNRATED = ("none", "critical@auto")  # their selection does not depend on a ratio
CAPTURES = ("alone", "live", "preprocessed")
ALL = "all"
QUALITIES = (0.9, 0.99)
"""Of `critical@auto`."""
ALPHAS = (0.5, 1.0, 2.0, 3.0)
"""Cache-Craft fig. 26."""
ALPHA_RATIO = 0.15
"""Of chunks without scores where alpha is given."""
PAIRED_RATIOS = (0.05, 0.15)
PAIRED = (
    *((a, b) for b in ("query", "context", "context-all") for a in ("random", "first")),
    *((a, "critical") for a in ("query", "deviation", "prophet", "deviation@3", "query@3")),
    *((a, "critical") for a in ("deviation@calibrated", "query@calibrated")),
)
PAIRED_METRICS = ("em", "f1", "rouge_l", "same", "kl")
SHOWN = ("em_of_full", "same", "kl", "kl_max")
"""Metrics with a table of ratios."""
MEASURABLE = 0.8
"""Exact match of full prefill: below it, an answer that moving changes is too often none of the
right ones."""

Capture = Mapping[str, Any]
"""`capture`: one of CAPTURES; `neighbors`: the top-n of `preprocessed`. Part of a sample's cell."""


class Cell(NamedTuple):
    """One way to reuse: the sample's arm, its swept settings, and the request's fields."""

    arm: str
    label: dict[str, float]
    reuse: dict[str, Any]


class RatioCurves(Mode):
    """Every case with full prefill, and in every cell over every capture."""

    name, summary = "ratio", "recompute ratios per selector"

    def __init__(self, args: argparse.Namespace) -> None:
        if not all(0 <= ratio <= 1 for ratio in args.ratios):
            raise CommandError(f"--ratios must be in 0..1, got {' '.join(map(str, args.ratios))}")
        least_k = min(args.ks or [K if args.k is None else args.k])
        if least_k < 2 or min(args.neighbors) < 1 or args.worlds < 1:
            raise CommandError("--k must be at least 2, --neighbors and --worlds at least 1")
        if not 1 <= min(args.rounds) <= max(args.rounds) <= least_k:
            raise CommandError(
                "--rounds must be at least 1 and at most --k: a chunk has so many strangers"
            )
        self.cases = cases = make_cases(args)
        self.cells = make_cells(args.selectors, args.ratios)
        self.captures = make_captures(args.captures, args.neighbors, args.rounds)
        flags = (*ARMS["ours"].flags, *FLAGS, *(FROM_STORE if args.from_store else ()))
        if UNROTATED in args.selectors:
            flags += ("--chunkcache-selectors", "eval.unrotated")  # of two the later counts
        if args.from_store:
            args.max_total_tokens = STORE_POOL
        arm = replace(ARMS["ours"], name="fused", flags=flags)
        super().__init__(args, [arm], [case.request for case in cases])

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Selectors, ratios, captures."""
        text = (
            "context and context-all: also Cache-Craft's alphas; unrotated: as context-all, moved"
            " keys not turned (its table 3)"
        )
        parser.add_argument(
            "--selectors",
            nargs="+",
            choices=(*SELECTORS, UNROTATED),
            default=list(SELECTORS),
            help=text,
        )
        text = "chunks per question; several: each a cell of its own (Cache-Craft 27)"
        parser.add_argument("--ks", nargs="+", type=int, metavar="K", help=text)
        parser.add_argument("--ratios", nargs="+", type=float, default=[0, 0.05, 0.15, 0.3, 0.5, 1])
        text = (
            "of the world, --requests of each kind and world (default: linked); see"
            " eval/world/kinds.py"
        )
        parser.add_argument(
            "--questions", nargs="+", choices=KINDS, default=["linked"], metavar="KIND", help=text
        )
        parser.add_argument(
            "--worlds", type=int, default=1, metavar="N", help="that of --seed and the next ones"
        )
        parser.add_argument("--captures", nargs="+", choices=CAPTURES, default=list(CAPTURES))
        parser.add_argument(
            "--neighbors",
            nargs="+",
            type=int,
            default=[3],
            metavar="N",
            help="top-n of preprocessed",
        )
        parser.add_argument(
            "--rounds",
            nargs="+",
            type=int,
            default=[1],
            metavar="N",
            help="variants of a chunk, of live",
        )
        text = f"drop what the device has after a capture; the KV pool then has {STORE_POOL} tokens"
        parser.add_argument("--from-store", action="store_true", help=text)

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per case."""
        arm, label = self.cells[-1].arm, label_of(self.captures[-1], self.cells[-1])
        yield (
            self.arms,
            [
                Job(self.key(arm, one.request, *label), partial(self.take, one))
                for one in self.cases
            ],
        )

    def take(self, case: Case, servers: Servers) -> Iterator[tuple[str, Sample]]:
        """The samples of one case: full prefill, then each capture's cells on fresh KV."""
        (endpoint,) = servers.values()
        request, num_chunks = case.request, len(case.request.chunks)
        kind: dict[str, Any] = {"questions": case.questions} if case.questions else {}
        kind |= {"k": case.k} if case.k else {}
        full = FullPrefill().ask(endpoint, request, [chunk.id for chunk in request.chunks])
        gold = self.scorer.gold(full.text, request)
        # Without fates, since a cell's shares are of moved KV.
        yield self.sample(
            FULL_PREFILL, request, full, gold, cell=kind, num_chunks=num_chunks, fates=None
        )
        for capture in self.captures:
            salt = secrets.token_hex(16)
            # The same seed each time: the first rounds of `live` are alike, however many follow.
            behind = bring_in(
                endpoint, capture, case, salt, random.Random(f"{self.args.seed} {request.id}")
            )
            if self.args.from_store:
                fill_pool(endpoint, long_request(request, full.num_prompt))
            # Neither moved KV nor what is computed after it is a source: no cell changes the next.
            for way in self.cells:
                answer = ask(
                    endpoint,
                    request,
                    request.chunks,
                    reuse=way.reuse,
                    order="retriever",
                    cache_salt=salt,
                )
                check_sources(answer, behind, from_store=self.args.from_store)
                metrics = self.scorer.gold(answer.text, request) | self.scorer.agreement(
                    answer, full, "full"
                )
                cell = {**kind, **capture, **way.label}
                more = {"num_chunks": num_chunks, "fallbacks": answer.info["fallbacks"]}
                yield self.sample(
                    way.arm,
                    request,
                    answer,
                    metrics,
                    cell=cell,
                    label=label_of(capture, way),
                    **more,
                )

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells with normalised F1 and measured shares, and paired differences between selectors,
        and between rounds.

        `ends`: selector -> arms whose cells are also points of its curve: ratios 0 and 1, which run
        once for all selectors.
        """
        cells = cells_of(samples)
        full = {row["request"]: row for row in samples if row["arm"] == FULL_PREFILL}
        taken = grouped(samples, lambda row: [row["arm"], row["cell"]])
        for cell, (_, rows) in zip(cells, taken, strict=True):
            cell |= shares(cell["fates"]) if cell["fates"] else {}
            if found := of_full(rows, full):
                cell["metrics"]["em_of_full"] = found
        by_arm: dict[str, list[Sample]] = defaultdict(list)
        for row in samples:
            # With an alpha the ratio is that of chunks without scores only.
            if row["cell"].get("ratio") in PAIRED_RATIOS and "alpha" not in row["cell"]:
                by_arm[row["arm"]].append(row)
        contrasts = [
            each
            for a, b in PAIRED
            for each in contrast_arms(by_arm[a], by_arm[b], a=a, b=b, metrics=PAIRED_METRICS)
        ]
        contrasts += by_rounds(samples)
        names = {cell["arm"] for cell in cells}
        ends = [end for end in (FULL_REUSE, ALL) if end in names]
        curves = {arm: ends for arm in SELECTORS if arm in names and arm not in UNRATED}
        if UNROTATED in names:  # full reuse turns its keys
            curves[UNROTATED] = [end for end in ends if end == ALL]
        equal = equal_quality(cells, curves)
        said: dict[str, Any] = {
            "verdict": [*not_measurable(cells), *sentences(contrasts)],
            "tables": [
                *tables_by_ratio(cells, curves),
                *([table("Least ratio at equal quality", equal, EQUAL_NOTE)] if equal else []),
            ],
        }
        said |= {"ends": curves, "equal_quality": equal}
        return {"cells": cells, "contrasts": contrasts, **said}


def make_captures(
    names: Sequence[str], neighbors: Sequence[int], rounds: Sequence[int]
) -> list[Capture]:
    """One capture per name; for `preprocessed` one per top-n,
    for `live` one per number of rounds."""
    several: dict[str, list[Capture]] = {
        "alone": [{"capture": "alone"}],
        "live": [{"capture": "live"} | ({"rounds": n} if n > 1 else {}) for n in rounds],
        "preprocessed": [{"capture": "preprocessed", "neighbors": n} for n in neighbors],
    }
    return [one for name in names for one in several[name]]


def make_cells(selectors: Sequence[str], ratios: Sequence[float]) -> list[Cell]:
    """All cells in the order in which they run."""
    cells = [Cell(FULL_REUSE, {"ratio": 0.0}, _reuse("none", 0.0))]
    for selector in (name for name in selectors if name not in UNRATED):
        # Only there nothing of `unrotated` is full reuse.
        usual = [r for r in ratios if r < 1 and (r > 0 or selector == UNROTATED)]
        cells += [Cell(selector, {"ratio": r}, _reuse(selector, r)) for r in usual]
    if "critical@auto" in selectors:
        auto = {"mode": "fused", "selector": "critical", "ratio": "auto"}
        cells += [
            Cell("critical@auto", {"quality": quality}, auto | {"quality": quality})
            for quality in QUALITIES
        ]
    if 1 in ratios:
        # At ratio 1 every selector takes all tokens; this one needs no scores.
        cells.append(Cell(ALL, {"ratio": 1.0}, _reuse("first", 1.0)))
    if {"context", "context-all"} & set(selectors):
        found: list[tuple[str, float, dict[str, Any]]] = [("context", a, {}) for a in ALPHAS]
        # The last: an alpha without focus makes variants, which later cells would be moved from.
        found.append(("context, no focus", 1.0, {"focus": "off"}))
        at, context = {"ratio": ALPHA_RATIO}, _reuse("context", ALPHA_RATIO)
        cells += [
            Cell(arm, at | {"alpha": alpha}, context | {"alpha": alpha} | part)
            for arm, alpha, part in found
        ]
    return cells


def label_of(capture: Capture, cell: Cell) -> list[str]:
    """For the keys of samples."""
    return [f"{name}={value}" for name, value in ({**capture} | cell.label).items()]


def bring_in(
    endpoint: Endpoint, capture: Capture, case: Case, salt: str, rng: random.Random
) -> dict[str, set[int]]:
    """Capture the case's chunks on the server under `salt`;
    chunk id -> numbers of chunks before it at its captures."""
    chunks = case.request.chunks
    if capture["capture"] == "live":
        behind: dict[str, set[int]] = defaultdict(set)
        # The prefill alone captures.
        request = replace(case.request, max_new_tokens=1)
        places: dict[str, int] = {}
        for number in range(capture.get("rounds", 1)):
            shuffled = rng.sample(chunks, len(chunks))
            halves = shuffled[::2], shuffled[1::2]
            # Of the first round, for all: then no chunk has the same stranger in two rounds.
            places = places or {chunk.id: place for place, chunk in enumerate(chain(*halves))}
            for half in halves:
                # Each time behind another stranger, so that no two variants have the same prefix.
                strangers = [
                    case.strangers[-1 - (places[chunk.id] + number) % len(chunks)] for chunk in half
                ]
                mixed = [*chain(*zip(strangers, half, strict=True))]
                ask(endpoint, request, mixed, reuse="exact", order="retriever", cache_salt=salt)
                for i, chunk in enumerate(half):
                    behind[chunk.id].add(2 * i + 1)
        return behind
    neighbors = {
        chunk.id: case.neighbors[chunk.id][: capture.get("neighbors", 0)] for chunk in chunks
    }
    for each in dict.fromkeys(near for found in neighbors.values() for near in found):
        # in the store, so that it can be moved before a chunk
        _preprocess(endpoint.url, each, (), salt)
    for chunk in chunks:
        _preprocess(endpoint.url, chunk, neighbors[chunk.id], salt)
    return {chunk_id: {len(found)} for chunk_id, found in neighbors.items()}


def fill_pool(endpoint: Endpoint, request: Request) -> None:
    """Fill the KV pool with other tenants' KV, by this long request."""
    # A salt each, or the second request would find the first one's KV and fill nothing.
    for _ in range(STORE_POOL // LONG + 1):
        ask(endpoint, request, request.chunks, reuse="exact", cache_salt=secrets.token_hex(16))


def check_sources(
    answer: Greedy, behind: Mapping[str, Collection[int]], *, from_store: bool = False
) -> None:
    """Raise CommandError if a chunk was moved from another source than its capture:
    selectors would not move the same KV."""
    if from_store and answer.info["fallbacks"]:
        raise CommandError(f"not moved from the store: {answer.info['fallbacks']}")
    # Gaps are tokens between moved chunks, computed in the pass: they have no source.
    for source in (one for one in answer.info["reuse"]["sources"] if one["from"] != "gap"):
        is_known = source["variant_prefix"] in behind.get(source["chunk"], ())
        # What the device still has did not go through the store's codec.
        if not is_known or (from_store and source["from"] == "device"):
            raise CommandError(
                f"{source['chunk']} was moved from another source than its capture: {source}"
            )


def by_rounds(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Contrasts of the most variants a chunk against fewer, everything else the same."""
    live = [row for row in samples if row["cell"].get("capture") == "live"]
    rounds: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for row in live:
        # `contrast_arms` pairs within a cell, which must then not tell the rounds apart.
        cell = {name: value for name, value in row["cell"].items() if name != "rounds"}
        rounds[row["arm"], row["cell"].get("rounds", 1)].append({**row, "cell": cell})
    most = max((number for _, number in rounds), default=1)
    return [
        each
        for (arm, number), rows in rounds.items()
        if number < most
        for each in contrast_arms(
            rows,
            rounds[arm, most],
            a=f"{arm}, variants {number}",
            b=f"{arm}, variants {most}",
            metrics=("same", "kl"),
        )
    ]


def shares(fates: Mapping[str, int]) -> dict[str, float]:
    """Shares: exact and moved tokens of all prompt tokens, recomputed tokens of the moved ones."""
    prompt = sum(fates[fate] for fate in ("exact", "relocated", "recomputed", "computed"))
    moved = fates["relocated"] + fates["recomputed"]
    return {
        "exact_share": round(fates["exact"] / prompt, 4),
        "moved_share": round(moved / prompt, 4),
        "recomputed_share": round(fates["recomputed"] / moved, 4) if moved else 0.0,
    }


def of_full(rows: Sequence[Sample], full: Mapping[str, Sample]) -> dict[str, float] | None:
    """Exact match as a share of full prefill's on the same questions, with its paired interval;
    None if it was not scored.

    full: request -> its sample with full prefill.
    """
    both = [(full[row["request"]], row) for row in rows if row["request"] in full]
    pairs = [(a, b) for a, b in both if "em" in a["metrics"] and "em" in b["metrics"]]
    blocks = [b.get("block") for _, b in pairs]
    values = [(a["metrics"]["em"], b["metrics"]["em"]) for a, b in pairs]
    found = share(values, blocks=None if None in blocks else blocks) if pairs else None
    return found and rounded(found)


def not_measurable(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of question that full prefill answers too seldom."""
    asked = [(cell, cell["metrics"]["em"]["mean"]) for cell in cells if "em" in cell["metrics"]]
    return [
        f"Not measurable with these weights: full prefill answers {right:.3f} of the questions"
        f" {cell['cell']['questions']}."
        for cell, right in asked
        if cell["arm"] == FULL_PREFILL and "questions" in cell["cell"] and right < MEASURABLE
    ]


def tables_by_ratio(
    cells: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[str]]
) -> list[Row]:
    """A table a metric: kinds of question, captures and selectors down, ratios across."""
    found = []
    for metric in (name for name in SHOWN if any(name in cell["metrics"] for cell in cells)):
        rows: dict[tuple[str, ...], Row] = {}
        for cell in (
            cell for cell in cells if "ratio" in cell["cell"] and "alpha" not in cell["cell"]
        ):
            variant = {key: value for key, value in cell["cell"].items() if key != "ratio"}
            # Ratios 0 and 1 are arms of their own and belong to each selector's row.
            for arm in (arm for arm, ends in curves.items() if cell["arm"] in (arm, *ends)):
                row = rows.setdefault(
                    (*map(str, variant.values()), arm), {**variant, "selector": arm}
                )
                if metric in cell["metrics"]:
                    row[f"{cell['cell']['ratio']:g}"] = round(cell["metrics"][metric]["mean"], 3)
        found.append(table(f"{METRICS[metric].label}, by ratio", [*rows.values()]))
    auto = [
        {**cell["cell"], "recomputed_share": cell["recomputed_share"]}
        | {
            name: round(cell["metrics"][name]["mean"], 3)
            for name in SHOWN
            if name in cell["metrics"]
        }
        for cell in cells
        if "quality" in cell["cell"]
    ]
    return [one for one in (*found, table("Ratio auto: the share it takes", auto)) if one["rows"]]


# Private, in order of use


def _reuse(selector: str, ratio: float) -> dict[str, Any]:
    name, _, layer = selector.removesuffix("-all").partition("@")
    more: dict[str, Any] = {"focus": "off"} if selector.endswith("-all") else {}
    if layer:
        more = {
            "depth" if name == "deviation" else "layers": int(layer) if layer.isdecimal() else layer
        }
    return {"mode": "fused", "selector": name, "ratio": float(ratio)} | more


def _preprocess(url: str, chunk: TextChunk, neighbors: Sequence[TextChunk], salt: str) -> None:
    body = {
        "chunk": {"id": chunk.id, "text": chunk.text},
        "neighbors": [{"id": each.id, "text": each.text} for each in neighbors],
        "cache_salt": salt,
    }
    post(url + "/chunkcache/preprocess", body)
