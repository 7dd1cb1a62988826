"""The Brain's side of several workers: they are heard, told, and asked to end; their processes are the parent's.

A worker that dies takes its clients' connections along: the Brain hears that their requests were cancelled, so that
engines stop working on them, and another process takes its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress

from potluck.core.brain.actions import Action
from potluck.core.errors import PotluckError
from potluck.gateway.admin.meter import FullMeter
from potluck.gateway.desk.center import Center
from potluck.gateway.settings import Settings
from potluck.gateway.workers import remote
from potluck.gateway.workers.mail import Mail
from potluck.gateway.workers.parent import Post, answers_in
from potluck.gateway.workers.remote import HandHeard
from potluck.gateway.workers.setup import CardNote, Setup

START_S = 60.0


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
        self, center: Center, meter: FullMeter, settings: Settings, cards: tuple[CardNote, ...], post: Post
    ) -> None:
        self.center, self.meter = center, meter
        self._settings, self._cards = settings, cards
        self._count = settings.places.workers
        self._secret = settings.secret.hex()
        self._post = post
        self._seats: list[Seat] = []
        self._listening: dict[int, str] = {}
        self._all: asyncio.Event = asyncio.Event()
        self._none: asyncio.Event = asyncio.Event()
        """All have ended."""
        self._reasons = ""
        self._watched = False
        self._closing = False
        center.keeper.on_endpoints.append(self._changed)
        center.keeper.on_gone.append(self._lost)
        center.desk.at_ticks.append(self._look)

    async def start(self) -> str:
        """Where they listen, once all of them do. A successor serves with those that are there."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Seat(self).mail, sock=self._post.desk)
        if self._post.again:
            return ""
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
        if self._seats:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s + 5.0):
                    await self._none.wait()
        self._server.close()

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
            if self._closing and not self._seats:
                self._none.set()

    # What they must know.

    def _setup(self, place: int) -> Setup:
        settings = self._settings
        certificate, key = settings.tls or (None, None)
        return Setup(
            place,
            self._count,
            settings.places.host,
            int(self._post.clients[0][0].getsockname()[1]),
            self._cards,
            tuple(each.name for each in self.center.policy.classes),
            self.center.policy.shared_prefixes,
            None if settings.keys is None else str(settings.keys.absolute()),
            None if certificate is None else str(certificate.absolute()),
            None if key is None else str(key.absolute()),
            None if settings.engine_ca is None else str(settings.engine_ca.absolute()),
            self._secret,
            str(self._post.home / "slate"),
            self.center.desk.start_s,
            settings.drain_s,
            settings.gateways,
            settings.otlp is not None,
            None if settings.usage is None else str(settings.usage.absolute()),
            str(answers_in(settings, self._post).absolute()),
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
