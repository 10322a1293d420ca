"""launch/gpu_attention.sh runs what needs a GPU and no server."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_gpu_test_is_run() -> None:
    """What no script names is not run on the day there is a GPU."""
    script = (ROOT / "launch/gpu_attention.sh").read_text()
    files = (ROOT / "tests/sglang_chunkcache").rglob("test_*.py")
    marked = [str(f.relative_to(ROOT)) for f in files if "mark.gpu" in f.read_text()]
    assert len(marked) > 5
    assert [name for name in marked if name not in script] == []
