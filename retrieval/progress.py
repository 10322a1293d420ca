"""Progress of long commands: a callback, and bars on stderr.

At a terminal only: files and pipes get none. What takes under two seconds leaves no bar behind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the amount done, and the total amount, None if unknown."""

SHOWN_S = 2.0


@contextmanager
def bar(label: str, total: int | None, *, initial: int = 0, **look: Any) -> Iterator[Any]:
    """tqdm's, drawn at once: a stage's first update may come late.
    Raises ModuleNotFoundError without tqdm."""
    from tqdm import tqdm  # imported here so that the library does not depend on it

    usual = {"unit": "", "file": sys.stderr, "mininterval": 0.5, "dynamic_ncols": True, **look}
    started = time.monotonic()
    with tqdm(desc=label, total=total, initial=initial, disable=None, **usual) as drawn:
        try:
            yield drawn
        finally:
            drawn.leave = time.monotonic() - started >= SHOWN_S


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A callback that draws one bar a stage."""
    shown, bars = ExitStack(), dict[str, Any]()

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in bars:
            shown.close()
            bars[stage] = shown.enter_context(bar(f"{stage:9}", total))
        bars[stage].update(done - bars[stage].n)

    with shown:
        yield report
