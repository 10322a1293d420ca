"""A Milvus collection as an index: Milvus holds vectors and texts, the encoder is ours.

    queries ── encoder ── MilvusClient.search ── passages

For an index that has outgrown one machine. Its place is `http(s)://host:19530/collection`, or
`http(s)://host:19530/database/collection`, or `file.db` (`file.db/collection` if it has several),
which milvus-lite opens in this process. A collection does not say which encoder made it, so that
is named with it. Imports pymilvus with the first connection.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from retrieval.encoder import QUERY_BATCH, Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError, UnavailableError, first_line
from retrieval.hits import Hit, Mode, SearchResult, timed
from retrieval.passage import Passage
from retrieval.progress import Progress
from retrieval.sentence_encoder import SentenceEncoder
from retrieval.settings import SETTINGS, read_settings

if TYPE_CHECKING:
    from retrieval.index import Index

TOKEN, TOKEN_FILE = "MILVUS_TOKEN", "MILVUS_TOKEN_FILE"
"""Environment variables: the token, or the path of a file with it."""
VECTOR, TEXT, TITLE = "vector", "text", "title"
"""The collection's fields; `title` may be missing. The primary key, of any name, is the id."""
METRICS = {"IP": 1, "COSINE": 1, "L2": -1}
"""Name -> sign of a score: larger is nearer."""
TIMEOUT_S = 10.0
"""Of one call. Searches wait for each other, so a server that hangs holds up all."""
COPY_TIMEOUT_S = 120.0
COPIED_ROWS = 500
"""Passages that are sent at once: 2 MB of vectors of 1024 dimensions."""
BUSY_CODES = (2, 3, 4, 8)
"""Milvus' own: unavailable (pymilvus' for no connection, too), out of memory, too many requests,
over a rate."""
MAX_TEXT_BYTES = 65_535
"""Milvus' limit of a text."""
MIN_PROBE_COSINE = 0.5
"""Between a stored vector and ours of the same text. Below the 0.99 of our own indexes, since
others may have encoded a passage with another prefix, or in float16; other models are near 0."""
_LOCAL = re.compile(r"(.+\.db)(?:/(\w+))?/?")


class Place(NamedTuple):
    """Where a collection is. `collection` None: the only one there."""

    uri: str
    database: str
    collection: str | None


def place_of(name: str) -> Place | None:
    """The collection that `--index` names; None for the directory of an index.
    Raises RetrievalError."""
    if name.startswith(("http://", "https://")):
        try:
            url = urlsplit(name)
            _ = url.port
        except ValueError as error:
            raise RetrievalError(f"{name.partition('?')[0]}: {error}") from None
        if url.username or url.password:
            # else it would be in the list of processes, and in the log
            raise RetrievalError(f"a token belongs in {TOKEN} or in {TOKEN_FILE}'s file")
        *database, collection = url.path.strip("/").split("/")
        if not url.hostname or not collection or len(database) > 1 or url.query:
            name = name.partition("?")[0]  # what is behind it may be a secret
            raise RetrievalError(f"{name}: must be http(s)://host:port/collection")
        return Place(f"{url.scheme}://{url.netloc}", "".join(database), collection)
    local = _LOCAL.fullmatch(name)
    is_index = (Path(name) / SETTINGS).exists()  # of ours, by whatever name
    return Place(local[1], "", local[2]) if local and not is_index else None


class _Layout(NamedTuple):
    """What searches must know of the collection as it is."""

    key: str
    read: list[str]
    is_ivf: bool
    sign: int


