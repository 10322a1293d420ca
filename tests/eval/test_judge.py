"""The judge's adapter against a fake endpoint."""

from __future__ import annotations

import pytest

from eval.errors import CommandError
from eval.quality.judge import Judge, supported_share
from tests.eval.fake_chat import Body, FakeChat, chatting

TWO_OF_THREE = (
    '{"claims": [{"claim": "a", "supported": true}, {"claim": "b", "supported": false}, '
    '{"claim": "c", "supported": true}]}'
)


def test_claims_are_counted() -> None:
    assert (
        supported_share(TWO_OF_THREE) == supported_share(f"```json\n{TWO_OF_THREE}\n```") == 2 / 3
    )
    assert supported_share('{"claims": []}') is None


@pytest.mark.parametrize(
    "reply",
    [
        *("The answer is faithful.", f"Here you are: {TWO_OF_THREE}"),
        *("[]", '{"claims": 3}', '{"claims": [true]}', '{"claims": [{"claim": "a"}]}'),
        '{"claims": [{"claim": "a", "supported": "yes"}]}',
    ],
)
def test_anything_else_is_refused(reply: str) -> None:
    with pytest.raises(ValueError):
        supported_share(reply)


def test_the_judge_sees_question_answer_and_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    with chatting(FakeChat(lambda body: TWO_OF_THREE)) as fake:
        judge = Judge(fake.url + "/v1", "judge-1", key_env="JUDGE_KEY")
        assert judge.faithfulness("who?", "me", ["{first}", "second"]) == 2 / 3
        (body,) = fake.received
    prompt = body["messages"][0]["content"]
    assert "[1] {first}\n[2] second" in prompt
    assert "Question: who?\nAnswer: me" in prompt
    asked = {"path": "/v1/chat/completions", "model": "judge-1", "temperature": 0}
    assert body.items() >= asked.items()
    assert judge.spec() == {"model": "judge-1", "failures": 0}
    assert "secret-key" not in str(body)


def test_bad_replies_are_asked_again_and_counted() -> None:
    """Two bad replies and a good one are a verdict; three bad ones a failure, not a zero."""
    replies = ["nonsense", "{}", TWO_OF_THREE, "nonsense", "nonsense", "nonsense"]

    def answer(body: Body) -> str:
        return replies.pop(0)

    with chatting(FakeChat(answer)) as fake:
        judge = Judge(fake.url, "judge-1", wait_s=0)
        assert judge.faithfulness("q", "a", []) == 2 / 3
        assert judge.faithfulness("q", "a", []) is None
        assert len(fake.received) == 6
    assert judge.num_failures == 1


def test_an_endpoint_that_is_gone_is_a_failure() -> None:
    judge = Judge("http://127.0.0.1:9", "judge-1", wait_s=0)
    assert judge.faithfulness("q", "a", []) is None
    assert judge.spec()["failures"] == 1


def test_a_key_that_is_not_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(CommandError, match="variable JUDGE_KEY is not set"):
        Judge("http://127.0.0.1:9", "judge-1", key_env="JUDGE_KEY")
