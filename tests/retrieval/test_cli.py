"""`python -m retrieval`: a mistake is one line on stderr and exit code 2, never a traceback;
what is asked for is on stdout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from typing import Any

import pytest

from retrieval.__main__ import main
from tests.retrieval.languages import QUESTIONS, write_texts

BUILD = ["--dim", "16", "--bm25", "none"]
ODD = "\udcff"
"""What Python makes of a byte in argv that is no UTF-8."""


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents, one of them in Chinese."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "ash.md").write_text("# Ash\n\nThe ash is a tree with winged seeds.\n")
    (folder / "birch.txt").write_text("The birch has white bark.\n")
    (folder / "tea.txt").write_text("\u8336\u662f\u4e00\u79cd\u996e\u6599\u3002\n")
    return folder


@pytest.fixture(scope="module")
def index(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "index"
    assert main(["build", str(docs), "--out", str(folder), *BUILD]) == 0
    return folder


def run(*argv: object) -> int:
    """The exit code, argparse's too."""
    try:
        return main([str(word) for word in argv])
    except SystemExit as stop:
        return int(str(stop.code))


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command that works prints."""
    capsys.readouterr()
    assert run(*argv) == 0
    return capsys.readouterr().out


def asked(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    """The JSON object that it prints instead."""
    return json.loads(told(capsys, *argv, "--json"))


def check_refused(capsys: pytest.CaptureFixture[str], argv: Sequence[object], message: str) -> None:
    capsys.readouterr()
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert message in err.encode("utf-8", "backslashreplace").decode(), err
    assert out == ""
    assert len([line for line in err.splitlines() if not line.startswith(("usage: ", " "))]) == 1


def test_build_search_inspect_remove(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer's way; each prints one JSON object when asked."""
    folder = tmp_path / "index"
    assert asked(capsys, "build", docs, "--out", folder, *BUILD)["passages"] == 3
    (passage,) = asked(capsys, "search", folder, "winged", "seeds", "--k", "1")["passages"]
    assert (passage["document"], passage["title"]) == ("ash.md", "Ash")
    assert asked(capsys, "inspect", folder, "--verify")["passages"] == 3
    assert run("remove", folder, "ash.md") == 0
    again = told(capsys, "build", docs, "--out", folder)
    assert "1 added" in again, "the directory's settings are kept when none are given"
    assert "tea.txt" in told(capsys, "search", folder, "\u8336", "--mode", "dense", "--k", "1")
    for command in ([], ["--passage", "tea.txt"]):
        assert run("inspect", folder, *command) == 0


@pytest.mark.parametrize(
    "query", ["?!", "", "\u8336\U0001f375", "bark" + ODD, "a " * 400_000, "\0"]
)
@pytest.mark.parametrize("mode", ["fusion", "dense", "bm25"])
def test_any_query_is_answered(
    index: Path, capsys: pytest.CaptureFixture[str], query: str, mode: str
) -> None:
    """Punctuation, nothing, a megabyte, broken UTF-8: passages or none, as text and as JSON."""
    told(capsys, "search", index, query, "--mode", mode)
    assert len(asked(capsys, "search", index, query, "--mode", mode)["passages"]) <= 5


