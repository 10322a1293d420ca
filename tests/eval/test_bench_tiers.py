"""The pure part of the bench of tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.bench.tiers import _flags, _parse, summarize


def test_each_tier_is_told_against_computing() -> None:
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"tokens": 2000, "place": "alone"},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"ttft_s": seconds if number else 3600.0},
            "prompt_tokens": 2100,
            "exact": loaded or 0,
            "loaded": loaded,
        }
        for number in range(21)
        for arm, seconds, loaded in (("compute", 1.0, None), ("host", 0.25, 2000))
    ]
    found = summarize(samples)
    compute, host = found["tables"][0]["rows"]
    assert "from host 4.00 [4.00, 4.00] times sooner than computed." in found["verdict"][0]
    told = ("compute / tier", "loaded tokens", "rounds")
    assert [compute[name] for name in told[:2]] == ["1.00 [1.00, 1.00]", 0]
    assert [host[name] for name in told] == ["4.00 [4.00, 4.00]", 2000, 20]


@pytest.mark.parametrize(("redis", "tiers"), [([], 3), (["--redis", "6379"], 4)])
def test_host_memory_above_a_storage_holds_one_prompt_and_not_two(
    redis: list[str], tiers: int
) -> None:
    """Of 14 layers with 4 heads of 64 numbers in bfloat16: 14 KiB a token."""
    found = _flags(_parse(redis), 6000, Path("x"))
    assert len(found) == tiers
    held = {
        tier: int(flags[flags.index("--chunkcache-host-mib") + 1]) * 1024 / 14
        for tier, flags in found.items()
    }
    assert held["compute"] == 0
    assert 6000 < held["disk"] < 12_000 < 21 * 6000 < held["host"]
