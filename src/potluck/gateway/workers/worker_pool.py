"""The Brain's side of several workers: they are heard, told, and asked to end; their processes are the parent's.

A worker that dies takes its clients' connections along: the Brain hears that their requests were cancelled, so that
engines stop working on them, and another process takes its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress

from potluck.core.errors import PotluckError
from potluck.core.state.actions import Action
from potluck.gateway.admin.counters import Counters
from potluck.gateway.core import GatewayCore
from potluck.gateway.values import GatewaySettings
from potluck.gateway.workers import brain_client
from potluck.gateway.workers.brain_client import WorkerChannel, WorkerMeterReceiver
from potluck.gateway.workers.supervisor import BrainProcessContext

START_S = 60.0


class WorkerSlot:
    def __init__(self, worker_pool: WorkerPool) -> None:
        self._pool = worker_pool
        self.channel = WorkerChannel(self._heard, self._gone)
        self.place = -1
        self._counts = WorkerMeterReceiver(worker_pool.meter)
        self.line = worker_pool.core.brain_loop.line(self._act)

    def _act(self, actions: Sequence[Action]) -> None:
        self.channel.send(brain_client.ACTIONS, brain_client.actions_text(actions))

    def _heard(self, kind: str, text: str) -> None:
        if kind == brain_client.EVENT:
            self.line.tell(brain_client.event_of(text))
        elif kind == brain_client.HELLO:
            self.place = int(text)
            self._pool.joined(self)
        elif kind == brain_client.READY:
            self._pool.listens(self.place, text)
        elif not self._counts.heard(kind, text):
            raise ValueError(f"no line begins with {kind!r}")

    def _gone(self) -> None:
        self._pool.left(self)
        self._counts.gone()
        self._pool.core.brain_loop.lost(self.line)


class WorkerPool:
    def __init__(
        self, core: GatewayCore, counters: Counters, settings: GatewaySettings, process: BrainProcessContext
    ) -> None:
        self.core, self.meter = core, counters
        self._count = settings.places.workers
        self._process = process
        self._slots: list[WorkerSlot] = []
        self._listening: dict[int, str] = {}
        self._all: asyncio.Event = asyncio.Event()
        self._none: asyncio.Event = asyncio.Event()
        self._reasons = ""
        self._closing = False
        core.registry.on_endpoints.append(self._changed)
        core.registry.on_gone.append(self._lost)
        core.brain_loop.at_ticks.append(self._look)

    async def start(self) -> str:
        """Where they listen, once all of them do. A successor serves with those that are there."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: WorkerSlot(self).channel, sock=self._process.brain_loop
        )
        if self._process.again:
            return ""
        try:
            async with asyncio.timeout(START_S):
                await self._all.wait()
        except TimeoutError:
            raise PotluckError(f"workers did not start within {START_S:g} s; the log says why") from None
        return self._listening[0]

    async def close(self, within_s: float, followed: bool = False) -> None:
        self._closing = True
        for slot in self._slots:
            slot.channel.send(brain_client.CLOSE, "")
        if self._slots:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s + 5.0):
                    await self._none.wait()
        self._server.close()

    def joined(self, slot: WorkerSlot) -> None:
        self._slots.append(slot)
        slot.channel.send(brain_client.START, repr(self.core.brain_loop.start_s))
        slot.channel.send(brain_client.ENDPOINTS, self._endpoints())
        slot.channel.send(brain_client.REASONS, self._lacking())
        if self._closing:
            slot.channel.send(brain_client.CLOSE, "")

    def listens(self, place: int, url: str) -> None:
        self._listening[place] = url
        if len(self._listening) == self._count:
            self._all.set()

    def left(self, slot: WorkerSlot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            if self._closing and not self._slots:
                self._none.set()

    def _endpoints(self) -> str:
        wires = {key: self.core.wire(*key) for key in self.core.replica_models.codecs}
        return brain_client.endpoints_text(self.core.registry.endpoints, wires)

    def _lacking(self) -> str:
        models = self.core.replica_models.resolved.models
        return json.dumps({model: why for model in models if (why := self.core.lacking(model))})

    def _changed(self) -> None:
        endpoints = self._endpoints()
        for slot in self._slots:
            slot.channel.send(brain_client.ENDPOINTS, endpoints)
        self._look()

    def _lost(self, replica: str) -> None:
        for slot in self._slots:
            slot.channel.send(brain_client.GONE, json.dumps(replica))

    def _look(self) -> None:
        reasons = self._lacking()
        if reasons != self._reasons:
            self._reasons = reasons
            for slot in self._slots:
                slot.channel.send(brain_client.REASONS, reasons)
