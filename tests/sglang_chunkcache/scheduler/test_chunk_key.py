"""`ChunkKey`: a prompt in segments, cut at whole chunks, matched chunk by chunk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, Span, chunk_id
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused, Segment, cut_at_chunk


def make_key(
    token_ids: Sequence[int],
    *chunks: tuple[int, int],
    extra_key: str | None = None,
    cache_salt: str | None = None,
    fused: Fused | None = None,
) -> ChunkKey:
    ids = array("q", token_ids)
    spans = tuple(Span(start, end, chunk_id(ids[start:end])) for start, end in chunks)
    return ChunkKey(ids, spans, extra_key=extra_key, cache_salt=cache_salt, fused=fused)


KEY = make_key([9, 9, 1, 2, 3, 4, 5, 8], (2, 5), (5, 7))  # h h | a a a | b b | q
A, B = (span.chunk for span in KEY.spans)


def test_segments_are_chunks_and_the_tokens_between() -> None:
    """A node holds one segment, so the segments tile the key in order."""
    assert list(KEY.segments()) == [
        Segment(0, 2, None),
        Segment(2, 5, A),
        Segment(5, 7, B),
        Segment(7, 8, None),
    ]


def test_segments_without_spans_is_one_token_run() -> None:
    """A request of the front without chunks is one run of tokens."""
    assert list(make_key([1, 2]).segments()) == [Segment(0, 2, None)]


def test_segments_of_empty_key_are_none() -> None:
    """Nothing to insert, no node."""
    assert list(make_key([]).segments()) == []


def test_segments_split_tokens_at_border() -> None:
    """The prompt's end is a node border, so that an answer can leave without its prompt."""
    key = make_key([9, 1, 2, 8, 8, 8], (1, 3))
    assert list(key.segments(4))[2:] == [Segment(3, 4, None), Segment(4, 6, None)]


@pytest.mark.parametrize("border", [0, 1, 2, 3, 6, 7])
def test_segments_never_split_chunks_nor_make_empty_ones(border: int) -> None:
    """A border inside a chunk or at a segment's edge changes nothing:
    no half chunk, no empty node."""
    key = make_key([9, 1, 2, 8, 8, 8], (1, 3))
    assert list(key.segments(border)) == list(key.segments())


@pytest.mark.parametrize(
    ("end", "expected"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (7, 7), (8, 8)]
)
def test_cut_at_chunk_moves_an_end_inside_a_chunk_to_its_start(end: int, expected: int) -> None:
    """A key that ended inside a chunk would give slots two owners."""
    assert cut_at_chunk(KEY.spans, end) == expected


def test_cut_keeps_whole_chunks_and_namespace() -> None:
    """What is cut keeps extra_key and cache_salt, or one tenant's KV would serve another."""
    key = ChunkKey.cut(KEY.token_ids, KEY.spans, 6, extra_key="x", cache_salt="s")
    assert (list(key.token_ids), [span.chunk for span in key.spans]) == ([9, 9, 1, 2, 3], [A])
    assert (key.extra_key, key.cache_salt) == ("x", "s")


def test_cut_beyond_the_end_keeps_all() -> None:
    """`up_to` may exceed the tokens; the key does not."""
    assert len(ChunkKey.cut(KEY.token_ids, KEY.spans, 100)) == 8


def test_slice_moves_spans() -> None:
    """SGLang walks down by slicing the matched part off; spans follow."""
    rest = KEY[2:]
    assert list(rest.segments()) == [Segment(0, 3, A), Segment(3, 5, B), Segment(5, 6, None)]
    assert rest[3:].child_key() == make_key([4, 5], (0, 2)).child_key()


def test_slice_keeps_namespace() -> None:
    """A slice belongs to the tenant of the whole."""
    part = make_key([1, 2], extra_key="x", cache_salt="s")[1:]
    assert (part.extra_key, part.cache_salt) == ("x", "s")


def test_slice_step_is_refused() -> None:
    """As SGLang's key refuses it."""
    with pytest.raises(ValueError, match="step"):
        KEY[::2]


@pytest.mark.parametrize("index", [8, 100, -9])
def test_index_out_of_range_raises(index: int) -> None:
    """A RadixKey subclass keeps its contract: IndexError, not an empty key."""
    with pytest.raises(IndexError):
        KEY[index]


def test_index_counts_from_the_end() -> None:
    """As SGLang's key does."""
    assert list(KEY[-1].token_ids) == [8]


def test_match_takes_all_of_a_chunk() -> None:
    """Equal chunks match in one comparison."""
    node = make_key([1, 2, 3], (0, 3))
    assert node.match(make_key([1, 2, 3, 4, 5], (0, 3), (3, 5))) == 3


def test_match_takes_none_of_a_chunk_that_begins_alike() -> None:
    """Two chunks that begin alike never split each other."""
    node = make_key([1, 2, 3], (0, 3))
    assert node.match(make_key([1, 2, 4], (0, 3))) == 0
    assert node.match(make_key([1, 2, 3, 4], (0, 4))) == 0
    assert make_key([1, 2, 3, 4], (0, 4)).match(make_key([1, 2, 3], (0, 3))) == 0


