"""`ChunkKey`: a prompt in segments, cut at whole chunks, matched chunk by chunk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

pytest.importorskip("sglang")

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import Span, chunk_id
from sglang_chunkcache.chunk_key import ChunkKey, Segment, cut_at_chunk


def make_key(
    token_ids: Sequence[int], *chunks: tuple[int, int], extra_key: str | None = None, cache_salt: str | None = None
) -> ChunkKey:
    ids = array("q", token_ids)
    spans = tuple(Span(start, end, chunk_id(ids[start:end])) for start, end in chunks)
    return ChunkKey(ids, spans, extra_key=extra_key, cache_salt=cache_salt)


KEY = make_key([9, 9, 1, 2, 3, 4, 5, 8], (2, 5), (5, 7))  # h h | a a a | b b | q
A, B = (span.chunk for span in KEY.spans)


def test_segments_are_chunks_and_the_tokens_between() -> None:
    """A node holds one segment, so the segments tile the key in order."""
    assert list(KEY.segments()) == [Segment(0, 2, None), Segment(2, 5, A), Segment(5, 7, B), Segment(7, 8, None)]


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
    """A border inside a chunk or at a segment's edge changes nothing: no half chunk, no empty node."""
    key = make_key([9, 1, 2, 8, 8, 8], (1, 3))
    assert list(key.segments(border)) == list(key.segments())


@pytest.mark.parametrize(("end", "expected"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (7, 7), (8, 8)])
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
    """A node runs on into tokens that are a chunk of the query: the match ends with the query's head."""
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
    """A query with more behind the chunk finds the chunk's node."""
    assert make_key([1, 2], (0, 2)).child_key() == make_key([1, 2, 7, 7], (0, 2)).child_key()


@st.composite
def keys(draw: st.DrawFn) -> ChunkKey:
    ids: list[int] = draw(st.lists(st.integers(0, 1), max_size=3))
    spans = []
    for chunk in draw(st.lists(st.sampled_from([[0], [0, 1], [0, 1, 1], [1]]), max_size=3)):
        spans.append((len(ids), len(ids) + len(chunk)))
        ids = ids + chunk + draw(st.lists(st.integers(0, 1), max_size=2))
    return make_key(ids, *spans)


@given(keys(), st.data())
def test_slices_at_segment_borders_put_together_give_the_key(key: ChunkKey, data: st.DataObject) -> None:
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
