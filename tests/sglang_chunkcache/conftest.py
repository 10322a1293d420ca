"""Pools in host memory are made beside whatever else takes the machine's memory: their few MiB are
there, HiCache's 10 GiB of reserve may not be."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

BUDGET_BYTES = 1 << 40
"""Of all pools of a run, which SGLang subtracts and never gives back."""


@pytest.fixture(scope="session", autouse=True)
def host_memory() -> Iterator[None]:
    """What `host_memory_budget_scope` does for a server."""
    if not find_spec("sglang"):
        yield
        return
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(BUDGET_BYTES):
        yield
