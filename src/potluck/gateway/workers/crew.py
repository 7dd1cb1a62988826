"""The Brain's side of several workers: they are started, heard, told, and started again when they die.

A worker that dies takes its clients' connections along: the Brain hears that their requests were cancelled, so that
engines stop working on them, and another process takes its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from potluck.core.brain.actions import Action
from potluck.core.errors import InputError, PotluckError
from potluck.gateway.admin.meter import FullMeter
from potluck.gateway.desk.center import Center
from potluck.gateway.settings import Settings
from potluck.gateway.workers import remote
from potluck.gateway.workers.mail import Mail
from potluck.gateway.workers.remote import HandHeard
from potluck.gateway.workers.setup import CardNote, Setup

START_S = 60.0
AGAIN_S = (0.2, 1.0, 5.0)
"""Before a worker is started again that died: the longer, the sooner it died before."""
STEADY_S = 30.0
"""One that lived so long did not die at its start."""

log = logging.getLogger(__name__)


class Seat:
    """One worker, as long as its process lives."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.mail = Mail(self._heard, self._gone)
        self.place = -1
        self._counts = HandHeard(crew.meter)
        self.line = crew.center.desk.line(self._act)

    def _act(self, actions: Sequence[Action]) -> None:
        self.mail.send(remote.ACTIONS, remote.actions_text(actions))

    def _heard(self, letter: str, text: str) -> None:
        if letter == remote.EVENT:
            self.line.tell(remote.event_of(text))
        elif letter == remote.HELLO:
            self.place = int(text)
            self._crew.joined(self)
        elif letter == remote.READY:
            self._crew.listens(self.place, text)
        elif not self._counts.heard(letter, text):
            raise ValueError(f"no line begins with {letter!r}")

    def _gone(self) -> None:
        self._crew.left(self)
        self._counts.gone()
        self._crew.center.desk.lost(self.line)


class Crew:
    def __init__(
        self, center: Center, meter: FullMeter, settings: Settings, cards: tuple[CardNote, ...]
    ) -> None:
        self.center, self.meter = center, meter
        self._settings, self._cards = settings, cards
        self._count = settings.places.workers
        self._secret = settings.secret.hex()
        self._home = Path(tempfile.mkdtemp(prefix="potluck-"))  # for nobody else's eyes
        self._seats: list[Seat] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._listening: dict[int, str] = {}
        self._all: asyncio.Event = asyncio.Event()
        self._reserved: socket.socket | None = None
        self._reasons = ""
        self._watched = False
        self._closing = False
        center.keeper.on_endpoints.append(self._changed)
        center.keeper.on_gone.append(self._lost)
        center.desk.at_ticks.append(self._look)

    async def start(self) -> str:
        """All of them; where they listen."""
        self._reserve()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Seat(self).mail, str(self._home / "desk"))
        self._keeping = [loop.create_task(self._keep(place)) for place in range(self._count)]
        try:
            async with asyncio.timeout(START_S):
                await self._all.wait()
        except TimeoutError:
            raise PotluckError(f"workers did not start within {START_S:g} s; the log says why") from None
        return self._listening[0]

    async def close(self, within_s: float) -> None:
        """They end what is open, and then themselves."""
        self._closing = True
        for seat in self._seats:
            seat.mail.send(remote.CLOSE, "")
        try:
            async with asyncio.timeout(within_s + 5.0):
                await asyncio.gather(*self._keeping)
        except TimeoutError:
            for process in self._processes.values():
                process.kill()
            await asyncio.gather(*self._keeping, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()
            self._server.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _reserve(self) -> None:
        """The port, so that none of them finds it taken, and so that 0 is the same for all."""
        places = self._settings.places
        found = socket.getaddrinfo(places.host, places.port, type=socket.SOCK_STREAM)[0]
        self._reserved = socket.socket(found[0], found[1])
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._reserved.bind(found[4])
        except OSError as error:
            why = error.strerror or error
            raise InputError("--port", f"{places.host}:{places.port} cannot be used ({why})") from error

    async def _keep(self, place: int) -> None:
        """One place is filled as long as the gateway lives."""
        tries = 0
        while not self._closing:
            began_s = time.monotonic()
            command = (
                sys.executable,
                "-m",
                "potluck.gateway.workers.hand",
                str(self._home / "desk"),
                str(place),
            )
            process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            self._processes[place] = process
            code = await process.wait()
            if self._closing:
                return
            tries = 0 if time.monotonic() - began_s > STEADY_S else min(tries + 1, len(AGAIN_S) - 1)
            log.error("worker %d ended with %s; another one takes its place", place, code)
            await asyncio.sleep(AGAIN_S[tries])

    # What workers say.

    def joined(self, seat: Seat) -> None:
        self._seats.append(seat)
        seat.mail.send(remote.SETUP, self._setup(seat.place).text())
        seat.mail.send(remote.ENDPOINTS, self._endpoints())
        seat.mail.send(remote.REASONS, self._lacking())
        seat.mail.send(remote.WATCH, json.dumps(self._watched))
        if self._closing:
            seat.mail.send(remote.CLOSE, "")

    def listens(self, place: int, url: str) -> None:
        self._listening[place] = url
        if len(self._listening) == self._count:
            self._all.set()

    def left(self, seat: Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)

    # What they must know.

    def _setup(self, place: int) -> Setup:
        settings = self._settings
        assert self._reserved is not None
        certificate, key = settings.tls or (None, None)
        return Setup(
            place,
            self._count,
            settings.places.host,
            int(self._reserved.getsockname()[1]),
            self._cards,
            tuple(each.name for each in self.center.policy.classes),
            None if settings.keys is None else str(settings.keys.absolute()),
            None if certificate is None else str(certificate.absolute()),
            None if key is None else str(key.absolute()),
            self._secret,
            str(self._home / "slate"),
            self.center.desk.start_s,
            settings.drain_s,
            settings.usage is not None,
            settings.otlp is not None,
        )

    def _endpoints(self) -> str:
        codecs = {key: self.center.codec(*key) for key in self.center.kits.codecs}
        return remote.endpoints_text(self.center.keeper.endpoints, codecs)

    def _lacking(self) -> str:
        models = self.center.kits.scene.models
        return json.dumps({model: why for model in models if (why := self.center.lacking(model))})

    def _changed(self) -> None:
        said = self._endpoints()
        for seat in self._seats:
            seat.mail.send(remote.ENDPOINTS, said)
        self._look()

    def _lost(self, replica: str) -> None:
        for seat in self._seats:
            seat.mail.send(remote.GONE, json.dumps(replica))

    def _look(self) -> None:
        reasons = self._lacking()
        if reasons != self._reasons:
            self._reasons = reasons
            for seat in self._seats:
                seat.mail.send(remote.REASONS, reasons)
        watched = self.meter.published is not None
        if watched != self._watched:
            self._watched = watched
            for seat in self._seats:
                seat.mail.send(remote.WATCH, json.dumps(watched))
