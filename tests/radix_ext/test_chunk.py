"""Identity of chunks and chains."""

import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from radix_ext import (
    ChunkError,
    ChunkId,
    Span,
    SpanError,
    check_spans,
    chunk_id,
    extend_chain,
    root_chain,
)
from tests.reference.chains import chain_of


@pytest.mark.parametrize("as_sequence", [list, tuple, partial(array, "i"), partial(array, "q")])
def test_chunk_id_is_pinned(as_sequence: Callable[[list[int]], Sequence[int]]) -> None:
    """Front and schedulers may be of different builds: the value itself is the contract."""
    assert chunk_id(as_sequence([1, 2, 3])) == "b30a3c159d7e8193559a42a84f1fcae1"


def test_chunk_id_differs_for_other_ids() -> None:
    ids = [[1, 2], [2, 1], [1], [1, 2, 0], [258], [1 << 8 | 1]]
    assert len({chunk_id(each) for each in ids}) == len(ids)


def test_equal_chunk_ids_share_one_string() -> None:
    """A million nodes must not hold a million copies of a popular id."""
    assert chunk_id([5, 6]) is chunk_id((5, 6))


@pytest.mark.parametrize(
    ("ids", "reason"), [([], "at least 1"), ([1 << 31], "32-bit"), (["a"], "32-bit"), ([1.5], "32")]
)
def test_chunk_id_refuses_what_is_no_token_list(ids: list[int], reason: str) -> None:
    with pytest.raises(ChunkError, match=reason):
        chunk_id(ids)


def test_chain_ids_agree_across_processes() -> None:
    """Another process has another hash seed."""
    code = "from radix_ext import *; print(extend_chain(root_chain('tenant'), 'a'))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(other.stdout) == extend_chain(root_chain("tenant"), ChunkId("a"))


def test_chain_ids_tell_paths_apart() -> None:
    """Order, depth and namespace count; every id fits 60 bits."""
    paths = [("", names) for names in ("", "a", "b", "ab", "ba")] + [("x", ""), ("x", "a")]
    chains = {chain_of(namespace, map(ChunkId, names)) for namespace, names in paths}
    assert len(chains) == len(paths)
    assert all(0 <= chain < 1 << 60 for chain in chains)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 4), (3, 8)], "span 1 must start at 4 or later but got 3"),
        ([(-1, 4)], "span 0 must start at 0 or later but got -1"),
        ([(4, 4)], "span 0 must end after 4 but got 4"),
        ([(0, 4), (4, 900)], "span 1 must end by 812 but got 900"),
    ],
)
def test_bad_spans_are_named(spans: list[tuple[int, int]], message: str) -> None:
    check_spans([Span(*ends, ChunkId("a")) for ends in ((2, 5), (5, 9), (12, 13))], 13)
    with pytest.raises(SpanError, match=message):
        check_spans([Span(start, end, ChunkId("a")) for start, end in spans], 812)
