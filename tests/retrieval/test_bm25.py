"""Bm25Index: the ranking against a naive one, hostile text, and that what is opened stays as it
was.

.venv/bin/python -m pytest tests/retrieval/test_bm25.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.bm25 import Bm25Index, link_copy
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.manifest import ANALYZER
from tests.examples import examples
from tests.reference.naive_bm25 import bm25_scores, rounded_length, words
from tests.retrieval.small_index import delete

MEMORY = 15_000_000
TEXTS = [
    "Élan vital\nThe running foxes jumped over 3 lazy dogs.",
    "北京大学 is in Beijing 😀😀",
    "",
    "... !!! ???",
    "AND OR NOT content:x",
    "naïve café",
]
WORDS = st.sampled_from(["aa", "bb", "cc", "dd", "ee", "ff", "gg"])
MIXED = [
    "退",
    "货",
    "政策",
    "お茶",
    "カー",
    "\u3042\u3099",
    "한국",
    "어",
    "\u1112\u1161\u11ab",
    "น้ำ",
    "ที่",
    "ไม่",
    "ខ្មែរ",
    "မြန်",
    "ລາວ",
]
MIXED += ["ab", "3", "É", " ", "。", "・", ", ", "၊", "។", "\u200b"]
PASSAGES = st.lists(st.lists(WORDS, max_size=60), min_size=1, max_size=12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An index of TEXTS in English; row = place in the list."""
    folder = tmp_path / "bm25"
    Bm25Index.create(folder, language="english", version=ANALYZER).update(
        enumerate(TEXTS), [], memory_bytes=MEMORY
    )
    return folder


def rows_of(index: Bm25Index, query: str, k: int = 10) -> list[int]:
    return [int(row) for row in index.search(query, k=k)[1]]


def contents_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Name -> inode and digest of every file."""
    return {
        file.name: (file.stat().st_ino, blake2b(file.read_bytes()).digest())
        for file in folder.iterdir()
    }


# The ranking


@settings(max_examples=examples(25))
@given(PASSAGES, st.lists(WORDS | st.just("unknown"), min_size=1, max_size=5), st.integers(1, 12))
def test_search_equals_naive_bm25(passages: list[list[str]], query: list[str], k: int) -> None:
    """Every score is the formula's, nothing without a shared word is found,
    and nothing better is left out."""
    with TemporaryDirectory() as directory:
        index = Bm25Index.create(Path(directory), language="none", version=ANALYZER)
        index.update(
            ((row, " ".join(words)) for row, words in enumerate(passages)), [], memory_bytes=MEMORY
        )
        scores, rows = index.search(" ".join(query), k=k)
    expected = bm25_scores(passages, query) if any(passages) else [0.0] * len(passages)
    found = [score for score in sorted(expected, reverse=True) if score > 0][:k]
    assert scores == pytest.approx(found, rel=1e-5)
    assert scores == pytest.approx([expected[row] for row in rows], rel=1e-5)
    assert len(set(rows.tolist())) == len(rows)


@settings(max_examples=examples(25))
@given(
    st.lists(st.lists(st.sampled_from(MIXED), max_size=8).map("".join), min_size=1, max_size=6),
    st.data(),
)
def test_search_of_scripts_without_spaces_equals_naive_bm25(
    passages: list[str], data: st.DataObject
) -> None:
    """Pairs of characters, beside words with spaces, in passages and queries alike."""
    query = "".join(data.draw(st.lists(st.sampled_from(MIXED), min_size=1, max_size=4)))
    cut = [words(passage) for passage in passages]
    with TemporaryDirectory() as directory:
        index = Bm25Index.create(Path(directory), language="none", version=ANALYZER)
        index.update(enumerate(passages), [], memory_bytes=MEMORY)
        scores, rows = index.search(query, k=10)
    expected = bm25_scores(cut, words(query)) if any(cut) else [0.0] * len(cut)
    assert sorted(rows.tolist()) == [row for row, score in enumerate(expected) if score]
    assert scores == pytest.approx([expected[row] for row in rows], rel=1e-5)


def test_older_analyzer_cuts_as_it_did(tmp_path: Path) -> None:
    """A sentence in Chinese is one word for the first version;
    neither version's index is opened as the other's."""
    for version, found in [(1, []), (2, [0])]:
        folder = tmp_path / str(version)
        index = Bm25Index.create(folder, language="none", version=version)
        index.update([(0, "退货政策很简单")], [], memory_bytes=MEMORY)
        assert rows_of(Bm25Index.open(folder, language="none", version=version), "退货") == found
        assert rows_of(
            Bm25Index.open(folder, language="none", version=version), "退货政策很简单"
        ) == [0]
        with pytest.raises(CorruptIndexError, match=f"by analyzer {3 - version}"):
            Bm25Index.open(folder, language="none", version=3 - version)


def test_rounded_length_steps() -> None:
    """The naive twin rounds as the engine does: exact to 40, then steps of an eighth."""
    assert [rounded_length(n) for n in (0, 39, 40, 41, 42, 55, 57, 100, 1000)] == [
        0,
        39,
        40,
        40,
        42,
        54,
        56,
        96,
        984,
    ]


def test_search_of_long_passages_equals_naive_bm25(tmp_path: Path) -> None:
    """Lengths far above 40 words, where the rounding is coarse."""
    passages = [["x"] + ["y"] * length for length in (0, 10, 41, 43, 99, 103, 500, 5000)]
    index = Bm25Index.create(tmp_path, language="none", version=ANALYZER)
    index.update(
        ((row, " ".join(words)) for row, words in enumerate(passages)), [], memory_bytes=MEMORY
    )
    scores, rows = index.search("x", k=10)
    expected = bm25_scores(passages, ["x"])
    assert scores == pytest.approx([expected[row] for row in rows], rel=1e-5)
    assert len(rows) == len(passages)


def test_equal_scores_stand_by_row(tmp_path: Path) -> None:
    """The same passage in several segments: the answer's order does not show which came when."""
    index = Bm25Index.create(tmp_path, language="none", version=ANALYZER)
    for row in (2, 0, 3, 1):
        index.update([(row, "same words")], [], memory_bytes=MEMORY)
    assert rows_of(index, "words") == [0, 1, 2, 3]


