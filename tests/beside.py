"""The tests of the session's servers in a second process, beside all others: there pytest waits, here it computes.

    this session                               second session
    collects all, gives these tests away  -->  collects and runs them
    runs the others                            writes each report as a line of JSON
    takes the reports over as its own     <--  ends

Counts, failures, durations and the exit code of this session are those of all tests. Nothing is given away on one core, where
no other tests run, and where tests use the terminal (--pdb, -s).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

SERVERS = frozenset({"rag_server", "fused_server"})
"""Fixtures whose tests are given away."""
FOLDER_VAR = "TESTS_BESIDE"
"""Names a second session's folder: in it are `TESTS`, the ids of the tests to run, and `REPORTS`, to be written."""
TESTS, REPORTS = "tests.json", "reports.jsonl"
STOP_S = 45.0
"""In which an interrupted second session stops its servers."""


class Second:
    """Plugin of the second session: only the tests given away are run, and every report goes into a file, too."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config, self._path = config, folder / REPORTS
        self._tests = set(json.loads((folder / TESTS).read_text(encoding="utf-8")))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._tests]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as out:
            print(json.dumps(data), file=out)


class SecondSession:
    """A pytest process that runs these tests; as a context manager it ends with the block, whatever happens."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item], folder: Path) -> None:
        self._hook, self._config, self._items = config.hook, config, items
        self._reports, self._output = folder / REPORTS, folder / "output.txt"
        self._reports.touch()
        (folder / TESTS).write_text(json.dumps([item.nodeid for item in items]), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", config.option.markexpr]
        with self._output.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, *dict.fromkeys(str(item.path) for item in items)],
                cwd=config.rootpath,
                env={**os.environ, FOLDER_VAR: str(folder)},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through us, once
            )

    def __enter__(self) -> SecondSession:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def take_over(self) -> None:
        """Log its reports as this session's until it has ended; a test without one has failed."""
        missing = {item.nodeid: item for item in self._items}
        for line in self._lines():
            report = self._hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
            if report.when == "setup":
                self._hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
            self._hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
                missing.pop(report.nodeid, None)
        why = f"its session ended with {self._process.returncode}:\n{self._output.read_text(errors='replace')[-4000:]}"
        for nodeid, item in missing.items():
            lost = pytest.TestReport(nodeid, item.location, {}, outcome="failed", longrepr=why, when="call")
            self._hook.pytest_runtest_logreport(report=lost)

    def _lines(self) -> Iterator[str]:
        line = ""
        with self._reports.open(encoding="utf-8") as file:
            while True:
                has_ended = self._process.poll() is not None
                line += file.readline()
                if line.endswith("\n"):
                    yield line
                    line = ""
                elif has_ended:
                    return
                else:
                    time.sleep(0.1)


def register_second(config: pytest.Config) -> None:
    """In the second session: do as the first one asked."""
    if folder := os.environ.pop(FOLDER_VAR, None):  # tests start processes of their own
        config.pluginmanager.register(Second(config, Path(folder)))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Give the tests of servers away, run the others, take the reports over."""
    given = [item for item in session.items if SERVERS & set(getattr(item, "fixturenames", ()))]
    options = session.config.option
    uses_terminal = options.collectonly or options.usepdb or options.capture == "no"
    if uses_terminal or len(os.sched_getaffinity(0)) == 1 or not 0 < len(given) < len(session.items):
        return (yield)
    session.items[:] = [item for item in session.items if not SERVERS & set(getattr(item, "fixturenames", ()))]
    with TemporaryDirectory() as folder, SecondSession(session.config, given, Path(folder)) as other:
        result = yield
        other.take_over()
    return result
