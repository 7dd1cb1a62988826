"""One connection: frames in and out, each with an end to its patience.

It belongs to one thread; others may only `wake` or `abort` it. A plain socket blocks in the kernel with a time limit,
so that a whole piece is one call without Python's lock; a TLS socket goes the usual way.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from math import inf

from potluck.core.errors import FormatError
from potluck.kv import checksum
from potluck.kv.chunks import Buffer
from potluck.kv.frames import PREFIX, FramePrefix, Message, frame, read_head, read_prefix
from potluck.kv.shared_memory import SharedSlots

_WAITALL = int(getattr(socket, "MSG_WAITALL", 0))
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)
"""How long the kernel may wait for an answer to what it sent; elsewhere its own patience is longer than ours."""
SOON_S = 0.1  # The least time for a connection to be made: when it is too late is found out elsewhere.
LOOKS = 5  # How often, within its patience, a connection that waits for data looks whether some came.
HERE_BYTES = 1 << 18
"""The kernel's buffers within one machine: what waits in small ones is still in the cache when it is copied out.
Between machines the kernel finds the size itself."""


class KvConnection:
    def __init__(self, connection: socket.socket, silence_s: float, key: int = 0) -> None:
        self.connection = connection
        self.key = key
        self.slots: SharedSlots | None = None
        """Memory shared with the other side, for as long as the connection lasts."""
        self.silence_s = silence_s
        self.peer = str(connection.getpeername()[0])
        self.here = bool(connection.getsockname()[0] == self.peer)
        self._secure = connection if isinstance(connection, ssl.SSLSocket) else None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.here:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HERE_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HERE_BYTES)
        if _USER_TIMEOUT is not None:
            connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(silence_s * 1000) or 1)
        if self._secure is not None:
            connection.settimeout(silence_s)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _limit(silence_s / LOOKS))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _limit(silence_s))
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._wake_receiver, select.POLLIN)
        self.woken = False  # Whether somebody woke it since this was last set to False.
        self.idle = False  # Whether it waits for something to do; for its owner's use.
        self.heard_s = -inf
        """When the other side last said something: bytes, not just the kernel's word that it is there."""
        self._receiving = False

    # What other threads may do.

    def last_heard_s(self, now_s: float) -> float:
        """While data is coming in, that is now: `receive` sees for itself whether it still does."""
        return now_s if self._receiving else self.heard_s

    def wake(self) -> None:
        try:
            self._wake_sender.send(b"!")
        except OSError:
            return  # It is full, so it wakes already; or the connection was closed.

    def abort(self) -> None:
        """Whatever the connection's thread is waiting for fails now."""
        shut(self.connection)

    # What its own thread does.

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        for one in (self.connection, self._wake_sender, self._wake_receiver):
            one.close()

    def linger(self, timeout_s: float) -> None:
        """Let the other side read what was said: to close with unread bytes here would cut it off."""
        deadline_s = time.monotonic() + timeout_s
        socket.socket.shutdown(self.connection, socket.SHUT_WR)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self.wait(left_s) and not self.connection.recv(1 << 16):
                return

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to read, before the time is over or somebody wakes it."""
        if self._secure is not None and self._secure.pending():
            return True
        readable = False
        for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._wake_receiver.fileno():
                self._wake_receiver.recv(4096)
                self.woken = True
            else:
                readable = True
        return readable

    def send(self, message: Message, data: Buffer | None = None) -> None:
        head = frame(message)
        if self._secure is not None:
            self._secure.sendall(head)
            if data is not None and len(data):
                self._secure.sendall(data)
            return
        if data is None or not len(data):
            sent, whole = self._send([head]), len(head)
        else:
            sent, whole = self._send([head, data]), len(head) + len(data)
        while sent < whole:
            rest: list[Buffer] = [head[sent:]] if sent < len(head) else []
            if data is not None:
                rest.append(memoryview(data)[max(0, sent - len(head)) :])
            sent += self._send(rest)

    def _send(self, buffers: list[Buffer]) -> int:
        try:
            return self.connection.sendmsg(buffers)
        except BlockingIOError as error:
            raise TimeoutError(f"took nothing for {self.silence_s:g} s") from error

    def read(self, within_s: float | None = None) -> tuple[Message, FramePrefix]:
        """The next frame but for its data. All of it must be there before long: a trickle is as bad as silence."""
        deadline_s = time.monotonic() + (self.silence_s if within_s is None else within_s)
        raw = self._read(PREFIX.size, deadline_s)
        prefix = read_prefix(raw)
        head = self._read(prefix.head_bytes, deadline_s) if prefix.head_bytes else b""
        return read_head(raw, prefix, head), prefix

    def _read(self, count: int, deadline_s: float) -> bytes:
        buffer = bytearray(count)
        view = memoryview(buffer)
        got = 0
        while got < count:
            try:
                recv = self._secure.recv_into(view[got:]) if self._secure else self._now(view[got:])
            except BlockingIOError:
                self._until_readable(deadline_s)
                continue
            if got + recv < count and time.monotonic() >= deadline_s:
                raise TimeoutError("says too little at a time")
            if not recv:
                raise ConnectionResetError("closed the connection")
            self.heard_s = time.monotonic()
            got += recv
        return bytes(buffer)

    def _now(self, into: memoryview) -> int:
        if not _DONTWAIT and not _readable(self.connection, 0.0):
            raise BlockingIOError
        return self.connection.recv_into(into, 0, _DONTWAIT)

    def _until_readable(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not _readable(self.connection, left_s):
            raise TimeoutError("said nothing for too long")

    def receive(self, into: memoryview) -> checksum.Sums:
        """A piece's data; whoever has a deadline for all of it aborts the connection."""
        self.heard_s = time.monotonic()
        self._receiving = True
        try:
            return self._receive(into)
        finally:
            self._receiving = False

    def _receive(self, into: memoryview) -> checksum.Sums:
        got = 0
        if self._secure is None and checksum.NATIVE:
            got, result = checksum.receive(self.connection, into)
            if got == len(into):
                self.heard_s = time.monotonic()
                return result
            if got:  # The last of it came a look ago, at the latest.
                self.heard_s = max(self.heard_s, time.monotonic() - self.silence_s / LOOKS)
        while got < len(into):
            try:
                recv = self.connection.recv_into(into[got:], 0, 0 if self._secure else _WAITALL)
            except BlockingIOError as error:
                if time.monotonic() - self.heard_s < self.silence_s:
                    continue
                raise TimeoutError(f"said nothing for {self.silence_s:g} s") from error
            if not recv:
                raise ConnectionResetError("closed the connection")
            self.heard_s = time.monotonic()
            got += recv
        return checksum.sums(into)


def connect(host: str, port: int, timeout_s: float, context: ssl.SSLContext | None) -> socket.socket:
    """A connection to another engine; with TLS both sides have shown who they are when this returns."""
    deadline_s = time.monotonic() + timeout_s
    plain = socket.create_connection((host, port), timeout=timeout_s)
    if context is None:
        return plain
    try:
        plain.settimeout(max(SOON_S, deadline_s - time.monotonic()))  # For all of the handshake.
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def shut(connection: socket.socket) -> None:
    """End a connection under TLS as well, from any thread: without a word."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # It was not connected any more.


def _readable(connection: socket.socket, within_s: float) -> bool:
    one = select.poll()
    one.register(connection, select.POLLIN)
    return bool(one.poll(within_s * 1000))


def _limit(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)


def expect(message: Message, *kinds: type) -> None:
    if not isinstance(message, kinds):
        raise FormatError("hand-over", f"has {type(message).__name__.lower()} where it cannot be")
