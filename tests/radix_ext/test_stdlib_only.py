"""radix_ext runs on Python alone: the front decides even where torch,
SGLang and numpy are not installed."""

import subprocess
import sys
from pathlib import Path

import radix_ext


def test_every_module_imports_in_a_bare_interpreter() -> None:
    """`-I -S` hides site-packages: what is left must do."""
    folder = Path(radix_ext.__file__).parent
    modules = [
        f"radix_ext.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"
    ]
    code = (
        f"import sys; sys.path.insert(0, {str(folder.parent)!r}); import {', '.join(modules)};"
        " radix_ext.chunk_id([1])"
    )
    assert "radix_ext.moved_plan" in modules
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
