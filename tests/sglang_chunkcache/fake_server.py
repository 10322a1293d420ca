"""Servers that answer without an engine, and keep what they were asked.
For tests of the commands and of programs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer:
    """`answer` says what comes back, as an object or as bytes."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.posts.append((self.path, body))
                self._answer(body)

            def _answer(self, body: dict[str, Any] | None) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                status, told = fake.answer(self.path, body)
                content = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and content; `body` is None for GET."""
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class FakeServer(JsonServer):
    """Every chunk is taken, unless it is in `refused`; `reply` overrides what GET answers."""

    reuse, delay_s = "fused", 0.0
    num_lost = num_evicted = num_without_room = 0
    """Captures that are dropped, a store's variants that are evicted, and chunks that it has no
    room for, once a chunk was sent."""
    pending = 0
    """Captures that wait; every other request does one."""
    neighbors: Mapping[str, int] = {"moved": 2, "computed": 1, "missing": 0}
    """Of every chunk that has some."""
    refused: Collection[str] = ()
    kept: Collection[str] = ()
    """Chunks that are there already."""
    missing_together: Collection[str] = ()
    """Chunks that find no neighbour while others are in flight."""
    storage: Sequence[Mapping[str, Any]] = ()
    """What the first rank's tells, one after the other; the last one for ever."""
    reply: tuple[int, bytes] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_in_flight = self.most_in_flight = 0
        super().__init__()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is None:
            return self.reply or (200, {"reuse": self.reuse, "ranks": self._ranks()})
        if path == "/chunkcache/explain":
            return 200, {"spans": [{"start": 5, "end": 5 + len(c["text"])} for c in body["chunks"]]}
        if path == "/rag/v1/generate":
            self.pending = max(0, self.pending - 1)
            return 200, {}
        if body["chunk"]["id"] in self.refused:
            return 400, {"message": "messages: too long"}
        return 200, self._preprocess(body)

    def _ranks(self) -> list[dict[str, Any]]:
        is_sent = any(path == "/chunkcache/preprocess" for path, _ in self.posts)
        room = {"max_bytes": 2 << 20, "max_entries": 100, "num_evicted": 0}
        store = room | {"num_evicted": is_sent * self.num_evicted, "token_bytes": 1024}
        store |= {"dropped": is_sent * self.num_lost, "num_variants": 7}
        store |= {"no_room": is_sent * self.num_without_room}
        ranks: list[dict[str, Any]] = [
            {"store": {"pending": n, **store}} for n in (self.pending, 0)
        ]
        if self.storage:
            told, self.storage = self.storage[0], self.storage[1:] or self.storage
            ranks[0]["storage"] = {"queue": 0, "problems": {}, "unwritten": 0, **room, **told}
        return ranks

    def _preprocess(self, body: dict[str, Any]) -> dict[str, Any]:
        kept = body["chunk"]["id"] in self.kept
        self.pending += not kept
        with self._lock:
            self._num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
            is_together = self._num_in_flight > 1
        time.sleep(self.delay_s)
        with self._lock:
            is_together |= self._num_in_flight > 1
            self._num_in_flight -= 1
        neighbors = {} if kept or not body["neighbors"] else dict(self.neighbors)
        if neighbors and is_together and body["chunk"]["id"] in self.missing_together:
            neighbors = {"missing": len(body["neighbors"])}
        return {"chunk_tokens": 10, "kept": kept, "neighbors": neighbors, "seconds": 0.5}

    @property
    def chunks(self) -> list[tuple[str, list[str]]]:
        """(chunk, neighbours in front of it) of every request that was to fill the store."""
        return [
            (body["chunk"]["text"], [item["text"] for item in body["neighbors"]])
            for path, body in self.posts
            if path == "/chunkcache/preprocess"
        ]
