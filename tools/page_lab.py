"""A browser and the page's stage in one event loop, for tests that call them from outside of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from browser import Browser, Tab, browser
from page_stage import Stage, stage


async def live(tab: Tab) -> None:
    await tab.until("says('#link') === 'live' && all('.tile').length > 0")


class Lab:
    """One loop in a thread, with one browser and one stage for all tests of this file."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._over = asyncio.Event()
        self._serving: Any = None
        self.browser: Browser
        self.stage: Stage
        self.url = ""

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(180)

    async def open(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._serving = self._loop.create_task(self._serve(ready))
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        async with browser() as self.browser, stage() as (self.stage, self.url):
            ready.set_result(None)
            await self._over.wait()

    async def _shut(self) -> None:
        self._over.set()
        await self._serving

    def close(self) -> None:
        self.run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
