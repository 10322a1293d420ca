"""A server as a user starts it: by the console script, at a terminal.

launch/test.sh tests/e2e/test_console.py -m nightly
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from eval.errors import CommandError
from eval.http import get, post
from eval.server import free_port
from tests.polling import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SCRIPT = """
import sys
from sglang_chunkcache.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""As pip writes it."""


def test_steps_are_shown_and_requests_served(tmp_path: Path) -> None:
    """SGLang's processes are ours, too: with moved KV the costs are measured in the scheduler.
    Ctrl-C, which the terminal sends to all of them, ends the server."""
    script, port, shown = tmp_path / "sglang-chunkcache", free_port(), bytearray()
    script.write_text(SCRIPT)
    flags = ["--model-path", "bundled", "--host", "127.0.0.1", "--port", str(port)]
    terminal, slave = pty.openpty()

    def read() -> None:
        with suppress(OSError):  # the last process has closed it
            while part := os.read(terminal, 65536):
                shown.extend(part)

    server = subprocess.Popen(
        [sys.executable, str(script), "serve", *flags, "--reuse", "fused"],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(slave)
    threading.Thread(target=read, daemon=True).start()

    def is_ready() -> bool:
        assert server.poll() is None, shown.decode()
        with suppress(CommandError):
            get(f"http://127.0.0.1:{port}/ready", timeout_s=5)
            return True
        return False

    try:
        until(is_ready)
        body = {"parts": ["Hello."], "sampling_params": {"max_new_tokens": 2}}
        assert "chunkcache" in post(f"http://127.0.0.1:{port}/rag/v1/generate", body)
        for text in ("importing SGLang, ", "measuring costs, ", "measuring costs: "):
            assert f"chunk cache: {text}" in shown.decode()
        os.killpg(server.pid, signal.SIGINT)
        server.wait(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
