"""The front's view of a stock tree against a slow one: the set of all live pages, searched page by
page for every chunk that was ever asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import pytest

pytest.importorskip("sglang")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)

from radix_ext import ChainId, Tier, extend_chain, root_chain
from sglang_chunkcache.front.request import Identity, Passage, Planned
from tests.kit.front_bench import ME, make_output
from tests.kit.integrity import check_tree
from tests.kit.kv_events import HearingBench, encoded

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
TIERS = {GPU: Tier.DEVICE, CPU: Tier.HOST}
PASSAGES = [Passage(str(n), letter * n) for n, letter in enumerate("abcde", start=1)]
WHO = [ME, Identity("me", cache_salt="salt")]


class Page(NamedTuple):
    """A live page in one medium."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]
    salt: str | None
    medium: StorageMedium


class Machine(RuleBasedStateMachine):
    """A tree in pages, on the device and in host memory, that loses its leaves first."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.bench = HearingBench(self.page_size)
        self.live: set[Page] = set()
        """As the rank has it."""
        self.heard: set[Page] = set()
        """As far as batches were heard."""
        self.unheard: list[tuple[Any, set[Page]]] = []
        self.hashes: dict[Any, int] = {}
        self.numbers, self.seqs = count(1), count()
        self.asked: list[Planned] = []

    @rule(
        chosen=st.lists(st.sampled_from(PASSAGES), min_size=1, max_size=3, unique=True),
        who=st.sampled_from(WHO),
    )
    def ask(self, chosen: list[Passage], who: Identity) -> None:
        """What is found is not said: several answers were asked for."""
        bench = self.bench
        request = bench.ask("q", *chosen, who=who, order="retriever", num_answers=2)
        parent = None
        for page in self._pages(request.planned):
            key = (parent, page, who.cache_salt)
            block = self.hashes.setdefault(key, next(self.numbers))
            self._store([Page(block, *key, GPU)])
            parent = block
        bench.observe(request, make_output([65], 0, "stop", 0, None))
        bench.end(request)
        self.asked.append(request.planned)

    @rule(data=st.data())
    @precondition(lambda self: any(page.medium is GPU for page in self.live))
    def back_up(self, data: st.DataObject) -> None:
        """A page, behind all before it, which are stored at once."""
        page: Page | None = data.draw(self._pages_of(GPU))
        path: list[Page] = []
        while page is not None:
            path.append(page._replace(medium=CPU))
            page = next((each for each in self.live if each.hash == path[-1].parent), None)
        self._store(path[::-1])

    @rule(data=st.data(), num=st.integers(1, 15))
    @precondition(lambda self: self._leaves())
    def evict(self, data: st.DataObject, num: int) -> None:
        """A branch from its end, as far as it may go."""
        page = data.draw(st.sampled_from(self._leaves()))
        for _ in range(num):
            self.live.discard(page)
            self._publish(BlockRemoved([page.hash], medium=page.medium))
            above = page.parent, page.medium
            leaves = (each for each in self._leaves() if (each.hash, each.medium) == above)
            page = next(leaves, None)
            if page is None:
                break

    @rule()
    def flush(self) -> None:
        self.live.clear()
        self._publish(AllBlocksCleared())

    @rule(num=st.integers(1, 20))
    def hear(self, num: int) -> None:
        heard, self.unheard = self.unheard[:num], self.unheard[num:]
        if heard:
            self.bench.mirror.take(next(self.seqs), encoded([event for event, _ in heard]))
            self.heard = heard[-1][1]

    @invariant()
    def chunks_are_where_their_pages_are(self) -> None:
        tree = self.bench.bookkeeper.tree
        check_tree(tree)
        expected: dict[ChainId, Tier | None] = {}
        for planned in self.asked if self.bench.mirror.is_told else ():
            for chain, span in zip(self._chains(planned), planned.area, strict=True):
                num_pages = span.end // self.page_size
                expected[chain] = self._tier(planned, num_pages) if num_pages else Tier.DEVICE
        for chain, tier in expected.items():
            node = tree.nodes.find(chain)
            assert (node.tier(0) if node else None) is tier
        if self.bench.mirror.is_told:
            held = [node for node in tree.nodes.by_chain.values() if node.is_held(0)]
            assert len(held) == sum(tier is not None for tier in expected.values())

    def _chains(self, planned: Planned) -> list[ChainId]:
        chain, found = root_chain(planned.namespace), list[ChainId]()
        for span in planned.area:
            found.append(chain := extend_chain(chain, span.chunk))
        return found

    def _pages(self, planned: Planned) -> list[tuple[int, ...]]:
        ids, size = planned.input_ids, self.page_size
        return [tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]

    def _tier(self, planned: Planned, num_pages: int) -> Tier | None:
        """By looking at all live pages for each of the prompt's."""
        parent, found = None, None
        for page in self._pages(planned)[:num_pages]:
            key = (parent, page, planned.draft.identity.cache_salt)
            at = [each for each in self.heard if each[1:4] == key]
            if not at:
                return None
            parent, found = at[0].hash, min(TIERS[each.medium] for each in at)
        return found

    def _pages_of(self, medium: StorageMedium) -> st.SearchStrategy[Page]:
        pages = sorted(page for page in self.live if page.medium is medium)
        return st.sampled_from(pages)

    def _leaves(self) -> list[Page]:
        """What may leave next: nothing is behind it in its medium, and what is behind it anywhere
        is not left alone."""
        found = []
        for page in sorted(self.live):
            behind = {each.medium for each in self.live if each.parent == page.hash}
            others = {each.medium for each in self.live if each.hash == page.hash} - {page.medium}
            if page.medium not in behind and (not behind or others):
                found.append(page)
        return found

    def _store(self, pages: Sequence[Page]) -> None:
        self.live.update(pages)
        self._publish(
            BlockStored(
                block_hashes=[page.hash for page in pages],
                parent_block_hash=pages[0].parent,
                token_ids=[token for page in pages for token in page.tokens],
                block_size=self.page_size,
                lora_id=None,
                medium=pages[0].medium,
                cache_salt=pages[0].salt,
            )
        )

    def _publish(self, event: Any) -> None:
        self.unheard.append((event, set(self.live)))


class PagedMachine(Machine):
    page_size = 4


class LongPagedMachine(Machine):
    """A head and its first chunk may be shorter than a page."""

    page_size = 8


TestPageSize1, TestPageSize4, TestPageSize8 = (
    machine.TestCase for machine in (Machine, PagedMachine, LongPagedMachine)
)
for case in (TestPageSize1, TestPageSize4, TestPageSize8):
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
