"""Bm25Index: the ranking against a naive one, hostile text, snapshots and damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.bm25 import Bm25Index, link_copy
from retrieval.errors import CorruptIndexError, RetrievalError
from tests.examples import examples
from tests.reference.naive_bm25 import bm25_scores, words
from tests.retrieval.small_index import delete

TEXTS = [
    "Élan vital\nThe running foxes jumped over 3 lazy dogs.",
    "北京大学 is in Beijing 😀😀",
    "",
    "... !!! ???",
    "AND OR NOT content:x",
    "naïve café, half \ud83d emoji",
]
WORDS = ["aa", "bb", "cc", "dd", "ee", "ff", "gg"]
MIXED = ["退", "货", "政策", "お茶", "カー", "\u3042\u3099", "한국", "어", "\u1112\u1161\u11ab"]
MIXED += ["น้ำ", "ที่", "ไม่", "ខ្មែរ", "မြန်", "ລາວ"]
MIXED += ["ab", "3", "É", " ", "。", "・", ", ", "၊", "។", "\u200b"]

open_english = partial(Bm25Index.open, language="english")


def update(index: Bm25Index, rows: Iterable[tuple[int, str]], removed: Iterable[int] = ()) -> None:
    index.update(rows, list(removed))


def create(
    folder: Path, rows: Iterable[tuple[int, str]] = (), *, language: str = "none"
) -> Bm25Index:
    index = Bm25Index.create(folder, language=language)
    update(index, rows)
    return index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An index of TEXTS in English; row = place in the list."""
    create(tmp_path / "bm25", enumerate(TEXTS), language="english")
    return tmp_path / "bm25"


def rows_of(index: Bm25Index | Path, query: str, k: int = 10) -> list[int]:
    opened = open_english(index) if isinstance(index, Path) else index
    return [int(row) for row in opened.search(query, k=k)[1]]


def contents_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Name -> inode and digest of every file."""
    return {
        file.name: (file.stat().st_ino, blake2b(file.read_bytes()).digest())
        for file in folder.iterdir()
    }


# The ranking


def check_search(passages: list[str], query: str, k: int) -> None:
    """Every score is the formula's, and nothing better is left out."""
    with TemporaryDirectory() as directory:
        scores, rows = create(Path(directory), enumerate(passages)).search(query, k=k)
    cut = [words(passage) for passage in passages]
    expected = bm25_scores(cut, words(query)) if any(cut) else [0.0] * len(cut)
    best = [score for score in sorted(expected, reverse=True) if score > 0][:k]
    assert scores == pytest.approx(best, rel=1e-5)
    assert scores == pytest.approx([expected[row] for row in rows], rel=1e-5)
    assert len(set(rows.tolist())) == len(rows)
    assert (scores.dtype.name, rows.dtype.name) == ("float32", "int64")


@pytest.mark.parametrize(
    ("pieces", "between", "max_len"), [([*WORDS, "other"], " ", 60), (MIXED, "", 8)]
)
@settings(max_examples=examples(25))
@given(data=st.data(), k=st.integers(1, 12))
def test_search_equals_naive_bm25(
    data: st.DataObject, k: int, pieces: list[str], between: str, max_len: int
) -> None:
    """Words with spaces; and scripts without, cut into pairs of characters."""
    piece = st.sampled_from(pieces)
    passage = st.lists(piece, max_size=max_len).map(between.join)
    query = data.draw(st.lists(piece | st.just("unknown"), min_size=1, max_size=5))
    check_search(data.draw(st.lists(passage, min_size=1, max_size=12)), between.join(query), k)


def test_search_of_long_passages_equals_naive_bm25() -> None:
    """Far above 40 words, where the engine rounds their number."""
    lengths = (0, 10, 41, 43, 99, 103, 500, 5000)
    check_search(["x" + " y" * length for length in lengths], "x", len(lengths))


def test_equal_scores_stand_by_row(tmp_path: Path) -> None:
    """The same passage in several segments: the answer's order does not show which came when."""
    index = create(tmp_path)
    for row in (2, 0, 3, 1):
        update(index, [(row, "same words")])
    assert rows_of(index, "words") == [0, 1, 2, 3]


# Text


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("FOXES run", [0]),
        ("elan", [0]),
        ("cafe naive", [5]),
        ("😀", []),
        ("北京大学", [1]),
        (" \n\t", []),
        ('"( \\ :* ?', []),
        ("content:x", [4]),
        ('AND OR ( " :*', [4]),
        ("\x00 \ud800 fox", [0]),
    ],
)
def test_queries_are_text_and_not_syntax(folder: Path, query: str, rows: list[int]) -> None:
    """Whatever a user types is looked up as words: no operator, no error."""
    assert rows_of(folder, query) == rows


