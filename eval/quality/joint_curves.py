"""`python -m eval quality joint`: how much may KV blocks be fused before answers change? (Fast Fusion figures 4 and 5, table 1)

One server of ours with `--reuse fused`. Every question is answered once with full prefill, then once per cell: its KV is encoded
jointly after the prefill (sglang_chunkcache/fusion/joint), the blocks of its chunks (CFF) or those of the prompts of its batch
(BFF), by a threshold or a ratio, in blocks of some size. `compression` is blocks over shared blocks of all layers and answers.

Requests of a batch, `--batch` of them, are sent at once while a longer one is prefilled, so that most are prefilled together. How
many of them were is the cell's `together`.

NOTE: an answer's first token is computed before anything is fused, so `kl_first` is that of two equal prefills, and what an
answer's only token says does not change. KL is the mean over all tokens, the first included.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.outcome import Row, table
from eval.quality.greedy import FULL_PREFILL, Endpoint, FullPrefill, Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.ratio_cases import Case, data_cases, long_request, world_cases
from eval.quality.ratio_curves import of_full
from eval.quality.scores import cells_of
from eval.recorded import grouped
from eval.run import Sample
from eval.serve.arms import ARMS, UNAUDITED, Arm
from eval.task import Request
from eval.world.kinds import KINDS

JOINT = "joint"
OVERS = ("chunks", "batch")
FLAGS = ("--reuse", "fused", *UNAUDITED)
SHOWN = ("same", "kl", "kl_max", "em", "f1")
HEAD_START_S = 0.1
"""Of the request during whose prefill a batch arrives."""


class JointCurves(Mode):
    """Every case with full prefill, and in every cell."""

    name, summary = "joint", "similar KV blocks fused (Fast Fusion figs. 4, 5)"

    def __init__(self, args: argparse.Namespace) -> None:
        if not all(0 <= each <= 1 for each in args.thresholds) or not all(each > 1 for each in args.ratios):
            raise CommandError("--thresholds must be in 0..1, --ratios above 1")
        if min(*args.blocks, *args.batch, args.worlds) < 1:
            raise CommandError("--blocks, --batch and --worlds must be at least 1")
        self.cases = world_cases(args) if args.task == "world" else list(data_cases(args))
        if not self.cases:
            raise CommandError(f"--task {args.task}: no request has {args.k or 2} chunks")
        self.cells = make_cells(args.over, args.blocks, args.thresholds, args.ratios, args.batch)
        arm = replace(ARMS["ours"], name=JOINT, flags=(*ARMS["ours"].flags, *FLAGS))
        super().__init__(args, [arm], [case.request for case in self.cases])

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """What is compared with what, and when it fuses."""
        parser.add_argument("--over", nargs="+", choices=OVERS, default=list(OVERS))
        parser.add_argument("--blocks", nargs="+", type=int, default=[4, 16], metavar="N", help="tokens of a block")
        parser.add_argument("--thresholds", nargs="*", type=float, default=[0.5, 0.7, 0.8, 0.9, 0.95])
        parser.add_argument("--ratios", nargs="*", type=float, default=[1.25, 1.5, 2.0])
        parser.add_argument(
            "--batch", nargs="+", type=int, default=[8], metavar="N", help="requests sent at once, for batch"
        )
        text = "of the world, --requests of each kind and world (default: linked); see eval/world/kinds.py"
        parser.add_argument("--questions", nargs="+", choices=KINDS, default=["linked"], metavar="KIND", help=text)
        parser.add_argument("--worlds", type=int, default=1, metavar="N", help="that of --seed and the next ones")
        parser.set_defaults(neighbors=[1])

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per largest batch of cases."""
        size, label = max(self.args.batch), label_of(self.cells[-1])
        batches = [self.cases[at : at + size] for at in range(0, len(self.cases), size)]
        yield self.arms, [Job(self.key(JOINT, one[-1].request, *label), partial(self.take, one)) for one in batches]

    def take(self, cases: Sequence[Case], servers: Servers) -> Iterator[tuple[str, Sample]]:
        """The samples of some cases: full prefill of each, then the cells, in batches of the cell's size."""
        (endpoint,) = servers.values()
        found = FullPrefill()
        full = [found.ask(endpoint, each.request, [chunk.id for chunk in each.request.chunks]) for each in cases]
        opener = long_request(cases[0].request, full[0].num_prompt)
        for case, answer in zip(cases, full, strict=True):
            gold = self.scorer.gold(answer.text, case.request)
            yield self.sample(FULL_PREFILL, case.request, answer, gold, cell=_kind(case))
        for setting in self.cells:
            for case, given, answer in zip(cases, full, _answers(endpoint, cases, setting, opener), strict=True):
                if "joint_failed" in answer.info["fallbacks"]:
                    raise CommandError(f"{case.request.id}: {answer.info['fallbacks']}")
                metrics = self.scorer.gold(answer.text, case.request) | self.scorer.agreement(answer, given, "full")
                cell, told = {**_kind(case), **setting}, answer.info["joint"]
                more = {"encoded": {name: told[name] for name in ("requests", "blocks", "shared", "ms")}}
                yield self.sample(JOINT, case.request, answer, metrics, cell=cell, label=label_of(setting), **more)

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells with what was fused, and paired differences from full prefill."""
        cells = cells_of(samples)
        full = [row for row in samples if row["arm"] == FULL_PREFILL]
        by_request = {row["request"]: row for row in full}
        contrasts = []
        for cell, (_, rows) in zip(cells, grouped(samples, lambda row: [row["arm"], row["cell"]]), strict=True):
            if cell["arm"] != JOINT:
                continue
            cell |= fused_of([row["encoded"] for row in rows if "encoded" in row])
            if found := of_full(rows, by_request):
                cell["metrics"]["em_of_full"] = found
            like = [{**by_request[row["request"]], "cell": row["cell"]} for row in rows if row["request"] in by_request]
            contrasts += contrast_arms(like, rows, a=FULL_PREFILL, b=JOINT, metrics=("em", "f1"))
        return {"cells": cells, "contrasts": contrasts, "verdict": sentences(contrasts), "tables": tables_of(cells)}


def make_cells(
    overs: Sequence[str],
    blocks: Sequence[int],
    thresholds: Sequence[float],
    ratios: Sequence[float],
    batches: Sequence[int],
) -> list[dict[str, Any]]:
    """The `joint` fields of the requests, and of `batch` how many are sent at once."""
    wishes = [*({"threshold": each} for each in thresholds), *({"ratio": each} for each in ratios)]
    sizes: dict[str, list[dict[str, int]]] = {"chunks": [{}], "batch": [{"batch": size} for size in batches]}
    settings = [{"over": over, **size} for over in overs for size in sizes[over]]
    return [{**setting, "block": block, **wish} for setting, block, wish in product(settings, blocks, wishes)]


def label_of(setting: Mapping[str, Any]) -> list[str]:
    """For the keys of samples."""
    return [f"{name}={value}" for name, value in setting.items()]


def fused_of(encoded: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all answers of a cell: compression, milliseconds, requests that were fused together; means.

    The answers of one batch have its figures each.
    """
    if not encoded:
        return {}
    before = sum(len(each["shared"]) * each["blocks"] / each["requests"] for each in encoded)
    after = sum(sum(each["shared"]) / each["requests"] for each in encoded)
    return {
        "compression": round(before / after, 4) if after else 1.0,
        "together": round(sum(each["requests"] for each in encoded) / len(encoded), 2),
        "encode_ms": round(sum(each["ms"] for each in encoded) / len(encoded), 3),
    }


