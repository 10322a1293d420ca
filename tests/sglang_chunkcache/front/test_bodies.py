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


@pytest.mark.parametrize(
    "body",
    [{}, {"reuse": None}, {"reuse": "exact"}, {"reuse": {"mode": "exact", "ratio": 1}}],
    ids=str,
)
@pytest.mark.parametrize("config", [FUSED, ChunkCacheConfig()], ids=["fused", "exact"])
def test_exact_reuse(body: dict[str, Any], config: ChunkCacheConfig) -> None:
    """The default, on every server."""
    assert parse(RagFields, body).fusion_request(config) is None


@pytest.mark.parametrize("reuse", ["fused", {"mode": "fused"}], ids=str)
def test_fused_reuse_with_defaults(reuse: Any) -> None:
    """The short form is the object with the mode alone."""
    fields = parse(RagFields, {"reuse": reuse})
    assert fields.fusion_request(FUSED) == FusionRequest(
        "critical", 0.15, "", depth=None, layer=None
    )
    with pytest.raises(RequestError, match="--reuse fused"):
        fields.fusion_request(ChunkCacheConfig())


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_is_accepted(selector: str) -> None:
    """By the names in config.py."""
    wish = {"mode": "fused", "selector": selector, "ratio": 1, "focus": "spare"}
    alpha = {"alpha": 3} if selector == "context" else {}
    expected = FusionRequest(selector, 1.0, "", alpha.get("alpha"), "spare")
    if selector == "critical":
        expected = replace(expected, depth=None, layer=None)
    assert parse(RagFields, {"reuse": wish | alpha}).fusion_request(FUSED) == expected


@pytest.mark.parametrize(
    ("wish", "depth", "layer"),
    [
        ({"selector": "deviation", "depth": 3}, 3, 0),
        ({"selector": "deviation", "depth": "calibrated"}, None, 0),
        ({"selector": "query", "layers": 1}, 2, 1),
        ({"selector": "query", "layers": "last"}, 2, 0),
        ({"selector": "critical", "depth": 5}, 5, None),
        ({"selector": "critical", "layers": "last"}, None, 0),
    ],
)
def test_layers_are_numbers_or_names(
    wish: dict[str, Any], depth: int | None, layer: int | None
) -> None:
    """None: the calibrated one."""
    asked = parse(RagFields, {"reuse": {"mode": "fused", **wish}}).fusion_request(FUSED)
    assert asked is not None
    assert (asked.depth, asked.layer) == (depth, layer)


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"selector": "query", "depth": 3}, "depth"),
        ({"selector": "deviation", "layers": "last"}, "layers"),
        ({"selector": "critical", "depth": 0}, "depth"),
        ({"selector": "critical", "depth": "last"}, "depth"),
        ({"selector": "critical", "layers": True}, "layers"),
        ({"selector": "critical", "layers": 1001}, "layers"),
        ({"selector": "query", "ratio": "auto"}, "ratio"),
        ({"selector": "deviation", "ratio": "auto", "depth": 3}, "ratio"),
        ({"selector": "critical", "ratio": "much"}, "ratio"),
        ({"selector": "critical", "quality": 0.9}, "quality"),
        ({"selector": "critical", "ratio": "auto", "quality": 1.1}, "quality"),
    ],
)
def test_wishes_that_nothing_reads_are_refused(wish: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"reuse.{field}"):
        parse(RagFields, {"reuse": {"mode": "fused", **wish}}).fusion_request(FUSED)


def test_ratio_auto_reads_the_calibrated_depth() -> None:
    """Whatever was not calibrated is chosen by the server's ratio."""
    asked = parse(RagFields, {"reuse": {"mode": "fused", "selector": "deviation", "ratio": "auto"}})
    fusion = asked.fusion_request(FUSED)
    assert fusion is not None
    assert (fusion.quality, fusion.depth, fusion.ratio) == (0.99, None, FUSED.recompute_ratio)