def test_long_query_keeps_its_rarest_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is bounded, and common or unknown words do not push out the one that tells."""
    index = create(tmp_path, ((row, f"common w{row}") for row in range(50)))
    query = "common " + " ".join(f"unknown{n}" for n in range(80_000)) + " w7"
    assert len(query) > 1_000_000
    assert rows_of(index, query, k=1) == [7]
    monkeypatch.setattr("retrieval.bm25.MAX_QUERY_TERMS", 1)
    assert rows_of(index, query, k=5) == [7]


def test_languages_stem_and_none_does_not(tmp_path: Path) -> None:
    for language, found in [("none", []), ("english", [1]), ("german", []), ("tamil", [])]:
        index = create(tmp_path / language, [(1, "running wolves")], language=language)
        assert (rows_of(index, "wolves"), rows_of(index, "wolf run")) == ([1], found)


# Updates


def test_update_removes_and_adds_in_one_commit(folder: Path) -> None:
    """Unknown rows are ignored; a row that is removed and added is replaced."""
    index = open_english(folder)
    update(index, [(0, "whales"), (6, "whales too")], removed=[0, 1, 77])
    assert (rows_of(index, "fox beijing"), rows_of(index, "whales")) == ([], [0, 6])


def test_failed_update_changes_nothing_and_frees_the_folder(folder: Path) -> None:

    def broken() -> Iterator[tuple[int, str]]:
        yield 100, "whales"
        raise OSError("unreadable")

    index = open_english(folder)
    with pytest.raises(OSError, match="unreadable"):
        update(index, broken(), removed=[0])
    assert rows_of(folder, "fox whales") == [0]
    update(index, [(100, "whales")])
    assert rows_of(index, "fox whales", k=5) == [100, 0]


def test_killed_writer_leaves_the_last_commit_writable(folder: Path) -> None:
    """kill -9 in the middle of a build: none of it is visible, and its lock is gone."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from retrieval.bm25 import Bm25Index
        def rows():
            for row in range(1000, 3000):
                yield row, "whales"
            os.kill(os.getpid(), 9)
        index = Bm25Index.open(Path(sys.argv[1]), language="english")
        index.update(rows(), [0])
    """
    child = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert child.returncode == -9
    index = open_english(folder)
    assert rows_of(index, "whales fox") == [0]
    update(index, [(7, "whales")])
    assert rows_of(index, "whales") == [7]
    assert not list(folder.glob("*.temp"))


def test_one_writer_at_a_time_in_a_folder(folder: Path) -> None:
    """Two at once would lose one's work; a copy has a lock of its own."""
    copy = folder.with_name("copy")
    link_copy(folder, copy)

    def nested(place: Path) -> Iterator[tuple[int, str]]:
        update(open_english(place), [(6, "whales")])
        yield 6, "sharks"

    with pytest.raises(RetrievalError, match="another writer holds its lock"):
        update(open_english(folder), nested(folder))
    update(open_english(folder), nested(copy))
    assert rows_of(copy, "whales sharks") == [6]


def test_opened_index_is_a_snapshot(folder: Path) -> None:
    """Also when another object updates the folder and the folder is deleted."""
    before, other = open_english(folder), open_english(folder)
    update(other, [(6, "another fox")], removed=[0])
    assert (rows_of(before, "fox"), rows_of(other, "fox")) == ([0], [6])
    delete(folder)
    assert rows_of(before, "fox") == [0]
    assert before.num_docs == len(TEXTS)


def test_link_copy_shares_no_changes(folder: Path) -> None:
    """Updates, removals and merges leave the source's files byte for byte, and vice versa."""
    copy = folder.with_name("copy")
    link_copy(folder, copy)
    before = contents_of(folder)
    assert {node for node, _ in contents_of(copy).values()} < {node for node, _ in before.values()}
    index = open_english(copy)
    for step in range(12):  # more than the eight segments that start a merge
        update(index, [(100 + step, "another fox")], removed=[0, 100 + step - 3])
    assert len(list(copy.glob("*.idx"))) < 12, "no merge took place"
    assert contents_of(folder) == before
    assert rows_of(folder, "fox") == [0]
    delete(folder)
    assert rows_of(copy, "fox") == [109, 110, 111]


def test_link_copy_without_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some mounted file systems have no hard links: the copy then costs space, but works."""

    def no_links(source: object, target: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    link_copy(folder, folder.with_name("copy"))
    assert rows_of(folder.with_name("copy"), "fox") == [0]


def test_threads_search_alike(folder: Path) -> None:
    index = open_english(folder)
    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: tuple(rows_of(index, "fox cafe beijing")), range(200)))
    assert len(answers) == 1


# Errors


def test_missing_or_damaged_folder_is_named(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        for work in (open_english, lambda path: link_copy(path, tmp_path / "target")):
            with pytest.raises(CorruptIndexError, match=f"{path} is no BM25 index"):
                work(path)
    parts = [file.name for file in folder.iterdir() if file.suffix not in {".lock", ".json"}]
    for name in ["meta.json", *parts]:
        damaged = Path(shutil.copytree(folder, tmp_path / f"damaged-{name}"))
        os.truncate(damaged / name, (damaged / name).stat().st_size // 2)
        with pytest.raises(CorruptIndexError, match=f"^{damaged} is damaged.*$"):
            open_english(damaged)


def test_panic_of_the_engine_is_an_ordinary_error(folder: Path) -> None:
    """It would pass `except Exception` and take the server down."""
    for file in folder.glob("*.fast"):
        data = file.read_bytes()
        footer_bytes = 130  # what opening does check
        file.write_bytes(b"\xff" * (len(data) - footer_bytes) + data[-footer_bytes:])
    with pytest.raises(CorruptIndexError, match="damaged") as caught:
        rows_of(folder, "fox", k=1)
    assert type(caught.value.__cause__).__name__ == "PanicException"


def test_read_only_folder_can_be_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's lock file cannot be made there."""
    before = contents_of(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert rows_of(folder, "fox") == [0]
    assert contents_of(folder) == before


def test_wrong_language_is_refused(folder: Path) -> None:
    """Queries stemmed otherwise would silently miss; `en` is the likely mistake."""
    with pytest.raises(CorruptIndexError, match="'german'"):
        Bm25Index.open(folder, language="german")
    for make in (Bm25Index.open, Bm25Index.create):
        with pytest.raises(RetrievalError, match="language: en; give a language's English name"):
            make(folder, language="en")


def test_numbers_at_their_limits(folder: Path) -> None:
    """The engine sets memory aside for k hits; a huge k must not ask for it."""
    assert rows_of(folder, "fox", k=10**12) == [0]
    assert rows_of(create(folder.with_name("empty")), "fox") == []