def test_search_returns_the_promised_types(folder: Path) -> None:
    """float32 scores and int64 rows, best first, also where nothing is found."""
    for query in ("the in café fox", "zzz"):
        scores, rows = Bm25Index.open(folder, language="english", version=ANALYZER).search(
            query, k=3
        )
        assert (scores.dtype.name, rows.dtype.name) == ("float32", "int64")
        assert scores.shape == rows.shape
        assert (np.diff(scores) <= 0).all()


# Text


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("fox", [0]),
        ("FOXES run", [0]),
        ("elan", [0]),
        ("cafe naive", [5]),
        ("😀", []),
        ("北京大学", [1]),
        ("", []),
        (" \n\t", []),
        ('"( \\ :* ?', []),
        ("unheard of", []),
        ("content:x", [4]),
        ('AND OR ( " :*', [4]),
        ("\x00 \ud800 fox", [0]),
    ],
)
def test_queries_are_text_and_not_syntax(folder: Path, query: str, rows: list[int]) -> None:
    """Whatever a user types is looked up as words:
    no operator, no error, nothing found where no word is known."""
    assert rows_of(Bm25Index.open(folder, language="english", version=ANALYZER), query) == rows


def test_repeated_words_count_once(folder: Path) -> None:
    """A question that says a word twice is not about that word alone."""
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    once, twice = index.search("fox dogs", k=5)[0], index.search("fox dogs fox foxes", k=5)[0]
    assert once == pytest.approx(twice)


