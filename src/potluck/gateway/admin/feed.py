"""What happens right now, for whoever watches: a bounded stream of events.

A slow reader loses the oldest, and is told so. It costs nothing while nobody reads.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable

MOST_EVENTS = 1_000
"""That wait for one reader."""
MOST_READERS = 32


class FeedReader:
    """One reader."""

    def __init__(self, feed: EventFeed, kinds: frozenset[str] | None, most: int) -> None:
        self._feed, self._kinds = feed, kinds
        self._events: deque[bytes] = deque(maxlen=most)
        self._lost = 0
        self._news = asyncio.Event()

    def put(self, kind: str, line: bytes) -> bool:
        """True where an older one had to go."""
        if self._kinds is not None and kind not in self._kinds:
            return False
        full = len(self._events) == self._events.maxlen
        self._lost += full
        self._events.append(line)
        self._news.set()
        return full

    async def next(self, wait_s: float) -> bytes:
        """All that has happened since, as server-sent events; a comment where nothing has for so long."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return b": nothing\n\n"
        self._news.clear()
        lost, self._lost = self._lost, 0
        said = [*self._events]
        self._events.clear()
        if lost:
            said.insert(0, b'event: lost\ndata: {"events":%d}\n\n' % lost)
        return b"".join(said)

    def close(self) -> None:
        self._feed.leave(self)


class EventFeed:
    """Where events go. `changed` hears whether anybody reads, so that others make them only then."""

    def __init__(
        self,
        changed: Callable[[bool], None] = lambda read: None,
        clock: Callable[[], float] = time.time,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`lost` hears of each event that a reader did not get."""
        self._changed, self._clock, self._missed = changed, clock, lost
        self._readers: set[FeedReader] = set()
        self._number = 0
        self.lost = 0
        """Events that readers did not get, of all of them."""

    def publish(self, kind: str, what: dict[str, object]) -> None:
        if not self._readers:
            return
        self._number += 1
        body = {"n": self._number, "time_s": self._clock(), **what}
        data = json.dumps(body, separators=(",", ":"), default=str)
        line = f"id: {self._number}\nevent: {kind}\ndata: {data}\n\n".encode()
        for reader in self._readers:
            if reader.put(kind, line):
                self.lost += 1
                self._missed()

    def watch(self, kinds: frozenset[str] | None = None, most: int = MOST_EVENTS) -> FeedReader | None:
        """One more reader; None where there are enough."""
        if len(self._readers) >= MOST_READERS:
            return None
        reader = FeedReader(self, kinds, most)
        self._readers.add(reader)
        self._changed(True)
        return reader

    def leave(self, reader: FeedReader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._changed(False)
