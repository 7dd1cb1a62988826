"""What a request says of its hand-overs, in `kv_transfer_params`:

    {"potluck": {"request": "r1",
                 "give": {"handle": H, "stop": 70, "codec": "raw", "lasts_s": 120.0},
                 "take": {"kv": "10.0.0.5:9000", "handle": H, "stop": 70, "within_s": 60.0}}}

`give`: KV of the tokens [0, stop) can be fetched here under the handle. `take`: that of [0, stop) comes from there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.kv.codec_layout import CODEC_IDS, Codec
from potluck.kv.handles import checked_handle
from potluck.kv.peer_connections import Address

KEY = "potluck"
MOST_S = 3600.0


@dataclass(frozen=True, slots=True)
class SendParams:
    handle: str
    stop: int
    codec: Codec = "raw"
    lasts_s: float = 120.0

    def __post_init__(self) -> None:
        checked_handle(self.handle)
        if self.codec not in CODEC_IDS:
            raise InputError("give.codec", f"must be one of {', '.join(CODEC_IDS)}, is {self.codec!r}")
        _require("give.stop", self.stop, 1)
        _require("give.lasts_s", self.lasts_s, 0, MOST_S)


@dataclass(frozen=True, slots=True)
class FetchParams:
    kv: str
    handle: str
    stop: int
    within_s: float = 120.0

    def __post_init__(self) -> None:
        checked_handle(self.handle)
        address_of(self.kv)
        _require("take.stop", self.stop, 1)
        _require("take.within_s", self.within_s, 0, MOST_S)


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What becomes of one request's KV."""

    request: str
    """As whoever planned the route calls it; vLLM's own name is another."""
    give: SendParams | None = None
    take: FetchParams | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.request) <= 200:
            raise InputError("request", "must be a name of 1 to 200 characters")
        if self.give and self.take and self.take.stop >= self.give.stop:
            raise InputError("take.stop", f"must be below give.stop, {self.give.stop}")


def moves_of(params: Mapping[str, object] | None) -> TransferParams | None:
    """What a request's `kv_transfer_params` say; None where they say nothing to us."""
    found = (params or {}).get(KEY)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise FormatError(KEY, "must be an object with request, give, take")
    body = {key: value for key, value in found.items() if value is not None}
    for key, kind in (("give", "SendParams"), ("take", "FetchParams")):
        if isinstance(body.get(key), dict):
            body[key] = {"type": kind, **body[key]}
    return decode(TransferParams, body)


def address_of(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]").lower()
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise InputError("kv", f"must be HOST:PORT, is {text[:80]!r}")
    with suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host, int(port)


def _require(field: str, value: float, least: float, most: float | None = None) -> None:
    if isinstance(value, bool) or value < least or (most is not None and value > most):
        raise InputError(field, f"must be at least {least:g}{f' and at most {most:g}' if most else ''}")
