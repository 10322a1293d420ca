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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.metrics import METRICS
from eval.progress import progress
from eval.quality.greedy import Endpoint, Greedy, ask
from eval.quality.options import (
    Endpoints,
    add_quality_options,
    check_options,
    finish,
    make_scorer,
    open_endpoints,
    spec_of,
)
from eval.quality.scores import GOLD_METRICS, Scorer, block_of, cells_of, differences, rounded, table
from eval.quality.workers import workers
from eval.quality.world_questions import add_hop_option, two_hop_requests
from eval.run import Run, Sample
from eval.serve.arms import Arm, parse_arm
from eval.serve.options import default_folder
from eval.serve.runner import load_facts
from eval.task import Request, add_task_options, load_requests

RETRIEVER, RANDOM = "retriever", "random"
"""Values of a cell's `order`."""
SHOWN = (*GOLD_METRICS, "same_given", "rouge_l_given", "bert_score_given", "kl_given")
PER_REQUEST = ("bert_score", "f1", "em", "bert_score_given", "rouge_l_given", "kl_given")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this mode."""
    add_task_options(parser)
    parser.set_defaults(requests=20)
    add_hop_option(parser)
    parser.add_argument(
        "--orders", type=int, default=100, metavar="N", help="random orders of each request's chunks (default: 100)"
    )
    parser.add_argument("--arm", default="ours", help="an arm, or NAME=URL[,chat|rag] for a running server")
    add_quality_options(parser)


def measure(args: argparse.Namespace) -> int:
    """Answer, score, record."""
    check_options(args)
    if args.orders < 1:
        raise CommandError(f"--orders must be at least 1, got {args.orders}")
    arm = in_given_order(parse_arm(args.arm))
    found = two_hop_requests(args) if args.hop == 2 else load_requests(args)
    requests = [request for request in found if len(request.chunks) > 1]
    if not requests:
        raise CommandError(f"--task {args.task}: no request has two chunks to reorder")
    scorer, folder = make_scorer(args, [arm]), args.out or default_folder(f"quality-{args.mode}")
    facts = load_facts(folder)
    with Run(
        folder,
        kind="quality",
        spec=spec_of(args, [arm], requests),
        summarize=partial(summarize, scorer=scorer, facts=facts),
        baseline=args.baseline,
    ) as run:
        with open_endpoints(args, requests, facts, folder) as endpoints:
            answer_all(run, requests, endpoints, arm, scorer, args)
        results = run.results()
        within = "\n".join(
            f"baseline within mean ± sd of random orders, {metric}: {share:.0%} of requests"
            for metric, share in results["within_sd"].items()
        )
        lines = [table(results["cells"], SHOWN), differences(results["contrasts"], SHOWN), within]
        return finish(run, "\n".join(filter(None, lines)))


def in_given_order(arm: Arm) -> Arm:
    """The arm with its server set to keep the chunks' order. Raises CommandError for an arm that reorders in the client."""
    if arm.adapter is not None:
        raise CommandError(f"--arm {arm.name} reorders chunks itself, so it cannot compare orders")
    return replace(arm, body={**arm.body, "order": "retriever"}) if arm.route == "rag" else arm


def answer_all(
    run: Run,
    requests: Sequence[Request],
    endpoints: Endpoints,
    arm: Arm,
    scorer: Scorer,
    args: argparse.Namespace,
) -> None:
    """Take every sample that `run` does not hold yet. Prints the number of requests first."""
    endpoint = None
    drawn = {request.id: [in_turn(request), *draw_orders(request, args.orders, args.seed)] for request in requests}
    left = {
        request.id: [n for n in range(1 + args.orders) if key_of(arm, request, n) not in run] for request in requests
    }
    num_asked = sum(len({drawn[name][n] for n in (0, *numbers)}) for name, numbers in left.items() if numbers)
    print(
        f"eval quality: {num_asked} requests to send, for {len(requests)} questions in different orders",
        file=sys.stderr,
    )
    with workers(args.clients) as pool, progress("orders", len(requests) * (1 + args.orders)) as bar:
        for request in requests:
            orders, missing = drawn[request.id], left[request.id]
            if missing:
                endpoint = endpoint or endpoints.open(arm)
                asked = dict.fromkeys([orders[0], *(orders[number] for number in missing)])
                answers = answer_orders(pool, endpoint, request, list(asked))
                if any(isinstance(answer, CommandError) for answer in answers.values()):
                    endpoints.check(endpoint)
                for number in missing:
                    row = sample(arm, request, number, orders[number], answers, scorer)
                    run.add(key_of(arm, request, number), row)
            bar.update(len(orders))


Order = tuple[int, ...]
"""Indices into the request's own list of chunks."""


def in_turn(request: Request) -> Order:
    """The retriever's order."""
    return tuple(range(len(request.chunks)))


def draw_orders(request: Request, num_orders: int, seed: int) -> list[Order]:
    """Independent random orders, equal for equal seeds. An order may occur twice, or be the retriever's."""
    rng = random.Random(f"{seed} {request.id}")
    return [tuple(rng.sample(in_turn(request), len(request.chunks))) for _ in range(num_orders)]


def key_of(arm: Arm, request: Request, number: int) -> str:
    """The sample's key; number 0 is the retriever's order."""
    return f"permutation/{arm.name}/{request.id}/{number}"


