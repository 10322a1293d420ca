"""A Milvus collection as an index: a real client, and milvus-lite's server for Milvus' own.

launch/test.sh tests/retrieval/test_milvus.py     # with pymilvus and milvus-lite installed
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")

from retrieval import milvus
from retrieval.__main__ import main
from retrieval.errors import CorruptIndexError, RetrievalError, UnavailableError
from retrieval.index import Index
from retrieval.milvus import TOKEN, TOKEN_FILE, MilvusRetriever, Place, copy_index, place_of
from retrieval.opening import open_searcher
from tests.polling import until
from tests.retrieval.small_index import WordEncoder, build, make_documents, make_retriever, quiet

TEXTS = [f"word{number} shared tail{number % 5}" for number in range(40)]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("http://host:19530/docs", Place("http://host:19530", "", "docs")),
        ("https://host/base/docs", Place("https://host", "base", "docs")),
        ("a/b.db", Place("a/b.db", "", None)),
        ("a/b.db/docs", Place("a/b.db", "", "docs")),
        ("index", None),
        ("a.db/b/c", None),
    ],
)
def test_place_of_a_collection(name: str, place: Place | None) -> None:
    """Anything else is the directory of an index."""
    assert place_of(name) == place


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("http://host:19530", "must be http"),
        ("http://host:19530/a/b/c", "must be http"),
        ("http://root:secret@host/docs", "a token belongs in MILVUS_TOKEN"),
    ],
)
def test_place_that_is_none_is_refused(name: str, reason: str) -> None:
    """A token on the command line would be in the list of processes."""
    with pytest.raises(RetrievalError, match=reason) as caught:
        place_of(name)
    assert "secret" not in str(caught.value)


def test_collection_needs_an_encoder_by_name() -> None:
    with pytest.raises(RetrievalError, match="name it with --encoder"):
        open_searcher("x.db", encoder=None, device=None, verify=True, threads=1)


class Server:
    """milvus-lite behind a port that can be stopped, and can hang with its connections open."""

    def __init__(self, folder: Path) -> None:
        from milvus_lite.adapter.grpc.server import start_server_in_thread
        from pymilvus import MilvusClient

        logging.getLogger("grpc._server").setLevel(logging.CRITICAL)
        self._server, self._db, port = start_server_in_thread(str(folder))
        self._inner = "127.0.0.1", port
        self.client = MilvusClient(f"http://127.0.0.1:{port}")
        self._answers = threading.Event()
        self._answers.set()
        self._open: list[socket.socket] = []
        self.start(0)

    def start(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.name = f"http://127.0.0.1:{self.port}/docs"
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def stop(self) -> None:
        """As a server that is killed."""
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def hang(self) -> None:
        self._answers.clear()

    def go_on(self) -> None:
        self._answers.set()

    def close(self) -> None:
        self.client.close()
        self.stop()
        self._answers.set()
        self._server.stop(grace=0)
        self._db.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                outer, _ = listener.accept()
                inner = socket.create_connection(self._inner)
                self._open += outer, inner
                for ends in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._answers.wait()
                sink.sendall(data)
        sink.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    with closing(Server(tmp_path / "milvus.db")) as running:
        yield running


@pytest.fixture
def index(tmp_path: Path) -> Index:
    build(tmp_path / "index", make_documents(TEXTS))
    return Index.open(tmp_path / "index", verify=False)


def opened(server: Server, *, encoder: Any = None, timeout_s: float = 20.0) -> MilvusRetriever:
    return MilvusRetriever(server.name, encoder or WordEncoder(), timeout_s=timeout_s)


def test_collection_finds_what_the_index_finds(server: Server, index: Index) -> None:
    assert copy_index(index, server.name, progress=quiet) == len(TEXTS)
    queries = ["word7 shared", "tail3 word1", "word39"]
    asked: dict[str, Any] = {"k": 5, "mode": "dense", "nprobe": 1}
    slow = make_retriever(index.folder).search(queries, **asked)
    found = opened(server).search(queries, **asked)
    for ours, theirs in zip(found.hits, slow.hits, strict=True):
        assert [(h.passage.id, h.passage.content) for h in ours] == [
            (h.passage.id, h.passage.content) for h in theirs
        ]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-3)


def make_collection(server: Server, rows: list[dict[str, Any]], **settings: Any) -> None:
    """A new `docs`, made as pymilvus' own examples do."""
    if server.client.has_collection("docs"):
        server.client.drop_collection("docs")
    usual = {"dimension": 8, "metric_type": "COSINE", "id_type": "string", "max_length": 99}
    server.client.create_collection("docs", **{**usual, **settings})
    if rows:
        server.client.insert("docs", rows)


