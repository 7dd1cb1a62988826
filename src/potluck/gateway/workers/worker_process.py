"""A worker's process. Without the Brain's, answers go on; with no successor after LONELY_S it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from potluck.api.http import allow_open_files
from potluck.gateway.admin.usage import UsageFile
from potluck.gateway.core import Act
from potluck.gateway.http.limits import calm
from potluck.gateway.openai.keys import SharedUse
from potluck.gateway.workers import brain_client
from potluck.gateway.workers.brain_client import (
    RemoteBrainClient,
    RemoteDirectory,
    WorkerChannel,
    WorkerMeter,
)
from potluck.gateway.workers.worker import Worker, WorkerContext, calls_of

FLUSH_S = 0.25
LONELY_S = 10.0
ORPHAN_S = 5.0
RETRY_S = 0.02
BRAIN = "brain"  # The socket of the Brain's process, in the gateway's folder.

log = logging.getLogger(__name__)


class WorkerProcess:
    def __init__(self, path: Path, place: int) -> None:
        self._path, self._place = path, place
        self._loop = asyncio.get_running_loop()
        self.channel = WorkerChannel(self.heard, self.gone, brain_client.LASTING)
        self.line: RemoteBrainClient | None = None
        self.url = ""
        self._joining: asyncio.Task[None] | None = None
        self.directory = RemoteDirectory()
        self.reasons: dict[str, str] = {}
        self.start_s: asyncio.Future[float] = self._loop.create_future()
        """When the Brain's time began, by the monotonic clock."""
        self.ending: asyncio.Future[bool] = self._loop.create_future()
        """True: in order; False: the Brain is gone."""
        self.worker: Worker | None = None
        self.meter: WorkerMeter | None = None

    def heard(self, kind: str, text: str) -> None:
        if kind == brain_client.ACTIONS:
            assert self.worker is not None
            self.worker.dispatcher.act(brain_client.actions_of(text))
        elif kind == brain_client.ENDPOINTS:
            self.directory.learn(text)
            self.tell_anew()
        elif kind == brain_client.REASONS:
            self.reasons = json.loads(text)
        elif kind == brain_client.GONE:
            if self.worker is not None:
                self.worker.dispatcher.gone(json.loads(text))
        elif kind == brain_client.START:
            if self.start_s.done():
                self._joined(float(text))
            else:
                self.start_s.set_result(float(text))
        elif kind == brain_client.CLOSE:
            self._end(True)

    def gone(self) -> None:
        if self.line is None or self.ending.done():
            self._end(False)
            return
        self.line.joined = False
        if self._joining is None or self._joining.done():
            self._joining = self._loop.create_task(self._join())

    async def join(self) -> None:
        await self._loop.create_unix_connection(lambda: self.channel, str(self._path))
        self.channel.send(brain_client.HELLO, str(self._place))

    async def _join(self) -> None:
        assert self.line is not None
        try:
            async with asyncio.timeout(LONELY_S):
                while not self.line.joined:
                    if not self.channel.connected:
                        with suppress(OSError):
                            await self.join()
                            self.channel.send(brain_client.READY, self.url)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            log.error("the Brain is gone, and no other came")
            self._end(False)

    def _joined(self, start_s: float) -> None:
        brain_client, worker = self.line, self.worker
        assert brain_client is not None
        assert worker is not None
        if start_s == brain_client.start_s:
            log.error("the Brain lost this worker, and took its requests for cancelled")
            self._end(False)
            return
        if self.meter is not None:
            self.meter.renew()
        brain_client.start_s, brain_client.joined = start_s, True
        brain_client.untold = set(worker.dispatcher.names())
        brain_client.waiting = self._soon
        self.tell_anew()

    def _soon(self) -> None:
        self._loop.call_soon(self.tell_anew)

    def tell_anew(self) -> None:
        """What another Brain has not heard of yet, as far as it knows the engines by now."""
        brain_client, worker = self.line, self.worker
        if brain_client is None or worker is None or not brain_client.joined:
            return
        still_open = set(worker.dispatcher.names())
        for name in sorted(brain_client.untold):
            event = None
            if name in still_open:
                event = worker.dispatcher.whereabouts(name, self.directory.named)
                if event is None:
                    continue
            brain_client.untold.discard(name)
            if event is not None:
                brain_client.tell(event)

    def _end(self, told: bool) -> None:
        if not self.ending.done():
            self.ending.set_result(told)
        if not self.start_s.done():
            self.start_s.cancel()

    def connect(self, act: Act) -> RemoteBrainClient:
        self.line = RemoteBrainClient(self.channel, self.start_s.result(), act)
        return self.line

    def lacking(self, model: str) -> str:
        return self.reasons.get(model, "")


async def work(
    context: WorkerContext,
    home: Path,
    place: int,
    sockets: Sequence[socket.socket],
    serves: Callable[[], None],
) -> None:
    loop, settings = asyncio.get_running_loop(), context.settings
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)  # The Brain's process says when to end.
    allow_open_files()
    process = WorkerProcess(home / BRAIN, place)
    channel, directory = process.channel, process.directory
    await process.join()
    await process.start_s
    usage = None if settings.usage is None else UsageFile(settings.usage, time.time)
    process.meter = meter = WorkerMeter(channel, directory.region_of, usage)
    connection_pool = calls_of(settings)
    shared_use = SharedUse(home / "quotas", place, settings.places.workers)
    answers = settings.answers_in(home)
    worker = process.worker = Worker(
        context, directory, connection_pool, meter, process.lacking, process.connect, answers, shared_use
    )
    flushing = loop.create_task(_flush(meter))
    try:
        process.url = await worker.listen(sockets)
        channel.send(brain_client.READY, process.url)
        serves()
        calm()
        in_order = await process.ending
    finally:
        flushing.cancel()
    within_s = settings.drain_s if in_order else min(settings.drain_s, ORPHAN_S)
    await worker.close(within_s, for_good=in_order)
    meter.flush()
    if usage is not None:
        usage.close()
    channel.close()
    await connection_pool.close()


async def _flush(meter: WorkerMeter) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        meter.flush()


def run(
    context: WorkerContext,
    home: Path,
    place: int,
    sockets: Sequence[socket.socket],
    serves: Callable[[], None],
) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(context, home, place, sockets, serves))
