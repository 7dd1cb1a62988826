"""One stream for all who watch: the whole once, then what changed, made once a tick for all of them.

    whole   {"format": "potluck.page", "version": 1, "at_s": ..., "tables": {...}, "requests": {...}, "events": [...],
             "points": {...}}
    news    {"at_s": ..., "set": {table: {name: {field: value}}}, "gone": {table: [name]}, "requests": {...},
             "events": [...], "point": {...}}      what is empty is left out

    bye     {"what": ..., "why": ...}      the last line of a gateway that was asked to end

Between ticks nothing is done; with nobody watching only a point of history every few seconds, and some requests are
followed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from potluck.gateway.core import Decision, GatewayCore
from potluck.gateway.page.history import PageHistory, Waterfall
from potluck.gateway.page.snapshot import FleetSnapshot, KvFlows, Row, Tables

FORMAT, VERSION = "potluck.page", 1
TICK_S = 0.25
STOPPED = ("The service was stopped.", "This page goes on when it is started again.")
MOST_WATCHERS = 16
MOST_MESSAGES = 40
"""That wait for one reader; one that has more is given the whole again."""


class PageReader:
    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.late = False
        self.over = False

    def put(self, message: bytes) -> None:
        if len(self._messages) >= MOST_MESSAGES:
            self.late = True
            return
        self._messages.append(message)
        self._news.set()

    def again(self, whole: bytes) -> None:
        self._messages.clear()
        self.late = False
        self.put(whole)

    def end(self, last: bytes) -> None:
        self._messages.append(last)
        self.over = True
        self._news.set()

    async def next(self, wait_s: float) -> bytes:
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return b": nothing\n\n"
        self._news.clear()
        text = b"".join(self._messages)
        self._messages.clear()
        return text


class PageStream:
    def __init__(
        self,
        core: GatewayCore,
        tokens: Callable[[], Mapping[str, float]] = dict,
        notices: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
    ) -> None:
        self._core, self._clock, self._tick_s = core, clock, tick_s
        self.flows = KvFlows()
        self.hour = PageHistory(dict(core.replica_models.resolved.slos))
        self._snapshot = FleetSnapshot(core, self.flows, tokens, notices)
        self._watchers: list[PageReader] = []
        self._before: Tables = {}
        self._event = 0
        self._point: Row | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.requests = Waterfall(clock() - core.brain_loop.now_s())
        core.brain_loop.watchers.append(self.requests)

    def look(self) -> None:
        now_s = self._clock()
        if self.hour.due(now_s):
            tables = self._before if self._watchers else self._tables(now_s)
            self._point = self.hour.look(now_s, tables)

    def _tables(self, now_s: float) -> Tables:
        return self._snapshot.look(now_s, self.hour.tenants)

    def history(self) -> Row:
        return {
            "format": FORMAT,
            "version": VERSION,
            "at_s": self._clock(),
            "points": self.hour.columns(),
            "events": [event_of(decision) for decision in self._core.decision_log.kept],
        }

    def moment(self, at_s: float) -> Row | None:
        result = self.hour.frame(at_s)
        if result is None:
            return None
        return {"format": FORMAT, "version": VERSION, "at_s": result[0], "tables": result[1]}

    def watch(self) -> PageReader | None:
        if len(self._watchers) >= MOST_WATCHERS:
            return None
        if not self._watchers:
            self._begin()
        watcher = PageReader()
        watcher.put(self._whole())
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: PageReader) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers:
            self._rest()

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def _begin(self) -> None:
        self.requests.watched(True)
        self._before, self._point = self._tables(self._clock()), None
        kept = self._core.decision_log.kept
        self._event = kept[-1].number if kept else 0
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _rest(self) -> None:
        self.requests.watched(False)
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def goodbye(self) -> None:
        """The last line to all who watch: that the gateway was asked to end, or what was said of it."""
        last = next(
            (decision for decision in reversed(self._core.decision_log.kept) if decision.kind == "end"), None
        )
        what, why = STOPPED if last is None else (last.what, last.why)
        line = message("bye", {"what": what, "why": why})
        self._rest()
        for watcher in self._watchers:
            watcher.end(line)

    def _whole(self) -> bytes:
        return message(
            "whole",
            {
                "format": FORMAT,
                "version": VERSION,
                "at_s": round(self._clock(), 3),
                "tick_s": self._tick_s,
                "tables": self._before,
                "requests": self.requests.latest(),
                "events": [
                    event_of(decision)
                    for decision in self._core.decision_log.kept
                    if decision.number <= self._event
                ],
                "points": self.hour.columns(),
            },
        )

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        text = self.news()
        line = message("news", text)
        for watcher in self._watchers:
            watcher.put(line)
        if any(watcher.late for watcher in self._watchers):
            whole = self._whole()
            for watcher in self._watchers:
                if watcher.late:
                    watcher.again(whole)

    def news(self) -> Row:
        now_s = self._clock()
        after = self._tables(now_s)
        changed, gone = changes(self._before, after)
        self._before = after
        row: Row = {"at_s": round(now_s, 3)}
        if changed:
            row["set"] = changed
        if gone:
            row["gone"] = gone
        if rows := self.requests.changed():
            row["requests"] = rows
        new = [decision for decision in self._core.decision_log.kept if decision.number > self._event]
        if new:
            self._event = new[-1].number
            row["events"] = [event_of(decision) for decision in new]
        if self._point is not None:
            row["point"], self._point = self._point, None
        return row


def changes(before: Tables, after: Tables) -> tuple[dict[str, dict[str, Row]], dict[str, list[str]]]:
    changed: dict[str, dict[str, Row]] = {}
    gone: dict[str, list[str]] = {}
    for table, rows in after.items():
        old = before.get(table, {})
        new = {}
        for name, row in rows.items():
            was = old.get(name)
            if was is None:
                new[name] = row
            elif was != row:
                new[name] = {key: value for key, value in row.items() if was.get(key, _NOTHING) != value}
        if new:
            changed[table] = new
        missing = [name for name in old if name not in rows]
        if missing:
            gone[table] = missing
    return changed, gone


_NOTHING: Any = object()


def event_of(each: Decision) -> Row:
    return {**each._asdict(), "at_s": round(each.at_s, 3)}


def message(kind: str, what: Row) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(what, separators=(',', ':'))}\n\n".encode()