@pytest.fixture
def places(docs: Path, index: Path, tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").write_text("x")
    return {"DOCS": docs, "INDEX": index, "TMP": tmp_path, "FILE": tmp_path / "file"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("build DOCS/nothing --out TMP/new", "no such file or folder"),
        ("build DOCS --out FILE", "FILE"),
        ("build DOCS --out FILE/below", "FILE/below"),
        ("build DOCS --out TMP/new --dim 0", "dim"),
        ("build DOCS --out TMP/new --tokenizer TMP/no-tokenizer", "no-tokenizer"),
        ("build DOCS --out INDEX --dim 17", "was built with encoder"),
        ("build DOCS --out INDEX --dry-run", "give both"),
        ("search FILE x", "no index there"),
        ("search INDEX x --encoder elsewhere", "--encoder elsewhere does not fit"),
        (f"inspect INDEX --passage {ODD}", "has the id"),
        ("remove INDEX nobody", "has the id 'nobody'"),
        ("neighbors TMP/nothing --out TMP/n", "no index there"),
        ("", "required: COMMAND"),
        ("serve", "invalid choice"),
    ],
)
def test_a_mistake_is_one_line(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    for name, path in places.items():
        command, message = command.replace(name, str(path)), message.replace(name, str(path))
    check_refused(capsys, command.split(" ") if command else [], message)


def test_as_a_process(index: Path, tmp_path: Path) -> None:
    """Exit code, stdout and stderr as a shell sees them, with a query that is no UTF-8."""
    command = [sys.executable.encode(), b"-m", b"retrieval", b"search"]
    utf8 = {**os.environ, "PYTHONUTF8": "1"}
    argv = [*command, bytes(index), b"bark \xff", b"--json"]
    good = subprocess.run(argv, capture_output=True, check=True, env=utf8)
    assert json.loads(good.stdout)["passages"][0]["document"] == "birch.txt"
    assert good.stderr == b""
    bad = subprocess.run([*command, bytes(tmp_path), b"bark"], capture_output=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"retrieval search: %s: no index there" % bytes(tmp_path))


@pytest.mark.parametrize(
    "limit_kib", [64, *(pytest.param(kib, marks=pytest.mark.nightly) for kib in (16, 256))]
)
def test_first_build_on_a_full_disk_is_named_and_resumed(tmp_path: Path, limit_kib: int) -> None:
    """A limit on the size of files stands for the disk."""
    documents = tmp_path / "documents.jsonl"
    words = " ".join(f"w{number}" for number in range(60))
    rows = [{"id": f"d{i}", "text": f"note {i} {words.replace('w', f'w{i}x')}"} for i in range(600)]
    documents.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    place = str(tmp_path / "index")
    command = [sys.executable, "-m", "retrieval", "build", str(documents), "--out", place]
    size = limit_kib << 10
    full = subprocess.run(
        [*command, "--dim", "64"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert full.stderr.splitlines()[-1].startswith("retrieval build: ")
    subprocess.run([*command, "--dim", "64"], capture_output=True, check=True)
    assert run("inspect", place, "--verify") == 0


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Five documents, with an index `index` beside their folder."""
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (folder / name).write_text(f"The note {name} of the keeper.")
    rows = '{"id": "r1", "text": "Row one."}\n{"id": "r2", "text": "Row two."}\n'
    (folder / "rows.jsonl").write_text(rows)
    assert run("build", folder, "--out", tmp_path / "index", *BUILD) == 0
    return folder


def ids_in(index: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = asked(capsys, "search", index, "note row", "--mode", "bm25", "--k", 20)
    return sorted(passage["document"] for passage in found["passages"])


def test_build_says_what_it_has_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in [("a.txt", "plain"), ("zh.txt", "茶是一种饮料。"), ("rows.jsonl", "[]")]:
        (docs / name).write_text(text)
    (docs / "bad.txt").write_bytes(b"\xff")
    (docs / "empty.md").touch()
    (docs / "table.pdf").touch()
    command = ["build", docs, "--out", tmp_path / "index", *BUILD]
    assert run(*command) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert "2 files cannot be read (--skip-unreadable goes on without)" in first
    assert [line.split("/")[-1].split(" ")[0] for line in rest] == ["bad.txt:1:", "rows.jsonl:1:"]
    out = told(capsys, *command, "--skip-unreadable")
    for line in (
        "files: 5 read, 1 of them without text; 1 of other kinds skipped",
        "bad.txt:1: not UTF-8: byte 0xff",
    ):
        assert line in out
    report = asked(capsys, *command, "--skip-unreadable")
    assert (report["documents"], report["files"]) == (2, 5)
    assert (report["without_text"], report["other_files"], len(report["unreadable"])) == (1, 1, 2)


def test_prune_removes_what_is_gone(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file and a row; a renamed file keeps its text, under its new name."""
    index = notes.with_name("index")
    command = ["build", notes, "--out", index, "--prune-all"]
    (notes / "a.txt").unlink()
    (notes / "b.txt").rename(notes / "new.txt")
    (notes / "rows.jsonl").write_text('{"id": "r2", "text": "Row two."}\n')
    assert run(*command[:-1]) == 0
    before = ids_in(index, capsys)
    assert before == ["a.txt", "b.txt", "r1", "r2", "sub/c.txt"], "without --prune all of them stay"
    assert "would go: a.txt (1 passages)\n" in told(capsys, *command, "--dry-run")
    gone = asked(capsys, *command, "--dry-run")["gone"]
    assert [row["document"] for row in gone] == ["a.txt", "b.txt", "r1"]
    assert ids_in(index, capsys) == before
    assert "pruned: 3 documents" in told(capsys, *command)
    assert ids_in(index, capsys) == ["new.txt", "r2", "sub/c.txt"]


def test_prune_keeps_what_was_not_read(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unreadable or empty files and rows, and what lies behind a link that leads nowhere."""
    index = notes.with_name("index")
    command = ["build", notes, "--out", index, "--prune", "--skip-unreadable"]
    (notes / "a.txt").write_bytes(b"\xff")
    (notes / "b.txt").write_text(" ")
    (notes / "rows.jsonl").write_text('{"id": "r1"}\n{"id": "r9", "text": "Row nine."}\n')
    (notes / "sub").rename(notes / ".sub")
    (notes / "sub").symlink_to(notes / "unmounted")
    assert run(*command, "--dry-run") == 0
    assert "pruned: 0 documents" in told(capsys, *command)
    assert ids_in(index, capsys) == ["a.txt", "b.txt", "r1", "r2", "r9", "sub/c.txt"]
    (notes / "sub").unlink()
    assert "pruned: 1 documents" in told(capsys, *command)


def test_prune_refuses_what_looks_like_a_mistake(
    notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is missing, empty, or has lost more than half, however often it is tried."""
    index, away = notes.with_name("index"), notes.with_name("away")
    command, dry = ["build", notes, "--out", index, "--prune"], ["--dry-run"]
    before = ids_in(index, capsys)
    for name in ("a.txt", "b.txt", "rows.jsonl"):
        (notes / name).rename(notes / f".{name}")
    for flags in ([], [], dry):
        capsys.readouterr()
        assert run(*command, *flags) == 2
        out, err = capsys.readouterr()
        assert "4 of 5 documents with 4 of 5 passages are not there any more, more than half" in err
        assert ("would go: r1 (1 passages)" in out) == (flags == dry)
    notes.rename(away)
    for flags in ([], dry):
        check_refused(capsys, [*command, *flags], "no such file or folder")
    notes.mkdir()
    for flags in ([], dry):
        check_refused(capsys, [*command, *flags], "no documents in")
    assert ids_in(index, capsys) == before
    assert run("build", away, "--out", index, "--prune-all") == 0
    assert ids_in(index, capsys) == ["sub/c.txt"]
    assert run("build", notes.with_name("nowhere"), "--out", index, "--prune-all") == 0
    assert ids_in(index, capsys) == []


def test_a_folder_called_words_is_no_tokenizer(
    docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`words` and `bundled` are names, whatever lies in the current folder."""
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run("build", docs, "--out", "index", *BUILD) == 0
    assert json.loads(Path("index", "settings.json").read_text())["tokens"] == "words"


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", (256, "english")),
        ("--tokenizer bundled --chunk-tokens 40 --overlap-tokens 8 --bm25 off", (40, None)),
    ],
)
def test_settings_that_are_given_are_kept(
    docs: Path, tmp_path: Path, flags: str, kept: tuple[int, str | None]
) -> None:
    """Without their flags; and equal ones may be given again."""
    folder = tmp_path / "index"
    assert run("build", docs, "--out", folder, "--dim", "16", *flags.split()) == 0
    text = (folder / "settings.json").read_text()
    settings = json.loads(text)
    assert settings["encoder"] == {"kind": "hashed", "dim": 16}
    assert (settings["max_tokens"], settings["bm25_language"]) == kept
    for again in ([], flags.split()):
        assert run("build", docs, "--out", folder, *again) == 0
        assert (folder / "settings.json").read_text() == text


def test_questions_find_their_texts_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In scripts without spaces and in Korean: at least seven of eight."""
    index = tmp_path / "index"
    told(capsys, "build", write_texts(tmp_path / "docs"), "--out", index)
    found = [asked(capsys, "search", index, question)["passages"] for question in QUESTIONS]
    names = [passages[0]["document"] if passages else None for passages in found]
    assert sum(map(eq, names, QUESTIONS.values())) >= 7
