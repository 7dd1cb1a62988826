"""Requests to engines, over connections that are kept alive.

The connection used last is used next, so that those too many fall idle and are closed. An idle one is closed before
the engine would do it (uvicorn waits 5 s); should it have been quicker all the same, the request goes once more over
a new one.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable

from potluck.gateway.http.engine_connection import EngineCall, EngineConnection, plain
from potluck.gateway.http.idle_timer import TimerWheel
from potluck.gateway.http.limits import SHARE_OF_FILES, open_files
from potluck.gateway.interfaces import Address, ResponseListener

CONNECT_S = 5.0
IDLE_S = 4.0
SWEEP_S = 1.0


class ConnectionPool:
    """The `Outgoing` of parts.py."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        idle_s: float = IDLE_S,
        most: float | None = None,
    ) -> None:
        self.wheel = TimerWheel()
        self._tls = tls
        self._connect_s, self._idle_s = connect_s, idle_s
        self._most = open_files() * SHARE_OF_FILES if most is None else most
        self._kept: dict[Address, list[EngineConnection]] = {}
        """Of each address, the one used last at the end."""
        self._wires: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heads: dict[tuple[Address, bytes, bytes], bytes] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Connections that are open or being opened."""
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
        silence_s: float = 60.0,
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
        call = EngineCall(self, address, data, listener, silence_s, method == b"HEAD")
        kept = self._kept.get(address)
        if kept:
            kept.pop().take(call)
        else:
            self._open(call)
        return call

    async def close(self) -> None:
        """What is under way is cut off, and its listeners are told."""
        for wire in tuple(self._wires):
            wire.end("was left: the gateway ends")
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self.wheel.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # What connections tell.

    def made(self, wire: EngineConnection) -> None:
        self._wires.add(wire)

    def keep(self, wire: EngineConnection) -> None:
        """Its answer is over."""
        wire.kept_s = time.monotonic()
        self._kept.setdefault(wire.address, []).append(wire)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def gone(self, wire: EngineConnection) -> None:
        self._wires.discard(wire)
        kept = self._kept.get(wire.address)
        if kept and wire in kept:
            kept.remove(wire)

    def again(self, call: EngineCall) -> None:
        """The kept connection was stale."""
        self._open(call)

    # Connections.

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

    def _open(self, call: EngineCall) -> None:
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
        wire = EngineConnection(self, call.address)
        why = ""
        try:
            async with asyncio.timeout(self._connect_s):
                await asyncio.get_running_loop().create_connection(lambda: wire, host, port, ssl=tls)
        except TimeoutError:
            why = f"cannot be reached: no connection within {self._connect_s:g} s"
        except (OSError, UnicodeError) as error:
            why = f"cannot be reached ({plain(error)})"
        except asyncio.CancelledError:  # By the call itself, which is over then, or by `close`.
            why = "was left: the gateway ends"
        call.connecting = None
        if why or call.over:
            wire.abort()
            call.lose(why)
            return
        wire.take(call)

    def _make_room(self) -> bool:
        """Close the connection that was idle longest."""
        idle = [wires[0] for wires in self._kept.values() if wires]
        if not idle:
            return False
        self._close_kept(min(idle, key=lambda wire: wire.kept_s))
        return True

    def _close_kept(self, wire: EngineConnection) -> None:
        self.gone(wire)
        wire.abort()

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
