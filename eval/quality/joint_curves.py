"""`python -m eval quality joint`: how much may KV blocks be fused before answers change? (Fast
Fusion figures 4 and 5, table 1)

No server: the model runs here. Every question is answered once with full prefill, then once per
cell: its KV is encoded jointly after the prefill (eval/joint), the blocks of
its chunks (CFF) or those of the prompts of its batch (BFF), by a threshold or a ratio, in blocks of
some size. `compression` is blocks over shared blocks of all layers and answers, `rows` the KV of
what is compared, what fills no block included, over what is left of it.

NOTE: an answer's first token is computed before anything is fused, so `kl_first` is 0, and what an
answer's only token says does not change. KL is the mean over all tokens, the first included.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.outcome import Row, table
from eval.quality.greedy import FULL_PREFILL, Greedy
from eval.quality.mode import Job, Mode, Servers
from eval.quality.ratio_cases import Case, data_cases, world_cases
from eval.quality.ratio_curves import of_full
from eval.quality.scores import cells_of
from eval.recorded import grouped
from eval.run import Sample
from eval.serve.arms import ARMS, Arm
from eval.world.kinds import KINDS
from eval.world.tokenizer import turn_pieces
from sglang_chunkcache.bundled_model import model_dir

if TYPE_CHECKING:
    from eval.joint.kv import Cached, ModelKv

JOINT = "joint"
OVERS = ("chunks", "batch", "private", "unshared")
KEPT, SHARED = NORMS = ("kept", "shared")
SHOWN = ("same", "kl", "kl_max", "em", "f1")


class JointCurves(Mode):
    """Every case with full prefill, and in every cell."""

    name, summary = "joint", "similar KV blocks fused (Fast Fusion figs. 4, 5); no server"

    def __init__(self, args: argparse.Namespace) -> None:
        if not all(0 <= each <= 1 for each in args.thresholds) or not all(
            each > 1 for each in args.ratios
        ):
            raise CommandError("--thresholds must be in 0..1, --ratios above 1")
        if min(*args.blocks, *args.batch, args.worlds) < 1:
            raise CommandError("--blocks, --batch and --worlds must be at least 1")
        if args.model_path == "random" or args.server_flags:
            raise CommandError(
                "quality joint runs a Llama's weights by itself: no --model-path random, no"
                " server's flags"
            )
        self.cases = world_cases(args) if args.task == "world" else list(data_cases(args))
        if not self.cases:
            raise CommandError(f"--task {args.task}: no request has {args.k or 2} chunks")
        self.cells = make_cells(args)
        # The hooks of `ModelKv` append to one list: two threads would mix their queries.
        self._lock = Lock()
        self._model: ModelKv | None = None
        super().__init__(
            args, [replace(ARMS["ours"], name=JOINT)], [case.request for case in self.cases]
        )

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """What is compared with what, and when it fuses."""
        parser.add_argument("--over", nargs="+", choices=OVERS, default=list(OVERS[:2]))
        parser.add_argument(
            "--blocks", nargs="+", type=int, default=[4, 16], metavar="N", help="tokens of a block"
        )
        parser.add_argument(
            "--thresholds", nargs="*", type=float, default=[0.5, 0.7, 0.8, 0.9, 0.95]
        )
        parser.add_argument("--ratios", nargs="*", type=float, default=[1.25, 1.5, 2.0])
        text = "each block keeps its norm, or has that of the row that it shares; default: kept"
        parser.add_argument("--norms", nargs="+", choices=NORMS, default=[KEPT], help=text)
        text = "prompts whose blocks are compared, but for chunks"
        parser.add_argument("--batch", nargs="+", type=int, default=[8], metavar="N", help=text)
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
        # `make_case` draws neighbours for every case; nothing here uses them.
        parser.set_defaults(neighbors=[1])

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per largest batch of cases. None needs a server."""
        size, label = max(self.args.batch), label_of(self.cells[-1])
        # Smaller batches are parts of the largest one, so each prompt is computed once.
        batches = [self.cases[at : at + size] for at in range(0, len(self.cases), size)]
        yield (
            (),
            [
                # `take` ends with this case in the last cell.
                Job(self.key(JOINT, one[-1].request, *label), partial(self.take, one))
                for one in batches
            ],
        )

    def take(self, cases: Sequence[Case], _servers: Servers) -> Iterator[tuple[str, Sample]]:
        """The samples of some cases: full prefill of each, then the cells,
        in batches of the cell's size."""
        from eval.joint.prompts import Target, fuse

        with self._lock:
            model = self._loaded()
            prompts = [_prompt(model, case) for case in cases]
            full = [self._answer(model, *each) for each in zip(cases, prompts, strict=True)]
            for case, answer in zip(cases, full, strict=True):
                gold = self.scorer.gold(answer.text, case.request)
                yield self.sample(FULL_PREFILL, case.request, answer, gold, cell=_kind(case))
            for setting in self.cells:
                target = Target(
                    setting["block"],
                    setting.get("threshold"),
                    setting.get("ratio"),
                    rescaled="norms" not in setting,
                )
                size = setting.get("batch", 1)
                for at in range(0, len(cases), size):
                    fused = fuse(prompts[at : at + size], target, setting["over"])
                    told = {
                        "requests": len(fused.prompts),
                        "block": setting["block"],
                        "tokens": fused.tokens,
                        "blocks": fused.blocks,
                        "shared": fused.shared,
                    }
                    # The batch's prompts end first: `cases` and `full` go on to the next batch.
                    for case, prompt, given in zip(
                        cases[at:], fused.prompts, full[at:], strict=False
                    ):
                        answer = self._answer(model, case, prompt)
                        metrics = self.scorer.gold(answer.text, case.request)
                        metrics |= self.scorer.agreement(answer, given, "full")
                        cell, more = (
                            {**_kind(case), **setting},
                            {"encoded": {**told, "ms": round(fused.ms, 3)}},
                        )
                        label = label_of(setting)
                        yield self.sample(
                            JOINT, case.request, answer, metrics, cell=cell, label=label, **more
                        )

    def _loaded(self) -> ModelKv:
        """The model, once there is something to answer."""
        if self._model is None:
            import torch

            from eval.joint.kv import ModelKv

            torch.set_num_threads(self.args.threads)
            path = self.args.model_path
            self._model = ModelKv(model_dir() if path == "bundled" else Path(path))
        return self._model

    def _answer(self, model: ModelKv, case: Case, prompt: Cached) -> Greedy:
        limit, num = case.request.max_new_tokens or self.args.max_new_tokens, self.args.top_logprobs
        ids, log_probs = model.continued(prompt, max_tokens=limit)
        # `topk` refuses more candidates than the vocabulary has.
        tops = [each.topk(min(num, len(each))) for each in log_probs] if num else []
        # As in `greedy.ask`: of tokens with one text the likeliest is kept.
        steps = [
            {
                model.token(i): p
                for i, p in reversed(
                    list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                )
            }
            for top in tops
        ]
        order = tuple(chunk.id for chunk in case.request.chunks)
        return Greedy(
            model.text(ids), [model.token(i) for i in ids], steps, order, prompt.num_tokens, 0, {}
        )

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells with what was fused, and paired differences from full prefill."""
        cells = cells_of(samples)
        full = [row for row in samples if row["arm"] == FULL_PREFILL]
        by_request = {row["request"]: row for row in full}
        contrasts = []
        for cell, (_, rows) in zip(
            cells, grouped(samples, lambda row: [row["arm"], row["cell"]]), strict=True
        ):
            if cell["arm"] != JOINT:
                continue
            cell |= fused_of([row["encoded"] for row in rows if "encoded" in row])
            if found := of_full(rows, by_request):
                cell["metrics"]["em_of_full"] = found
            # `contrast_arms` pairs samples within a cell, and full prefill's have no setting.
            like = [
                {**by_request[row["request"]], "cell": row["cell"]}
                for row in rows
                if row["request"] in by_request
            ]
            contrasts += contrast_arms(like, rows, a=FULL_PREFILL, b=JOINT, metrics=("em", "f1"))
        return {
            "cells": cells,
            "contrasts": contrasts,
            "verdict": sentences(contrasts),
            "tables": tables_of(cells),
        }


def make_cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """How blocks are fused, and where not over chunks, those of how many prompts at once."""
    targets = [
        *({"threshold": each} for each in args.thresholds),
        *({"ratio": each} for each in args.ratios),
    ]
    settings = [
        {"over": over, **size}
        for over in args.over
        for size in ([{}] if over == "chunks" else [{"batch": each} for each in args.batch])
    ]
    # The default is not named: keys of samples, and cells, as of older records.
    norms = [{} if each == KEPT else {"norms": each} for each in args.norms]
    return [
        {**setting, "block": block, **target, **norm}
        for setting, block, target, norm in product(settings, args.blocks, targets, norms)
    ]


def label_of(setting: Mapping[str, Any]) -> list[str]:
    """For the keys of samples."""
    return [f"{name}={value}" for name, value in setting.items()]


def fused_of(encoded: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all answers of a cell: compression and milliseconds, means."""
    if not encoded:
        return {}
    # The answers of one batch have its figures each, so each counts for its share of them.
    before = sum(len(each["shared"]) * each["blocks"] / each["requests"] for each in encoded)
    after = sum(sum(each["shared"]) / each["requests"] for each in encoded)
    rows = sum(len(each["shared"]) * each["tokens"] / each["requests"] for each in encoded)
    saved = encoded[0]["block"] * (before - after)
    return {
        "compression": round(before / after, 4) if after else 1.0,
        "rows": round(rows / (rows - saved), 4),
        "encode_ms": round(sum(each["ms"] for each in encoded) / len(encoded), 3),
    }


def tables_of(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a cell."""
    rows = [
        {
            **cell["cell"],
            **{name: cell[name] for name in ("compression", "rows", "encode_ms")},
            **{
                name: round(cell["metrics"][name]["mean"], 4)
                for name in SHOWN
                if name in cell["metrics"]
            },
        }
        for cell in cells
        if "compression" in cell
    ]
    return [table("Compression and answers, against full prefill", rows)] if rows else []


# Private, in order of use


def _kind(case: Case) -> dict[str, str]:
    return {"questions": case.questions} if case.questions else {}


def _prompt(model: ModelKv, case: Case) -> Cached:
    """As the bundled model's template has it."""
    texts = [chunk.text for chunk in case.request.chunks]
    head, pieces, tail = turn_pieces(
        texts, case.request.question, opens=True, system=case.request.system or None
    )
    return model.cached([head, *pieces, tail])
