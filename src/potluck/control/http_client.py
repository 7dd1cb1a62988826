"""The blocking HTTP client of controller and commands: the standard library's, one connection per call."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

HttpConnection = http.client.HTTPConnection
HttpAnswer = http.client.HTTPResponse
NO_ANSWER = (OSError, http.client.HTTPException)


def connection_to(url: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> HttpConnection:
    """Not connected yet. `tls` says whom to trust at an https:// address; None: as the machine does."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_s, context=tls)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


class HttpClient:
    """Calls one server, whose URL may end with a path.

    `key` returns the API key for each call; `away` makes the error for a server that does not answer.
    """

    def __init__(
        self,
        url: str,
        key: Callable[[], str | None],
        tls: ssl.SSLContext | None,
        away: Callable[[Exception], Exception],
    ) -> None:
        self.url, self._key, self._tls, self._away = url.rstrip("/"), key, tls, away

    @contextmanager
    def call(self, method: str, path: str, timeout_s: float, body: object = None) -> Iterator[HttpAnswer]:
        headers: dict[str, str] = {"Accept": "application/json", "Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        connection = connection_to(self.url, timeout_s, self._tls)
        target = urlsplit(self.url).path + path
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            yield connection.getresponse()
        except NO_ANSWER as error:
            raise self._away(error) from error
        finally:
            connection.close()


def answers_well(url: str, path: str, timeout_s: float, authority: str = "") -> bool:
    """Whether a server answers 200; at https:// it must show a certificate of that authority."""
    try:
        tls = ssl.create_default_context(cafile=authority) if url.startswith("https://") else None
        if not urlsplit(url).hostname or not urlsplit(url).port:
            return False
        connection = connection_to(url, timeout_s, tls)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (*NO_ANSWER, ValueError):
        return False
