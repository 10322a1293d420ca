"""Host memory without a flag: a table of machines, and what is read of this one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler import host_memory
from sglang_chunkcache.scheduler.host_memory import (
    EXACT_CHAINS,
    PINNED_BYTES_PER_S,
    STORE,
    HostMemory,
    default_bytes,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "available", "num_ranks", "chains", "store"),
    [
        (56, 1500, 1, 112, 56),  # one H100
        (56, 1500, 8, 1500 / 32, 1500 / 64),  # eight of them
        (120, 512, 1, 128, 64),  # a large device, a small host
        (0.1, 64, 1, 0.2, 1),  # a small pool
        (0, 200, 1, 0, 1),  # no GPU
        (0, 4, 4, 0, 0.125),
        (8, 12, 1, 2, 1.5),  # SGLang's reserve
        (8, -1, 1, 0, 0),  # all of it is spoken for
    ],
)
def test_default_by_machine(
    device: float, available: float, num_ranks: int, chains: float, store: float
) -> None:
    """In GiB."""
    for use, wanted in ((EXACT_CHAINS, chains), (STORE, store)):
        found = default_bytes(
            use,
            device_bytes=int(device * GIB),
            available=int(available * GIB),
            num_ranks=num_ranks,
            is_pinned=False,
        )
        assert found == pytest.approx(max(1, wanted * GIB), abs=2)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_what_is_pinned_by_default_is_bounded_in_seconds_of_the_start(
    num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all ranks of a host of H100s together. What is little stays as it is."""
    caplog.set_level("INFO")

    def found(device: int) -> int:
        return sum(
            default_bytes(
                use,
                device_bytes=device,
                available=1500 * GIB,
                num_ranks=num_ranks,
                is_pinned=True,
            )
            for use in (EXACT_CHAINS, STORE)
        )

    assert found(GIB // 100) == int(0.02 * GIB) + GIB
    assert not caplog.messages
    seconds = num_ranks * found(56 * GIB) / PINNED_BYTES_PER_S
    assert seconds == pytest.approx(60, abs=1e-6)
    assert [f"each of {num_ranks} rank(s)" in each for each in caplog.messages] == [True, True]


@pytest.mark.parametrize(("device", "found"), [("cuda", 3 * GIB), ("cpu", GIB)])
def test_machine_is_shared_by_its_ranks(
    device: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in each of three replicas. A pool in host memory counts nothing."""
    told: list[int] = []

    def broadcast(mine: int) -> int:
        told.append(mine)
        return 7

    monkeypatch.setattr(
        host_memory, "available_host_memory_bytes", lambda: (6 * 4 + 6 * 8 * 3) * GIB
    )
    monkeypatch.setattr(host_memory, "ranks_per_host", lambda: 2)
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (9 * GIB, 9 * GIB))
    runner = SimpleNamespace(tp_group=SimpleNamespace(broadcast_object=broadcast))
    ctx = SimpleNamespace(
        params=SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(device=device, get_kvcache=lambda: pool)
        ),
        server_args=SimpleNamespace(dp_size=3),
        tp_worker=SimpleNamespace(model_runner=runner),
    )
    assert HostMemory(ctx, ChunkCacheConfig()).store_bytes(taken=4 * GIB) == 7
    assert told == [found]
