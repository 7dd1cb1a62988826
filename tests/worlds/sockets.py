"""Sockets that block, on a world's network, for code that has threads; and what can befall the bytes on them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from potluck.engine.loop import loop_thread
from potluck.engine.mock import mock_transfer
from potluck.engine.server import engine_app, kv_connector
from potluck.kv import checksum, fetch, kv_connection, kv_sender, peer_connections
from worlds import virtual
from worlds.loop import Listener, ListeningSocket, Socket, WorldLoop
from worlds.threads import Pool, Waiters, may_switch, threads, wait_for

KERNEL_BYTES = 65_536  # Of what was received and nobody has read.
_numbers = itertools.count(1_000_000)


@dataclass
class Wire:
    """How likely something befalls what arrives at a blocking socket, and how often it did."""

    flip: float = 0.0  # A byte is another.
    cut: float = 0.0  # A part arrives, then both ends are reset.
    stall: float = 0.0  # Nothing more comes over this connection.
    harmed: int = 0


class BlockingSocket(asyncio.Protocol):
    """One end of a connection, between hosts or (`pair`) within a process."""

    transport: Socket | None = None
    peer: BlockingSocket | None = None

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended = self._paused = self._stalled = self._shut = self._lost = False
        self._error: Exception | None = None
        self._readers, self._writers = Waiters(), Waiters()
        self._timeout_s: float | None = None
        self._limits_s: dict[int, float] = {}
        self._number = next(_numbers)

    # What the network tells.

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(0)
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        loop = self.transport.network.loop
        wire, chance = loop.wires.get(self.transport.process.host.name), loop.chance
        if wire is not None and (luck := chance.random()) < wire.flip + wire.cut + wire.stall:
            wire.harmed += 1
            at = chance.randrange(len(data))
            if luck < wire.flip:
                data = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
                loop.told("wire", "flip", f"{self.getsockname()[0]} byte {at} of {len(data)}")
            elif luck < wire.flip + wire.cut:
                loop.told("wire", "cut", f"{self.getsockname()[0]} at {at} of {len(data)}")
                data = data[:at]
                self.transport._reset()
                self.transport.peer._reset()
            else:
                loop.told("wire", "stall", f"{self.getsockname()[0]} at {at} of {len(data)}")
                data = data[:at]
                for end in (self.transport, self.transport.peer):  # acknowledgements are lost with the rest
                    end.pause_reading()
                    end.protocol._stalled = True
        self._data += data
        if len(self._data) > KERNEL_BYTES:
            self.transport.pause_reading()
        self._readers.wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._readers.wake()
        return True  # This side may still write.

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = self._lost = True
        self._error = exc
        self._readers.wake()
        self._writers.wake()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._writers.wake()

    # What its owner asks.

    def readable(self) -> bool:
        return bool(self._data) or self._ended

    def recv(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, into: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        may_switch()
        limit_s = self._limits_s.get(socket.SO_RCVTIMEO) if self._timeout_s is None else self._timeout_s
        if flags & socket.MSG_DONTWAIT:
            limit_s = 0.0
        got = 0
        while got < len(into):
            if not self.readable():
                if got and not flags & socket.MSG_WAITALL:
                    break
                if not wait_for(self.readable, [self._readers], limit_s):
                    if got:
                        break
                    raise TimeoutError("timed out") if self._timeout_s else BlockingIOError(errno.EAGAIN, "")
            if not self._data:
                if self._error is not None and not got:
                    error, self._error = self._error, None
                    raise error
                break
            part = self._data[: len(into) - got]
            into[got : got + len(part)] = part
            del self._data[: len(part)]
            got += len(part)
            if self.transport is not None and not self._stalled and len(self._data) <= KERNEL_BYTES // 2:
                self.transport.resume_reading()
        return got

    def send(self, data: Any) -> int:
        if self.transport is not None:
            return self.sendmsg([data])
        if self.peer is None or self.peer._number < 0:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        self.peer._data += data
        self.peer._readers.wake()
        return len(data)

    def sendmsg(self, buffers: list[Any]) -> int:
        may_switch()
        data, sent = b"".join(buffers), 0
        limit_s = self._limits_s.get(socket.SO_SNDTIMEO) if self._timeout_s is None else self._timeout_s
        while sent < len(data):
            if not wait_for(lambda: not self._paused or self._lost or self._shut, [self._writers], limit_s):
                if sent:
                    break
                raise TimeoutError("timed out") if self._timeout_s else BlockingIOError(errno.EAGAIN, "")
            if self._lost or self._shut or self.transport is None or self.transport.is_closing():
                raise BrokenPipeError(errno.EPIPE, "broken pipe")
            self.transport.write(data[sent : sent + KERNEL_BYTES])
            sent += len(data[sent : sent + KERNEL_BYTES])
        return sent

    def shutdown(self, how: int) -> None:
        if self.transport is None or self._lost:
            raise OSError(errno.ENOTCONN, "not connected")
        self._shut = True
        self.transport.write_eof()
        self._writers.wake()
        if how == socket.SHUT_RDWR:
            self._ended = True
            self._readers.wake()

    def close(self) -> None:
        if self._number < 0:
            return
        self._number = -1
        if self.transport is not None:
            unread = self._data or self.transport.inbox
            (self.transport.abort if unread else self.transport.close)()

    def getpeername(self) -> Any:
        if self.transport is None or self._lost:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.transport.peer.address

    def getsockname(self) -> Any:
        return ("", 0) if self.transport is None else self.transport.address

    def fileno(self) -> int:
        return self._number

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if level == socket.SOL_SOCKET and isinstance(value, bytes):
            whole, micro = struct.unpack("ll", value)
            self._limits_s[name] = whole + micro * 1e-6

    def getsockopt(self, *_: object) -> bytes:
        return b""


class ServerSocket(ListeningSocket):
    def __init__(self, address: tuple[str, int], **_: object) -> None:
        super().__init__(address[:2])
        process = virtual.running()
        assert process is not None
        if process.loop.network.listeners.get(self.address):
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._queue: deque[BlockingSocket] = deque()
        self._waiting = Waiters()
        self._timeout_s: float | None = None
        process.loop.network.held.pop(self.address, None)
        self._listener = Listener(process.loop.network, process, self._made, self)

    def _made(self) -> BlockingSocket:
        made = BlockingSocket()
        self._queue.append(made)
        self._waiting.wake()
        return made

    def accept(self) -> tuple[BlockingSocket, Any]:
        if not wait_for(lambda: self._queue, [self._waiting], self._timeout_s):
            raise TimeoutError("timed out")
        made = self._queue.popleft()
        assert made.transport is not None
        made.transport.resume_reading()
        return made, made.transport.peer.address

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> ServerSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_connection(address: tuple[str, int], timeout: float | None = None) -> BlockingSocket:
    process, waiting = virtual.running(), Waiters()
    assert process is not None
    loop = process.loop
    made: asyncio.Future[Socket] = loop.create_future()
    made.add_done_callback(lambda _: waiting.wake())
    loop.network.connect(process, address, made)
    if not wait_for(made.done, [waiting], timeout):
        made.cancel()
        raise TimeoutError("timed out")
    end = made.result()
    result = end.protocol = BlockingSocket()
    result.connection_made(end)
    end.resume_reading()
    return result


def pair() -> tuple[BlockingSocket, BlockingSocket]:
    one, other = BlockingSocket(), BlockingSocket()
    one.peer, other.peer = other, one
    return one, other


class Poll:
    def __init__(self) -> None:
        self._sockets: list[BlockingSocket] = []

    def register(self, item: BlockingSocket, mask: int) -> None:
        self._sockets.append(item)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        may_switch()
        watched = [item._readers for item in self._sockets]
        wait_for(lambda: any(item.readable() for item in self._sockets), watched, timeout_ms / 1000)
        return [(item.fileno(), select.POLLIN) for item in self._sockets if item.readable()]


def _listening_socket(address: tuple[str, int], **_: object) -> ListeningSocket:
    """For a server of the event loop; the network keeps connections that wait for one."""
    process = virtual.running()
    assert process is not None
    if process.loop.network.listeners.get(address[:2]):
        raise OSError(errno.EADDRINUSE, "Address already in use")
    return process.loop.network.held.pop(address[:2], None) or ListeningSocket(address[:2])


def _run_in_executor(self: WorldLoop, executor: object, func: Any, *args: Any) -> Any:
    if isinstance(executor, Pool):
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)
    return _inline(self, executor, func, *args)


_inline = WorldLoop.run_in_executor


def install() -> None:
    """The names that the engine's modules with threads use, and what its HTTP server asks of a loop."""
    fake = ModuleType("socket")
    fake.__dict__.update(vars(socket))
    fake.create_server, fake.create_connection = ServerSocket, create_connection  # type: ignore[attr-defined]
    fake.socket, fake.socketpair = BlockingSocket, pair  # type: ignore[attr-defined]
    modules: list[Any] = [kv_sender, kv_connection, peer_connections, fetch, kv_connector, loop_thread]
    asynchronous = ModuleType("socket")
    asynchronous.__dict__.update(vars(socket))
    asynchronous.create_server = _listening_socket  # type: ignore[attr-defined]
    engine_app.socket = asynchronous  # type: ignore[attr-defined]
    for module in (*modules, mock_transfer):
        if hasattr(module, "threading"):
            module.threading = threads
        if hasattr(module, "socket"):
            module.socket = fake
    kv_connection.select = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN)  # type: ignore[attr-defined]
    kv_connector.ThreadPoolExecutor = Pool  # type: ignore[misc, assignment]
    checksum.NATIVE = False  # It would read the kernel's sockets itself.
    WorldLoop.run_in_executor = _run_in_executor  # type: ignore[method-assign]
