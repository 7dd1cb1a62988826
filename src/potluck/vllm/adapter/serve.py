"""vLLM started, and its HTTP side before it: segments and control as every engine has them; /v1/... goes to vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import ssl
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from potluck.api import aiohttp_requests, http
from potluck.api.grammar_fields import check_grammar_fields
from potluck.api.http import ServedNames
from potluck.api.segments import CHATS, COMPLETIONS
from potluck.core.errors import InputError
from potluck.core.values.kv_layout import Address, peers_in, written
from potluck.kv.peer_connections import server_context
from potluck.kv.prefix_pool import as_json, place_in
from potluck.vllm.adapter.adapter_segments import segments
from potluck.vllm.adapter.adapter_service import (
    ROLES,
    SERVICE,
    AdapterLimits,
    AdapterService,
    ConnectorEvents,
)
from potluck.vllm.adapter.node_group import NodeGroup
from potluck.vllm.adapter.vllm_process import VllmProcess, VllmSettings

OPEN = frozenset({"/health"})
PASSED = ("content-type", "authorization", "accept")
BODY_S = 30.0

log = logging.getLogger(__name__)


def build(service: AdapterService, api_key: str | None, served: http.ServedNames) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            aiohttp_requests.check_target(request)
            http.check_origin(request.method, request.headers, served)
            if api_key is not None and request.path not in OPEN:
                http.check_key(request.headers, api_key)
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
    role = body.get("role")
    if set(body) != {"role"} or role not in ROLES:
        raise InputError("role", f"is the only key, one of {', '.join(ROLES)}, is {role!r}")
    service.role = str(role)
    return web.json_response(_role(service))


def _role(service: AdapterService) -> dict[str, object]:
    return {"role": service.role, "running": service.open_requests, "state": service.state}


async def show_peers(request: web.Request) -> web.Response:
    return web.json_response(_peers(request.app[SERVICE]))


async def change_peers(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.allow(peers_in(await _object(request)))
    return web.json_response(_peers(service))


def _peers(service: AdapterService) -> dict[str, object]:
    return {"peers": sorted(map(str, service.peers)), "always": sorted(map(written, service.always))}


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
    if request.method == "POST" and request.path in (COMPLETIONS, CHATS):
        await asyncio.to_thread(_check_grammars, body)
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


def _check_grammars(body: bytes) -> None:
    """vLLM compiles grammars in its own process, without limits on their size."""
    check_grammar_fields(http.parse_object(body))


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


DRAIN_S = 30.0  # How long requests may go on when the engine is asked to end.
TOLD_S = 0.3  # In which the connector has told of a step.
LOOPBACK = ("127.0.0.1", "::1", "localhost")


async def serve(
    settings: VllmSettings,
    host: str,
    port: int,
    *,
    api_key: str | None,
    always: frozenset[Address],
    limits: AdapterLimits,
    ready: Callable[[str], None],
    role: str = "mixed",
    names: frozenset[str] = frozenset(),
    tls: ssl.SSLContext | None = None,
    drain_s: float = DRAIN_S,
) -> None:
    """InputError when vLLM does not start, or ends."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="potluck-vllm-") as folder:
        channel = Path(folder) / "channel"
        connector_events = ConnectorEvents(channel, settings.shape.workers)
        vllm_process = VllmProcess(settings, channel)
        service = AdapterService(settings.name, vllm_process, connector_events, limits, always)
        service.role, service.max_running = role, settings.running
        group = _group(settings, api_key, connector_events)
        runner: web.AppRunner | None = None
        try:
            await connector_events.open()
            starting = asyncio.ensure_future(_up(service, group, settings.kv_host))
            ending = asyncio.ensure_future(_asked_to_end(stop, group))
            watching = asyncio.ensure_future(_failed(service, group))
            await asyncio.wait([starting, ending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                must_not_have_failed(service)
                return
            await starting
            served = ServedNames(host in LOOPBACK, names, api_key is not None)
            runner = web.AppRunner(build(service, api_key, served), access_log=None)
            await aiohttp_requests.set_up(runner)
            site = web.TCPSite(runner, host, port, ssl_context=tls)
            await _listen(site, host, port)
            service.started_s = time.monotonic()
            ready(f"{'https' if tls else 'http'}://{host}:{_port(runner)}")
            await asyncio.wait([watching, ending], return_when=asyncio.FIRST_COMPLETED)
            must_not_have_failed(service)
            service.draining = True
            await _drained(service, drain_s)
        except Exception as error:
            service.problem = service.problem or str(error) or type(error).__name__
            raise
        finally:
            if group is not None:
                await group.close(service.problem)
            await vllm_process.end(at_once=bool(service.problem))
            if runner is not None:
                await runner.cleanup()
            await service.close()
            await connector_events.close()


def _group(settings: VllmSettings, key: str | None, connector_events: ConnectorEvents) -> NodeGroup | None:
    if settings.place.nodes == 1:
        return None
    tls = server_context(*settings.kv_tls) if settings.kv_tls else None
    return NodeGroup(settings, key, tls, connector_events.heard)


async def _up(service: AdapterService, group: NodeGroup | None, host: str) -> None:
    meeting_port = 0
    if group is not None:
        await group.open(host)
        meeting_port = await group.assembled(service.limits.start_s)
    await service.server.start(meeting_port)
    await service.server.ready(service.session, service.limits.start_s)
    async with asyncio.timeout(10):
        await service.connector_events.here.wait()
    service.allow(frozenset())
    await service.look()
    await _warm(service)


async def _asked_to_end(stop: asyncio.Event, group: NodeGroup | None) -> None:
    """By a signal, here or on another node."""
    events = [stop] if group is None else [stop, group.leaving]
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _failed(service: AdapterService, group: NodeGroup | None) -> None:
    """Until vLLM ends on any node; whoever asks is told."""
    here: asyncio.Future[Any] = asyncio.ensure_future(service.server.wait())
    try:
        ends = [here] if group is None else [here, group.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        here.cancel()
    if group is not None and group.failed.done():
        service.problem = group.failed.result()
    else:
        service.problem = f"vLLM ended: {service.server.last_words()}"


def must_not_have_failed(service: AdapterService) -> None:
    if service.problem:
        raise InputError("vLLM", service.problem.removeprefix("vLLM "))


async def _warm(service: AdapterService) -> None:
    """vLLM compiles its sampling and log probabilities when they are first asked for, one request at a time and then
    several: some ten seconds of a CPU, in which nothing is answered. It is done before anybody waits."""
    body = {"model": service.name, "prompt": [0], "max_tokens": 2, "temperature": 1.0, "logprobs": 1}
    for count in (1, 2):
        try:
            url = f"{service.server.base}/v1/completions"
            async with service.session.post(url, json={**body, "n": count}) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            raise InputError("vLLM", f"broke off its first request ({error})") from error
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise InputError("vLLM", f"failed its first request: {' '.join(text.split())[:300]}")
    await asyncio.sleep(TOLD_S)
    service.connector_events.steps.recent.clear()  # No other step takes so long.


async def _listen(site: web.TCPSite, host: str, port: int) -> None:
    try:
        await site.start()
    except OSError as error:
        raise InputError("--port", f"{host}:{port} cannot be used ({error.strerror or error})") from error


def _port(runner: web.AppRunner) -> int:
    address = runner.addresses[0]
    return int(address[1])


async def _drained(service: AdapterService, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while service.open_requests and time.monotonic() < until_s and not service.server.gone:
        await asyncio.sleep(0.05)
