"""The client's wish with the server's defaults, the recipe, and what is worth keeping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radix_ext import FusionRequest
from radix_ext.fusion_request import Focus
from sglang_chunkcache.config import SELECTORS, ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.fusion_options import (
    ReuseIn,
    check_fused,
    fused_request,
    recipe_of,
)

FUSED = ChunkCacheConfig(reuse="fused", selector="first", recompute_ratio=0.3, store_threshold=2)
QUESTION = (1, 2, 3)


def wished(server: ChunkCacheConfig = FUSED, **wish: Any) -> FusionRequest:
    """What a server makes of a client's wish."""
    return fused_request(server, ReuseIn(mode="fused", **wish))


def test_what_is_given_wins() -> None:
    """Zeros are given, too; what is left out is the server's."""
    assert wished() == FusionRequest("first", 0.3, "")
    given = wished(selector="context", ratio=0, alpha=0, focus="off")
    assert given == FusionRequest("context", 0.0, "", 0.0, "off")
    fixed = wished(tokens=0)
    assert fixed == FusionRequest("first", 0.3, "", tokens=0)
    assert fixed.is_choice


@pytest.mark.parametrize("selector", SELECTORS)
def test_focus_is_cache_crafts(selector: str) -> None:
    """It comes with `context` alone, unless asked for."""
    default = "spare" if selector == "context" else "off"
    assert wished(selector=selector).focus == default
    assert wished(selector=selector, focus="spare").focus == "spare"


def test_exact_server_names_the_flag() -> None:
    for refusing in (wished, lambda server: check_fused(server, "reuse")):
        with pytest.raises(RequestError, match=r"^reuse: .*--reuse fused"):
            refusing(ChunkCacheConfig())


# Recipes


def test_every_choice_is_in_the_recipe() -> None:
    """Requests that would make other KV must not share fused nodes."""
    base = FusionRequest("context", 0.15, "")
    changes: list[dict[str, Any]] = [
        {"selector": "first"},
        {"ratio": 0.25},
        {"alpha": 0.15},
        {"tokens": 0},
        {"focus": "spare"},
        {"fresh": frozenset({0})},
        *({"depth": depth} for depth in (3, None)),
        *({"layer": layer} for layer in (3, None)),
        *({"quality": quality} for quality in (0.99, 0.9)),
    ]
    recipes = {recipe_of(replace(base, **change), QUESTION) for change in [{}, *changes]}
    assert len(recipes) == len(changes) + 1


def test_recipe_is_canonical() -> None:
    """How a client writes a number changes nothing."""
    one = wished(selector="context", ratio=1, alpha=2)
    two = wished(selector="context", ratio=1.0, alpha=2.0)
    assert recipe_of(one, QUESTION) == recipe_of(two, QUESTION)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("focus", ["off", "spare"])
def test_question_counts_where_the_choice_depends_on_it(selector: str, focus: Focus) -> None:
    """So do these two and any focus; the others choose the same tokens for every question."""
    reuse = FusionRequest(selector, 0.15, "", focus=focus)
    differs = recipe_of(reuse, QUESTION) != recipe_of(reuse, (1, 2, 4))
    assert differs is (selector in ("query", "critical") or focus != "off")


@pytest.mark.parametrize("selector", ["query", "none"])
def test_earlier_recipe_is_kept(selector: str) -> None:
    """The history's fused KV hangs below it. A prompt may end with its last chunk."""
    reuse = FusionRequest(selector, 0.15, "")
    for question in (QUESTION, ()):
        earlier = recipe_of(reuse, question)
        assert recipe_of(reuse, (9,), earlier) == earlier


def test_earlier_recipe_of_another_policy_is_not_kept() -> None:
    """Nor one whose policy merely begins alike."""
    base = FusionRequest("query", 0.15, "")
    earlier = recipe_of(base, QUESTION)
    for other in (replace(base, ratio=0.2), replace(base, fresh=frozenset({1}))):
        theirs = recipe_of(other, (9,))
        assert recipe_of(other, (9,), earlier) == theirs
        assert recipe_of(base, (9,), theirs) != theirs
