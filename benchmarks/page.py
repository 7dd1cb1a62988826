"""What the page costs: a browser and a gateway with 200 replicas and 100 requests a second on it.

The gateway is tools/page_stage.py's: the cost of the page's own code, and of its process with one who watches less
that with nobody. The browser is Chromium without a GPU, all of its processes. Then with 50 updates a second: how busy
the page's main thread is, and the share of time in tasks over 50 ms, which others on the same cores lengthen.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts.common import ROOT, Figures, run, say
from potluck.gateway.page.stream import TICK_S, Waterfall

sys.path.insert(0, str(ROOT / "tools"))
from browser import Browser, Tab, browser, chromium
from page_fleets import large_fleet
from page_stage import Stage, stage

REPLICAS, RATE_PER_S, UPDATES_PER_S = 200, 100.0, 50.0
JANK = """(() => { window.long = 0; window.longest = 0;
  new PerformanceObserver((list) => { for (const each of list.getEntries()) {
    window.long += each.duration; window.longest = Math.max(window.longest, each.duration); } })
    .observe({ entryTypes: ['longtask'] }); })()"""
FRAMES = """(async (ms) => { let count = 0; const until = performance.now() + ms;
  while (performance.now() < until) { await new Promise(requestAnimationFrame); count += 1; } return count; })"""


class Own:
    def __init__(self) -> None:
        self.cpu_s = 0.0

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            began_s = time.thread_time()
            try:
                return call(*given)
            finally:
                self.cpu_s += time.thread_time() - began_s

        return counting


def waited_s() -> float:
    return float(Path("/proc/self/schedstat").read_text("utf-8").split()[1]) / 1e9


async def cpu(seconds: float, there: Browser | None = None) -> tuple[float, float]:
    """(this process, the browser): cores taken in so many seconds."""
    began_s, own_s, its_s = time.monotonic(), time.process_time(), 0.0 if there is None else there.cpu_s()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    return (time.process_time() - own_s) / took_s, ((there.cpu_s() if there else 0.0) - its_s) / took_s


async def opened(tab: Tab) -> None:
    await tab.until("says('#link') === 'live' && all('.tile').length >= 200", 60.0)


async def measured(quick: bool) -> dict[str, float]:
    seconds, rounds = (8.0, 1) if quick else (20.0, 2)
    result: dict[str, list[float]] = {"alone": [], "watched": [], "browser": [], "code": []}
    own_code = Own()
    async with stage(large_fleet(REPLICAS)) as (made, url), browser() as there:
        load = asyncio.create_task(made.flood(RATE_PER_S, 600.0))
        await asyncio.sleep(5.0)
        waits_s, start_s, sent = waited_s(), time.monotonic(), made.sent
        page_stream = made.operators.page.show
        page_stream._tick = own_code.counted(page_stream._tick)  # type: ignore[method-assign]
        Waterfall.__call__ = own_code.counted(Waterfall.__call__)  # type: ignore[method-assign]
        for _ in range(rounds):
            result["alone"].append((await cpu(seconds))[0])
            async with there.tab(url) as tab:
                await opened(tab)
                await asyncio.sleep(3.0)
                before_s, began_s = own_code.cpu_s, time.monotonic()
                own, its = await cpu(seconds, there)
                result["code"].append((own_code.cpu_s - before_s) / (time.monotonic() - began_s))
                result["watched"].append(own)
                result["browser"].append(its)
                assert tab.errors == [], tab.errors
            while made.operators.page.show.watched:
                await asyncio.sleep(0.2)
        took_s = time.monotonic() - start_s
        figures = {
            "browser, cores": sum(result["browser"]) / rounds,
            "gateway, cores of the page's code": sum(result["code"]) / rounds,
            "gateway, cores more than unwatched": (sum(result["watched"]) - sum(result["alone"])) / rounds,
            "gateway, cores unwatched": sum(result["alone"]) / rounds,
            "requests per second": (made.sent - sent) / took_s,
            "waited for a core, share": (waited_s() - waits_s) / took_s,
            "history, cores": history_cores(made),
            **await updates(made, there, url, seconds),
        }
        load.cancel()
    return figures


def history_cores(made: Stage) -> float:
    """Of what is kept of the last hour, also with nobody watching: a point every 2 s, a moment every 10 s."""
    page_stream, count = made.operators.page.show, 20
    began_s = time.process_time()
    for at in range(count):
        tables = page_stream._tables(time.time())
        page_stream.hour.look(time.time() + 2.0 * at, tables)
    return (time.process_time() - began_s) / count / 2.0


async def busy_s(tab: Tab) -> float:
    text = await tab.call("Performance.getMetrics")
    return next(float(item["value"]) for item in text["metrics"] if item["name"] == "TaskDuration")


async def updates(made: Stage, there: Browser, url: str, seconds: float) -> dict[str, float]:
    """The same page with 50 updates a second instead of 4."""
    page_stream = made.operators.page.show
    page_stream._tick_s = 1.0 / UPDATES_PER_S
    try:
        async with there.tab(url) as tab:
            await opened(tab)
            await asyncio.sleep(2.0)
            await tab.run(JANK)
            await tab.call("Performance.enable", timeDomain="threadTicks")
            before = await busy_s(tab)
            count = await tab.run("performance.now()")
            frames = await tab.run(f"{FRAMES}({seconds * 1000 / 2})")
            took_ms = float(await tab.run("performance.now()")) - float(count)
            return {
                "50 updates/s: main thread busy, share": (await busy_s(tab) - before) / took_ms * 1000.0,
                "50 updates/s: time in tasks over 50 ms, share": float(await tab.run("window.long"))
                / took_ms,
                "50 updates/s: longest task, ms": float(await tab.run("window.longest")),
                "50 updates/s: frames per second": float(frames) / took_ms * 1000.0,
            }
    finally:
        page_stream._tick_s = TICK_S


def measure(quick: bool) -> Figures:
    if chromium() is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return asyncio.run(measured(quick))


TARGETS = {
    "browser, cores": ("<=", 0.30),
    "gateway, cores of the page's code": ("<=", 0.05),
    "50 updates/s: main thread busy, share": ("<=", 0.5),
    "50 updates/s: time in tasks over 50 ms, share": ("<=", 0.01),
}

if __name__ == "__main__":
    run("page", measure, TARGETS, seeds=(1,))
