"""Progress of long commands: the callback that the library calls, and progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the amount done, and the total amount, None if unknown."""


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A callback that draws one bar a stage on stderr."""
    from tqdm import tqdm  # imported here so that the library does not depend on it

    bars: dict[str, tqdm[Any]] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in bars:
            for bar in bars.values():
                bar.close()
            bars[stage] = tqdm(
                desc=f"{stage:9}", total=total, unit="", file=sys.stderr, mininterval=0.5, delay=5
            )
        bars[stage].update(done - bars[stage].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()
