"""Documents from files: what is read, what it is called, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from retrieval import corpus
from retrieval.corpus import Corpus, clean
from retrieval.errors import RetrievalError
from retrieval.passage import Document


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read(*sources: str | Path) -> list[Document]:
    """All documents, nothing skipped."""
    return list(Corpus(sources, skip_unreadable=False).documents())


def ids(source: Path) -> list[str]:
    return [document.id for document in read(source)]


def test_folder_is_read_in_order_of_names_without_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/B.TXT", "c.pdf", ".hidden.txt", ".git/x.txt", "a/.b/x.md"):
        write(tmp_path / name, "text")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "c/d.jsonl", '{"text": "x"}')
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
    assert read(write(tmp_path / "a.md", text)) == [Document("a.md", title, text)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_have_their_own_ids_or_their_line(tmp_path: Path, name: str) -> None:
    """The line that an editor shows: rows without text and blank lines count."""
    lines = [
        '\ufeff{"id": "x", "title": " The\\ntitle", "text": "One", "domain": "d"}',
        '{"id": 7, "title": null, "text": "Two"}',
        '{"text": " \\n"}\n\n  \r',
        '{"id": null, "text": "Three"}',
    ]
    data = "\n".join(lines).encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert read(path) == [
        Document("x", "The title", "One"),
        Document("7", "", "Two"),
        Document(f"{name}:6", "", "Three"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "a row must be an object, got list"),
        (b'{"contents": "x", "id": 1}', 'must have a "text"; got the fields contents, id'),
        (b'{"text": 1}', "the text must be a string, got int"),
        (b'{"text": "x", "title": []}', "the title must be a string, got list"),
        (b'{"text": "x", "id": ""}', "the id must be"),
        (b'{"text": "x", "id": true}', "the id must be"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
    ],
)
def test_bad_row_is_refused_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    documents = Corpus([path], skip_unreadable=False).documents()
    assert next(documents).text == "fine"
    with pytest.raises(RetrievalError, match=rf"a\.jsonl:2: .*{message}"):
        next(documents)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    """A download that broke off must not pass for a smaller corpus."""
    whole = gzip.compress(json.dumps({"text": os.urandom(9999).hex()}).encode())
    for data in (b"no gzip", whole[:-20], whole[:1000] + b"\0\0\0" + whole[1003:]):
        with pytest.raises(RetrievalError, match=r"a\.jsonl\.gz:1: not gzip, or damaged"):
            ids(write(tmp_path / "a.jsonl.gz", data))


@pytest.mark.parametrize(
    ("codec", "bom"),
    [
        ("utf-8", b"\xef\xbb\xbf"),
        ("utf-16-le", b"\xff\xfe"),
        ("utf-16-be", b"\xfe\xff"),
        ("utf-32-le", b"\xff\xfe\0\0"),
        ("utf-32-be", b"\0\0\xfe\xff"),
    ],
)
def test_byte_order_marks_are_read(tmp_path: Path, codec: str, bom: bytes) -> None:
    """Of PowerShell, Notepad and Excel; the mark is no part of the text."""
    text = write(tmp_path / "a.md", bom + "# Grüße\r\n\r北京 😀\n".encode(codec))
    assert read(str(text)) == [Document("a.md", "Grüße", "# Grüße\n\n北京 😀\n")]
    expected = [Document(name, "", f"北京 {name}\u010a") for name in "xy"]
    rows = [{"id": document.id, "text": document.text} for document in expected]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    data = bom + (lines + "\r\n").encode(codec)
    assert read(write(tmp_path / "a.jsonl", data)) == expected
    assert read(write(tmp_path / "b.jsonl.gz", gzip.compress(data))) == expected


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with those files of `docs` that cannot be read, in order."""
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 1000)
    long = gzip.compress(b'{"text": "%s"}' % os.urandom(1000).hex().encode())
    for name, data in {
        "a.txt": b"one\ncaf\xe9",
        "b.txt": b"good",
        "c.jsonl": b'{"text": "r1"}\n{"txt": "x"}\n{"text": "r3"}\nnot json\n{"text": "r5"}\n',
        "d.jsonl.gz": long[:99],
        "e.jsonl.gz": long,
        "f.md": b"x" * 2000,
        "g.jsonl": '{"text": "r1"}\n{"text": '.encode("utf-16")[:-1],
        "sub/h.txt": b"\xff\xfeg",
        "sub/i.txt": b"also good",
    }.items():
        write(tmp_path / "docs" / name, data)
    return [
        "a.txt:2: not UTF-8: byte 0xe9",
        'c.jsonl:2: a row must have a "text"; got the fields txt (and in 1 more rows)',
        "d.jsonl.gz:1: not gzip, or damaged",
        "e.jsonl.gz:1: a line of more than 0 MiB",
        "f.md: larger than 0 MiB",
        "g.jsonl:2: not UTF-16-LE: truncated data",
        "sub/h.txt:1: not UTF-16-LE: truncated data",
    ]


