"""Scores answers, decides which scores are meaningful, and summarises scores of many answers.

    em f1 rouge_l jaccard bert_score   against the right answers; the best of several counts
    same kl kl_max kl_first ..._full   against full prefill of the same prompt: the effect of reuse
    ..._retriever                      against full prefill in the retriever's order: the difference
                                       for an application
    ..._given                          against the same server's answer to the chunks in the given
                                       order: the effect of an order
    ..._policy                         against the first policy's answer: the effect of leaving
                                       chunks out

Right answers are scored only if the model can know them: the bundled model knows its own generated
world and nothing else, random weights know nothing. Otherwise only agreement is scored, and the
results have a note.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from eval.contrast import contrast_arms, sentences
from eval.errors import CommandError
from eval.metrics import agreement
from eval.quality.greedy import FULL_PREFILL, Greedy
from eval.quality.text_metrics import answer_kls, exact_match, f1, jaccard, normalized_f1, rouge_l
from eval.stats import summary

if TYPE_CHECKING:
    from eval.quality.bert_score import BertScore
    from eval.quality.judge import Judge
    from eval.task import Request

Weights = Literal["auto", "real", "none"]
FULL_REUSE = "full-reuse"
"""Arms: the ends of normalised F1."""
NOTE = (
    "the figures measure how far answers agree, not whether they are right: these weights know"
    " nothing of this text, or the harness cannot know whether they do, and --weights real scores"
    " right answers"
)


def knows_answers(model: str | None, task: str, weights: Weights) -> bool:
    """Whether this model can know the right answers of this task.

    Args:
        model: `bundled`, `random`, a path, or None for the unknown weights of a running server.
        weights: the option `--weights`; `auto` takes a path as real weights, and unknown weights as
            none.
    Raises:
        CommandError: `real` is given for weights that know nothing of this text.
    """
    if model == "random" or (model == "bundled" and task != "world"):
        if weights == "real":
            raise CommandError(
                f"--weights real: the {model} weights know nothing of {task}; use another model"
            )
        return False
    return weights == "real" or (weights == "auto" and model is not None)


class Scorer:
    """Scores answers. `has_gold`: the result of `knows_answers`."""

    def __init__(
        self, *, has_gold: bool, bert: BertScore | None = None, judge: Judge | None = None
    ) -> None:
        self.has_gold, self._bert, self._judge = has_gold, bert, judge

    def gold(self, answer: str, request: Request) -> dict[str, float]:
        """Scores against the request's right answers;
        {} if there are none or the model cannot know them."""
        # An empty right answer would make every empty answer right.
        right = tuple(text for text in request.answers if text)
        if not self.has_gold or not right:
            return {}
        return {
            "em": float(exact_match(answer, right)),
            "f1": f1(answer, right),
            "rouge_l": max(rouge_l(answer, text) for text in right),
            "jaccard": max(jaccard(answer, text) for text in right),
        } | self._bert_score(answer, right)

    def agreement(self, answer: Greedy, other: Greedy, reference: str) -> dict[str, float]:
        """Scores of agreement with the other answer, one of `eval.metrics.REFERENCES`;
        KL only if there are distributions."""
        values = {
            "same": float(answer.text == other.text),
            "rouge_l": rouge_l(answer.text, other.text),
            "jaccard": jaccard(answer.text, other.text),
        } | self._bert_score(answer.text, (other.text,))
        if answer.steps and other.steps:
            kls = answer_kls(other.steps, other.tokens, answer.steps, answer.tokens)
            kl = math.fsum(kls) / len(kls)
            values |= {
                "kl": kl,
                # `max` hides a NaN that is not the first, `fsum` keeps it.
                "kl_max": max(kls) if math.isfinite(kl) else kl,
                "kl_first": kls[0],
            }
        return {agreement(name, reference): value for name, value in values.items()}

    def faithfulness(self, answer: str, request: Request) -> dict[str, float]:
        """The judge's score, if there is a judge and it found claims."""
        if self._judge is None:
            return {}
        share = self._judge.faithfulness(
            request.question, answer, [chunk.text for chunk in request.chunks]
        )
        return {} if share is None else {"faithfulness": share}

    def spec(self) -> dict[str, Any]:
        """Settings on which the figures depend, apart from the answers."""
        found: dict[str, Any] = {} if self.has_gold else {"note": NOTE}
        if self._bert is not None:
            found["bert_score"] = self._bert.spec()
        if self._judge is not None:
            found["judge"] = self._judge.spec()
        return found

    def _bert_score(self, answer: str, references: Sequence[str]) -> dict[str, float]:
        return {} if self._bert is None else {"bert_score": self._bert.score(answer, references)}


def rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Round to six digits, the precision of float32 log probabilities.
    Values that are not finite are left out as unmeasured."""
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if math.isfinite(value)}


def block_of(request: Request) -> str:
    """The request's block of correlated samples:
    its conversation, or else the passages that answer it."""
    return request.conversation or " ".join(request.gold_ids) or request.id


def summarize_arms(samples: Sequence[Mapping[str, Any]], *, against: str) -> dict[str, Any]:
    """Cells, and contrasts with verdicts of every arm against the arm `against`."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        arms.setdefault(sample["arm"], []).append(sample)
    # Results are also made while the reference has not answered.
    others = [name for name in arms if name != against] if against in arms else []
    contrasts = [
        each
        for name in others
        for each in contrast_arms(arms[against], arms[name], a=against, b=name)
    ]
    return {"cells": cells_of(samples), "contrasts": contrasts, "verdict": sentences(contrasts)}


def cells_of(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each arm and cell, in order of appearance:
    number of samples, number of failures, metrics and fates, normalised F1."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(json.dumps([sample["arm"], sample["cell"]], sort_keys=True), []).append(
            sample
        )
    cells = [_cell(taken) for taken in groups.values()]
    _add_normalized_f1(cells)
    return cells


# Private, in order of use


def _cell(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [sample for sample in samples if not sample.get("error")]
    # Of all samples: KL or right answers may be there for some of them only.
    names = list(dict.fromkeys(name for sample in good for name in sample["metrics"]))
    fates = [sample["fates"] for sample in good if sample.get("fates")]
    return {
        "arm": samples[0]["arm"],
        "cell": samples[0]["cell"],
        "n": len(good),
        "errors": len(samples) - len(good),
        "metrics": {name: _interval_of(good, name) for name in names},
        "fates": {fate: sum(each[fate] for each in fates) for fate in fates[0]} if fates else None,
    }


def _interval_of(samples: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    taken = [sample for sample in samples if metric in sample["metrics"]]
    blocks = [sample.get("block") for sample in taken]
    return rounded(
        summary([sample["metrics"][metric] for sample in taken], None if None in blocks else blocks)
    )


def _add_normalized_f1(cells: Sequence[dict[str, Any]]) -> None:
    """FusionRAG equation 11 of the mean F1s, where both ends were measured;
    None if full reuse loses nothing."""
    scored = [cell for cell in cells if "f1" in cell["metrics"]]
    means = {
        (cell["arm"], *_variant(cell["cell"])): cell["metrics"]["f1"]["mean"] for cell in scored
    }
    for cell in scored:
        capture, *others = _variant(cell["cell"])
        # Preprocessing is one of the parts that FusionRAG's fig. 18 adds, so 0 is full reuse
        # without preprocessing.
        capture = {"preprocessed": "alone"}.get(capture, capture)
        # Full prefill has neither capture nor rounds, only a kind of question and a number of
        # chunks.
        kind, _, k = others
        reused, prefilled = (FULL_REUSE, capture, *others), (FULL_PREFILL, None, kind, None, k)
        if {reused, prefilled} <= means.keys():
            ends = {"full_reuse": means[reused], "full_prefill": means[prefilled]}
            cell["normalized_f1"] = normalized_f1(cell["metrics"]["f1"]["mean"], **ends)


def _variant(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell.get(name) for name in ("capture", "questions", "rounds", "k"))
