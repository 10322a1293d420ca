"""Eq. 13 on servers that are made up: the least alpha that is good enough, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from eval import alpha as command
from eval.alpha import GRID, NUM_HALVINGS, calibrate, main, token_f1
from eval.errors import CommandError
from sglang_chunkcache.chunk_files import Example
from sglang_chunkcache.client import Client, ServerError

EXAMPLES = [Example(f"question {i}", ("one", "two", "three"), ("right answer",)) for i in range(10)]
CHAT, GENERATE = "/rag/v1/chat/completions", "/rag/v1/generate"


class FakeClient(Client):
    """Answers right for a share of the examples that depends on alpha;
    `full` of them without moved KV."""

    def __init__(
        self, share: Callable[[float], float], *, full: float = 1.0, moved: int = 100
    ) -> None:
        self.url = "fake"
        self.share, self.full, self.moved = share, full, moved
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.pending = 2

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.posts.append((path, dict(body)))
        if path != CHAT:
            self.pending -= 1
            return {}
        alpha = body.get("reuse", {}).get("alpha")
        share = self.full if alpha is None else self.share(alpha)
        right = int(body["messages"][0]["content"].split()[-1]) < round(share * len(EXAMPLES))
        recomputed = round(self.moved * min(1.0, alpha / 4)) if alpha is not None else 0
        fates = {"relocated": self.moved - recomputed, "recomputed": recomputed}
        choice = {"message": {"content": "right answer" if right else None}}
        return {"choices": [choice], "chunkcache": {"fates": fates}}

    def get(self, path: str) -> dict[str, Any]:
        return {"ranks": [{"store": {"pending": max(0, self.pending)}}]}

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [body for path, body in self.posts if path == CHAT]


def alphas_of(result: Mapping[str, Any]) -> list[float]:
    return [step["alpha"] for step in result["steps"]]


# The search


@pytest.mark.parametrize("threshold", [0.01, 0.2, 0.25, 0.3, 0.9, 1.7, 4.0, 8.0])
def test_least_alpha_that_reaches_the_target(threshold: float) -> None:
    """On a monotone server no more than a sixteenth of a grid step above the threshold;
    the mean CFO is the share of moved tokens that were recomputed."""
    result = calibrate(FakeClient(lambda alpha: float(alpha >= threshold)), EXAMPLES, target=0.9)
    index = next(i for i, alpha in enumerate(GRID) if alpha >= threshold)
    width = (GRID[index] - GRID[index - 1]) / 2**NUM_HALVINGS
    assert threshold <= result["alpha"] <= threshold + width
    assert len(result["steps"]) == index + 1 + NUM_HALVINGS
    for step in result["steps"]:
        assert step["mean_cfo"] == pytest.approx(round(100 * min(1.0, step["alpha"] / 4)) / 100)


def test_the_target_is_a_share_of_full_prefills_f1() -> None:
    """Eq. 13 compares with what the model itself reaches, not with perfect answers."""
    client = FakeClient(lambda alpha: 0.3 + 0.1 * (alpha >= 1), full=0.4)
    result = calibrate(client, EXAMPLES, target=0.9)
    assert result["full_f1"] == pytest.approx(0.4)
    assert 0.5 < result["alpha"] <= 1.0
    assert (result["target"], result["examples"]) == (0.9, 10)


@pytest.mark.parametrize(("share", "alpha", "asked"), [(1.0, 0.0, [0.0]), (0.5, None, [*GRID])])
def test_all_or_no_alpha_may_be_enough(
    share: float, alpha: float | None, asked: list[float]
) -> None:
    result = calibrate(FakeClient(lambda alpha: share), EXAMPLES, target=1.0)
    assert (result["alpha"], alphas_of(result)) == (alpha, asked)


def test_quality_that_is_not_monotone() -> None:
    peak = calibrate(FakeClient(lambda alpha: float(0.4 <= alpha <= 0.6)), EXAMPLES, target=0.9)
    assert 0.4 <= peak["alpha"] <= 0.4 + 0.25 / 2**NUM_HALVINGS
    assert max(alphas_of(peak)) == 0.5
    good = lambda alpha: float(alpha >= 1 or 0.55 <= alpha < 0.7)  # noqa: E731
    hole = calibrate(FakeClient(good), EXAMPLES, target=0.9)
    assert next(step["f1"] for step in hole["steps"] if step["alpha"] == hole["alpha"]) >= 0.9


# What is asked for


def test_chunks_are_stored_in_another_order_first() -> None:
    """Twice, since a chunk enters the store at its second use, which reads scores. Captures are
    waited for. Full prefill has its own salt, and so has another run."""
    client, other = (FakeClient(lambda alpha: 1.0) for _ in range(2))
    for each in (client, other):
        calibrate(each, EXAMPLES[:1], target=0.9)
    warm, again, full, fused = client.chats
    assert again == {**warm, "reuse": {"mode": "fused", "selector": "context"}}
    assert [chunk["text"] for chunk in warm["chunks"]] == ["two", "three", "one"]
    assert warm["max_tokens"] == 1
    assert [chunk["text"] for chunk in fused["chunks"]] == ["one", "two", "three"]
    assert fused["reuse"] == {"mode": "fused", "selector": "context", "alpha": 0.0}
    assert "reuse" not in warm.keys() | full.keys()
    assert fused["cache_salt"] == warm["cache_salt"] != full["cache_salt"]
    assert other.chats[0]["cache_salt"] != warm["cache_salt"]
    assert all(body["order"] == "retriever" and body["temperature"] == 0 for body in client.chats)
    assert [path for path, _ in client.posts] == [CHAT] * 2 + [GENERATE] * 2 + [CHAT] * 2


def test_nothing_moved_is_an_error() -> None:
    with pytest.raises(ServerError, match="no chunk was moved"):
        calibrate(FakeClient(lambda alpha: 1.0, moved=0), EXAMPLES, target=0.9)


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("The clocks.", "clocks", 1.0),
        ("", "", 1.0),
        ("", "clocks", 0.0),
        ("a", "the", 1.0),
        ("red clocks", "blue clocks", 0.5),
        ("clocks clocks", "clocks", 2 / 3),
    ],
)
def test_token_f1(answer: str, gold: str, f1: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)


def test_the_best_of_several_answers_counts() -> None:
    examples = [Example("question 0", ("one", "two"), ("something else", "right answer"))]
    assert calibrate(FakeClient(lambda alpha: 1.0), examples, target=1.0)["full_f1"] == 1.0


@pytest.mark.parametrize(
    ("alpha", "full_f1", "row", "code"),
    [
        (0.5, 0.8, ["2.000", "0.500", "0.800", "1.000"], 0),
        (0.0, 0.0, ["2.000", "0.500", "0.800", "0.000"], 0),
        (None, 0.8, ["2.000", "0.500", "0.800", "1.000"], 1),
    ],
    ids=["found", "never right: divides by nothing", "none"],
)
def test_command_hands_on_and_tells(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    alpha: float | None,
    full_f1: float,
    row: list[str],
    code: int,
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a"], "answers": ["x"]}))
    steps = [{"alpha": 2.0, "mean_cfo": 0.5, "f1": 0.8}]
    result = {"alpha": alpha, "full_f1": full_f1, "steps": steps}
    asked: list[Any] = []

    def calibrate(client: Any, examples: Any, *, target: float) -> dict[str, Any]:
        asked.extend([client.url, len(examples), target])
        return result

    monkeypatch.setattr(command, "calibrate", calibrate)
    assert main([str(path), "--url", "http://server", "--f1", "0.9"]) == code
    assert asked == ["http://server", 1, 0.9]
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == result
    assert table[-1].split() == row


def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a"], "answers": ["x"]}))
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:9"):
        main([str(path), "--url", "http://127.0.0.1:9"])
