"""What may be said about a model's answers, and what many answers come to: by hand.

python -m pytest tests/eval/test_scores.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from eval.errors import CommandError
from eval.metrics import METRICS, REFERENCES
from eval.quality.greedy import Greedy
from eval.quality.scores import (
    Scorer,
    block_of,
    cells_of,
    knows_answers,
    rounded,
    summarize_arms,
)
from eval.task import Request


def make_greedy(text: str, best: float = 0.9) -> Greedy:
    """Each word a token of probability `best`."""
    words = text.split()
    steps = [{word: math.log(best), "<other>": math.log(1 - best)} for word in words]
    return Greedy(text, words, steps, (), 10, 0, {})


def make_row(arm: str, request: str, f1: float, **more: Any) -> dict[str, Any]:
    row = {"arm": arm, "cell": {}, "request": request, "metrics": {"f1": f1}, "fates": None}
    return {**row, **more}


def agreement(given: Greedy, full: Greedy, against: str = "full") -> dict[str, float]:
    return Scorer(has_gold=False).agreement(given, full, against)


@pytest.mark.parametrize(
    ("model", "task", "weights", "known"),
    [
        ("bundled", "world", "auto", True),
        ("bundled", "squad", "auto", False),
        ("random", "world", "auto", False),
        ("models/llama", "squad", "auto", True),
        (None, "squad", "auto", False),
        (None, "squad", "real", True),
        ("models/llama", "squad", "none", False),
        ("bundled", "world", "none", False),
    ],
)
def test_right_answers_count_where_they_can_be_known(
    model: str | None, task: str, weights: Any, known: bool
) -> None:
    assert knows_answers(model, task, weights) is known


def test_nobody_may_call_our_weights_real_on_real_data() -> None:
    with pytest.raises(CommandError, match="the bundled weights know nothing of hotpotqa"):
        knows_answers("bundled", "hotpotqa", "real")


def test_the_best_right_answer_counts_for_each_metric() -> None:
    request = Request("t:1", "?", answers=("The company Dravex makes clocks.", "clocks"))
    found = Scorer(has_gold=True).gold("Clocks!", request)
    assert found == dict.fromkeys(("em", "f1", "rouge_l", "jaccard"), 1.0)
    assert Scorer(has_gold=True).gold("clocks", Request("t:2", "?")) == {}
    assert Scorer(has_gold=False).gold("clocks", request) == {}


def test_agreement_by_hand() -> None:
    """The answers part at their second word, so KL counts two steps: the first equal, at the
    second both name <other> with 0.1 and leave out one word, which count as one: 0.9 against 0.9.
    """
    found = agreement(make_greedy("a b"), make_greedy("a c"))
    kl = dict.fromkeys(("kl", "kl_max", "kl_first"), 0)
    assert found == {"same": 0, "rouge_l_full": 0.5, "jaccard_full": 1 / 3, **kl}
    assert "kl" not in agreement(Greedy("a", [], [], (), 10, 0, {}), make_greedy("a"))


def test_the_largest_kl_of_an_answer_is_not_hidden_by_its_mean() -> None:
    """One token that changes makes an answer wrong."""
    full = make_greedy("a b")
    other = replace(full, steps=[full.steps[0], *make_greedy("b", 0.5).steps])
    found = agreement(full, other)
    assert found["kl_max"] == pytest.approx(2 * found["kl"])
    assert found["kl_max"] > 0


def test_each_comparison_has_names_of_its_own() -> None:
    """Agreement with another policy is none with full prefill; all have a label."""
    given, other = make_greedy("a b"), make_greedy("a c")
    names = [agreement(given, other, against).keys() for against in REFERENCES]
    told = set().union(*names)
    assert len(told) == sum(map(len, names))
    assert {"same_given", "kl_given", "kl_first_policy", "rouge_l_policy"} <= told <= METRICS.keys()


def test_what_is_not_finite_was_not_measured() -> None:
    """JSON has no NaN, and a mean with an infinite value says nothing of the others."""
    assert rounded({"same": 1.0, "kl": math.inf, "kl_first": math.nan, "f1": 1 / 3}) == {
        "same": 1.0,
        "f1": 0.333333,
    }


def test_cells_are_kept_apart_by_arm_and_setting() -> None:
    """Failed requests are counted, not scored."""
    rows = [make_row("a", "1", 0.0), make_row("a", "1", 1.0, cell={"ratio": 0.5})]
    rows += [make_row("b", "1", 0.5), make_row("b", "2", 0.0, metrics={}, error="refused")]
    found = [
        (c["arm"], c["cell"], c["n"], c["errors"], c["metrics"]["f1"]["mean"])
        for c in cells_of(rows)
    ]
    assert found == [("a", {}, 1, 0, 0.0), ("a", {"ratio": 0.5}, 1, 0, 1.0), ("b", {}, 1, 1, 0.5)]


def test_arms_are_compared_request_by_request() -> None:
    """b is better by 0.1 and 0.3; a request that only one answered does not count."""
    taken = ("a", "1", 0.1), ("a", "2", 0.2), ("b", "2", 0.5), ("b", "1", 0.2), ("b", "3", 0.0)
    rows = [make_row(*row) for row in taken]
    (found,) = summarize_arms(rows, against="a")["contrasts"]
    assert found["value"] == pytest.approx(0.2)
    assert found["n"] == 2
    assert summarize_arms(rows, against="c")["contrasts"] == []


def test_equal_answers_have_no_p_value() -> None:
    """A t-test over differences that are all zero has no statistic."""
    rows = [make_row(arm, str(n), n / 10) for arm in "ab" for n in range(9)]
    (found,) = summarize_arms(rows, against="a")["contrasts"]
    assert (found["value"], found["p"]) == (0, None)


def test_normalized_f1_needs_both_ends() -> None:
    f1s = {"full-prefill": 0.8, "full-reuse": 0.4, "x": 0.7}
    rows = [make_row(arm, "1", f1) for arm, f1 in f1s.items()]
    assert [cell["normalized_f1"] for cell in cells_of(rows)] == [1.0, 0.0, pytest.approx(0.75)]
    assert not any("normalized_f1" in cell for cell in cells_of(rows[1:]))


def test_what_moves_together() -> None:
    """Turns of a conversation, or questions about the same passage."""
    turns = [Request(f"t:1:{n}", "?", conversation="t:1", gold_ids=(f"p{n}",)) for n in range(2)]
    about = [Request(f"t:{n}", "?", gold_ids=("p1", "p2")) for n in range(2)]
    plain = [Request(f"t:{n}", "?") for n in range(2)]
    assert [len({block_of(request) for request in each}) for each in (turns, about, plain)] == [
        1,
        1,
        2,
    ]


def test_conversations_are_resampled_as_wholes() -> None:
    """Eight conversations of ten equal turns are eight differences for the t-test, not eighty."""
    rows = [
        make_row(arm, f"{c}:{turn}", (c % 3) / 10 if arm == "b" else 0.0, block=f"{c}")
        for arm in "ab"
        for c in range(8)
        for turn in range(10)
    ]
    alone = [{**row, "block": row["request"]} for row in rows]
    (whole,), (single,) = (summarize_arms(each, against="a")["contrasts"] for each in (rows, alone))
    assert (whole["n"], whole["num_blocks"], single["num_blocks"]) == (80, 8, 80)
    assert whole["p"] > 1000 * single["p"]
    (_, cell), (_, flat) = (summarize_arms(each, against="a")["cells"] for each in (rows, alone))
    found = (each["metrics"]["f1"] for each in (cell, flat))
    width, narrow = (f1["high"] - f1["low"] for f1 in found)
    assert width > 2.5 * narrow
