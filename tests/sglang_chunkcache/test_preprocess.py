"""`python -m sglang_chunkcache.preprocess`:
what it posts in which order, and one line for every mistake. A fake server."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import client
from sglang_chunkcache.chunk_files import read_corpus, read_neighbors
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.preprocess import main, preprocess
from tests.sglang_chunkcache.fake_server import FakeServer

CORPUS = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}, {"id": 3, "text": "C"}]
NEIGHBORS = [
    {"id": "a", "neighbors": ["b", 3, "b", "a"]},
    {"id": 3, "neighbors": ["a"]},
    {"id": "b", "neighbors": []},
]
TEXTS = {"a": "A", "b": "B", "3": "C"}
PASSES = ("alone", "behind_neighbors")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "POLL_S", 0.001)
    fake = FakeServer()
    yield fake
    fake.close()


def write(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The flags for a corpus of three and its neighbours."""
    corpus = write(tmp_path / "corpus.jsonl", CORPUS)
    neighbors = write(tmp_path / "neighbors.jsonl", NEIGHBORS)
    return ["--corpus", str(corpus), "--neighbors", str(neighbors)]


Run = Callable[..., tuple[int, dict[str, Any], str]]
"""The command with these flags: its status, the JSON line's object, and stderr."""


@pytest.fixture
def run(server: FakeServer, files: list[str], capsys: Capture) -> Run:
    def run(*flags: str) -> tuple[int, dict[str, Any], str]:
        status = main(["--url", server.url, *files, *flags])
        out, err = capsys.readouterr()
        return status, json.loads(out.splitlines()[-1]), err

    return run


# Both passes


def test_every_chunk_alone_then_behind_its_neighbors(
    server: FakeServer, files: list[str], capsys: Capture
) -> None:
    """In the corpus' order. Neighbours nearest first, each once, never itself."""
    assert main(["--url", server.url + "/", *files, "--batch", "1"]) == 0
    assert server.chunks == [("A", []), ("B", []), ("C", []), ("A", ["B"]), ("C", ["A"])]
    assert server.pending == 0
    paths = [path for path, _ in server.posts[3:]]  # after those that ask for sizes
    assert "/rag/v1/generate" in paths[3 : paths.index("/chunkcache/preprocess", 3)]
    *table, line = capsys.readouterr().out.splitlines()
    assert table[-1].split(maxsplit=1) == ["neighbors", "4 moved, 2 computed, 0 missing"]
    result = json.loads(line)
    for name in PASSES:
        seconds, rate = result[name].pop("seconds"), result[name].pop("chunks_per_s")
        assert rate == pytest.approx(result[name]["chunks"] / seconds, rel=0.2)
    none = {"kept": 0, "refused": 0}
    found = {"moved": 4, "computed": 2, "missing": 0}
    assert [result.pop(name) for name in PASSES] == [
        {**none, "chunks": 3, "chunk_tokens": 30, "neighbors": dict.fromkeys(found, 0)},
        {**none, "chunks": 2, "chunk_tokens": 20, "neighbors": found},
    ]
    assert [store["num_variants"] for store in result.pop("stores")] == [7, 7]
    asked = {"url": server.url, "top_n": 1, "batch": 1, "storages": []}
    assert result == {**asked, "lost": 0, "no_room": 0, "evicted": 0, "unwritten": 0}


@pytest.mark.parametrize("batch", [1, 5])
def test_so_many_requests_are_in_flight(server: FakeServer, batch: int) -> None:
    """Every chunk alone comes before the first one behind others."""
    server.delay_s = 0.02
    texts = {str(number): f"text {number}" for number in range(12)}
    near = {name: ["0"] for name in texts if name != "0"}
    asked = Client(server.url, None, max_connections=batch)
    result = preprocess(asked, texts, near, top_n=1, batch=batch)
    assert server.most_in_flight == batch
    assert [result[name]["chunks"] for name in PASSES] == [12, 11]
    assert [len(before) for _, before in server.chunks] == [0] * 12 + [1] * 11
    assert {text for text, _ in server.chunks} == set(texts.values())


def test_what_the_server_has_is_kept(server: FakeServer, run: Run) -> None:
    """After a kill: counted apart, and in no rate. With all of it there the work is done."""
    for kept, expected in (({"a"}, [[2, 1], [1, 1]]), ({"a", "b", "3"}, [[0, 3], [0, 2]])):
        server.kept = kept
        status, result, _ = run()
        assert status == 0
        assert [[result[name][key] for key in ("chunks", "kept")] for name in PASSES] == expected
    assert (result["alone"]["chunks_per_s"], result["alone"]["chunk_tokens"]) == (None, 30)


