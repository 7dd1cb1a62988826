"""A node of a replica over several machines that is not the first: vLLM's workers, and whoever looks after them."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from potluck.core.errors import InputError
from potluck.kv.peer_connections import client_context
from potluck.vllm.adapter.connector_socket import ConnectorSocket
from potluck.vllm.adapter.node_group import NodeConnection, join
from potluck.vllm.adapter.vllm_process import GRACE_S, VllmProcess, VllmSettings


class ConnectorRelay:
    """In an adapter's place: passes on what this node's connectors say, and what they are told."""

    def __init__(self, connection: NodeConnection) -> None:
        self._connection = connection
        self._writers: set[asyncio.StreamWriter] = set()
        self._peers = b""

    def heard(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        if writer not in self._writers:
            self._writers.add(writer)
            writer.write(self._peers)
        self._connection.writer.write(line)

    def tell(self, line: dict[str, object]) -> None:
        self._peers = json.dumps(line).encode() + b"\n"
        for writer in self._writers:
            writer.write(self._peers)


async def serve_workers(
    settings: VllmSettings,
    *,
    key: str | None,
    start_s: float,
    ready: Callable[[], None],
    drain_s: float,
) -> None:
    """Until the first node ends; InputError when it fails, or these workers do."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ending = asyncio.ensure_future(stop.wait())
    tls = client_context(*settings.kv_tls) if settings.kv_tls else None
    joining = asyncio.ensure_future(join(settings, key, tls, start_s))
    await asyncio.wait([joining, ending], return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        joining.cancel()
        return
    connection, meeting_port = await joining
    with tempfile.TemporaryDirectory(prefix="potluck-vllm-") as folder:
        relay, channel = ConnectorRelay(connection), Path(folder) / "channel"
        connectors = ConnectorSocket(channel, relay.heard)
        server = VllmProcess(settings, channel)
        hearing = asyncio.ensure_future(_hear(connection, relay))
        failed = True
        try:
            await connectors.open()
            await server.start(meeting_port)
            ready()
            await _until_one_ends(server, connection, hearing, ending, drain_s)
            failed = False
        finally:
            hearing.cancel()
            await connection.close()
            await server.end(at_once=failed)
            await connectors.close()


async def _hear(connection: NodeConnection, relay: ConnectorRelay) -> str:
    """Why the first node ends the replica; empty where it is done."""
    async for line in connection.lines():
        if "end" in line:
            return str(line["end"])
        if "peers" in line:
            relay.tell(line)
    raise AssertionError("lines never end")


async def _until_one_ends(
    server: VllmProcess,
    connection: NodeConnection,
    hearing: asyncio.Future[str],
    ending: asyncio.Future[Any],
    drain_s: float,
) -> None:
    watching: asyncio.Future[Any] = asyncio.ensure_future(server.wait())
    ends: list[asyncio.Future[Any]] = [watching, hearing]
    try:
        await asyncio.wait([*ends, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending.done() and not (watching.done() or hearing.done()):
            connection.tell({"leave": "it was asked to end"})
            within_s = drain_s + GRACE_S
            await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        elif watching.done() and not hearing.done():
            # The first may have ended it, and says so in a moment.
            await asyncio.wait([hearing], timeout=1.0)
    finally:
        watching.cancel()
    if hearing.done():
        try:
            why = hearing.result()
        except ConnectionError as error:
            why = f"it {error}"
        if why:
            raise InputError("--master", f"the first node ended this replica: {why}")
    elif server.gone and not ending.done():
        why = server.last_words()
        with suppress(OSError):
            connection.tell({"failed": f"failed: {why}"})
        raise InputError("vLLM", f"ended: {why}")
