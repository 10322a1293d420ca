"""An OpenAI-compatible endpoint that streams, and misbehaves on demand:
a question with one of MISHAPS' words gets it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from eval.server import free_port
from tests.polling import DEADLINE_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MISHAPS = (
    *("refused", "broken", "cut off", "dropped", "unfinished"),
    *("empty", "garbage", "complaint", "mute"),
)


@dataclass
class FakeEndpoint:
    """Each request takes `delay_s` of the server, one request at a time if `serial`."""

    delay_s: float = 0.0
    serial: bool = False
    chunk_cache: bool = False
    has_tiers: bool = False  # two tokens of each prompt are loaded from the host
    num_waiting: int = 0  # of the storage's writes; one is done for each look at the stats
    cfo: tuple[float, ...] = ()  # of the chunks that each request moves; a gap is between them
    can_flush: bool = True
    is_sglang: bool = True  # has SGLang's own routes
    is_cold: bool = False  # nothing is ever found cached
    cache_report: bool = True
    is_down: bool = False  # connections are closed without an answer, as if the process had died
    odd_event: dict[str, Any] | None = None  # sent before the first text
    url: str = ""
    # with `path`, and `at` and `answered`: when they came, when the answer was whole
    received: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)  # request ids
    prefill_s: float = 0.002  # to a plain request's first token; it answers until aborted
    stalled_s: float = 0.002  # between its tokens while a chat waits
    retracts: bool = False  # a request for each look at the metrics
    num_retracted: int = 0
    num_flushed: int = 0
    num_forgotten: int = 0
    num_in_flight: int = 0
    most_in_flight: int = 0

    @property
    def questions(self) -> list[str]:
        """The last user messages, in the order in which they came."""
        return [body["messages"][-1]["content"] for body in self.received]

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """One streamed answer of three tokens."""
        body = {**await http.json(), "path": http.path, "at": time.perf_counter()}
        self.received.append(body)
        text = body["messages"][-1]["content"]
        mishap = next((word for word in MISHAPS if word in text), None)
        if mishap == "refused":
            return web.json_response({"error": {"message": "too\nlong"}}, status=400)
        if mishap == "broken":
            return web.Response(text="no JSON", status=500)
        if mishap == "cut off":
            return await _cut_off(http)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            return await self._stream(http, body, mishap)
        finally:
            self.num_in_flight -= 1
            body["answered"] = time.perf_counter()

    async def _stream(
        self, http: web.Request, body: dict[str, Any], mishap: str | None
    ) -> web.StreamResponse:
        response = await _opened(http)
        if mishap == "mute":
            await asyncio.sleep(30)
        async with self._lock if self.serial else asyncio.Lock():
            await asyncio.sleep(self.delay_s)
        if mishap == "garbage":
            await response.write(b"data: {not JSON\n\n")
        if mishap == "complaint":
            await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        if mishap != "empty":
            await self._write(response, body, mishap)
        if mishap != "unfinished":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(
        self, response: web.StreamResponse, body: dict[str, Any], mishap: str | None
    ) -> None:
        async def event(delta: dict[str, str] | None, **more: Any) -> None:
            choices = [] if delta is None else [{"index": 0, "delta": delta}]
            await response.write(f"data: {json.dumps({'choices': choices, **more})}\n\n".encode())

        await response.write(b": a comment\n\n")
        await event({"role": "assistant", "content": ""})
        if self.odd_event is not None:
            await response.write(f"data: {json.dumps(self.odd_event)}\n\n".encode())
        for word in ("an", " ans", "wer"):
            await event({"content": word})
            if mishap == "dropped":
                _hang_up(response._req)
        prompt = sum(len(message["content"]) for message in body["messages"])
        # as SGLang, which leaves a zero out
        cached = None if self.is_cold else {"cached_tokens": prompt // 2}
        fates = {"exact": prompt - 3, "relocated": 0, "recomputed": 1, "computed": 2}
        ours = {"fates": fates, "order": ["b", "a"], "chunks_hit": 1, "dropped": ["a"]}
        ours |= {"fallbacks": [], **({"loaded": 2} if self.has_tiers else {})}
        if self.cfo:
            moved = [{"from": "host", "cfo": share} for share in self.cfo]
            ours["reuse"] = {"sources": [{"from": "gap", "cfo": None}, *moved]}
        await event({}, **({"chunkcache": ours} if body["path"].startswith("/rag") else {}))
        usage = {"prompt_tokens": prompt, "completion_tokens": 3, "prompt_tokens_details": cached}
        await event(None, usage=usage)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """A plain request of SGLang's own: an event for every token,
        the second of them without text."""
        body, response = await http.json(), await _opened(http)
        for number in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            token_s = self.stalled_s if self.num_in_flight else 0.002
            await asyncio.sleep(self.prefill_s if number == 1 else token_s)
            text = "" if number == 2 else "x" * number
            event = {"text": text, "meta_info": {"completion_tokens": number}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if body["rid"] in self.aborted:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.add((await http.json())["rid"])
        return web.json_response({})

    def app(self) -> web.Application:
        """All routes that the harness uses."""
        self._lock = asyncio.Lock()

        @web.middleware
        async def fall_silent(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.is_down:
                _hang_up(request)
            return await handler(request)

        app = web.Application(client_max_size=1 << 26, middlewares=[fall_silent])
        app.router.add_post("/v1/chat/completions", self.chat)
        if self.is_sglang:
            app.router.add_post("/generate", self.generate)
            app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", _says({}))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", _says({"data": [{"id": "fake-model"}]}))
        info = {"model_path": "/somewhere/fake", "enable_cache_report": self.cache_report}
        app.router.add_get("/server_info", _says({"device": "cpu", **info}))
        if self.can_flush:
            app.router.add_post("/flush_cache", self._flush)
        if self.chunk_cache:
            app.router.add_post("/rag/v1/chat/completions", self.chat)
            app.router.add_get("/chunkcache/stats", self._stats)
            app.router.add_post("/chunkcache/forget", self._forget)
            app.router.add_post("/chunkcache/preprocess", self._preprocess)
            spans = [{"start": 0, "end": 3}]
            app.router.add_post("/chunkcache/explain", _says({"spans": spans}))
        return app

    async def _stats(self, _: web.Request) -> web.Response:
        self.num_waiting = max(0, self.num_waiting - 1)
        counts = dict.fromkeys(("dropped", "no_room", "num_evicted", "pending"), 0)
        store = {**counts, "max_bytes": 1000, "max_entries": 100, "token_bytes": 1}
        rank: dict[str, Any] = {"gate": {"passed": True}, "store": store}
        if self.has_tiers:
            rank |= {
                "moves": {
                    "one_copy": {
                        "held_rows": 4 * self.num_in_flight,
                        "held_slots": 7 * self.num_in_flight,
                    }
                }
            }
            rank |= {"host": {"tokens": 7}, "storage": {"queue": self.num_waiting}}
        return web.json_response({"ranks": [rank], "reuse": "fused"})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.num_retracted += self.retracts
        gauges = {"num_running_reqs": self.num_in_flight, "num_used_tokens": 9 * self.num_in_flight}
        text = "".join(
            f'# TYPE sglang:{name} gauge\nsglang:{name}{{tp_rank="0"}} {value}\n'
            for name, value in gauges.items()
        )
        name = "sglang:num_retracted_requests"
        text += f'# TYPE {name} counter\n{name}_total{{tp_rank="0"}} {self.num_retracted}\n'
        return web.Response(text=text)

    async def _preprocess(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.received.append({**body, "path": http.path})
        if "refused" in body["chunk"]["text"]:
            return web.json_response({"message": "too long"}, status=400)
        moved = {"moved": len(body["neighbors"]), "computed": 0, "missing": 0}
        return web.json_response({"kept": False, "chunk_tokens": 3, "neighbors": moved})

    async def _forget(self, _: web.Request) -> web.Response:
        self.num_forgotten += 1
        return web.json_response({})

    async def _flush(self, _: web.Request) -> web.Response:
        self.num_flushed += 1
        return web.json_response({})


async def _opened(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    return response


async def _cut_off(http: web.Request) -> web.StreamResponse:
    """An error whose body ends before it is whole."""
    response = web.StreamResponse(status=503, headers={"Content-Length": "100"})
    await response.prepare(http)
    await response.write(b"busy")
    _hang_up(http)
    return response


def _hang_up(http: web.BaseRequest | None) -> None:
    assert http is not None
    assert http.transport is not None
    http.transport.abort()


def _says(body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """The endpoint on a real socket, in a thread of its own."""
    loop, port, ready = asyncio.new_event_loop(), free_port(), threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(endpoint.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    endpoint.url = f"http://127.0.0.1:{port}"
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