class MilvusRetriever:
    """One collection and its encoder. Safe to call from any thread.

    Args:
        timeout_s: of each call.
    Attributes:
        damage: why the last call failed.
    Raises:
        UnavailableError: Milvus does not answer in time.
        CorruptIndexError: no such collection, an empty one, without the fields, or of another
            encoder.
        RetrievalError: pymilvus is not installed.
    """

    modes: tuple[Mode, ...] = ("dense",)

    def __init__(self, name: str, encoder: Encoder, *, timeout_s: float) -> None:
        place = place_of(name)
        assert place is not None
        self._name, self._encoder, self._timeout = name, encoder, timeout_s
        self.damage: str | None = None
        self._has_failed = False  # since the last look that did not
        self._seen: Any = None
        self._num_rows = 0
        self._layout: _Layout | None = None  # None: it cannot be searched as it was seen last
        with self._heard():
            if place.uri.endswith(".db") and not Path(place.uri).exists():  # else it would be made
                raise CorruptIndexError(f"{place.uri}: no such file")
            self._client = _connect(place, timeout_s)
            self._collection = place.collection or self._only_one()
            self._look()

    @classmethod
    def open(cls, name: str, *, encoder: str | None, device: str | None) -> MilvusRetriever:
        """Open a collection.

        Args:
            encoder: a sentence-transformers model, path or hub name, or the directory of an index
                that has the encoder.
            device: of the encoder, see `Retriever.open`.
        Raises:
            RetrievalError: no encoder is named, it cannot be loaded, or see the class.
        """
        if encoder is None:
            what = "a collection does not say which encoder made it"
            raise RetrievalError(f"{name}: {what}; name it with --encoder")
        return cls(name, _load_encoder(encoder, device), timeout_s=TIMEOUT_S)

    def search(self, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int) -> SearchResult:
        """The k best passages of each query.

        Args:
            nprobe: lists visited in an IVF index.
        Raises:
            RetrievalError: k or nprobe is below 1, or another mode than `dense`.
            UnavailableError: Milvus does not answer in time.
            CorruptIndexError: the collection has gone or is empty, or is another one now.
        """
        for argument, number in (("k", k), ("nprobe", nprobe)):
            if number < 1:
                raise RetrievalError(f"{argument} must be at least 1, got {number}")
        if mode not in self.modes:
            raise RetrievalError(f"mode {mode!r}: a Milvus collection has dense")
        hits: list[list[Hit]] = [[] for _ in queries]
        ms = dict[str, float]()
        if not queries:
            return SearchResult(hits, ms)
        with timed(ms, "encode"):
            vectors = self._encoder.encode_queries(queries)
        # all passages are equally near to the zero vector, the embedded encoder's without words
        asked = np.flatnonzero(vectors.any(axis=1)).tolist()
        if asked:
            with timed(ms, "dense"), self._heard():
                found = self._search([vectors[at] for at in asked], k, nprobe)
                for at, rows in zip(asked, found, strict=True):
                    hits[at] = rows
        return SearchResult(hits, ms)

    def refresh(self) -> bool:
        """Look at the collection. Whether it can be searched again.
        Raises RetrievalError: see the class."""
        with self._heard():
            self._look()
        was, self._has_failed = self._has_failed, False
        return was

    def info(self) -> dict[str, Any]:
        """A description of the collection, for people, as of the last look."""
        spec = self._encoder.spec()
        return {
            "passages": self._num_rows,
            "generation": None,
            "modes": list(self.modes),
            "dim": self._encoder.dim,
            "encoder": {key: spec[key] for key in spec if key != "dim"},
            "tokenizer": None,
        }

    # Private, in order of use

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Calls of Milvus: what they raise becomes ours, and `damage`."""
        try:
            yield
        except Exception as error:
            failed = error if isinstance(error, RetrievalError) else _told(self._name, error)
            self.damage, self._has_failed = str(failed), True
            raise failed from None
        self.damage = None

    def _only_one(self) -> str:
        names: list[str] = self._client.list_collections(timeout=self._timeout)
        if len(names) != 1:
            there = f"the collections {', '.join(names)}; name one" if names else "no collection"
            raise CorruptIndexError(f"{self._name} has {there}: {self._name}/COLLECTION")
        return names[0]

    def _look(self) -> _Layout:
        """What the collection is now. Raises CorruptIndexError where it cannot be searched."""
        try:
            self._layout = self._looked_at()
        except CorruptIndexError:
            self._layout = None
            raise
        return self._layout

    def _looked_at(self) -> _Layout:
        client, collection, limit = self._client, self._collection, {"timeout": self._timeout}
        told = client.describe_collection(collection, **limit)
        fields = {field["name"]: field for field in told["fields"]}
        is_open = told["enable_dynamic_field"]  # rows may have fields that it does not name
        needed = (VECTOR,) if is_open else (VECTOR, TEXT)
        if missing := [name for name in needed if name not in fields]:
            what = f"lacks the field {', '.join(missing)}; it has {', '.join(fields)}"
            raise CorruptIndexError(f"{self._name} {what}")
        kind, dim = fields[VECTOR]["type"].name, int(fields[VECTOR]["params"].get("dim", 0))
        if kind != "FLOAT_VECTOR":
            raise CorruptIndexError(f"{self._name}: its vectors are {kind}, must be FLOAT_VECTOR")
        if dim != self._encoder.dim:
            what = f"has vectors of {dim} dimensions, the encoder gives {self._encoder.dim}"
            raise CorruptIndexError(f"{self._name} {what}")
        key = next(name for name, field in fields.items() if field.get("is_primary"))
        read = [name for name in (TEXT, TITLE) if name in fields or is_open]
        names = client.list_indexes(collection, field_name=VECTOR, **limit)
        index = client.describe_index(collection, names[0], **limit) if names else {}
        if (metric := index.get("metric_type")) not in METRICS:
            what = f"has an index by {metric}" if names else "has no index of its vectors"
            raise CorruptIndexError(f"{self._name} {what}; needs one by {', '.join(METRICS)}")
        # a restarted milvus-lite has loaded nothing
        if client.get_load_state(collection, **limit)["state"].name != "Loaded":
            client.load_collection(collection, **limit)
        self._num_rows = int(client.get_collection_stats(collection, **limit)["row_count"])
        rows = client.query(collection, filter="", limit=1, output_fields=[*read, VECTOR], **limit)
        if not rows:
            raise CorruptIndexError(f"{self._name} is empty")
        passage = self._passage(rows[0][key], rows[0])
        if (seen := (told, rows[0])) != self._seen:
            self._check_encoder(passage, np.asarray(rows[0][VECTOR], np.float32))
        self._seen = seen
        return _Layout(key, read, index["index_type"].startswith("IVF"), METRICS[metric])

    def _check_encoder(self, passage: Passage, then: Any) -> None:
        texts = [passage.content, passage.text]  # others may have encoded it without its title
        now = self._encoder.encode_passages(texts)
        lengths = np.linalg.norm(now, axis=1) * np.linalg.norm(then)
        cosine = float((now @ then / np.maximum(lengths, 1e-9)).max())
        if lengths.all() and cosine < MIN_PROBE_COSINE:
            what = f"the vector of {passage.id} has cosine {cosine:.3f} to this one's"
            raise CorruptIndexError(f"{self._name}: written by another encoder ({what})")

    def _search(self, vectors: Sequence[Any], k: int, nprobe: int) -> list[list[Hit]]:
        layout = self._layout or self._look()
        try:
            found = self._client.search(
                self._collection,
                data=vectors,
                anns_field=VECTOR,
                limit=k,
                output_fields=layout.read,
                search_params={"params": {"nprobe": nprobe} if layout.is_ivf else {}},
                timeout=self._timeout,
            )
        except Exception as error:
            if not isinstance(_told(self._name, error), UnavailableError):
                self._look()  # says what has changed, if that is why
            raise
        if not any(found):
            self._layout = None
            raise CorruptIndexError(f"{self._name} is empty")

        def hit(row: Any) -> Hit:
            passage = self._passage(row[layout.key], row["entity"])
            return Hit(passage, layout.sign * row["distance"], "dense")

        return [[hit(row) for row in rows] for rows in found]

    def _passage(self, key: Any, row: Any) -> Passage:
        """Of a collection nobody knows where in its document a passage was, nor its tokens: 0."""
        text = row.get(TEXT)
        if not isinstance(text, str):
            raise CorruptIndexError(f"{self._name}: the passage {key} has no {TEXT}")
        return Passage(str(key), str(key), row.get(TITLE) or "", text, 0, 0, 0)


def copy_index(index: Index, name: str, *, progress: Progress) -> int:
    """Write the passages and vectors of an index into a new collection, `passages` where `name`
    says none; returns their number.

    Raises:
        RetrievalError: `name` is no collection's, there is one already, a text is longer than
            Milvus takes, or Milvus does not answer.
    """
    if (place := place_of(name)) is None:
        raise RetrievalError(f"{name}: must be http(s)://host:port/collection, or file.db")
    collection, limit = place.collection or "passages", {"timeout": COPY_TIMEOUT_S}
    rows = np.setdiff1d(np.arange(index.num_rows), index.removed)
    is_begun = False
    try:
        client = _connect(place, TIMEOUT_S)
        from pymilvus import DataType

        if client.has_collection(collection, **limit):
            there = f"there is a collection {collection}"
            raise RetrievalError(f"{name}: {there}; drop it, or name another")
        schema, indexes = client.create_schema(), client.prepare_index_params()
        for field in (TEXT, TITLE, "id"):
            size = {"max_length": MAX_TEXT_BYTES, "is_primary": field == "id"}
            schema.add_field(field, DataType.VARCHAR, **size)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=index.settings.dim)
        # as every encoder of ours measures
        indexes.add_index(VECTOR, index_type="AUTOINDEX", metric_type="IP")
        client.create_collection(collection, schema=schema, index_params=indexes, **limit)
        is_begun = True
        for first in range(0, len(rows), COPIED_ROWS):
            some = rows[first : first + COPIED_ROWS]
            vectors, passages = index.vectors.read_rows(some), index.store.get(some.tolist())
            data = [
                {"id": each.id, TITLE: each.title, TEXT: each.text, VECTOR: vector}
                for each, vector in zip(passages, vectors, strict=True)
            ]
            client.insert(collection, data, **limit)
            progress("copy", first + len(some), len(rows))
        client.flush(collection, **limit)
    except BaseException as error:
        if is_begun:  # a part of it would be served as the whole
            with suppress(Exception):
                client.drop_collection(collection, **limit)
        if isinstance(error, RetrievalError) or not isinstance(error, Exception):
            raise
        raise _told(name, error) from None
    return len(rows)


def _load_encoder(name: str, device: str | None) -> Encoder:
    folder = Path(name)
    if (folder / SETTINGS).exists():
        spec = read_settings(folder).encoder
        return load_encoder(
            spec, folder=folder, override=None, device=device, batch_size=QUERY_BATCH
        )
    own: dict[str, Any] = {"query_prefix": None, "passage_prefix": None, "normalize": True}
    return SentenceEncoder(name, device=device, batch_size=QUERY_BATCH, **own)


def _connect(place: Place, timeout_s: float) -> Any:
    try:
        from pymilvus import MilvusClient
    except ModuleNotFoundError as error:
        missing = f"needs the extra 'milvus': {error.name} is not installed"
        raise RetrievalError(f"{place.uri} {missing}") from None
    # they print the stack of every error that they raise, and gRPC what milvus-lite lacks
    for name in ("pymilvus", "milvus_lite", "grpc._server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MilvusClient(place.uri, token=_token(), db_name=place.database, timeout=timeout_s)


def _token() -> str:
    """"" for none. Raises RetrievalError: its file cannot be read."""
    if file := os.environ.get(TOKEN_FILE):
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise RetrievalError(f"{TOKEN_FILE}: {error}") from None
    return os.environ.get(TOKEN, "")


def _told(name: str, error: Exception) -> RetrievalError:
    """An error of ours for one of pymilvus' or gRPC's, which share no class."""
    import grpc
    from pymilvus.exceptions import MilvusException

    message, code = str(error), None
    if isinstance(error, MilvusException):
        message, code = error.message, error.code
    elif isinstance(error, grpc.RpcError):
        message, code = error.details() or "", error.code()
    reason = first_line(Exception(message)) or type(error).__name__
    with suppress(RetrievalError):  # its file may have gone since
        if token := _token():
            reason = reason.replace(token, "***")
    status = grpc.StatusCode
    busy = (*BUSY_CODES, status.UNAVAILABLE, status.DEADLINE_EXCEEDED, status.RESOURCE_EXHAUSTED)
    if code in busy or isinstance(error, grpc.FutureTimeoutError):
        return UnavailableError(f"{name}: Milvus does not answer: {reason}")
    return CorruptIndexError(f"{name}: Milvus refuses: {reason}")
