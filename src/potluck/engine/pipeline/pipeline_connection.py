"""Messages between the processes of a pipeline: frames over TCP, with a deadline on every wait.

    frame    magic, 4 bytes | head length, 4 bytes | body length, 8 bytes | head | body       (little-endian)

The head is a message of `pipeline_messages.py` in JSON, read strictly; the body is plain bytes: numbers or tensors,
whose format the head says. Nothing is ever unpickled. Both lengths are capped before anything is read.

Who connects and who listens prove to each other that they know the pipeline's secret, without sending it:

    listener   ──▶  a random challenge c
    connector  ──▶  HMAC(secret, "connector" c), a random challenge d, who it is
    listener   ──▶  HMAC(secret, "listener" d)

With TLS all of it is inside a connection for which both sides showed certificates of one authority, the listener's
for the host that was asked for. Without it frames are neither encrypted nor signed after the greeting: the network
between the stages must then be one's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import PotluckError
from potluck.kv.peer_connections import client_context, server_context

MAGIC = b"PLP1"
HEADER = struct.Struct("<4sIQ")
CHALLENGE_BYTES = 32
MOST_HEAD_BYTES = 8 << 20
MOST_BODY_BYTES = 1 << 30
MOST_GREETING_BYTES = 512  # Of a frame from somebody who has not proved anything yet.
GREETING_S = 10.0
FRAME_S = 30.0  # A frame that has begun must be over by then.

Bytes = bytes | bytearray | memoryview


class LinkError(PotluckError):
    """The other side is gone, late, or does not speak as it should."""


class PipelineConnection:
    """A socket that carries frames. One thread may receive while others send."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = sock
        self._sending = threading.Lock()
        self._tls = threading.Lock() if isinstance(sock, ssl.SSLSocket) else None
        """TLS has one state for both ways, which one thread at a time may use; nobody waits while holding it."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)

    def send(self, head: Bytes, bodies: Sequence[Bytes] = (), within_s: float = FRAME_S) -> None:
        pieces = [memoryview(piece).cast("B") for piece in bodies]
        size = sum(map(len, pieces))
        if len(head) > MOST_HEAD_BYTES or size > MOST_BODY_BYTES:
            raise LinkError(f"{self.peer}: a message of {len(head)} + {size} bytes is too large to send")
        left = [memoryview(HEADER.pack(MAGIC, len(head), size) + bytes(head)), *(p for p in pieces if len(p))]
        deadline = time.monotonic() + within_s
        with self._sending:
            while left:
                sent = self._send_some(left, deadline)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left and sent:
                    left[0] = left[0][sent:]

    def _send_some(self, left: list[memoryview], deadline_s: float) -> int:
        while True:
            try:
                if self._tls is None:
                    return self._socket.sendmsg(left[:64])
                with self._tls:
                    return self._socket.send(left[0])
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline_s)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, deadline_s)
            except OSError as error:
                raise LinkError(f"{self.peer}: {_reason(error)}") from error

    def receive(
        self,
        idle_s: float | None = None,
        most_head_bytes: int = MOST_HEAD_BYTES,
        most_body_bytes: int = MOST_BODY_BYTES,
    ) -> tuple[bytes, bytearray]:
        """The next frame, which must begin within `idle_s` (None: whenever; a dead line is found by the system)."""
        header = bytearray(HEADER.size)
        self._fill(memoryview(header)[:1], None if idle_s is None else time.monotonic() + idle_s)
        deadline = time.monotonic() + FRAME_S
        self._fill(memoryview(header)[1:], deadline)
        magic, head_bytes, body_bytes = HEADER.unpack(header)
        if magic != MAGIC:
            raise LinkError(f"{self.peer}: does not speak this protocol")
        if head_bytes > most_head_bytes or body_bytes > most_body_bytes:
            raise LinkError(f"{self.peer}: a message of {head_bytes} + {body_bytes} bytes is too large")
        head, body = bytearray(head_bytes), bytearray(body_bytes)
        self._fill(memoryview(head), deadline)
        self._fill(memoryview(body), deadline)
        return bytes(head), body

    def _fill(self, into: memoryview, deadline_s: float | None) -> None:
        while len(into):
            try:
                if self._tls is None:
                    count = self._socket.recv_into(into)
                else:
                    with self._tls:
                        count = self._socket.recv_into(into)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, deadline_s)
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline_s)
                continue
            except OSError as error:
                raise LinkError(f"{self.peer}: {_reason(error)}") from error
            if not count:
                raise LinkError(f"{self.peer}: closed the connection")
            into = into[count:]

    def _wait(self, event: int, deadline_s: float | None) -> None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            poll = select.poll()
            poll.register(self._socket, event)
            ready = poll.poll() if left_s is None else left_s > 0 and poll.poll(left_s * 1e3 + 1)
        except (OSError, ValueError) as error:
            raise LinkError(f"{self.peer}: the connection was closed") from error
        if not ready:
            raise LinkError(f"{self.peer}: did not answer in time")

    def close(self) -> None:
        """Ends what other threads wait for, too."""
        with contextlib.suppress(OSError):
            # Under TLS too without a word: another thread may be using its state.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()


def _keep_alive(sock: socket.socket) -> None:
    """A machine that vanishes without a word is noticed within half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # What Linux calls KEEPIDLE is KEEPALIVE on a Mac.
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in ((idle, 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class TlsPair:
    """What TLS needs of both sides: each shows a certificate of the same authority."""

    listens: ssl.SSLContext
    connects: ssl.SSLContext

    @staticmethod
    def of(certificate: Path, key: Path, authority: Path) -> TlsPair:
        return TlsPair(
            server_context(certificate, key, authority), client_context(certificate, key, authority)
        )


def connect(
    address: tuple[str, int], secret: bytes, who: str, peer: str, tls: TlsPair | None = None
) -> PipelineConnection:
    """A connection to a listener that knows the secret, from one that says who it is."""
    try:
        sock = socket.create_connection(address, timeout=GREETING_S)
    except OSError as error:
        raise LinkError(f"{peer}: cannot connect to {address[0]}:{address[1]} ({_reason(error)})") from error
    if tls is not None:
        sock = _shaken(sock, peer, lambda plain: tls.connects.wrap_socket(plain, server_hostname=address[0]))
    connection = PipelineConnection(sock, peer)
    try:
        _, challenge = connection.receive(GREETING_S, 0, CHALLENGE_BYTES)
        own = secrets.token_bytes(CHALLENGE_BYTES)
        name = json.dumps(who).encode()
        connection.send(name, [_proof(secret, b"connector", bytes(challenge)), own], GREETING_S)
        _, proof = connection.receive(GREETING_S, 0, CHALLENGE_BYTES)
        if not hmac.compare_digest(bytes(proof), _proof(secret, b"listener", own)):
            raise LinkError(f"{peer}: does not know the pipeline's secret")
    except LinkError:
        connection.close()
        raise
    return connection


def _shaken(plain: socket.socket, peer: str, wrap: Callable[[socket.socket], socket.socket]) -> socket.socket:
    """The same connection under TLS, once both sides have shown who they are."""
    try:
        plain.settimeout(GREETING_S)
        return wrap(plain)
    except OSError as error:
        plain.close()
        raise LinkError(
            f"{peer}: TLS was not agreed on ({_reason(error)}); do both sides have it, and certificates for "
            "their addresses?"
        ) from error


def welcome(
    sock: socket.socket, secret: bytes, peer: str, tls: TlsPair | None = None
) -> tuple[PipelineConnection, str]:
    """The listener's part: a connection and who it comes from, or an error and a closed socket."""
    if tls is not None:
        sock = _shaken(sock, peer, lambda plain: tls.listens.wrap_socket(plain, server_side=True))
    connection = PipelineConnection(sock, peer)
    try:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.send(b"", [challenge], GREETING_S)
        head, body = connection.receive(GREETING_S, MOST_GREETING_BYTES, 2 * CHALLENGE_BYTES)
        proof, theirs = bytes(body[:CHALLENGE_BYTES]), bytes(body[CHALLENGE_BYTES:])
        if not hmac.compare_digest(proof, _proof(secret, b"connector", challenge)) or not theirs:
            raise LinkError(f"{peer}: does not know the pipeline's secret")
        try:
            who: object = json.loads(head)
        except ValueError:
            who = None
        if not isinstance(who, str):
            raise LinkError(f"{peer}: does not say who it is")
        connection.send(b"", [_proof(secret, b"listener", theirs)], GREETING_S)
    except LinkError:
        connection.close()
        raise
    connection.peer = who
    return connection, who


def _proof(secret: bytes, side: bytes, challenge: bytes) -> bytes:
    return hmac.new(secret, side + challenge, hashlib.sha256).digest()
