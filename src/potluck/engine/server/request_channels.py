"""What the loop's thread says about each request, brought to whoever answers it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from potluck.api.http import HttpRefusal
from potluck.core.errors import PotluckError
from potluck.engine.loop.jobs import Event, Job, JobEnded, JobTimes, LayerSent, OutputToken, RowReady
from potluck.engine.loop.loop_thread import LoopCall, LoopThread

T = TypeVar("T")

LAST_WORD_S = 5.0  # A loop that does not end a request this long after being told to is not waited for.


class RequestChannel:
    """What is said about one request. Chunks go apart: another connection fetches them."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.ended: JobEnded | None = None
        self.tokens = self.have = 0  # Drawn; and of a cache that is to come, here already.
        self.failure: PotluckError | None = None
        """What went wrong outside of the loop, when that is why it ended."""
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once there is room for the cache that is coming in."""
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.chunks: asyncio.Queue[LayerSent | JobEnded] = asyncio.Queue()

    def put(self, job_ended: Event) -> None:
        if isinstance(job_ended, LayerSent):
            self.chunks.put_nowait(job_ended)
            return
        if isinstance(job_ended, RowReady):
            if not self.room.done():
                self.room.set_result(None)
            return
        self.events.put_nowait(job_ended)
        if isinstance(job_ended, OutputToken):
            self.tokens += 1
        elif isinstance(job_ended, JobEnded):
            self.room.cancel()
            self.ended = job_ended
            self.chunks.put_nowait(job_ended)

    async def end(self) -> JobEnded:
        async for job_ended in self:
            if isinstance(job_ended, JobEnded):
                return job_ended
        raise AssertionError("a channel ends with an end")

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.events.get()
            yield event
            if isinstance(event, JobEnded):
                return


class RequestChannels:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[int, RequestChannel] = {}
        self._keys = itertools.count(1)
        self._driver: LoopThread | None = None

    def bind(self, loop_thread: LoopThread) -> None:
        """From within the asyncio loop that is to hear."""
        self._driver = loop_thread
        self._loop = asyncio.get_running_loop()

    @property
    def driver(self) -> LoopThread:
        assert self._driver is not None
        return self._driver

    @property
    def open(self) -> int:
        return len(self._channels)

    def next_key(self) -> int:
        return next(self._keys)

    def tell(self, events: list[tuple[int, Event]]) -> None:
        """Called from the loop's thread, once per step."""
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:  # closed between the question and the call
            return

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            channel = self._channels.get(key)
            if channel is not None:
                channel.put(event)

    async def ask(self, what: LoopCall[T]) -> T:
        return await asyncio.wrap_future(self.driver.ask(what))

    @asynccontextmanager
    async def run(self, job: Job, deadline_s: float) -> AsyncIterator[RequestChannel]:
        """Submit a job; whoever leaves before its end (an error, a client that went away) cancels it."""
        channel = self._channels[job.key] = RequestChannel(job.key)
        timer = asyncio.get_running_loop().call_later(deadline_s, self._too_late, channel, deadline_s)
        try:
            async with asyncio.timeout(deadline_s + LAST_WORD_S):
                channel.have = await self.ask(lambda loop, now_s: loop.submit(job, now_s))
            yield channel
        finally:
            timer.cancel()
            del self._channels[job.key]
            if channel.ended is None:
                self.driver.ask(lambda loop, now_s: loop.cancel(job.key, now_s))

    def _too_late(self, channel: RequestChannel, deadline_s: float) -> None:
        line = f"the request took longer than the {deadline_s:g} s that it may"
        channel.failure = HttpRefusal(504, line, "deadline")
        self.driver.ask(lambda loop, now_s: loop.cancel(channel.key, now_s, line))
        asyncio.get_running_loop().call_later(LAST_WORD_S, _fail, channel, line)

    def fail_all(self, why: str) -> None:
        for channel in self._channels.values():
            _fail(channel, why)


def _fail(channel: RequestChannel, why: str) -> None:
    if channel.ended is None:
        channel.put(JobEnded("error", JobTimes(0.0), why))
