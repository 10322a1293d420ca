"""`quality ratio`: cases, captures, cells and figures, against a fake server and by hand.

python -m pytest tests/eval/test_ratio_curves.py
"""

from __future__ import annotations

import gzip
import json
import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.data.nearest import ranker
from eval.errors import CommandError
from eval.quality import ratio_curves
from eval.quality.command import main
from eval.quality.equal_quality import equal_quality
from eval.quality.greedy import Endpoint, Greedy
from eval.quality.ratio_cases import (
    CLIP_CHARS,
    LONG,
    Case,
    data_cases,
    long_request,
    make_case,
    make_cases,
    world_cases,
)
from eval.quality.ratio_curves import (
    CAPTURES,
    SELECTORS,
    STORE_POOL,
    RatioCurves,
    bring_in,
    by_rounds,
    check_sources,
    fill_pool,
    label_of,
    make_captures,
    make_cells,
)
from eval.quality.scores import Scorer
from eval.recorded import Recorded
from eval.report.chapter import pictures_of
from eval.serve.arms import ARMS
from eval.task import Request, TextChunk
from tests.eval.fake_chat import Body, FakeChat, chatting


def answer(body: Body) -> str:
    """Wrong where everything is moved and nothing recomputed."""
    reuse = body.get("reuse")
    return "wrong" if isinstance(reuse, dict) and reuse["selector"] == "none" else "right"


def make_test_case(num_chunks: int = 4, name: str = "t:1") -> Case:
    corpus = [TextChunk(f"p{i}", f"word{i} word{i // 4} common") for i in range(20)]
    request = Request(name, "Who?", tuple(corpus[:num_chunks]), ("Right.",), ("p0",))
    return make_case(request, corpus, 3, random.Random(0))


def options(**changed: Any) -> Namespace:
    known = {"k": 4, "requests": 3, "neighbors": [2], "seed": 0, "rounds": [1], "from_store": False}
    known |= {"task": "world", "questions": ["linked"], "worlds": 1, "retriever": None}
    known |= {"ks": None, "model_path": "bundled", "hub": None, "corpus": None, "scale": 1}
    return Namespace(**known | changed)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON Lines, plain or gzip."""
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def endpoint_of(fake: FakeChat) -> Endpoint:
    return Endpoint(fake.url, "fake", ARMS["ours"], 8, 2)


def rows_of(
    fake: FakeChat, case: Case, cells: list[ratio_curves.Cell], names: tuple[str, ...] = CAPTURES
) -> list[Any]:
    """Everything that an empty run lacks, taken without the mode's own cases and options."""
    mode = RatioCurves.__new__(RatioCurves)
    mode.args, mode.scorer = Namespace(seed=0, from_store=False), Scorer(has_gold=True)
    mode.cells = cells
    mode.captures = make_captures(names, [3], [1])
    return [row for _, row in mode.take(case, {"fused": endpoint_of(fake)})]


