"""Whom caches may be fetched from: what `--kv-from` says, and what was told by `PUT /peers`; nobody else.

A segment names its sender, and a segment may come from anybody. So an engine connects only to addresses that whoever
runs the fleet has told it; what it says about any other does not depend on whether somebody listens there.
"""

from __future__ import annotations

import ipaddress

from aiohttp import web

from potluck.core.errors import FormatError, InputError
from potluck.engine.server.control_bodies import read_object
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.kv.peer_connections import Address

MOST_PEERS = 4096
LONGEST_HOST = 253


def address_of(text: object, where: str, port: int | None = None) -> Address:
    """HOST:PORT, or a host alone where a port is given for it. An address has one way of being written."""
    if isinstance(text, str) and len(text) <= LONGEST_HOST + 8 and text.isprintable():
        host, colon, number = text.rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):
            host, number = text, "" if port is None else str(port)
        if number.isascii() and number.isdigit() and len(number) <= 5 and int(number) < 1 << 16:
            host = host.removeprefix("[").removesuffix("]").lower()
            if host and (port is not None or int(number)):
                return _one_way(host), int(number)
    shown = f", is {text!r}" if isinstance(text, str) and len(text) <= 80 else ""
    raise InputError(where, f"must be HOST:PORT{shown}")


def _one_way(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def written(address: Address) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}" if address[1] else host


async def show_peers(request: web.Request) -> web.Response:
    return web.json_response(_shown(request.app[SERVICE]))


async def change_peers(request: web.Request) -> web.Response:
    """The whole list, in place of the one before: `{"peers": ["10.0.0.5:9000", ...]}`."""
    service = request.app[SERVICE]
    body = await read_object(request)
    unknown = body.keys() - {"peers"}
    if unknown:
        raise InputError(min(unknown), "unknown key; there is only peers")
    given = body.get("peers")
    if not isinstance(given, list):
        raise FormatError("peers", "must be a list of HOST:PORT")
    if len(given) > MOST_PEERS:
        raise InputError("peers", f"at most {MOST_PEERS}, got {len(given)}")
    service.peers = frozenset(address_of(text, f"peers[{place}]") for place, text in enumerate(given))
    return web.json_response(_shown(service))


def _shown(service: EngineService) -> dict[str, object]:
    return {
        "peers": sorted(written(address) for address in service.peers),
        "always": sorted(written(address) for address in service.always),
    }
