"""Tasks from files: what becomes of a data set's rows, and one clear line for what is wrong with
them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from eval.errors import CommandError
from eval.task import TASKS, Request, Source, load_task
from eval.tasks.world import world_requests
from tests.eval.make_data import (
    parse,
    requests,
    write_conversations,
    write_questions,
    write_ragpulse,
    write_rows,
)

QUESTION_SETS = ("hotpotqa", "2wikimqa", "musique", "squad", "triviaqa", "nq")

needs_retrieval = pytest.mark.skipif(
    not (find_spec("faiss") and find_spec("tantivy")),
    reason="the extra `retrieval` is not installed",
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with tiny versions of all local data sets."""
    for name in QUESTION_SETS:
        write_questions(tmp_path / name)
    write_conversations(tmp_path / "mtrag")
    write_ragpulse(tmp_path / "ragpulse")
    return tmp_path


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Question sets


def given(task: str, data: Path, *more: str) -> list[Request]:
    """The requests with the data set's own lists."""
    return requests("--task", task, "--data", data, "--retriever", "given", *more)


@pytest.mark.parametrize("name", QUESTION_SETS)
def test_given_chunks_are_the_data_sets_in_its_order(data: Path, name: str) -> None:
    """Distractors keep the data set's order, and the title is part of the text."""
    by_id = {request.id: request for request in given(name, data)}
    assert len(by_id) == 10
    asked = by_id[f"{name}:q4"]
    assert [chunk.id for chunk in asked.chunks] == ["p5", "p6", "p4"]
    assert asked.chunks[2].text == "Page 4\nThe emerald mine number 4 was opened in 1804."
    assert (asked.answers, asked.gold_ids) == (("1804",), ("p4",))


def test_k_and_requests_cut_from_the_end(data: Path) -> None:
    few = given("musique", data, "--requests", "4", "--k", "2")
    assert few == given("musique", data, "--k", "2")[:4]
    assert all(len(request.chunks) == 2 for request in few)


