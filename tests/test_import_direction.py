"""The dependency rules between packages, checked on the imports in their sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"radix_ext", "retrieval", "sglang_chunkcache", "eval", "tests"}


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def offenders(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in forbidden
    ]


def test_radix_ext_imports_the_standard_library_only() -> None:
    """It must run, and be taken along, without anything installed."""
    allowed = sys.stdlib_module_names | {"radix_ext"}
    found = {name.split(".")[0] for path in sources("radix_ext") for name in imports(path)}
    assert found <= allowed, found - allowed


def test_retrieval_imports_nothing_of_ours() -> None:
    """A library of its own."""
    assert offenders("retrieval", (OURS - {"retrieval"}) | {"sglang"}) == []


def test_sglang_chunkcache_knows_no_eval_and_no_tests() -> None:
    """The product does not depend on its measurement."""
    assert offenders("sglang_chunkcache", {"eval", "tests"}) == []


def test_eval_uses_public_names_only() -> None:
    """HTTP, `radix_ext`, `retrieval`; of `sglang_chunkcache` configuration, frontend language, model path, operators."""
    public = (
        "sglang_chunkcache.ChunkCacheConfig",
        "sglang_chunkcache.__version__",
        "sglang_chunkcache.attention.",  # operators on tensors: eval/bench/attention.py times them
        "sglang_chunkcache.fusion.relocate",  # likewise, eval/bench/relocate.py
        "sglang_chunkcache.bundled_model.model_dir",
        "sglang_chunkcache.lang.",
        "sglang_chunkcache.cpu.torchvision_shim.define_torchvision_ops",  # before transformers, where torch is a CPU build
    )
    inside = [
        name
        for path in sources("eval")
        for name in imports(path)
        if name.startswith("sglang_chunkcache") and not name.startswith(public)
    ]
    assert inside == []
    assert [name for path in sources("eval") for name in imports(path) if name.startswith("sglang.srt")] == []


@pytest.mark.parametrize("package", ["eval", "tests"])
def test_nobody_imports_eval_as_a_name(package: str) -> None:
    """`import eval` hides the builtin."""
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Import) and any(alias.name == "eval" for alias in node.names)), path


def test_only_plugin_and_hooks_write_into_sglang() -> None:
    """Patches and registrations are in two files, where a reader looks for them."""
    writers = {"plugin.py", "hooks.py"}
    for path in sources("sglang_chunkcache"):
        source = path.read_text(encoding="utf-8")
        if path.name not in writers:
            assert "HookRegistry.register(" not in source, path
            assert "register_radix_cache_backend(" not in source, path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sglang_chunkcache", ("torch", "sglang", "transformers", "numpy", "prometheus_client")),
        ("radix_ext", ("torch", "sglang", "numpy")),
        ("retrieval", ("torch", "numpy", "faiss", "tantivy", "sklearn")),
        ("sglang_chunkcache.front.search", ("numpy", "faiss", "tantivy", "torch", "retrieval.retriever")),
        ("sglang_chunkcache.front.startup", ("numpy", "faiss", "tantivy", "torch", "sglang", "retrieval.retriever")),
        ("sglang_chunkcache.front.planner", ("torch", "sglang", "transformers", "prometheus_client")),
        ("sglang_chunkcache.front.bookkeeper", ("torch", "sglang", "transformers", "prometheus_client")),
        ("sglang_chunkcache.plugin", ("torch", "sglang")),
    ],
)
def test_import_is_light(module: str, absent: tuple[str, ...]) -> None:
    """A client that wants the configuration does not wait for torch."""
    code = f"import {module}, sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
