"""A rank's log, answers that may be late or lost, and the front's mirror of it: each event once;
it keeps up under load, and it heals.

    .venv/bin/python -m pytest -n 0 -s tests/sglang_chunkcache/front/test_rank_mirror.py

The tests of load show figures: how far the mirror is behind with many requests under way, and
what it knows after a gap.
"""

from __future__ import annotations

from collections import deque
from functools import reduce
from operator import xor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from radix_ext import AccessTable, ChainId, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.event_log import MAX_EVENTS_PER_ANSWER, EventLog
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Evicted, Inserted, Moved
from sglang_chunkcache.wire.message import encode
from sglang_chunkcache.wire.report import Answer
from sglang_chunkcache.wire.state import RankState
from tests.examples import examples
from tests.kit.front_planning import chain, held, inserted, keep_up, make_mirror, read, state_of
from tests.kit.integrity import check_tree


def test_mirror_holds_what_the_rank_holds() -> None:
    log, (tree, mirror) = EventLog(100), make_mirror()
    for event in (
        inserted("a", promoted=True),
        inserted("a", "b"),
        inserted("a", "c"),
        Evicted(chain("a", "b")),
    ):
        log.append(event)
    read(log, mirror)
    assert not held(tree, "a", "b")
    nodes = tree.match("n", [ChunkId("a"), ChunkId("c")], rank=0)
    assert [node.promoted for node in nodes] == [True, False]
    assert tree.holdings.digest(0) == (2, chain("a") ^ chain("a", "c"))


def test_apply_follows_a_chain_to_the_host_and_back() -> None:
    log, (tree, mirror) = EventLog(100), make_mirror()
    seen = []
    for event in (inserted("a", promoted=True), Moved(chain("a"), Tier.HOST), inserted("a")):
        log.append(event)
        read(log, mirror)
        node = tree.nodes.find(chain("a"))
        assert node is not None
        seen.append((node.tier(0), node.promoted, node.hits))
    # the front's own mark may be newer
    assert seen == [(tier, True, 0) for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE)]