@pytest.mark.parametrize(("task", "num_chunks"), [("trace", 7), ("musique", 3), ("world", 5)])
def test_given_lists_are_cut_only_where_k_says(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, num_chunks: int
) -> None:
    """`replay` counts all chunks of a trace, which a server must then be sent."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"passages": [1, 2, 3, 4, 5, 6, 7]}\n{"passages": [1, 2]}\n')
    options: list[str | Path] = ["--task", task, "--retriever", "given", "--requests", "2"]
    options += [] if task == "world" else ["--data", trace if task == "trace" else data]
    assert max(len(request.chunks) for request in requests(*options)) == num_chunks
    assert capsys.readouterr().err == ""
    requests(*options, "--k", "2")
    assert ("eval: --k 2 takes chunks from" in capsys.readouterr().err) is (task != "world")


def test_the_order_of_questions_is_the_seeds(data: Path) -> None:
    """Files have questions about one passage side by side; all arms get one order."""
    one, again, two = (
        [request.id for request in given("squad", data, "--seed", seed)] for seed in "112"
    )
    assert one == again != two
    assert sorted(one) == sorted(two)


@needs_retrieval
@pytest.mark.parametrize(
    "retriever",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("bm25", "dense")), "fusion"],
)
def test_retrieved_chunks_hold_the_answer_more_often_than_chance(
    data: Path, retriever: str
) -> None:
    """Two of twenty passages would hold it once in ten."""
    found = requests("--task", "nq", "--data", data, "--retriever", retriever, "--k", "2")
    assert all(len(request.chunks) == 2 for request in found)
    assert sum(request.gold_ids[0] in {c.id for c in request.chunks} for request in found) >= 8
    texts = {passage.text for passage in load_task(Source("nq", data)).passages}
    assert all(chunk.text in texts for request in found for chunk in request.chunks)


@needs_retrieval
def test_question_sets_are_searched_by_words_unless_said_otherwise(data: Path) -> None:
    found = requests("--task", "hotpotqa", "--data", data)
    assert found == requests("--task", "hotpotqa", "--data", data, "--retriever", "bm25")
    assert found != given("hotpotqa", data)


@needs_retrieval
def test_question_that_finds_nothing_is_left_out(data: Path) -> None:
    """A request without chunks says nothing about reuse."""
    asked = [{"id": "a", "question": "Zzyzx?"}, {"id": "b", "question": "A garnet mine?"}]
    write_rows(data / "nq" / "questions.jsonl.gz", asked)
    assert [request.id for request in requests("--task", "nq", "--data", data)] == ["nq:b"]


def test_scale_halves_the_words_of_chunks_and_leaves_questions(data: Path) -> None:
    both = zip(given("musique", data), given("musique", data, "--scale", "2"), strict=True)
    for whole, half in both:
        assert half.question == whole.question
        for a, b in zip(whole.chunks, half.chunks, strict=True):
            assert a.text.startswith(b.text)
            assert len(b.text.split(" ")) == len(a.text.split(" ")) // 2


# Conversations


def test_turns_stand_in_order_with_the_data_sets_reply(data: Path) -> None:
    asked = requests("--task", "mtrag", "--data", data)
    assert [r.id for r in asked] == [f"mtrag:c{c}:{t}" for c in (0, 1) for t in (1, 2, 3)]
    assert [r.conversation for r in asked] == ["mtrag:c0"] * 3 + ["mtrag:c1"] * 3
    assert [c.id for c in asked[1].chunks] == ["govt-1", "govt-2"]
    assert asked[1].reply == "It is reply 1 of four words."
    assert requests("--task", "mtrag", "--data", data, "--scale", "2")[1].reply == "It is reply"


@needs_retrieval
@pytest.mark.parametrize("name", ["mtrag", pytest.param("mtrag-un", marks=pytest.mark.nightly)])
def test_a_conversation_is_searched_in_its_own_domain(data: Path, name: str) -> None:
    """The other domain has the same words, so a search of everything would mix them."""
    found = requests("--task", name, "--data", data, "--retriever", "bm25", "--k", "4")
    assert len(found) == 6
    for request in found:
        domain = "govt" if request.conversation == f"{name}:c0" else "clapnq"
        assert request.chunks
        assert all(chunk.id.startswith(domain) for chunk in request.chunks)
        assert request.chunks[0].id in request.gold_ids


# Traces


def lengths(request: Request) -> list[int]:
    """Words of each chunk."""
    return [len(chunk.text.split()) for chunk in request.chunks]


def test_ragpulse_components_become_words_that_come_again(data: Path) -> None:
    """Equal ids are equal text; lengths are the trace's, scaled once."""
    first, second, third = asked = requests("--task", "ragpulse", "--data", data)
    assert lengths(first) == [40, 20]
    assert first.chunks[0] == third.chunks[1]
    assert first.chunks[1] == second.chunks[0]
    assert len({chunk.text for r in asked for chunk in r.chunks}) == 3
    assert len(first.system.split()) == 8
    assert first.system == second.system
    assert len(first.question.split()) == 4 + 6 + 4
    assert [r.arrival_s for r in asked] == [0.0, 7.0, 21.0]
    assert [r.id for r in asked] == ["ragpulse:100", "ragpulse:101", "ragpulse:103"]
    assert first.max_new_tokens == 12
    half = requests("--task", "ragpulse", "--data", data, "--scale", "2")[0]
    assert lengths(half) == [20, 10]
    assert (len(half.system.split()), half.max_new_tokens) == (4, 6)


def test_trace_of_ones_own(tmp_path: Path) -> None:
    """An empty request is none."""
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"passages": ["a", "b"], "lengths": [30, 8], "timestamp": 5}
        | {"conversation": 1, "output_tokens": 9},
        {"passages": [], "timestamp": 6},
        {"passages": ["b", "c"], "lengths": [8, 4], "timestamp": 7.5}
        | {"question_tokens": 3, "system_tokens": 2},
    )
    first, second = requests("--task", "trace", "--data", path)
    assert lengths(first) == [30, 8]
    assert first.chunks[1] == second.chunks[0]
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert (first.conversation, first.max_new_tokens, first.system) == ("1", 9, "")
    assert (len(second.question.split()), len(second.system.split())) == (3, 2)
    assert first.question != second.question
    assert lengths(requests("--task", "trace", "--data", path, "--scale", "2")[0]) == [15, 4]


def test_trace_without_lengths_or_times(tmp_path: Path) -> None:
    """Chunks get a typical length; without times there is no arrival to replay."""
    rows = {"chunks": [1, 2]}, {"chunks": [2], "lengths": [7], "timestamp": 3}
    path = write_lines(tmp_path / "mine.jsonl", *rows)
    first, second = requests("--task", "trace", "--data", path)
    assert (lengths(first), lengths(second)) == ([256, 7], [7])
    assert second.arrival_s is None


# ShareGPT


def talk(name: str, *values: str, roles: tuple[str, ...] = ("human", "gpt")) -> dict[str, object]:
    """A conversation in ShareGPT's format."""
    turns = [{"from": roles[i % len(roles)], "value": value} for i, value in enumerate(values)]
    return {"id": name, "conversations": turns}


