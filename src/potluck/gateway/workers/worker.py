"""What a process for clients has: a driver, a door, a port."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.api.http import client_tls, server_tls
from potluck.core.codec import decode, encode
from potluck.core.state.actions import Action
from potluck.core.values.service import PrefixSharing
from potluck.gateway.admin.counters import Counters
from potluck.gateway.core import Act
from potluck.gateway.dispatch.dispatcher import BrainClient, Dispatcher
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.http.server import ClientListener, open_port
from potluck.gateway.openai.handler import ClientHandler, HandlerSettings
from potluck.gateway.openai.kept_answers import KeptAnswers
from potluck.gateway.openai.keys import KeyRing, SharedUse
from potluck.gateway.openai.requests import ModelCard, read_card
from potluck.gateway.registry.directory import ReplicaDirectory
from potluck.gateway.settings import GatewaySettings, ListenAddresses


class Worker:
    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        directory: ReplicaDirectory,
        outgoing: ConnectionPool,
        meter: Counters,
        settings: GatewaySettings,
        classes: frozenset[str],
        sharing: tuple[PrefixSharing, ...],
        ready: Callable[[str], str],
        connect: Callable[[Act], BrainClient],
        *,
        shared_use: SharedUse | None = None,
        answers: Path | None = None,
    ) -> None:
        """`connect` makes the line to the Brain from what the Brain's orders go to. With other workers beside it, all
        have a `shared_use` for their keys' limits. In `answers` they lie for whoever asks again."""
        loop = asyncio.get_running_loop()
        line = connect(_too_early)
        self.dispatcher = Dispatcher(line, directory, outgoing, time.monotonic, loop.call_later, meter)
        line.act = self.dispatcher.act
        self.keys = None
        if settings.keys is not None:
            self.keys = KeyRing(
                settings.keys,
                time.monotonic(),
                time.time,
                shared_use,
                may_open=settings.places.unreachable,
                gateways=settings.gateways,
            )
        self.door = ClientHandler(
            cards,
            self.dispatcher,
            meter,
            keys=self.keys,
            settings=HandlerSettings(classes=classes, secret=settings.secret, sharing=sharing),
            ready=ready,
            directory=directory,
            repeats=None if answers is None else KeptAnswers(answers, loop.call_later),
        )
        self.port: ClientListener | None = None

    async def listen(self, settings: GatewaySettings, sockets: Sequence[socket.socket] = ()) -> str:
        places = settings.places
        tls = None if settings.tls is None else server_tls(*settings.tls)
        self.port = await open_port(self.door, places.host, places.port, tls=tls, taken=sockets)
        return self.port.address

    async def close(self, within_s: float, *, followed: bool = False, for_good: bool = False) -> None:
        """Nothing new is taken; what is open may end. Where a successor has the port, what comes by connections that
        were made before is answered too: their clients need not know."""
        if not followed:
            self.door.closing = "the gateway is shutting down; try again"
        if self.port is not None:
            await self.port.close(within_s, gently=followed, for_good=for_good)
        self.door.close()


def calls_of(settings: GatewaySettings) -> ConnectionPool:
    """Requests to engines, which show certificates of the authority that was named, if one was."""
    named = settings.engine_ca
    return ConnectionPool(tls=None if named is None else client_tls(named, "--engine-ca"))


@dataclass(frozen=True, slots=True)
class ModelCardNote:
    name: str
    context_tokens: int
    vocab: int
    plain: bool
    folder: str | None
    pretended: bool = False
    """Engines act as a larger model than the files are of, and answer as long requests as that would."""

    def card(self) -> ModelCard:
        created_s = int(time.time())
        if self.folder is not None:
            context = self.context_tokens if self.pretended else 0
            return read_card(
                self.name, self.folder, context_tokens=context, plain=self.plain, created_s=created_s
            )
        return ModelCard(
            self.name, self.context_tokens, plain=self.plain, vocab=self.vocab, created_s=created_s
        )


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    place: int
    workers: int
    host: str
    port: int
    cards: tuple[ModelCardNote, ...]
    classes: tuple[str, ...]
    sharing: tuple[PrefixSharing, ...]
    keys: str | None
    certificate: str | None
    key: str | None
    engine_ca: str | None
    secret: str
    shared_use: str
    start_s: float
    """When the Brain's time began, by the monotonic clock."""
    drain_s: float
    gateways: int
    spans: bool
    usage: str | None = None
    """Where records of use are written."""
    answers: str | None = None

    def text(self) -> str:
        return json.dumps(encode(self))

    @property
    def settings(self) -> GatewaySettings:
        tls = None
        if self.certificate is not None and self.key is not None:
            tls = (Path(self.certificate), Path(self.key))
        keys = None if self.keys is None else Path(self.keys)
        secret = bytes.fromhex(self.secret)
        engine_ca = None if self.engine_ca is None else Path(self.engine_ca)
        return GatewaySettings(
            ListenAddresses(self.host, self.port),
            keys=keys,
            tls=tls,
            engine_ca=engine_ca,
            secret=secret,
            drain_s=self.drain_s,
            gateways=self.gateways,
        )


def setup_of(text: str) -> WorkerSetup:
    return decode(WorkerSetup, json.loads(text), "setup")


def _too_early(actions: Sequence[Action]) -> None:
    raise AssertionError("the Brain asks for something before it was told anything")
