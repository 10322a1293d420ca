"""Documents from files: what is read, what it is called, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval import corpus
from retrieval.corpus import Corpus, clean
from retrieval.errors import RetrievalError
from retrieval.passage import Document


def write(path: Path, data: str | bytes) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_rows(path: Path, *rows: object) -> Path:
    """JSON Lines, gzipped if the name says so."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return write(path, gzip.compress(data) if path.suffix == ".gz" else data)


def read_documents(*sources: str | Path) -> Iterator[Document]:
    """All documents, nothing skipped."""
    return Corpus(sources, skip_unreadable=False).documents()


def ids(source: Path) -> list[str]:
    """The ids of all documents."""
    return [document.id for document in read_documents(source)]


def test_folder_is_read_in_order_of_names_without_hidden_and_other_files(tmp_path: Path) -> None:
    """The same folder gives the same ids in the same order on every machine."""
    for name in (
        "b.txt",
        "a/z.md",
        "a/B.TXT",
        "c.pdf",
        ".hidden.txt",
        ".git/x.txt",
        "a/.b/x.md",
        "empty.txt",
    ):
        write(tmp_path / name, "" if name == "empty.txt" else "text")
    write_rows(tmp_path / "c/d.jsonl", {"text": "x"})
    assert ids(tmp_path) == ["b.txt", "a/B.TXT", "a/z.md", "c/d.jsonl:1"]


