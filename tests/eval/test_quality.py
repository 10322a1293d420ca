"""Quality metrics against hand-computed values and slow references, and the bench's bookkeeping against a fake server.

python -m pytest tests/eval/test_quality.py
"""

from __future__ import annotations

import gzip
import json
import math
import random
from argparse import Namespace
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.bench import quality as bench
from eval.errors import CommandError
from eval.passages import TextChunk
from eval.quality import (
    agreement,
    answer_kl,
    exact_match,
    f1,
    kl_divergence,
    lcs_len,
    normalize,
    rouge_l,
)

WORDS = st.lists(st.sampled_from("abc"), max_size=9)
WEIGHTS = st.lists(st.floats(0.01, 1), min_size=4, max_size=4)
METRICS = [metric for metric in bench.METRICS if metric not in bench.GOLD_METRICS]


# Metrics


def test_normalize_is_squads() -> None:
    """Articles are dropped as whole words only, punctuation without leaving a space."""
    assert normalize(" The  co-op's answer, an Apple; a theatre!") == "coops answer apple theatre"


def test_exact_match_takes_any_right_answer() -> None:
    assert exact_match("the Bramburg.", ["Diana visited Bramburg.", "Bramburg"])
    assert not exact_match("Bramburg Diana", ["Bramburg"])
    assert not exact_match("Bramburg", [])


def test_f1_by_hand() -> None:
    """Two of three words right, two of four found: precision 2/3, recall 1/2, F1 4/7; the best right answer counts."""
    assert f1("The red blue green", ["red blue grey black"]) == pytest.approx(4 / 7)
    assert f1("red blue green", ["black", "red blue grey black"]) == pytest.approx(4 / 7)
    assert f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert (f1("", ["the"]), f1("", ["red"]), f1("red", [])) == (1.0, 0.0, 0.0)


def test_rouge_l_by_hand() -> None:
    """ "police killed the gunman" and "police kill the gunman": LCS 3 of 4 and 4 words."""
    assert rouge_l("Police killed the gunman.", "police kill the gunman") == pytest.approx(0.75)
    assert rouge_l("a b c", "c b a") == pytest.approx(1 / 3)
    assert (rouge_l("", "..."), rouge_l("", "a")) == (1.0, 0.0)


@given(WORDS, WORDS)
def test_lcs_equals_recursion(a: list[str], b: list[str]) -> None:
    @cache
    def slow(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + slow(i + 1, j + 1) if a[i] == b[j] else max(slow(i + 1, j), slow(i, j + 1))

    assert lcs_len(a, b) == slow(0, 0)


@given(WORDS, WORDS)
def test_f1_and_rouge_are_shares(a: list[str], b: list[str]) -> None:
    """Both lie in [0, 1], are symmetric, are 1 for a text itself, and order matters to ROUGE-L alone."""
    x, y = " ".join(a), " ".join(b)
    for metric in (rouge_l, lambda p, q: f1(p, [q])):
        assert 0 <= metric(x, y) <= 1
        assert metric(x, y) == pytest.approx(metric(y, x))
        assert metric(x, x) == 1
    assert f1(x, [" ".join(sorted(a))]) == 1


def test_agreement() -> None:
    assert agreement(["a", "b", "c", "d"], ["a", "x", "c", "D"]) == 0.5
    with pytest.raises(ValueError):
        agreement([], [])
    with pytest.raises(ValueError):
        agreement(["a"], ["a", "b"])


def test_kl_by_hand() -> None:
    """0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75)."""
    p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(q, p) == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))


def test_kl_lumps_what_is_left_out() -> None:
    """Token 2 is missing in q, so both count as {1, rest}: 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75)."""
    p, q = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.25), 3: math.log(0.6)}
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


@given(WEIGHTS, WEIGHTS, st.integers(0, 4), st.integers(0, 4))
def test_kl_is_never_negative_and_lumping_only_lowers_it(
    a: list[float], b: list[float], kept_a: int, kept_b: int
) -> None:
    p, q = ({token: math.log(w / sum(each)) for token, w in enumerate(each)} for each in (a, b))
    exact = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)
    assert kl_divergence(p, q) == pytest.approx(exact, abs=1e-9)
    assert kl_divergence(p, p) == 0
    partly = kl_divergence(dict(list(p.items())[:kept_a]), dict(list(q.items())[:kept_b]))
    assert 0 <= partly <= exact + 1e-9


