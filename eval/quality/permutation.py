"""`python -m eval quality permutation`: does the order of the chunks matter? CRAFT figure 5 on any task and model.

Each request is answered in the retriever's order and in random ones, and all answers are scored alike. Orders that are drawn
twice are sent once. The server keeps the order of the request (its own ordering is off) and reuses cached KV. All orders of a
request are one sample: figures count it once, with the mean over its random orders.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.metrics import METRICS
from eval.quality.greedy import Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.scores import cells_of
from eval.quality.world_questions import add_hop_option, two_hop_requests
from eval.run import Sample
from eval.serve.arms import Arm, parse_arm
from eval.task import Request, load_requests

RETRIEVER, RANDOM = "retriever", "random"
"""Values of a cell's `order`."""
PER_REQUEST = ("bert_score", "f1", "em", "bert_score_given", "rouge_l_given", "kl_given")

Order = tuple[int, ...]
"""Indices into the request's own list of chunks."""


class Permutation(Mode):
    """Every request in its given order and in random ones."""

    name, summary = "permutation", "orders of chunks (CRAFT fig. 5)"

    def __init__(self, args: argparse.Namespace) -> None:
        if args.orders < 1:
            raise CommandError(f"--orders must be at least 1, got {args.orders}")
        found = two_hop_requests(args) if args.hop == 2 else load_requests(args)
        requests = [request for request in found if len(request.chunks) > 1]
        if not requests:
            raise CommandError(f"--task {args.task}: no request has two chunks to reorder")
        super().__init__(args, [in_given_order(parse_arm(args.arm))], requests)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Number of orders, the arm."""
        parser.set_defaults(requests=20)
        add_hop_option(parser)
        text = "random orders of each request's chunks (default: 100)"
        parser.add_argument("--orders", type=int, default=100, metavar="N", help=text)
        parser.add_argument("--arm", default="ours", help="an arm, or NAME=URL[,chat|rag] for a running server")

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per request; the number of requests to send is printed first."""
        drawn = [[in_turn(one), *draw_orders(one, self.args.orders, self.args.seed)] for one in self.requests]
        told = f"{sum(len(set(orders)) for orders in drawn)} requests to send"
        print(f"eval quality: {told}, for {len(self.requests)} questions in different orders", file=sys.stderr)
        both = zip(self.requests, drawn, strict=True)
        jobs = [Job(self._key(one, self.args.orders), partial(self._one, one, orders)) for one, orders in both]
        yield self.arms, jobs

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """As `summarize`."""
        return summarize(samples)

    def _key(self, request: Request, number: int) -> str:
        """Number 0 is the retriever's order."""
        return f"permutation/{self.arms[0].name}/{request.id}/{number}"

    def _one(self, request: Request, orders: Sequence[Order], servers: Servers) -> Iterator[tuple[str, Sample]]:
        (endpoint,) = servers.values()
        answers: dict[Order, Greedy | CommandError] = {}
        for order in dict.fromkeys(orders):
            try:
                answers[order] = ask(endpoint, request, [request.chunks[place] for place in order])
            except CommandError as error:
                answers[order] = error
        given = answers[orders[0]]
        for number, order in enumerate(orders):
            answer = given if isinstance(given, CommandError) else answers[order]
            metrics: dict[str, float] = {}
            if isinstance(answer, Greedy) and isinstance(given, Greedy):
                metrics = self.scorer.gold(answer.text, request)
                metrics |= self.scorer.agreement(answer, given, "given") if number else {}
            cell, more = {"order": RANDOM if number else RETRIEVER}, {"permutation": number, "order": [*order]}
            row = self.sample(endpoint.arm.name, request, answer, metrics, cell=cell, **more)
            yield self._key(request, number), row


def in_given_order(arm: Arm) -> Arm:
    """The arm with its server set to keep the chunks' order. Raises CommandError for an arm that reorders in the client."""
    if arm.adapter is not None:
        raise CommandError(f"--arm {arm.name} reorders chunks itself, so it cannot compare orders")
    return replace(arm, body={**arm.body, "order": "retriever"}) if arm.route == "rag" else arm


