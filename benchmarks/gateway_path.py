"""What a request costs inside the gateway's own process, with no socket and no system call: counted, not only timed.

The whole gateway runs over transports that are lists: the number of Python calls is the same at every run, and tells
what a change of the code gave where timing cannot. `request_by_hop` is us_per_request by what one empty Python call
costs here.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import uvloop

from parts import common
from parts import gateway_clients as clients
from parts import gateway_proxies as proxies
from parts import gateway_upstream as upstream
from potluck.cli.simulating.simulation import policy_of, read_inputs, scene_of
from potluck.gateway.core import GatewayCore
from potluck.gateway.http.connection_pool import ConnectionPool, EngineCall, EngineConnection
from potluck.gateway.http.limits import HttpLimits, calm
from potluck.gateway.http.server import ClientConnection, ClientListener
from potluck.gateway.serve import AdminServer, cards_of, worker_beside
from potluck.gateway.values import GatewaySettings, ListenAddresses
from potluck.gateway.workers.worker import WorkerContext

ENGINES = 16
TOKENS = 64


class Sink:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Answering(Sink):
    """The engine's end of a connection: probes are answered at once, requests wait to be asked for."""

    def __init__(self, connection: EngineConnection, waiting: list[EngineConnection]) -> None:
        super().__init__()
        self._wire, self._waiting = connection, waiting
        self.write = self._asked  # type: ignore[assignment]

    def _asked(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self._waiting.append(self._wire)
        else:
            known = upstream.KNOWN if b"/models" in data[:30] else upstream.FINE
            asyncio.get_running_loop().call_soon(self._wire.data_received, known)


class Bench(ConnectionPool):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[EngineConnection] = []

    def open(self, call: EngineCall) -> None:
        call.fresh = True
        connection = EngineConnection(self, call.address)
        connection.connection_made(cast(asyncio.Transport, Answering(connection, self.waiting)))
        connection.take(call)


class Stage:
    def __init__(self, home: Path) -> None:
        files = (home / "plan.json", home / "spec.yaml")
        inputs, policy = read_inputs(files, 0.0, print, lambda read: policy_of((), read.policy))
        resolved = scene_of(inputs)
        settings = GatewaySettings(ListenAddresses(), engines=home / "engines.yaml", keys=home / "keys.jsonl")
        self.calls = Bench()
        self.core = GatewayCore(resolved, policy, self.calls, engine_list=settings.engines)
        admin_server = AdminServer(self.core, settings)
        assert self.core.engine_list is not None
        cards = cards_of(resolved, settings, self.core.engine_list.entries)
        worker = worker_beside(
            self.core, WorkerContext(settings, policy, cards), self.calls, admin_server.meter
        )
        self.port = ClientListener(worker.handler, HttpLimits())
        self.sink = Sink()
        self.visit = ClientConnection(self.port)

    async def start(self) -> None:
        self.core.start()
        until_s = time.monotonic() + 10
        while self.core.lacking("bench") and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        self.visit.connection_made(cast(asyncio.Transport, self.sink))
        calm()

    def answered(self, request: bytes) -> None:
        self.visit.data_received(request)
        self.calls.waiting.pop().data_received(upstream.ANSWER)
        self._check(b"}}")

    def streamed(self, request: bytes, tokens: int) -> None:
        self.visit.data_received(request)
        connection = self.calls.waiting.pop()
        connection.data_received(upstream.STREAM)
        for _ in range(tokens):
            connection.data_received(upstream.ONE)
        connection.data_received(upstream.END)
        self._check(b"0\r\n\r\n")

    def _check(self, end: bytes) -> None:
        written = self.sink.written
        if not written[0].startswith(b"HTTP/1.1 200") or not written[-1].endswith(end):
            raise RuntimeError(f"a wrong answer: {b''.join(written)[:300]!r}")
        written.clear()


def counted(do: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python functions by something, and of C's."""
    seen: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: seen.update((event,)))
    try:
        do()
    finally:
        sys.setprofile(None)
    return seen["call"], seen["c_call"]


def hop_s() -> float:
    def nothing(value: object) -> None: ...

    def many() -> None:
        for number in range(10_000):
            nothing(number)

    return common.cpu_s(many, 20) / 10_000


async def measured(home: Path, quick: bool) -> dict[str, float]:
    stage = Stage(home)
    await stage.start()
    asked = [clients.request(number, TOKENS, False) for number in range(100)]
    streams = [clients.request(number, TOKENS, True) for number in range(10)]

    def requests() -> None:
        for item in asked:
            stage.answered(item)

    def tokens() -> None:
        for entry in streams:
            stage.streamed(entry, TOKENS)

    def begun() -> None:
        for stream in streams:
            stage.streamed(stream, 0)

    for do in (requests, tokens, begun):
        do()
    seen, in_c = counted(requests)
    all_seen, empty_seen = counted(tokens)[0], counted(begun)[0]
    rounds = 10 if quick else 60
    result = {
        "calls_per_request": seen / 100,
        "c_calls_per_request": in_c / 100,
        "us_per_request": 1e4 * common.cpu_s(requests, rounds),
        "calls_per_token": (all_seen - empty_seen) / (10 * TOKENS),
        "us_per_token": 1e5 * (common.cpu_s(tokens, rounds) - common.cpu_s(begun, rounds)) / TOKENS,
    }
    result["request_by_hop"] = result["us_per_request"] / (1e6 * hop_s())
    await stage.core.close()
    await stage.calls.close()
    return result


def measure(quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        proxies.prepare(home, list(range(20_001, 20_001 + ENGINES)), clients.KEY.decode())
        return uvloop.run(measured(home, quick))


if __name__ == "__main__":
    common.run("gateway_path", measure, {})
