"""Slots in pages, without Triton."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch

from sglang_chunkcache import compat
from sglang_chunkcache.cpu.allocator import PagedAllocator
from sglang_chunkcache.cpu.platform import CpuNativePlatform

PAGE, PAGES = 4, 12


def extend(allocator: PagedAllocator, rows: list[list[int]], ends: list[int]) -> bool:
    """Slots for these rows up to their new ends, in one batch. False: they are short."""
    before = torch.tensor([len(row) for row in rows])
    after = torch.tensor(ends)
    last = torch.tensor([row[-1] if row else -1 for row in rows])
    if all(end == len(row) + 1 for row, end in zip(rows, ends, strict=True)):
        slots = allocator.alloc_decode(after, after, last)
    else:
        total = int((after - before).sum())
        slots = allocator.alloc_extend(before, before, after, after, last, total)
    if slots is None:
        return False
    for row, end in zip(rows, ends, strict=True):
        num_new = end - len(row)
        row += slots[:num_new].tolist()
        slots = slots[num_new:]
    assert not len(slots)
    return True


def test_a_page_is_one_requests_and_in_order() -> None:
    """Position p of a request is slot p of its pages; nothing is given twice, and all comes
    back."""
    draw = random.Random(3)
    allocator = PagedAllocator(PAGE * PAGES, PAGE, torch.float32, "cpu", SimpleNamespace(), False)
    rows: list[list[int]] = [[] for _ in range(3)]
    num_short = 0
    for _ in range(300):
        is_decode = draw.random() < 0.4 and all(rows)
        ends = [len(row) + (1 if is_decode else draw.randint(1, 9)) for row in rows]
        free = allocator.available_size()
        needed = sum(-(-e // PAGE) - -(-len(r) // PAGE) for r, e in zip(rows, ends, strict=True))
        is_there = extend(allocator, rows, ends)
        assert is_there == (needed * PAGE <= free)
        if not is_there:
            num_short += 1
            assert allocator.available_size() == free
            gone = draw.choice([row for row in rows if row])
            allocator.free(torch.tensor(gone))
            gone.clear()
        for row in rows:
            for start in range(0, len(row), PAGE):
                page = row[start : start + PAGE]
                assert page == list(range(page[0], page[0] + len(page)))
                assert page[0] % PAGE == 0
        used = [slot for row in rows for slot in row]
        assert len(set(used)) == len(used)
        pages = {slot // PAGE for slot in used}
        assert allocator.available_size() == PAGE * (PAGES - len(pages))
    assert num_short > 10


def test_platform_names_an_allocator_where_sglangs_needs_triton() -> None:
    """0.5.21 asks it for slots without pages, too."""
    create = CpuNativePlatform().get_paged_allocator_cls()
    if compat.PAGES_WITHOUT_TRITON:
        assert create is None
        return
    settings = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    kinds = [type(create(48, page_size=size, **settings)).__name__ for size in (1, 4)]
    assert kinds == ["TokenToKVPoolAllocator", "PagedAllocator"]
