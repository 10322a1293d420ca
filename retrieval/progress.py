"""Progress of long commands: a callback, and bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the amount done, and the total amount, None if unknown."""


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A callback that draws one bar a stage on stderr."""
    from tqdm import tqdm  # imported here so that the library does not depend on it

    shown, bars = ExitStack(), dict[str, Any]()
    options: dict[str, Any] = {"unit": "", "file": sys.stderr, "mininterval": 0.5, "delay": 5}

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in bars:
            shown.close()
            bars[stage] = shown.enter_context(tqdm(desc=f"{stage:9}", total=total, **options))
        bars[stage].update(done - bars[stage].n)

    with shown:
        yield report