def test_sharegpt_turns_and_replies(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "sharegpt.jsonl",
        talk("a", "One?", "Yes.", "Two?"),
        talk("b", "(goes on)", "Three?", "No.", roles=("gpt", "human")),
        talk("c", "Be brief.", "Four?", "Ok.", roles=("system", "user", "assistant")),
    )
    asked = requests("--task", "sharegpt", "--data", path)
    assert [(r.id, r.question, r.reply, r.system) for r in asked] == [
        ("sharegpt:a:1", "One?", "Yes.", ""),
        ("sharegpt:a:2", "Two?", None, ""),
        ("sharegpt:b:1", "Three?", "No.", ""),
        ("sharegpt:c:1", "Four?", "Ok.", "Be brief."),
    ]
    assert {r.chunks for r in asked} == {()}


def test_malformed_conversations_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(
        tmp_path / "sharegpt.jsonl",
        talk("a", "One?", "Yes."),
        {"id": "no turns"},
        talk("empty"),
        talk("twice", "One?", "Two?", roles=("human",)),
        talk("nobody", "One?", roles=("martian",)),
        talk("blank", "One?", " "),
        talk("a", "The same id?"),
        {"id": "odd", "conversations": ["One?"]},
    )
    assert [r.id for r in requests("--task", "sharegpt", "--data", path)] == ["sharegpt:a:1"]
    assert "skipped 7 of 8 conversations" in capsys.readouterr().err


@needs_retrieval
def test_sharegpt_searches_a_corpus_for_each_turn(data: Path) -> None:
    """A turn that finds nothing stays: later turns come after it."""
    path = data / "sharegpt.json"
    turns = ("Is there a jasper mine?", "Yes.", "Thanks!", "Bye.", "A copper mine?")
    path.write_text(json.dumps([talk("a", *turns)]))
    options = ("--task", "sharegpt", "--data", path, "--corpus", data / "musique", "--k", "2")
    asked = requests(*options)
    assert [len(r.chunks) for r in asked] == [2, 0, 2]
    assert all("jasper" in chunk.text for chunk in asked[0].chunks)
    assert all("copper" in chunk.text for chunk in asked[2].chunks)
    with pytest.raises(CommandError, match="lists no chunks here"):
        requests(*options, "--retriever", "given")


# The generated world


def test_world_needs_nothing_and_answers_are_in_the_chunks() -> None:
    asked = requests("--requests", "30", "--k", "4", "--seed", "3")
    assert asked == world_requests(30, 3)
    assert len({request.id for request in asked}) == 30
    for request in asked:
        texts = {chunk.id: chunk.text for chunk in request.chunks}
        assert len(texts) == 4
        assert any(answer in texts[request.gold_ids[0]] for answer in request.answers)


def test_recurring_chunks_come_in_orders_of_their_own() -> None:
    asked = requests("--task", "recurring", "--requests", "40")
    assert asked == requests("--task", "recurring", "--requests", "40")
    assert asked != requests("--task", "recurring", "--requests", "40", "--seed", "1")
    lists = [tuple(chunk.id for chunk in request.chunks) for request in asked]
    assert {len(set(names)) for names in lists} == {8}
    assert len(set(lists)) == len({request.question for request in asked}) == 40
    texts = {chunk.id: chunk.text for request in asked for chunk in request.chunks}
    assert len(texts) <= 60
    assert all(texts[c.id] == c.text for request in asked for c in request.chunks)
    assert {len(text.split()) for text in texts.values()} == {300}
    counts = [sum(name in names for names in lists) for name in texts]
    assert max(counts) >= 4 * min(counts), "few are popular"


def test_world_of_another_seed_is_another() -> None:
    assert requests("--seed", "1", "--requests", "5") != requests("--seed", "2", "--requests", "5")


# What users get wrong


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--k 0", "--k must be at least 1, got 0"),
        ("--requests -3", "--requests must be at least 1, got -3"),
        ("--scale 0", "--scale must be at least 1, got 0"),
        ("--k 40", "--k 40 is too much for task world"),
        ("--data x", "neither --data nor --hub"),
        ("--task recurring --hub", "neither --data nor --hub"),
        ("--task recurring --k 61", "there are 60 chunks"),
        ("--task squad", "task squad needs --data DIR"),
        ("--task squad --data x --hub", "do not go together"),
        ("--task squad --data nowhere", "nowhere has no folder squad/"),
        ("--task mtrag --hub", "task mtrag is not read from the hub"),
        ("--task trace --hub", "task trace is not read from the hub"),
        ("--task trace", "task trace needs --data FILE"),
        ("--task trace --data nowhere", "nowhere does not exist"),
        ("--task sharegpt --data nowhere.json", "nowhere.json does not exist"),
        ("--task squad --corpus x", "--corpus is for task sharegpt only"),
        ("--task qcfuse", "task qcfuse needs --data FILE"),
    ],
)
def test_wrong_options_say_what_would_be_right(options: str, said: str) -> None:
    with pytest.raises(CommandError) as caught:
        requests(*options.split())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


