"""`python -m retrieval`: a mistake is one line on stderr and exit code 2, never a traceback;
what is asked for is on stdout."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from retrieval.__main__ import main
from retrieval.manifest import writer_lock

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


def check_refused(capsys: pytest.CaptureFixture[str], argv: Sequence[object], message: str) -> None:
    capsys.readouterr()
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert message in err.encode("utf-8", "backslashreplace").decode(), err
    assert out == ""
    assert len([line for line in err.splitlines() if not line.startswith(("usage: ", " "))]) == 1, (
        err
    )


def test_build_search_inspect_remove(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer's way; each prints one JSON object when asked."""
    folder = tmp_path / "index"
    assert run("build", docs, "--out", folder, *BUILD, "--json") == 0
    assert json.loads(capsys.readouterr().out)["passages"] == 3
    assert run("search", folder, "winged", "seeds", "--json", "--k", "1") == 0
    (passage,) = json.loads(capsys.readouterr().out)["passages"]
    assert (passage["document"], passage["title"]) == ("ash.md", "Ash")
    assert run("inspect", folder, "--verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passages"] == 3
    assert run("remove", folder, "ash.md") == 0
    assert run("build", docs, "--out", folder) == 0, (
        "the directory's settings are kept when none are given"
    )
    assert "1 added" in capsys.readouterr().out
    for command in ([], ["--passage", "tea.txt"]):
        assert run("inspect", folder, *command) == 0
    assert run("search", folder, "\u8336", "--mode", "dense", "--k", "1") == 0
    assert "tea.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "query", ["?!", "", " ", "\u00e9\u8336\U0001f375", "bark" + ODD, ODD, "word " * 200_000, "\0"]
)
@pytest.mark.parametrize("mode", ["fusion", "dense", "bm25"])
def test_any_query_is_answered(
    index: Path, capfd: pytest.CaptureFixture[str], query: str, mode: str
) -> None:
    """Punctuation, nothing, a megabyte, broken UTF-8: passages or none, as text and as JSON."""
    for flags in ([], ["--json"]):
        assert run("search", index, query, "--mode", mode, *flags) == 0
    assert len(json.loads(capfd.readouterr().out.splitlines()[-1])["passages"]) <= 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["build", "DOCS/nothing", "--out", "TMP/new"], "no such file or folder"),
        (["build", "TMP", "--out", "TMP/new"], "TMP"),
        (["build", "DOCS/../x.pdf", "--out", "TMP/new"], "no such file"),
        (["build", "--out", "TMP/new"], "required: SOURCE"),
        (["build", "DOCS", "--out", "FILE"], "FILE"),
        (["build", "DOCS", "--out", "FILE/below"], "FILE/below"),
        (["build", "DOCS", "--out", "TMP/new", "--chunk-tokens", "1"], "at least 8 tokens"),
        (["build", "DOCS", "--out", "TMP/new", "--overlap-tokens", "-1"], "overlap"),
        (["build", "DOCS", "--out", "TMP/new", "--dim", "0"], "dim"),
        (["build", "DOCS", "--out", "TMP/new", "--dim", "x"], "invalid int value"),
        (["build", "DOCS", "--out", "TMP/new", "--factory", "Nonsense"], "factory 'Nonsense'"),
        (["build", "DOCS", "--out", "TMP/new", "--bm25", "klingon"], "klingon"),
        (["build", "DOCS", "--out", "TMP/new", "--tokenizer", "TMP/no-tokenizer"], "no-tokenizer"),
        (["build", "DOCS", "--out", "INDEX", "--dim", "17"], "was built with encoder"),
        (
            ["build", "DOCS", "--out", "INDEX", "--chunk-tokens", "99"],
            "was built with max_tokens 256, not 99",
        ),
        (["search", "TMP/nothing", "x"], "no index there"),
        (["search", "FILE", "x"], "no index there"),
        (["search", "DOCS", "x"], "no index there"),
        (["search", "INDEX", "x", "--k", "0"], "at least 1"),
        (["search", "INDEX", "x", "--k", "many"], "invalid int value"),
        (["search", "INDEX", "x", "--nprobe", "-3"], "at least 1"),
        (["search", "INDEX", "x", "--mode", "sparse"], "invalid choice"),
        (["search", "INDEX", "x", "--encoder", "elsewhere"], "--encoder elsewhere does not fit"),
        (["search", "INDEX"], "required: query"),
        (["inspect", "INDEX", "--passage", "nobody"], "has the id 'nobody'"),
        (["inspect", "INDEX", "--passage", ODD], "has the id"),
        (["inspect", "INDEX/nothing"], "no index there"),
        (["remove", "INDEX", "nobody"], "has the id 'nobody'"),
        (["remove", "INDEX", ODD], "has the id"),
        (["remove", "TMP/nothing", "x"], "TMP/nothing"),
        (["neighbors", "TMP/nothing", "--out", "TMP/n"], "no index there"),
        ([], "required: COMMAND"),
        (["serve"], "invalid choice"),
    ],
)
def test_a_mistake_is_one_line(
    docs: Path,
    index: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    """With what is wrong in it."""
    (tmp_path / "file").write_text("x")
    places = {"DOCS": docs, "INDEX": index, "TMP": tmp_path, "FILE": tmp_path / "file"}
    for name, path in places.items():
        argv = [word.replace(name, str(path)) for word in argv]
        message = message.replace(name, str(path))
    check_refused(capsys, argv, message)


def test_a_second_builder_says_so(
    docs: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of waiting or writing into the same files."""
    with writer_lock(index):
        check_refused(capsys, ["build", docs, "--out", index], "another process is building it")
        check_refused(capsys, ["remove", index, "ash.md"], "another process is building it")


def test_as_a_process(index: Path, tmp_path: Path) -> None:
    """Exit code, stdout and stderr as a shell sees them, with a query that is no UTF-8."""
    command = [sys.executable.encode(), b"-m", b"retrieval", b"search"]
    utf8 = {**os.environ, "PYTHONUTF8": "1"}
    good = subprocess.run(
        [*command, bytes(index), b"bark \xff", b"--json"], capture_output=True, check=True, env=utf8
    )
    assert json.loads(good.stdout)["passages"][0]["document"] == "birch.txt"
    assert good.stderr == b""
    bad = subprocess.run([*command, bytes(tmp_path), b"bark"], capture_output=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.decode().splitlines() == [
        f"retrieval search: {tmp_path}: no index there; `python -m retrieval build` makes one"
    ]


@pytest.mark.parametrize("limit_kib", [16, 64, 256])
def test_first_build_on_a_full_disk_is_named_and_resumed(tmp_path: Path, limit_kib: int) -> None:
    """Exit code 2 and one line, and with room the same command continues.
    A limit on the size of files stands for the disk."""
    documents = tmp_path / "documents.jsonl"
    lines = (
        json.dumps({"id": f"d{i}", "text": f"note {i} " + " ".join(f"w{i}x{j}" for j in range(60))})
        for i in range(600)
    )
    documents.write_text("\n".join(lines), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "retrieval",
        "build",
        str(documents),
        "--out",
        str(tmp_path / "index"),
        "--dim",
        "64",
    ]
    size = limit_kib << 10
    full = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert full.stderr.splitlines()[-1].startswith("retrieval build: ")
    subprocess.run(command, capture_output=True, check=True)
    assert main(["inspect", str(tmp_path / "index"), "--verify"]) == 0


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Five files with an index `index` beside them:
    two texts, two rows with ids of their own, one in a folder."""
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (folder / name).write_text(f"The note {name} of the keeper.")
    (folder / "rows.jsonl").write_text(
        '{"id": "r1", "text": "Row one."}\n{"id": "r2", "text": "Row two."}\n'
    )
    assert run("build", folder, "--out", tmp_path / "index", *BUILD) == 0
    return folder


def ids_in(index: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Documents that a search finds."""
    capsys.readouterr()
    assert run("search", index, "note row", "--mode", "bm25", "--k", 20, "--json") == 0
    return sorted(
        passage["document"] for passage in json.loads(capsys.readouterr().out)["passages"]
    )


def test_build_says_what_it_has_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files read and left out, unreadable ones by name, and scripts that need more than words;
    the same as JSON."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, data in [
        ("a.txt", b"plain"),
        ("zh.txt", "茶是一种饮料。".encode()),
        ("bad.txt", b"\xff"),
        ("rows.jsonl", b"[]"),
    ]:
        (docs / name).write_bytes(data)
    (docs / "empty.md").touch()
    (docs / "table.pdf").touch()
    command = ["build", docs, "--out", tmp_path / "index", *BUILD]
    capsys.readouterr()
    assert run(*command) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert "2 files cannot be read (--skip-unreadable goes on without)" in first
    assert [line.split("/")[-1].split(" ")[0] for line in rest] == ["bad.txt:1:", "rows.jsonl:1:"]
    assert run(*command, "--skip-unreadable") == 0
    out = capsys.readouterr().out
    assert "documents: 2 read" in out
    assert "files: 5 read, 1 of them without text; 1 of other kinds skipped" in out
    assert out.count("skipped: ") == 2
    assert "bad.txt:1: not UTF-8: byte 0xff" in out
    assert "rows.jsonl:1: a row must be an object" in out
    assert "scripts without spaces: 1 documents" in out
    assert run(*command, "--skip-unreadable", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {
        name: told[name]
        for name in ("documents", "unspaced", "files", "without_text", "other_files")
    } == {
        "documents": 2,
        "unspaced": 1,
        "files": 5,
        "without_text": 1,
        "other_files": 1,
    }
    assert len(told["unreadable"]) == 2


def test_prune_removes_what_is_gone(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deleted file and a deleted row; a renamed file keeps its text, under its new name.
    A dry run tells before."""
    index = notes.with_name("index")
    (notes / "a.txt").unlink()
    (notes / "b.txt").rename(notes / "new.txt")
    assert run("build", notes, "--out", index) == 0
    assert ids_in(index, capsys) == ["a.txt", "b.txt", "r1", "r2", "sub/c.txt"], (
        "without --prune all of them stay"
    )
    manifest = (index / "manifest.json").read_bytes()
    assert run("build", notes, "--out", index, "--prune", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["would go: a.txt (1 passages)", "would go: b.txt (1 passages)"]
    assert (index / "manifest.json").read_bytes() == manifest
    assert run("build", notes, "--out", index, "--prune-all", "--dry-run", "--json") == 0
    assert [row["document"] for row in json.loads(capsys.readouterr().out)["gone"]] == [
        "a.txt",
        "b.txt",
    ]
    assert run("build", notes, "--out", index, "--prune") == 0
    assert "pruned: 2 documents" in capsys.readouterr().out
    assert ids_in(index, capsys) == ["new.txt", "r1", "r2", "sub/c.txt"]
    (notes / "rows.jsonl").write_text('{"id": "r2", "text": "Row two."}\n')
    assert run("build", notes, "--out", index, "--prune") == 0
    assert ids_in(index, capsys) == ["new.txt", "r2", "sub/c.txt"]


def test_prune_keeps_what_was_not_read(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unreadable files, texts or rows, empty ones, and what lies behind a link that leads nowhere
    are not gone."""
    index = notes.with_name("index")
    (notes / "a.txt").write_bytes(b"\xff")
    (notes / "b.txt").write_text(" ")
    (notes / "rows.jsonl").write_text('{"id": "r1"}\n{"id": "r9", "text": "Row nine."}\n')
    (notes / "sub/c.txt").unlink()
    (notes / "sub").rmdir()
    (notes / "sub").symlink_to(notes / "unmounted")
    for flags in (["--dry-run"], []):
        assert run("build", notes, "--out", index, "--prune", "--skip-unreadable", *flags) == 0
    assert "pruned: 0 documents" in capsys.readouterr().out
    assert ids_in(index, capsys) == ["a.txt", "b.txt", "r1", "r2", "r9", "sub/c.txt"]
    (notes / "sub").unlink()
    assert run("build", notes, "--out", index, "--prune", "--skip-unreadable") == 0
    assert ids_in(index, capsys) == ["a.txt", "b.txt", "r1", "r2", "r9"]


def test_prune_refuses_what_looks_like_a_mistake(
    notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is missing, empty, or has lost more than half of what is served, however often
    it is tried: exit code 2, and the index is as it was."""
    index, away = notes.with_name("index"), notes.with_name("away")
    before = ids_in(index, capsys)
    (notes / "only.txt").write_text("The only note.")
    for name in ("a.txt", "b.txt", "rows.jsonl"):
        (notes / name).rename(notes / f".{name}")
    for flags in (["--prune"], ["--prune"], ["--prune", "--dry-run"]):
        capsys.readouterr()
        assert run("build", notes, "--out", index, *flags) == 2
        out, err = capsys.readouterr()
        assert "4 of 5 documents with 4 of 5 passages are not there any more, more than half" in err
        assert ("would go: r1 (1 passages)" in out) == ("--dry-run" in flags)
    assert ids_in(index, capsys) == before
    check_refused(capsys, ["build", notes, "--out", index, "--dry-run"], "give both")
    notes.rename(away)
    for flags in (["--prune"], ["--prune", "--dry-run"]):
        check_refused(capsys, ["build", notes, "--out", index, *flags], "no such file or folder")
    notes.mkdir()
    for flags in (["--prune"], ["--prune", "--dry-run"]):
        check_refused(capsys, ["build", notes, "--out", index, *flags], "no documents in")
    assert ids_in(index, capsys) == before
    assert run("build", away, "--out", index, "--prune-all") == 0
    assert ids_in(index, capsys) == ["only.txt", "sub/c.txt"]
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
    "flags",
    [
        [],
        [
            "--tokenizer",
            "bundled",
            "--chunk-tokens",
            "40",
            "--overlap-tokens",
            "8",
            "--bm25",
            "off",
        ],
    ],
)
def test_settings_that_are_given_are_kept(docs: Path, tmp_path: Path, flags: list[str]) -> None:
    """The second build has the first one's settings without their flags,
    and equal ones may be given again."""
    folder = tmp_path / "index"
    assert run("build", docs, "--out", folder, "--dim", "16", *flags) == 0
    settings = (folder / "settings.json").read_text()
    kept = json.loads(settings)
    assert kept["encoder"] == {"kind": "hashed", "dim": 16}
    assert (kept["max_tokens"], kept["bm25_language"]) == (
        (40, None) if flags else (256, "english")
    )
    for again in ([], flags):
        assert run("build", docs, "--out", folder, *again) == 0
        assert (folder / "settings.json").read_text() == settings