def test_linked_folders_are_read_once_and_loops_end(tmp_path: Path) -> None:
    """A link back to the folder itself must not hang the build."""
    write(tmp_path / "docs/a.txt", "a")
    write(tmp_path / "elsewhere/b.txt", "b")
    (tmp_path / "docs/loop").symlink_to(tmp_path / "docs", target_is_directory=True)
    (tmp_path / "docs/more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "docs/dangling.txt").symlink_to(tmp_path / "none.txt")
    os.mkfifo(tmp_path / "docs/pipe.txt")
    assert ids(tmp_path / "docs") == ["a.txt", "more/b.txt"]


def test_single_file_is_called_by_its_name(tmp_path: Path) -> None:
    """Its folder may move."""
    assert list(
        read_documents(str(write(tmp_path / "a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\rThree")))
    ) == [Document("a.txt", "", "One.\nTwo.\nThree")]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Intro\n\n# The *title* ##\n# Other", "The *title*"),
        ("## Sub\n\ntext", ""),
        ("```sh\n# comment\n```\n# Title", "Title"),
        ("#hashtag\n#  \n# ##\n# C#", "C#"),
    ],
)
def test_title_of_markdown_is_its_first_heading_of_level_1(
    tmp_path: Path, text: str, title: str
) -> None:
    """The text keeps the heading."""
    assert list(read_documents(write(tmp_path / "a.md", text))) == [Document("a.md", title, text)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_have_their_own_ids_or_their_line(tmp_path: Path, name: str) -> None:
    """Rows without text are left out and do not move the others' ids."""
    rows: list[dict[str, object]] = [
        {"id": "x", "title": " The\ntitle", "text": "One", "domain": "d"},
        {"id": 7, "title": None, "text": "Two"},
        {"text": " \n"},
        {"id": None, "text": "Three"},
    ]
    assert list(read_documents(write_rows(tmp_path / name, *rows))) == [
        Document("x", "The title", "One"),
        Document("7", "", "Two"),
        Document(f"{name}:4", "", "Three"),
    ]


def test_blank_lines_count_and_the_last_line_needs_no_end(tmp_path: Path) -> None:
    """An id names the line an editor shows."""
    assert ids(write(tmp_path / "a.jsonl", '\ufeff{"text": "a"}\n\n  \r\n{"text": "b"}')) == [
        "a.jsonl:1",
        "a.jsonl:4",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a\.jsonl:2: not JSON"),
        (b"[" * 100_000, r"a\.jsonl:2: not JSON"),
        (b'["text"]', r"a\.jsonl:2: a row must be an object, got list"),
        (
            b'{"contents": "x", "id": 1}',
            r'a\.jsonl:2: a row must have a "text"; got the fields contents, id',
        ),
        (b"{}", r"got the fields none"),
        (b'{"text": 1}', r"a\.jsonl:2: the text must be a string, got int"),
        (b'{"text": "x", "title": []}', r"a\.jsonl:2: the title must be a string, got list"),
        (b'{"text": "x", "id": ""}', r"a\.jsonl:2: the id must be"),
        (b'{"text": "x", "id": true}', r"a\.jsonl:2: the id must be"),
        (b'{"text": "x", "id": 1.5}', r"a\.jsonl:2: the id must be"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8: byte 0xff"),
    ],
)
def test_bad_row_is_refused_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    """A million rows, one of them bad: the user must find it."""
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    documents = read_documents(path)
    assert next(documents).text == "fine"
    with pytest.raises(RetrievalError, match=message):
        next(documents)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    """A download that broke off must not pass for a smaller corpus."""
    whole = gzip.compress(json.dumps({"text": os.urandom(9999).hex()}).encode())
    for data in (b"no gzip", whole[:-20], whole[:1000] + b"\0\0\0" + whole[1003:]):
        with pytest.raises(RetrievalError, match=r"a\.jsonl\.gz:1: not gzip, or damaged"):
            ids(write(tmp_path / "a.jsonl.gz", data))


UNICODE = "# Grüße\r\n\r\n北京 😀\n"
MARKED = [
    (codec, bom)
    for codec, bom in (
        ("utf-8", b"\xef\xbb\xbf"),
        ("utf-16-le", b"\xff\xfe"),
        ("utf-16-be", b"\xfe\xff"),
    )
]
MARKED += [("utf-32-le", b"\xff\xfe\0\0"), ("utf-32-be", b"\0\0\xfe\xff")]


@pytest.mark.parametrize(("codec", "bom"), MARKED)
def test_byte_order_marks_are_read(tmp_path: Path, codec: str, bom: bytes) -> None:
    """Of PowerShell, Notepad and Excel: text, rows, and rows in gzip;
    the mark is no part of the text."""
    text = write(tmp_path / "a.md", bom + UNICODE.encode(codec))
    assert list(read_documents(text)) == [Document("a.md", "Grüße", "# Grüße\n\n北京 😀\n")]
    lines = "".join(
        json.dumps({"id": name, "text": f"北京 {name}\u010a"}, ensure_ascii=False) + "\r\n"
        for name in "xy"
    )
    data = bom + (lines + "\r\n").encode(codec)
    for rows in (
        write(tmp_path / "a.jsonl", data),
        write(tmp_path / "b.jsonl.gz", gzip.compress(data)),
    ):
        assert list(read_documents(rows)) == [
            Document(name, "", f"北京 {name}\u010a") for name in "xy"
        ]


def test_text_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Half a character of UTF-16 at the end."""
    path = write(tmp_path / "a.txt", "one\ntwo\nthree".encode("utf-16")[:-1])
    with pytest.raises(RetrievalError, match=r"a\.txt:3: not UTF-16-LE: truncated data"):
        ids(path)
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"}'.encode("utf-16")[:-1])
    with pytest.raises(RetrievalError, match=r"a\.jsonl:2: not UTF-16-LE: truncated data"):
        ids(path)


def write_unreadable(folder: Path) -> list[str]:
    """Six kinds of files that cannot be read among good ones; what is wrong with them, in order."""
    write(folder / "a.txt", "one\ncaf\xe9".encode("latin-1"))
    write(folder / "b.txt", "good")
    write(
        folder / "c.jsonl",
        b'{"text": "r1"}\n{"txt": "x"}\n{"text": "r3"}\nnot json\n{"text": "r5"}\n',
    )
    write(
        folder / "d.jsonl.gz",
        gzip.compress(b'{"text": "%s"}' % os.urandom(200).hex().encode())[:99],
    )
    write(folder / "e.md", b"x" * 2000)
    write(folder / "sub/f.txt", b"\xff\xfeg")
    write(folder / "sub/g.txt", "also good")
    return [
        "a.txt:2: not UTF-8: byte 0xe9",
        'c.jsonl:2: a row must have a "text"; got the fields txt (and in 1 more rows)',
        "d.jsonl.gz:1: not gzip, or damaged",
        "e.md: larger than 0 MiB",
        "sub/f.txt:1: not UTF-16-LE: truncated data",
    ]


def test_all_that_cannot_be_read_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one after each attempt; of both sources, in one error."""
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 1000)
    expected = write_unreadable(tmp_path / "docs")
    write(tmp_path / "other/h.txt", b"\xff")
    documents = read_documents(tmp_path / "docs", tmp_path / "other")
    with pytest.raises(RetrievalError) as caught:
        list(documents)
    first, *lines = str(caught.value).splitlines()
    assert first == "6 files cannot be read (--skip-unreadable goes on without):"
    for line, part in zip(lines, [*expected, "h.txt:1: not UTF-8: byte 0xff"], strict=True):
        assert part in line


