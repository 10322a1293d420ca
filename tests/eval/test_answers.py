"""`quality answers` against fake servers."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.quality.answers import fixed_histories
from eval.quality.command import main
from eval.quality.greedy import Endpoint, ask
from eval.run import read_record, read_samples
from eval.serve.arms import ARMS
from eval.task import Request, TextChunk, load_requests
from tests.eval.fake_chat import Body, FakeChat, chatting


def first_chunk(body: Body) -> str:
    """An answer that depends on nothing but the order of the chunks."""
    shown = [chunk["id"] for chunk in body.get("chunks", [])]
    if body.get("order") != "retriever":
        shown.sort()
    return f"About {shown[0]}." if shown else "About " + body["messages"][-1]["content"].split()[2]


@pytest.fixture
def ours() -> Iterator[FakeChat]:
    with chatting(FakeChat(first_chunk)) as fake:
        yield fake


def run(
    ours: FakeChat, out: Path, *options: str, arms: tuple[str, ...] = ("tree",)
) -> dict[str, Any]:
    """The record of six questions of the world through arms at the fake."""
    named = [arm if "=" in arm else f"{arm}={ours.url},rag" for arm in arms]
    argv = ["answers", "--requests", "6", "--arms", *named, "--reference", ours.url]
    assert main([*argv, "--out", str(out), *options]) == 0
    return read_record(out)


def rows_of(out: Path, arm: str) -> list[dict[str, Any]]:
    return [row for row in read_samples(out) if row["arm"] == arm]


def test_reordering_is_no_loss_by_reuse(ours: FakeChat, tmp_path: Path) -> None:
    record = run(ours, tmp_path / "run")
    rows = rows_of(tmp_path / "run", "tree")
    assert len(rows) == 6
    assert all(row["metrics"]["same"] == 1 and row["metrics"]["kl"] == 0 for row in rows)
    assert all(row["order"] == sorted(row["order"]) for row in rows)
    for row, request in zip(rows, world_requests(), strict=True):
        assert row["metrics"]["same_retriever"] == (request.chunks[0].id == row["order"][0])
    assert {row["metrics"]["same_retriever"] for row in rows} == {0, 1}
    assert [cell["arm"] for cell in record["results"]["cells"]] == ["full-prefill", "tree"]


def test_full_prefill_is_asked_once_under_a_salt_of_its_own(ours: FakeChat, tmp_path: Path) -> None:
    """A salt used twice would make it a cache hit."""
    run(ours, tmp_path / "run", arms=("one", "two"))
    salted = [body for body in ours.received if "cache_salt" in body]
    assert len({body["cache_salt"] for body in salted}) == len(salted)
    assert all(body["order"] == "retriever" and body["reuse"] == "exact" for body in salted)
    requests = world_requests()
    orders = {(r.id, order) for r in requests for order in (ids_of(r), tuple(sorted(ids_of(r))))}
    assert len(salted) == len(orders)


def ids_of(request: Request) -> tuple[str, ...]:
    return tuple(chunk.id for chunk in request.chunks)


def test_a_server_without_salts_is_refused(tmp_path: Path) -> None:
    """What it calls full prefill may be a cache hit."""
    with (
        chatting(FakeChat(first_chunk, takes_salt=False)) as fake,
        chatting(FakeChat(first_chunk)) as other,
    ):
        stock = (f"stock={fake.url},chat",)
        record = run(fake, tmp_path / "run", "--reference", other.url, arms=stock)
    (errors,) = [cell["errors"] for cell in record["results"]["cells"] if cell["arm"] == "stock"]
    rows = [row for row in read_samples(tmp_path / "run") if row.get("error")]
    assert errors == len(rows) > 0
    assert all("full prefill found cached KV" in row["error"] for row in rows)


def test_unknown_weights_show_no_right_answers(
    ours: FakeChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EM of a model that cannot know the text would be read as the cache's doing."""
    record = run(ours, tmp_path / "run")
    shown = {name for cell in record["results"]["cells"] for name in cell["metrics"]}
    assert not shown & {"em", "f1", "rouge_l", "jaccard", "bert_score"}
    assert {"same", "kl", "same_retriever", "rouge_l_full", "rouge_l_retriever"} <= shown
    assert "--weights real scores right answers" in record["results"]["note"]
    assert f"Note: {record['results']['note']}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("127.0.0.1:9", "no arm .full-prefill=127.0.0.1:9"),
        ("http://127.0.0.1:9", "no server answers"),
    ],
)
def test_a_reference_that_is_no_server_is_refused(
    reference: str, said: str, tmp_path: Path
) -> None:
    argv = ["answers", "--requests", "1", "--reference", reference, "--out", str(tmp_path / "run")]
    with pytest.raises(CommandError, match=said):
        main(argv)


