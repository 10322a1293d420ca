"""A page in headless Chromium, through its debugging port."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """What it complained of is in `errors`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """One command of the Chrome DevTools protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            said = await self._socket.receive_json(timeout=60)
            if said.get("id") == self._number:
                return said["result"]
            if said["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def open(self, url: str, *, width: int, scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.resize(width, 900)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def run(self, script: str) -> Any:
        """The value of an expression, a promise's once it is there."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        return (await self.call("Runtime.evaluate", **asked))["result"].get("value")

    async def until(self, script: str) -> None:
        """An expression becomes true."""
        async with asyncio.timeout(60):
            while not await self.run(f"Boolean({script})"):
                await asyncio.sleep(0.05)

    async def shoot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browse(profile: Path) -> AsyncIterator[Page]:
    """A browser of its own, which keeps its files in `profile`."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    browser = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *flags, f"--user-data-dir={profile}", "about:blank", stderr=subprocess.PIPE
    )
    try:
        assert browser.stderr is not None
        found = None
        while found is None:
            line = (await browser.stderr.readline()).decode()
            assert line, "Chromium did not start"
            found = re.search(r"listening on ws://([^/]+)/", line)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1]}/json") as answer:
                tabs = await answer.json()
            at = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(at, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        browser.kill()
        await browser.wait()
