"""The gateway's port: who may come in, how long they may take, and how it all ends.

uvloop accepts the connections. No more are kept than there is room for: when one too many comes, the oldest of those
that wait gives way (`api/http_errors.py`), and where all are busy the new one is told so. One look a second
over all of them finds those that take too long, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial

from potluck.api.http_errors import ConnectionLimits, HttpRefusal
from potluck.core.errors import InputError
from potluck.gateway.http.client_connection import ClientConnection
from potluck.gateway.http.limits import SHARE_OF_FILES, HttpLimits, open_files
from potluck.gateway.interfaces import Handler

BACKLOG = 2048
WATCH_S = 1.0
LOG_S = 60.0
"""Dropped connections are told of at most this often."""

log = logging.getLogger(__name__)


class ClientListener:
    """Some listening sockets, and all who came in by them."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self.handler, self.limits = handler, limits
        self.closing = self._gentle = False
        self._handshake_s = 0.0
        self.date = b""
        self.address = ""
        self.dropped: Counter[str] = Counter()
        """Connections that ended because of what the client did, by the reason."""
        self._crowd: ConnectionLimits[ClientConnection] = ConnectionLimits(
            min(limits.connections, open_files() * SHARE_OF_FILES)
        )
        self.works, self.waits = self._crowd.works, self._crowd.waits
        """A connection's request has come whole; it was answered."""
        self.held: dict[ClientConnection, int] = {}
        """Bytes of requests that are not whole."""
        self._held_bytes = 0
        self._servers: list[asyncio.Server] = []
        self.sockets: list[socket.socket] = []
        self._told: Counter[str] = Counter()
        self._told_s = -LOG_S
        self._empty: asyncio.Event = asyncio.Event()
        shortest_s = min(limits.head_s, limits.body_s, limits.idle_s, limits.stalled_s, limits.linger_s)
        self._watch_s = min(WATCH_S, shortest_s / 4)
        self._watching: asyncio.TimerHandle | None = None
        self._timed()

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._crowd)

    async def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.sockets = sockets
        limit_s = None if tls is None else self.limits.head_s
        self._handshake_s = limit_s or 0.0
        for each in sockets:
            made = await loop.create_server(
                partial(ClientConnection, self),
                sock=each,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=limit_s,
            )
            self._servers.append(made)
        self._watching = loop.call_later(self._watch_s, self._watch)

    async def close(self, within_s: float = 5.0, *, gently: bool = False, for_good: bool = False) -> None:
        """Nobody comes in any more; what is being answered may end, for a while. Then the rest is cut off.

        `for_good`: the port closes, although other processes hold its sockets too; else they may go on with it.

        `gently`: whoever has come in may still ask, once; a request may be on its way, and would be lost. How long a
        connection may wait is limited as ever.
        """
        self.closing, self._gentle = True, gently
        held = [each.dup() for each in self.sockets] if for_good else []
        for server in self._servers:
            server.close()
        for each in held:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if gently:
            # Those that still shake hands are not among them yet, and do it in this time or not at all.
            await asyncio.sleep(min(within_s, self._handshake_s))
        else:
            for connection in self._crowd:
                connection.close_idle()
        if len(self._crowd):
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), within_s)
            except TimeoutError:
                for connection in self._crowd:
                    connection.end("cut off")
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    # What the connections tell.

    def came(self, connection: ClientConnection) -> None:
        if self._crowd.full and not self._make_room():
            self._crowd.came(connection, connection.peer)
            connection.refuse(HttpRefusal(503, "too many requests are under way; try again", "overloaded"))
            return
        self._crowd.came(connection, connection.peer)
        if self.closing and not self._gentle:
            connection.close_idle()

    def left(self, connection: ClientConnection) -> None:
        self._crowd.left(connection)
        self.released(connection)
        if not len(self._crowd):
            self._empty.set()

    def holds(self, connection: ClientConnection, size: int) -> None:
        """So many bytes of a request that is not whole. Where there are too many, the largest one goes."""
        self._held_bytes += size - self.held.get(connection, 0)
        self.held[connection] = size
        while self._held_bytes > self.limits.bodies_bytes:
            largest = max(self.held, key=self.held.__getitem__)
            self.released(largest)
            largest.refuse(
                HttpRefusal(503, "too much is being sent to this gateway; try again", "overloaded")
            )

    def released(self, connection: ClientConnection) -> None:
        self._held_bytes -= self.held.pop(connection, 0)

    def drop(self, why: str) -> None:
        """Counted, and told of now and then."""
        self.dropped[why] += 1

    def _make_room(self) -> bool:
        connection = self._crowd.oldest()
        if connection is None:
            return False
        self._crowd.left(connection)
        connection.crowded_out()
        return True

    # Once in a while.

    def _timed(self) -> None:
        self.date = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().call_later(self._watch_s, self._watch)
        self._timed()
        now_s = time.monotonic()
        for connection in self._crowd:
            why = connection.overdue(now_s)
            if why:
                connection.end(why)
        if self.dropped != self._told and now_s - self._told_s >= LOG_S:
            shown = ", ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
            log.warning("connections dropped so far: %s; %d are open", shown, len(self._crowd))
            self._told, self._told_s = Counter(self.dropped), now_s


async def open_port(
    handler: Handler,
    host: str,
    port: int,
    *,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
    taken: Sequence[socket.socket] = (),
) -> ClientListener:
    """Listen for clients. `taken` are sockets that listen already."""
    sockets = list(taken) or await bound(host, port)
    made = ClientListener(handler, limits or HttpLimits())
    first = sockets[0].getsockname()
    shown = f"[{first[0]}]" if ":" in first[0] else first[0]
    made.address = f"{'https' if tls else 'http'}://{shown}:{first[1]}"
    try:
        await made.listen(sockets, tls)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return made


async def bound(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Sockets for each address of a host, on one port. `shared`: there are several of each, and the system deals
    connections out among them."""
    made: list[socket.socket] = []
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            at = (address[0], made[0].getsockname()[1] if made else port, *address[2:])
            made.append(socket.create_server(at, family=family, backlog=BACKLOG, reuse_port=shared))
    except OSError as error:
        for each in made:
            each.close()
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error
    return made
