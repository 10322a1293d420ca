"""The arms."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.serve.arms import (
    ARMS,
    CRAFT,
    EVERY_SERVER,
    Arm,
    create_reorderer,
    parse_arm,
    parse_arms,
    request_body,
    skip_reason,
)
from eval.serve.command import parse
from radix_ext import ChunkId, Span
from radix_ext.moved_plan import Limits, make_plan
from radix_ext.sources import HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache import config
from tests.kit.eval_launcher import parse_launcher

URL = "http://127.0.0.1:8000"


def settings_of(arm: Arm) -> config.ChunkCacheConfig:
    return parse_launcher(list(arm.flags))[0]


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_flags_are_the_launchers(arm: Arm) -> None:
    """A flag of ours that was renamed would be handed to SGLang, which ends with a usage text."""
    _, rest = parse_launcher(list(arm.flags))
    assert not [flag for flag in rest if "chunkcache" in flag]
    assert arm.is_ours != (arm.flags[0] == "--stock")
    assert arm.route == ("rag" if arm.is_ours else "chat")


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_flags_are_sglangs(arm: Arm) -> None:
    server_args = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    server_args.ServerArgs.add_cli_args(parser)
    _, rest = parse_launcher([*arm.flags, *EVERY_SERVER, "--model-path", "m"])
    args, unknown = parser.parse_known_args(rest)
    assert unknown == []
    assert args.enable_cache_report
    assert args.sleep_on_idle


def test_craft_is_the_papers() -> None:
    """Sections 4 and 5, whatever our defaults become, but for its admission, which finds less."""
    settings, rest = parse_launcher(list(ARMS["craft"].flags))
    paper = ("frequency", "promoted", 2, 1000, "paper", "round_robin")
    assert paper == (
        *(settings.order, settings.eviction, settings.promotion_threshold),
        *(settings.window_requests, settings.dedup, settings.routing),
    )
    assert rest == ["--schedule-policy", "fcfs"]
    assert set(CRAFT) <= set(ARMS["craft"].flags)


def test_arms_with_and_without_host_memory_differ_in_nothing_else() -> None:
    _, arms = parse(["--arms", "ours-device", "ours-host", "--host-mib", "77"])
    settings = [settings_of(arm) for arm in (*arms, ARMS["ours-host"])]
    assert settings == [config.ChunkCacheConfig(host_mib=mib) for mib in (0, 77, 1024)]


@pytest.mark.parametrize(
    "arm", [a for a in ARMS.values() if a.route == "rag"], ids=lambda a: a.name
)
def test_bodies_are_valid(arm: Arm) -> None:
    request = fusion_request(arm, ratio=0.5)
    assert (request is not None) == arm.is_fused
    if request is not None:
        selector = arm.body["reuse"].get("selector", config.ChunkCacheConfig.selector)
        assert (request.ratio, request.selector) == (0.5, selector)


def fusion_request(arm: Arm, **reuse: Any) -> Any:
    """What the arm's server makes of its requests' options for moved KV."""
    bodies = pytest.importorskip("sglang_chunkcache.front.bodies")
    parse = importlib.import_module("sglang_chunkcache.front.parse").parse
    fields = parse(bodies.RagFields, {**request_body(arm, {}, reuse), "chunks": [{"text": "a"}]})
    return fields.fusion_request(settings_of(arm))


def test_fused_is_what_a_user_gets() -> None:
    defaults = config.ChunkCacheConfig(reuse="fused")
    assert settings_of(ARMS["fused"]) == defaults
    assert ARMS["fused"].body == {"reuse": {"mode": "fused"}}
    request = fusion_request(ARMS["fused"])
    told = (request.selector, request.ratio, request.focus)
    assert told == (defaults.selector, defaults.recompute_ratio, "off")
    assert fusion_request(ARMS["cache-craft"]).focus == "off"
    assert fusion_request(ARMS["cache-craft-focus"]).focus == "spare"
    for name, arm in ARMS.items():
        scores_all = name in ("fused-scored", "prefill-h2o")
        assert not arm.is_fused or (settings_of(arm).selector == "h2o") == scores_all
    assert ARMS["fusionrag"].preprocesses
    assert fusion_request(ARMS["cache-craft"]).alpha == 2


@pytest.mark.parametrize(
    "name",
    [
        *("cacheblend", "cache-craft-ratio", "fusionrag", "prefill-h2o", "random-recomp"),
    ],
)
def test_share_that_is_chosen_is_the_label(name: str) -> None:
    """Of five moved chunks whose prefix changed; each rounds up by less than a token."""
    torch = pytest.importorskip("torch")
    base = importlib.import_module("sglang_chunkcache.fusion.selectors.base")
    store = importlib.import_module("sglang_chunkcache.fusion.store")
    draw = torch.Generator().manual_seed(1)
    chunks, start = [], 0
    for number, length in enumerate((60, 200, 120, 90, 330)):
        context = torch.rand(length, generator=draw)
        measured = store.ChunkScores((context.sum().item(),), (80,), 0.3 * length, context, context)
        prefixes = (ChunkId(f"old{number}"),), (ChunkId("new"),)
        chunks.append(base.MovedChunk(ChunkId(f"c{number}"), start, length, *prefixes, measured))
        start += length
    request = fusion_request(ARMS[name])
    assert fusion_request(ARMS["epic"]).tokens == 32
    get = importlib.import_module("sglang_chunkcache.fusion.selectors").get
    selector = get(request.selector, settings_of(ARMS[name]).selectors)
    random = torch.rand(start, generator=draw)
    evidence = base.Evidence(random, None, random)
    chosen = selector.select(chunks, request, evidence)
    assert 0 <= sum(map(len, chosen.offsets)) - 0.15 * start < len(chunks)


@pytest.mark.parametrize("name", ["cacheblend", "craft+cacheblend"])
def test_cacheblend_is_not_cut_at_the_pass_budget(name: str) -> None:
    """KV deviation is measured over the whole region, which may be as long as the context."""
    settings = settings_of(ARMS[name])
    cached: Any = HostCopy(Variant((), None))
    found = {}
    for max_pass_tokens in (8192, settings.max_pass_tokens):
        made = make_plan(
            [Span(0, 500_000, ChunkId("a")), Span(500_000, 1_000_000, ChunkId("b"))],
            start=0,
            limit=1_000_000,
            candidates=lambda chunk, head: (cached,),
            fusion=fusion_request(ARMS[name]),
            limits=Limits(max_pass_tokens, settings.max_gap_tokens),
        )
        found[max_pass_tokens] = (made.moved_len if made.pieces else 0, [*made.fallbacks])
    assert found == {8192: (0, ["pass_budget"]), settings.max_pass_tokens: (1_000_000, [])}


def test_request_body_leaves_the_arm_alone() -> None:
    """A swept ratio counts for arms that move KV, and for no later request."""
    swept = {"ratio": 0.3}
    assert request_body(ARMS["fused"], {}, swept) == {"reuse": {"mode": "fused", "ratio": 0.3}}
    by_ratio = {"mode": "fused", "selector": "first", "ratio": 0.3}
    assert request_body(ARMS["epic"], {}, swept)["reuse"] == by_ratio
    assert request_body(ARMS["epic"], {}, {})["reuse"]["tokens"] == 32
    assert "ratio" not in ARMS["fused"].body["reuse"]
    assert request_body(ARMS["ours"], {"temperature": 0}, swept) == {"temperature": 0}


@pytest.mark.parametrize(
    ("text", "url", "route"),
    [
        (f"vllm={URL}", URL, "chat"),
        (f"vllm={URL}/v1/", URL, "chat"),
        (f"mine={URL},rag", URL, "rag"),
        (f"ours={URL}", URL, "rag"),
        (f"ours={URL},chat", URL, "chat"),
        ("lm=https://host/a/v1", "https://host/a", "chat"),
    ],
)
def test_endpoints(text: str, url: str, route: str) -> None:
    arm = parse_arm(text)
    assert (arm.name, arm.url, arm.route, arm.is_ours) == (text.split("=")[0], url, route, False)
    assert parse_arm(f"fused={URL}").body == ARMS["fused"].body


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("our", "no arm 'our'; choose from no-cache, stock-fcfs"),
        ("", "no arm ''"),
        ("a/b=http://h", "or NAME=http://HOST"),
        ("=http://h", "or NAME=http://HOST"),
        ("a=localhost:80", "or NAME=http://HOST"),
        ("a=http://h,grpc", "or NAME=http://HOST"),
    ],
)
def test_nonsense_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        parse_arm(text)


def test_an_arm_twice_is_refused() -> None:
    with pytest.raises(CommandError, match="ours given twice"):
        parse_arms(["ours", "stock-lpm", f"ours={URL}"])
    assert [arm.name for arm in parse_arms(["ours", f"mine={URL},rag"])] == ["ours", "mine"]


def test_rivals_on_a_gpu_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lmcache, hicache = ARMS["lmcache"], ARMS["stock-hicache"]
    found: dict[str, Any] = {}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("LMCACHE_MP_HOST", "LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert all("needs CUDA" in str(skip_reason(arm)) for arm in (lmcache, hicache))
    assert all(skip_reason(replace(arm, url=URL)) is None for arm in (lmcache, hicache))
    assert all(skip_reason(ARMS[name]) is None for name in ("no-cache", "ours", "fused"))
    assert create_reorderer(ARMS["ours"]) is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert skip_reason(hicache) is None
    assert "not installed" in str(skip_reason(lmcache))
    found["lmcache"] = True
    assert "lmcache server" in str(skip_reason(lmcache))
    monkeypatch.setenv("LMCACHE_MP_HOST", "127.0.0.1")
    assert skip_reason(lmcache) is None
