"""vLLM started, and its face before it, until somebody ends it or vLLM ends by itself."""

from __future__ import annotations

import asyncio
import signal
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from potluck.api.http import ServedNames
from potluck.core.errors import InputError
from potluck.kv.peer_connections import Address
from potluck.vllm.adapter.adapter_app import build
from potluck.vllm.adapter.adapter_service import AdapterLimits, AdapterService, ConnectorEvents
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
        runner: web.AppRunner | None = None
        try:
            await connector_events.open()
            await server.start()
            starting = asyncio.ensure_future(_up(service))
            ending = asyncio.ensure_future(stop.wait())
            await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return
            await starting
            served = ServedNames(host in LOOPBACK, names, api_key is not None)
            runner = web.AppRunner(build(service, api_key, served), access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, host, port, ssl_context=tls)
            await _listen(site, host, port)
            service.started_s = time.monotonic()
            ready(f"{'https' if tls else 'http'}://{host}:{_port(runner)}")
            watching = asyncio.ensure_future(service.watch())
            await asyncio.wait([watching, ending], return_when=asyncio.FIRST_COMPLETED)
            if service.problem:
                raise InputError("vLLM", service.problem.removeprefix("vLLM "))
            service.draining = True
            await _drained(service, drain_s)
        finally:
            if runner is not None:
                await runner.cleanup()
            await service.close()
            await server.end()
            await connector_events.close()


async def _up(service: AdapterService) -> None:
    await service.server.ready(service.session, service.limits.start_s)
    async with asyncio.timeout(10):
        await service.connector_events.here.wait()
    service.allow(frozenset())
    await service.look()
    await _warm(service)


async def _warm(service: AdapterService) -> None:
    """vLLM compiles its sampling and log probabilities when they are first asked for, one request at a time and then
    several: some ten seconds of a CPU, in which nothing is answered. It is done before anybody waits."""
    body = {"model": service.name, "prompt": [0], "max_tokens": 2, "temperature": 1.0, "logprobs": 1}
    for count in (1, 2):
        try:
            url = f"{service.server.base}/v1/completions"
            async with service.session.post(url, json={**body, "n": count}) as answer:
                await answer.read()
        except aiohttp.ClientError:
            return  # Whoever watches it will say why.
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