def test_chunks_that_others_in_flight_left_without_neighbors_are_tried_alone(
    server: FakeServer,
) -> None:
    """What they were computed after depends on who else was there."""
    server.delay_s, server.missing_together = 0.2, {"a"}
    asked, near = Client(server.url, None), {"a": ["b"], "b": ["a"], "3": ["a"]}
    behind = preprocess(asked, TEXTS, near, top_n=1, batch=3)["behind_neighbors"]
    assert [text for text, before in server.chunks if before].count("A") == 2
    assert (behind["chunks"], behind["neighbors"]["missing"]) == (3, 0)
    server.neighbors = {"missing": 1}
    preprocess(asked, TEXTS, {"a": ["b"]}, top_n=1, batch=1)
    assert [text for text, before in server.chunks if before].count("A") == 3
    nothing = preprocess(asked, TEXTS, {}, top_n=1)["behind_neighbors"]
    assert nothing["chunks_per_s"] is None


def test_storage_is_waited_for(server: FakeServer, run: Run) -> None:
    """Done is what is on the disk."""
    server.storage = [{}, {"queue": 2}, {"queue": 1}, {"problems": {"damaged": 1}}]
    assert run()[0] == 0
    assert len(server.storage) == 1


def test_options_reach_the_server(server: FakeServer, files: list[str], capsys: Capture) -> None:
    """More neighbours, a system message, a key, and no table."""
    options = ["--top-n", "2", "--batch", "1", "--system", "Be brief.", "--api-key", "k", "--json"]
    assert main(["--url", server.url, *files, *options]) == 0
    assert server.chunks[3:] == [("A", ["B", "C"]), ("C", ["A"])]
    assert server.posts[3][1]["messages"] == [{"role": "system", "content": "Be brief."}]
    assert set(server.keys) == {"Bearer k"}
    assert len(capsys.readouterr().out.splitlines()) == 1


MISSING: dict[str, Any] = {"neighbors": {"moved": 2, "computed": 1, "missing": 1}}
FAILED = [{"problems": {"failed": 1}}, {"problems": {"failed": 3, "paused": 1}}]


@pytest.mark.parametrize(
    ("knobs", "flags", "message"),
    [
        ({"refused": {"a"}}, [], "alone: 'a' is refused: messages: too long"),
        (MISSING, [], "25.0% of the neighbors were missing"),
        (MISSING, ["--max-missing", "0.24"], "25.0% of the neighbors were missing"),
        (MISSING, ["--max-missing", "0.25"], None),
        ({}, ["--max-missing", "0"], None),
        ({"num_lost": 3}, [], "6 chunks did not get into a store"),
        ({"num_without_room": 1}, [], "ones: raise --chunkcache-store-mib or"),
        ({"num_evicted": 2}, [], "4 entries were evicted: raise --chunkcache-store-mib"),
        ({"storage": FAILED}, [], "an entry, 3 times; start the command again"),
        ({"storage": [{"unwritten": 1}, {"unwritten": 3}]}, [], "an entry, 2 times"),
    ],
)
def test_what_is_not_there_in_the_end_fails_the_command(
    server: FakeServer, run: Run, knobs: dict[str, Any], flags: list[str], message: str | None
) -> None:
    """With one line that says what to do. A chunk that is refused does not stop the others."""
    vars(server).update(knobs)
    status, result, err = run(*flags)
    assert status == (message is not None)
    assert (message or "needs about") in err
    assert [result[name]["refused"] for name in PASSES] == [len(server.refused)] * 2
    assert [result[name]["chunks"] for name in PASSES] == ([2, 1] if server.refused else [3, 2])
    assert result["behind_neighbors"]["neighbors"]["missing"] == 2 * (knobs is MISSING)


def test_progress_is_shown(
    server: FakeServer, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """On stderr, at a terminal, except with --json."""
    server.refused = {"a"}
    main(["--url", server.url, *files])
    shown = capsys.readouterr().err
    assert "alone: 'a' is refused" in shown
    assert "/3 [" not in shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["--url", server.url, *files])
    shown = capsys.readouterr().err
    assert re.search(r"alone: +0%.* 0/3 \[", shown)
    assert re.search(r"alone: 100%.* 3/3 \[.*, waiting for the store", shown)
    main(["--url", server.url, *files, "--json"])
    assert "0/3" not in capsys.readouterr().err


# Size