def test_match_goes_token_by_token_outside_chunks() -> None:
    """Heads, questions and answers match as in SGLang."""
    assert make_key([1, 2, 3, 4]).match(make_key([1, 2, 3, 9])) == 3


def test_match_stops_where_the_query_enters_a_chunk() -> None:
    """A node runs on into tokens that are a chunk of the query:
    the match ends with the query's head."""
    assert make_key([1, 2, 3, 4]).match(make_key([1, 2, 3, 4], (2, 4))) == 2


def test_match_of_tokens_with_chunk_is_zero() -> None:
    """A chunk and the same tokens outside chunks are different units."""
    chunk, tokens = make_key([1, 2], (0, 2)), make_key([1, 2])
    assert chunk.match(tokens) == tokens.match(chunk) == 0


def test_match_with_plain_key_is_zero() -> None:
    """Plain requests and the front's share no nodes."""
    assert make_key([1, 2]).match(RadixKey(array("q", [1, 2]))) == 0


def test_match_of_other_namespace_is_an_error() -> None:
    """As in SGLang: child keys keep namespaces apart, so meeting one is a bug."""
    with pytest.raises(ValueError, match="cache_salt"):
        make_key([1], cache_salt="a").match(make_key([1], cache_salt="b"))
    with pytest.raises(ValueError, match="extra_key"):
        make_key([1], extra_key="a").match(make_key([1], extra_key="b"))


def test_child_key_separates_namespaces_kinds_and_chunks() -> None:
    """One dict of children holds tenants, plain keys, chunks and tokens; all must differ."""
    keys = [
        make_key([1, 2], (0, 2)).child_key(),
        make_key([1, 2]).child_key(),
        make_key([1, 2], extra_key="x").child_key(),
        make_key([1, 2], cache_salt="x").child_key(),
        make_key([1, 2], (0, 2), extra_key="x").child_key(),
        make_key([1, 2], (0, 2), cache_salt="x").child_key(),
        make_key([1, 2, 3], (0, 3)).child_key(),
        RadixKey(array("q", [1, 2])).child_key(),
        RadixKey(array("q", [1, 2]), "x").child_key(),
        RadixKey(array("q", [1, 2]), cache_salt="x").child_key(),
    ]
    assert len(set(keys)) == len(keys)


def test_child_key_is_the_chunk_whatever_follows() -> None:
    """A query with more after the chunk finds the chunk's node."""
    assert make_key([1, 2], (0, 2)).child_key() == make_key([1, 2, 7, 7], (0, 2)).child_key()


# Approximate KV

# h h | a a a | b b | q, b is moved
FUSED = make_key([9, 9, 1, 2, 3, 4, 5, 8], (2, 5), (5, 7), fused=Fused(5, "r"))


def test_exact_part_of_fused_key_is_shared_with_exact_keys() -> None:
    """In front of the first moved chunk KV is exact, whatever follows."""
    assert FUSED.child_key() == KEY.child_key()
    assert FUSED[:5].fused is None
    assert FUSED[2:].child_key() == KEY[2:].child_key()


@pytest.mark.parametrize("start", [5, 7])
def test_nothing_from_the_moved_chunk_on_is_shared_with_exact_keys(start: int) -> None:
    """The chunk itself and the question after it: computed exactly, they are another node."""
    assert FUSED[start:].child_key() != KEY[start:].child_key()


def test_slice_moves_the_fused_part() -> None:
    """Walking down, what is below approximate KV stays approximate."""
    starts = [FUSED[start:].fused for start in (0, 2, 5, 7)]
    assert starts == [Fused(5, "r"), Fused(3, "r"), Fused(0, "r"), Fused(0, "r")]


@pytest.mark.parametrize(
    ("stop", "expected"), [(4, None), (5, None), (7, Fused(5, "r")), (8, Fused(5, "r"))]
)
def test_slice_and_cut_that_end_before_the_moved_chunk_are_exact(
    stop: int, expected: Fused | None
) -> None:
    """A shorter insert of a fused request may be exact throughout,
    and then everybody may have it."""
    assert FUSED[:stop].fused == expected
    assert ChunkKey.cut(FUSED.token_ids, FUSED.spans, stop, fused=FUSED.fused).fused == expected


def test_cut_inside_the_moved_chunk_is_exact() -> None:
    """The cut takes the whole chunk away, and with it all that is approximate."""
    key = ChunkKey.cut(FUSED.token_ids, FUSED.spans, 6, fused=FUSED.fused)
    assert (len(key), key.fused) == (5, None)


def test_fused_by_taints_all() -> None:
    """What follows an exact prefix is looked up among the fused nodes below it."""
    rest = make_key([1, 2, 8], (0, 2), extra_key="x", cache_salt="s").fused_by("r")
    assert rest.fused == Fused(0, "r")
    assert (rest.extra_key, rest.cache_salt, next(iter(rest.segments()))) == (
        "x",
        "s",
        Segment(0, 2, rest.spans[0].chunk),
    )


def test_recipes_share_nothing() -> None:
    """Other tokens were recomputed: the KV is another."""
    assert len({KEY[5:].fused_by(recipe).child_key() for recipe in ("r", "s", "")}) == 3


