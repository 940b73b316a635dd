"""A real browser without a window, driven by its DevTools protocol: what a page shows, what went wrong on it, and a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Browser:
    """One page. `complaints` are its errors: of scripts, of its policy, of resources that are missing."""

    def __init__(self, folder: Path, *switches: str) -> None:
        self.complaints: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._folder, self._switches, self._calls = folder, switches, 0

    def __enter__(self) -> Browser:
        command = [str(CHROMIUM), *SWITCHES, *self._switches, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop.run_until_complete(self._connect())
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *failure: object) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait()

    def open(self, address: str, width: int = 1600, height: int = 1300) -> None:
        self.complaints.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call(
            "Page.navigate", url="about:blank"
        )  # an address that differs in its fragment only would not load anew
        self.call("Page.navigate", url=address)

    def wait_for(self, *names: str, seconds: float = 120) -> None:
        """All of these are on the page, sooner or later."""
        self.wait_until(
            f"{json.dumps(names)}.filter(name => !document.documentElement.outerHTML.includes(name))", [], seconds
        )

    def wait_until(self, expression: str, wanted: Any, seconds: float = 120) -> None:
        give_up_at = time.monotonic() + seconds
        while (found := self.evaluate(expression)) != wanted:
            assert time.monotonic() < give_up_at, (
                f"{expression} is {found}, not {wanted}, at {self.evaluate('location.href')}"
            )
            time.sleep(0.25)

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, file: Path, whole: bool = False) -> None:
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _connect(self) -> None:
        import aiohttp

        told = self._folder / "DevToolsActivePort"
        give_up_at = time.monotonic() + 60
        while not told.exists() or len(told.read_text().splitlines()) < 2:
            assert time.monotonic() < give_up_at, "the browser does not start"
            await asyncio.sleep(0.1)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{told.read_text().splitlines()[0]}/json") as answer:
            (page,) = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            said = json.loads((await self._socket.receive(timeout=60)).data)
            if said.get("id") == number:
                return said["result"]
            self._listen(said)

    def _listen(self, said: dict[str, Any]) -> None:
        kind, what = said.get("method"), said.get("params", {})
        if kind == "Runtime.exceptionThrown" or (kind == "Runtime.consoleAPICalled" and what["type"] == "error"):
            self.complaints.append(json.dumps(what)[:500])
        if kind == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
