"""What a process for clients has: a dispatcher, a handler, a port."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.api.http import client_tls, server_tls
from potluck.core.state.actions import Action
from potluck.core.state.policy import Policy
from potluck.gateway.admin.counters import Counters
from potluck.gateway.core import Act
from potluck.gateway.dispatch.dispatcher import BrainClient, Dispatcher
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.http.server import ClientListener, open_port
from potluck.gateway.openai.handler import ClientHandler, HandlerSettings
from potluck.gateway.openai.kept_answers import KeptAnswers
from potluck.gateway.openai.keys import KeyRing, SharedUse
from potluck.gateway.openai.requests import ModelCard, read_card
from potluck.gateway.registry.registry import ReplicaDirectory
from potluck.gateway.values import GatewaySettings


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every process for clients is set up with; those beside the Brain's get it by being forked."""

    settings: GatewaySettings
    policy: Policy
    cards: tuple[Callable[[], ModelCard], ...]  # Made in the process itself: tokenizers have threads.


class Worker:
    def __init__(
        self,
        context: WorkerContext,
        directory: ReplicaDirectory,
        connection_pool: ConnectionPool,
        counters: Counters,
        ready: Callable[[str], str],
        connect: Callable[[Act], BrainClient],
        answers: Path | None = None,
        shared_use: SharedUse | None = None,
    ) -> None:
        """`connect` makes the line to the Brain. Workers beside others share their keys' limits."""
        loop = asyncio.get_running_loop()
        settings, policy = context.settings, context.policy
        line = connect(_too_early)
        self.dispatcher = Dispatcher(
            line, directory, connection_pool, time.monotonic, loop.call_later, counters
        )
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
        self.handler = ClientHandler(
            {card.name: card for card in [make() for make in context.cards]},
            self.dispatcher,
            counters,
            key_ring=self.keys,
            settings=HandlerSettings(
                frozenset(request_class.name for request_class in policy.classes),
                settings.secret,
                policy.shared_prefixes,
                attached=settings.attached,
            ),
            ready=ready,
            directory=directory,
            kept_answers=None if answers is None else KeptAnswers(answers, loop.call_later),
        )
        self.port: ClientListener | None = None
        self._settings = settings

    async def listen(self, sockets: Sequence[socket.socket] = ()) -> str:
        addresses = self._settings.places
        tls = None if self._settings.tls is None else server_tls(*self._settings.tls)
        self.port = await open_port(self.handler, addresses.host, addresses.port, tls=tls, taken=sockets)
        return self.port.address

    async def close(self, within_s: float, followed: bool = False, *, for_good: bool | None = None) -> None:
        """`followed`: a successor has the port, and what comes by connections made before is answered too."""
        if not followed:
            self.handler.closing = "the gateway is shutting down; try again"
        if self.port is not None:
            await self.port.close(
                within_s, gently=followed, for_good=not followed if for_good is None else for_good
            )
        self.dispatcher.close()
        self.handler.close()


def calls_of(settings: GatewaySettings) -> ConnectionPool:
    """Requests to engines, which show certificates of the authority that was named, if one was."""
    named = settings.engine_ca
    return ConnectionPool(tls=None if named is None else client_tls(named, "--engine-ca"))


def model_card(
    name: str,
    context_tokens: int,
    vocab: int,
    plain: bool,
    folder: Path | None,
    tokenizer_only: bool = False,
    least_context_tokens: int = 0,
) -> ModelCard:
    """`tokenizer_only`: engines act as a larger model than the files are of, and take as long requests as that."""
    now_s = int(time.time())
    if folder is None:
        card = ModelCard(name, context_tokens, plain=plain, vocab=vocab, created_s=now_s)
    else:
        context_tokens = context_tokens if tokenizer_only else 0
        card = read_card(name, folder, context_tokens=context_tokens, plain=plain, created_s=now_s)
    return replace(card, least_context_tokens=least_context_tokens)


def _too_early(actions: Sequence[Action]) -> None:
    raise AssertionError("the Brain asks for something before it was told anything")
