"""Requests to engines, over connections that are kept alive.

An idle one is closed before the engine would do it (uvicorn waits 5 s); should it have been quicker all the same, the
request goes once more over a new one. Silence is noticed by whoever waits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from typing import Protocol, cast

from potluck.api.http import HttpRefusal, open_files
from potluck.core.errors import PotluckError
from potluck.gateway.http.limits import SHARE_OF_FILES
from potluck.gateway.http.parser import Headers, ResponseReader
from potluck.gateway.values import Address

STALE_S = 1.0
"""A kept connection that the engine had closed already shows so at once; one that fails later was a failure."""
CONNECT_S = 5.0
IDLE_S = 4.0
SWEEP_S = 1.0
TCP_INFO = getattr(socket, "TCP_INFO", None)
RTT = struct.Struct("=68xI")  # In Linux's struct tcp_info, in microseconds, smoothed by the kernel.
log = logging.getLogger(__name__)


class ResponseListener(Protocol):
    """Who hears an engine's answer. After `done` or `lost`, of which exactly one comes, it hears no more."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def lost(self, why: str) -> None:
        """No connection, cut off, or not HTTP; one line."""


class _Deaf:
    """In a listener's place once a call is over: the two hold each other no longer."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def lost(self, why: str) -> None: ...


DEAF = _Deaf()


class EngineCall:
    __slots__ = (
        "address", "bodiless", "connecting", "data", "fresh", "listener", "over", "paused", "sent_s", "wire",
    )  # fmt: skip

    def __init__(self, address: Address, data: bytes, listener: ResponseListener, bodiless: bool) -> None:
        self.paused = False
        self.address, self.data, self.bodiless = address, data, bodiless
        self.listener: ResponseListener = listener
        self.sent_s = 0.0
        self.wire: EngineConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.fresh = False
        self.over = False

    @property
    def sent(self) -> bool:
        """Whether the engine may have received it: it was written to a connection."""
        return self.sent_s > 0

    def cancel(self) -> None:
        if self.over:
            return
        self.over = True
        self.listener = DEAF
        if self.connecting is not None:
            self.connecting.cancel()
        if self.wire is not None:
            self.wire.abort()

    def pause(self) -> None:
        if not self.over and not self.paused:
            self.paused = True
            if self.wire is not None:
                self.wire.pause()

    def resume(self) -> None:
        if not self.over and self.paused:
            self.paused = False
            if self.wire is not None:
                self.wire.resume()

    def lose(self, why: str) -> None:
        if self.over:
            return
        listener = self.listener
        self.cancel()
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        try:
            listener.lost(f"{host}:{self.address.port} {why}")
        except Exception:  # A fault of ours must not take the connection's other users along.
            log.exception("a listener failed")


class EngineConnection(asyncio.Protocol):
    __slots__ = (
        "_call", "_calls", "_paused", "_reader", "_transport", "address", "kept_s",
    )  # fmt: skip

    def __init__(self, connection_pool: ConnectionPool, address: Address) -> None:
        self._calls = connection_pool
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._call: EngineCall | None = None
        self._reader = ResponseReader()
        self._paused = False
        self.kept_s = 0.0

    def take(self, call: EngineCall) -> None:
        assert self._transport is not None
        self._call = call
        self._reader.begin(call.bodiless)
        call.wire = self
        call.sent_s = time.monotonic()
        self._transport.write(call.data)
        if call.paused:
            self.pause()

    def pause(self) -> None:
        wire = self._transport
        if not self._paused and wire is not None and not wire.is_closing():
            self._paused = True
            wire.pause_reading()

    def resume(self) -> None:
        wire = self._transport
        if self._paused and wire is not None and not wire.is_closing():
            self._paused = False
            wire.resume_reading()

    def abort(self) -> None:
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def rtt_s(self) -> float:
        if self._transport is None or TCP_INFO is None:
            return 0.0
        try:
            wire = self._transport.get_extra_info("socket")
            raw = b"" if wire is None else wire.getsockopt(socket.IPPROTO_TCP, TCP_INFO, RTT.size)
            return float(RTT.unpack(raw)[0]) * 1e-6
        except (OSError, ValueError, struct.error):  # It was closed meanwhile, or is no TCP of Linux.
            return 0.0

    def end(self, why: str) -> None:
        if self._call is not None:
            self._call.lose(why)
        else:
            self.abort()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._calls.made(self)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # Nobody asked.
            self.abort()
            return
        reader = self._reader
        headless = not reader.status
        try:
            piece = reader.feed(data)
            if headless and reader.status:
                call.listener.head(reader.status, reader.headers)
            if piece and not call.over:
                call.listener.data(piece)
        except HttpRefusal as refusal:
            call.lose(f"does not speak HTTP ({refusal})")
            return
        except Exception:  # A fault of ours; the answer cannot go on.
            log.exception("a listener failed")
            call.lose("could not be followed")
            return
        if reader.over and not call.over:
            self._done(call)

    def _done(self, call: EngineCall) -> None:
        reader, transport = self._reader, self._transport
        assert transport is not None
        listener = call.listener
        self._call = call.wire = None
        call.over, call.listener = True, DEAF
        if self._paused:
            self.resume()
        if reader.stays and not reader.rest and not transport.get_write_buffer_size():
            self._calls.keep(self)
        else:
            transport.close()
        try:
            listener.done()
        except Exception:  # As above.
            log.exception("a listener failed")

    def eof_received(self) -> None:
        self._calls.gone(self)
        self._ended("closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.gone(self)
        self._ended(f"broke the connection off ({plain(exc)})" if exc else "closed the connection")
        self._transport = None
        self._reader.close()

    def _ended(self, why: str) -> None:
        call = self._call
        if call is None:
            return
        reader = self._reader
        if reader.closed():
            self._done(call)
            return
        call.wire = None
        self.abort()
        untouched = not reader.status and not call.fresh
        if untouched and time.monotonic() - call.sent_s < STALE_S:
            self._calls.open(call)
        else:
            call.lose(f"{why} before its answer" if not reader.status else f"{why} in its answer")


def plain(error: Exception) -> str:
    """What went wrong, in words that do not depend on the event loop."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return str(getattr(error, "strerror", None) or error).lower()


