"""radix_ext runs on Python alone: the front decides even where torch, SGLang and numpy are not installed."""

import ast
import subprocess
import sys
from pathlib import Path

import radix_ext

PACKAGE = Path(radix_ext.__file__).parent


def test_no_module_imports_anything_outside_the_standard_library() -> None:
    """Read from the source, so that imports inside functions count too."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top == "radix_ext" or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_package_imports_in_a_bare_interpreter() -> None:
    """`-I -S` hides site-packages: what is left must do."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import radix_ext; radix_ext.chunk_id([1])"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_all_names_are_public_and_sorted_once() -> None:
    """`__all__` is the list others may rely on."""
    assert len(set(radix_ext.__all__)) == len(radix_ext.__all__)
    assert all(hasattr(radix_ext, name) for name in radix_ext.__all__)
