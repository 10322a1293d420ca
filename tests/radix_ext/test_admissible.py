"""SET-CACHE's reorder-tolerant prefix, against all permutations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from radix_ext import ChunkId
from radix_ext.moved_plan import admissible
from tests.examples import examples
from tests.reference.naive_selectors import set_run
from tests.reference.sources import ids


def run(chunks: str, **prefixes: str) -> list[str]:
    """Prefixes as words, `_` the empty one: a="_ b" means KV computed after nothing and after b."""
    variants = [[ids(word.replace("_", "")) for word in prefixes.get(chunk, "").split()] for chunk in chunks]
    return ["".join(prefix) for prefix in admissible(ids(chunks), variants)]


def test_order_does_not_matter_but_the_set_does() -> None:
    """b-a was cached; a-b is asked for: a was computed after b."""
    assert run("abc", b="_", a="b", c="x") == ["b", ""]


def test_a_chain_is_needed_back_to_its_first_chunk() -> None:
    """a after b is worth nothing where b after nothing has gone."""
    assert run("ab", a="b", b="x") == []
    assert run("abc", a="_", b="a", c="ab ba") == ["", "a", "ab"]
    assert run("abc", a="_", b="", c="ab") == [""]


def test_a_chain_with_a_foreign_chunk_does_not_count() -> None:
    """Its later links have seen what this prompt does not hold."""
    assert run("ab", a="_", x="a", b="ax") == [""]


def test_the_run_must_lead() -> None:
    """b and c are a chain, but a comes before them."""
    assert run("abc", b="_", c="b") == []


def test_the_longest_chain_wins_then_the_one_nearest_to_the_request() -> None:
    """Both orders of a, b are cached: the request's own is used. With c, only the other goes on."""
    assert run("ab", a="_ b", b="_ a") == ["", "a"]
    assert run("abc", a="_ b", b="_ a", c="ba") == ["b", "", "ba"]


def test_a_repeated_chunk_ends_the_run() -> None:
    """A set holds it once."""
    assert run("aba", a="_ ab", b="a") == ["", "a"]


def test_nothing_to_match() -> None:
    """No chunks, no KV."""
    assert run("") == []
    assert run("ab") == []


@given(data=st.data(), length=st.integers(0, 4))
@settings(max_examples=examples(300))
def test_equals_all_permutations(data: st.DataObject, length: int) -> None:
    """Dense enough in links that whole chains occur."""
    chunks = ids("abcd"[:length])
    variants: list[set[tuple[ChunkId, ...]]] = [set() for _ in chunks]
    for order in data.draw(st.lists(st.permutations("abcdx"), max_size=4)):
        for depth, name in enumerate(order):
            if name in chunks and data.draw(st.integers(0, 5)):
                variants[chunks.index(ChunkId(name))].add(ids("".join(order[:depth])))
    assert admissible(chunks, variants) == set_run(chunks, variants)