class ConnectionPool:
    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        idle_s: float = IDLE_S,
        most: float | None = None,
    ) -> None:
        self._tls = tls
        self._connect_s, self._idle_s = connect_s, idle_s
        self._most = open_files() * SHARE_OF_FILES if most is None else most
        self._kept: dict[Address, list[EngineConnection]] = {}
        self._wires: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heads: dict[tuple[Address, bytes, bytes], bytes] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._wires) + len(self._connecting)

    def send(
        self,
        address: Address,
        method: bytes,
        path: bytes,
        body: bytes,
        listener: ResponseListener,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> EngineCall:
        head = self._heads.get((address, method, path)) or self._head(address, method, path)
        parts = [head]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        fields = b"".join(parts)
        lines = len(parts) + 7 >> 2  # Two of the head, one for each header.
        if fields.count(b"\n") != lines or fields.count(b"\r") != lines:
            raise ValueError("a header of a request holds a line end")
        if body or method == b"POST":
            data = b"".join((fields, b"content-length: %d\r\n\r\n" % len(body), body))
        else:
            data = fields + b"\r\n"
        call = EngineCall(address, data, listener, method == b"HEAD")
        kept = self._kept.get(address)
        if kept:
            kept.pop().take(call)
        else:
            self.open(call)
        return call

    async def close(self) -> None:
        for connection in tuple(self._wires):
            connection.end("was left: the gateway ends")
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def connected(self, address: Address) -> bool:
        """Whether an idle connection there is still open."""
        return bool(self._kept.get(address))

    def rtt_s(self, address: Address) -> float:
        """A packet's way there and back over the idle connection last used; 0 where nobody knows."""
        kept = self._kept.get(address)
        return kept[-1].rtt_s() if kept else 0.0

    # What connections tell.

    def made(self, connection: EngineConnection) -> None:
        self._wires.add(connection)

    def keep(self, connection: EngineConnection) -> None:
        connection.kept_s = time.monotonic()
        self._kept.setdefault(connection.address, []).append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def gone(self, connection: EngineConnection) -> None:
        self._wires.discard(connection)
        kept = self._kept.get(connection.address)
        if kept and connection in kept:
            kept.remove(connection)

    def _head(self, address: Address, method: bytes, path: bytes) -> bytes:
        host = address.host.encode("ascii" if address.host.isascii() else "idna")
        if b":" in host:
            host = b"[%b]" % host
        line = b"%b %b HTTP/1.1\r\nhost: %b:%d\r\n" % (method, path, host, address.port)
        if len(line.split()) != 5 or line.count(b"\n") != 2:
            raise ValueError("a path or a method holds a space or a line end")
        if len(self._heads) >= 1024:
            self._heads.clear()
        self._heads[address, method, path] = line
        return line

    def open(self, call: EngineCall) -> None:
        call.fresh = True
        loop = asyncio.get_running_loop()
        if len(self) >= self._most and not self._make_room():
            loop.call_soon(call.lose, "cannot be reached: too many connections are open")
            return
        call.connecting = loop.create_task(self._connect(call))
        self._connecting.add(call.connecting)
        call.connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, call: EngineCall) -> None:
        host, port, secure = call.address
        tls = None
        if secure:
            tls = self._tls = self._tls or ssl.create_default_context()
        connection = EngineConnection(self, call.address)
        why = ""
        try:
            async with asyncio.timeout(self._connect_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port, ssl=tls)
        except TimeoutError:
            why = f"cannot be reached: no connection within {self._connect_s:g} s"
        except (OSError, UnicodeError) as error:
            why = f"cannot be reached ({plain(error)})"
        except asyncio.CancelledError:  # By the call itself, which is over then, or by `close`.
            why = "was left: the gateway ends"
        call.connecting = None
        if why or call.over:
            connection.abort()
            call.lose(why)
            return
        connection.take(call)

    def _make_room(self) -> bool:
        idle = [wires[0] for wires in self._kept.values() if wires]
        if not idle:
            return False
        self._close_kept(min(idle, key=lambda connection: connection.kept_s))
        return True

    def _close_kept(self, connection: EngineConnection) -> None:
        self.gone(connection)
        connection.abort()

    def _sweep(self) -> None:
        self._sweeping = None
        before_s = time.monotonic() - self._idle_s
        for address, wires in tuple(self._kept.items()):
            while wires and wires[0].kept_s <= before_s:
                self._close_kept(wires[0])
            if not wires:
                del self._kept[address]
        if self._kept:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class NoResponse(PotluckError): ...


class _Whole:
    def __init__(self, most_bytes: int) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._most_bytes = most_bytes
        self._status = 0
        self._parts: list[bytes] = []
        self._bytes = 0

    def head(self, status: int, headers: Headers) -> None:
        self._status = status

    def data(self, data: bytes) -> None:
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes and not self.answer.done():
            self.answer.set_exception(NoResponse(f"the answer is larger than {self._most_bytes} bytes"))

    def done(self) -> None:
        if not self.answer.done():
            self.answer.set_result((self._status, b"".join(self._parts)))

    def lost(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(NoResponse(why))


async def fetch(
    connection_pool: ConnectionPool,
    address: Address,
    method: bytes,
    path: bytes,
    body: bytes = b"",
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    within_s: float = 5.0,
    most_bytes: int = 64_000_000,
) -> tuple[int, bytes]:
    whole = _Whole(most_bytes)
    call = connection_pool.send(address, method, path, body, whole, headers=headers)
    late = f"{address.host}:{address.port} did not answer within {within_s:g} s"
    timer = asyncio.get_running_loop().call_later(within_s, whole.lost, late)
    try:
        return await whole.answer
    finally:
        timer.cancel()
        call.cancel()
