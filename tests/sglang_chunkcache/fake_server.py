"""A server that answers `/chunkcache/*` without an engine, and keeps what it was asked. For tests of the commands."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Every chunk is taken, unless it is in `refused`; `reply` overrides what GET answers."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.reuse = "fused"
        self.num_lost = 0
        """Captures that are dropped once a chunk was sent."""
        self.pending = 0
        """Captures that wait; every other request does one."""
        self.refused: set[str] = set()
        self.neighbors = {"moved": 2, "computed": 1, "missing": 0}
        """Of every chunk that has some."""
        self.reply: tuple[int, bytes] | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                dropped = fake.num_lost if fake.posts else 0
                ranks = [{"store": {"pending": n, "dropped": dropped}} for n in (fake.pending, 0)]
                self._answer(*(fake.reply or (200, json.dumps({"reuse": fake.reuse, "ranks": ranks}).encode())))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.posts.append((self.path, body))
                if self.path == "/rag/v1/generate":
                    fake.pending = max(0, fake.pending - 1)
                    self._answer(200, b"{}")
                elif body["chunk"]["id"] in fake.refused:
                    self._answer(400, b'{"message": "messages: too long"}')
                else:
                    fake.pending += 1
                    told = {
                        "chunk_tokens": 10,
                        "neighbors": fake.neighbors if body["neighbors"] else {},
                        "seconds": 0.5,
                    }
                    self._answer(200, json.dumps(told).encode())

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def chunks(self) -> list[tuple[str, list[str]]]:
        """(chunk, neighbours in front of it) of every request that was to fill the store."""
        return [
            (body["chunk"]["text"], [item["text"] for item in body["neighbors"]])
            for path, body in self.posts
            if path == "/chunkcache/preprocess"
        ]