def test_alpha_that_nothing_reads_is_refused() -> None:
    """Only Cache-Craft's selector has one."""
    with pytest.raises(RequestError, match=r"^reuse\.alpha: selector critical has none"):
        parse(RagFields, {"reuse": {"mode": "fused", "alpha": 1}}).fusion_request(FUSED)


@pytest.mark.parametrize("order", ["retriever", "frequency", "tree", None])
def test_order_is_accepted(order: str | None) -> None:
    """For both endpoints."""
    assert parse(RagFields, {"order": order}).order == order
    assert parse(GenerateIn, {"parts": ["a"], "order": order}).order == order


BAD_REUSE: list[tuple[Any, str]] = [
    (5, "reuse"),
    ([], "reuse"),
    ({}, "reuse.mode"),
    ("", "reuse"),
    ("Fused", "reuse"),
    ({"mode": None}, "reuse.mode"),
    ({"mode": "fused", "selector": 1}, "reuse.selector"),
    ({"mode": "fused", "ratio": -0.01}, "reuse.ratio"),
    ({"mode": "fused", "ratio": 1.01}, "reuse.ratio"),
    ({"mode": "fused", "ratio": float("nan")}, "reuse.ratio"),
    ({"mode": "fused", "ratio": "0.5"}, "reuse.ratio"),
    ({"mode": "fused", "ratio": True}, "reuse.ratio"),
    ({"mode": "fused", "alpha": -1}, "reuse.alpha"),
    ({"mode": "fused", "alpha": float("inf")}, "reuse.alpha"),
    ({"mode": "fused", "alpha": 1e308}, "reuse.alpha"),
    ({"mode": "fused", "focus": True}, "reuse.focus"),
    ({"mode": "fused", "focus": "on"}, "reuse.focus"),
    ({"mode": "fused", "without": "beta"}, "reuse.without"),
    ({"mode": "fused", "without": ["beta"] * 3}, "reuse.without"),
    ({"mode": "fused", "recipe": "x"}, "reuse.recipe"),
    ({"mode": "fused", "fresh": [0]}, "reuse.fresh"),
    ({"mode": "exact", "ratio": 2}, "reuse.ratio"),
]


@pytest.mark.parametrize(("reuse", "field"), BAD_REUSE, ids=[str(case[0]) for case in BAD_REUSE])
def test_bad_reuse_names_the_field(reuse: Any, field: str) -> None:
    """In both bodies, by the same path."""
    for model, body in ((RagFields, {}), (GenerateIn, {"parts": ["a"]})):
        with pytest.raises(RequestError) as caught:
            parse(model, {**body, "reuse": reuse})
        assert str(caught.value).split(": ")[0] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "chunk"),
        ({"chunk": "text"}, "chunk"),
        ({"chunk": {"text": None}}, "chunk.text"),
        ({"chunk": {"text": "x"}, "neighbors": {}}, "neighbors"),
        ({"chunk": {"text": "x"}, "neighbors": [{"id": "a"}]}, "neighbors.0.text"),
        (
            {"chunk": {"text": "x"}, "messages": [{"role": "user", "content": "x"}]},
            "messages.0.role",
        ),
        (
            {"chunk": {"text": "x"}, "messages": [{"role": "system", "content": [{}]}]},
            "messages.0.content",
        ),
        ({"chunk": {"text": "x"}, "extra_key": 5}, "extra_key"),
        ({"chunk": {"text": "x"}, "cache_salt": 5}, "cache_salt"),
        ({"chunk": {"text": "x"}, "top_n": 5}, "top_n"),
    ],
    ids=str,
)
def test_bad_preprocessing_names_the_field(body: dict[str, Any], field: str) -> None:
    """Only system messages may stand in front."""
    with pytest.raises(RequestError) as caught:
        parse(PreprocessIn, body)
    assert str(caught.value).split(": ")[0] == field