def test_long_query_keeps_its_rarest_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of text is bounded, and unknown or common words do not push out the one that
    tells."""
    index = Bm25Index.create(tmp_path, language="none", version=ANALYZER)
    index.update(((row, f"common w{row}") for row in range(50)), [], memory_bytes=MEMORY)
    query = "common " + " ".join(f"unknown{n}" for n in range(80_000)) + " w7"
    assert len(query) > 1_000_000
    assert rows_of(index, query, k=1) == [7]
    monkeypatch.setattr("retrieval.bm25.MAX_QUERY_TERMS", 1)
    assert rows_of(index, query, k=5) == [7]


def test_lone_surrogates_can_be_indexed(folder: Path) -> None:
    """JSON may hold half a character; one such passage must not stop a build of a million."""
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    index.update([(9, "half \ud83d emoji")], [], memory_bytes=MEMORY)
    assert rows_of(index, "emoji") == [9]


def test_languages_stem_and_none_does_not(tmp_path: Path) -> None:
    for language in ("none", "english", "german", "tamil"):
        index = Bm25Index.create(tmp_path / language, language=language, version=ANALYZER)
        index.update([(1, "running wolves")], [], memory_bytes=MEMORY)
        assert rows_of(index, "wolves") == [1]
    assert (
        rows_of(Bm25Index.open(tmp_path / "none", language="none", version=ANALYZER), "wolf run")
        == []
    )


# Updates


def test_update_removes_and_adds_in_one_commit(folder: Path) -> None:
    """Unknown rows are ignored; a row that is removed and added is replaced."""
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    index.update([(0, "whales"), (6, "whales too")], [0, 1, 77], memory_bytes=MEMORY)
    assert index.num_docs == len(TEXTS)
    assert rows_of(index, "fox beijing") == []
    assert rows_of(index, "whales") == [0, 6]


def test_failed_update_changes_nothing_and_frees_the_folder(folder: Path) -> None:
    """A corpus file that breaks off in the middle leaves no half of it,
    and the next update can write."""

    def broken() -> Iterator[tuple[int, str]]:
        yield 100, "whales"
        raise OSError("unreadable")

    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    with pytest.raises(OSError, match="unreadable"):
        index.update(broken(), [0], memory_bytes=MEMORY)
    assert rows_of(Bm25Index.open(folder, language="english", version=ANALYZER), "fox whales") == [
        0
    ]
    index.update([(100, "whales")], [], memory_bytes=MEMORY)
    assert rows_of(index, "fox whales", k=5) == [100, 0]


def test_killed_writer_leaves_the_last_commit_writable(folder: Path) -> None:
    """kill -9 in the middle of a build: none of it is visible,
    and its lock blocks no later writer."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from retrieval.bm25 import Bm25Index
        from retrieval.manifest import ANALYZER
        def rows():
            for row in range(1000, 3000):
                yield row, "whales"
            os.kill(os.getpid(), 9)
        Bm25Index.open(Path(sys.argv[1]), language="english", version=ANALYZER).update(rows(), [0], memory_bytes=15_000_000)
    """
    child = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert child.returncode == -9
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    assert rows_of(index, "whales fox") == [0]
    index.update([(7, "whales")], [], memory_bytes=MEMORY)
    assert rows_of(index, "whales") == [7]
    assert not list(folder.glob("*.temp"))


def test_second_writer_is_refused(folder: Path) -> None:
    """Two writers at once would lose one's work."""

    def nested() -> Iterator[tuple[int, str]]:
        Bm25Index.open(folder, language="english", version=ANALYZER).update(
            [], [], memory_bytes=MEMORY
        )
        yield 0, ""

    with pytest.raises(RetrievalError, match="another writer holds its lock"):
        Bm25Index.open(folder, language="english", version=ANALYZER).update(
            nested(), [], memory_bytes=MEMORY
        )


def test_opened_index_is_a_snapshot(folder: Path) -> None:
    """Searches under way see one state, also when another object updates the folder and the folder
    is deleted."""
    before, other = (
        Bm25Index.open(folder, language="english", version=ANALYZER),
        Bm25Index.open(folder, language="english", version=ANALYZER),
    )
    other.update([(6, "another fox")], [0], memory_bytes=MEMORY)
    assert rows_of(before, "fox") == [0]
    assert rows_of(other, "fox") == [6]
    delete(folder)
    assert rows_of(before, "fox") == [0]
    assert before.num_docs == len(TEXTS)


def test_link_copy_shares_no_changes(folder: Path) -> None:
    """Updates of the copy, with removals and merges, leave the source's files byte for byte,
    and the other way round."""
    copy = folder.with_name("copy")
    link_copy(folder, copy)
    assert {file.stat().st_ino for file in copy.iterdir()} < {
        file.stat().st_ino for file in folder.iterdir()
    }
    before = contents_of(folder)
    index = Bm25Index.open(copy, language="english", version=ANALYZER)
    for step in range(12):  # more than the eight segments that start a merge
        index.update([(100 + step, "another fox")], [0, 100 + step - 3], memory_bytes=MEMORY)
    assert len(list(copy.glob("*.idx"))) < 12, "no merge took place"
    assert contents_of(folder) == before
    assert rows_of(Bm25Index.open(folder, language="english", version=ANALYZER), "fox") == [0]
    delete(folder)
    assert rows_of(Bm25Index.open(copy, language="english", version=ANALYZER), "fox") == [
        109,
        110,
        111,
    ]


