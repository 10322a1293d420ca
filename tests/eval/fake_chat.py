"""A server that answers whole chat completions with distributions, as the quality modes ask for
them: ours or a stock one.

It knows by salt what was asked (an equal prompt is cached but for its last token) and which chunks
preceded a chunk when it was captured, newest capture last. What it answers is the test's to say.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
GETS: dict[str, Body] = {
    "/health": {},
    "/v1/models": {"data": [{"id": "fake"}]},
    "/server_info": {"model_path": "/models/fake", "dtype": "float32"},
    "/chunkcache/stats": {"ranks": [{}]},
}


class FakeChat:
    """`answer(body)` is the text, or a ValueError that becomes HTTP 400.
    Without `order` in a body, chunks are sorted by id."""

    def __init__(self, answer: Callable[[Body], str], *, takes_salt: bool = True) -> None:
        self._answer, self._takes_salt = answer, takes_salt
        self.received: list[Body] = []
        self.prefixes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self.url = ""

    def reply(self, path: str, body: Body) -> tuple[int, Body]:
        """(status, JSON) of a POST."""
        with self._lock:
            self.received.append({"path": path, **body})
            salt = body.get("cache_salt", "") if self._takes_salt else ""
            if path == "/chunkcache/preprocess":
                self.prefixes[salt][body["chunk"]["id"]].append(len(body["neighbors"]))
                return 200, {}
            try:
                text = self._answer(body)
            except ValueError as error:
                return 400, {"error": {"message": str(error)}}
            chunks = body.get("chunks", [])
            order = [chunk["id"] for chunk in chunks]
            if body.get("order") != "retriever":
                order.sort()
            prompt = json.dumps([salt, order, body["messages"]])
            num_prompt = 10 + len(prompt.split())
            num_cached = num_prompt - 1 if prompt in self._seen else 0
            self._seen.add(prompt)
            reply = _completion(text, num_prompt, num_cached)
            if path.startswith("/rag"):
                reply["chunkcache"] = self._info(body, salt, order, num_prompt, num_cached)
            return 200, reply

    def _info(
        self, body: Body, salt: str, order: list[str], num_prompt: int, num_cached: int
    ) -> Body:
        fates = {"exact": num_cached, "relocated": 0, "recomputed": 0}
        fates["computed"] = num_prompt - num_cached
        info: Body = {"order": order, "dropped": [], "fates": fates, "reuse": None, "fallbacks": []}
        if body.get("reuse") in (None, "exact"):
            for place, chunk in enumerate(order):
                self.prefixes[salt][chunk].append(place)
            return info
        prefixes = {chunk: self.prefixes[salt][chunk][-1] for chunk in order}
        found = [{"chunk": c, "from": "host", "variant_prefix": p} for c, p in prefixes.items()]
        fates |= {"exact": 4, "relocated": num_prompt - 8, "recomputed": 2, "computed": 2}
        return info | {"reuse": {"sources": found, "fused_hit": 0}}


@contextmanager
def chatting(fake: FakeChat) -> Iterator[FakeChat]:
    """The fake on a port of its own; its `url` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200 if self.path in GETS else 404, GETS.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*fake.reply(self.path, body))

        def _send(self, status: int, body: Body) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def _completion(text: str, num_prompt: int, num_cached: int) -> Body:
    """Each word is a token of probability 0.9; the rest is one other token."""
    other = {"token": "<other>", "logprob": math.log(0.1)}
    steps = [
        {"token": word, "top_logprobs": [{"token": word, "logprob": math.log(0.9)}, other]}
        for word in text.split()
    ]
    usage = {"prompt_tokens": num_prompt, "prompt_tokens_details": {"cached_tokens": num_cached}}
    choice = {"message": {"content": text}, "logprobs": {"content": steps}}
    return {"choices": [choice], "usage": usage}
