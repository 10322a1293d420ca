"""The metrics that a sample may have: label, unit and direction of each,
for report and comparison."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` is empty for shares and scores, which are from 0 to 1 unless the label says
    otherwise."""

    label: str
    unit: str
    better: Literal["lower", "higher"]


MIN_FOR_P99 = 1000
"""Values; fewer tell of the largest one."""
MIN_BLOCKS = 8
"""With fewer blocks single values are resampled;
with fewer values or blocks an interval is too narrow for a verdict."""
AGREEMENT = {
    "same": ("answers that equal that of {}", ""),
    "kl": ("KL to {}, mean of the answer", "nats"),
    "kl_max": ("KL to {}, largest of the answer", "nats"),
    "kl_first": ("KL to {}, first token", "nats"),
    "rouge_l": ("ROUGE-L, against {}", ""),
    "jaccard": ("Jaccard index, against {}", ""),
    "bert_score": ("BERTScore F1, against {}", ""),
}
"""Score of agreement with another answer -> label and unit."""
REFERENCES = {
    "full": "full prefill",
    "retriever": "full prefill in retriever order",
    "given": "the chunks as given",
    "policy": "the first policy",
}
"""The other answer: the suffix of a score of agreement."""


def agreement(score: str, reference: str) -> str:
    """The metric of this score. Against full prefill `same` and KL have no suffix."""
    return (
        score
        if reference == "full" and score in ("same", "kl", "kl_max", "kl_first")
        else f"{score}_{reference}"
    )


# The order is that of tables and of a report's charts (`ranked`).
METRICS = {
    "ttft_s": Metric("time to first token", "s", "lower"),
    "itl_s": Metric("time between output tokens, mean of an answer", "s", "lower"),
    "e2e_s": Metric("time to the whole answer", "s", "lower"),
    "itl_bystander_p50_s": Metric(
        "time between tokens of requests that only decode, median", "s", "lower"
    ),
    "itl_bystander_p99_s": Metric(
        "time between tokens of requests that only decode, p99", "s", "lower"
    ),
    "hit_share": Metric("chunks found cached", "", "higher"),
    "saved_share": Metric("chunks not computed", "", "higher"),
    "token_saved_share": Metric("chunk tokens not computed", "", "higher"),
    "cached_share": Metric("prompt tokens found cached", "", "higher"),
    "prefill_tokens": Metric("prompt tokens computed", "tokens", "lower"),
    "recomputed_share": Metric("moved tokens that were recomputed", "", "lower"),
    "planned_missed": Metric("planned hits that did not come true", "", "lower"),
    "em": Metric("exact match", "", "higher"),
    "em_of_full": Metric("exact match, share of full prefill's", "", "higher"),
    "f1": Metric("F1 of words", "", "higher"),
    "rouge_l": Metric("ROUGE-L", "", "higher"),
    "jaccard": Metric("Jaccard index of words", "", "higher"),
    "bert_score": Metric("BERTScore F1", "", "higher"),
    "expected_hit_share": Metric("chunks that a replay finds cached", "", "higher"),
    "requests_per_s": Metric("requests per second", "1/s", "higher"),
    "output_tokens_per_s": Metric("output tokens per second", "1/s", "higher"),
    **{
        # Of these scores the divergences alone have a unit.
        agreement(score, reference): Metric(label.format(text), unit, "lower" if unit else "higher")
        for reference, text in REFERENCES.items()
        for score, (label, unit) in AGREEMENT.items()
    },
    "faithfulness": Metric("faithfulness, by a judge", "", "higher"),
}


def label(metric: str) -> str:
    """The metric's label, or its name."""
    return METRICS[metric].label if metric in METRICS else metric.replace("_", " ")


def is_time(metric: str) -> bool:
    """Times are told by their median and compared by ratios,
    other metrics by the mean and by differences."""
    # By name, since benches measure times that METRICS does not list.
    return metric.endswith("_s") and not metric.endswith("_per_s")


def ranked(metrics: Collection[str]) -> list[str]:
    """Known metrics in the order above, then the others by name."""
    return [*(name for name in METRICS if name in metrics), *sorted(set(metrics) - METRICS.keys())]
