"""What this engine may send over which links: `PUT /grants`, told by whoever sees all senders of a link.

A grant holds for some seconds and is given again while it is meant: an engine that nobody tells anything sends as
fast as it can.
"""

from __future__ import annotations

import time
from math import isfinite

from aiohttp import web

from potluck.core.errors import FormatError, InputError
from potluck.engine.server.control_bodies import read_object
from potluck.engine.server.engine_service import SERVICE
from potluck.engine.server.kv_peers import MOST_PEERS, address_of
from potluck.kv.kv_sender import BandwidthGrant

MOST_GRANTS = 256
KEYS = {"link", "peers", "bytes_per_s"}
LONGEST_S = 3600.0
LONGEST_NAME = 500


async def show_grants(request: web.Request) -> web.Response:
    kv_connector = request.app[SERVICE].kv_connector
    assert kv_connector is not None
    return web.json_response({"grants": [_shown(grant) for grant in kv_connector.grants]})


async def change_grants(request: web.Request) -> web.Response:
    """All of them, in place of those before: `{"grants": [{link, peers, bytes_per_s}], "lasts_s": 15}`."""
    kv_connector = request.app[SERVICE].kv_connector
    assert kv_connector is not None
    body = await read_object(request)
    if unknown := body.keys() - {"grants", "lasts_s"}:
        raise InputError(min(unknown), "unknown key; there are grants and lasts_s")
    given = body.get("grants")
    if not isinstance(given, list):
        raise FormatError("grants", "must be a list")
    if len(given) > MOST_GRANTS:
        raise InputError("grants", f"at most {MOST_GRANTS}, got {len(given)}")
    now_s = time.monotonic()
    until_s = now_s + _number(body.get("lasts_s"), "lasts_s", LONGEST_S)
    kv_connector.granted(
        [_grant(each, f"grants[{place}]", until_s) for place, each in enumerate(given)], now_s
    )
    return await show_grants(request)


def _grant(given: object, where: str, until_s: float) -> BandwidthGrant:
    if not isinstance(given, dict) or given.keys() != KEYS:
        raise FormatError(where, f"must have {', '.join(sorted(KEYS))}, and nothing else")
    link, peers = given["link"], given["peers"]
    if not isinstance(link, str) or not 0 < len(link) <= LONGEST_NAME:
        raise InputError(f"{where}.link", f"must be a name of at most {LONGEST_NAME} characters")
    if not isinstance(peers, list) or not 0 < len(peers) <= MOST_PEERS:
        raise InputError(f"{where}.peers", f"must be a list of 1 to {MOST_PEERS} hosts")
    hosts = frozenset(address_of(each, f"{where}.peers", port=0)[0] for each in peers)
    return BandwidthGrant(link, hosts, _number(given["bytes_per_s"], f"{where}.bytes_per_s", 1e15), until_s)


def _number(value: object, where: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InputError(where, "must be a number")
    if not 0 < value <= most:
        raise InputError(where, f"must be above 0 and at most {most:g}, is {value:g}")
    return float(value)


def _shown(grant: BandwidthGrant) -> dict[str, object]:
    return {"link": grant.link, "peers": sorted(grant.peers), "bytes_per_s": grant.bytes_per_s}