def test_kl_refuses_what_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="q must add up"):
        kl_divergence({1: 0.0}, {1: 0.0, 2: -1.0})


def test_answer_kl_ends_where_answers_part() -> None:
    """The step at which they part counts, later ones have other tokens before them and do not."""
    p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    step = kl_divergence(p, q)
    assert answer_kl([p, p, p], [1, 1, 1], [p, q, q], [1, 2, 1]) == pytest.approx(step / 2)
    assert answer_kl([p, p], [1, 1], [q, q], [1, 1]) == pytest.approx(step)
    assert answer_kl([p, p, p], [1, 1, 2], [q], [1]) == pytest.approx(step)
    with pytest.raises(ValueError):
        answer_kl([], [], [], [])


# The bench, without a server


class FakeServer:
    """Answers as the front does: knows by salt what stood before a chunk when it was captured, newest capture last."""

    def __init__(self) -> None:
        self.prefixes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.asked: list[tuple[str, Any]] = []

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        salt = body["cache_salt"]
        if url.endswith("/chunkcache/preprocess"):
            self.prefixes[salt][body["chunk"]["id"]].append(len(body["neighbors"]))
            return {}
        chunks, reuse = [each["id"] for each in body["parts"][1]["chunks"]], body["reuse"]
        self.asked.append((salt, reuse))
        if reuse == "exact":
            for i, chunk in enumerate(chunks):
                self.prefixes[salt][chunk].append(i)
            return self._reply("right", 0.9, {"exact": 0, "relocated": 0, "recomputed": 0, "computed": 40}, None)
        fates = {"exact": 4, "relocated": 30, "recomputed": 0, "computed": 6}
        found = [{"chunk": c, "from": "host", "variant_prefix": self.prefixes[salt][c][-1]} for c in chunks]
        wrong = reuse["selector"] == "none"
        return self._reply("wrong" if wrong else "right", 0.8, fates, {"sources": found, "fused_hit": 0})

    @staticmethod
    def _reply(text: str, best: float, fates: dict[str, int], reuse: Any) -> dict[str, Any]:
        top = [[[math.log(best), 7, None], [math.log(1 - best), 8, None]]]
        info = {"fates": fates, "reuse": reuse, "fallbacks": []}
        return {"text": text, "output_ids": [7], "meta_info": {"output_top_logprobs": top}, "chunkcache": info}


def make_case(num_chunks: int = 4, gold: tuple[str, ...] = ("Right.",)) -> bench.Case:
    corpus = [TextChunk(f"p{i}", f"word{i} word{i // 4} common") for i in range(20)]
    return bench.make_case("order", "Who?", gold, tuple(corpus[:num_chunks]), corpus, 3, random.Random(0))


def args_of(**changed: Any) -> Namespace:
    known = {"arms": list(bench.ARMS), "seed": 0, "clients": 2, "max_new_tokens": 8, "top_logprobs": 2}
    return Namespace(**known | changed)


def test_cells_run_ends_once_and_set_last() -> None:
    """Ratio 0 and 1 are the same for all; what `set` computes must not become a source of others."""
    cells = bench.make_cells(bench.SELECTORS, [0, 0.15, 0.5, 1], ablation=True)
    assert [(c.row, c.column) for c in cells if c.column in "01"] == [("none", "0"), ("all", "1"), ("set", "0")]
    assert cells[-1].row == "set"
    assert len({(c.row, c.column) for c in cells}) == len(cells)
    assert len({json.dumps(c.reuse, sort_keys=True) for c in cells}) == len(
        cells
    )  # equal ones would hit each other's KV
    by_name = {(c.row, c.column): c.reuse for c in cells}
    assert by_name["context-all", "0.5"] == {"mode": "fused", "selector": "context", "ratio": 0.5, "focus": False}
    assert "focus" not in by_name["context", "0.5"]


