"""The ContextPilot adapter's child process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.errors import CommandError
from eval.serve.arms import ARMS, create_reorderer, skip_reason
from eval.serve.contextpilot_adapter import ContextPilotReorderer, contextpilot_missing
from eval.task import Request, TextChunk

FAKE = """
import os
print("a line on stdout at import")

class ContextPilot:
    def __init__(self, use_gpu):
        self.seen = []

    def reorder(self, contexts, conversation_id=None):
        print("=" * 80)
        (ids,) = contexts
        self.seen.append(ids)
        if "raise" in ids:
            raise AttributeError("Can't pickle")
        if "lose" in ids:
            return [ids[1:]], [0]
        if "die" in ids:
            os._exit(3)
        if conversation_id:
            return [ids], [0]
        return [sorted(ids)], [0]
"""


def request(*ids: str, conversation: str | None = None) -> Request:
    chunks = tuple(TextChunk(name, f"text of {name}, {place}") for place, name in enumerate(ids))
    return Request("t:1", "?", chunks, conversation=conversation)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `contextpilot` for child processes."""
    package = tmp_path / "contextpilot" / "server"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "live_index.py").write_text(FAKE)
    about = tmp_path / "contextpilot-7.8.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: contextpilot\nVersion: 7.8.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def reorderer(fake: None) -> Iterator[ContextPilotReorderer]:
    it = ContextPilotReorderer()
    yield it
    it.close()


def order(reorderer: ContextPilotReorderer, asked: Request) -> list[str]:
    ordered = reorderer.order(asked)
    assert sorted(chunk.text for chunk in ordered) == sorted(chunk.text for chunk in asked.chunks)
    return [chunk.id for chunk in ordered]


def test_reorders(reorderer: ContextPilotReorderer) -> None:
    assert order(reorderer, request("c", "a", "b")) == ["a", "b", "c"]
    assert order(reorderer, request("b", "a", conversation="talk")) == ["b", "a"]
    assert reorderer.counts == {"reordered": 1, "errors": 0, "version": "7.8.9"}


def test_a_repeated_chunk_stays_twice(reorderer: ContextPilotReorderer) -> None:
    """ContextPilot takes a request for a set."""
    assert order(reorderer, request("c", "a", "c")) == ["a", "c", "c"]


@pytest.mark.parametrize("kind", ["raise", "lose"])
def test_a_failure_keeps_the_retrievers_order(reorderer: ContextPilotReorderer, kind: str) -> None:
    assert order(reorderer, request("z", kind, "a")) == ["z", kind, "a"]
    assert order(reorderer, request("z", "a")) == ["a", "z"]
    assert reorderer.counts == {"reordered": 1, "errors": 1, "version": "7.8.9"}


def test_a_child_that_dies_is_told(reorderer: ContextPilotReorderer) -> None:
    with pytest.raises(CommandError, match="process ended with 3"):
        order(reorderer, request("z", "die", "a"))


def test_the_arm_is_made_of_it(fake: None) -> None:
    assert skip_reason(ARMS["contextpilot"]) is None
    made = create_reorderer(ARMS["contextpilot"])
    assert made is not None
    made.close()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "contextpilot"
    broken.mkdir()
    (broken / "__init__.py").write_text("import a_package_it_needs")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reason = contextpilot_missing(Path(sys.executable))
    assert reason is not None
    assert "No module named 'a_package_it_needs'" in reason
    assert "pip install" in reason


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be run"):
        contextpilot_missing(tmp_path)


REAL = os.environ.get("CONTEXTPILOT_PYTHON")


@pytest.mark.skipif(
    REAL is None and importlib.util.find_spec("contextpilot") is None,
    reason="no contextpilot here; CONTEXTPILOT_PYTHON may name a Python that has it",
)
def test_the_real_one() -> None:
    it = ContextPilotReorderer(Path(REAL) if REAL else None)
    assert order(it, request("a", "b", "c")) == ["a", "b", "c"]
    assert order(it, request("b", "a", "d")) == ["a", "b", "d"]
    for n in range(1000):
        order(it, request(f"x{n}", f"y{n}"))
    order(it, request("x1", "a"))
    assert it.counts["errors"] > 0
    it.close()
