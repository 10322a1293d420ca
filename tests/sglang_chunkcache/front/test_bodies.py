"""Bodies of requests: what is accepted, and that a refusal names the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from radix_ext import FusionRequest
from sglang_chunkcache.config import SELECTORS, ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import (
    MAX_ID_CHARS,
    ChunkIn,
    GenerateIn,
    PreprocessIn,
    RagFields,
    RetrieveBody,
    RetrieveIn,
)
from sglang_chunkcache.front.parse import parse

FUSED = ChunkCacheConfig(reuse="fused")
NAN, INF = float("nan"), float("inf")


def asked(config: ChunkCacheConfig = FUSED, **wish: Any) -> FusionRequest | None:
    """What a fused request with this wish asks for."""
    return parse(RagFields, {"reuse": {"mode": "fused", **wish}}).fusion_request(config)


def refused_field(model: Any, body: Any) -> str:
    """The field by which the body is refused."""
    with pytest.raises(RequestError) as caught:
        parse(model, body)
    return str(caught.value).split(": ")[0]


# Reuse and order


@pytest.mark.parametrize("reuse", [None, "exact", {"mode": "exact", "ratio": 1}], ids=str)
@pytest.mark.parametrize("config", [FUSED, ChunkCacheConfig()], ids=["fused", "exact"])
def test_exact_reuse(reuse: Any, config: ChunkCacheConfig) -> None:
    assert parse(RagFields, {"reuse": reuse}).fusion_request(config) is None
    assert parse(RagFields, {}).fusion_request(config) is None


def test_fused_reuse_with_defaults() -> None:
    """The short form is the object with the mode alone; `auto` reads the calibrated depth."""
    defaults = FusionRequest("critical", 0.15, "", depth=None, layer=None)
    assert parse(RagFields, {"reuse": "fused"}).fusion_request(FUSED) == asked() == defaults
    with pytest.raises(RequestError, match="--reuse fused"):
        asked(ChunkCacheConfig())
    auto = asked(selector="deviation", ratio="auto")
    assert auto is not None
    assert (auto.quality, auto.depth, auto.ratio) == (0.99, None, FUSED.recompute_ratio)


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_is_accepted(selector: str) -> None:
    alpha: dict[str, Any] = {"alpha": 3} if selector == "context" else {}
    expected = FusionRequest(selector, 1.0, "", alpha.get("alpha"), "spare")
    if selector == "critical":
        expected = replace(expected, depth=None, layer=None)
    assert asked(selector=selector, ratio=1, focus="spare", **alpha) == expected


@pytest.mark.parametrize(
    ("wish", "depth", "layer"),
    [
        ({"selector": "deviation", "depth": 3}, 3, 0),
        ({"selector": "query", "layers": 1}, 2, 1),
        ({"selector": "query", "layers": "last"}, 2, 0),
        ({"selector": "critical", "depth": 5}, 5, None),
        ({"selector": "critical", "layers": "last"}, None, 0),
    ],
)
def test_layers_are_numbers_or_names(wish: Any, depth: Any, layer: Any) -> None:
    """None: the calibrated one."""
    fusion = asked(**wish)
    assert fusion is not None
    assert (fusion.depth, fusion.layer) == (depth, layer)


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"selector": "query", "depth": 3}, "depth"),
        ({"selector": "deviation", "layers": "last"}, "layers"),
        ({"selector": "critical", "depth": "last"}, "depth"),
        ({"selector": "critical", "layers": 1001}, "layers"),
        ({"selector": "query", "ratio": "auto"}, "ratio"),
        ({"selector": "deviation", "ratio": "auto", "depth": 3}, "ratio"),
        ({"selector": "critical", "ratio": "much"}, "ratio"),
        ({"selector": "critical", "quality": 0.9}, "quality"),
        ({"selector": "critical", "ratio": "auto", "quality": 1.1}, "quality"),
        ({"alpha": 1}, "alpha: selector critical has none"),
        ({"selector": "query", "tokens": 1}, "tokens: selector query has none"),
    ],
)
def test_wishes_that_nothing_reads_are_refused(wish: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"reuse.{field}"):
        asked(**wish)


BAD_WISHES: dict[str, list[Any]] = {
    "mode": [None],
    "selector": [1],
    "ratio": [-0.01, 1.01, NAN, "0.5", True],
    "alpha": [-1, INF, 1e308],
    "tokens": [-1, 0.5, True, 10**7],
    "focus": [True, "on"],
    "without": ["beta", ["beta"] * 3],
    "recipe": ["x"],
    "fresh": [[0]],
}
BAD_REUSE: list[tuple[Any, str]] = [
    (5, "reuse"),
    ([], "reuse"),
    ("", "reuse"),
    ("Fused", "reuse"),
    ({}, "reuse.mode"),
    ({"mode": "exact", "ratio": 2}, "reuse.ratio"),
    *(
        ({"mode": "fused", name: bad}, f"reuse.{name}")
        for name, values in BAD_WISHES.items()
        for bad in values
    ),
]


@pytest.mark.parametrize(("reuse", "field"), BAD_REUSE, ids=str)
def test_bad_reuse_names_the_field(reuse: Any, field: str) -> None:
    """In both bodies, by the same path."""
    assert refused_field(RagFields, {"reuse": reuse}) == field
    assert refused_field(GenerateIn, {"parts": ["a"], "reuse": reuse}) == field


# Retrieve


@pytest.mark.parametrize(
    ("retrieve", "expected"),
    [
        (None, None),
        (False, None),
        (True, RetrieveIn()),
        ({"k": None, "query": None}, RetrieveIn()),
        ({"k": 3, "mode": "bm25"}, RetrieveIn(k=3, mode="bm25")),
    ],
    ids=str,
)
def test_retrieve_is_accepted(retrieve: Any, expected: RetrieveIn | None) -> None:
    """`true` asks for the server's defaults, `false` for nothing; null is as if not said."""
    body = parse(RagFields, {"retrieve": retrieve, "chunks": None})
    assert (body.retrieve, body.chunks) == (expected, None)


