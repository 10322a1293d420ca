"""ContextPilot as a client-side reorderer: a child process that only imports contextpilot, one JSON object per line.

    parent -> {"ids": ["c7", "c2"], "conversation": null}     child -> {"ids": ["c2", "c7"]} or {"error": "..."}

A child process is used because ContextPilot's packages may conflict with ours (so it may run in another Python), it prints to
stdout, and it may fail. If it fails, the request keeps the retriever's order and the failure is counted.
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
"""The worker's import. `import contextpilot` alone proves nothing: 0.5.0 loads its modules on first use."""


class ContextPilotReorderer:
    """The online use of ContextPilot: each request is reordered by the index of earlier requests. One instance serves one arm.

    Args:
        python: a Python in which contextpilot is installed; None: this one.
    """

    def __init__(self, python: Path | None = None) -> None:
        self._command = [str(python or sys.executable), str(WORKER)]
        self._child: subprocess.Popen[str] | None = None
        self.counts = {"reordered": 0, "errors": 0}
        """Requests sent in another order than the retriever's, and requests on which it failed."""
        self.errors: dict[str, int] = {}
        """Error -> its count."""

    def order(self, request: Request) -> Sequence[TextChunk]:
        """The request's chunks in ContextPilot's order; in the retriever's if it fails or loses a chunk."""
        if len(request.chunks) < 2:
            return request.chunks
        first = {chunk.id: chunk for chunk in reversed(request.chunks)}
        ids = [chunk.id for chunk in request.chunks if first[chunk.id] is chunk]
        answer = self._ask({"ids": ids, "conversation": request.conversation})
        ordered = answer.get("ids", [])
        if "error" not in answer and sorted(ordered) != sorted(ids):
            answer = {"error": "other chunks came back than were sent"}
        if "error" in answer:
            self.counts["errors"] += 1
            self.errors[answer["error"]] = self.errors.get(answer["error"], 0) + 1
            return request.chunks
        self.counts["reordered"] += ordered != ids
        # It treats a request as a set: repeated chunks are put after the others.
        return [*(first[i] for i in ordered), *(chunk for chunk in request.chunks if first[chunk.id] is not chunk)]

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._child.stdin
        assert self._child.stdout
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:  # it died: the next request starts another process with an empty index
            code = self._child.wait()
            self._child = None
            return {"error": f"the worker ended with {code}"}
        return dict(json.loads(line))


def contextpilot_missing(python: Path | None) -> str | None:
    """Why ContextPilot cannot be used, or None. Raises CommandError for a Python that cannot be run."""
    command = [str(python or sys.executable), "-c", IMPORT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"--contextpilot-python: {python} cannot be run: {error}") from None
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    where = f"in {python}" if python else "here"
    return (
        f"contextpilot does not import {where} ({last}): pip install contextpilot, "
        "or name a Python that has it by --contextpilot-python"
    )
