"""A rank whose tree is SGLang's own and publishes KV events: what the front makes of them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)

from radix_ext import Tier
from sglang_chunkcache.front import block_index
from sglang_chunkcache.front.request import Identity, Passage
from tests.kit.front_bench import ME, A, Asked, B, C, make_output
from tests.kit.integrity import check_tree
from tests.kit.kv_events import HearingBench, encoded, state

pytestmark = pytest.mark.matrix

SALTED = Identity("me", cache_salt="other")


def serve(
    bench: HearingBench,
    *passages: Passage,
    who: Identity = ME,
    is_told: bool = True,
    **options: Any,
) -> Asked:
    """A request and its answer; events come after it, as they mostly do."""
    request = bench.ask("q", *passages, who=who)
    found = bench.rank.run(request.input_ids, [65, 66], cache_salt=who.cache_salt)
    bench.observe(request, make_output([65, 66], found, "stop", 0, None))
    bench.end(request)
    if is_told:
        bench.listen()
    return request


def held(bench: HearingBench, *passages: Passage, who: Identity = ME) -> int:
    """How many of them are expected to be cached, in this order."""
    return bench.plan("q", *passages, who=who, order="retriever").planned_len


def counted(bench: HearingBench) -> dict[str, int]:
    counts: dict[str, int] = bench.bookkeeper.metrics.stats()["mirrors_dropped"]
    return counts


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_stored_and_removed_chunks_are_known(page_size: int) -> None:
    bench = HearingBench(page_size)
    bench.rank.flush()
    bench.listen()
    serve(bench, A, B, is_told=False)
    assert held(bench, A, B) == 0, "nothing has said so yet"
    bench.listen()
    assert held(bench, A, B) == 2
    second = serve(bench, C, B, A)
    assert second.order[:2] == ["a", "b"]
    assert second.planned_len == second.hit_len == 2
    for _ in range(100):  # leaf by leaf; nobody asks meanwhile
        before = [held(bench, A, B, C), held(bench, A)]
        bench.rank.evict(1)
        bench.listen()
        assert [held(bench, A, B, C), held(bench, A)] <= before
        check_tree(bench.bookkeeper.tree)
    assert (held(bench, A, B, C), bench.mirror.num_corrections) == (0, 0)
    third = serve(bench, A, B)
    assert (third.planned_len, third.hit_len, held(bench, A, B)) == (0, 0, 2)
    told = bench.mirror.compared(state(page_size=page_size))
    assert (told["is_told"], told["events"]) == (True, len(bench.rank.batches))
    assert told["assumed_evictions"] == told["assumed_tokens"] == 0
    assert told["chunk_nodes"] == 2


def test_events_before_the_answer_are_no_corrections() -> None:
    """They tell of what this very request computes, and of what follows it for another."""
    bench = HearingBench(4)
    first, second = (bench.ask("q", *each, order="retriever") for each in ((A, B), (A, C)))
    for request in (first, second):
        bench.rank.run(request.input_ids, [65, 66])
    bench.listen()
    for request in (first, second):
        bench.observe(request, make_output([65, 66], 0, "stop", 0, None))
        bench.end(request)
    assert (held(bench, A, B), held(bench, A, C), bench.mirror.num_corrections) == (2, 2, 0)


def test_eviction_that_is_told_late_changes_nothing() -> None:
    """The answer comes first, and shows what has left; what is stored again is there again."""
    bench = HearingBench(4)
    serve(bench, A, B)
    bench.rank.evict(1000)
    second = serve(bench, A, B, is_told=False)
    assert (second.planned_len, second.hit_len) == (2, 0)
    assert bench.mirror.num_corrections == 1
    bench.listen()
    assert held(bench, A, B) == 2


def test_flush_is_told() -> None:
    """And conversations know that another cache began."""
    bench = HearingBench()
    serve(bench, A)
    epoch = bench.mirror.acknowledgement.epoch
    bench.rank.flush()
    bench.listen()
    assert held(bench, A) == 0
    assert bench.mirror.acknowledgement.epoch > epoch
    serve(bench, A)
    assert held(bench, A) == 1


def test_salts_are_apart() -> None:
    bench = HearingBench()
    serve(bench, A, who=SALTED)
    assert (held(bench, A), held(bench, A, who=SALTED)) == (0, 1)


@pytest.mark.parametrize("tells_adapter", [True, False])
def test_what_events_do_not_tell_is_not_mirrored(tells_adapter: bool) -> None:
    """No release tells an `extra_key`. With events or, while they are not believed, without."""
    bench = HearingBench(tells_adapter=tells_adapter)
    for who in (Identity("me", extra_key="x"), Identity("me", lora="l")):
        serve(bench, A, who=who)
        assert held(bench, A, who=who) == 0
    bench.mirror.drop("gap")
    for who, expected in (
        (Identity("me", extra_key="x"), 0),
        (Identity("me", lora="l"), int(tells_adapter)),
        (ME, 1),
    ):
        serve(bench, B, who=who)
        assert held(bench, B, who=who) == expected


def test_adapters_are_apart() -> None:
    """By the name that the event tells."""
    bench = HearingBench()
    serve(bench, A, is_told=False)
    request = serve(bench, A, who=Identity("me", lora="l"), is_told=False)
    ids = request.input_ids
    event = {
        "type": "BlockStored",
        "block_hashes": [*range(1, len(ids) + 1)],
        "parent_block_hash": None,
        "token_ids": ids,
        "block_size": 1,
        "lora_id": None,
        "lora_name": "l",
        "is_unknown": True,
    }
    bench.mirror.take(0, msgspec.msgpack.encode([1.0, [event], 0]))
    assert (held(bench, A), held(bench, A, who=Identity("me", lora="l"))) == (0, 1)


def test_pairs_of_tokens() -> None:
    """As speculative decoding keeps them: a page has one more token than it is long."""
    bench = HearingBench(4)
    bench.mirror._blocks = None
    bench.mirror.hear(state(page_size=4, is_paired=True))
    request = serve(bench, A, B, is_told=False)
    ids, num_pages = request.input_ids, (request.area[1].end - 1) // 4
    pairs = [*pairwise(ids)]
    for upto, chunks in ((num_pages - 1, 1), (num_pages, 2)):
        event = BlockStored(
            [*range(1, upto + 1)], None, pairs[: 4 * upto], 4, None, medium=StorageMedium.GPU
        )
        bench.mirror.take(bench.mirror.next_seq, encoded([event]))
        assert held(bench, A, B) == chunks


def hashes_of(bench: HearingBench) -> list[int]:
    """Of all pages stored, in their order."""
    events = [each for batch in bench.rank.batches for each in msgspec.msgpack.decode(batch)[1]]
    return [each for event in events for each in event.get("block_hashes", ())]


def test_tiers_are_told() -> None:
    """The fastest counts; of chains that are as long that on the device is preferred."""
    bench = HearingBench()
    left, right = Passage("l", "<lll>"), Passage("r", "<rrr>")
    ids = [*serve(bench, left).input_ids, 65, 66]
    blocks = hashes_of(bench)
    serve(bench, right)
    (chunk,) = (span.chunk for span in bench.plan("q", left).area)

    def tell(*events: Any) -> tuple[Tier | None, list[str]]:
        """Where the left one is then, and the order of both."""
        bench.mirror.take(bench.mirror.next_seq, encoded(events))
        nodes = bench.bookkeeper.tree.nodes.by_chain.values()
        tier = next((node.tier(0) for node in nodes if node.chunk_id == chunk), None)
        return tier, bench.plan("q", left, right, order="tree").order

    def stored(medium: str | None) -> BlockStored:
        return BlockStored(blocks, None, ids, 1, None, medium=medium)

    def removed(medium: str | None) -> BlockRemoved:
        return BlockRemoved(blocks, medium=medium)

    host, disk = StorageMedium.CPU, StorageMedium.DISK
    assert tell(stored(host)) == (Tier.DEVICE, ["l", "r"])
    assert tell(removed("GPU")) == (Tier.HOST, ["r", "l"])
    assert tell(stored(disk), removed(host)) == (Tier.DISK, ["r", "l"])
    assert tell(stored("of another kind")) == (Tier.DISK, ["r", "l"])
    assert tell(stored(None)) == (Tier.DEVICE, ["l", "r"])
    assert tell(removed(None), removed(disk)) == (None, ["r", "l"])


BAD = {
    "malformed": [
        b"",
        b"\x93\x01\x90",
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"]}], 0]),
        encoded([BlockStored([1, 2], None, [1], 1, None)]),
        encoded([BlockStored([1], None, [1, 2], 2, None)]),
        b"\x93\x01\x91\x82\xa4type\xabBlockStored\xa1x" + b"\x91" * 100_000,
    ],
    "foreign": [encoded([AllBlocksCleared()], rank=3)],
}


def test_number_of_a_foreign_batch_says_nothing() -> None:
    bench = HearingBench()
    serve(bench, A)
    bench.mirror.take(1000, encoded([AllBlocksCleared()], rank=3))
    assert counted(bench) == {"foreign": 1}
    bench.rank.flush()
    bench.mirror.take(bench.mirror.next_seq, bench.rank.batches[-1])
    serve(bench, A, is_told=False)
    bench.mirror.take(bench.mirror.next_seq, bench.rank.batches[-1])
    assert (held(bench, A), counted(bench)) == (1, {"foreign": 1})


@pytest.mark.parametrize(
    ("reason", "payload"),
    [(reason, payload) for reason, payloads in BAD.items() for payload in payloads],
    ids=[f"{reason}{n}" for reason, payloads in BAD.items() for n in range(len(payloads))],
)
def test_what_cannot_be_believed_drops_the_mirror(reason: str, payload: bytes) -> None:
    """Counted once. From then on the least recent use is assumed, until the cache is empty."""
    bench = HearingBench()
    serve(bench, A)
    for _ in range(2):
        bench.mirror.take(bench.mirror.next_seq, payload)
    assert (held(bench, A), counted(bench)) == (0, {reason: 1})
    serve(bench, A, is_told=False)
    assert held(bench, A) == 1, "as the answer shows"
    assert bench.mirror.num_tokens > 0
    bench.rank.evict(1000)
    bench.mirror.take(bench.mirror.next_seq, bench.rank.batches[-1])
    assert held(bench, A) == 1
    bench.rank.flush()
    bench.mirror.take(bench.mirror.next_seq, bench.rank.batches[-1])
    assert (held(bench, A), bench.mirror.num_tokens) == (0, 0)
    serve(bench, A, is_told=False)
    bench.mirror.take(bench.mirror.next_seq, bench.rank.batches[-1])
    assert (held(bench, A), bench.mirror.num_tokens) == (1, 0)


@pytest.mark.parametrize(("step", "reason"), [(0, "repeated"), (-1, "repeated"), (2, "gap")])
def test_batches_come_in_their_order(step: int, reason: str) -> None:
    bench = HearingBench()
    serve(bench, A)
    serve(bench, B)
    seq = bench.mirror.next_seq - 1 + step
    bench.mirror.take(seq, encoded([BlockRemoved([1])]))
    assert (held(bench, A), counted(bench)) == (0, {reason: 1})
    assert bench.mirror.next_seq == seq + 1


def test_rank_that_falls_silent_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers go on. Where events come, prompts that wait in vain are forgotten, no more."""
    monkeypatch.setattr(block_index, "MAX_WAITING", 3)
    bench = HearingBench()
    serve(bench, A)
    for i in range(8):
        serve(bench, Passage(f"p{i}", f"<{i}>"), is_told=False)
        bench.mirror.take(bench.mirror.next_seq, encoded([BlockRemoved([1])]))
    assert counted(bench) == {}
    for i in range(8):
        serve(bench, Passage(f"q{i}", f"<q{i}>"), is_told=False)
    assert counted(bench) == {"silent": 1}


def test_answers_teach_until_the_first_event() -> None:
    """As without events. What was assumed gives way to what is told."""
    bench = HearingBench()
    serve(bench, A, is_told=False)
    assert held(bench, A) == 1
    bench.mirror.take(0, encoded([BlockRemoved([5])]))
    assert (held(bench, A), bench.mirror.num_tokens, bench.mirror.is_told) == (0, 0, True)


@pytest.mark.parametrize("page_size", [1, 4])
def test_view_is_sglangs_tree(page_size: int) -> None:
    """Under eviction, with every event: what is planned is what is found."""
    draw = random.Random(5)
    bench = HearingBench(page_size)
    passages = [Passage(f"p{i}", chr(97 + i) * draw.randint(5, 15)) for i in range(12)]
    found = 0
    for _ in range(150):
        chosen = draw.sample(passages, draw.randint(1, 4))
        request = serve(bench, *chosen, who=draw.choice([ME, SALTED]))
        assert request.planned_len == request.hit_len
        found += request.hit_len
        if draw.random() < 0.5:
            bench.rank.evict(draw.randint(1, 60))
            bench.listen()
        check_tree(bench.bookkeeper.tree)
    assert found > 50, found
    assert bench.mirror.num_corrections == 0
