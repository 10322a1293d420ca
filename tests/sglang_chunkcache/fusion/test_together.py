"""Many requests at once compute what they compute one after the other."""

from __future__ import annotations

import random

import pytest

from tests.kit.costs import GROWING
from tests.kit.fused import Rank, report
from tests.kit.requests import HEAD, QUESTION, fused
from tests.reference.scheduler import FakeReq

pytestmark = pytest.mark.matrix

CHUNKS = [[number * 9 + at for at in range(1, 9)] for number in range(12)]
POPULAR, OTHERS = CHUNKS[:2], CHUNKS[2:]


def requests() -> list[FakeReq]:
    """Two chunks are the same in each, five others are not; the second one is promoted."""
    picked = random.Random(9)
    return [
        fused(*POPULAR, *picked.sample(OTHERS, 5), promoted_len=2, grows=True) for _ in range(12)
    ]


def rank() -> Rank:
    """Each chunk was served alone."""
    served = Rank(*[fused(chunk) for chunk in CHUNKS], capacity=2000, prefill_budget=1000)
    served.fuser.pricing.costs = GROWING
    return served


def fates(reqs: list[FakeReq]) -> tuple[int, int, int]:
    """Tokens that were exact, moved without being computed, and computed."""
    told = [report(req) for req in reqs]
    exact = sum(each.exact for each in told)
    relocated = sum(each.relocated for each in told)
    return exact, relocated, sum(len(req.origin_input_ids) for req in reqs) - exact - relocated


def test_twelve_at_once_compute_what_they_do_one_after_the_other() -> None:
    """The chain grows by the popular chunk once: the other eleven of the batch move it."""
    alone, together = requests(), requests()
    first = rank()
    for req in alone:
        first.fuser.pricing.costs = GROWING  # which every eighth prefill is fitted anew
        first.ask(req)
    second = rank()
    second.together(*together)
    popular, tail = len(POPULAR[1]), 12 * len(QUESTION)
    start = len(HEAD + POPULAR[0])
    assert fates(alone) == (12 * start + 11 * popular, 12 * 5 * 8, popular + tail)
    assert fates(together) == (12 * start, 12 * 5 * 8 + 11 * popular, popular + tail)


def test_chain_grows_by_the_next_one_if_its_request_was_aborted() -> None:
    served, (one, two, *_) = rank(), requests()
    served.start(one)
    served.forward()
    served.release(one, is_insert=False)
    assert served.ask(two).gap == len(POPULAR[1])
