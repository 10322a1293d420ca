"""Names of models: what is loaded, and what is refused at once instead of after the hub's
retries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

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
    state = SimpleNamespace(asked=list[float](), answer=None, cached=None)

    def ask(url: str, *, timeout: float) -> None:
        state.asked.append(timeout)
        if state.answer:
            raise state.answer

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: state.cached)
    return state


def refusal(kind: type[Exception]) -> Exception:
    return kind("no", response=httpx.Response(404, request=httpx.Request("HEAD", "http://hub")))  # type: ignore[call-arg]


def find(name: str) -> str:
    return find_model(name, file="config.json")


def test_what_is_no_name_of_the_hub_is_not_asked_for(hub: SimpleNamespace, tmp_path: Path) -> None:
    """A folder, and what SGLang loads in ways of its own; a misspelt path is refused."""
    assert find("bundled") == str(model_dir())
    for name in (str(tmp_path), "s3://bucket/model", "org/model-GGUF:Q4_K_M", "org/a/file.gguf"):
        assert find(name) == name
    for name in ("./nosuch", "/nosuch/model", "a/b/c", "~/model", "nosuch.json"):
        with pytest.raises(RetrievalError, match=r"no such file or folder$"):
            find(name)
    hub.cached = "/cache/config.json"
    assert find("org/model") == "org/model", "a server without a network starts"
    assert hub.asked == []


@pytest.mark.parametrize("answer", [None, refusal(GatedRepoError)])
def test_name_on_the_hub(hub: SimpleNamespace, answer: Exception | None) -> None:
    """Asked once; whether one may load it is said by what loads it."""
    hub.answer = answer
    assert find("org/model") == "org/model"
    assert hub.asked == [5.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(RepositoryNotFoundError), "here, and no model of this name on the hub"),
        (httpx.ConnectError("no route"), "cache, and the hub does not answer: no route"),
    ],
)
def test_name_that_nobody_knows(hub: SimpleNamespace, answer: Exception, message: str) -> None:
    hub.answer = answer
    with pytest.raises(RetrievalError, match=message):
        find("nosuch/model")
    assert len(hub.asked) == 1
