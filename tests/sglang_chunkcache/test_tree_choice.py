"""Whose tree has the KV: what is found in SGLang's settings and the model, what is decided, and
what the launcher makes of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import transformers
from sglang.srt.configs.model_config import ModelConfig

from sglang_chunkcache import config, launch_server
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.plugin import BACKEND
from sglang_chunkcache.tree_choice import decided, refusals, stock_only

pytestmark = pytest.mark.matrix

LINKER = "enable_unified_cache_external_linker"
PLAIN: dict[str, Any] = {
    "tokenizer_worker_num": 1,
    "disable_radix_cache": False,
    "radix_cache_backend": None,
    "page_size": 1,
    "speculative_algorithm": None,
    "enable_pdmux": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    LINKER: False,
    "enable_session_radix_cache": False,
    "disaggregation_mode": "null",
    "skip_tokenizer_init": False,
    "kv_events_config": None,
    "enable_streaming_session": False,
    "radix_eviction_policy": "lru",
}
TREE = "--chunkcache-tree"


@pytest.fixture(scope="module")
def plain_model() -> Any:
    return ModelConfig(str(model_dir()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"page_size": None, "disaggregation_mode": None}, []),
        ({"page_size": 16}, []),
        ({"disable_radix_cache": True}, ["--disable-radix-cache"]),
        ({"radix_cache_backend": "x"}, ["--radix-cache-backend"]),
        ({"speculative_algorithm": "EAGLE"}, ["--speculative-algorithm"]),
        ({"kv_events_config": "{}"}, []),
        ({"kv_events_config": "{}", "page_size": 4}, ["--kv-events-config in pages"]),
        ({"enable_pdmux": True}, []),
        ({"enable_pdmux": True, "page_size": 4}, ["--enable-pdmux in pages"]),
        ({"enable_hierarchical_cache": True}, ["--enable-hierarchical-cache"]),
        ({"enable_lmcache": True, "enable_flexkv": True}, ["--enable-lmcache", "--enable-flexkv"]),
        (
            {"enable_unified_cache_external_linker": True},
            ["--enable-unified-cache-external-linker"],
        ),
        ({"enable_session_radix_cache": True}, ["--enable-session-radix-cache"]),
        ({"disaggregation_mode": "prefill"}, ["--disaggregation-mode"]),
        ({"enable_streaming_session": True}, ["--enable-streaming-session"]),
        ({"radix_eviction_policy": "tlru"}, ["--radix-eviction-policy tlru"]),
        ({"radix_cache_backend": BACKEND}, []),
        ({"kv_events_config": "{}", "dcp_size": 2}, ["--kv-events-config in pages"]),
    ],
    ids=repr,
)
def test_settings_of_stock_trees_are_found(
    change: dict[str, Any], named: list[str], plain_model: Any
) -> None:
    args = SimpleNamespace(**PLAIN | change)
    assert stock_only(args, plain_model, ChunkCacheConfig()) == named


@pytest.mark.parametrize(("page_size", "named"), [(1, []), (64, ["--page-size 64"])])
def test_moved_kv_is_not_in_pages(page_size: int, named: list[str], plain_model: Any) -> None:
    args = SimpleNamespace(**PLAIN | {"page_size": page_size})
    assert stock_only(args, plain_model, ChunkCacheConfig(reuse="fused")) == named


@pytest.mark.parametrize(
    ("name", "sizes", "named"),
    [
        ("GptOss", {}, ["sliding-window attention"]),
        ("Qwen3Next", {}, ["hybrid attention"]),
        ("Gemma3Text", {"sliding_window": 64}, []),
        ("Qwen3Moe", {}, []),
    ],
)
def test_models_of_stock_trees_are_found(
    name: str, sizes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    """Those with pools of several kinds. SGLang keeps all of Gemma3's KV, in one pool."""
    made = getattr(transformers, f"{name}Config")(num_hidden_layers=4, **sizes).to_dict()
    architecture = name.removesuffix("Text") + "ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({**made, "architectures": [architecture]}))
    model = ModelConfig(str(tmp_path))
    assert stock_only(SimpleNamespace(**PLAIN), model, ChunkCacheConfig()) == named


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer_worker_num": None}, []),
        ({"tokenizer_worker_num": 2}, ["--tokenizer-worker-num > 1"]),
        ({"skip_tokenizer_init": True}, ["--skip-tokenizer-init"]),
        ({"page_size": 16}, []),
    ],
)
def test_what_no_tree_serves_is_named(change: dict[str, Any], named: list[str]) -> None:
    assert refusals(SimpleNamespace(**PLAIN | change)) == named


