"""Requests that a web page of somebody else made: refused. Pure.

A browser sends what any page tells it to, also to a server on this machine. Without a key, two things tell such
requests from a client's: `Origin`, which a browser adds where something may change and no page can forge, and `Host`,
which holds the attacker's own name when that name was made to point here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from potluck.api.http_errors import HttpRefusal

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Nothing changes by them."""
ELSEWHERE = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Under which names a server is reached."""

    loopback: bool = True
    """It can only be reached from this machine."""
    names: frozenset[str] = frozenset()
    """Further ones, in lower case: the machine's, and those of `--allow-host`."""
    keyed: bool = False
    """Clients show a key, which no page of somebody else has."""

    def has(self, host: str) -> bool:
        if host in self.names or host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or not self.loopback  # An address cannot be made to point elsewhere.


def check_origin(method: str, headers: Mapping[str, str], served: ServedNames) -> None:
    """Raises for what a page of another origin sent."""
    host, origin = headers.get("Host"), headers.get("Origin")
    if host is not None and not served.keyed and (served.loopback or origin is not None):
        name = _name(host)
        if name is None or not served.has(name):
            line = "Host is no name of this server; use its address, or start it with --allow-host"
            raise HttpRefusal(403, line, "wrong_host")
    if method in SAFE:
        return
    page = None if origin is None else urlsplit(origin).netloc.lower()
    if page is not None and page != (host or "").lower() and _name(page) not in served.names:
        raise HttpRefusal(403, "pages of another origin may not use this server", "cross_origin")
    if page is None and headers.get("Sec-Fetch-Site") in ELSEWHERE:
        raise HttpRefusal(403, "pages of another origin may not use this server", "cross_origin")


def _name(host: str) -> str | None:
    """The host alone, of HOST or HOST:PORT; None where it is neither."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    return parts.hostname.rstrip(".") if plain and parts.hostname else None
