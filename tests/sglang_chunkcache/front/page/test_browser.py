"""The live page as people see it: in Chromium, behind SGLang's own check of keys.

    launch/test.sh -m nightly tests/sglang_chunkcache/front/page/test_browser.py

PAGE_SHOTS names a directory for pictures of what was seen.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from sglang.srt.utils import auth

from eval.server import free_port
from radix_ext import Chunk, ChunkId, Tier
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.page import access
from sglang_chunkcache.front.page.routes import PageRoutes
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.wire.report import Report, Source
from tests.kit.browser import CHROMIUM, browse
from tests.kit.front_bench import A, B, Bench, C, make_output

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

EVIL = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
RANK: dict[str, Any] = {
    "dp_rank": 0,
    "chunk_nodes": 3,
    "free": 500,
    "evictable": 300,
    "protected": 200,
    "evicted_chunks": 7,
    "waiting": {"now": 1},
    "fallbacks": {},
    "mirror": {"chunk_nodes": 3, "agrees": True, "events_behind": 0},
}


def used(num_nodes: int) -> Bench:
    """A front after a few requests, and others' chunks."""
    bench = Bench(reuse="fused", max_tree_nodes=200_000)
    for i in range(1000):
        fusion = fused_request(bench.config, ReuseIn(mode="fused")) if i % 2 else None
        asked = bench.ask(f"q{i}", Passage(EVIL, "evil"), A, B, C, fusion=fusion)
        moved, found = asked.spans[1], asked.spans[0].end
        sources = (Source(moved.start, moved.end, 1, "host"),)
        report = Report(found, 8, 2, 0, 0, sources, None, (), {}) if fusion else None
        asked.streams = True
        entry = bench.ranks[0].serve(asked.custom_params, asked.input_ids, report)
        for seconds, reason in ((0.1 + i / 100, None), (4.0, "stop")):
            bench.now += seconds / 5
            bench.observe(asked, make_output([65], found, reason, 0, entry))
        asked.answered_at = asked.options.timeline.came + 0.1 + i / 1000
        bench.end(asked)
    # behind the first answer, which tells of a rank that holds nothing
    for i in range(num_nodes):
        chunks = [Chunk(ChunkId(f"{each}"), 100) for each in (i // 50, i)]
        bench.bookkeeper.tree.insert("n", chunks, rank=0, tier=Tier.DEVICE, promoted_len=1)
    return bench


@contextmanager
def served(bench: Bench, *, keys: dict[str, str | None]) -> Iterator[str]:
    """The page's endpoints and address."""

    async def stats() -> dict[str, Any]:
        return {"version": "1", **bench.bookkeeper.stats(), "ranks": [RANK]}

    args = SimpleNamespace(**keys)
    parts = SimpleNamespace(
        bookkeeper=bench.bookkeeper, manager=SimpleNamespace(server_args=args), stats=stats
    )
    app = FastAPI()
    for method, path, handler in PageRoutes(parts).table():  # type: ignore[arg-type]
        app.add_api_route(path, handler, methods=[method])
    auth.add_api_key_middleware(app, **keys)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}{access.PAGE}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def our_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hook patches it."""
    original = auth.decide_request_auth
    decide = lambda **asked: access.decide(original, **asked)  # noqa: E731
    monkeypatch.setattr(auth, "decide_request_auth", decide)


KEYS: dict[str, str | None] = {"api_key": "tenant", "admin_api_key": "boss"}


@pytest.mark.parametrize("num_nodes", [0, 100_000])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_page(num_nodes: int, width: int, scheme: str, tmp_path: Path) -> None:
    """A key opens it, labels stay text, nothing is wider than the screen, and no rule of its own
    policy is broken."""

    async def look(url: str) -> None:
        async with browse(tmp_path / "profile") as page:
            await page.open(url, width=width, scheme=scheme)
            await page.until("!at('login').hidden")
            assert "401" in page.errors.pop()
            await page.run("at('key').value = 'tenant'; at('login').requestSubmit()")
            await page.until("at('notice').textContent.includes('admin')")
            assert "403" in page.errors.pop()
            assert await page.run("at('main').hidden")
            await page.run("at('key').value = 'boss'; at('login').requestSubmit()")
            await page.until("!at('main').hidden && document.querySelector('canvas')")
            await page.run("document.querySelector('#requests tr.pick').click()")
            await page.until("document.querySelectorAll('svg.plan rect.moved').length > 0")
            await page.run("at('tree-load').click()")
            await page.until("document.querySelector('#tree .tree button')")
            await page.run("document.querySelector('#tree .tree button').click()")
            await page.until("document.querySelectorAll('#tree ul.tree ul.tree li').length > 0")
            if num_nodes:
                items = "document.querySelectorAll('#tree ul.tree ul.tree > li').length"
                assert await page.run(items) == 1001, "a thousand, and a button for more"
                await page.run("[...document.querySelectorAll('#tree button')].at(-1).click()")
                await page.until(f"{items} > 1001")
            await page.run("document.querySelectorAll('#requests tr.pick')[2].focus()")
            await page.run("poll()")
            assert await page.run("document.activeElement.dataset.number") == "998"
            assert await page.run("document.querySelectorAll('img, main script').length") == 0
            shown = f"document.body.textContent.includes({EVIL[:80]!r})"
            assert await page.run(shown)
            assert await page.run("document.title") == "Chunk cache"
            assert await page.run("document.documentElement.scrollWidth") <= width
            kept = "[location.href, document.cookie, ...Object.values(localStorage)].join()"
            assert "boss" not in await page.run(kept)
            assert page.errors == []
            if shots := os.environ.get("PAGE_SHOTS"):
                await page.shoot(Path(shots) / f"page-{num_nodes}-{width}-{scheme}.png")

    with served(used(num_nodes), keys=KEYS) as url:
        asyncio.run(look(url))


def test_page_without_requests_and_keys(tmp_path: Path) -> None:
    async def look(url: str) -> None:
        async with browse(tmp_path / "profile") as page:
            await page.open(url, width=400)
            await page.until("!at('main').hidden")
            assert await page.run("at('login').hidden")
            assert await page.run("at('fates').textContent") == "no request yet"
            assert page.errors == []

    with served(Bench(), keys={"api_key": None, "admin_api_key": None}) as url:
        asyncio.run(look(url))
