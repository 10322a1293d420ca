"""How servers find each other's entries:
what one has told another finds, whatever both do, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from radix_ext import ChunkId  # noqa: E402
from sglang_chunkcache.storage.backend import Backend  # noqa: E402
from sglang_chunkcache.storage.key import Names, Place, StoredChunk  # noqa: E402
from sglang_chunkcache.storage.manifest import Row  # noqa: E402
from sglang_chunkcache.storage.pointer import MAX_POINTERS, POINTER_BYTES, Pointers  # noqa: E402
from tests.reference.memory_storage import MemoryStorage  # noqa: E402

CHUNK = StoredChunk("model", "tenant", ChunkId("c" * 32))


def pointers(storage: Any, secret: bytes = b"s") -> Pointers:
    """Those of one server."""
    return Pointers(Backend(storage), Names(secret))


def heads_of(storage: Any) -> list[str]:
    return [each.place.head for each in pointers(storage).find(CHUNK)]


def row(
    head: str = "h",
    *,
    num_before: int = 2,
    chunk: StoredChunk = CHUNK,
    scored: int = 2,
    exact: str = "",
) -> Row:
    prefix = (ChunkId(f"{i:032x}") for i in range(num_before))
    place = Place(*chunk, head, tuple(prefix), preprocessed=False, exact=exact)
    heads = ((1, 2), (0, 3)) if scored else ()
    name = Names(b"s").entry(place, scored, False, heads)
    return Row(name, place, 4, 999, scored, has_outward=False, heads=heads)


def test_another_server_finds_what_was_told() -> None:
    """All it must know to load the entry. Nobody finds another tenant's, model's or chunk's."""
    storage, told = MemoryStorage(), [row("a"), row("b", num_before=0, scored=0)]
    assert [pointers(storage).add(each) for each in told] == [True, True]
    assert pointers(storage).find(CHUNK) == told
    for field in ("model", "tenant", "chunk"):
        another: dict[str, Any] = {field: "another"}
        assert pointers(storage).find(CHUNK._replace(**another)) == []
    assert pointers(storage, b"another").find(CHUNK) == []
    assert {len(data) for data in storage.held.values()} == {POINTER_BYTES}


def test_places_are_few() -> None:
    storage = MemoryStorage()
    told = [pointers(storage).add(row(str(i))) for i in range(MAX_POINTERS + 1)]
    assert told == [True] * MAX_POINTERS + [False]
    pointers(storage).remove(row("3"))
    assert pointers(storage).add(row("again"))


def test_exact_entry_is_found_by_chain_and_by_chunk() -> None:
    """By its chain also where the chunk has no place left."""
    storage = MemoryStorage()
    told = [row(scored=0, exact=f"chain {i}") for i in range(MAX_POINTERS + 1)]
    assert all(pointers(storage).add(each) for each in told)
    assert pointers(storage).find(CHUNK) == told[:-1]
    chains = [each.place.pointed_from[0] for each in told]
    assert [pointers(storage).find(chain) for chain in chains] == [[each] for each in told]
    for each in told:
        pointers(storage).remove(each)
    assert storage.held == {}


def test_pointer_of_another_chain_is_none() -> None:
    storage, names = MemoryStorage(), Names(b"s")
    told = row(scored=0, exact="chain")
    chain, other = (StoredChunk("model", "tenant", ChunkId(each)) for each in ("chain", "other"))
    pointers(storage).add(told)
    lie = pointers(storage)._bytes(other, told)
    assert lie is not None
    storage.held[names.pointer(other, 0)] = lie
    assert pointers(storage).find(other) == []
    assert pointers(storage).find(chain) == [told]


def test_entry_behind_too_much_is_not_told() -> None:
    assert pointers(MemoryStorage()).add(row(num_before=100))
    assert not pointers(MemoryStorage()).add(row(num_before=200))


class Race(MemoryStorage):
    """Another server takes the place before the first `set`."""

    def __init__(self, other: Row) -> None:
        super().__init__()
        self.other: Row | None = other

    def set(self, key: str, value: Any = None, *rest: Any) -> bool:
        if self.other is not None:
            other, self.other = self.other, None
            pointers(self).add(other)
        return super().set(key, value)


def test_place_that_another_server_takes_first_is_left_to_it() -> None:
    """`set` overwrites nothing and reports success, so what was written is read back."""
    storage = Race(row("faster"))
    assert pointers(storage).add(row("slower"))
    assert pointers(storage).find(CHUNK) == [row("faster"), row("slower")]


@pytest.mark.parametrize("can_delete", [True, False])
def test_damaged_pointer_is_none(can_delete: bool) -> None:
    """What is behind it is found. Its place is used again where the storage can delete."""
    storage = MemoryStorage()
    if not can_delete:
        storage.delete = None  # type: ignore[assignment,method-assign]
    for each in "abc":
        pointers(storage).add(row(each))
    storage.held[Names(b"s").pointer(CHUNK, 1)][-1] ^= 1
    assert pointers(storage).find(CHUNK) == [row("a"), row("c")]
    assert pointers(storage).add(row("d"))
    assert heads_of(storage) == ([*"adc"] if can_delete else [*"acd"])


def test_pointer_of_another_chunk_is_none() -> None:
    """Whoever may write cannot pass one chunk's pointer off as another's."""
    storage, names = MemoryStorage(), Names(b"s")
    other = CHUNK._replace(tenant="other")
    pointers(storage).add(row(chunk=other))
    storage.held[names.pointer(CHUNK, 0)] = storage.held[names.pointer(other, 0)]
    assert pointers(storage).find(CHUNK) == []


STEP = st.tuples(st.sampled_from(["add", "remove", "damage"]), st.integers(0, 11))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_pointers_equal_a_set(steps: list[tuple[str, int]]) -> None:
    """What is told is found, unless its pointer was damaged or had no place, and leaves no gap."""
    storage, told = MemoryStorage(), list[str]()
    for turn, (what, number) in enumerate(steps):
        server, head = pointers(storage), str(number)
        if what == "add":
            has_room = head in told or len(told) < MAX_POINTERS
            assert server.add(row(head)) == has_room
            told += [head] * (has_room and head not in told)
        elif what == "remove":
            server.remove(row(head))
            told = [each for each in told if each != head]
        elif number < len(storage.held):
            data = storage.held[Names(b"s").pointer(CHUNK, number)]
            found = heads_of(storage)
            data[turn] ^= 1
            told = heads_of(storage)
            assert len(found) - len(told) <= 1
        assert sorted(heads_of(storage)) == sorted(told)
        assert set(storage.held) == {
            Names(b"s").pointer(CHUNK, number) for number in range(len(storage.held))
        }
        assert len(storage.held) <= MAX_POINTERS