def test_what_cannot_be_read_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the rest is read, rows beside bad ones too."""
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 1000)
    expected = write_unreadable(tmp_path)
    for name in ("empty.txt", "picture.png", ".hidden.txt"):
        write(tmp_path / name, " ")
    (tmp_path / "away").symlink_to("/not/mounted")
    found = Corpus([tmp_path], skip_unreadable=True)
    assert [document.id for document in found.documents()] == [
        "b.txt",
        "c.jsonl:1",
        "c.jsonl:3",
        "c.jsonl:5",
        "sub/g.txt",
    ]
    assert len(found.reading.unreadable) == len(expected)
    assert all(part in line for line, part in zip(found.reading.unreadable, expected, strict=True))
    assert (found.reading.files, found.reading.num_empty, found.reading.num_other) == (8, 1, 1)
    assert found.reading.unread == {
        "a.txt",
        "c.jsonl",
        "d.jsonl.gz",
        "e.md",
        "sub/f.txt",
        "empty.txt",
        "away",
    }


def test_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are not gone."""
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "locked/b.txt", "b")
    listed = os.scandir

    def scandir(folder: str) -> object:
        if Path(folder).name == "locked":
            raise PermissionError(13, "Permission denied", folder)
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RetrievalError, match="locked: Permission denied"):
        ids(tmp_path)
    found = Corpus([tmp_path], skip_unreadable=True)
    assert [document.id for document in found.documents()] == ["a.txt"]
    assert found.reading.unread == {"locked"}


def test_folder_that_cannot_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be listed, as with mode 0444; its files are not gone."""
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "locked/b.txt", "b")
    stat = Path.stat

    def refuse(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(RetrievalError, match=r"b\.txt: Permission denied"):
        ids(tmp_path)
    found = Corpus([tmp_path], skip_unreadable=True)
    assert [document.id for document in found.documents()] == ["a.txt"]
    assert found.reading.unread == {"locked/b.txt"}


def test_text_that_is_not_utf8_is_refused_by_line(tmp_path: Path) -> None:
    """Latin-1 would otherwise become rubbish in the index."""
    with pytest.raises(RetrievalError, match=r"a\.txt:3: not UTF-8: byte 0xe9"):
        ids(write(tmp_path / "a.txt", b"one\ntwo\ncaf\xe9"))


def test_too_large_a_document_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump given by mistake would fill the memory."""
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 1 << 20)
    with pytest.raises(RetrievalError, match=r"a\.txt: larger than 1 MiB"):
        ids(write(tmp_path / "a.txt", "x" * (1 << 20) + "x"))
    with pytest.raises(RetrievalError, match=r"a\.jsonl\.gz:1: a line of more than 1 MiB"):
        ids(write_rows(tmp_path / "a.jsonl.gz", {"text": "x" * (1 << 20)}))


def test_source_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    """An empty index would answer nothing, and say nothing."""
    with pytest.raises(RetrievalError, match="no such file or folder"):
        read_documents(tmp_path / "none")
    with pytest.raises(
        RetrievalError, match=r"a\.pdf: not one of \.txt, \.md, \.jsonl, \.jsonl\.gz"
    ):
        read_documents(write(tmp_path / "a.pdf", "x"))
    with pytest.raises(RetrievalError, match=r"no documents in .*: looked for \.txt"):
        ids(tmp_path)
    with pytest.raises(RetrievalError, match="no documents in"):
        ids(write(tmp_path / "a.txt", " \n\0"))


def test_control_characters_and_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    """NUL ends strings in C, ESC commands a terminal, a lone surrogate cannot be written;
    offsets stay as they were."""
    path = write(
        tmp_path / "a.jsonl",
        r'{"id": "\ud800", "title": "t\u0000", "text":'
        r' "a\ud800b\u0000c\u001b[1m\ud83d\ude00\tz\f"}',
    )
    assert list(read_documents(path)) == [Document("\ufffd", "t", "a\ufffdb c [1m😀\tz\f")]
    assert clean("e\u0301\u200d\u2028\x85") == "e\u0301\u200d\u2028\x85"


def test_file_name_that_is_not_utf8_gives_a_writable_id(tmp_path: Path) -> None:
    """SQLite and JSON refuse what the file system allows."""
    try:
        write(tmp_path / os.fsdecode(b"a\xff.txt"), "x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert ids(tmp_path) == ["a\ufffd.txt"]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """5 MB of rows pass through far less."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(5_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_documents(path)) == 5_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
