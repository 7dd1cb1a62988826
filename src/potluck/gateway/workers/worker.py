"""What a process for clients has: a driver, a door, a port."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from potluck.core.errors import InputError
from potluck.core.values.service import Sharing
from potluck.gateway.desk.desk import Act
from potluck.gateway.door.cards import ModelCard
from potluck.gateway.door.front import DoorSettings, FrontDoor
from potluck.gateway.door.keys import KeyRing
from potluck.gateway.door.slates import Slate
from potluck.gateway.drive.rides import Rides
from potluck.gateway.http.calls import Calls
from potluck.gateway.http.port import Port, open_port
from potluck.gateway.parts import Directory, Line, Meter
from potluck.gateway.settings import Settings


class Worker:
    """All of it in one event loop."""

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        directory: Directory,
        outgoing: Calls,
        meter: Meter,
        settings: Settings,
        classes: frozenset[str],
        sharing: tuple[Sharing, ...],
        ready: Callable[[str], str],
        connect: Callable[[Act], Line],
        *,
        slate: Slate | None = None,
    ) -> None:
        """`connect` makes the line to the desk from what the desk's orders go to. With other workers beside it, all
        have a `slate` for their keys' limits."""
        loop = asyncio.get_running_loop()
        line = connect(lambda actions: self.rides.act(actions))
        self.rides = Rides(line, directory, outgoing, time.monotonic, loop.call_later, meter=meter)
        self.keys = None
        if settings.keys is not None:
            self.keys = KeyRing(
                settings.keys, time.monotonic(), time.time, slate, may_open=settings.places.unreachable
            )
        self.door = FrontDoor(
            cards,
            self.rides,
            meter,
            keys=self.keys,
            settings=DoorSettings(classes=classes, secret=settings.secret, sharing=sharing),
            ready=ready,
            directory=directory,
        )
        self.port: Port | None = None

    async def listen(self, settings: Settings, *, shared: bool = False) -> str:
        places = settings.places
        tls = None if settings.tls is None else tls_of(*settings.tls)
        self.port = await open_port(self.door, places.host, places.port, tls=tls, shared=shared)
        return self.port.address

    async def close(self, within_s: float) -> None:
        """Nothing new is taken; what is open may end."""
        self.door.closing = "the gateway is shutting down; try again"
        if self.port is not None:
            await self.port.close(within_s)
        self.door.close()


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError("--tls", f"{certificate} and {key} cannot be used ({error})") from error
    return context
