"""Mooncake's store through `dynamic`, two servers on it.
Needs the package `mooncake-transfer-engine-non-cuda` and libibverbs."""

from __future__ import annotations

import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang")
mooncake = pytest.importorskip(
    "mooncake.store", exc_type=ImportError, reason="needs Mooncake's store"
)

from eval.server import free_port  # noqa: E402
from tests.kit.storages import check_that_second_loads_what_first_writes, open_dynamic  # noqa: E402

pytestmark = pytest.mark.nightly

CLASS = {
    "backend_name": "mooncake",
    "module_path": "tests.reference.mooncake_storage",
    "class_name": "MooncakeStorage",
}
START_S = 3.0
"""Its master has no call that says it is up, and a client that comes too early gives up."""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    program = Path(mooncake.__file__).with_name("mooncake_master")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    port, other = free_port(), free_port()
    command = [str(program), "--rpc_port", str(port), "--metrics_port", str(other)]
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    time.sleep(START_S)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_two_servers_share_one_store(master: str, tmp_path: Path) -> None:
    """What one has written the other finds and loads, bit for bit."""
    first, second = (
        open_dynamic(tmp_path / name, **CLASS, master=master, segment_mib=64)
        for name in ("first", "second")
    )
    check_that_second_loads_what_first_writes(first, second)
