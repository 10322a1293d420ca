"""`python -m eval quality permutation`: does the order of the chunks matter? CRAFT figure 5 on any
task and model.

Each request is answered in the retriever's order and in random ones, and all answers are scored
alike. Orders that are drawn twice are sent once. The server keeps the order of the request (its own
ordering is off) and reuses cached KV. All orders of a request are one sample: figures count it
once, with the mean over its random orders.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.quality.greedy import Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.scores import cells_of
from eval.run import Sample
from eval.serve.arms import Arm, parse_arm
from eval.task import Request, load_requests

RETRIEVER, RANDOM = "retriever", "random"
"""Values of a cell's `order`."""

Order = tuple[int, ...]
"""Indices into the request's own list of chunks."""


class Permutation(Mode):
    """Every request in its given order and in random ones."""

    name, summary = "permutation", "orders of chunks (CRAFT fig. 5)"

    def __init__(self, args: argparse.Namespace) -> None:
        if args.orders < 1:
            raise CommandError(f"--orders must be at least 1, got {args.orders}")
        requests = [request for request in load_requests(args) if len(request.chunks) > 1]
        if not requests:
            raise CommandError(f"--task {args.task}: no request has two chunks to reorder")
        super().__init__(args, [in_given_order(parse_arm(args.arm))], requests)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Number of orders, the arm."""
        parser.set_defaults(requests=20)
        text = "random orders of each request's chunks (default: 100)"
        parser.add_argument("--orders", type=int, default=100, metavar="N", help=text)
        parser.add_argument(
            "--arm", default="ours", help="an arm, or NAME=URL[,chat|rag] for a running server"
        )

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per request; the number of requests to send is printed first."""
        drawn = [
            draw_orders(request, self.args.orders, self.args.seed) for request in self.requests
        ]
        told = f"{sum(len(set(orders)) for orders in drawn)} requests to send"
        print(
            f"eval quality: {told}, for {len(self.requests)} questions in different orders",
            file=sys.stderr,
        )
        name, last, both = (
            self.arms[0].name,
            self.args.orders,
            zip(self.requests, drawn, strict=True),
        )
        yield (
            self.arms,
            [
                Job(self.key(name, one, last), partial(self._one, one, orders))
                for one, orders in both
            ],
        )

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells and the mean difference; per request the retriever's order against mean and
        standard deviation of the others.

        Cells and contrasts count each request once, with the mean over its orders: orders of one
        request are not independent samples, and neither are requests of one block. A cell's
        `errors` counts failed answers among its `num_answers`.
        """
        names = [*dict.fromkeys(name for row in samples for name in row["metrics"])]
        values = [{"request": row["request"], **row["cell"], **row["metrics"]} for row in samples]
        # Columns by name, since `figures` is also called without samples.
        frame = pd.DataFrame(values, columns=["request", "order", *names]).set_index("request")
        given, drawn = (
            frame[frame["order"] == order][names].groupby(level=0, sort=False)
            for order in (RETRIEVER, RANDOM)
        )
        # With `--orders 1` the deviation of a sample (`ddof=1`) would be NaN.
        spread = {"baseline": given.mean(), "mean": drawn.mean(), "sd": drawn.std(ddof=0)}
        found = {
            name: row.dropna().groupby(level=1, sort=False)
            for name, row in pd.concat(spread, axis=1).iterrows()
        }
        # Tolerance for rounding: if all orders give the same value, the deviation is 0 and the
        # value is the mean.
        off = (spread["baseline"] - spread["mean"]).abs() - spread["sd"]
        within = (off <= 1e-9).astype(float).where(off.notna()).mean().dropna()
        rows = {
            order: [row for row in samples if row["cell"]["order"] == order]
            for order in (RETRIEVER, RANDOM)
        }
        # `contrast_arms` pairs within a cell, and each order is a cell of its own.
        pooled = ([{**row, "cell": {}} for row in taken] for taken in rows.values())
        contrasts = contrast_arms(*pooled, a="the retriever's order", b="a random order")
        means = zip(rows.values(), (spread["baseline"], spread["mean"]), strict=True)
        return {
            "cells": [_one_a_request(taken, mean) for taken, mean in means if taken],
            "contrasts": contrasts,
            "verdict": sentences(contrasts),
            "requests": [
                {
                    "request": request,
                    "metrics": {name: one.droplevel(1).to_dict() for name, one in found[request]},
                }
                for request in frame.index.unique()
            ],
            "within_sd": within.to_dict(),
        }

    def _one(
        self, request: Request, orders: Sequence[Order], servers: Servers
    ) -> Iterator[tuple[str, Sample]]:
        (endpoint,) = servers.values()
        answers: dict[Order, Greedy | CommandError] = {}
        for order in dict.fromkeys(orders):
            try:
                answers[order] = ask(endpoint, request, [request.chunks[place] for place in order])
            except CommandError as error:
                answers[order] = error
        given = answers[orders[0]]
        for number, order in enumerate(orders):
            # Without the given order's answer there is nothing to compare with: all orders fail.
            answer = given if isinstance(given, CommandError) else answers[order]
            metrics: dict[str, float] = {}
            if isinstance(answer, Greedy) and isinstance(given, Greedy):
                metrics = self.scorer.gold(answer.text, request)
                metrics |= self.scorer.agreement(answer, given, "given") if number else {}
            cell, more = (
                {"order": RANDOM if number else RETRIEVER},
                {"permutation": number, "order": [*order]},
            )
            yield self.sample(
                endpoint.arm.name, request, answer, metrics, cell=cell, label=[number], **more
            )


def in_given_order(arm: Arm) -> Arm:
    """The arm with its server set to keep the chunks' order.
    Raises CommandError for an arm that reorders in the client."""
    if arm.adapter is not None:
        raise CommandError(f"--arm {arm.name} reorders chunks itself, so it cannot compare orders")
    return replace(arm, body={**arm.body, "order": "retriever"}) if arm.route == "rag" else arm


def draw_orders(request: Request, num_orders: int, seed: int) -> list[Order]:
    """The retriever's order, then independent random ones, equal for equal seeds,
    in which any order may occur again."""
    rng, given = random.Random(f"{seed} {request.id}"), tuple(range(len(request.chunks)))
    return [given, *(tuple(rng.sample(given, len(given))) for _ in range(num_orders))]


# Private, in order of use


def _one_a_request(rows: Sequence[Sample], means: pd.DataFrame) -> dict[str, Any]:
    """The cell of these orders of all requests. means: one line per request."""
    (whole,) = cells_of(rows)
    good = {row["request"]: row for row in rows if not row.get("error")}
    folded = [row | {"metrics": means.loc[name].dropna().to_dict()} for name, row in good.items()]
    figures = cells_of(folded)[0] if folded else whole
    return whole | {"n": figures["n"], "metrics": figures["metrics"], "num_answers": len(rows)}