def in_turn(request: Request) -> Order:
    """The retriever's order."""
    return tuple(range(len(request.chunks)))


def draw_orders(request: Request, num_orders: int, seed: int) -> list[Order]:
    """Independent random orders, equal for equal seeds. An order may occur twice, or be the retriever's."""
    rng = random.Random(f"{seed} {request.id}")
    return [tuple(rng.sample(in_turn(request), len(request.chunks))) for _ in range(num_orders)]


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Cells and the mean difference; per request the retriever's order against mean and standard deviation of the others.

    Cells and contrasts count each request once, with the mean over its orders: orders of one request are not independent
    samples, and neither are requests of one block. A cell's `errors` counts failed answers among its `num_answers`.
    """
    rows = {order: [row for row in samples if row["cell"]["order"] == order] for order in (RETRIEVER, RANDOM)}
    pooled = ([{**row, "cell": {}} for row in taken] for taken in rows.values())
    contrasts = contrast_arms(*pooled, a="the retriever's order", b="a random order")
    cells = [_one_a_request(taken) for taken in rows.values() if taken]
    spread = {request: _spread(taken) for request, taken in _by_request(samples).items()}
    # Tolerance for rounding: if all orders give the same value, the deviation is 0 and the value is the mean.
    within = {
        metric: [abs(found["baseline"] - found["mean"]) <= found["sd"] + 1e-9 for found in taken]
        for metric in PER_REQUEST
        if (taken := [one[metric] for one in spread.values() if one.get(metric, {}).get("baseline") is not None])
    }
    return {
        "cells": cells,
        "contrasts": contrasts,
        "verdict": [*_told(cells, contrasts), *sentences(contrasts)],
        "requests": [{"request": request, "metrics": metrics} for request, metrics in spread.items()],
        "within_sd": {metric: statistics.fmean(each) for metric, each in within.items()},
    }


# Private, in order of use


def _by_request(rows: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for row in rows:
        found[row["request"]].append(row)
    return found


def _spread(rows: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for metric in PER_REQUEST:
        measured = [row for row in rows if metric in row["metrics"]]
        if values := [row["metrics"][metric] for row in measured if row["permutation"]]:
            shown = next((row["metrics"][metric] for row in measured if not row["permutation"]), None)
            found[metric] = {"baseline": shown, "mean": statistics.fmean(values), "sd": statistics.pstdev(values)}
    return found


def _one_a_request(rows: Sequence[Sample]) -> dict[str, Any]:
    """The cell of these orders of all requests."""
    good = _by_request([row for row in rows if not row.get("error")])
    folded = [taken[0] | {"metrics": _means(taken)} for taken in good.values()]
    (whole,) = cells_of(rows)
    figures = cells_of(folded)[0] | {"fates": whole["fates"]} if folded else whole
    return figures | {"errors": whole["errors"], "num_answers": len(rows)}


def _means(rows: Sequence[Sample]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    return {name: statistics.fmean(row["metrics"][name] for row in rows if name in row["metrics"]) for name in names}


def _told(cells: Sequence[Mapping[str, Any]], contrasts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effect of other orders in words, for these requests, without a claim about others."""
    said = []
    for one in (one for one in contrasts if one["metric"] in ("em", "f1")):
        change = f"{one['value']:+.3g} on average, 95% interval [{one['low']:+.3g}, {one['high']:+.3g}]"
        told = change if any((one["value"], one["low"], one["high"])) else "no difference"
        name = METRICS[one["metric"]].label
        said.append(f"{name}, random orders less the given one: {told}, over {one['n']} requests.")
    for cell in (cell for cell in cells if "same_given" in cell["metrics"]):
        same = cell["metrics"]["same_given"]
        told = f"{same['mean']:.1%} of answers are those to the given order"
        told += f", 95% interval [{same['low']:.1%}, {same['high']:.1%}]"
        told = told if same["mean"] < 1 else "nothing differs"
        said.append(f"Answers to random orders: {told}, over {cell['n']} requests.")
    return said
