"""launch/gpu_attention.sh runs what needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_gpu_test_is_run() -> None:
    """What no script names is not run on the day there is a GPU."""
    script = (ROOT / "launch/gpu_attention.sh").read_text()
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [str(f.relative_to(ROOT)) for f in files if re.search(r"mark\.gpu", f.read_text())]
    assert len(marked) > 5
    assert [name for name in marked if name not in script] == []
