"""vLLM started, and its face before it, until somebody ends it or vLLM ends by itself."""

from __future__ import annotations

import asyncio
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

from potluck.api.http import ServedNames
from potluck.core.errors import InputError
from potluck.core.values.kv_layout import Address
from potluck.kv.peer_connections import server_context
from potluck.vllm.adapter.adapter_app import build
from potluck.vllm.adapter.adapter_service import AdapterLimits, AdapterService, ConnectorEvents
from potluck.vllm.adapter.node_group import NodeGroup
from potluck.vllm.adapter.vllm_process import VllmProcess, VllmSettings

DRAIN_S = 30.0
"""How long requests may go on when the engine is asked to end."""
TOLD_S = 0.3
"""In which the connector has told of a step."""
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
        server = VllmProcess(settings, channel)
        service = AdapterService(settings.name, server, connector_events, limits, always)
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
            await runner.setup()
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
            await server.end(at_once=bool(service.problem))
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