def test_recipe_cannot_forge_another_key() -> None:
    """A recipe is a client's word as far as it names selectors and ratios: no spelling of it makes
    a key exact, plain or another tenant's."""
    keys = [
        KEY[5:].child_key(),
        make_key([4, 5], (0, 2), extra_key="fused", cache_salt="r").child_key(),
    ]
    keys += [
        make_key([4, 5], (0, 2), fused=Fused(0, recipe)).child_key()
        for recipe in ("fused", "chunkcache", "r")
    ]
    assert len(set(keys)) == len(keys)


@st.composite
def keys(draw: st.DrawFn) -> ChunkKey:
    ids: list[int] = draw(st.lists(st.integers(0, 1), max_size=3))
    spans = []
    for chunk in draw(st.lists(st.sampled_from([[0], [0, 1], [0, 1, 1], [1]]), max_size=3)):
        spans.append((len(ids), len(ids) + len(chunk)))
        ids = ids + chunk + draw(st.lists(st.integers(0, 1), max_size=2))
    return make_key(ids, *spans)


@given(keys(), st.data())
def test_slices_at_segment_borders_put_together_give_the_key(
    key: ChunkKey, data: st.DataObject
) -> None:
    """Walking down loses neither tokens nor chunks."""
    borders = [segment.end for segment in key.segments()]
    cut = data.draw(st.sampled_from([0, *borders]))
    left, right = key[:cut], key[cut:]
    assert left.token_ids + right.token_ids == key.token_ids
    assert [s.chunk for s in left.spans + right.spans] == [s.chunk for s in key.spans]


@given(keys(), keys())
def test_match_of_one_segment_is_whole_units_shared_by_both(key: ChunkKey, other: ChunkKey) -> None:
    """What matches is the same units in both, and never more than the node has."""
    for segment in key.segments():
        node = key[segment.start : segment.end]
        found = node.match(other)
        assert 0 <= found <= len(node)
        assert node.token_ids[:found] == other.token_ids[:found]
        assert cut_at_chunk(other.spans, found) == found
        if segment.chunk is not None:
            assert found in (0, len(node))


@st.composite
def fused_keys(draw: st.DrawFn) -> ChunkKey:
    """Exact throughout, or approximate from one of the chunks on."""
    key = draw(keys())
    starts = [None, *(span.start for span in key.spans)]
    start = draw(st.sampled_from(starts))
    if start is not None:
        key.fused = Fused(start, draw(st.sampled_from("rs")))
    return key


def path_of(key: ChunkKey) -> list[object]:
    """The child keys of its segments, from the root down."""
    return [key[segment.start :].child_key() for segment in key.segments()]


@given(fused_keys(), fused_keys())
def test_paths_meet_where_both_are_exact_or_fused_alike(one: ChunkKey, two: ChunkKey) -> None:
    """Two keys share a node only if it is exact in both, or by one recipe from one chunk on."""
    for ours, theirs in zip(one.segments(), two.segments(), strict=False):
        if one[ours.start :].child_key() != two[theirs.start :].child_key():
            break
        taints = [k[s.start : s.end].fused for k, s in ((one, ours), (two, theirs))]
        assert taints[0] == taints[1]
        if ours != theirs:
            break  # tokens that go apart


@given(fused_keys())
def test_taint_goes_down(key: ChunkKey) -> None:
    """Below an approximate node nothing is exact, and nothing has another recipe."""
    taints = [key[segment.start : segment.end].fused for segment in key.segments()]
    first = next((i for i, taint in enumerate(taints) if taint is not None), len(taints))
    assert taints[first:] == [key.fused and Fused(0, key.fused.recipe)] * (len(taints) - first)
    assert (first < len(taints)) == (key.fused is not None)


@given(fused_keys(), st.data())
def test_slice_of_a_slice_is_a_slice(key: ChunkKey, data: st.DataObject) -> None:
    """However SGLang walks, the node it arrives at is the same."""
    borders = [0, *(segment.end for segment in key.segments())]
    start, middle, end = sorted(data.draw(st.sampled_from(borders)) for _ in range(3))
    one, two = key[start:][middle - start : end - start], key[middle:end]
    assert (one.token_ids, one.spans) == (two.token_ids, two.spans)
    assert one.fused == two.fused or not one.token_ids
    assert ChunkKey.cut(key.token_ids, key.spans, end, fused=key.fused).fused == key[:end].fused


class Looked(tuple[Span, ...]):
    """Counts the spans that are looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> Any:
        Looked.num_looks += 1
        return super().__getitem__(index)


def test_slice_looks_at_few_of_many_spans() -> None:
    """An insertion cuts the key once a chunk, wherever that is."""
    spans = Looked(Span(4 * number, 4 * number + 4, ChunkId(str(number))) for number in range(1000))
    key = ChunkKey(array("q", range(4000)), spans)
    for start in range(0, 4000, 4):
        Looked.num_looks = 0
        assert key[start : start + 4].spans == (Span(0, 4, ChunkId(str(start // 4))),)
        assert Looked.num_looks <= 32