def tables_of(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a cell."""
    rows = [
        {
            **cell["cell"],
            **{name: cell[name] for name in ("compression", "together", "encode_ms")},
            **{name: round(cell["metrics"][name]["mean"], 4) for name in SHOWN if name in cell["metrics"]},
        }
        for cell in cells
        if "compression" in cell
    ]
    return [table("Compression and answers, against full prefill", rows)] if rows else []


# Private, in order of use


def _kind(case: Case) -> dict[str, str]:
    return {"questions": case.questions} if case.questions else {}


def _answers(endpoint: Endpoint, cases: Sequence[Case], setting: Mapping[str, Any], opener: Request) -> list[Greedy]:
    """Of each case on KV of its own; those to be fused with one another at once."""
    wish = {name: value for name, value in setting.items() if name != "batch"}
    size = setting.get("batch", 1)
    batches = [cases[at : at + size] for at in range(0, len(cases), size)]
    return [answer for batch in batches for answer in _at_once(endpoint, batch, wish, opener)]


def _at_once(endpoint: Endpoint, cases: Sequence[Case], wish: Mapping[str, Any], opener: Request) -> list[Greedy]:
    fields: dict[str, Any] = {
        "reuse": "exact",
        "order": "retriever",
        "joint": wish,
        "cache_salt": secrets.token_hex(16),
    }

    def one(case: Case) -> Greedy:
        return ask(endpoint, case.request, case.request.chunks, **fields)

    if len(cases) == 1:
        return [one(cases[0])]
    with ThreadPoolExecutor(len(cases) + 1) as pool:
        first = pool.submit(ask, endpoint, opener, opener.chunks, cache_salt=secrets.token_hex(16))
        time.sleep(HEAD_START_S)
        answers = list(pool.map(one, cases))
        first.result()
    return answers