def test_strangers_and_neighbors_are_not_in_the_prompt() -> None:
    """Else a chunk would have two variants, or be an exact hit."""
    case = make_case()
    shown = {chunk.id for chunk in case.chunks}
    assert not shown & {c.id for c in case.strangers}
    assert not shown & {c.id for near in case.neighbors.values() for c in near}
    assert len({c.id for c in case.strangers}) == 4
    with pytest.raises(CommandError, match="too few"):
        make_case(num_chunks=12)


def test_ranker_prefers_rare_words() -> None:
    corpus = [TextChunk("a", "the red fox"), TextChunk("b", "the blue fox"), TextChunk("c", "the blue whale")]
    assert [c.id for c in bench.ranker(corpus)("a blue whale", 2)] == ["c", "b"]
    assert [c.id for c in bench.ranker(corpus)("the", 3)] == ["a", "b", "c"]


def test_every_chunk_is_captured_once_where_the_arm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for arm, expected in (("alone", {0}), ("preprocessed", {3}), ("live", {1, 3})):
        fake, case = FakeServer(), make_case()
        monkeypatch.setattr(bench, "post", fake.post)
        behind = bench.capture("", arm, case, "salt", random.Random(0), args_of())
        assert {c.id: fake.prefixes["salt"][c.id] for c in case.chunks} == {c: [n] for c, n in behind.items()}
        assert set(behind.values()) == expected


def test_run_keeps_questions_and_arms_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full prefill never shares a salt with moved chunks, and rows come back in the questions' order."""
    fake = FakeServer()
    monkeypatch.setattr(bench, "post", fake.post)
    cells = bench.make_cells(["first", "set"], [0, 0.15, 1], ablation=False)
    rows = bench.run("", [make_case(), make_case(gold=("other",))], cells, args_of())
    assert [(row.arm, row.full["em"]) for row in rows] == [(a, em) for em in (1.0, 0.0) for a in bench.ARMS]
    assert all(len(row.values["kl"]) == len(cells) for row in rows)
    full, moved = ({salt for salt, r in fake.asked if (r == "exact") == exact} for exact in (True, False))
    assert {salt for salt in full & moved if "live" not in salt} == set()  # live chunks come from exact requests
    assert moved == {f"{i}-{arm}" for i in (0, 1) for arm in bench.ARMS}
    assert rows[0].values["em"] == [0.0, 1.0, 1.0, 1.0]
    assert rows[0].values["same"] == [0.0, 1.0, 1.0, 1.0]
    assert set(rows[0].sources) == {"host, own"}


def test_foreign_sources_are_found() -> None:
    """A chunk moved from another capture than the arm's would compare selectors on different KV."""
    answer = bench.Answer(
        "x", [7], [{7: 0.0}], FakeServer._reply("x", 0.5, {"exact": 0}, {"fused_hit": 0})["chunkcache"]
    )
    answer.info["reuse"]["sources"] = [
        {"chunk": "p0", "from": "device", "variant_prefix": 2},
        {"chunk": "p1", "from": "host", "variant_prefix": 0},
        {"chunk": "p2", "from": "gap", "variant_prefix": 0},
    ]
    row = bench.score("live", make_case(), answer, [answer], {"p0": 2, "p1": 1})
    assert row.sources == {"device, own": 1, "host, foreign": 1, "gap": 1}


def make_row(values: list[float], gold: bool = True) -> bench.Row:
    """Metric values by cell; the KL is a tenth of them."""
    known = {"same": values, "rouge_l": values, "kl_first": values, "kl": [v / 10 for v in values]}
    known |= {"em": values, "f1": values} if gold else {}
    tokens = [{"exact": 10, "relocated": 60, "recomputed": 20, "computed": 10, "fused_hit": 0}] * len(values)
    return bench.Row("alone", "order", 4, {"em": 1.0} if gold else {}, defaultdict(list, known), tokens)


