"""Control: /status, /cache, /role, /pace, /network, /drain, /health, /metrics.

A role is changed in two steps, after CAUCHY: `init` says which role comes next, `activate` takes it on, `show` tells,
`stop` goes back to mixed. A body with only a role does both steps. Weights stay, and what runs runs on. A role
says what an engine is for, not what it can do: segments are run as they are asked for, whatever the role; a prefill
engine answers no clients of its own (409 at /v1/...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.core.errors import InputError
from potluck.engine.loop.engine_status import role_of
from potluck.engine.server.control_bodies import read_object
from potluck.engine.server.engine_metrics import CONTENT_TYPE
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.kv.prefix_pool import as_json, place_in

ACTIONS = ("init", "activate", "show", "stop")


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
    body = request.app[SERVICE].metrics.text()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def show_role(request: web.Request) -> web.Response:
    return web.json_response(_shown(request.app[SERVICE]))


async def change_role(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    body = await read_object(request, optional=True)
    unknown = set(body) - {"action", "role"}
    if unknown:
        raise InputError(min(unknown), "unknown key; a change of role has action and role")
    action = body.get("action")
    if action is None:
        service.role, service.next_role = role_of(body.get("role")), None
    elif action == "init":
        service.next_role = role_of(body.get("role"))
    elif action == "activate":
        if service.next_role is None:
            raise InputError("action", "nothing to activate; init a role first")
        service.role, service.next_role = service.next_role, None
    elif action == "stop":
        service.role, service.next_role = "mixed", None
    elif action != "show":
        raise InputError("action", f"must be one of {', '.join(ACTIONS)}")
    return web.json_response(_shown(service))


def _shown(service: EngineService) -> dict[str, object]:
    report = service.status()
    return {"role": service.role, "next": service.next_role, "running": report.running, "state": report.state}


async def change_pace(request: web.Request) -> web.Response:
    """`{"pace": 3}`: an engine that pretends takes three times as long from now on, as a sick GPU would."""
    return await _changed(request, "pace", (0.01, 100.0), request.app[SERVICE].change_pace)


async def change_network(request: web.Request) -> web.Response:
    """`{"gbps": 0.2}`: caches come to and leave an engine that pretends as over so thin a link from now on."""
    return await _changed(request, "gbps", (0.001, 10_000.0), request.app[SERVICE].change_network)


async def _changed(
    request: web.Request, name: str, bounds: tuple[float, float], change: Callable[[float], None] | None
) -> web.Response:
    """A number that an engine which pretends goes by from now on."""
    body = await read_object(request)
    value = body.get(name)
    if (
        set(body) != {name}
        or type(value) not in (int, float)
        or not bounds[0] <= float(str(value)) <= bounds[1]
    ):
        raise InputError(name, f"is the only key, a number from {bounds[0]:g} to {bounds[1]:g}")
    if change is None:
        raise InputError(name, "can only be changed where an engine pretends")
    change(float(str(value)))
    return web.json_response({name: value})


async def drain(request: web.Request) -> web.Response:
    """Take nothing new; `{"resume": true}` takes requests again."""
    service = request.app[SERVICE]
    body = await read_object(request, optional=True)
    if set(body) - {"resume"} or not isinstance(body.get("resume", False), bool):
        raise InputError("resume", "is the only key, true or false")
    resume = body.get("resume", False)
    if resume and service.draining and service.ends_drained:
        raise HttpRefusal(409, "this engine ends once it is drained; another takes its place", "draining")
    service.draining = not resume
    report = service.status()
    return web.json_response({"state": report.state, "running": report.running, "waiting": report.waiting})