def test_preprocessing_of_a_chunk_alone() -> None:
    """Neighbours and messages may be left out."""
    body = parse(PreprocessIn, {"chunk": {"text": "x", "id": 7}})
    assert (body.chunk.text, body.chunk.id, body.neighbors, body.messages) == ("x", 7, [], [])


@pytest.mark.parametrize(
    ("retrieve", "expected"),
    [
        (None, None),
        (False, None),
        (True, RetrieveIn()),
        ({}, RetrieveIn()),
        ({"k": 3, "turns": 2}, RetrieveIn(k=3, turns=2)),
        ({"query": "q", "mode": "bm25", "nprobe": 1}, RetrieveIn(query="q", mode="bm25", nprobe=1)),
        ({"k": None, "query": None}, RetrieveIn()),
    ],
    ids=str,
)
def test_retrieve_is_accepted(retrieve: Any, expected: RetrieveIn | None) -> None:
    """`true` asks for the server's defaults, `false` for nothing."""
    assert parse(RagFields, {"retrieve": retrieve}).retrieve == expected


BAD_RETRIEVE: list[tuple[Any, str]] = [
    (5, ""),
    ("yes", ""),
    ([], ""),
    ({"top_k": 5}, "top_k"),
    ({"k": 0}, "k"),
    ({"k": -1}, "k"),
    ({"k": True}, "k"),
    ({"k": "5"}, "k"),
    ({"k": 5.0}, "k"),
    ({"k": 1e30}, "k"),
    ({"k": float("nan")}, "k"),
    ({"k": float("inf")}, "k"),
    ({"k": [5]}, "k"),
    ({"query": 5}, "query"),
    ({"query": ["x"]}, "query"),
    ({"turns": 0}, "turns"),
    ({"turns": 101}, "turns"),
    ({"turns": True}, "turns"),
    ({"mode": "hybrid"}, "mode"),
    ({"mode": 1}, "mode"),
    ({"nprobe": 0}, "nprobe"),
    ({"nprobe": 10**30}, "nprobe"),
    ({"nprobe": False}, "nprobe"),
]


@pytest.mark.parametrize(
    ("retrieve", "field"), BAD_RETRIEVE, ids=[str(case[0]) for case in BAD_RETRIEVE]
)
def test_bad_retrieve_names_the_field(retrieve: Any, field: str) -> None:
    """In a chat under `retrieve`, in a body of its own without."""
    with pytest.raises(RequestError) as caught:
        parse(RagFields, {"retrieve": retrieve})
    assert str(caught.value).split(": ")[0] == f"retrieve.{field}".rstrip(".")
    if field:
        with pytest.raises(RequestError) as caught:
            parse(RetrieveBody, retrieve)
        assert str(caught.value).split(": ")[0] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{}] * 10_001}, "messages"),
        ({"text": "yes"}, "text"),
        ({"text": 1}, "text"),
        ({"chunks": []}, "chunks"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_search_names_the_field(body: dict[str, Any], field: str) -> None:
    """What a search has beside `retrieve`."""
    with pytest.raises(RequestError) as caught:
        parse(RetrieveBody, body)
    assert str(caught.value).split(": ")[0] == field


def test_null_chunks_are_none() -> None:
    """As clients write that serialise every field they have."""
    assert parse(RagFields, {"chunks": None, "retrieve": True}).chunks is None


def test_long_names_are_cut_to_a_digest() -> None:
    """URLs as ids: still one name each, and of bounded length."""
    names = [parse(ChunkIn, {"text": "x", "id": f"{'u' * 300}{end}"}).id for end in "ab"]
    assert [len(str(name)) for name in names] == [MAX_ID_CHARS] * 2
    assert names[0] != names[1]
    assert parse(ChunkIn, {"text": "x", "id": "u" * MAX_ID_CHARS}).id == "u" * MAX_ID_CHARS
    assert (
        len(str(parse(RagFields, {"conversation_id": "c" * 10_000}).conversation_id))
        == MAX_ID_CHARS
    )
