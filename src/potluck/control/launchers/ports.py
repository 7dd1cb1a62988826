"""Ports of a machine that nobody listens on, and whether an engine answers at one."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

from potluck.core.errors import CapacityError, InputError

ASK_S = 1.0
LEASE_S = 60.0
"""In which whoever was given a port listens on it."""
TRIES = 50
LOOPBACK = "127.0.0.1"


class Ports:
    """Gives no port to two who do not listen yet."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._leased: dict[int, float] = {}

    def free(self, count: int = 1) -> int:
        """One that nobody listens on, and that was given to nobody lately; the first of so many in a row."""
        now_s = self._clock()
        self._leased = {port: until_s for port, until_s in self._leased.items() if until_s > now_s}
        for _ in range(TRIES):
            with socket.socket() as probe:
                probe.bind((self._host, 0))
                port = cast(int, probe.getsockname()[1])
            row = range(port, port + count)
            if not any(each in self._leased for each in row) and all(map(self._is_free, row[1:])):
                self._leased |= dict.fromkeys(row, now_s + LEASE_S)
                return port
        raise CapacityError("no port is free on this machine")

    def _is_free(self, port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind((self._host, port))
            except (OSError, OverflowError):
                return False
        return True


def taken(port: int) -> str:
    """Why nobody can listen on a port of the loopback address; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def must_be_free(port: int) -> None:
    if why := taken(port):
        raise InputError("--port", f"{port} cannot be used ({why}); say another, or 0 for a free one")


def free_port() -> int:
    """Any that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return cast(int, probe.getsockname()[1])


def next_free(first: int) -> int:
    """This one, or the next that nobody listens on; any where there is none soon."""
    return next((port for port in range(first, first + TRIES) if not taken(port)), None) or free_port()


def healthy(url: str, within_s: float = ASK_S, authority: str = "") -> bool:
    """Whether an engine says that it is well; at https:// it must show a certificate of that authority."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    connection = http.client.HTTPConnection(host, int(port), timeout=within_s)
    try:
        if scheme == "https":
            trusting = ssl.create_default_context(cafile=authority)
            connection = http.client.HTTPSConnection(host, int(port), timeout=within_s, context=trusting)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
