"""Names of models: what is loaded, and what is refused at once instead of after the hub's
retries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from retrieval.errors import RetrievalError
from retrieval.model_path import find_model
from sglang_chunkcache.bundled_model import model_dir


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the hub was asked; its answer is raised, or None."""
    state = SimpleNamespace(asked=list[tuple[str, float]](), answer=None, cached=None)

    def ask(url: str, *, timeout: float) -> Any:
        state.asked.append((url, timeout))
        if state.answer:
            raise state.answer

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: state.cached)
    return state


def refusal(kind: type[Exception]) -> Exception:
    return kind("no", response=httpx.Response(404, request=httpx.Request("HEAD", "http://hub")))  # type: ignore[call-arg]


def test_bundled_is_a_folder() -> None:
    """The same one for the server and for the retriever."""
    assert find_model("bundled", file="config.json") == str(model_dir())


@pytest.mark.parametrize(
    "name", ["PATH", "s3://bucket/model", "org/model-GGUF:Q4_K_M", "org/model/file.gguf"]
)
def test_what_is_no_name_of_the_hub_is_not_asked_for(
    hub: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    """A folder, and what SGLang loads in ways of its own."""
    name = name.replace("PATH", str(tmp_path))
    assert find_model(name, file="config.json") == name
    assert hub.asked == []


@pytest.mark.parametrize("name", ["./nosuch", "/nosuch/model", "a/b/c", "~/model", "nosuch.json"])
def test_misspelt_path_is_refused(hub: SimpleNamespace, name: str) -> None:
    """It cannot be a name of the hub."""
    with pytest.raises(RetrievalError, match=r"no such file or folder$"):
        find_model(name, file="config.json")
    assert hub.asked == []


def test_name_in_the_cache_needs_no_hub(hub: SimpleNamespace) -> None:
    """A server without a network starts."""
    hub.cached = "/cache/config.json"
    assert find_model("org/model", file="config.json") == "org/model"
    assert hub.asked == []


@pytest.mark.parametrize("answer", [None, GatedRepoError])
def test_name_on_the_hub(hub: SimpleNamespace, answer: type[Exception] | None) -> None:
    """Asked once; whether one may load it is said by what loads it."""
    hub.answer = refusal(answer) if answer else None
    assert find_model("org/model", file="config.json") == "org/model"
    assert [timeout for _, timeout in hub.asked] == [5.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            RepositoryNotFoundError,
            "no such file or folder here, and no model of this name on the hub",
        ),
        (None, "nor in the hub's cache, and the hub does not answer: no route"),
    ],
)
def test_name_that_nobody_knows(
    hub: SimpleNamespace, answer: type[Exception] | None, message: str
) -> None:
    """Both places are named, after one question."""
    hub.answer = refusal(answer) if answer else httpx.ConnectError("no route")
    with pytest.raises(RetrievalError, match=message):
        find_model("nosuch/model", file="config.json")
    assert len(hub.asked) == 1
