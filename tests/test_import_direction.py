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
    beyond = tuple(f"{name}." for name in forbidden)
    found = [(path, name) for path in sources(package) for name in imports(path)]
    return [f"{path}: {name}" for path, name in found if f"{name}.".startswith(beyond)]


def roots(package: str) -> set[str]:
    """The packages, and our modules, from which it imports."""
    return {name.split(".")[0] for path in sources(package) for name in imports(path)}


def test_radix_ext_imports_the_standard_library_only() -> None:
    """It must run, and be taken along, without anything installed."""
    assert roots("radix_ext") - sys.stdlib_module_names <= {"radix_ext"}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("retrieval", {"radix_ext", "sglang_chunkcache", "eval", "tests", "sglang"}),
        ("sglang_chunkcache", {"eval", "tests"}),
    ],
)
def test_packages_know_no_others(package: str, forbidden: set[str]) -> None:
    """The product does not depend on its measurement; the retriever is a library of its own."""
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
    """Front and scheduler are two processes; the tree is given fusion, and never imports it."""
    beyond = {f"sglang_chunkcache.{name}" for name in forbidden}
    assert offenders(f"sglang_chunkcache/{folder}", beyond) == []


def test_wire_imports_neither_side() -> None:
    """What crosses the process border is data: both processes read it, without torch and SGLang."""
    foreign = roots("sglang_chunkcache/wire") - sys.stdlib_module_names
    assert foreign <= {"radix_ext", "msgspec", "sglang_chunkcache"}
    names = {name for path in sources("sglang_chunkcache/wire") for name in imports(path)}
    ours = {name for name in names if name.startswith("sglang_chunkcache.")}
    assert all(name.startswith("sglang_chunkcache.wire.") for name in ours)


def module_graph(package: str) -> dict[str, set[str]]:
    """What each module of a package imports of the same package, inside functions too."""
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
    """A folder, or a module of the package's root, is a stage of a request's way."""
    folders: dict[str, set[str]] = defaultdict(set)
    for module, imported in module_graph("sglang_chunkcache").items():
        folder = ".".join(module.split(".")[:2])
        folders[folder] |= {".".join(name.split(".")[:2]) for name in imported} - {folder}
    assert circle(folders) == []


def test_circle_is_found() -> None:
    """The three tests above would pass on any code if it were not."""
    found = circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})
    assert set(found) == {"b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_eval_uses_public_names_only() -> None:
    """HTTP, `radix_ext`, `retrieval`, and of `sglang_chunkcache` these."""
    names = (
        *("ChunkCacheConfig", "__version__", "bundled_model.model_dir", "lang.", "client."),
        "preprocess.",  # what the command does
        *("fusion.move.", "fusion.moving."),  # what eval/unrotated.py changes
        *("config.MAX_", "config.help_texts"),  # limits that are no settings, what settings are
        "chunk_files.",  # questions with answers
        *("fusion.selectors.", "wire.report.Fallback"),  # the interface of selectors
        # are measured
        *("attention.", "fusion.relocate", "storage.codec."),
        "integrations.",  # what the examples show
        "cpu.torchvision_shim.define_torchvision_ops",  # before transformers, on a CPU build
    )
    public = tuple(f"sglang_chunkcache.{name}" for name in names)
    used = {name for path in sources("eval") for name in imports(path)}
    # whose rounds `bench waiting` times
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    assert {name for name in used if name.startswith("sglang.srt")} == {scheduler}
    ours = {name for name in used if name.startswith("sglang_chunkcache")}
    assert {name for name in ours if not name.startswith(public)} == set()


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


SERVING = "torch", "sglang", "transformers", "prometheus_client"
SEARCHING = "numpy", "faiss", "tantivy", "retrieval.retriever"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sglang_chunkcache", (*SERVING, "numpy")),
        ("sglang_chunkcache.__main__", (*SERVING, "numpy", "tqdm")),
        ("sglang_chunkcache.check", (*SERVING, "msgspec")),
        ("sglang_chunkcache.preprocess", (*SERVING, "msgspec", "tqdm")),
        ("radix_ext", ("torch", "sglang", "numpy")),
        ("retrieval", ("torch", "numpy", "faiss", "tantivy", "sklearn")),
        ("sglang_chunkcache.front.search", (*SEARCHING, "torch")),
        ("sglang_chunkcache.front.startup", (*SEARCHING, "torch", "sglang")),
        ("sglang_chunkcache.front.guard.lethal", ("torch", "sglang", "prometheus_client")),
        ("sglang_chunkcache.front.planner", SERVING),
        ("sglang_chunkcache.front.bookkeeper", SERVING),
        ("sglang_chunkcache.plugin", ("torch", "sglang")),
    ],
)
def test_import_is_light(module: str, absent: tuple[str, ...]) -> None:
    """A client that wants the configuration does not wait for torch."""
    code = f"import {module}, sys; print([m for m in {absent!r} if m in sys.modules])"
    told = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert told.strip() == "[]"


def test_state_on_sglangs_objects_has_one_home() -> None:
    """Two functions read records on `TreeNode` and `Req`: the type checker sees every field."""
    homes = {
        "compat.py": "what a release of SGLang has",
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