def rows_of(*texts: str, dim: int = 8, length: float = 1.0, **fields: Any) -> list[dict[str, Any]]:
    vectors = length * WordEncoder(dim=dim).encode_passages(texts)
    named = zip(texts, vectors.tolist(), strict=True)
    return [{"id": text, "vector": vector, "text": text, **fields} for text, vector in named]


def ask(retriever: MilvusRetriever, query: str = "alpha") -> list[tuple[str, float]]:
    (hits,) = retriever.search([query], k=2, mode="dense", nprobe=1).hits
    return [(hit.passage.id, round(hit.score, 3)) for hit in hits]


@pytest.mark.parametrize(
    ("metric", "score"), [("COSINE", 1.0), ("IP", 2.0), ("L2", -1.0)]
)
def test_scores_of_every_metric_are_larger_where_nearer(
    server: Server, metric: str, score: float
) -> None:
    """Of a collection that others have made; vectors are twice as long as the query's."""
    make_collection(server, rows_of("alpha", "beta", length=2.0, title="T"), metric_type=metric)
    retriever = opened(server)
    found = ask(retriever)
    assert found[0] == ("alpha", score)
    assert found[1][1] < score
    (hit, _), = retriever.search(["alpha"], k=2, mode="dense", nprobe=1).hits
    assert (hit.mode, hit.passage.content) == ("dense", "T\nalpha")
    assert ask(retriever, "  ") == [], "the zero vector is near nothing"
    info = retriever.info()
    assert (info["passages"], info["dim"], info["modes"]) == (2, 8, ["dense"])
    with pytest.raises(RetrievalError, match="mode 'bm25': a Milvus collection has dense"):
        retriever.search(["alpha"], k=2, mode="bm25", nprobe=1)


def test_numbers_are_ids_too(server: Server) -> None:
    rows = [{**row, "id": 7} for row in rows_of("alpha")]
    make_collection(server, rows, id_type="int")
    assert ask(opened(server)) == [("7", 1.0)]


def test_server_that_goes_and_comes_is_down_and_up(server: Server) -> None:
    """The client's connections outlive a restart of the server."""
    make_collection(server, rows_of("alpha"))
    retriever = opened(server, timeout_s=1.0)
    server.stop()
    with pytest.raises(UnavailableError, match=f"{server.name}: Milvus does not answer"):
        ask(retriever)
    with pytest.raises(UnavailableError):
        retriever.refresh()
    assert retriever.damage is not None
    with pytest.raises(UnavailableError):
        opened(server, timeout_s=1.0)
    server.start(server.port)
    until(lambda: _is_up(retriever))
    assert ask(retriever) == [("alpha", 1.0)]
    assert not retriever.refresh(), "nothing new"
    server.client.release_collection("docs")  # as milvus-lite starts
    with pytest.raises(CorruptIndexError, match="refuses"):
        ask(retriever)
    assert retriever.refresh()
    assert ask(retriever) == [("alpha", 1.0)]


def _is_up(retriever: MilvusRetriever) -> bool:
    with suppress(UnavailableError):
        return retriever.refresh()
    return False


def test_server_that_never_answers_costs_the_timeout(server: Server) -> None:
    make_collection(server, rows_of("alpha"))
    retriever = opened(server, timeout_s=0.5)
    server.hang()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="does not answer"):
        ask(retriever)
    with pytest.raises(UnavailableError, match="does not answer"):
        opened(server, timeout_s=0.5)
    assert time.monotonic() - started < 20, "pymilvus' own patience is longer"
    server.go_on()
    until(lambda: _is_up(retriever))


