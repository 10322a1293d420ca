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


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (KEY, [Segment(0, 2, None), Segment(2, 5, A), Segment(5, 7, B), Segment(7, 8, None)]),
        (KEY[2:], [Segment(0, 3, A), Segment(3, 5, B), Segment(5, 6, None)]),
        (make_key([1, 2]), [Segment(0, 2, None)]),
        (make_key([]), []),
    ],
)
def test_segments_are_chunks_and_the_tokens_between(key: ChunkKey, expected: list[Segment]) -> None:
    """A node holds one segment, so the segments tile the key in order."""
    assert list(key.segments()) == expected


def test_segments_split_tokens_at_border_but_no_chunks() -> None:
    """The prompt's end is a node border, so that an answer can leave without its prompt."""
    key = make_key([9, 1, 2, 8, 8, 8], (1, 3))
    assert list(key.segments(4))[2:] == [Segment(3, 4, None), Segment(4, 6, None)]
    for border in (0, 1, 2, 3, 6, 7):
        assert list(key.segments(border)) == list(key.segments())


@pytest.mark.parametrize(
    ("end", "expected"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 5), (6, 5), (8, 8)]
)
def test_cut_at_chunk_moves_an_end_inside_a_chunk_to_its_start(end: int, expected: int) -> None:
    """A key that ended inside a chunk would give slots two owners."""
    assert cut_at_chunk(KEY.spans, end) == expected


def test_cut_and_slice_keep_whole_chunks_and_namespace() -> None:
    """Else one tenant's KV would serve another."""
    key = ChunkKey.cut(KEY.token_ids, KEY.spans, 6, extra_key="x", cache_salt="s")
    assert (list(key.token_ids), [span.chunk for span in key.spans]) == ([9, 9, 1, 2, 3], [A])
    for part in (key, key[1:]):
        assert (part.extra_key, part.cache_salt) == ("x", "s")
    assert len(ChunkKey.cut(KEY.token_ids, KEY.spans, 100)) == 8
    assert KEY[5:].child_key() == make_key([4, 5], (0, 2)).child_key()
    assert (list(KEY[:4].token_ids), KEY[:4].spans) == ([9, 9, 1, 2], ())


CHUNK = make_key([1, 2, 3], (0, 3))


@pytest.mark.parametrize(
    ("node", "query", "expected"),
    [
        (CHUNK, make_key([1, 2, 3, 4, 5], (0, 3), (3, 5)), 3),
        # chunks that begin alike never split each other
        (CHUNK, make_key([1, 2, 4], (0, 3)), 0),
        (CHUNK, make_key([1, 2, 3, 4], (0, 4)), 0),
        (make_key([1, 2, 3, 4], (0, 4)), CHUNK, 0),
        # token by token outside chunks, up to where the query enters one
        (make_key([1, 2, 3, 4]), make_key([1, 2, 3, 9]), 3),
        (make_key([1, 2, 3, 4]), make_key([1, 2, 3, 4], (2, 4)), 2),
        # a chunk and the same tokens outside chunks, or of plain requests
        (CHUNK, make_key([1, 2, 3]), 0),
        (make_key([1, 2, 3]), CHUNK, 0),
        (make_key([1, 2]), RadixKey(array("q", [1, 2])), 0),
    ],
)
def test_match(node: ChunkKey, query: RadixKey, expected: int) -> None:
    assert node.match(query) == expected


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_match_of_other_namespace_is_an_error(name: str) -> None:
    """As in SGLang: child keys keep namespaces apart, so meeting one is a bug."""
    one, other = (make_key([1], **{name: value}) for value in "ab")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        one.match(other)


def test_child_key_separates_namespaces_kinds_and_chunks() -> None:
    """One dict of children holds tenants, plain keys, chunks and tokens; all must differ."""
    keys: list[RadixKey] = [CHUNK]
    namespaces: list[dict[str, Any]] = [{}, {"extra_key": "x"}, {"cache_salt": "x"}]
    for names in namespaces:
        ids = array("q", [1, 2])
        keys += [make_key(ids, (0, 2), **names), make_key(ids, **names), RadixKey(ids, **names)]
    assert len({key.child_key() for key in keys}) == len(keys)


# Approximate KV

# h h | a a a | b b | q, b is moved
FUSED = make_key([9, 9, 1, 2, 3, 4, 5, 8], (2, 5), (5, 7), fused=Fused(5, "r"))


def test_exact_part_of_fused_key_is_shared_with_exact_keys() -> None:
    """In front of the first moved chunk KV is exact, whatever follows."""
    assert FUSED.child_key() == KEY.child_key()
    assert [FUSED[:stop].fused for stop in (4, 5, 7)] == [None, None, Fused(5, "r")]
    assert FUSED[2:].child_key() == KEY[2:].child_key()


def test_fused_by_taints_all() -> None:
    """What follows an exact prefix is looked up among the fused nodes below it."""
    rest = make_key([1, 2, 8], (0, 2), extra_key="x", cache_salt="s").fused_by("r")
    assert rest.fused == Fused(0, "r")
    assert (rest.extra_key, rest.cache_salt) == ("x", "s")
    assert next(iter(rest.segments())) == Segment(0, 2, rest.spans[0].chunk)


def test_recipe_cannot_forge_another_key() -> None:
    """It has a client's words: none makes a key exact, plain, another tenant's or recipe's."""
    keys = [KEY[5:], make_key([4, 5], (0, 2), extra_key="fused", cache_salt="r")]
    keys += [KEY[5:].fused_by(recipe) for recipe in ("fused", "chunkcache", "r", "s", "")]
    assert len({key.child_key() for key in keys}) == len(keys)


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
