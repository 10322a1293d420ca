"""The names users may rely on. A change here belongs in CHANGELOG.md."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

import radix_ext
import retrieval
import sglang_chunkcache
from sglang_chunkcache.plugin import BACKEND

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "module", [radix_ext, retrieval, sglang_chunkcache], ids=lambda module: module.__name__
)
def test_all_is_complete_and_sorted(module: object) -> None:
    """Every public name exists, once."""
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
    assert all(hasattr(module, name) for name in names)


def test_names() -> None:
    """Configuration and version; what other packages and users of the library build on."""
    assert set(sglang_chunkcache.__all__) == {"ChunkCacheConfig", "__version__"}
    trees = {"AccessTable", "ChunkPrefixTree", "ConversationMap", "KvAware", "RoundRobin", "Tier"}
    assert trees | {"Chunk", "ChunkId", "Span"} <= set(radix_ext.__all__)
    assert {"chunk_id", "order_chunks"} <= set(radix_ext.__all__)


def test_version_and_backend_name() -> None:
    """Scripts select the cache by its name."""
    assert sglang_chunkcache.__version__ == PYPROJECT["project"]["version"]
    assert BACKEND == "cp_tree"


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms", "scripts"])
def test_entry_points_resolve(group: str) -> None:
    """SGLang logs a broken entry point and goes on without us."""
    pytest.importorskip("sglang")
    project = PYPROJECT["project"]
    (target,) = (project["entry-points"] | {"scripts": project["scripts"]})[group].values()
    module, name = target.split(":")
    assert callable(getattr(importlib.import_module(module), name))
