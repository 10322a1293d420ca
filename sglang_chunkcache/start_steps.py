"""What a start is doing, at a terminal: a line on stderr for each step of over two seconds.

The process that the user has started draws it, so that several do not write into one line. Every
process names the step that begins in a file. Without a terminal there is no file, and nothing is
drawn.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

FILE = "SGLANG_CHUNKCACHE_STEP_FILE"
"""Environment variable with the file's path; not set where nothing is drawn."""
SHOWN_S, POLL_S = 2.0, 0.5

WEIGHTS = "loading the weights"
"""SGLang draws a bar of its own meanwhile, which is not drawn over."""


def step(name: str) -> None:
    """What was under way has ended, and `name` begins; "": nothing that has a name."""
    if path := os.environ.get(FILE):
        with suppress(OSError):  # the start is over
            Path(path).write_text(f"{time.time()} {name}\n", encoding="utf-8")


@contextmanager
def shown_steps() -> Iterator[None]:
    """Draw steps of this process and of those that it starts."""
    if not sys.stderr.isatty():
        yield
        return
    done = Event()
    with TemporaryDirectory(prefix="chunkcache-step.") as folder:
        path = Path(folder, "step")
        os.environ[FILE] = str(path)
        drawer = Thread(target=_draw, args=(path, done), daemon=True)
        drawer.start()
        try:
            yield
        finally:
            step("")
            done.set()
            drawer.join()
            del os.environ[FILE]


def _draw(path: Path, done: Event) -> None:
    name, since, is_last = "", 0.0, False
    is_told = False
    while not is_last:
        is_last = done.wait(POLL_S)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        began, _, new = text.strip().partition(" ")
        # without its end it is being written
        if text.endswith("\n") and (float(began), new) != (since, name):
            if name and float(began) - since >= SHOWN_S:
                _tell(f"{name}: {float(began) - since:.1f} s", end="\n")
            name, since, is_told = new, float(began), False
        if not name or time.time() - since < SHOWN_S:
            continue
        if name != WEIGHTS:
            # The cursor goes back: whatever another process logs is written over the line.
            _tell(f"{name}, {time.time() - since:.0f} s", end="\r")
        elif not is_told:
            _tell(name, end="\n")
            is_told = True


def _tell(text: str, *, end: str) -> None:
    print(f"\rchunk cache: {text}\x1b[K", end=end, file=sys.stderr, flush=True)
