"""What all servers of HTTP here share: errors, ids, origins, TLS, connections, and JSON bodies read strictly."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import secrets
import ssl
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints
from urllib.parse import urlsplit

from potluck.core.codec import decode
from potluck.core.errors import CapacityError, FormatError, InputError, PotluckError, UnknownNameError


def open_files() -> float:
    """That this process may have, sockets among them; on some systems there is no such limit."""
    try:
        import resource
    except ModuleNotFoundError:
        return inf
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return inf if limit == resource.RLIM_INFINITY else limit


def allow_open_files() -> None:
    """As many as the system lets it have: each client, engine and cache on the move needs some."""
    with suppress(ModuleNotFoundError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpRefusal(PotluckError):
    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        self.status = status
        self.code = code
        self.param = param
        super().__init__(message)


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def refusal(error: Exception) -> HttpRefusal | None:
    line = " ".join(str(error).split())
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, UnknownNameError):
        return HttpRefusal(404, line, f"{error.field}_not_found", error.field)
    if isinstance(error, InputError):
        return HttpRefusal(400, line, None, error.field or None)
    if isinstance(error, CapacityError):
        return HttpRefusal(400, line, "context_length_exceeded")
    return None


def check_key(headers: Mapping[str, str], key: str) -> None:
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise HttpRefusal(401, "a valid key is needed: Authorization: Bearer ...", "invalid_api_key")


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Peer(Generic[K]):
    waiting: dict[K, None] = field(default_factory=dict)  # Oldest first.
    busy: int = 0


class ConnectionLimits(Generic[K]):
    """Open connections by peer, and which one to close when there is no room for a new one."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._peers: dict[str, _Peer[K]] = {}
        self._peer_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._peer_of))

    @property
    def is_full(self) -> bool:
        return len(self) >= self.most

    def add(self, key: K, peer: str) -> None:
        self._peer_of[key] = peer
        self._peers.setdefault(peer, _Peer()).waiting[key] = None

    def mark_waiting(self, key: K) -> None:
        """Its request was answered; it is now the last to be closed for a new connection."""
        name = self._peer_of.get(key)
        if name is not None:
            peer = self._peers[name]
            if key not in peer.waiting:
                peer.busy -= 1
                peer.waiting[key] = None

    def mark_busy(self, key: K) -> None:
        name = self._peer_of.get(key)
        if name is not None:
            peer = self._peers[name]
            if key in peer.waiting:
                del peer.waiting[key]
                peer.busy += 1

    def remove(self, key: K) -> None:
        name = self._peer_of.pop(key, None)
        if name is None:
            return
        peer = self._peers[name]
        if key in peer.waiting:
            del peer.waiting[key]
        else:
            peer.busy -= 1
        if not peer.waiting and not peer.busy:
            del self._peers[name]

    def longest_waiting(self) -> K | None:
        """The connection to close for a new one, of the peer with the most waiting connections."""
        crowded = max(self._peers.values(), key=lambda peer: len(peer.waiting), default=None)
        return next(iter(crowded.waiting), None) if crowded is not None else None


SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
ELSEWHERE = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True, slots=True)
class ServedNames:
    loopback: bool = True
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


_ABSOLUTE_TARGET = re.compile(
    r"https?://(?P<authority>[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]+)(?P<path>/[!-\"$->@-~]*)?(?:\?(?P<query>[!-\"$-~]*))?",
    re.ASCII | re.IGNORECASE,
)


def absolute_target(method: str, target: str) -> tuple[str, str, str] | None:
    """Authority, path and query of a request target in absolute form (RFC 9112, section 3.2.2); None for others.

    The authority takes the place of the Host header. Userinfo is refused, as RFC 9110, section 4.2.4 advises.
    """
    match = None if method == "CONNECT" else _ABSOLUTE_TARGET.fullmatch(target)
    if match is None or _name(match["authority"]) is None:
        return None
    query = match["query"]
    # Without path and query OPTIONS is about the server as a whole (RFC 9110, section 4.2.3).
    empty = "*" if method == "OPTIONS" and query is None else "/"
    return match["authority"], match["path"] or empty, query or ""


HEADER = "x-request-id"
GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


WORD_CHARS = 24
_words: list[str] = []
os.register_at_fork(after_in_child=_words.clear)  # a process and its forks must not give the same ones


def random_word() -> str:
    """Nobody can guess it: 96 bits, drawn from the system many at a time, since each draw costs a call of it."""
    if not _words:
        drawn = secrets.token_hex(WORD_CHARS * 64)
        _words.extend(drawn[place : place + WORD_CHARS] for place in range(0, len(drawn), WORD_CHARS))
    return _words.pop()


def request_id(given: str | None) -> str:
    return given if given is not None and GOOD.fullmatch(given) else f"req-{random_word()}"


def server_tls(certificate: Path, key: Path, field: str = "--tls") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(field, f"{certificate} and {key} cannot be used ({error})") from error
    return context


def client_tls(authority: Path, field: str) -> ssl.SSLContext:
    """Servers must show a certificate of this authority, for the name they were asked by."""
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise InputError(field, f"{authority} cannot be used ({error})") from error


T = TypeVar("T")
HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes) -> dict[str, object]:
    from pydantic_core import from_json  # here: kernels are checked on machines that have no pydantic

    try:
        result = from_json(raw, allow_inf_nan=False)  # pydantic's: a quarter of the time of the standard one
    except ValueError as error:
        if HALF.search(raw) and "escape" in str(error):
            raise FormatError("body", "has half a character, such as \\ud800 alone") from error
        raise FormatError("body", f"is not JSON ({str(error)[:120]})") from error
    if not isinstance(result, dict):
        raise FormatError("body", "must be a JSON object")
    return result


def shaped(kind: type[T], body: dict[str, object]) -> T:
    plain, required = _plain_fields(cast(Any, kind))
    for name, value in body.items():
        wanted = plain.get(name)
        if type(value) is not wanted or (wanted is float and not isfinite(cast(float, value))):
            break
    else:
        if required <= body.keys():
            return kind(**body)  # what the codec would make of it, in a tenth of the time
    values = {key: value for key, value in body.items() if value is not None}
    if "type" in values:
        raise FormatError("type", "unknown key")
    return decode(kind, values)


@lru_cache(maxsize=64)
def _plain_fields(kind: type) -> tuple[dict[str, type], frozenset[str]]:
    hints, result, required = get_type_hints(kind), {}, set()
    for item in fields(cast(Any, kind)):
        hint = hints[item.name]
        kinds = [one for one in (get_args(hint) or (hint,)) if one is not type(None)]
        if len(kinds) == 1 and kinds[0] in (str, int, float, bool):
            result[item.name] = kinds[0]
        if item.default is MISSING and item.default_factory is MISSING:
            required.add(item.name)
    return result, frozenset(required)


def tokens_of(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise FormatError(where, "must be a list of token numbers")
    return tuple(value)


def compact(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
