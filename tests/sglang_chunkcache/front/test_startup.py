"""What is checked before the first request: the index."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from retrieval.errors import RetrievalError
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.startup import open_retriever
from tests.sglang_chunkcache.front.fake_retriever import FakeRetriever


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `Retriever.open` was asked for; it opens a fake, under "retriever"."""
    asked: dict[str, Any] = {"retriever": FakeRetriever()}

    def open(folder: Path, **settings: Any) -> FakeRetriever:
        asked.update(settings, folder=folder)
        return asked["retriever"]  # type: ignore[no-any-return]

    monkeypatch.setattr("torch.set_num_threads", lambda count: asked.update(encoder_threads=count))
    module = SimpleNamespace(Retriever=SimpleNamespace(open=open))
    monkeypatch.setitem(sys.modules, "retrieval.retriever", module)
    return asked


def test_start_opens_and_tries_the_index(opened: dict[str, Any]) -> None:
    """An encoder that fails with its first query should fail before the model is loaded."""
    flags: Any = {"encoder": "e", "index_verify": "off", "retrieve_threads": 3}
    open_retriever(ChunkCacheConfig(index="x", retrieve_mode="bm25", **flags))
    settings = {"folder": Path("x"), "encoder": "e", "device": "cpu", "verify": False}
    assert opened.items() >= (settings | {"threads": 3, "encoder_threads": 3}).items()
    assert [(k, mode) for _, k, mode, _ in opened["retriever"].batches] == [(1, "bm25")]


def test_start_refuses_a_mode_the_index_lacks(opened: dict[str, Any]) -> None:
    opened["retriever"].modes = ("bm25",)
    with pytest.raises(RetrievalError, match=r"-retrieve-mode dense: the index x offers bm25"):
        open_retriever(ChunkCacheConfig(index="x", retrieve_mode="dense"))
    open_retriever(ChunkCacheConfig(index="x"))


def test_start_without_the_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:

    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "retrieval.retriever":
                raise ModuleNotFoundError("No module named 'faiss'", name="faiss")

    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.delitem(sys.modules, "retrieval.retriever", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(RetrievalError, match="extra 'retrieval': faiss is not installed"):
        open_retriever(ChunkCacheConfig(index="x"))