def answer_orders(
    pool: ThreadPoolExecutor, endpoint: Endpoint, request: Request, orders: Sequence[Order]
) -> dict[Order, Greedy | CommandError]:
    """The answer to each order, sent once; a refused request gives its error."""

    def one(order: Order) -> Greedy | CommandError:
        try:
            return ask(endpoint, request, [request.chunks[place] for place in order])
        except CommandError as error:
            return error

    return dict(zip(orders, pool.map(one, orders), strict=True))


def sample(
    arm: Arm,
    request: Request,
    number: int,
    order: Order,
    answers: Mapping[Order, Greedy | CommandError],
    scorer: Scorer,
) -> Sample:
    """A row of samples.jsonl; number 0 is the retriever's order."""
    row: Sample = {
        "arm": arm.name,
        "cell": {"order": RANDOM if number else RETRIEVER},
        "mode": "permutation",
        "request": request.id,
        "block": block_of(request),
        "warm_up": False,
        "permutation": number,
        "order": list(order),
    }
    answer, retriever = answers[order], answers[in_turn(request)]
    if isinstance(answer, CommandError) or isinstance(retriever, CommandError):
        error = answer if isinstance(answer, CommandError) else retriever
        return row | {"metrics": {}, "fates": None, "error": str(error)}
    metrics = scorer.gold(answer.text, request)
    if number:
        metrics |= scorer.agreement(answer, retriever, "given")
    return row | {"metrics": rounded(metrics), "fates": answer.fates, "answer": answer.text}


def summarize(samples: Sequence[Sample], *, scorer: Scorer, facts: dict[str, Any]) -> dict[str, Any]:
    """Cells and the mean difference; per request the retriever's order against mean and standard deviation of the others.

    Cells and contrasts count each request once, with the mean over its orders: orders of one request are not independent
    samples, and neither are requests of one block. A cell's `errors` counts failed answers among its `num_answers`.
    """
    pooled = [{**row, "cell": {}} for row in samples]
    baseline, drawn = [row for row in pooled if not row["permutation"]], [row for row in pooled if row["permutation"]]
    contrasts = contrast_arms(baseline, drawn, a="the retriever's order", b="a random order")
    spread = {
        request: _spread(
            [row for row in baseline if row["request"] == request], [row for row in drawn if row["request"] == request]
        )
        for request in dict.fromkeys(row["request"] for row in samples)
    }
    within: dict[str, list[bool]] = defaultdict(list)
    for metrics in spread.values():
        for metric, found in metrics.items():
            if found["baseline"] is not None:
                # Tolerance for rounding: if all orders give the same value, the deviation is 0 and the value is the mean.
                within[metric].append(abs(found["baseline"] - found["mean"]) <= found["sd"] + 1e-9)
    cells = [
        _one_a_request([row for row in samples if row["cell"]["order"] == order])
        for order in dict.fromkeys(row["cell"]["order"] for row in samples)
    ]
    return {
        "cells": cells,
        "contrasts": contrasts,
        "verdict": [*_told(cells, contrasts), *sentences(contrasts)],
        "requests": [{"request": request, "metrics": metrics} for request, metrics in spread.items()],
        "within_sd": {metric: sum(each) / len(each) for metric, each in within.items()},
        **scorer.spec(),
        **facts,
    }


def _one_a_request(rows: Sequence[Sample]) -> dict[str, Any]:
    """The cell of these orders of all requests."""
    by_request: dict[str, list[Sample]] = defaultdict(list)
    for row in rows:
        if not row.get("error"):
            by_request[row["request"]].append(row)
    folded = [taken[0] | {"metrics": _means(taken)} for taken in by_request.values()]
    (whole,) = cells_of(rows)
    figures = cells_of(folded)[0] | {"fates": whole["fates"]} if folded else whole
    return figures | {"errors": whole["errors"], "num_answers": len(rows)}


def _means(rows: Sequence[Sample]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for metric, value in row["metrics"].items():
            values[metric].append(value)
    return {metric: statistics.fmean(taken) for metric, taken in values.items()}


def _told(cells: Sequence[Mapping[str, Any]], contrasts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effect of other orders in words, for these requests, without a claim about others."""
    said = []
    for one in (one for one in contrasts if one["metric"] in ("em", "f1")):
        change = f"{one['value']:+.3g} on average, 95% interval [{one['low']:+.3g}, {one['high']:+.3g}]"
        told = change if any((one["value"], one["low"], one["high"])) else "no difference"
        said.append(
            f"{METRICS[one['metric']].label}, random orders less the given one: {told}, over {one['n']} requests."
        )
    for cell in (cell for cell in cells if "same_given" in cell["metrics"]):
        same = cell["metrics"]["same_given"]
        share = f"{same['mean']:.1%} of answers are those to the given order"
        told = (
            f"{share}, 95% interval [{same['low']:.1%}, {same['high']:.1%}]" if same["mean"] < 1 else "nothing differs"
        )
        said.append(f"Answers to random orders: {told}, over {cell['n']} requests.")
    return said


def _spread(baseline: Sequence[Sample], drawn: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for metric in PER_REQUEST:
        values = [row["metrics"][metric] for row in drawn if metric in row["metrics"]]
        if values:
            shown = next((row["metrics"].get(metric) for row in baseline), None)
            found[metric] = {"baseline": shown, "mean": statistics.fmean(values), "sd": statistics.pstdev(values)}
    return found
