"""Places against a plain list of notes; bounds."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from radix_ext import ChunkId, Place, Places

notes = st.lists(
    st.tuples(*map(st.sampled_from, ("tu", "xyz", "abc")), st.integers(0, 9)), max_size=30
)


@given(sent=notes, max_places=st.integers(1, 12))
def test_places_equal_a_list_of_notes(
    sent: list[tuple[Any, Any, Any, int]], max_places: int
) -> None:
    """The last place behind a text, and the last text;
    of each kind the most recently noted ones."""
    places = Places(max_places=max_places)
    for tenant, text, chunk, chain in sent:
        places.note(tenant, text, ChunkId(chunk), Place(chain, 0, 1))
    behind = latest(((text, chunk), chain) for _, text, chunk, chain in sent)[-max_places:]
    texts = latest(((tenant, chunk), text) for tenant, text, chunk, _ in sent)[-max_places:]
    assert len(places) == len(behind)
    for text in "xyz":
        for chunk in "abc":
            place = dict(behind).get((text, chunk))
            assert places.behind(text, ChunkId(chunk)) == (
                None if place is None else Place(place, 0, 1)
            )
    for tenant in "tu":
        for chunk in "abc":
            assert places.last_text(tenant, ChunkId(chunk)) == dict(texts).get((tenant, chunk))


def latest(notes: Any) -> list[tuple[Any, Any]]:
    """The last value of each key, in the order of these."""
    found: dict[Any, Any] = {}
    for key, value in notes:
        found.pop(key, None)
        found[key] = value
    return [*found.items()]