QUESTION = {"id": "q", "question": "Which?"}
PASSAGE = {"id": "p", "text": "x"}
COMPONENT = {"kind": "passage", "id": 1, "token_length": 4}


@pytest.mark.parametrize(
    ("path", "rows", "said"),
    [
        ("squad/questions", [QUESTION, QUESTION], "line 2: id 'q' occurs twice"),
        ("squad/questions", [{"id": "q"}], "line 1: question must be a non-empty string"),
        ("squad/questions", [QUESTION | {"context_passage_ids": ["p99"]}], "'p99', which is not"),
        ("squad/questions", [QUESTION | {"gold_passage_ids": "p"}], "gold_passage_ids must be a"),
        ("squad/questions", [], "has no questions"),
        ("squad/questions", [QUESTION], "lists no chunks here: use --retriever"),
        ("squad/passages", [], "has no passages"),
        ("squad/passages", [{"id": "p"}], "line 1: text must be a non-empty string"),
        ("squad/passages", [PASSAGE] * 2, "line 2: id 'p' occurs twice"),
        ("squad/passages", None, "passages.jsonl.gz does not exist"),
        ("ragpulse/components", [COMPONENT], "line 1: passage 2 is not among the components"),
    ],
)
def test_wrong_rows_are_named(
    data: Path, path: str, rows: list[dict[str, object]] | None, said: str
) -> None:
    (data / f"{path}.jsonl.gz").unlink()
    if rows is not None:
        write_rows(data / f"{path}.jsonl.gz", rows)
    with pytest.raises(CommandError, match=said):
        given(path.partition("/")[0], data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": 1}\n{"id"\n', "line 2, column 6: Expecting"),
        ("[1]", "line 1: must be a JSON object"),
        ("[", "line 1, column 2"),
        ("[]", "has no questions"),
    ],
)
def test_files_that_are_no_rows_are_named(tmp_path: Path, text: str, said: str) -> None:
    """JSON and JSON Lines; what else cannot be read is in test_trace.py."""
    path = tmp_path / ("mine.jsonl" if "\n" in text else "mine.json")
    path.write_text(text)
    with pytest.raises(CommandError, match=said):
        requests("--task", "sharegpt", "--data", path)


def test_ids_may_be_integers(data: Path) -> None:
    """A list of 7 finds the passage "7", as in a trace."""
    write_rows(data / "nq" / "passages.jsonl.gz", [{"id": 7, "text": "x"}])
    question = {"id": 3, "question": "Which?", "context_passage_ids": ["7"]}
    write_rows(data / "nq" / "questions.jsonl.gz", [question])
    (request,) = given("nq", data)
    assert (request.id, request.chunks[0].id) == ("nq:3", "7")


def test_nothing_to_search_and_nothing_listed(data: Path) -> None:
    path = write_lines(data / "talk.jsonl", talk("a", "One?", "Yes."))
    with pytest.raises(CommandError, match="has no passages to search"):
        requests("--task", "sharegpt", "--data", path, "--retriever", "bm25")
    with pytest.raises(CommandError, match="lists no chunks here: use --retriever"):
        given("mtrag-un", data)


def test_help_has_a_line_for_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {' '.join(task.summary.split())}" in told for name, task in TASKS.items())


# Real data


@pytest.mark.data
@pytest.mark.parametrize("name", [*QUESTION_SETS, "mtrag", "mtrag-un", "ragpulse"])
def test_real_data_reads(data_dir: Path, name: str) -> None:
    """All rows are read and checked; ids are unique, and every listed chunk has text."""
    task = load_task(Source(name, data_dir, requests=10_000))
    assert len(task.requests) > 100
    assert len({request.id for request in task.requests}) == len(task.requests)
    assert all(chunk.text.strip() for request in task.requests for chunk in request.chunks)
    lists = [request.chunks for request in task.requests if request.chunks]
    assert bool(lists) == (name not in ("squad", "nq", "mtrag-un"))
    assert all(len({chunk.id for chunk in chunks}) == len(chunks) for chunks in lists)


@pytest.mark.data
@needs_retrieval
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["squad", "mtrag-un"])
def test_real_passages_are_found(data_dir: Path, name: str) -> None:
    """Most questions of SQuAD find their paragraph (recall .95, eval/LOG.md)."""
    found = requests("--task", name, "--data", data_dir, "--requests", "40")
    assert all(1 <= len(request.chunks) <= 5 for request in found)
    if name == "squad":
        assert sum(request.gold_ids[0] in {c.id for c in request.chunks} for request in found) >= 34