def test_writers_of_source_and_copy_do_not_wait_for_each_other(folder: Path) -> None:
    """A shared lock file would refuse the second."""
    copy = folder.with_name("copy")
    link_copy(folder, copy)

    def nested() -> Iterator[tuple[int, str]]:
        Bm25Index.open(copy, language="english", version=ANALYZER).update(
            [(6, "whales")], [], memory_bytes=MEMORY
        )
        yield 6, "sharks"

    Bm25Index.open(folder, language="english", version=ANALYZER).update(
        nested(), [], memory_bytes=MEMORY
    )
    assert rows_of(Bm25Index.open(copy, language="english", version=ANALYZER), "whales sharks") == [
        6
    ]


def test_link_copy_without_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some mounted file systems have no hard links: the copy then costs space, but works."""

    def no_links(source: object, target: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    copy = folder.with_name("copy")
    link_copy(folder, copy)
    assert rows_of(Bm25Index.open(copy, language="english", version=ANALYZER), "fox") == [0]


def test_threads_search_alike(folder: Path) -> None:
    """The server searches from several threads."""
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: tuple(rows_of(index, "fox cafe beijing")), range(200)))
    assert len(answers) == 1


# Errors


def test_missing_or_damaged_folder_is_named(folder: Path, tmp_path: Path) -> None:
    """One line that names the folder, whatever is wrong with it."""
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CorruptIndexError, match=f"{path} is no BM25 index"):
            Bm25Index.open(path, language="english", version=ANALYZER)
        with pytest.raises(CorruptIndexError, match=f"{path} is no BM25 index"):
            link_copy(path, tmp_path / "target")
    for name in [
        "meta.json",
        *(file.name for file in folder.iterdir() if file.suffix not in {".lock", ".json"}),
    ]:
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(folder, damaged)
        os.truncate(damaged / name, (damaged / name).stat().st_size // 2)
        with pytest.raises(CorruptIndexError, match=f"^{damaged} is damaged.*$"):
            Bm25Index.open(damaged, language="english", version=ANALYZER)


def test_panic_of_the_engine_is_an_ordinary_error(folder: Path) -> None:
    """Flipped bytes can make the engine panic, which would pass `except Exception` and take the
    server down."""
    for file in folder.glob("*.fast"):
        data = bytearray(file.read_bytes())
        footer_bytes = 200  # what opening does check
        data[: len(data) - footer_bytes] = b"\xff" * (len(data) - footer_bytes)
        file.write_bytes(data)
    with pytest.raises(CorruptIndexError, match="damaged"):
        Bm25Index.open(folder, language="english", version=ANALYZER).search("fox", k=1)


def test_read_only_folder_can_be_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may have its index mounted read-only, where the engine's lock file cannot be
    made."""
    before = contents_of(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert rows_of(Bm25Index.open(folder, language="english", version=ANALYZER), "fox") == [0]
    assert contents_of(folder) == before


def test_another_language_is_refused(folder: Path) -> None:
    """Queries stemmed otherwise than the passages would silently miss."""
    with pytest.raises(CorruptIndexError, match="'german'"):
        Bm25Index.open(folder, language="german", version=ANALYZER)


def test_unknown_language_is_refused(folder: Path) -> None:
    """`en` is the likely mistake."""
    for make in (Bm25Index.open, Bm25Index.create):
        with pytest.raises(RetrievalError, match="language: en; give a language's English name"):
            make(folder, language="en", version=ANALYZER)


def test_too_small_a_buffer_is_refused(folder: Path) -> None:
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    with pytest.raises(RetrievalError, match="at least 15000000"):
        index.update([], [], memory_bytes=1000)


def test_k_beyond_the_index_is_all_that_match(folder: Path) -> None:
    """The engine sets memory aside for k hits; a huge k must not ask for it."""
    index = Bm25Index.open(folder, language="english", version=ANALYZER)
    assert rows_of(index, "fox", k=10**12) == [0]
    assert (
        rows_of(
            Bm25Index.create(folder.with_name("empty"), language="none", version=ANALYZER), "fox"
        )
        == []
    )
