"""What tensor-parallel ranks must have alike."""

from __future__ import annotations

from collections import deque

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.storage.jobs import FAILED, Job, Load
from sglang_chunkcache.storage.ranks import Ranks
from tests.kit.storages import LAYOUT, make_entry
from tests.reference.rank_group import RankGroup, on_ranks


def test_load_that_failed_on_one_rank_tells_no_time() -> None:
    """The rank that has loaded would estimate by it alone, and ask for other loads."""

    def live(group: RankGroup) -> tuple[float, str, bool]:
        load = Load("n", 1, 1, LAYOUT)
        if group.rank_in_group:
            load.entry, load.seconds = make_entry(), 5.0
        else:
            load.problem = FAILED
        done: deque[Job] = deque([load])
        list(Ranks(group).done_by_all(done, is_asked=True, is_paused=False))
        return load.seconds, load.problem, load.entry is None

    assert on_ranks(live) == [(0.0, FAILED, True)] * 2
