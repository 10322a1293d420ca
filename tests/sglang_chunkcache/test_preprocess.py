"""`python -m sglang_chunkcache.preprocess`: what it posts in which order, and one line for every mistake. A fake server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import client
from sglang_chunkcache import preprocess as command
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.preprocess import main, preprocess, read_corpus, read_neighbors
from tests.sglang_chunkcache.fake_server import FakeServer

CORPUS = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}, {"id": 3, "text": "C"}]
NEIGHBORS = [{"id": "a", "neighbors": ["b", 3, "b", "a"]}, {"id": 3, "neighbors": ["a"]}, {"id": "b", "neighbors": []}]
TEXTS = {"a": "A", "b": "B", "3": "C"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "POLL_S", 0.001)
    fake = FakeServer()
    yield fake
    fake.close()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The flags for a corpus of three and its neighbours."""
    corpus, neighbors = write(tmp_path / "corpus.jsonl", CORPUS), write(tmp_path / "neighbors.jsonl", NEIGHBORS)
    return ["--corpus", str(corpus), "--neighbors", str(neighbors)]


# Both passes


def test_every_chunk_alone_then_behind_its_neighbors(
    server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the corpus' order. Neighbours nearest first, each once, never the chunk itself. Nothing is left waiting."""
    assert main(["--url", server.url + "/", *files]) == 0
    assert server.chunks == [("A", []), ("B", []), ("C", []), ("A", ["B", "C"]), ("C", ["A"])]
    assert server.pending == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    assert table[-1].split(maxsplit=1) == ["neighbors", "4 moved, 2 computed, 0 missing"]
    store = {"pending": 0, "dropped": 0}
    one = {"seconds_per_chunk": 0.5, "refused": 0}
    nobody, found = {"moved": 0, "computed": 0, "missing": 0}, {"moved": 4, "computed": 2, "missing": 0}
    assert json.loads(line) == {
        "url": server.url,
        "top_n": 10,
        "alone": {"chunks": 3, "chunk_tokens": 30, "seconds": 1.5, **one, "neighbors": nobody},
        "behind_neighbors": {"chunks": 2, "chunk_tokens": 20, "seconds": 1.0, **one, "neighbors": found},
        "lost": 0,
        "stores": [store, store],
    }


def test_neighbors_are_movable_before_they_are_needed(server: FakeServer, files: list[str]) -> None:
    """The captures of the first pass are waited for: the second moves them."""
    main(["--url", server.url, *files])
    paths = [path for path, _ in server.posts]
    last_alone = 2
    assert "/rag/v1/generate" in paths[last_alone + 1 : paths.index("/chunkcache/preprocess", last_alone + 1)]


def test_options_reach_the_server(server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer neighbours, a system message, a key, and no table."""
    options = ["--top-n", "1", "--system", "Be brief.", "--api-key", "k", "--json"]
    assert main(["--url", server.url, *files, *options]) == 0
    assert server.chunks[3:] == [("A", ["B"]), ("C", ["A"])]
    assert server.posts[0][1]["messages"] == [{"role": "system", "content": "Be brief."}]
    assert set(server.keys) == {"Bearer k"}
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_refused_chunks_are_named_and_counted(
    server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is too long does not stop the others; the exit code tells."""
    server.refused = {"a"}
    assert main(["--url", server.url, *files]) == 1
    out, err = capsys.readouterr()
    assert "alone: 'a' is refused: messages: too long" in err
    result = json.loads(out.splitlines()[-1])
    assert (result["alone"]["chunks"], result["alone"]["refused"]) == (2, 1)
    assert (result["behind_neighbors"]["chunks"], result["behind_neighbors"]["refused"]) == (1, 1)


@pytest.mark.parametrize(
    ("missing", "flags", "status"),
    [(1, [], 1), (1, ["--max-missing", "0.25"], 0), (0, ["--max-missing", "0"], 0), (1, ["--max-missing", "0.24"], 1)],
)
def test_missing_neighbors_fail_the_command(
    server: FakeServer, files: list[str], capsys: Any, missing: int, flags: list[str], status: int
) -> None:
    """Above the share that may be missing: one line that names what to enlarge. Up to it they are only counted."""
    server.neighbors = {"moved": 2, "computed": 1, "missing": missing}
    assert main(["--url", server.url, *files, *flags]) == status
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["behind_neighbors"]["neighbors"]["missing"] == 2 * missing
    assert err.count("\n") == status
    assert ("25.0% of the neighbors were missing" in err and "--chunkcache-store-mib" in err) == bool(status)


def test_chunks_that_never_got_into_a_store_fail_the_command(server: FakeServer, files: list[str], capsys: Any) -> None:
    """Computed, and gone before they were copied: what the command is for has not happened."""
    server.num_lost = 3
    assert main(["--url", server.url, *files]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["lost"] == 6
    assert "6 chunks did not get into a store" in err


def test_progress_is_shown(server: FakeServer, files: list[str], monkeypatch: Any, capsys: Any) -> None:
    """On stderr, so that stdout stays readable by programs."""
    monkeypatch.setattr(command, "PROGRESS_S", 0.0)
    main(["--url", server.url, *files])
    assert "alone: 3/3, 500.0 ms per chunk" in capsys.readouterr().err


def test_nothing_to_put_behind_neighbors(server: FakeServer) -> None:
    """An empty neighbour file: the first pass alone, and no division by zero."""
    result = preprocess(Client(server.url, None), TEXTS, {}, top_n=10)
    assert (result["alone"]["chunks"], result["behind_neighbors"]["seconds_per_chunk"]) == (3, None)


# Files


def test_files_may_be_gzipped_and_have_empty_lines(tmp_path: Path) -> None:
    """As data sets come."""
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join([json.dumps(row) for row in CORPUS] + ["", " "]))
    assert read_corpus(path) == TEXTS


BAD_CORPUS = [
    (["{"], 1, "not JSON"),
    ([*CORPUS, "[]"], 4, "must be a JSON object"),
    ([{"text": "A"}], 1, "id must be"),
    ([{"id": "", "text": "A"}], 1, "id must be"),
    ([{"id": True, "text": "A"}], 1, "id must be"),
    ([{"id": "a"}], 1, "text must be"),
    ([{"id": "a", "text": ""}], 1, "text must be"),
    ([{"id": "a", "text": 5}], 1, "text must be"),
    ([*CORPUS, {"id": "3", "text": "again"}], 4, "id '3' occurs twice"),
]
BAD_NEIGHBORS = [
    (["nope"], 1, "not JSON"),
    ([{"id": "x", "neighbors": []}], 1, "id 'x' is not in the corpus"),
    ([{"id": "a"}], 1, "neighbors must be a list"),
    ([{"id": "a", "neighbors": "b"}], 1, "neighbors must be a list"),
    ([{"id": "a", "neighbors": [{"id": "b"}]}], 1, "neighbors must be a list"),
    ([{"id": "a", "neighbors": ["b", "x"]}], 1, "neighbor 'x' is not in the corpus"),
    ([*NEIGHBORS, {"id": "a", "neighbors": []}], 4, "id 'a' occurs twice"),
]


@pytest.mark.parametrize(("rows", "line", "text"), BAD_CORPUS, ids=[case[2] for case in BAD_CORPUS])
def test_bad_corpus_names_file_and_line(tmp_path: Path, rows: list[Any], line: int, text: str) -> None:
    """So that a line of a million is found."""
    path = write(tmp_path / "c.jsonl", rows)
    with pytest.raises(ServerError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


@pytest.mark.parametrize(("rows", "line", "text"), BAD_NEIGHBORS, ids=[case[2] for case in BAD_NEIGHBORS])
def test_bad_neighbors_name_file_and_line(tmp_path: Path, rows: list[Any], line: int, text: str) -> None:
    """Ids must be the corpus'."""
    path = write(tmp_path / "n.jsonl", rows)
    with pytest.raises(ServerError) as caught:
        read_neighbors(path, TEXTS)
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


@pytest.mark.parametrize(
    ("name", "content"), [("none.jsonl", None), ("empty.jsonl", b""), ("bytes.jsonl", b"\xff"), ("text.gz", b"{}")]
)
def test_unreadable_corpus_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    """Missing, empty, no text, no gzip."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServerError, match=name):
        read_corpus(path)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, exit code 2."""
    corpus = write(tmp_path / "c.jsonl", [{"id": "a"}])
    assert main(["--url", "http://127.0.0.1:9", "--corpus", str(corpus), "--neighbors", str(corpus)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{corpus}:1: text must be" in err


def test_top_n_below_one_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By the flag's name."""
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "x", *files, "--top-n", "0"])
    assert "--top-n: must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "x", *files, "--max-missing", "1.5"])
    assert "--max-missing: must be from 0 to 1" in capsys.readouterr().err


# The server


def test_exact_server_is_named(server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is sent."""
    server.reuse = "exact"
    assert main(["--url", server.url, *files]) == 2
    assert "not a server started with --reuse fused" in capsys.readouterr().err
    assert server.posts == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_no_server_is_one_line(url: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No server listens, or it is no address."""
    assert main(["--url", url, *files]) == 2
    assert capsys.readouterr().err.count("\n") == 1
