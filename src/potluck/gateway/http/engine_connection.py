"""One connection to an engine, and one request on it."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, cast

from potluck.api.http_errors import HttpRefusal
from potluck.gateway.http.idle_timer import TICK_S, TimerWheel
from potluck.gateway.http.response_reader import ResponseReader
from potluck.gateway.interfaces import Address, Headers, ResponseListener

STALE_S = 1.0
"""A kept connection that the engine had closed already shows so at once; one that fails later was a failure."""

log = logging.getLogger(__name__)


class _Deaf:
    """In a listener's place once a call is over: the two hold each other no longer."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def lost(self, why: str) -> None: ...


DEAF = _Deaf()


class ConnectionOwner(Protocol):
    """Who has the connections: what one of them tells."""

    wheel: TimerWheel

    def made(self, wire: EngineConnection) -> None: ...

    def keep(self, wire: EngineConnection) -> None: ...

    def gone(self, wire: EngineConnection) -> None: ...

    def again(self, call: EngineCall) -> None: ...


class EngineCall:
    """The `Call` of parts.py: a request on its way, or being answered."""

    __slots__ = (
        "_calls",
        "address",
        "bodiless",
        "connecting",
        "data",
        "fresh",
        "listener",
        "over",
        "paused",
        "sent_s",
        "silence_s",
        "wire",
    )

    def __init__(
        self,
        calls: ConnectionOwner,
        address: Address,
        data: bytes,
        listener: ResponseListener,
        silence_s: float,
        bodiless: bool,
    ) -> None:
        self._calls = calls
        self.paused = False
        self.address, self.data = address, data
        self.listener: ResponseListener = listener
        self.silence_s, self.bodiless = silence_s, bodiless
        self.sent_s = 0.0
        self.wire: EngineConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.fresh = False
        """It goes, or went, over a connection that was made for it."""
        self.over = False

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
                self.wire.heard_s = self._calls.wheel.now_s
                self.wire.resume()

    def lose(self, why: str) -> None:
        """It failed, and its listener is told, once."""
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
        "_call",
        "_calls",
        "_paused",
        "_reader",
        "_transport",
        "_wheel",
        "address",
        "heard_s",
        "kept_s",
        "silence_s",
        "slot",
    )

    def __init__(self, calls: ConnectionOwner, address: Address) -> None:
        self._calls = calls
        self._wheel = calls.wheel
        self.address = address
        self.heard_s = self.silence_s = 0.0
        self.slot = 0
        self._transport: asyncio.Transport | None = None
        self._call: EngineCall | None = None
        self._reader = ResponseReader(False)
        self._paused = False
        self.kept_s = 0.0
        """Since when nobody uses it."""

    def take(self, call: EngineCall) -> None:
        """Send a request over it."""
        assert self._transport is not None
        self._call = call
        self._reader = ResponseReader(call.bodiless)
        call.wire = self
        call.sent_s = self.heard_s = now_s = self._wheel.now_s
        self.silence_s = call.silence_s
        if not 0 < self.slot <= (now_s + call.silence_s) / TICK_S + 1:
            self._wheel.watch(self)
        self._transport.write(call.data)
        if call.paused:
            self.pause()

    # For the wheel.

    def awaited(self) -> bool | None:
        return None if self._call is None else not self._call.paused

    def silent(self) -> None:
        if self._call is not None:
            self._call.lose(f"said nothing for {self.silence_s:g} s")

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

    def end(self, why: str) -> None:
        """Close it, whatever is under way."""
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
        self.heard_s = self._wheel.now_s
        reader = self._reader
        headless = not reader.status
        try:
            piece = reader.feed(data)
            if headless and reader.status:
                call.listener.head(reader.status, reader.headers)
            if piece and not call.over:
                call.listener.data(piece)
        except HttpRefusal as error:
            call.lose(f"does not speak HTTP ({error})")
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
        self._transport = None  # The wheel may know this one for a while.

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
        if untouched and self._calls.wheel.now_s - call.sent_s < STALE_S:
            self._calls.again(call)
        else:
            call.lose(f"{why} before its answer" if not reader.status else f"{why} in its answer")


def plain(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).lower()
