"""A server for tests, demos and benchmarks:
starts it, waits until it is ready, stops it and its child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.errors import CommandError
from eval.http import get
from eval.progress import progress


class Server:
    """One `sglang_chunkcache.launch_server` process on 127.0.0.1; use it as a context manager.

    Args:
        flags: the server's flags, without host and port.
        log: file for its output.
        launcher: Python's arguments, to run another script instead of our launcher.
        env: environment variables in addition to this process's.
        timeout_s: seconds until it must be ready.
    Raises (on entering):
        CommandError: the server ended or did not become ready; the message has the log's last
        lines.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log: Path,
        launcher: Sequence[str] = ("-m", "sglang_chunkcache.launch_server"),
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable,
            *launcher,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *flags,
        ]
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                # `killpg` then reaches its schedulers, and not this process.
                start_new_session=True,
            )
        deadline = time.monotonic() + self._timeout_s
        look = f"start of {self.log.stem}", None
        try:
            with progress(*look, bar_format="{desc}: {elapsed}") as bar:
                while not self.is_healthy():
                    if not self.is_running or time.monotonic() > deadline:
                        raise CommandError(
                            f"the server did not start; {self.log} ends with:\n{self.log_tail()}"
                        )
                    time.sleep(0.5)
                    bar.update()
        except BaseException:  # also on Ctrl-C, so that the process does not stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        # Our server drains after a SIGTERM and ends at a second one; two within `drain.SAME_S`
        # are one signal.
        for sign, patience_s in (
            (signal.SIGTERM, 1.0),
            (signal.SIGTERM, 20.0),
            (signal.SIGKILL, 20.0),
        ):
            try:
                os.killpg(self._process.pid, sign)
                # At once if it has ended: children that outlive it get the next signal.
                self._process.wait(patience_s)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of its first process, which answers HTTP."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether it answers `/health`, which SGLang does once the scheduler has answered its first
        request."""
        try:
            get(self.url + "/health", timeout_s=5)
        except CommandError:
            return False
        return True

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
