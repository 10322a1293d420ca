"""ContextPilot as a client-side reorderer: a child process that only imports contextpilot, one JSON
object per line.

    parent -> {"ids": ["c7", "c2"], "conversation": null}   child -> {"ids": ["c2", "c7"],
                                                            "version": "0.5.0"}; no ids if
                                                            it fails

A child process is used because ContextPilot's packages may conflict with ours (so it may run in
another Python), and because it prints to stdout. A request on which it fails keeps the retriever's
order and is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.errors import CommandError

if TYPE_CHECKING:
    from eval.task import Request, TextChunk

WORKER = Path(__file__).with_name("contextpilot_worker.py")
IMPORT = "from contextpilot.server.live_index import ContextPilot"
"""The worker's import. `import contextpilot` alone proves nothing:
0.5.0 loads its modules on first use."""


class ContextPilotReorderer:
    """The online use of ContextPilot: each request is reordered by the index of earlier ones.
    None as `python`: this one."""

    def __init__(self, python: Path | None = None) -> None:
        self._child = subprocess.Popen(
            [python or sys.executable, WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # nobody reads it: a full pipe would block the child
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.counts: dict[str, Any] = {"reordered": 0, "errors": 0}
        """Requests sent in another order than the retriever's, and requests on which it failed;
        `version`, ContextPilot's."""

    def order(self, request: Request) -> Sequence[TextChunk]:
        """The request's chunks in ContextPilot's order; in the retriever's if it fails or loses a
        chunk.

        Raises:
            CommandError: the child has ended.
        """
        # reversed, so that the first of equal ids stays
        first = {chunk.id: chunk for chunk in reversed(request.chunks)}
        ids = list(dict.fromkeys(chunk.id for chunk in request.chunks))
        assert self._child.stdin
        assert self._child.stdout
        try:
            print(
                json.dumps({"ids": ids, "conversation": request.conversation}),
                file=self._child.stdin,
                flush=True,
            )
            # a child that has ended gives an empty line, which is no JSON
            answer = json.loads(self._child.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise CommandError(f"ContextPilot's process ended with {self._child.wait()}") from None
        ordered, self.counts["version"] = answer["ids"], answer["version"]
        if sorted(ordered) != sorted(ids):
            self.counts["errors"] += 1
            return request.chunks
        self.counts["reordered"] += ordered != ids
        # It treats a request as a set: repeated chunks are put after the others.
        return [
            *(first[i] for i in ordered),
            *(chunk for chunk in request.chunks if first[chunk.id] is not chunk),
        ]

    def close(self) -> None:
        """End the child."""
        # closes stdin, at whose end the worker's loop ends
        self._child.communicate()


def contextpilot_missing(python: Path | None) -> str | None:
    """Why ContextPilot cannot be used, or None.
    Raises CommandError for a Python that cannot be run."""
    try:
        command = [python or sys.executable, "-c", IMPORT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"--contextpilot-python: {python} cannot be run: {error}") from None
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return (
        f"contextpilot does not import ({last}): pip install it, or name a Python that has it by"
        " --contextpilot-python"
    )
