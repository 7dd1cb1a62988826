"""A headless Chromium driven over the DevTools protocol, for tests and the page's benchmark.

Needs the `chromium` of the system; nothing is downloaded, and the browser gets an empty profile.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update
--disable-extensions --disable-sync --no-first-run --no-default-browser-check --disable-dev-shm-usage
--force-color-profile=srgb --hide-scrollbars --remote-debugging-port=0"""
HELPERS = """
window.one = (css) => document.querySelector(css);
window.all = (css) => [...document.querySelectorAll(css)];
window.says = (css) => one(css)?.textContent ?? "";
"""
"""For scripts that are run in a page."""
START_S = 60.0
WAIT_S = 30.0


def chromium() -> str | None:
    return next((result for name in NAMES if (result := shutil.which(name))), None)


class PageError(Exception):
    """What a page threw."""


class Tab:
    """One page. `errors` has what its console complained of, `requests` every address that it asked for."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS)
        await self.call("Page.navigate", url=url)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._asked[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        text = await asyncio.wait_for(answer, WAIT_S)
        if "error" in text:
            raise PageError(f"{method}: {text['error']['message']}")
        return dict(text["result"])

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        text = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in text:
            result = text["exceptionDetails"]
            raise PageError(str(result.get("exception", {}).get("description", result["text"])))
        return text["result"].get("value")

    async def until(self, script: str, within_s: float = WAIT_S) -> Any:
        """The value of an expression once it is true."""
        until_s = time.monotonic() + within_s
        while True:
            completed = await self.run(script)
            if completed:
                return completed
            if time.monotonic() > until_s:
                raise PageError(f"was never true: {script}")
            await asyncio.sleep(0.1)

    async def press(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, "Tab": 9, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        text = text or {"Enter": "\r", " ": " "}.get(key, "")
        code = "Space" if key == " " else key
        pressed = {"key": key, "code": code, "windowsVirtualKeyCode": codes.get(key, 0)}
        typed = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, scale: float = 1.0, phone: bool = False) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **screen)

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                continue
            body = json.loads(message.data)
            if "id" in body:
                answer = self._asked.pop(body["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            else:
                self._heard(body["method"], body["params"])

    def _heard(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            result = said["exceptionDetails"]
            self.errors.append(str(result.get("exception", {}).get("description", result["text"])))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(x.get("value", x.get("description"))) for x in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()


@asynccontextmanager
async def browser(*flags: str) -> AsyncIterator[Browser]:
    result = chromium()
    if result is None:
        raise FileNotFoundError("no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="potluck-browser-", ignore_cleanup_errors=True) as folder:
        command = [result, *FLAGS.split(), *flags, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with ClientSession() as session:
                yield Browser(session, port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Browser:
    def __init__(self, session: ClientSession, port: int, pid: int) -> None:
        self._session, self._port, self.pid = session, port, pid

    @asynccontextmanager
    async def tab(self, url: str, width: int = 1440, height: int = 900) -> AsyncIterator[Tab]:
        """A page of its own; what it keeps, others see, as tabs do."""
        address = f"http://127.0.0.1:{self._port}/json/new?about:blank"
        async with self._session.put(address) as answer:
            body = await answer.json()
        socket = await self._session.ws_connect(body["webSocketDebuggerUrl"], max_msg_size=0)
        tab = Tab(socket)
        try:
            await tab.size(width, height)
            await tab.open(url)
            yield tab
        finally:
            await tab.close()
            async with self._session.get(f"http://127.0.0.1:{self._port}/json/close/{body['id']}"):
                pass

    def cpu_s(self) -> float:
        """Of all its processes."""
        stats: dict[int, tuple[int, float]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                rest = path.read_text("utf-8").rpartition(")")[2].split()
                stats[int(path.parent.name)] = int(rest[1]), (int(rest[11]) + int(rest[12])) / 100.0
        family = {self.pid}
        while more := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
            family |= more
        return sum(stats[pid][1] for pid in family if pid in stats)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        if file.is_file() and (lines := file.read_text("utf-8").splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise TimeoutError("chromium did not start")
