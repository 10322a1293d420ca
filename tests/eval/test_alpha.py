"""Eq."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from eval import alpha as command
from eval.alpha import GRID, NUM_HALVINGS, calibrate, main, token_f1
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.examples import Example

EXAMPLES = [Example(f"question {i}", ("one", "two", "three"), ("right answer",)) for i in range(10)]


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
        if path != "/rag/v1/chat/completions":
            self.pending -= 1
            return {}
        alpha = body.get("reuse", {}).get("alpha")
        share = self.full if alpha is None else self.share(alpha)
        right = int(body["messages"][0]["content"].split()[-1]) < round(share * len(EXAMPLES))
        recomputed = round(self.moved * min(1.0, alpha / 4)) if alpha is not None else 0
        return {
            "choices": [{"message": {"content": "right answer" if right else None}}],
            "chunkcache": {
                "fates": {"relocated": self.moved - recomputed, "recomputed": recomputed}
            },
        }

    def get(self, path: str) -> dict[str, Any]:
        return {"ranks": [{"store": {"pending": max(0, self.pending)}}]}

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [body for path, body in self.posts if path == "/rag/v1/chat/completions"]


def alphas_of(result: Mapping[str, Any]) -> list[float]:
    return [step["alpha"] for step in result["steps"]]


# The search


@pytest.mark.parametrize("threshold", [0.01, 0.2, 0.25, 0.3, 0.9, 1.7, 4.0, 8.0])
def test_least_alpha_that_reaches_the_target(threshold: float) -> None:
    result = calibrate(FakeClient(lambda alpha: float(alpha >= threshold)), EXAMPLES, target=0.9)
    index = next(i for i, alpha in enumerate(GRID) if alpha >= threshold)
    width = (GRID[index] - GRID[index - 1]) / 2**NUM_HALVINGS
    assert threshold <= result["alpha"] <= threshold + width
    assert len(result["steps"]) == index + 1 + NUM_HALVINGS


def test_the_target_is_a_share_of_full_prefills_f1() -> None:
    """Eq. 13 compares with what the model itself reaches, not with perfect answers."""
    result = calibrate(
        FakeClient(lambda alpha: 0.3 + 0.1 * (alpha >= 1), full=0.4), EXAMPLES, target=0.9
    )
    assert result["full_f1"] == pytest.approx(0.4)
    assert 0.5 < result["alpha"] <= 1.0
    assert (result["target"], result["examples"]) == (0.9, 10)


def test_quality_that_falls_again() -> None:
    """The first grid point that suffices is halved in on."""
    good = lambda alpha: float(0.4 <= alpha <= 0.6)  # noqa: E731
    result = calibrate(FakeClient(good), EXAMPLES, target=0.9)
    assert 0.4 <= result["alpha"] <= 0.4 + 0.25 / 2**NUM_HALVINGS
    assert max(alphas_of(result)) == 0.5


def test_quality_with_a_hole() -> None:
    good = lambda alpha: float(alpha >= 1 or 0.55 <= alpha < 0.7)  # noqa: E731
    result = calibrate(FakeClient(good), EXAMPLES, target=0.9)
    best = next(step for step in result["steps"] if step["alpha"] == result["alpha"])
    assert best["f1"] >= 0.9


def test_steps_tell_what_was_recomputed() -> None:
    """The mean CFO is the share of moved tokens that were recomputed."""
    result = calibrate(FakeClient(lambda alpha: float(alpha >= 2)), EXAMPLES, target=0.9)
    assert [step["mean_cfo"] for step in result["steps"]] == [
        pytest.approx(round(100 * min(1.0, step["alpha"] / 4)) / 100) for step in result["steps"]
    ]


# What is asked for


def test_chunks_are_stored_in_another_order_first() -> None:
    """Twice, since a chunk enters the store at its second use, which reads scores."""
    client = FakeClient(lambda alpha: 1.0)
    calibrate(client, EXAMPLES[:1], target=0.9)
    warm, again, full, fused = client.chats
    assert again == {**warm, "reuse": {"mode": "fused", "selector": "context"}}
    assert "reuse" not in warm
    assert [chunk["text"] for chunk in warm["chunks"]] == ["two", "three", "one"]
    assert warm["max_tokens"] == 1
    assert [chunk["text"] for chunk in fused["chunks"]] == ["one", "two", "three"]
    assert fused["reuse"] == {"mode": "fused", "selector": "context", "alpha": 0.0}
    assert "reuse" not in full
    assert fused["cache_salt"] == warm["cache_salt"] != full["cache_salt"]
    assert all(body["order"] == "retriever" and body["temperature"] == 0 for body in client.chats)
    paths = [path for path, _ in client.posts]
    assert paths == [
        *["/rag/v1/chat/completions"] * 2,
        *["/rag/v1/generate"] * 2,
        *["/rag/v1/chat/completions"] * 2,
    ]


def test_nothing_moved_is_an_error() -> None:
    """Without moved tokens every alpha is as good: rather no answer than a wrong one."""
    with pytest.raises(ServerError, match="no chunk was moved"):
        calibrate(FakeClient(lambda alpha: 1.0, moved=0), EXAMPLES, target=0.9)


# F1


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("The clocks.", "clocks", 1.0),
        ("", "", 1.0),
        ("", "clocks", 0.0),
        ("a", "the", 1.0),
        ("red clocks", "blue clocks", 0.5),
        ("clocks clocks", "clocks", 2 / 3),
        ("boats", "clocks", 0.0),
    ],
)
def test_token_f1(answer: str, gold: str, f1: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)


def test_the_best_of_several_answers_counts() -> None:
    examples = [Example("question 0", ("one", "two"), ("something else", "right answer"))]
    assert calibrate(FakeClient(lambda alpha: 1.0), examples, target=1.0)["full_f1"] == 1.0


# The command


@pytest.mark.parametrize(("alpha", "code"), [(0.5, 0), (0.0, 0), (None, 1)])
def test_exit_code_tells_whether_an_alpha_was_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    alpha: float | None,
    code: int,
) -> None:
    """The file and the target are handed on."""
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a"], "answers": ["x"]}))
    asked: list[Any] = []
    steps = [
        {"alpha": 1.0, "mean_cfo": 0.25, "f1": 0.5},
        {"alpha": 2.0, "mean_cfo": 0.5, "f1": 0.8},
    ]
    result = {"alpha": alpha, "full_f1": 0.8, "steps": steps}

    def calibrate(client: Any, examples: Any, *, target: float) -> dict[str, Any]:
        asked.extend([client.url, len(examples), target])
        return result

    monkeypatch.setattr(command, "calibrate", calibrate)
    assert main([str(path), "--url", "http://server", "--f1", "0.9"]) == code
    assert asked == ["http://server", 1, 0.9]
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == result
    assert table[-1].split() == ["2.000", "0.500", "0.800", "1.000"]


def test_a_model_that_is_never_right_divides_by_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a"], "answers": ["x"]}))
    steps = [{"alpha": 0.0, "mean_cfo": 0.0, "f1": 0.0}]
    monkeypatch.setattr(
        command, "calibrate", lambda *args, **kwargs: {"alpha": 0.0, "full_f1": 0.0, "steps": steps}
    )
    assert main([str(path), "--url", "u"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split() == ["0.000", "0.000", "0.000", "0.000"]