def check_lines(lines: list[str], parts: list[str]) -> None:
    assert all(part in line for line, part in zip(lines, parts, strict=True)), lines


def test_all_that_cannot_be_read_is_named_at_once(tmp_path: Path, unreadable: list[str]) -> None:
    """Not one after each attempt; of both sources, in one error."""
    write(tmp_path / "other/j.txt", b"\xff")
    with pytest.raises(RetrievalError) as caught:
        read(tmp_path / "docs", tmp_path / "other")
    first, *lines = str(caught.value).splitlines()
    assert first == "8 files cannot be read (--skip-unreadable goes on without):"
    check_lines(lines, [*unreadable, "j.txt:1: not UTF-8: byte 0xff"])


def test_what_cannot_be_read_is_skipped_and_named(tmp_path: Path, unreadable: list[str]) -> None:
    docs = tmp_path / "docs"
    for name in ("empty.txt", "picture.png", ".hidden.txt"):
        write(docs / name, " ")
    (docs / "away").symlink_to("/not/mounted")
    found = Corpus([docs], skip_unreadable=True)
    names = "b.txt c.jsonl:1 c.jsonl:3 c.jsonl:5 g.jsonl:1 sub/i.txt"
    assert " ".join(document.id for document in found.documents()) == names
    check_lines(found.unreadable, unreadable)
    assert (found.num_files, found.num_empty, found.num_other) == (10, 1, 1)
    unread = "a.txt away c.jsonl d.jsonl.gz e.jsonl.gz empty.txt f.md g.jsonl sub/h.txt"
    assert " ".join(sorted(found.unread)) == unread


@pytest.mark.parametrize(
    ("place", "unread"), [("os.scandir", "locked"), ("pathlib.Path.stat", "locked/b.txt")]
)
def test_folder_that_cannot_be_listed_or_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, unread: str
) -> None:
    """As with mode 0000 or 0444; its files are not gone."""
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "locked/b.txt", "b")
    real: Any = {"os.scandir": os.scandir, "pathlib.Path.stat": Path.stat}[place]

    def refuse(path: str | Path, **options: Any) -> object:
        if str(path) == str(tmp_path / unread):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(place, refuse)
    with pytest.raises(RetrievalError, match=f"{unread}: Permission denied"):
        read(tmp_path)
    found = Corpus([tmp_path], skip_unreadable=True)
    assert [document.id for document in found.documents()] == ["a.txt"]
    assert found.unread == {unread}


def test_source_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "none", "no such file or folder"),
        (write(tmp_path / "a.pdf", "x"), r"a\.pdf: not one of \.txt, \.md, \.jsonl, \.jsonl\.gz"),
        (tmp_path / "empty", r"no documents in .*: looked for \.txt"),
        (write(tmp_path / "a.txt", " \n\0"), "no documents in"),
    ]:
        with pytest.raises(RetrievalError, match=message):
            read(source)


def test_control_characters_and_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    """Offsets stay as they were."""
    text = r"a\ud800b\u0000c\u001b[1m\ud83d\ude00\tz\f"
    row = rf'{{"id": "\ud800", "title": "t\u0000", "text": "{text}"}}'
    assert read(write(tmp_path / "a.jsonl", row)) == [
        Document("\ufffd", "t", "a\ufffdb c [1m😀\tz\f")
    ]
    assert clean("e\u0301\u200d\u2028\x85") == "e\u0301\u200d\u2028\x85"


def test_file_name_that_is_not_utf8_gives_a_writable_id(tmp_path: Path) -> None:
    """SQLite and JSON refuse what the file system allows."""
    try:
        write(tmp_path / os.fsdecode(b"a\xff.txt"), "x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert ids(tmp_path) == ["a\ufffd.txt"]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(5_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in Corpus([path], skip_unreadable=False).documents()) == 5_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
