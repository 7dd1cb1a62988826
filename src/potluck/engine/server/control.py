"""Control: /, /status, /cache, /role, /pace, /network, /peers, /drain, /health, /metrics.

A role is changed at once: weights stay, and what runs runs on. It says what an engine is for, not what it can do:
segments are run whatever the role; a prefill engine answers no clients of its own (409 at /v1/...).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from importlib import resources

from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.core.errors import InputError
from potluck.core.values.kv_layout import peers_in, written
from potluck.engine.loop.engine_status import role_of
from potluck.engine.server.engine_metrics import CONTENT_TYPE
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import read_object
from potluck.kv.prefix_pool import as_json, place_in

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


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