def test_collection_that_cannot_be_searched_says_why(server: Server) -> None:
    """At the start, and of a collection that is replaced while it is served; until it is back."""
    make_collection(server, rows_of("alpha"))
    retriever = opened(server)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": []}, "is empty"),
        (
            {"rows": rows_of("alpha", dim=4), "dimension": 4},
            "has vectors of 4 dimensions, the encoder gives 8",
        ),
        ({"rows": [{"id": "a", "vector": [1.0] * 8}]}, "the passage a has no text"),
        ({"rows": [], "vector_field_name": "v"}, "lacks the field vector; it has id, v"),
        ({"rows": rows_of("alpha", length=-1.0)}, "written by another encoder"),
    ]
    for settings, reason in cases:
        make_collection(server, **settings)
        with pytest.raises(CorruptIndexError, match=reason):
            opened(server)
        with pytest.raises(CorruptIndexError, match=reason):
            retriever.refresh()
        assert retriever.damage is not None
        with pytest.raises(CorruptIndexError, match=reason):
            ask(retriever)
        make_collection(server, rows_of("alpha"))
        assert retriever.refresh()
        assert ask(retriever) == [("alpha", 1.0)]
    server.client.drop_collection("docs")
    with pytest.raises(CorruptIndexError, match="docs"):
        ask(retriever)


@pytest.mark.parametrize("is_file", [False, True])
def test_token_reaches_milvus_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    """From the environment or from a file."""
    pymilvus = pytest.importorskip("pymilvus")
    asked = list[Any]()

    def connect(uri: str, **settings: Any) -> None:
        asked.append(settings["token"])
        raise pymilvus.MilvusException(code=1400, message="no user root:secret\nmore")

    monkeypatch.setattr(pymilvus, "MilvusClient", connect)
    file = str(tmp_path / "token")
    Path(file).write_text("root:secret\n")
    monkeypatch.setenv(TOKEN_FILE if is_file else TOKEN, file if is_file else "root:secret")
    with pytest.raises(CorruptIndexError) as caught:
        MilvusRetriever("http://h/docs", WordEncoder(), timeout_s=1.0)
    assert str(caught.value) == "http://h/docs: Milvus refuses: no user ***"
    assert asked == ["root:secret"]
    monkeypatch.setenv("MILVUS_TOKEN_FILE", "/gone")  # told as it is all the same
    assert isinstance(milvus._told("http://h/docs", RuntimeError("down")), CorruptIndexError)


def test_without_pymilvus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(RetrievalError, match="needs the extra 'milvus': pymilvus is not installed"):
        MilvusRetriever("http://h/docs", WordEncoder(), timeout_s=1.0)


def test_commands_copy_and_search_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index's directory names its encoder; an existing collection is not written over."""
    pytest.importorskip("milvus_lite")
    index, file = tmp_path / "index", str(tmp_path / "docs.db")
    build(index, make_documents(TEXTS), encoder=None)
    assert main(["copy", str(index), "--to", file]) == 0
    assert capsys.readouterr().out == f"{file}: {len(TEXTS)} passages\n"
    told = []
    for where in ([file, "--encoder", str(index)], [str(index)]):
        assert main(["search", *where, "word7", "tail3", "--mode", "dense", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["passages"])
    assert [row["id"] for row in told[0]] == [row["id"] for row in told[1]]
    assert main(["copy", str(index), "--to", file]) == 2
    assert "there is a collection passages; drop it, or name another" in capsys.readouterr().err
    assert main(["copy", str(index), "--to", f"{file}/more"]) == 0
    capsys.readouterr()
    for place, reason in ((file, "collections more, passages; name"), ("no.db", "no such file")):
        assert main(["search", place, "word7", "--encoder", str(index)]) == 2
        assert reason in capsys.readouterr().err