@pytest.mark.parametrize(
    ("tree", "found", "chosen"),
    [
        ("auto", [], "chunk"),
        ("auto", ["x"], "stock"),
        ("chunk", [], "chunk"),
        ("stock", [], "stock"),
        ("stock", ["x"], "stock"),
    ],
)
def test_tree_is_ours_where_it_can_be(tree: str, found: list[str], chosen: str) -> None:
    asked = ChunkCacheConfig(tree=tree, secret="s", host_mib=0)
    made = decided(asked, found)
    assert (made.tree, made.secret, made.is_stock) == (chosen, "s", chosen == "stock")


def test_servers_that_share_a_prompt_order_alike() -> None:
    """Each of a disaggregated pair makes the prompt for itself, by a tree of its own."""
    asked = ChunkCacheConfig(order="tree")
    made = decided(asked, ["--disaggregation-mode"])
    assert (made.order, made.is_paired) == ("retriever", True)
    made = decided(asked, ["--enable-lmcache"])
    assert (made.order, made.is_paired) == ("tree", False)


@pytest.mark.parametrize(
    ("knobs", "found", "message"),
    [
        ({"tree": "chunk"}, ["x", "y"], f"{TREE} chunk does not serve x, y"),
        ({"reuse": "fused"}, ["x"], f"--reuse fused needs {TREE} chunk, which does not serve x"),
        ({"tree": "stock", "reuse": "fused"}, [], "--reuse fused needs .*the flag says stock"),
        ({"tree": "stock", "host_mib": 1}, [], f"--chunkcache-host-mib needs {TREE} chunk"),
        ({"storage_backend": "file"}, ["x"], "--chunkcache-storage-backend needs"),
    ],
)
def test_what_needs_our_tree_is_refused(
    knobs: dict[str, Any], found: list[str], message: str
) -> None:
    """Never served by half: the flag would do nothing."""
    with pytest.raises(ValueError, match=message):
        decided(ChunkCacheConfig(**knobs), found)


@pytest.mark.parametrize(
    ("flags", "tree", "backend", "found"),
    [
        ([], "chunk", BACKEND, None),
        ([TREE, "stock"], "stock", None, None),
        (["--page-size", "16"], "chunk", BACKEND, None),
        (
            ["--radix-cache-backend", "python_radix"],
            *("stock", "python_radix", "--radix-cache-backend"),
        ),
    ],
)
def test_launcher_tells_all_processes(
    flags: list[str],
    tree: str,
    backend: str | None,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ours is selected by name, so that a scheduler without us does not start. What the user did
    not ask for is said, in one line."""
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    known, rest = parser.parse_known_args(flags)
    for name, value in config.from_flags(known).to_env().items():
        monkeypatch.setenv(name, value)
    given = launch_server.server_flags(["--model-path", str(model_dir()), *rest])
    server_args = launch_server.prepare(given, stock=False, fail=pytest.fail)
    settings = config.from_env()
    assert settings is not None
    assert (settings.tree, server_args.radix_cache_backend) == (tree, backend)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("chunk cache")]
    line = f"chunk cache: found {found}: the tree is SGLang's, and no KV is moved"
    assert said == ([line] if found else [])
