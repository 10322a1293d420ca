"""`quality dedup`."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from eval.errors import CommandError
from eval.quality.command import main
from eval.quality.dedup import Dedup, converse, group, policy_arm, world_conversations
from eval.quality.greedy import Endpoint, Greedy
from eval.quality.mode import answer_all
from eval.task import Request, TextChunk
from tests.eval.fake_chat import Body, FakeChat, chatting

CHUNK = (TextChunk("p", "text"),)
TURNS = [Request(f"t:1:{n}", f"question {n}?", CHUNK, conversation="1") for n in range(3)]


def world(**changed: Any) -> list[Request]:
    known = {"task": "world", "requests": 20, "k": 4, "seed": 0, "data": None, "hub": None}
    return world_conversations(Namespace(**known | changed))


def endpoint_of(fake: FakeChat, policy: str = "off") -> Endpoint:
    return Endpoint(fake.url, "fake", policy_arm(policy), 8, 2)


def test_world_conversations_repeat_chunks_and_hold_their_answers() -> None:
    conversations = group(world())
    assert [len(turns) for turns in conversations] == [5, 5, 5, 5]
    for turns in conversations:
        shown = [chunk.id for turn in turns for chunk in turn.chunks]
        assert len(set(shown)) <= 8 < len(shown) == 20
        assert len({turn.question for turn in turns}) == 5
        for turn in turns:
            assert set(turn.gold_ids) <= {chunk.id for chunk in turn.chunks}
            gold = [chunk.text for chunk in turn.chunks if chunk.id in turn.gold_ids]
            assert any(turn.answers[1] in text for text in gold)
    assert world() == world()
    ids = [{chunk.id for turn in turns for chunk in turn.chunks} for turns in conversations]
    assert not ids[0] & ids[1]  # each conversation has a world of its own


def test_history_holds_the_servers_own_answers() -> None:
    """Our server drops nothing from a history that it does not recognise as its own."""
    with chatting(FakeChat(lambda body: f"answer {len(body['messages'])}")) as fake:
        converse(endpoint_of(fake), TURNS)
        sent = [[message["content"] for message in body["messages"]] for body in fake.received]
        names = {body["conversation_id"] for body in fake.received}
        converse(endpoint_of(fake), TURNS)
        again = {body["conversation_id"] for body in fake.received} - names
    assert sent[-1] == ["question 0?", "answer 1", "question 1?", "answer 3", "question 2?"]
    assert len(names) == len(again) == 1  # a repeated run is a new conversation


def test_turns_behind_a_failure_fail() -> None:

    def answer(body: Body) -> str:
        if len(body["messages"]) == 3:
            raise ValueError("too long")
        return "Yes."

    with chatting(FakeChat(answer)) as fake:
        first, *others = converse(endpoint_of(fake), TURNS)
        assert len(fake.received) == 2
    assert isinstance(first, Greedy)
    assert all(isinstance(other, CommandError) for other in others)


class FakeRun(dict[str, Any]):
    """`eval.run.Run`, in memory."""

    def add_all(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        assert not {key for key, _ in rows} & self.keys()
        self |= dict(rows)


OPTIONS: dict[str, Any] = {"task": "t", "policies": ["off", "shown"], "model_path": "random"}
OPTIONS |= {"weights": "auto", "bert_encoder": None, "max_new_tokens": 8, "top_logprobs": 2}


def test_an_interrupted_conversation_is_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.quality.dedup.load_requests", lambda args: TURNS)
    run, mode = FakeRun(), Dedup(Namespace(**OPTIONS))
    with chatting(FakeChat(lambda body: "Yes.")) as fake:
        servers: Any = SimpleNamespace(keep=lambda keys: None, model=lambda key: "fake")
        servers.open = lambda key, arm: fake.url
        run["dedup/dedup off/t:1:0"] = {"kept": True}
        for _ in range(2):
            answer_all(run, mode, servers, 1)  # type: ignore[arg-type]
            assert len(fake.received) == 6
    assert len(run) == 6
    assert run["dedup/dedup off/t:1:0"] == {"kept": True}
    assert run["dedup/dedup shown/t:1:2"]["metrics"]["same_policy"] == 1
    assert run["dedup/dedup shown/t:1:2"]["block"] == "1"  # its turns are one sample
    assert "same_policy" not in run["dedup/dedup off/t:1:2"]["metrics"]


def make_row(policy: str, request: str, f1: float, num_dropped: int = 0) -> dict[str, Any]:
    about: Any = {"arm": f"dedup {policy}", "cell": {}, "fates": None, "num_dropped": num_dropped}
    return {**about, "request": request, "metrics": {"f1": f1}}


def test_turns_that_changed_are_summed_apart() -> None:
    """Most first turns cannot differ, and would hide what happens to the others."""
    rows = [make_row("off", "1", 1.0), make_row("off", "2", 1.0)]
    rows += [make_row("shown", "1", 1.0), make_row("shown", "2", 0.5, num_dropped=3)]
    mode = Dedup.__new__(Dedup)
    mode.arms = [policy_arm("off"), policy_arm("shown")]
    results = mode.figures(rows)
    assert (results["num_turns"], results["num_deduplicated"]) == (2, 1)
    (over_all,), (changed,) = results["contrasts"], results["deduplicated_turns"]["contrasts"]
    assert (over_all["n"], over_all["value"]) == (2, -0.25)
    assert (changed["n"], changed["value"]) == (1, -0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policies", "off", "off"], "at least two different policies"),
        (["--k", "9"], "--k in 1..8"),
        (["--data", "x"], "neither --data nor --hub"),
        (["--requests", "1"], "no conversation of several turns"),
    ],
)
def test_nonsense_gets_one_line(options: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        main(["dedup", *options])
