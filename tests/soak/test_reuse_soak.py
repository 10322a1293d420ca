"""Fused reuse under a mixed load on poisoned pools: no NaN, no lost slot, exact answers as stock's.

Sampling from NaN kills SGLang, which fails the test, too. A small case runs in
tests/e2e/test_reuse.py.
"""

from pathlib import Path

import pytest

from eval.http import get
from eval.server import Server
from tests.soak import mixed_load
from tests.soak.answers import NEVER_REUSE, STRICT
from tests.soak.sizes import scaled

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
RETRACT = {"SGLANG_TEST_RETRACT": "1"}
BATCHES = [*mixed_load.FLAGS, "--chunked-prefill-size", "512"]
"""Prompts are prefilled whole and several at once."""
CROWD_POOL_TOKENS = 6400
CROWD = [
    *(*BATCHES, "--max-total-tokens", str(CROWD_POOL_TOKENS)),
    *("--max-running-requests", "256"),
]
"""With 256 clients some dozens run, and the others wait."""
ONE_COPY = ["--chunkcache-one-copy", "on"]
TIERS = [
    *(*mixed_load.TIGHT, "--chunkcache-host-mib", "1", "--chunkcache-store-mib", "1"),
    *("--chunkcache-store-chunks", "1000", "--chunkcache-store-codec", "int4"),
    *("--chunkcache-storage-backend", "file"),
    *("--chunkcache-storage-backend-extra-config", '{"directory": "FOLDER"}'),
]
"""Exact chains leave host memory, and chunks the store, for the storage."""


@pytest.mark.parametrize(
    ("flags", "pool_tokens", "num_requests", "clients", "env"),
    [
        (mixed_load.FLAGS, mixed_load.POOL_TOKENS, 500, 8, {}),
        (mixed_load.TIGHT, mixed_load.TIGHT_POOL_TOKENS, 500, 8, {}),
        (mixed_load.TIGHT, mixed_load.TIGHT_POOL_TOKENS, 200, 8, RETRACT),
        (TIERS, mixed_load.TIGHT_POOL_TOKENS, 250, 8, {}),
        ([*TIERS, *ONE_COPY], mixed_load.TIGHT_POOL_TOKENS, 250, 8, {}),
        ([*mixed_load.TIGHT, *ONE_COPY], mixed_load.TIGHT_POOL_TOKENS, 200, 8, RETRACT),
        (BATCHES, mixed_load.POOL_TOKENS, 250, 8, {}),
        (CROWD, CROWD_POOL_TOKENS, 600, 256, {}),
    ],
    ids=["roomy", "tight", "retract", "tiers", "one_copy", "one_copy_retract", "batches", "crowd"],
)
def test_mixed_load(
    tmp_path: Path,
    flags: list[str],
    pool_tokens: int,
    num_requests: int,
    clients: int,
    env: dict[str, str],
) -> None:
    """Requests wait, are evicted and, in the last case, retracted while their chunks are moved."""
    num_requests = scaled(num_requests, 60)
    log = tmp_path / "poisoned.log"
    # many, and none pauses a selector
    audits = ["--chunkcache-audit-share", "0.2", "--chunkcache-audit-agreement", "0"]
    flags = [*(flag.replace("FOLDER", str(tmp_path / "kept")) for flag in flags), *audits]
    with Server(flags, log=log, launcher=mixed_load.POISONED, env={**STRICT, **env}) as server:
        sizes = {"clients": clients, "seed": 0, "pool_tokens": pool_tokens}
        found = mixed_load.soak(server.url, num_requests, **sizes)
        stats = get(server.url + "/chunkcache/stats")
        rank, audit = stats["ranks"][0], stats["audit"]
    plain = ["--stock", *mixed_load.FLAGS[:2]]
    with Server(plain, log=tmp_path / "stock.log", env=NEVER_REUSE) as stock:
        mixed_load.check_exact(found, stock.url)
    print(found.outcomes, found.fates, len(found.exact))
    assert found.problems + mixed_load.problems_of_log(log) == []
    assert len(found.exact) > num_requests // 14
    assert found.fates["relocated"] > 2 * num_requests
    assert rank["evicted_chunks"] > num_requests // 4
    assert rank["gate"]["passed"]
    assert sum(one["samples"] for one in audit["figures"]) > num_requests // 100
    if "storage" in rank:
        print(rank["storage"])
        host, loaded = rank["host"], rank["storage"]["loaded"]
        assert min(host["loads"], host["evicted_tokens"], loaded) > 0, (host, loaded)
        assert rank["storage"]["problems"] == {}
        kept, saved = (sum(rank["store"][name].values()) for name in ("bytes", "saved_bytes"))
        assert saved > 2.5 * kept, "int4 saves 2.56 times what it keeps: rows of 72 bytes, not 256"
        assert min(rank["storage"]["prefetch"].values()) > 0, rank["storage"]["prefetch"]
    assert ("retract" in log.read_text().lower()) == bool(env)
