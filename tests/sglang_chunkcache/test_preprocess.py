"""`python -m sglang_chunkcache.preprocess`:
what it posts in which order, and one line for every mistake. A fake server."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import client
from sglang_chunkcache import preprocess as command
from sglang_chunkcache.chunk_files import read_corpus, read_neighbors
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.preprocess import main, preprocess
from sglang_chunkcache.removed import refusal
from tests.sglang_chunkcache.fake_server import FakeServer

CORPUS = [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}, {"id": 3, "text": "C"}]
NEIGHBORS = [
    {"id": "a", "neighbors": ["b", 3, "b", "a"]},
    {"id": 3, "neighbors": ["a"]},
    {"id": "b", "neighbors": []},
]
TEXTS = {"a": "A", "b": "B", "3": "C"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "POLL_S", 0.001)
    fake = FakeServer()
    yield fake
    fake.close()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The flags for a corpus of three and its neighbours."""
    corpus, neighbors = (
        write(tmp_path / "corpus.jsonl", CORPUS),
        write(tmp_path / "neighbors.jsonl", NEIGHBORS),
    )
    return ["--corpus", str(corpus), "--neighbors", str(neighbors)]


# Both passes


def test_every_chunk_alone_then_behind_its_neighbors(
    server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One at a time in the corpus' order. Neighbours nearest first, each once, never itself.
    Then nothing waits."""
    assert main(["--url", server.url + "/", *files, "--batch", "1"]) == 0
    assert server.chunks == [("A", []), ("B", []), ("C", []), ("A", ["B"]), ("C", ["A"])]
    assert server.pending == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    assert table[-1].split(maxsplit=1) == ["neighbors", "4 moved, 2 computed, 0 missing"]
    sizes = {"max_bytes": 1 << 20, "max_entries": 50, "num_evicted": 0, "token_bytes": 1024}
    store = {"pending": 0, "dropped": 0, "num_variants": 7, **sizes}
    nobody, found = (
        {"moved": 0, "computed": 0, "missing": 0},
        {"moved": 4, "computed": 2, "missing": 0},
    )
    result = json.loads(line)
    for name in ("alone", "behind_neighbors"):
        seconds, rate = result[name].pop("seconds"), result[name].pop("chunks_per_s")
        assert rate == pytest.approx(result[name]["chunks"] / seconds, rel=0.2)
    assert result == {
        "url": server.url,
        "top_n": 1,
        "batch": 1,
        "alone": {"chunks": 3, "kept": 0, "chunk_tokens": 30, "refused": 0, "neighbors": nobody},
        "behind_neighbors": {
            "chunks": 2,
            "kept": 0,
            "chunk_tokens": 20,
            "refused": 0,
            "neighbors": found,
        },
        "lost": 0,
        "evicted": 0,
        "unwritten": 0,
        "stores": [store, store],
        "storages": [],
    }


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_so_many_requests_are_in_flight(server: FakeServer, batch: int) -> None:
    """The engine computes together what comes together.
    Every chunk alone comes before the first one behind others."""
    server.delay_s = 0.02
    texts = {str(number): f"text {number}" for number in range(12)}
    near = {name: ["0"] for name in texts if name != "0"}
    result = preprocess(
        Client(server.url, None, max_connections=batch), texts, near, top_n=1, batch=batch
    )
    assert server.most_in_flight == batch
    assert (result["alone"]["chunks"], result["behind_neighbors"]["chunks"]) == (12, 11)
    assert [len(before) for _, before in server.chunks] == [0] * 12 + [1] * 11
    assert {text for text, _ in server.chunks} == set(texts.values())


def test_what_the_server_has_is_kept(server: FakeServer, files: list[str], capsys: Any) -> None:
    """After a kill: counted apart, and in no rate. With all of it there the work is done."""
    server.kept = {"a"}
    assert main(["--url", server.url, *files]) == 0
    server.kept = {"a", "b", "3"}
    assert main(["--url", server.url, *files]) == 0
    *first, line = capsys.readouterr().out.splitlines()
    again, cut_off = json.loads(line), json.loads(first[3])
    told = [
        [run[name][key] for key in ("chunks", "kept")]
        for run in (cut_off, again)
        for name in ("alone", "behind_neighbors")
    ]
    assert told == [[2, 1], [1, 1], [0, 3], [0, 2]]
    assert (again["alone"]["chunks_per_s"], again["alone"]["chunk_tokens"]) == (None, 30)
    assert [row.split() for row in first[4:6]] == [
        ["alone", "0", "chunks", "3", "kept"],
        ["behind", "neighbors", "0", "chunks", "2", "kept"],
    ]


def test_chunks_that_others_in_flight_left_without_neighbors_are_tried_alone(
    server: FakeServer, files: list[str]
) -> None:
    """What they were computed after depends on who else was there.
    One at a time it has all the room, and is tried no more."""
    server.delay_s, server.missing_together = 0.2, {"a"}
    result = preprocess(
        Client(server.url, None), TEXTS, {"a": ["b"], "b": ["a"], "3": ["a"]}, top_n=1, batch=3
    )
    assert [text for text, before in server.chunks if before].count("A") == 2
    assert (
        result["behind_neighbors"]["chunks"],
        result["behind_neighbors"]["neighbors"]["missing"],
    ) == (3, 0)
    server.neighbors = {"missing": 1}
    preprocess(Client(server.url, None), TEXTS, {"a": ["b"]}, top_n=1, batch=1)
    assert [text for text, before in server.chunks if before].count("A") == 3


def test_storage_is_waited_for_and_its_failures_are_told(
    server: FakeServer, files: list[str], capsys: Any
) -> None:
    """Done is what is on the disk. What was not written is with the next start of the command."""
    server.storage = [{}, {"queue": 2}, {"queue": 1}, {"problems": {"damaged": 1}}]
    assert main(["--url", server.url, *files]) == 0
    assert len(server.storage) == 1
    capsys.readouterr()
    server.storage = [{"problems": {"failed": 1}}, {"problems": {"failed": 3, "paused": 1}}]
    assert main(["--url", server.url, *files]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["storages"][0]["problems"] == {"failed": 3, "paused": 1}
    assert "the storage has failed, or not taken an entry, 3 times; start the command again" in err
    server.storage = [{"unwritten": 1}, {"unwritten": 3}]
    assert main(["--url", server.url, *files]) == 1
    assert "2 times" in capsys.readouterr().err


def test_neighbors_are_movable_before_they_are_needed(server: FakeServer, files: list[str]) -> None:
    """The captures of the first pass are waited for: the second moves them."""
    main(["--url", server.url, *files])
    paths = [path for path, _ in server.posts]
    last_alone = 5
    assert (
        "/rag/v1/generate"
        in paths[last_alone + 1 : paths.index("/chunkcache/preprocess", last_alone + 1)]
    )


def test_options_reach_the_server(
    server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """More neighbours, a system message, a key, and no table."""
    options = ["--top-n", "2", "--batch", "1", "--system", "Be brief.", "--api-key", "k", "--json"]
    assert main(["--url", server.url, *files, *options]) == 0
    assert server.chunks[3:] == [("A", ["B", "C"]), ("C", ["A"])]
    assert server.posts[3][1]["messages"] == [{"role": "system", "content": "Be brief."}]
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
    [
        (1, [], 1),
        (1, ["--max-missing", "0.25"], 0),
        (0, ["--max-missing", "0"], 0),
        (1, ["--max-missing", "0.24"], 1),
    ],
)
def test_missing_neighbors_fail_the_command(
    server: FakeServer, files: list[str], capsys: Any, missing: int, flags: list[str], status: int
) -> None:
    """Above the share that may be missing: one line that names what to enlarge.
    Up to it they are only counted."""
    server.neighbors = {"moved": 2, "computed": 1, "missing": missing}
    assert main(["--url", server.url, *files, *flags]) == status
    out, err = capsys.readouterr()
    assert (
        json.loads(out.splitlines()[-1])["behind_neighbors"]["neighbors"]["missing"] == 2 * missing
    )
    assert err.count("\n") == 1 + status
    assert (
        "25.0% of the neighbors were missing" in err and "--chunkcache-store-mib" in err
    ) == bool(status)


def test_chunks_that_never_got_into_a_store_fail_the_command(
    server: FakeServer, files: list[str], capsys: Any
) -> None:
    """Computed, and gone before they were copied: what the command is for has not happened."""
    server.num_lost = 3
    assert main(["--url", server.url, *files]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["lost"] == 6
    assert "6 chunks did not get into a store" in err


def test_progress_is_shown(
    server: FakeServer, files: list[str], monkeypatch: Any, capsys: Any
) -> None:
    """On stderr, so that stdout stays readable by programs."""
    monkeypatch.setattr(command, "PROGRESS_S", 0.0)
    main(["--url", server.url, *files])
    assert re.search(r"alone: 3/3, [\d.]+ chunks/s, 00:00 left", capsys.readouterr().err)


def test_terminal_gets_a_bar(
    server: FakeServer, files: list[str], monkeypatch: Any, capsys: Any
) -> None:
    """With rate and time left, refusals between. Not with --json, for which the lines are."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    server.refused = {"a"}
    main(["--url", server.url, *files])
    shown = capsys.readouterr().err
    assert re.search(r"alone: +0%.* 0/3 \[", shown)
    assert "alone: 'a' is refused" in shown
    main(["--url", server.url, *files, "--json"])
    assert "0/3" not in capsys.readouterr().err


def test_nothing_to_put_behind_neighbors(server: FakeServer) -> None:
    """An empty neighbour file: the first pass alone, and no division by zero."""
    result = preprocess(Client(server.url, None), TEXTS, {}, top_n=10)
    assert (result["alone"]["chunks"], result["behind_neighbors"]["chunks_per_s"]) == (3, None)


# Size


@pytest.mark.parametrize(
    ("num_chars", "rooms", "told"),
    [
        (100, {}, "needs about 0.5 of 1.0 MiB and 5 of 50 entries"),
        (
            300,
            {},
            (
                "1.5 of 1.0 MiB and 5 of 50 entries: too much, some will be evicted; raise"
                " --chunkcache-store-mib or"
            ),
        ),
        (
            1,
            {"max_entries": 4},
            "5 of 4 entries: too much, some will be evicted; raise --chunkcache-storage-mib or",
        ),
    ],
)
def test_size_is_told_before_anything_is_sent(
    server: FakeServer, capsys: Any, num_chars: int, rooms: dict[str, int], told: str
) -> None:
    """Of chunks alone and behind neighbours, by the tokens of some.
    The storage's room counts where there is one."""
    texts = {name: num_chars * text for name, text in TEXTS.items()}
    server.storage = [rooms] if rooms else []
    preprocess(Client(server.url, None), texts, {"a": ["b", "3"], "3": ["a"]}, top_n=1)
    first = capsys.readouterr().err.splitlines()[0]
    assert told in first
    assert first.endswith("entries") == ("too much" not in told)
    assert [path for path, _ in server.posts[:4]] == [
        *3 * ["/chunkcache/explain"],
        "/chunkcache/preprocess",
    ]


def test_what_was_evicted_fails_the_command(
    server: FakeServer, files: list[str], capsys: Any
) -> None:
    """From the store, or from the storage below it: then what leaves the store is still there."""
    server.num_evicted = 2
    assert main(["--url", server.url, *files]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["evicted"] == 4, "of two ranks"
    assert (
        "4 entries were evicted: raise --chunkcache-store-mib or --chunkcache-store-chunks" in err
    )


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
def test_bad_corpus_names_file_and_line(
    tmp_path: Path, rows: list[Any], line: int, text: str
) -> None:
    """So that a line of a million is found."""
    path = write(tmp_path / "c.jsonl", rows)
    with pytest.raises(ServerError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


@pytest.mark.parametrize(
    ("rows", "line", "text"), BAD_NEIGHBORS, ids=[case[2] for case in BAD_NEIGHBORS]
)
def test_bad_neighbors_name_file_and_line(
    tmp_path: Path, rows: list[Any], line: int, text: str
) -> None:
    """Ids must be the corpus'."""
    path = write(tmp_path / "n.jsonl", rows)
    with pytest.raises(ServerError) as caught:
        read_neighbors(path, TEXTS)
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


@pytest.mark.parametrize(
    ("name", "content"),
    [("none.jsonl", None), ("empty.jsonl", b""), ("bytes.jsonl", b"\xff"), ("text.gz", b"{}")],
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
    assert (
        main(["--url", "http://127.0.0.1:9", "--corpus", str(corpus), "--neighbors", str(corpus)])
        == 2
    )
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{corpus}:1: text must be" in err


def test_top_n_below_one_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By the flag's name."""
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "x", *files, "--top-n", "0"])
    assert "--top-n: must be at least 1" in capsys.readouterr().err
    for batch in ("0", "65"):
        with pytest.raises(SystemExit, match="2"):
            main(["--url", "x", *files, "--batch", batch])
        assert "--batch: must be from 1 to 64" in capsys.readouterr().err
    for plan in (["--plan"], ["--plan", "4"]):
        with pytest.raises(SystemExit, match="2"):
            main(["--url", "x", *files, *plan])
        assert f"--plan {refusal('--plan')}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "x", *files, "--max-missing", "1.5"])
    assert "--max-missing: must be from 0 to 1" in capsys.readouterr().err


# The server


def test_exact_server_is_named(
    server: FakeServer, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent."""
    server.reuse = "exact"
    assert main(["--url", server.url, *files]) == 2
    assert "not a server started with --reuse fused" in capsys.readouterr().err
    assert server.posts == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_no_server_is_one_line(
    url: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No server listens, or it is no address."""
    assert main(["--url", url, *files]) == 2
    assert capsys.readouterr().err.count("\n") == 1
