"""`quality ratio`: cases, captures, cells and figures, against a fake server and by hand.

python -m pytest tests/eval/test_ratio_curves.py
"""

from __future__ import annotations

import gzip
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.quality import ratio_curves
from eval.quality.greedy import Endpoint, Greedy
from eval.quality.ratio_cases import (
    CLIP_CHARS,
    LONG,
    Case,
    data_cases,
    long_request,
    make_case,
    ranker,
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

ARM = ARMS["ours"]
GOLD = Scorer(has_gold=True)


def answer(body: Body) -> str:
    """Wrong where everything is moved and nothing recomputed."""
    reuse = body.get("reuse")
    return "wrong" if isinstance(reuse, dict) and reuse["selector"] == "none" else "right"


def make_test_case(num_chunks: int = 4, name: str = "t:1") -> Case:
    corpus = [TextChunk(f"p{i}", f"word{i} word{i // 4} common") for i in range(20)]
    request = Request(name, "Who?", tuple(corpus[:num_chunks]), ("Right.",), ("p0",))
    return make_case(request, corpus, 3, random.Random(0))


def options(**changed: Any) -> Namespace:
    known = {
        "k": 4,
        "requests": 3,
        "neighbors": [2],
        "seed": 0,
        "task": "world",
        "questions": ["linked"],
        "worlds": 1,
    }
    known |= {"rounds": [1], "from_store": False}
    known |= {"model_path": "bundled", "retriever": None}
    return Namespace(**known | changed)


def endpoint_of(fake: FakeChat) -> Endpoint:
    return Endpoint(fake.url, "fake", ARM, 8, 2)


def mode_of(cells: list[ratio_curves.Cell], names: tuple[str, ...] = CAPTURES) -> RatioCurves:
    """The mode without its cases and options."""
    mode = RatioCurves.__new__(RatioCurves)
    mode.args, mode.scorer, mode.cells = Namespace(seed=0, from_store=False), GOLD, cells
    mode.captures = make_captures(names, [3], [1])
    return mode


def rows_of(
    fake: FakeChat, case: Case, cells: list[ratio_curves.Cell], names: tuple[str, ...] = CAPTURES
) -> list[Any]:
    """Key and sample of everything that an empty run lacks."""
    return list(mode_of(cells, names).take(case, {"fused": endpoint_of(fake)}))


def test_cells_run_ends_once() -> None:
    """Ratio 0 and 1 are the same for all."""
    cells = make_cells(SELECTORS, [0, 0.15, 0.5, 1])
    ends = [(cell.arm, cell.label) for cell in cells if cell.label.get("ratio") in (0, 1)]
    assert ends == [("full-reuse", {"ratio": 0}), ("all", {"ratio": 1})]
    asked = {json.dumps(cell.reuse, sort_keys=True) for cell in cells}
    assert len(asked) == len(cells)  # equal ones would hit each other's KV
    assert len({(cell.arm, *label_of({"capture": "alone"}, cell)) for cell in cells}) == len(cells)
    by_name = {(cell.arm, json.dumps(cell.label)): cell.reuse for cell in cells}
    assert by_name["context-all", '{"ratio": 0.5}'] == {
        "mode": "fused",
        "selector": "context",
        "ratio": 0.5,
        "focus": "off",
    }
    assert by_name["context", '{"ratio": 0.15, "alpha": 2.0}']["alpha"] == 2.0
    assert "focus" not in by_name["context", '{"ratio": 0.5}']


def test_a_capture_for_each_number_of_neighbors() -> None:
    """FusionRAG fig. 17, and for each number of variants;
    other captures have no neighbours or rounds to vary."""
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
            behind = bring_in(
                endpoint_of(fake),
                {"capture": "live", "rounds": rounds},
                case,
                "salt",
                random.Random(0),
            )
        orders.append([[chunk["id"] for chunk in body["chunks"]] for body in fake.received])
        for chunk in case.request.chunks:
            variants = {
                tuple(order[: order.index(chunk.id)]) for order in orders[-1] if chunk.id in order
            }
            assert len(variants) == rounds
            assert {len(prefix) for prefix in variants} == behind[chunk.id]
    assert orders[1][:2] == orders[0]


def test_a_full_pool_leaves_the_store_alone() -> None:
    """Other tenants' KV takes the place of what was captured,
    and a copy on the device ends the run."""
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
        rows = [
            row
            for name in ("t:1", "t:2")
            for _, row in rows_of(fake, make_test_case(name=name), cells)
        ]
        chats = [body for body in fake.received if "messages" in body]
    full = {
        body["cache_salt"] for body in chats if body["reuse"] == "exact" and body["max_tokens"] == 8
    }
    moved = [body["cache_salt"] for body in chats if body["reuse"] != "exact"]
    assert not full & set(moved)
    assert len(full) == 2
    assert len(set(moved)) == 2 * 3
    assert len(rows) == 2 * (1 + 3 * len(cells))
    live = [row for row in rows if row["request"] == "t:1" and row["cell"].get("capture") == "live"]
    assert [(row["arm"], row["metrics"]["em"], row["metrics"]["same"]) for row in live] == [
        ("full-reuse", 0.0, 0.0),
        ("first", 1.0, 1.0),
        ("all", 1.0, 1.0),
    ]
    assert {row["block"] for row in rows} == {"p0"}  # both cases are about the same passage


def test_a_foreign_source_is_refused() -> None:
    """A chunk moved from another capture than the case's would compare selectors on different
    KV."""
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
    row = make_row("random", "alone", "a", 0.5)
    row["metrics"] = {"same": 0.5, "kl": 0.05}
    results = figures_of([row])
    assert "normalized_f1" not in results["cells"][0]
    assert set(results["cells"][0]["metrics"]) == {"same", "kl"}


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


def test_nothing_taken_has_figures() -> None:
    """A run that is interrupted at once still leaves a valid record."""
    assert figures_of([])["cells"] == []


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


def test_own_questions_need_no_other_passage() -> None:
    """What they ask, one of the passages says under its own name."""
    for case in world_cases(options(questions=["own"])):
        gold = {chunk.text for chunk in case.request.chunks if chunk.id in case.request.gold_ids}
        assert len(gold) == 1
        name = case.request.answers[0].split()[2]
        assert name in gold.pop()


def test_kinds_and_worlds_take_turns() -> None:
    """An interrupted run has some of each.
    A kind's questions do not depend on which others are asked."""
    cases = world_cases(options(questions=["own", "order"], worlds=2))
    assert [case.request.id for case in cases[:5]] == [
        "own:0:0",
        "order:0:0",
        "own:1:0",
        "order:1:0",
        "own:0:1",
    ]
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
    for kind, prefilled, reused in (
        ("own", [1.0] * 2, [1.0, 0.0]),
        ("contradicted", [0.0, 1.0, 1.0, 1.0] * 4, [0.0, 1.0, 1.0, 1.0] * 4),
    ):
        for number, (before, after) in enumerate(zip(prefilled, reused, strict=True)):
            both: dict[str, Any] = {"request": f"{kind}:{number}", "fates": None}
            rows.append(
                {
                    "arm": "full-prefill",
                    "cell": {"questions": kind},
                    "metrics": {"em": before, "f1": before},
                    **both,
                }
            )
            cell: dict[str, Any] = {"questions": kind, "capture": "live", "ratio": 0.0}
            rows.append(
                {"arm": "full-reuse", "cell": cell, "metrics": {"em": after, "f1": after}, **both}
            )
            rows.append(rows[-1] | {"arm": "critical", "cell": {**cell, "ratio": 0.15}})
    results = figures_of(rows)
    found = {(cell["arm"], cell["cell"]["questions"]): cell for cell in results["cells"]}
    assert found["full-reuse", "own"]["metrics"]["em_of_full"]["mean"] == 0.5
    assert found["full-reuse", "own"]["normalized_f1"] == 0
    assert found["full-reuse", "contradicted"]["metrics"]["em_of_full"]["mean"] == 1
    said = [text for text in results["verdict"] if text.startswith("Not measurable")]
    assert said == [
        "Not measurable with these weights: full prefill answers 0.750 of the questions"
        " contradicted."
    ]
    by_ratio = {row["questions"]: row for row in results["tables"][0]["rows"]}
    assert by_ratio["own"] == {
        "questions": "own",
        "capture": "live",
        "selector": "critical",
        "0": 0.5,
        "0.15": 0.5,
    }


def test_ratio_auto_is_asked_for_by_quality() -> None:
    """Once for all ratios."""
    cells = [
        cell
        for cell in make_cells(["critical@auto"], [0, 0.05, 0.15, 1])
        if cell.arm == "critical@auto"
    ]
    assert [(cell.label, cell.reuse) for cell in cells] == [
        ({"quality": q}, {"mode": "fused", "selector": "critical", "ratio": "auto", "quality": q})
        for q in (0.9, 0.99)
    ]


def test_calibrated_layers_are_asked_for_by_name() -> None:
    """`deviation` by depth, `query` by layer."""
    cells = {
        cell.arm: cell.reuse
        for cell in make_cells(["deviation@calibrated", "query@calibrated", "critical"], [0.15])
    }
    assert cells["deviation@calibrated"] == {
        "mode": "fused",
        "selector": "deviation",
        "ratio": 0.15,
        "depth": "calibrated",
    }
    assert cells["query@calibrated"] == {
        "mode": "fused",
        "selector": "query",
        "ratio": 0.15,
        "layers": "calibrated",
    }
    assert cells["critical"] == {"mode": "fused", "selector": "critical", "ratio": 0.15}
    assert [cell.reuse for cell in make_cells(["deviation@3", "query@3"], [0.15])][1:] == [
        {"mode": "fused", "selector": "deviation", "ratio": 0.15, "depth": 3},
        {"mode": "fused", "selector": "query", "ratio": 0.15, "layers": 3},
    ]


def test_clipped_passages_of_a_data_set(tmp_path: Path) -> None:
    """Questions with too few passages are left out;
    passages are cut to what the small model's context takes."""
    folder = tmp_path / "hotpotqa"
    folder.mkdir()
    passages = [{"id": f"p{i}", "title": "t", "text": f"text{i} " * 200} for i in range(9)]
    questions = [
        {
            "id": f"q{n}",
            "question": f"q{n}",
            "answers": ["a"],
            "context_passage_ids": [f"p{i}" for i in range(n)],
        }
        for n in (3, 4, 9)
    ]
    for name, rows in (("passages", passages), ("questions", questions)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    task = {
        "task": "hotpotqa",
        "data": tmp_path,
        "hub": None,
        "corpus": None,
        "retriever": "given",
        "scale": 1,
    }
    cases = list(data_cases(options(**task)))
    assert {(c.request.question, len(c.request.chunks)) for c in cases} == {
        (q, 4) for q in ("q4", "q9")
    }
    assert all(
        len(c.text) <= CLIP_CHARS for case in cases for c in (*case.request.chunks, *case.strangers)
    )


def test_published_questions_keep_all_their_passages(tmp_path: Path) -> None:
    """Half of a published list, or clipped passages, would be another question;
    the bundled model's context takes no more."""
    file = tmp_path / "musique.jsonl"
    rows = [
        {
            "input": f"q{n}",
            "context": [f"{n}-{i} " + "text " * 200 for i in range(n)],
            "answers": [],
        }
        for n in (1, 9, 11, 12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "qcfuse", "data": file, "hub": None, "corpus": None, "scale": 1, "requests": 4}
    cases = list(data_cases(options(**task, k=None, model_path="/models/M")))
    assert [len(case.request.chunks) for case in cases] == [9, 11, 12]
    assert min(len(c.text) for case in cases for c in case.request.chunks) > CLIP_CHARS
    assert (
        max(len(c.text) for case in data_cases(options(**task, k=4)) for c in case.request.chunks)
        == CLIP_CHARS
    )


def test_published_questions_are_scored_at_full_prefill_and_at_each_ratio(tmp_path: Path) -> None:
    """LongBench's own layout, with weights that may know the answers."""
    context = "".join(f"Passage {n + 1}:\nTitle {n}\nText {n}.\n" for n in range(3))
    rows = [
        {"input": "Who?", "context": context.replace("Text", f"{name} text"), "answers": ["Right!"]}
        for name in "ab"
    ]
    (tmp_path / "2wikimqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "longbench", "data": tmp_path, "hub": None, "corpus": None, "scale": 1}
    (case, _) = data_cases(options(**task, k=None, model_path="/models/M"))
    with chatting(FakeChat(answer)) as fake:
        taken = [
            row for _, row in rows_of(fake, case, make_cells(["query"], [0, 0.15]), ("alone",))
        ]
        asked = [body for body in fake.received if "messages" in body]
    assert [(row["arm"], row["metrics"]["em"], row["metrics"]["f1"]) for row in taken] == [
        ("full-prefill", 1, 1),
        ("full-reuse", 0, 0),
        ("query", 1, 1),
    ]
    assert {(body["messages"][0]["role"], body["max_tokens"]) for body in asked} == {("system", 32)}
    assert [chunk["text"] for chunk in asked[0]["chunks"]] == [
        f"Title {n}\na text {n}." for n in range(3)
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ratios", "1.5"], "--ratios must be in 0..1"),
        (["--k", "1"], "--k must be at least 2"),
        (
            ["--weights", "real", "--model-path", "random"],
            "the random weights know nothing of world",
        ),
    ],
)
def test_nonsense_gets_one_line(argv: list[str], said: str, tmp_path: Path) -> None:
    from eval.quality.command import main

    with pytest.raises(CommandError, match=said):
        main(["ratio", "--requests", "1", "--out", str(tmp_path / "run"), *argv])


@pytest.mark.parametrize("rounds", [[0, 1], [1, 5]])
def test_rounds_without_other_strangers_are_refused(rounds: list[int]) -> None:
    """Two variants behind the same chunks would be one."""
    with pytest.raises(CommandError, match="--rounds must be at least 1 and at most --k"):
        RatioCurves(options(rounds=rounds, ratios=[0]))


def test_numbers_of_variants_are_compared_on_the_same_questions() -> None:
    """By hand: three variants against one, two answers of a capture and ratio;
    other captures have none."""
    rows = [make_row("query", "live", request, f1) for request, f1 in (("a", 0.0), ("b", 0.5))]
    rows += [{**make_row("query", "live", request, 1.0)} for request in "ab"]
    for row in rows[2:]:
        row["cell"] = {**row["cell"], "rounds": 3}
    found = by_rounds([*rows, make_row("query", "alone", "a", 0.0)])
    told = [
        (each["metric"], each["a"], each["b"], each["cell"], each["value"], each["n"])
        for each in found
    ]
    names, cell = ("query, variants 1", "query, variants 3"), {"capture": "live", "ratio": 0.15}
    assert told == [("same", *names, cell, 0.75, 2), ("kl", *names, cell, pytest.approx(0.075), 2)]
    assert by_rounds(rows[:2]) == []