def test_summary_and_tables() -> None:
    """Means, paired differences and token shares by hand; a curve's ends come from the cells all selectors share."""
    cells = bench.make_cells(["random", "query"], [0, 0.15, 1], ablation=False)
    assert [c.row for c in cells] == ["none", "random", "query", "all"]
    rows = [make_row([0.0, 0.0, 1.0, 1.0]), make_row([0.0, 1.0, 1.0, 1.0])]
    results = bench.summarise(rows, cells)
    found = results["quality"]["alone"]["order"]
    assert [cell["em"][0] for cell in found["cells"]] == [0.0, 0.5, 1.0, 1.0]
    assert (found["cells"][1]["moved"], found["cells"][1]["recomputed"], found["cells"][1]["exact"]) == (0.8, 0.25, 0.1)
    assert results["paired"]["alone"]["order"]["query - random"]["em"] == [0.5, 0.0, 1.0]
    query = next(line for line in bench.report(results, [0, 0.15, 1]).splitlines() if line.split()[:1] == ["query"])
    assert query.split() == ["query", "0.00", "0.00", "0.0e+00", "25%", *["1.00", "1.00", "1.0e-01", "25%"] * 2]


def test_data_without_right_answers_gives_agreement_and_kl_alone() -> None:
    cells = bench.make_cells(["random"], [0, 0.5, 1], ablation=False)
    row = make_row([0.0, 0.5, 1.0], gold=False)
    found = bench.summarise([row], cells)["quality"]["alone"]["order"]
    assert found["full_prefill"] == {}
    assert set(METRICS) <= found["cells"][0].keys()
    assert not found["cells"][0].keys() & set(bench.GOLD_METRICS)
    assert "1.00  1.0e-01" in bench.report(bench.summarise([row], cells), [0, 0.5, 1])


def test_samples_stay_small() -> None:
    """100 questions of 4 kinds and 2 sizes in 3 arms make 2,400 lines; a record stays below 1.5 MB."""
    num_cells = len(bench.make_cells(bench.SELECTORS, [0, 0.05, 0.15, 0.3, 0.5, 1], ablation=True))
    row = make_row([1.0] * num_cells)
    row.values["kl"] = [1.234e-6] * num_cells
    line = json.dumps(bench.sample(row), separators=(",", ":"))
    assert len(line) < 600
    assert json.loads(line)["kl"] == [1.2e-6] * num_cells
    assert json.loads(line)["same"] == "1" * num_cells


def test_world_cases_are_what_was_asked_for() -> None:
    """As many questions a kind and size; a question about the order names a passage of its prompt."""
    args = args_of(kinds=["one-hop", "two-hop", "order"], chunks=[4, 6], questions=3, neighbors=2)
    cases = list(bench.world_cases(args))
    assert [(c.kind, len(c.chunks)) for c in cases] == [
        (kind, n) for kind in ("one-hop", "two-hop", "order") for n in (4, 6) for _ in range(3)
    ]
    assert all(len(near) == 2 for case in cases for near in case.neighbors.values())
    for case in cases:
        assert any(case.gold[1] in chunk.text for chunk in case.chunks)
    assert cases == list(bench.world_cases(args))


def test_linked_questions_come_from_a_world_with_links() -> None:
    """Each is about a passage that speaks of another one without naming it."""
    cases = list(bench.world_cases(args_of(kinds=["linked"], chunks=[4], questions=3, neighbors=2)))
    assert [len(case.chunks) for case in cases] == [4, 4, 4]
    for case in cases:
        _, kind, _, verb, *_ = case.gold[0].split()  # The company Lumex visited Kelton.
        assert any(f" the {kind} {verb} " in chunk.text for chunk in case.chunks)


def test_clipped_passages_of_a_data_set(tmp_path: Path) -> None:
    """Questions with too few passages are left out; passages are cut to what the small model's context takes."""
    folder = tmp_path / "set"
    folder.mkdir()
    passages = [{"id": f"p{i}", "text": f"text{i} " * 200} for i in range(9)]
    questions = [{"question": f"q{n}", "context_passage_ids": [f"p{i}" for i in range(n)]} for n in (3, 4, 9)]
    for name, rows in (("passages", passages), ("questions", questions)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    args = args_of(data=tmp_path, dataset="set", chunks=[4], questions=3, neighbors=2)
    cases = list(bench.data_cases(args))
    assert [(c.question, c.kind, c.gold, len(c.chunks)) for c in cases] == [("q4", "set", (), 4), ("q9", "set", (), 4)]
    assert all(len(c.text) == bench.CLIP_CHARS for case in cases for c in (*case.chunks, *case.strangers))
