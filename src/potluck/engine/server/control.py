"""Control: /, /status, /cache, /role, /pace, /network, /peers, /grants, /drain, /health, /metrics.

A role is changed at once: weights stay, and what runs runs on. It says what an engine is for, not what it can do:
segments are run whatever the role; a prefill engine answers no clients of its own (409 at /v1/...).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from importlib import resources
from math import isfinite

from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.core.errors import FormatError, InputError
from potluck.core.values.kv_layout import MOST_PEERS, kv_address, peers_in, written
from potluck.engine.loop.engine_status import role_of
from potluck.engine.server.engine_metrics import CONTENT_TYPE
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import read_object
from potluck.kv.kv_sender import BandwidthGrant
from potluck.kv.prefix_pool import as_json, place_in

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
MOST_GRANTS = 256
GRANT_KEYS = {"link", "peers", "bytes_per_s"}
LONGEST_S, LONGEST_NAME = 3600.0, 500


async def page(_: web.Request) -> web.Response:
    """For a person; it holds no figures itself, but asks /status, with the key that its reader types in."""
    text = (resources.files("potluck.engine.server") / "data" / "page.html").read_text("utf-8")
    return web.Response(text=text, content_type="text/html", headers=PAGE_HEADERS)


async def status(request: web.Request) -> web.Response:
    return web.json_response(asdict(request.app[SERVICE].status()))


async def cache(request: web.Request) -> web.Response:
    """What changed in the prefix cache since a report, or all of it: `?epoch=E&after=N`."""
    service = request.app[SERVICE]
    epoch, after = place_in(request.query)
    reports = await service.hub.ask(lambda loop, _: service.feed.after(epoch, after))
    return web.json_response(
        {"epoch": service.feed.epoch, "reports": [as_json(report) for report in reports]}
    )


async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if service.problem:
        return web.json_response({"status": "failed", "problem": service.problem}, status=503)
    if service.draining:
        return web.json_response({"status": "draining"})
    if service.degraded:
        return web.json_response({"status": "degraded", "problem": service.degraded})
    return web.json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVICE].metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _only_keys(body: dict[str, object], keys: Collection[str], line: str) -> None:
    if unknown := body.keys() - keys:
        raise InputError(min(unknown), f"unknown key; {line}")


async def show_role(request: web.Request) -> web.Response:
    return web.json_response(_role_shown(request.app[SERVICE]))


async def change_role(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    body = await read_object(request)
    _only_keys(body, {"role"}, "there is only role")
    service.role = role_of(body.get("role"))
    return web.json_response(_role_shown(service))


def _role_shown(service: EngineService) -> dict[str, object]:
    report = service.status()
    return {"role": service.role, "running": report.running, "state": report.state}


async def change_pace(request: web.Request) -> web.Response:
    """`{"pace": 3}`: a mock engine takes three times as long from now on, as a sick GPU would."""
    return await _changed(request, "pace", (0.01, 100.0), request.app[SERVICE].change_pace)


async def change_network(request: web.Request) -> web.Response:
    """`{"gbps": 0.2}`: caches come to and leave a mock engine as over so thin a link from now on."""
    return await _changed(request, "gbps", (0.001, 10_000.0), request.app[SERVICE].change_network)


async def _changed(
    request: web.Request, name: str, bounds: tuple[float, float], change: Callable[[float], None] | None
) -> web.Response:
    body = await read_object(request)
    value = body.get(name)
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if set(body) != {name} or not bounds[0] <= number <= bounds[1]:
        raise InputError(name, f"is the only key, a number from {bounds[0]:g} to {bounds[1]:g}")
    if change is None:
        raise InputError(name, "can only be changed in a mock engine")
    change(number)
    return web.json_response({name: value})


async def drain(request: web.Request) -> web.Response:
    """Take nothing new; `{"resume": true}` takes requests again."""
    service = request.app[SERVICE]
    body = await read_object(request, optional=True)
    resume = body.get("resume", False)
    if set(body) - {"resume"} or not isinstance(resume, bool):
        raise InputError("resume", "is the only key, true or false")
    if resume and service.draining and service.ends_drained:
        raise HttpRefusal(409, "this engine ends once it is drained; another takes its place", "draining")
    service.draining = not resume
    report = service.status()
    return web.json_response({"state": report.state, "running": report.running, "waiting": report.waiting})


# Whom caches may be fetched from: what `--kv-from` says, and what was told by `PUT /peers`; nobody else. A segment
# names its sender and may come from anybody, so an engine connects only to addresses that whoever runs the fleet has
# told it; what it says about any other does not depend on whether somebody listens there.


async def show_peers(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.json_response(
        {"peers": sorted(map(str, service.peers)), "always": sorted(map(written, service.always))}
    )


async def change_peers(request: web.Request) -> web.Response:
    """The whole list, in place of the one before."""
    request.app[SERVICE].peers = peers_in(await read_object(request))
    return await show_peers(request)


# What this engine may send over which links, told by whoever sees all senders of a link. A grant holds for some
# seconds and is given again while it is meant: an engine that nobody tells anything sends as fast as it can.


async def show_grants(request: web.Request) -> web.Response:
    grants = [
        {"link": grant.link, "peers": sorted(grant.peers), "bytes_per_s": grant.bytes_per_s}
        for grant in request.app[SERVICE].connector.sender.grants
    ]
    return web.json_response({"grants": grants})


async def change_grants(request: web.Request) -> web.Response:
    """All of them, in place of those before: `{"grants": [{link, peers, bytes_per_s}], "lasts_s": 15}`."""
    body = await read_object(request)
    _only_keys(body, {"grants", "lasts_s"}, "there are grants and lasts_s")
    given = body.get("grants")
    if not isinstance(given, list):
        raise FormatError("grants", "must be a list")
    if len(given) > MOST_GRANTS:
        raise InputError("grants", f"at most {MOST_GRANTS}, got {len(given)}")
    now_s = time.monotonic()
    until_s = now_s + _number(body.get("lasts_s"), "lasts_s", LONGEST_S)
    grants = [_grant(grant, f"grants[{place}]", until_s) for place, grant in enumerate(given)]
    request.app[SERVICE].connector.sender.granted(grants, now_s)
    return await show_grants(request)


def _grant(given: object, where: str, until_s: float) -> BandwidthGrant:
    if not isinstance(given, dict) or given.keys() != GRANT_KEYS:
        raise FormatError(where, f"must have {', '.join(sorted(GRANT_KEYS))}, and nothing else")
    link, peers = given["link"], given["peers"]
    if not isinstance(link, str) or not 0 < len(link) <= LONGEST_NAME:
        raise InputError(f"{where}.link", f"must be a name of at most {LONGEST_NAME} characters")
    if not isinstance(peers, list) or not 0 < len(peers) <= MOST_PEERS:
        raise InputError(f"{where}.peers", f"must be a list of 1 to {MOST_PEERS} hosts")
    hosts = frozenset(host for peer in peers for host, _ in kv_address(peer, f"{where}.peers", port=0).stages)
    return BandwidthGrant(link, hosts, _number(given["bytes_per_s"], f"{where}.bytes_per_s", 1e15), until_s)


def _number(value: object, where: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InputError(where, "must be a number")
    if not 0 < value <= most:
        raise InputError(where, f"must be above 0 and at most {most:g}, is {value:g}")
    return float(value)
