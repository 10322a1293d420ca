"""radix_ext runs on Python alone: the front decides even where torch, SGLang and numpy are not installed."""

import subprocess
import sys
from pathlib import Path

import radix_ext


def test_package_imports_in_a_bare_interpreter() -> None:
    """`-I -S` hides site-packages: what is left must do."""
    root = str(Path(radix_ext.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); import radix_ext; radix_ext.chunk_id([1])"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
