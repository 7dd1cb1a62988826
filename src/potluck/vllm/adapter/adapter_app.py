"""The routes: segments and control as every engine has them; /v1/... goes to vLLM as it came."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from http import HTTPStatus

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from potluck.api import http
from potluck.core.errors import FormatError, InputError
from potluck.core.values.kv_layout import kv_address, written
from potluck.kv.prefix_pool import as_json, place_in
from potluck.vllm.adapter.adapter_segments import segments
from potluck.vllm.adapter.adapter_service import ROLES, SERVICE, AdapterService

MOST_PEERS = 4096
OPEN = frozenset({"/health"})
PASSED = ("content-type", "authorization", "accept")
BODY_S = 30.0

log = logging.getLogger(__name__)


def build(service: AdapterService, api_key: str | None, served: http.ServedNames) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            http.check_origin(request.method, request.headers, served)
            if api_key is not None and request.path not in OPEN:
                _check_key(request, api_key)
            return await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return error_response(error)

    app = web.Application(middlewares=[guard], client_max_size=service.limits.body_bytes)
    app[SERVICE] = service
    app.on_response_prepare.append(_note)
    app.router.add_post("/segments", segments)
    app.router.add_get("/status", status)
    app.router.add_get("/steps", steps)
    app.router.add_get("/cache", cache)
    app.router.add_get("/role", show_role)
    app.router.add_post("/role", change_role)
    app.router.add_get("/peers", show_peers)
    app.router.add_put("/peers", change_peers)
    app.router.add_post("/drain", drain)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/v1/{rest:.*}", passed_on)
    return app


async def _note(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers[http.HEADER] = http.request_id(request.headers.get(http.HEADER))


async def status(request: web.Request) -> web.Response:
    return web.json_response(await request.app[SERVICE].status())


async def steps(request: web.Request) -> web.Response:
    """The latest steps that ended with work behind them: their numbers, tokens, sequences and seconds."""
    after = request.query.get("after", "0")
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise InputError("after", "must be the number of a step")
    vllm_steps = request.app[SERVICE].connector_events.steps
    return web.json_response(
        {"count": vllm_steps.count, "steps": [item for item in vllm_steps.recent if item[0] > int(after)]}
    )


async def cache(request: web.Request) -> web.Response:
    """What changed in vLLM's prefix cache since a report, or all of it: `?epoch=E&after=N`."""
    feed = request.app[SERVICE].feed
    reports = feed.after(*place_in(request.query))
    return web.json_response({"epoch": feed.epoch, "reports": [as_json(report) for report in reports]})


async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if service.problem:
        return web.json_response({"status": "failed", "problem": service.problem}, status=503)
    return web.json_response({"status": "draining" if service.draining else "ok"})


async def metrics(request: web.Request) -> web.Response:
    try:
        return web.Response(text=await request.app[SERVICE].metrics_text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise http.HttpRefusal(503, "vLLM tells no figures now", "try_again") from error


async def show_role(request: web.Request) -> web.Response:
    return web.json_response(_role(request.app[SERVICE]))


async def change_role(request: web.Request) -> web.Response:
    """A role says what an engine is for; vLLM can do all of them at once, so nothing is restarted."""
    service, body = request.app[SERVICE], await _object(request)
    if set(body) - {"action", "role"}:
        raise InputError(min(set(body) - {"action", "role"}), "unknown key; there are action and role")
    action, role = body.get("action"), body.get("role")
    if action in (None, "init") and role not in ROLES:
        raise InputError("role", f"must be one of {', '.join(ROLES)}, is {role!r}")
    if action is None:
        service.role, service.next_role = str(role), ""
    elif action == "init":
        service.next_role = str(role)
    elif action == "activate":
        if not service.next_role:
            raise InputError("action", "nothing to activate; init a role first")
        service.role, service.next_role = service.next_role, ""
    elif action == "stop":
        service.role, service.next_role = "mixed", ""
    elif action != "show":
        raise InputError("action", "must be one of init, activate, show, stop")
    return web.json_response(_role(service))


def _role(service: AdapterService) -> dict[str, object]:
    return {
        "role": service.role,
        "next": service.next_role or None,
        "running": service.open_requests,
        "state": service.state,
    }


async def show_peers(request: web.Request) -> web.Response:
    return web.json_response(_peers(request.app[SERVICE]))


async def change_peers(request: web.Request) -> web.Response:
    service, body = request.app[SERVICE], await _object(request)
    given = body.get("peers")
    if (
        set(body) != {"peers"}
        or not isinstance(given, list)
        or not all(isinstance(one, str) for one in given)
    ):
        raise FormatError("peers", "must be a list of HOST:PORT, and the only key")
    if len(given) > MOST_PEERS:
        raise InputError("peers", f"at most {MOST_PEERS}, got {len(given)}")
    service.allow(frozenset(kv_address(text, "peers") for text in given))
    return web.json_response(_peers(service))


def _peers(service: AdapterService) -> dict[str, object]:
    return {
        "peers": sorted(map(str, service.peers)),
        "always": sorted(map(written, service.always)),
    }


async def drain(request: web.Request) -> web.Response:
    service, body = request.app[SERVICE], await _object(request)
    resume = body.get("resume", False)
    if set(body) - {"resume"} or not isinstance(resume, bool):
        raise InputError("resume", "is the only key, true or false")
    service.draining = not resume
    return web.json_response({"state": service.state, "running": service.open_requests, "waiting": 0})


async def passed_on(request: web.Request) -> web.StreamResponse:
    """The client's own request, whatever vLLM makes of it: tools, formats, adapters."""
    service = request.app[SERVICE]
    if service.role == "prefill" and request.method == "POST":
        raise http.HttpRefusal(409, "this engine's role is prefill: it hands on what it computes", "role")
    body = await _body(request)
    headers = {name: request.headers[name] for name in PASSED if name in request.headers}
    async with service.admitted(0):
        try:
            url = service.server.base + request.path_qs
            async with service.session.request(request.method, url, data=body, headers=headers) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            raise http.HttpRefusal(503, "vLLM does not answer", "try_again") from error


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise http.HttpRefusal(408, f"the body did not come within {BODY_S:g} s") from None


async def _object(request: web.Request) -> dict[str, object]:
    raw = await _body(request)
    return http.parse_object(raw) if raw else {}


def error_response(error: Exception) -> web.Response:
    known, code, param = http.refusal(error), None, None
    if known is not None:
        status, message, code, param = known.status, str(known), known.code, known.param
    elif isinstance(error, web.HTTPException):
        status, message = error.status, f"{HTTPStatus(error.status).phrase}: {error.reason}"
    elif isinstance(error, TimeoutError):
        status, message, code = 504, "the request took longer than it may", "deadline"
    else:
        log.error("a handler failed", exc_info=error)
        status, message = 500, "internal error; the engine's log says more"
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    body = json.dumps(http.error_object(status, message, param=param, code=code))
    return web.Response(status=status, text=body, content_type="application/json", headers=headers)


def _check_key(request: web.Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise http.HttpRefusal(401, "a valid key is needed: Authorization: Bearer ...", "invalid_api_key")
