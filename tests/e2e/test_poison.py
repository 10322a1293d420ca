"""The poison itself: reading a free slot gives NaN. A tiny real model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch

from sglang_chunkcache.fusion.recompute import run_virtual
from tests.e2e import poisoned_server
from tests.models import POOL_SLOTS, logits_of, make_row, make_runner, write_model

pytestmark = pytest.mark.engine

PROMPT = list(range(40))


@pytest.fixture
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model whose pool is poisoned."""
    path = tmp_path_factory.mktemp("poisoned")
    write_model(path, "llama")
    poisoned_server.install()
    yield make_runner(path)
    poisoned_server.uninstall()


def answer(runner: Any, slots: torch.Tensor, start: int) -> torch.Tensor:
    """The last token's logits, with everything before `start` read from `slots`."""
    row = make_row(runner, slots)
    hidden = run_virtual(runner, req_pool_index=row, runs=[(start, len(PROMPT))], token_ids=PROMPT)
    return logits_of(runner, hidden[-1])


def test_unowned_slots_answer_nan(runner: Any) -> None:
    """New, freed and cleared slots; what is owned and written is left alone."""
    allocator, pool = runner.token_to_kv_pool_allocator, runner.token_to_kv_pool
    assert pool.k_buffer[-1].isnan().all()
    assert pool.v_buffer[0].isnan().all()
    slots, others = allocator.alloc(len(PROMPT)), allocator.alloc(10)
    assert answer(runner, slots, 30).isnan().all()  # allocated, never written

    expected = answer(runner, slots, 0)
    torch.testing.assert_close(answer(runner, slots, 30), expected, rtol=0, atol=1e-4)
    allocator.free(others)
    assert answer(runner, slots, 30).isfinite().all()

    allocator.free_group_begin()
    allocator.free(slots[:1])
    assert answer(runner, slots, 30).isfinite().all()
    allocator.free_group_end()
    assert answer(runner, slots, 30).isnan().all()  # one freed slot is enough

    assert answer(runner, slots, 0).isfinite().all()
    allocator.clear()
    assert allocator.available_size() == POOL_SLOTS
    assert answer(runner, slots, 30).isnan().all()