def test_cells_run_ends_once() -> None:
    """Ratio 0 and 1 are the same for all."""
    cells = make_cells(SELECTORS, [0, 0.15, 0.5, 1])
    ends = [(cell.arm, cell.label) for cell in cells if cell.label.get("ratio") in (0, 1)]
    assert ends == [("full-reuse", {"ratio": 0}), ("all", {"ratio": 1})]
    asked = {json.dumps(cell.reuse, sort_keys=True) for cell in cells}
    assert len(asked) == len(cells)  # equal ones would hit each other's KV
    assert len({(cell.arm, *label_of({"capture": "alone"}, cell)) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("selector", "ratio", "label", "asked"),
    [
        ("context-all", 0.5, {"ratio": 0.5}, {"selector": "context", "focus": "off"}),
        ("context", 0.5, {"ratio": 0.5}, {}),
        ("context", 0.15, {"ratio": 0.15, "alpha": 2.0}, {"alpha": 2.0}),
        ("critical", 0.5, {"ratio": 0.5}, {"selector": "critical"}),
        ("critical@auto", 0.5, {"quality": 0.9}, {"ratio": "auto", "quality": 0.9}),
        ("critical@auto", 0.5, {"quality": 0.99}, {"ratio": "auto", "quality": 0.99}),
        ("deviation@3", 0.5, {"ratio": 0.5}, {"selector": "deviation", "depth": 3}),
        ("deviation@calibrated", 0.5, {"ratio": 0.5}, {"depth": "calibrated"}),
        ("query@3", 0.5, {"ratio": 0.5}, {"selector": "query", "layers": 3}),
        ("query@calibrated", 0.5, {"ratio": 0.5}, {"layers": "calibrated"}),
    ],
)
def test_what_a_cell_asks_for(
    selector: str, ratio: float, label: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Ratio auto by quality, once for all ratios; nothing but what its name says."""
    cells = make_cells([selector], sorted({0, 0.15, ratio, 1}))
    (reuse,) = [c.reuse for c in cells if (c.arm, c.label) == (selector, label)]
    name = selector.partition("@")[0]
    assert reuse == {"mode": "fused", "selector": name, "ratio": ratio} | asked


def test_keys_that_are_not_turned_have_a_curve_of_their_own() -> None:
    """Full reuse turns them, so ratio 0 is another cell; at ratio 1 there is no difference."""
    labels = [(cell.arm, cell.label) for cell in make_cells(["unrotated"], [0, 0.3, 1])]
    assert labels == [
        ("full-reuse", {"ratio": 0}),
        ("unrotated", {"ratio": 0}),
        ("unrotated", {"ratio": 0.3}),
        ("all", {"ratio": 1}),
    ]
    rows = [make_row(arm, "alone", "a", 0.5) for arm in ("full-reuse", "unrotated", "all")]
    assert figures_of(rows)["ends"] == {"unrotated": ["all"]}


def test_each_number_of_chunks_is_a_case_of_its_own() -> None:
    """Full prefill of a question is found by the request's id."""
    cases = make_cases(options(ks=[3, 5], requests=2))
    assert [(case.k, len(case.request.chunks)) for case in cases] == [(3, 3)] * 2 + [(5, 5)] * 2
    assert len({case.request.id for case in cases}) == 4
    (case,) = make_cases(options(requests=1))
    assert (case.k, case.request.id) == (None, "linked:0:0")
    ends = ((3, 0.5), (5, 0.25))
    rows = [make_row("full-reuse", "alone", f"a:{k}", f1, 0.0) for k, f1 in ends]
    rows += [make_row("query", "alone", f"a:{k}", 0.75) for k in (3, 5)]
    for row in rows:
        row["cell"]["k"] = int(row["request"][-1])
    full = [{**make_row("full-prefill", "", f"a:{k}", 1.0), "cell": {"k": k}} for k in (3, 5)]
    cells = figures_of([*full, *rows])["cells"]
    found = {cell["cell"]["k"]: cell["normalized_f1"] for cell in cells if cell["arm"] == "query"}
    assert found == {3: 0.5, 5: pytest.approx(2 / 3)}


def test_least_share_at_equal_quality() -> None:
    """Between two measured ones, the first that reaches it, or none."""

    def cell(arm: str, share: float, same: float, **label: Any) -> dict[str, Any]:
        label = {"capture": "alone", "ratio": share, **label}
        told = {"recomputed_share": share, "metrics": {"same": {"mean": same}}}
        return {"arm": arm, "cell": label, "fates": FATES, **told}

    cells = [
        cell("full-reuse", 0.0, 0.25),
        cell("query", 0.5, 0.95),
        cell("query", 0.1, 0.75),
        cell("query", 0.2, 0.95),
        cell("query", 0.3, 0.85, alpha=1.0),
        cell("first", 0.1, 0.85),
        cell("random", 0.9, 0.5),
        {"arm": "full-prefill", "cell": {}, "fates": None, "metrics": {"same": {"mean": 1.0}}},
    ]
    curves = {name: ["full-reuse"] for name in ("query", "first", "random")}
    found = {row["selector"]: row["same"] for row in equal_quality(cells, curves)}
    by_ratio = {"query": 0.15, "first": 0.1, "random": None}
    assert found == {**by_ratio, "query, by alpha": 0.3}
    several = [cell("full-reuse", 0.0, 0.9), cell("query", 0.1, 0.95)]
    (already,) = equal_quality(several, curves)
    assert already == {"capture": "alone", "selector": "query", "same": 0.0}


def test_a_capture_for_each_number_of_neighbors() -> None:
    """FusionRAG fig. 17; captures without neighbours or rounds have none to vary."""
    assert make_captures(CAPTURES, [1, 5], [1, 3]) == [
        {"capture": "alone"},
        {"capture": "live"},
        {"capture": "live", "rounds": 3},
        {"capture": "preprocessed", "neighbors": 1},
        {"capture": "preprocessed", "neighbors": 5},
    ]


def test_strangers_and_neighbors_are_not_in_the_prompt() -> None:
    """Else a chunk would have two variants, or be an exact hit."""
    case = make_test_case()
    shown = {chunk.id for chunk in case.request.chunks}
    assert not shown & {c.id for c in case.strangers}
    assert not shown & {c.id for near in case.neighbors.values() for c in near}
    assert len({c.id for c in case.strangers}) == 4
    with pytest.raises(CommandError, match="too few"):
        make_test_case(num_chunks=12)


def test_ranker_prefers_rare_words() -> None:
    corpus = [
        TextChunk("a", "the red fox"),
        TextChunk("b", "the blue fox"),
        TextChunk("c", "the blue whale"),
    ]
    assert [c.id for c in ranker(corpus)("a blue whale", 2)] == ["c", "b"]
    assert [c.id for c in ranker(corpus)("the", 3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ({"capture": "alone"}, {0}),
        ({"capture": "preprocessed", "neighbors": 3}, {3}),
        ({"capture": "preprocessed", "neighbors": 1}, {1}),
        ({"capture": "live"}, {1, 3}),
    ],
)
def test_every_chunk_is_captured_once_where_the_capture_says(
    capture: dict[str, Any], expected: set[int]
) -> None:
    case = make_test_case()
    with chatting(FakeChat(answer)) as fake:
        behind = bring_in(endpoint_of(fake), capture, case, "salt", random.Random(0))
    assert {c.id: fake.prefixes["salt"][c.id] for c in case.request.chunks} == {
        c: [*n] for c, n in behind.items()
    }
    assert set().union(*behind.values()) == expected


def test_rounds_capture_variants_of_every_chunk() -> None:
    """Each behind other chunks; those of fewer rounds are among those of more."""
    case, orders = make_test_case(), []
    for rounds in (1, 3):
        with chatting(FakeChat(answer)) as fake:
            capture = {"capture": "live", "rounds": rounds}
            behind = bring_in(endpoint_of(fake), capture, case, "salt", random.Random(0))
        orders.append([[chunk["id"] for chunk in body["chunks"]] for body in fake.received])
        for chunk in case.request.chunks:
            variants = {
                tuple(order[: order.index(chunk.id)]) for order in orders[-1] if chunk.id in order
            }
            assert len(variants) == rounds
            assert {len(prefix) for prefix in variants} == behind[chunk.id]
    assert orders[1][:2] == orders[0]


def test_a_full_pool_leaves_the_store_alone() -> None:
    """Other tenants' KV takes the captures' place; a copy on the device ends the run."""
    case = make_test_case()
    with chatting(FakeChat(answer)) as fake:
        fill_pool(endpoint_of(fake), long_request(case.request, 100))
    assert len({body["cache_salt"] for body in fake.received}) * LONG > STORE_POOL
    source = {"chunk": "p0", "from": "device", "variant_prefix": 1}
    for fallbacks, sources, told in (
        ([], [source], "another source"),
        (["no_room"], [], "not moved .*no_room"),
    ):
        found = Greedy(
            "x", [], [], (), 10, 0, {"reuse": {"sources": sources}, "fallbacks": fallbacks}
        )
        with pytest.raises(CommandError, match=told):
            check_sources(found, {"p0": {1}}, from_store=True)


def test_questions_and_captures_are_kept_apart() -> None:
    """Full prefill never shares a salt with moved chunks, nor one capture with another."""
    cells = make_cells(["first"], [0, 0.15, 1])
    with chatting(FakeChat(answer)) as fake:
        both = (make_test_case(name=name) for name in ("t:1", "t:2"))
        rows = [row for case in both for row in rows_of(fake, case, cells)]
        chats = [body for body in fake.received if "messages" in body]
    full = {b["cache_salt"] for b in chats if b["reuse"] == "exact" and b["max_tokens"] == 8}
    moved = {b["cache_salt"] for b in chats if b["reuse"] != "exact"}
    assert (len(full), len(moved), full & moved) == (2, 2 * 3, set())
    assert len(rows) == 2 * (1 + 3 * len(cells))
    live = [row for row in rows if row["request"] == "t:1" and row["cell"].get("capture") == "live"]
    assert [(row["arm"], row["metrics"]["em"], row["metrics"]["same"]) for row in live] == [
        ("full-reuse", 0.0, 0.0),
        ("first", 1.0, 1.0),
        ("all", 1.0, 1.0),
    ]
    assert {row["block"] for row in rows} == {"p0"}  # both cases are about the same passage


def test_a_foreign_source_is_refused() -> None:
    """Selectors would be compared on different KV."""
    sources = [
        {"chunk": "p0", "from": "device", "variant_prefix": 2},
        {"chunk": "p1", "from": "host", "variant_prefix": 0},
        {"chunk": "p2", "from": "gap", "variant_prefix": 0},
    ]
    moved = Greedy("x", [], [], (), 10, 0, {"reuse": {"sources": sources}})
    check_sources(moved, {"p0": {2}, "p1": {0, 4}})
    with pytest.raises(CommandError, match="p1 was moved from another source"):
        check_sources(moved, {"p0": {2}, "p1": {1}})


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return RatioCurves.__new__(RatioCurves).figures(rows)


FATES = {"exact": 10, "relocated": 60, "recomputed": 20, "computed": 10}


def make_row(
    arm: str, capture: str, request: str, f1: float, ratio: float = 0.15
) -> dict[str, Any]:
    metrics = {"em": f1, "f1": f1, "rouge_l": f1, "same": f1, "kl": f1 / 10}
    cell = {"capture": capture, "ratio": ratio}
    return {"arm": arm, "cell": cell, "metrics": metrics, "fates": FATES, "request": request}


def make_rows() -> list[dict[str, Any]]:
    """Full prefill 1, full reuse 0.5 alone and 0.75 preprocessed, query 0.75 and 1, random 0.5."""
    rows = [
        {"arm": "full-prefill", "cell": {}, "request": r, "metrics": {"f1": 1.0}, "fates": None}
        for r in "ab"
    ]
    for capture, arm, values in (
        ("alone", "full-reuse", (0.0, 1.0)),
        ("alone", "query", (0.5, 1.0)),
        ("alone", "random", (0.0, 1.0)),
        ("preprocessed", "full-reuse", (0.5, 1.0)),
        ("preprocessed", "query", (1.0, 1.0)),
    ):
        rows += [
            make_row(arm, capture, r, v, 0.0 if arm == "full-reuse" else 0.15)
            for r, v in zip("ab", values, strict=True)
        ]
    return rows


def test_figures_by_hand() -> None:
    results = figures_of(make_rows())
    found = {(cell["arm"], cell["cell"].get("capture")): cell for cell in results["cells"]}
    assert found["query", "alone"]["metrics"]["f1"]["mean"] == 0.75
    assert found["query", "alone"]["normalized_f1"] == 0.5
    assert found["query", "preprocessed"]["normalized_f1"] == 1.0
    # of full reuse without preprocessing
    assert found["full-reuse", "preprocessed"]["normalized_f1"] == 0.5
    assert "normalized_f1" not in found["full-prefill", None]
    shares = [found["query", "alone"][f"{name}_share"] for name in ("exact", "moved", "recomputed")]
    assert shares == [0.1, 0.8, 0.25]
    (f1,) = [each for each in results["contrasts"] if each["metric"] == "f1"]
    assert (f1["a"], f1["b"], f1["value"], f1["n"]) == ("random", "query", 0.25, 2)
    assert f1["cell"] == {"capture": "alone", "ratio": 0.15}
    assert results["ends"] == {"random": ["full-reuse"], "query": ["full-reuse"]}


def test_data_without_right_answers_gives_agreement_and_kl_alone() -> None:
    """And a run that is interrupted at once still leaves a valid record."""
    row = make_row("random", "alone", "a", 0.5) | {"metrics": {"same": 0.5, "kl": 0.05}}
    (cell,) = figures_of([row])["cells"]
    assert "normalized_f1" not in cell
    assert set(cell["metrics"]) == {"same", "kl"}
    assert figures_of([])["cells"] == []


def test_every_selectors_curve_begins_and_ends_where_all_do() -> None:
    """Ratio 0 and 1 run once for all selectors, and only with their own kind and capture."""
    arms = {"full-reuse": [0.0], "query": [0.15, 0.5], "random": [0.15, 0.5], "all": [1.0]}
    rows = [
        make_row(arm, capture, request, {"alone": 0.5, "live": 0.75}[capture], ratio)
        for capture in ("alone", "live")
        for arm, ratios in arms.items()
        for ratio in ratios
        for request in "ab"
    ]
    results = figures_of(rows)
    record = {"kind": "quality", "results": results, "versions": {}, "machine": {}, "spec": {}}
    run = Recorded(Path("run"), record, rows, results["cells"])
    pictures = [picture for picture in pictures_of(run) if picture.title.startswith("Ratio")]
    assert len(pictures) == 2
    for picture, value in zip(pictures, (0.5, 0.75), strict=True):
        lines = picture.draw().axes[0].lines
        curves = [[*map(float, line.get_xdata())] for line in lines if len(line.get_xdata()) > 1]  # type: ignore[arg-type]
        assert curves == [[0, 1, 2, 3]] * 2
        assert all({*line.get_ydata()} == {value} for line in lines)  # type: ignore[misc]


def test_linked_questions_come_from_a_world_with_links() -> None:
    """Each is about a passage that speaks of another one without naming it."""
    cases = list(world_cases(options()))
    assert cases == list(world_cases(options()))
    assert len({case.request.id for case in cases}) == 3
    assert [len(case.request.chunks) for case in cases] == [4, 4, 4]
    assert all(len(near) == 2 for case in cases for near in case.neighbors.values())
    for case in cases:
        _, kind, _, verb, *_ = case.request.answers[0].split()  # The company Lumex visited Kelton.
        assert any(f" the {kind} {verb} " in chunk.text for chunk in case.request.chunks)


def test_kinds_and_worlds_take_turns() -> None:
    """An interrupted run has some of each; no kind depends on which others are asked."""
    cases = world_cases(options(questions=["own", "order"], worlds=2))
    asked = " ".join(case.request.id for case in cases[:5])
    assert asked == "own:0:0 order:0:0 own:1:0 order:1:0 own:0:1"
    assert [case.questions for case in cases[:2]] == ["own", "order"]
    assert len(cases) == 2 * 2 * 3
    assert cases[::4] == world_cases(options(questions=["own"]))
    worlds = {
        chunk.id.partition(":")[0]
        for case in cases[2::4]
        for chunk in (*case.request.chunks, *case.strangers)
    }
    assert worlds == {"1"}
    with pytest.raises(CommandError, match="--questions linked-3 needs --k 6 or more, got 4"):
        world_cases(options(questions=["own", "linked-3"]))


def test_kinds_are_cells_of_their_own() -> None:
    """Each with full prefill's share, and a kind that full prefill cannot answer is named."""
    rows: list[dict[str, Any]] = []
    some = [0.0, 1.0, 1.0, 1.0] * 4
    for kind, full, reused in (("own", [1.0] * 2, [1.0, 0.0]), ("contradicted", some, some)):
        cell = {"questions": kind, "capture": "live"}
        for arm, label, scores in (
            ("full-prefill", {"questions": kind}, full),
            ("full-reuse", {**cell, "ratio": 0.0}, reused),
            ("critical", {**cell, "ratio": 0.15}, reused),
        ):
            row = {"arm": arm, "cell": label, "fates": None}
            rows += [
                {**row, "request": f"{kind}:{number}", "metrics": {"em": score, "f1": score}}
                for number, score in enumerate(scores)
            ]
    results = figures_of(rows)
    found = {(cell["arm"], cell["cell"]["questions"]): cell for cell in results["cells"]}
    assert found["full-reuse", "own"]["metrics"]["em_of_full"]["mean"] == 0.5
    assert found["full-reuse", "own"]["normalized_f1"] == 0
    assert found["full-reuse", "contradicted"]["metrics"]["em_of_full"]["mean"] == 1
    (said,) = [text for text in results["verdict"] if text.startswith("Not measurable")]
    assert "full prefill answers 0.750 of the questions contradicted." in said
    (row,) = [row for row in results["tables"][0]["rows"] if row["questions"] == "own"]
    shown = {"questions": "own", "capture": "live", "selector": "critical"}
    assert row == shown | {"0": 0.5, "0.15": 0.5}


def test_clipped_passages_of_a_data_set(tmp_path: Path) -> None:
    """What the small model's context takes; too few passages are no case."""
    passages = [{"id": f"p{i}", "title": "t", "text": f"text{i} " * 200} for i in range(9)]
    ids = [each["id"] for each in passages]
    questions = [
        {"id": f"q{n}", "question": f"q{n}", "answers": ["a"], "context_passage_ids": ids[:n]}
        for n in (3, 4, 9)
    ]
    write_lines(tmp_path / "hotpotqa/passages.jsonl.gz", passages)
    write_lines(tmp_path / "hotpotqa/questions.jsonl.gz", questions)
    cases = list(data_cases(options(task="hotpotqa", data=tmp_path, retriever="given")))
    asked = {(case.request.question, len(case.request.chunks)) for case in cases}
    assert asked == {("q4", 4), ("q9", 4)}
    shown = [chunk for case in cases for chunk in (*case.request.chunks, *case.strangers)]
    assert all(len(chunk.text) <= CLIP_CHARS for chunk in shown)


def test_published_questions_keep_all_their_passages(tmp_path: Path) -> None:
    """Else they would be other questions; the bundled model's context takes no more."""
    texts = {n: [f"{n}-{i} " + "text " * 200 for i in range(n)] for n in (1, 9, 11, 12)}
    rows = [{"input": f"q{n}", "context": text, "answers": []} for n, text in texts.items()]
    known = {"data": write_lines(tmp_path / "musique.jsonl", rows), "task": "qcfuse", "requests": 4}
    cases = list(data_cases(options(**known, k=None, model_path="/models/M")))
    assert [len(case.request.chunks) for case in cases] == [9, 11, 12]
    assert min(len(c.text) for case in cases for c in case.request.chunks) > CLIP_CHARS
    clipped = [c for case in data_cases(options(**known, k=4)) for c in case.request.chunks]
    assert max(len(c.text) for c in clipped) == CLIP_CHARS


def test_published_questions_are_scored_at_full_prefill_and_at_each_ratio(tmp_path: Path) -> None:
    """LongBench's own layout, with weights that may know the answers."""
    context = "".join(f"Passage {n + 1}:\nTitle {n}\nText {n}.\n" for n in range(3))
    rows = [
        {"input": "Who?", "context": context.replace("Text", f"{name} text"), "answers": ["Right!"]}
        for name in "ab"
    ]
    write_lines(tmp_path / "2wikimqa.jsonl", rows)
    known = options(task="longbench", data=tmp_path, k=None, model_path="/models/M")
    (case, _) = data_cases(known)
    with chatting(FakeChat(answer)) as fake:
        taken = rows_of(fake, case, make_cells(["query"], [0, 0.15]), ("alone",))
        asked = [body for body in fake.received if "messages" in body]
    assert [(row["arm"], row["metrics"]["em"], row["metrics"]["f1"]) for row in taken] == [
        ("full-prefill", 1, 1),
        ("full-reuse", 0, 0),
        ("query", 1, 1),
    ]
    assert {(body["messages"][0]["role"], body["max_tokens"]) for body in asked} == {("system", 32)}
    texts = [chunk["text"] for chunk in asked[0]["chunks"]]
    assert texts == [f"Title {n}\na text {n}." for n in range(3)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--ratios 1.5", "--ratios must be in 0..1"),
        ("--k 1", "--k must be at least 2"),
        ("--weights real --model-path random", "the random weights know nothing of world"),
    ],
)
def test_nonsense_gets_one_line(argv: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=said):
        main(["ratio", "--requests", "1", "--out", str(tmp_path / "run"), *argv.split()])


@pytest.mark.parametrize("rounds", [[0, 1], [1, 5]])
def test_rounds_without_other_strangers_are_refused(rounds: list[int]) -> None:
    """Two variants behind the same chunks would be one."""
    with pytest.raises(CommandError, match="--rounds must be at least 1 and at most --k"):
        RatioCurves(options(rounds=rounds, ratios=[0]))


def test_numbers_of_variants_are_compared_on_the_same_questions() -> None:
    """By hand: three against one, two answers; other captures have no variants."""
    rows = [make_row("query", "live", request, f1) for request, f1 in (("a", 0.0), ("b", 0.5))]
    cell = {"capture": "live", "ratio": 0.15}
    rows += [make_row("query", "live", r, 1.0) | {"cell": {**cell, "rounds": 3}} for r in "ab"]
    found = by_rounds([*rows, make_row("query", "alone", "a", 0.0)])
    both = {"a": "query, variants 1", "b": "query, variants 3", "cell": cell, "n": 2}
    assert all(both.items() <= each.items() for each in found)
    assert [(each["metric"], each["value"]) for each in found] == [
        ("same", 0.75),
        ("kl", pytest.approx(0.075)),
    ]
    assert by_rounds(rows[:2]) == []
