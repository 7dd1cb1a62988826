"""Hosts that say what they have, and measure how much goes over the network between them.

An agent (`potluck hosts serve`) runs on each. Who has the key asks all of them, and lets each send to each other for
a short while, one pair after the other, so that no two transfers share a cable:

    GET  /host                         what it is: GPUs as their driver names them, region, version
    POST /take      BYTES              reads them, says how many there were and how long they took to come
    POST /measure   {"to": URL}        sends to another's /take, and says what that said, and the round trip

Transfers grow until one takes a fifth of a second: a small one may pass in one burst, whatever the way carries.
"""

from __future__ import annotations

import hmac
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from typing import Any
from urllib.parse import urlsplit

from potluck.control.http_client import NO_ANSWER, HttpConnection, connection_to
from potluck.core.errors import FormatError, InputError, PotluckError

FIRST_BYTES, MOST_BYTES, PIECE_BYTES = 64 << 10, 1 << 30, 1 << 18
GROWTH, LASTS_S = 4, 0.2
ASK_S = 60.0
MOST_BODY_BYTES = 1 << 16
PINGS = 5


@dataclass(frozen=True, slots=True)
class HostReport:
    url: str
    name: str
    region: str
    gpus: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class HostLink:
    gbps: float
    rtt_ms: float


class HostClient:
    """Talks to agents; `tls` says whom to believe at https:// addresses."""

    def __init__(self, key: str, tls: ssl.SSLContext | None = None) -> None:
        self._key, self._tls = key, tls

    def host(self, url: str) -> HostReport:
        text = self._object(url, "GET", "/host")
        gpus = text.get("gpus", ())
        if not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
            raise FormatError(url, "does not say which GPUs it has")
        return HostReport(
            url, str(text.get("name")), str(text.get("region")), tuple(gpus), str(text.get("version"))
        )

    def measure(self, source: str, target: str) -> HostLink:
        return _way(self._object(source, "POST", "/measure", json.dumps({"to": target}).encode()), source)

    def send_to(self, url: str) -> HostLink:
        connection = self._connect(url)
        try:
            round_trips = []
            for _ in range(PINGS):
                began_s = time.monotonic()
                self._said(connection, url, "GET", "/host")
                round_trips.append(time.monotonic() - began_s)
            size, took_s = FIRST_BYTES, self._sent(connection, url, FIRST_BYTES)
            while took_s < LASTS_S and size < MOST_BYTES:
                size *= GROWTH
                took_s = self._sent(connection, url, size)
        finally:
            connection.close()
        return HostLink(size * 8e-9 / max(took_s, 1e-9), min(round_trips) * 1e3)

    def _sent(self, connection: HttpConnection, url: str, size: int) -> float:
        pieces = (bytes(min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))
        text = self._said(connection, url, "POST", "/take", pieces, size)
        took_s = text.get("took_s")
        if not isinstance(took_s, float) or text.get("bytes") != size:
            raise FormatError(url, "does not say what it took")
        return took_s

    def _object(self, url: str, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        connection = self._connect(url)
        try:
            return self._said(connection, url, method, path, body or None, len(body))
        finally:
            connection.close()

    def _connect(self, url: str) -> HttpConnection:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise InputError("HOST", f"must be like http://10.0.0.5:7300, is {url!r}")
        return connection_to(url, ASK_S, self._tls)

    def _said(
        self, connection: HttpConnection, url: str, method: str, path: str, body: Any = None, size: int = 0
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Length": str(size)}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read(MOST_BODY_BYTES)
            document = json.loads(text)
        except (*NO_ANSWER, ValueError) as error:
            raise InputError(url, f"does not answer as a host ({error})") from error
        if answer.status != 200 or not isinstance(document, dict):
            raise InputError(url, f"answered {answer.status}: {document}")
        return document


def _way(said: Mapping[str, Any], url: str) -> HostLink:
    gbps, rtt_ms = said.get("gbps"), said.get("rtt_ms")
    if not isinstance(gbps, float) or not isinstance(rtt_ms, float) or gbps <= 0:
        raise FormatError(url, "does not say what it measured")
    return HostLink(gbps, rtt_ms)


def matrix(host_client: HostClient, urls: Sequence[str]) -> dict[tuple[str, str], HostLink]:
    return {pair: host_client.measure(*pair) for pair in permutations(dict.fromkeys(urls), 2)}


class HostAgent(ThreadingHTTPServer):
    """Listens from the start; `serve_forever` runs it. `tls` is what it shows, and whom it believes."""

    daemon_threads = True

    def __init__(
        self,
        listen: tuple[str, int],
        about: Mapping[str, object],
        key: str,
        tls: tuple[ssl.SSLContext, ssl.SSLContext | None] | None = None,
    ) -> None:
        self.about, self.key = about, key
        self.asking = HostClient(key, None if tls is None else tls[1])
        self.busy = threading.Lock()  # Only one measurement at a time is worth anything.
        super().__init__(listen, Handler)
        if tls is not None:
            self.socket = tls[0].wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)


class Handler(BaseHTTPRequestHandler):
    server: HostAgent
    protocol_version = "HTTP/1.1"
    timeout = ASK_S

    def do_GET(self) -> None:
        self._answer(lambda: dict(self.server.about) if self.path == "/host" else None)

    def do_POST(self) -> None:
        work = {"/take": self._take, "/measure": self._measure}.get(self.path)
        self._answer(lambda: None if work is None else work())

    def _answer(self, work: Callable[[], dict[str, object] | None]) -> None:
        shown = self.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.server.key}".encode()):
            self.close_connection = True
            self._say(401, {"problem": "no key, or a wrong one"})
            return
        try:
            result = work()
        except (PotluckError, ValueError) as error:
            self.close_connection = True
            self._say(400, {"problem": str(error)[:200]})
            return
        self._say(200 if result is not None else 404, result or {"problem": "there is nothing here"})

    def _say(self, status: int, result: dict[str, object]) -> None:
        text = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _take(self) -> dict[str, object]:
        """From the first piece to the last: how long the way took, not how long it was waited for."""
        left = size = self._length(MOST_BYTES)
        began_s: float | None = None
        while left:
            got = len(self.rfile.read1(min(left, PIECE_BYTES)))
            if not got:
                raise FormatError("body", f"ended {left} bytes early")
            began_s = time.monotonic() if began_s is None else began_s
            left -= got
        took_s = time.monotonic() - (began_s or time.monotonic())
        return {"bytes": size, "took_s": took_s}

    def _measure(self) -> dict[str, object]:
        asked = json.loads(self.rfile.read(self._length(MOST_BODY_BYTES)))
        if not isinstance(asked, dict) or not isinstance(asked.get("to"), str):
            raise InputError("to", "must be another host's URL")
        with self.server.busy:
            way = self.server.asking.send_to(asked["to"])
        return {"gbps": way.gbps, "rtt_ms": way.rtt_ms}

    def _length(self, most: int) -> int:
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 <= size <= most:
            raise InputError("Content-Length", f"must be 0 to {most}")
        return size

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written down."""