@pytest.mark.parametrize(
    ("num_chars", "rooms", "told"),
    [
        (100, {}, "about 0.5 of 1.0 MiB .1.0 are left to live traffic. and 5 of 50 entries"),
        (300, {}, "1.5 of 1.0 MiB .* and 5 of 50 entries: too much, .* --chunkcache-store-mib or"),
        (1, {"max_entries": 4}, "5 of 2 entries: too much, .* --chunkcache-storage-mib or"),
    ],
)
def test_size_is_told_before_anything_is_sent(
    server: FakeServer, capsys: Capture, num_chars: int, rooms: dict[str, int], told: str
) -> None:
    """By the tokens of some chunks. The storage's room counts where there is one."""
    texts = {name: num_chars * text for name, text in TEXTS.items()}
    server.storage = [rooms] if rooms else []
    preprocess(Client(server.url, None), texts, {"a": ["b", "3"], "3": ["a"]}, top_n=1)
    first = capsys.readouterr().err.splitlines()[0]
    assert re.search(told, first)
    assert first.endswith("entries") == ("too much" not in told)
    asked = ["/chunkcache/explain"] * 3 + ["/chunkcache/preprocess"]
    assert [path for path, _ in server.posts[:4]] == asked


# Files


def test_files_may_be_gzipped_and_have_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join([json.dumps(row) for row in CORPUS] + ["", " "]))
    assert read_corpus(path) == TEXTS
    data = bytearray(path.read_bytes())
    data[24:30] = b"\xff" * 6  # blocks of no kind
    path.write_bytes(data)
    with pytest.raises(ServerError, match=r"corpus\.jsonl\.gz: "):
        read_corpus(path)


BAD_CORPUS = [
    (["{"], 1, "Input data was truncated"),
    ([*CORPUS, "[]"], 4, "Expected `object`, got `array`"),
    ([{"text": "A"}], 1, "Object missing required field `id`"),
    ([{"id": "", "text": "A"}], 1, "Expected `str` of length >= 1 - at `$.id`"),
    ([{"id": True, "text": "A"}], 1, "Expected `int | str`, got `bool` - at `$.id`"),
    ([{"id": "a"}], 1, "Object missing required field `text`"),
    ([{"id": "a", "text": ""}], 1, "Expected `str` of length >= 1 - at `$.text`"),
    ([{"id": "a", "text": 5}], 1, "Expected `str`, got `int` - at `$.text`"),
    ([*CORPUS, {"id": "3", "text": "again"}], 4, "id '3' occurs twice"),
]
BAD_NEIGHBORS = [
    ([{"id": "x", "neighbors": []}], 1, "id 'x' is not in the corpus"),
    ([{"id": "a"}], 1, "Object missing required field `neighbors`"),
    ([{"id": "a", "neighbors": "b"}], 1, "Expected `array`, got `str` - at `$.neighbors`"),
    ([{"id": "a", "neighbors": [{"id": "b"}]}], 1, "Expected `int | str`, got `object`"),
    ([{"id": "a", "neighbors": ["b", "x"]}], 1, "id 'x' is not in the corpus"),
    ([*NEIGHBORS, {"id": "a", "neighbors": []}], 4, "id 'a' occurs twice"),
]


@pytest.mark.parametrize(
    ("is_corpus", "rows", "line", "text"),
    [*((True, *case) for case in BAD_CORPUS), *((False, *case) for case in BAD_NEIGHBORS)],
)
def test_bad_file_is_named_with_the_line(
    tmp_path: Path, is_corpus: bool, rows: list[Any], line: int, text: str
) -> None:
    path = write(tmp_path / "c.jsonl", rows)
    with pytest.raises(ServerError) as caught:
        read_corpus(path) if is_corpus else read_neighbors(path, TEXTS)
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


@pytest.mark.parametrize(
    ("name", "content"),
    [("none.jsonl", None), ("empty.jsonl", b""), ("bytes.jsonl", b"\xff"), ("text.gz", b"{}")],
)
def test_unreadable_corpus_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ServerError, match=name):
        read_corpus(tmp_path / name)


# Mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-n", "0"], "--top-n: must be at least 1"),
        (["--batch", "0"], "--batch: must be from 1 to 64"),
        (["--batch", "65"], "--batch: must be from 1 to 64"),
        (["--plan", "4"], "unrecognized arguments: --plan 4"),
        (["--max-missing", "1.5"], "--max-missing: must be from 0 to 1"),
    ],
)
def test_wrong_flags(files: list[str], capsys: Capture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "x", *files, *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("mistake", ["exact", "nobody", "nonsense", "file"])
def test_mistakes_are_one_line(
    server: FakeServer, tmp_path: Path, files: list[str], capsys: Capture, mistake: str
) -> None:
    """No traceback, exit code 2, and nothing was sent."""
    server.reuse = "exact"
    url = {"nobody": "http://127.0.0.1:9", "nonsense": "nonsense"}.get(mistake, server.url)
    if mistake == "file":
        write(tmp_path / "corpus.jsonl", [{"id": "a"}])
    assert main(["--url", url, *files]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), server.posts) == ("", 1, [])
    found = {
        "exact": "not a server started with --reuse fused",
        "file": "corpus.jsonl:1: Object missing required field `text`",
    }
    assert found.get(mistake, url) in err