def test_known_weights_are_scored_and_contrasted(
    ours: FakeChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(ours, tmp_path / "run", "--weights", "real")["results"]
    (told,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("No verdict")]
    assert [told] == results["verdict"]
    assert "too few requests: 6" in told
    assert "note" not in results
    assert results["cells"][0]["metrics"]["em"]["mean"] == 0.0
    (f1,) = [each for each in results["contrasts"] if each["metric"] == "f1"]
    assert (f1["a"], f1["b"], f1["n"]) == ("full-prefill", "tree", 6)
    assert f1["statistic"] == "difference of means"


CHUNKS = (TextChunk("a", "text"), TextChunk("b", "text"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the data set holds."""
    requests: list[Request] = []
    monkeypatch.setattr("eval.quality.answers.load_requests", lambda args: requests)
    return requests


def test_turns_of_a_conversation_are_one_block(
    ours: FakeChat, tmp_path: Path, asked: list[Request]
) -> None:
    """Though the server does not hear of it: the history is in the messages."""
    talk: Any = {"conversation": "c", "reply": "Yes."}
    asked += [Request(f"t:{n}", f"question {n}?", CHUNKS, **talk) for n in range(2)]
    asked.append(Request("t:2", "more?", CHUNKS))
    run(ours, tmp_path / "run")
    assert [row["block"] for row in read_samples(tmp_path / "run")] == ["c", "c", "t:2"] * 2


def test_a_run_goes_on_with_the_same_requests_only(
    ours: FakeChat, tmp_path: Path, asked: list[Request]
) -> None:
    """Ids and settings do not tell that a data set's texts have changed."""
    asked.append(Request("t:1", "first?", CHUNKS))
    record = run(ours, tmp_path / "run")
    (tmp_path / "run" / "record.json").write_text(json.dumps(record | {"complete": False}))
    asked[0] = Request("t:1", "second?", CHUNKS)
    with pytest.raises(CommandError, match="begun with other settings: requests_sha256"):
        run(ours, tmp_path / "run")
    assert record["spec"]["model_sha256"] is None  # no server was started


@pytest.mark.parametrize(
    "choice", ["text", {"message": "text"}, {"message": {"content": "x"}, "logprobs": "odd"}, None]
)
def test_an_odd_answer_is_an_error_of_that_request(
    choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One proxy's page in place of an answer must not end a run of hours."""
    reply = {"choices": [choice], "usage": {}}
    monkeypatch.setattr("eval.quality.greedy.post", lambda url, body: reply)
    with pytest.raises(CommandError, match="no chat completion came back"):
        ask(Endpoint("http://x", "m", ARMS["ours"], 8, 0), Request("t:1", "?", CHUNKS), CHUNKS)


def test_what_a_server_refuses_is_a_sample(tmp_path: Path) -> None:
    first = world_requests()[0].question

    def answer(body: Body) -> str:
        if body["messages"][-1]["content"] == first:
            raise ValueError("the prompt is too long")
        return "Yes."

    with chatting(FakeChat(answer)) as fake:
        record = run(fake, tmp_path / "run")
    (cell,) = [cell for cell in record["results"]["cells"] if cell["arm"] == "tree"]
    assert cell["errors"] >= 1
    assert cell["n"] + cell["errors"] == 6


def world_requests() -> list[Request]:
    """The requests that `run` asks."""
    none = dict.fromkeys(("data", "hub", "corpus", "retriever"))
    known = {"task": "world", "requests": 6, "k": 5, "scale": 1, "seed": 0}
    return load_requests(Namespace(**none, **known))


def test_text_prompts_of_another_length_are_counted(ours: FakeChat, tmp_path: Path) -> None:
    record = run(ours, tmp_path / "run", arms=(f"stock={ours.url},chat",))
    assert record["results"]["tokenised_otherwise"] == {"stock": 6}
    assert all(row["metrics"]["same"] == 1 for row in rows_of(tmp_path / "run", "stock"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weights", "real", "--task", "squad"], "the bundled weights know nothing of squad"),
        (["--clients", "0"], "--clients must be at least 1, got 0"),
        (["--judge-url", "http://127.0.0.1:9"], "--judge-url needs --judge-model"),
        (["--bert-encoder", "/nowhere"], "is not the folder of an encoder"),
    ],
)
def test_nonsense_gets_one_line(
    options: list[str], said: str, tmp_path: Path, asked: list[Request]
) -> None:
    with pytest.raises(CommandError, match=said):
        main(["answers", "--arms", "ours", "--out", str(tmp_path / "run"), *options])
    assert not (tmp_path / "run").exists()


def test_histories_are_the_data_sets_own() -> None:
    turns = [
        Request("t:1:0", "first?", CHUNKS, conversation="1", reply="One."),
        Request("t:2:0", "other?", CHUNKS, conversation="2"),
        Request("t:1:1", "second?", CHUNKS, conversation="1"),
        Request("t:2:1", "again?", CHUNKS, conversation="2"),
        Request("t:3", "alone?", CHUNKS),
    ]
    told = [{"role": "user", "content": "first?"}, {"role": "assistant", "content": "One."}]
    assert list(fixed_histories(turns).values()) == [[], [], told, [], []]