BAD_SEARCHES: dict[str, list[Any]] = {
    "top_k": [5],
    "k": [0, True, "5", 5.0, 1e30, NAN],
    "query": [5, ["x"]],
    "turns": [0, 101, True],
    "mode": ["hybrid", 1],
    "nprobe": [0, 10**30, False],
}


@pytest.mark.parametrize(
    ("field", "bad"), [(field, bad) for field, values in BAD_SEARCHES.items() for bad in values]
)
def test_bad_retrieve_names_the_field(field: str, bad: Any) -> None:
    """In a chat under `retrieve`, in a body of its own without."""
    assert refused_field(RagFields, {"retrieve": {field: bad}}) == f"retrieve.{field}"
    assert refused_field(RetrieveBody, {field: bad}) == field


# Other fields

CHUNK = {"text": "x"}


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (RagFields, {"retrieve": "yes"}, "retrieve"),
        (RagFields, {"conversation_id": 7}, "conversation_id"),
        (GenerateIn, {"parts": ["a"], "cache_salt": 5}, "cache_salt"),
        (GenerateIn, {"parts": ["a"], "sampling_params": []}, "sampling_params"),
        (RetrieveBody, {"messages": None}, "messages"),
        (RetrieveBody, {"messages": ["x"]}, "messages.0"),
        (RetrieveBody, {"messages": [{}] * 10_001}, "messages"),
        (RetrieveBody, {"text": 1}, "text"),
        (PreprocessIn, {}, "chunk"),
        (PreprocessIn, {"chunk": {"text": None}}, "chunk.text"),
        (PreprocessIn, {"chunk": CHUNK, "neighbors": [{"id": "a"}]}, "neighbors.0.text"),
        (PreprocessIn, {"chunk": CHUNK, "messages": [{"role": "user"}]}, "messages.0.role"),
        (PreprocessIn, {"chunk": CHUNK, "extra_key": 5}, "extra_key"),
        (PreprocessIn, {"chunk": CHUNK, "top_n": 5}, "top_n"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_body_names_the_field(model: Any, body: dict[str, Any], field: str) -> None:
    assert refused_field(model, body) == field


def test_long_names_are_cut_to_a_digest() -> None:
    """URLs as ids: still one name each, and of bounded length."""
    one, other = (parse(ChunkIn, {"text": "x", "id": f"{'u' * 300}{end}"}).id for end in "ab")
    assert len(str(one)) == len(str(other)) == MAX_ID_CHARS
    assert one != other
    assert parse(ChunkIn, {"text": "x", "id": "u" * MAX_ID_CHARS}).id == "u" * MAX_ID_CHARS
    conversation = parse(RagFields, {"conversation_id": "c" * 10_000}).conversation_id
    assert len(str(conversation)) == MAX_ID_CHARS
