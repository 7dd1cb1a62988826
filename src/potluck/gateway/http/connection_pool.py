"""Requests to engines over kept-alive connections.

An idle connection is closed before the engine closes it (uvicorn does after 5 s). If the engine was quicker, the
request is sent once more over a new connection. Callers set their own deadlines.
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
"""A request over an idle connection that fails within this time met a connection that the engine had closed."""
CONNECT_S = 5.0
IDLE_S = 4.0
SWEEP_S = 1.0
TCP_INFO = getattr(socket, "TCP_INFO", None)
RTT = struct.Struct("=68xI")  # In Linux's struct tcp_info, in microseconds, smoothed by the kernel.
log = logging.getLogger(__name__)


class ResponseListener(Protocol):
    """Receives an engine's response. Exactly one of `done` and `lost` is called, and it is the last call."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def lost(self, why: str) -> None:
        """No connection, a response that was cut off, or not HTTP. `why` is one line."""


class _IgnoringListener:
    """Replaces the listener of a call that is over, so that the two form no reference cycle."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def lost(self, why: str) -> None: ...


IGNORING_LISTENER = _IgnoringListener()


class EngineCall:
    __slots__ = (
        "address", "bodiless", "connecting", "connection", "data", "fresh", "listener", "over", "paused", "sent_s",
    )  # fmt: skip

    def __init__(self, address: Address, data: bytes, listener: ResponseListener, bodiless: bool) -> None:
        self.paused = False
        self.address, self.data, self.bodiless = address, data, bodiless
        self.listener: ResponseListener = listener
        self.sent_s = 0.0
        self.connection: EngineConnection | None = None
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
        self.listener = IGNORING_LISTENER
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()

    def pause(self) -> None:
        if not self.over and not self.paused:
            self.paused = True
            if self.connection is not None:
                self.connection.pause()

    def resume(self) -> None:
        if not self.over and self.paused:
            self.paused = False
            if self.connection is not None:
                self.connection.resume()

    def fail(self, why: str) -> None:
        if self.over:
            return
        listener = self.listener
        self.cancel()
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        try:
            listener.lost(f"{host}:{self.address.port} {why}")
        except Exception:  # A bug of one listener must not end other requests.
            log.exception("a listener failed")


class EngineConnection(asyncio.Protocol):
    __slots__ = (
        "_call", "_paused", "_pool", "_reader", "_transport", "address", "idle_since_s",
    )  # fmt: skip

    def __init__(self, connection_pool: ConnectionPool, address: Address) -> None:
        self._pool = connection_pool
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._call: EngineCall | None = None
        self._reader = ResponseReader()
        self._paused = False
        self.idle_since_s = 0.0

    def take(self, call: EngineCall) -> None:
        assert self._transport is not None
        self._call = call
        self._reader.begin(call.bodiless)
        call.connection = self
        call.sent_s = time.monotonic()
        self._transport.write(call.data)
        if call.paused:
            self.pause()

    def pause(self) -> None:
        transport = self._transport
        if not self._paused and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def resume(self) -> None:
        transport = self._transport
        if self._paused and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def abort(self) -> None:
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def rtt_s(self) -> float:
        if self._transport is None or TCP_INFO is None:
            return 0.0
        try:
            tcp_socket = self._transport.get_extra_info("socket")
            raw = b"" if tcp_socket is None else tcp_socket.getsockopt(socket.IPPROTO_TCP, TCP_INFO, RTT.size)
            return float(RTT.unpack(raw)[0]) * 1e-6
        except (OSError, ValueError, struct.error):  # The socket is closed, or not Linux's TCP.
            return 0.0

    def end(self, why: str) -> None:
        if self._call is not None:
            self._call.fail(why)
        else:
            self.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._pool.add(self)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # Bytes without a request.
            self.abort()
            return
        reader = self._reader
        awaits_head = not reader.status
        try:
            piece = reader.feed(data)
            if awaits_head and reader.status:
                call.listener.head(reader.status, reader.headers)
            if piece and not call.over:
                call.listener.data(piece)
        except HttpRefusal as refusal:
            call.fail(f"does not speak HTTP ({refusal})")
            return
        except Exception:  # A bug of the listener: the response cannot continue.
            log.exception("a listener failed")
            call.fail("could not be followed")
            return
        if reader.complete and not call.over:
            self._done(call)

    def _done(self, call: EngineCall) -> None:
        reader, transport = self._reader, self._transport
        assert transport is not None
        listener = call.listener
        self._call = call.connection = None
        call.over, call.listener = True, IGNORING_LISTENER
        if self._paused:
            self.resume()
        if reader.keep_alive and not reader.has_extra_bytes and not transport.get_write_buffer_size():
            self._pool.add_idle(self)
        else:
            transport.close()
        try:
            listener.done()
        except Exception:  # As above.
            log.exception("a listener failed")

    def eof_received(self) -> None:
        self._pool.remove(self)
        self._connection_ended("closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        self._connection_ended(
            f"broke the connection off ({error_text(exc)})" if exc else "closed the connection"
        )
        self._transport = None
        self._reader.close()

    def _connection_ended(self, why: str) -> None:
        call = self._call
        if call is None:
            return
        reader = self._reader
        if reader.complete_at_close():
            self._done(call)
            return
        call.connection = None
        self.abort()
        may_be_stale = not reader.status and not call.fresh
        if may_be_stale and time.monotonic() - call.sent_s < STALE_S:
            self._pool.open(call)
        else:
            call.fail(f"{why} before its answer" if not reader.status else f"{why} in its answer")


def error_text(error: Exception) -> str:
    """The error in words that do not depend on the event loop."""
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
        connections_max: float | None = None,
    ) -> None:
        self._tls = tls
        self._connect_s, self._idle_s = connect_s, idle_s
        self._connections_max = open_files() * SHARE_OF_FILES if connections_max is None else connections_max
        self._idle: dict[Address, list[EngineConnection]] = {}
        self._connections: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heads: dict[tuple[Address, bytes, bytes], bytes] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections) + len(self._connecting)

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
        idle = self._idle.get(address)
        if idle:
            idle.pop().take(call)
        else:
            self.open(call)
        return call

    async def close(self) -> None:
        for connection in tuple(self._connections):
            connection.end("was left: the gateway ends")
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def connected(self, address: Address) -> bool:
        """Whether an idle connection to the address is open."""
        return bool(self._idle.get(address))

    def rtt_s(self, address: Address) -> float:
        """Round-trip time over the idle connection last used; 0 where it is unknown."""
        idle = self._idle.get(address)
        return idle[-1].rtt_s() if idle else 0.0

    # Called by connections.

    def add(self, connection: EngineConnection) -> None:
        self._connections.add(connection)

    def add_idle(self, connection: EngineConnection) -> None:
        connection.idle_since_s = time.monotonic()
        self._idle.setdefault(connection.address, []).append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def remove(self, connection: EngineConnection) -> None:
        self._connections.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

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
        if len(self) >= self._connections_max and not self._close_oldest_idle():
            loop.call_soon(call.fail, "cannot be reached: too many connections are open")
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
            why = f"cannot be reached ({error_text(error)})"
        except asyncio.CancelledError:  # By the call itself, which is over then, or by `close`.
            why = "was left: the gateway ends"
        call.connecting = None
        if why or call.over:
            connection.abort()
            call.fail(why)
            return
        connection.take(call)

    def _close_oldest_idle(self) -> bool:
        idle = [connections[0] for connections in self._idle.values() if connections]
        if not idle:
            return False
        self._close_idle(min(idle, key=lambda connection: connection.idle_since_s))
        return True

    def _close_idle(self, connection: EngineConnection) -> None:
        self.remove(connection)
        connection.abort()

    def _sweep(self) -> None:
        self._sweeping = None
        idle_before_s = time.monotonic() - self._idle_s
        for address, connections in tuple(self._idle.items()):
            while connections and connections[0].idle_since_s <= idle_before_s:
                self._close_idle(connections[0])
            if not connections:
                del self._idle[address]
        if self._idle:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class NoResponse(PotluckError): ...


class _CollectedResponse:
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
    collected = _CollectedResponse(most_bytes)
    call = connection_pool.send(address, method, path, body, collected, headers=headers)
    timeout_text = f"{address.host}:{address.port} did not answer within {within_s:g} s"
    timer = asyncio.get_running_loop().call_later(within_s, collected.lost, timeout_text)
    try:
        return await collected.answer
    finally:
        timer.cancel()
        call.cancel()