def test_mirror_is_compared_with_the_ranks_state() -> None:
    """Up to date and alike, up to date and not, behind; another epoch makes it start again."""
    log, (_, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    read(log, mirror)
    events = Batch(log.epoch, 1, (), seq=1, num_nodes=1, digest=chain("a"))

    def compared(**changes: Any) -> dict[str, Any]:
        return mirror.compared(RankState(0, structs.replace(events, **changes), {}))

    counts = {"restarts": 0, "gaps": 0, "resyncs": 0}
    shown = {"chunk_nodes": 1, "events_behind": 0, "agrees": True, **counts}
    assert compared() == shown
    assert not mirror.is_behind
    assert compared(digest=0) == {**shown, "agrees": False}
    assert mirror.is_behind
    assert compared(seq=3) == {**shown, "events_behind": 2, "agrees": None}
    restarted = compared(epoch=log.epoch + 1, start=0, seq=0, digest=0, num_nodes=0)
    assert restarted == {**shown, "chunk_nodes": 0, "restarts": 1}
    assert not mirror.is_behind


def test_mirror_learns_of_a_start_before_there_is_an_answer() -> None:
    """What the rank's state brings with it, once: the first answer brings it again."""
    log, (tree, mirror) = EventLog(100), make_mirror()
    log.append(inserted("a"))
    state = state_of(log)
    assert mirror.compared(state)["agrees"] is True
    assert held(tree, "a")
    read(log, mirror)
    assert (mirror.compared(state)["agrees"], mirror.acknowledgement.seq) == (True, 1)


def test_unknown_parent_is_counted_not_raised() -> None:
    """The tree is bounded: a chain it has forgotten is no error."""
    tree, mirror = make_mirror()
    mirror.apply(Batch(1, 0, (inserted("a", "b"), Evicted(chain("x"))), 2, 0, 0))
    assert tree.num_unknown_notices == 2
    assert mirror.acknowledgement == Acknowledgement(1, 2)


# Under load


class Pool:
    """A rank that holds at most `capacity` chunk nodes, the oldest chains leave first."""

    def __init__(self, capacity: int = 3000) -> None:
        self.log, self.capacity = EventLog(65_536), capacity
        self.held: deque[ChainId] = deque()
        self._num_chunks = 0

    def prefill(self, num_new: int) -> None:
        """A request with so many chunks that nobody has sent before."""
        parent: ChainId | None = None
        for _ in range(num_new):
            event = Inserted(ChunkId(f"c{self._num_chunks}"), 200, parent, "ns", False)
            self._num_chunks += 1
            self.log.append(event)
            self.held.append(event.chain)
            parent = event.chain
        while len(self.held) > self.capacity:
            self.log.append(Evicted(self.held.popleft()))


@pytest.mark.parametrize("num_under_way", [16, 100, 200, 400])
def test_the_mirror_is_at_most_one_answer_behind(num_under_way: int) -> None:
    """Each request brings 10 new chunks and has 10 others evicted. One is sent for each that is
    answered, with what has been read by then; when it is prefilled, as many as are under way have
    been answered since."""
    rank, (tree, mirror) = Pool(), make_mirror(200_000)
    waiting, behind, num_bytes = 0, 0, 0
    for _ in range(3 * num_under_way + 1000):
        rank.log.acknowledge(mirror.acknowledgement)  # it arrives, and waits
        waiting += 1
        if waiting < num_under_way:
            continue
        waiting -= 1
        rank.prefill(10)
        behind = max(behind, rank.log.seq - mirror.acknowledgement.seq)
        batch = rank.log.unread()
        num_bytes = max(num_bytes, len(encode(Answer(batch))))
        mirror.apply(batch)
    print(f"{num_under_way} under way: at most {behind} events behind, {num_bytes} bytes an answer")
    assert behind <= 20
    assert all(tree.nodes.find(chain) is not None for chain in rank.held)
    assert (mirror.num_gaps, mirror.is_behind) == (0, False)
    assert num_bytes < 400_000


@pytest.mark.parametrize("backlog", [10_000, 70_000], ids=["backlog", "gap"])
def test_the_mirror_heals_without_requests(backlog: int) -> None:
    """A backlog that no answer can hold, or not even the log."""
    log, (tree, mirror) = EventLog(65_536), make_mirror(200_000)
    add(log, "A", "AB")
    read(log, mirror)
    for i in range(backlog):
        log.append(inserted(f"x{i}"))
    read(log, mirror)
    num_asked = keep_up(log, mirror)
    known = [node.chunk_id for node in tree.match("n", [ChunkId("A"), ChunkId("B")], rank=0)]
    chunks = [Chunk(ChunkId(name), 4) for name in "BA"]
    ordered = order_chunks(
        "tree", tree, AccessTable(1000), "n", chunks, rank=0, max_visits=64
    ).chunks
    print(f"{backlog} events: asked {num_asked} times, {mirror.num_gaps} gaps")
    assert known == [chunk.id for chunk in ordered] == ["A", "B"]
    assert tree.holdings.digest(0) == (log.num_nodes, log.digest) == (backlog + 2, log.digest)
    assert tree.num_unknown_notices == 0
    assert (mirror.num_gaps, mirror.num_resyncs) == ((1, 1) if backlog > log.max_events else (0, 0))
    # One round for each full message. What comes back to the front while nodes are told are not the
    # same events again.
    assert num_asked <= 2 * (backlog // (MAX_EVENTS_PER_ANSWER - 1) + 1) + 1


def add(log: EventLog, *paths: str) -> None:
    for path in paths:
        log.append(inserted(*path))


def evict(log: EventLog, *paths: str) -> None:
    for path in paths:
        log.append(Evicted(chain(*path)))


def told(log: EventLog, mirror: RankMirror) -> RankState:
    return state_of(log, mirror.reading)


def names_known(tree: ChunkPrefixTree) -> str:
    return "".join(name for name in "abcdefgh" if tree.match("n", [ChunkId(name)], rank=0))


def test_what_happens_between_two_parts_is_told_once() -> None:
    """Evictions, of nodes told before or not; a child born before its parent is told."""
    log, (tree, mirror) = EventLog(2, max_told=3), make_mirror()
    add(log, *"abcd")
    read(log, mirror)  # a gap: all is to be told, three at a time
    mirror.hear(told(log, mirror))
    assert names_known(tree) == "ab"
    evict(log, "a", "c")
    add(log, "dx")
    keep_up(log, mirror)
    assert names_known(tree) == "bd"
    assert tree.nodes.find(chain("d", "x")) is not None
    assert tree.num_unknown_notices == 0


def test_a_rank_that_answers_while_others_are_asked_is_told_again() -> None:
    """Each of its states is overtaken by an answer: another rank was slower to tell its own."""
    log, (tree, mirror) = EventLog(40, max_told=20), make_mirror(1000)
    for number in range(100):
        log.append(inserted(f"x{number}"))
    mirror.apply(log.unread())
    num_asked = 0
    while mirror.is_behind and num_asked < 50:
        state = told(log, mirror)
        num_asked += 1
        log.append(inserted(f"y{num_asked}"))
        mirror.apply(log.unread())
        mirror.hear(state)
    assert num_asked < 20
    assert tree.holdings.digest(0) == (log.num_nodes, log.digest)
    assert mirror.num_resyncs == 1


def test_a_flush_ends_it() -> None:
    """There is nothing to tell any more, and parts of what was are not believed."""
    log, (tree, mirror) = EventLog(2, max_told=3), make_mirror()
    add(log, *"abcd")
    read(log, mirror)  # a gap: all is to be told, three at a time
    log.acknowledge(mirror.acknowledgement)
    mirror.hear(told(log, mirror))
    old = told(log, mirror)
    log.restart()
    add(log, "e")
    read(log, mirror)
    mirror.hear(old)
    assert not mirror.is_behind
    assert names_known(tree) == "e"


def test_what_the_tree_forgot_is_told_again_when_there_is_room() -> None:
    """Other ranks' nodes fill the tree, and leave again. While it is full nobody is asked."""
    log, (tree, mirror) = EventLog(100), make_mirror(6)
    add(log, *"abcd")
    read(log, mirror)
    for name in "uvwx":
        tree.insert("n", [Chunk(ChunkId(name), 4)], rank=1, tier=Tier.DEVICE, promoted_len=0)
    assert names_known(tree) == "cd"
    read(log, mirror)
    assert not mirror.is_behind
    tree.drop_rank(1)
    read(log, mirror)
    assert keep_up(log, mirror) == 1
    assert names_known(tree) == "abcd"


def test_a_difference_that_stays_is_not_told_over_and_over() -> None:
    """Whatever its reason, all nodes are told once for as many events as there are nodes."""
    log, (_, mirror) = EventLog(100), make_mirror()
    add(log, *"abcd")
    log.digest ^= 1
    read(log, mirror)
    assert keep_up(log, mirror) == 1
    for name in "efgh":
        add(log, name)
        read(log, mirror)
        assert not mirror.is_behind
    evict(log, *"abcd")
    read(log, mirror)
    assert keep_up(log, mirror) == 1


# Whatever happens


class MirrorMachine(RuleBasedStateMachine):
    """Rank, log, messages under way, mirror, and a tree that other ranks use, too."""

    @initialize(
        max_events=st.integers(3, 40),
        max_told=st.integers(2, 8),
        max_nodes=st.sampled_from([5, 12, 1000]),
    )
    def start(self, max_events: int, max_told: int, max_nodes: int) -> None:
        self.log = EventLog(max_events, max_told=max_told)
        self.tree = ChunkPrefixTree(max_nodes=max_nodes)
        self.mirror = RankMirror(self.tree, 0)
        self.held: dict[tuple[str, ...], Tier] = {}
        self.acks: list[Acknowledgement] = [self.mirror.acknowledgement]
        self.answers: list[Batch] = []
        self.states: list[RankState] = []

    # The rank

    @rule(below=st.integers(0, 30), name=st.sampled_from("abc"))
    def insert(self, below: int, name: str) -> None:
        """A new node, or one that comes back to the device."""
        parents = [(), *self.held]
        path = (*parents[below % len(parents)], name)
        if self.held.get(path) is not Tier.DEVICE:
            self.held[path] = Tier.DEVICE
            self.log.append(inserted(*path))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 30))
    def evict(self, which: int) -> None:
        parents = {path[:-1] for path in self.held}
        leaves = [path for path in self.held if path not in parents]
        path = leaves[which % len(leaves)]
        del self.held[path]
        self.log.append(Evicted(chain(*path)))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 30))
    def move(self, which: int) -> None:
        path = [*self.held][which % len(self.held)]
        self.held[path] = Tier.HOST
        self.log.append(Moved(chain(*path), Tier.HOST))

    @rule(is_rare=st.integers(0, 5))
    def flush(self, is_rare: int) -> None:
        if not is_rare:
            self.held.clear()
            self.log.restart()

    # What is under way

    @rule(ago=st.integers(0, 9))
    def request(self, ago: int) -> None:
        """It arrives with what the front had read when it was sent."""
        self.log.acknowledge(self.acks[-1 - ago % len(self.acks)])

    @rule()
    def answer(self) -> None:
        self.answers.append(self.log.unread())

    @rule()
    def ask(self) -> None:
        self.states.append(state_of(self.log, self.mirror.reading))

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 9), is_lost=st.booleans(), is_kept=st.booleans())
    def deliver(self, which: int, is_lost: bool, is_kept: bool) -> None:
        """In any order, twice or not at all."""
        index = which % len(self.answers)
        batch = self.answers[index] if is_kept else self.answers.pop(index)
        if not is_lost:
            self.mirror.apply(batch)
            self.acks.append(self.mirror.acknowledgement)

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 9), is_kept=st.booleans())
    def tell(self, which: int, is_kept: bool) -> None:
        index = which % len(self.states)
        self.mirror.hear(self.states[index] if is_kept else self.states.pop(index))
        self.acks.append(self.mirror.acknowledgement)

    # The tree

    @rule(names=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True))
    def others(self, names: list[str]) -> None:
        """Another rank's nodes, some of them ours: the tree may forget any."""
        chunks = [Chunk(ChunkId(name), 4) for name in names]
        self.tree.insert("n", chunks, rank=1, tier=Tier.DEVICE, promoted_len=0)

    @rule()
    def others_leave(self) -> None:
        self.tree.drop_rank(1)

    @rule()
    def settle(self) -> None:
        """Answers, and what they take: rank and mirror are alike if the tree has room, after as
        many events as there are nodes at the latest."""
        self.tree.drop_rank(1)
        self.answers.clear()
        for _ in range(len(self.held) // 2 + 1):
            for event in (inserted("z"), Evicted(chain("z"))):
                self.log.append(event)
                read(self.log, self.mirror)
                keep_up(self.log, self.mirror)
        self.acks.append(self.mirror.acknowledgement)
        assert self.mirror.acknowledgement == Acknowledgement(self.log.epoch, self.log.seq)
        if len(self.held) < self.tree.max_nodes:
            assert self.tree.holdings.digest(0) == (len(self.held), self.log.digest)
            nodes = {path: self.tree.nodes.find(chain(*path)) for path in self.held}
            assert {path: node and node.tier(0) for path, node in nodes.items()} == self.held

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "log"):
            return
        digest = reduce(xor, (chain(*path) for path in self.held), 0)
        assert (self.log.num_nodes, self.log.digest) == (len(self.held), digest)
        check_tree(self.tree)


MirrorMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40)
TestMirrorMachine: Any = MirrorMachine.TestCase
