"""The dependency rules between packages, checked on the imports in their sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"radix_ext", "retrieval", "sglang_chunkcache", "eval", "tests"}


@cache
def imports(path: Path) -> list[str]:
    """Dotted names of everything a file imports, `from a import b` as `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def offenders(package: str, forbidden: set[str]) -> list[str]:
    """`file: name` of imports that begin with one of these."""
    beginnings = tuple(f"{name}." for name in forbidden)
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(package)
        for name in imports(path)
        if f"{name}.".startswith(beginnings)
    ]


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("radix_ext", {"radix_ext"}), ("sglang_chunkcache/wire", {"radix_ext", "msgspec"})],
)
def test_package_imports_little_beside_the_standard_library(
    package: str, allowed: set[str]
) -> None:
    """`radix_ext` runs without anything installed; what crosses the process border is data."""
    found = {
        name
        for path in sources(package)
        for name in imports(path)
        if not name.startswith("sglang_chunkcache.wire.")
    }
    assert {name.split(".")[0] for name in found} <= sys.stdlib_module_names | allowed


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("retrieval", (OURS - {"retrieval"}) | {"sglang"}),
        ("sglang_chunkcache", {"eval", "tests"}),
        ("eval", {"sglang.srt"}),
    ],
)
def test_package_does_not_know(package: str, forbidden: set[str]) -> None:
    """`retrieval` is a library of its own; the product does not depend on its measurement."""
    assert offenders(package, forbidden) == []


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("front", {"scheduler", "fusion", "storage", "attention"}),
        ("scheduler", {"front", "fusion"}),
        ("fusion", {"front"}),
        ("storage", {"front", "scheduler", "fusion", "attention"}),
        ("attention", {"front", "scheduler", "fusion", "storage"}),
    ],
)
def test_folders_follow_the_requests_way(folder: str, forbidden: set[str]) -> None:
    """Front and scheduler are two processes; the tree asks of fusion what a protocol says."""
    beyond = {f"sglang_chunkcache.{name}" for name in forbidden}
    assert offenders(f"sglang_chunkcache/{folder}", beyond) == []


def module_graph(package: str) -> dict[str, set[str]]:
    """What each module imports of the same package, wherever in the file."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(package)
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imports(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of one circle, in order; none for a graph without circles."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("package", ["radix_ext", "retrieval", "sglang_chunkcache", "eval"])
def test_modules_import_in_no_circle(package: str) -> None:
    """A module can be read, tested and moved without those that import it."""
    assert circle(module_graph(package)) == []


def test_folders_import_in_no_circle() -> None:
    """A folder is a stage of a request's way; a module of the root is one of its own."""
    folders: dict[str, set[str]] = defaultdict(set)
    for module, imported in module_graph("sglang_chunkcache").items():
        folder = ".".join(module.split(".")[:2])
        folders[folder] |= {".".join(name.split(".")[:2]) for name in imported} - {folder}
    assert circle(folders) == []


def test_eval_uses_public_names_only() -> None:
    """Of `sglang_chunkcache` configuration, frontend language, model path, operators."""
    public = (
        "sglang_chunkcache.ChunkCacheConfig",
        "sglang_chunkcache.__version__",
        "sglang_chunkcache.config.MAX_",  # limits that are no settings
        "sglang_chunkcache.attention.",  # operators on tensors: eval/bench/attention.py times them
        "sglang_chunkcache.fusion.selectors.",  # the interface of selectors: eval/selectors.py
        "sglang_chunkcache.wire.report.Fallback",  # likewise
        "sglang_chunkcache.client.",  # eval/alpha.py
        "sglang_chunkcache.examples.",  # likewise
        "sglang_chunkcache.fusion.relocate",  # likewise, eval/bench/relocate.py
        "sglang_chunkcache.joint_encoding.",  # eval/joint, eval/quality
        "sglang_chunkcache.storage.codec.",  # likewise
        "sglang_chunkcache.bundled_model.model_dir",
        "sglang_chunkcache.lang.",
        "sglang_chunkcache.removed.",  # flags that are refused
        # before transformers, where torch is a CPU build
        "sglang_chunkcache.cpu.torchvision_shim.define_torchvision_ops",
    )
    inside = [
        name
        for path in sources("eval")
        for name in imports(path)
        if name.startswith("sglang_chunkcache") and not name.startswith(public)
    ]
    assert inside == []


@pytest.mark.parametrize("package", ["eval", "tests"])
def test_nobody_imports_eval_as_a_name(package: str) -> None:
    """`import eval` hides the builtin."""
    assert [path for path in sources(package) if "eval" in imports(path)] == []


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
        ("sglang_chunkcache", "torch sglang transformers numpy prometheus_client"),
        ("radix_ext", "torch sglang numpy"),
        ("retrieval", "torch numpy faiss tantivy sklearn"),
        ("sglang_chunkcache.front.search", "numpy faiss tantivy torch retrieval.retriever"),
        ("sglang_chunkcache.front.startup", "numpy faiss tantivy torch sglang retrieval.retriever"),
        ("sglang_chunkcache.front.guard.lethal", "torch sglang prometheus_client"),
        ("sglang_chunkcache.front.planner", "torch sglang transformers prometheus_client"),
        ("sglang_chunkcache.front.bookkeeper", "torch sglang transformers prometheus_client"),
        ("sglang_chunkcache.plugin", "torch sglang"),
    ],
)
def test_import_is_light(module: str, absent: str) -> None:
    """A client that wants the configuration does not wait for torch."""
    code = f"import {module}, sys; print({{*{absent.split()}}} & {{*sys.modules}} or None)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "None"


def test_state_on_sglangs_objects_has_one_home() -> None:
    """Records on `TreeNode` and `Req` are read by two functions, typed."""
    homes = {
        "config.py": "our own dataclass and argparse's namespace",
        "front/engine.py": "starlette's state, and a proxy's __getattr__",
        "front/misplaced.py": "what Starlette keeps of a body",
        "front/prompt.py": "a tokenizer of transformers",
        "front/tokenizer.py": "a tokenizer of transformers",
        "scheduler/node.py": "the two functions",
        "storage/backend.py": "what a storage of HiCache's may have",
    }
    package = ROOT / "sglang_chunkcache"
    found = {
        str(path.relative_to(package))
        for path in sources("sglang_chunkcache")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in ("getattr", "setattr", "hasattr")
    }
    assert found == set(homes)
