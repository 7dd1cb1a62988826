"""The gateway's http room alone, with nobody who decides: what carrying the bytes costs. For `gateway.py`.

python benchmarks/gateway_relay.py PORT ENGINE_PORTS...
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop

from potluck.api.http import allow_open_files
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.http.parser import Headers
from potluck.gateway.http.server import Exchange, open_port
from potluck.gateway.values import Address


class Relay:
    __slots__ = ("_exchange", "_parts", "_status", "_type", "call")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parts: list[bytes] | None = None
        self._status = 200
        self._type = b""

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._type = status, headers.get(b"content-type", b"")
        if b"content-length" in headers:
            self._parts = []
        else:
            self._exchange.begin(status, ((b"content-type", self._type),))

    def data(self, data: bytes) -> None:
        if self._parts is None:
            self._exchange.write(data)
        else:
            self._parts.append(data)

    def done(self) -> None:
        if self._parts is None:
            self._exchange.end()
        else:
            self._exchange.reply(self._status, b"".join(self._parts), ((b"content-type", self._type),))

    def lost(self, why: str) -> None:
        if self._parts is None:
            self._exchange.drop()
        else:
            self._exchange.reply(502, why.encode())


async def main(port: int, engines: list[int]) -> None:
    allow_open_files()
    connection_pool = ConnectionPool()
    addresses = itertools.cycle([Address("127.0.0.1", engine) for engine in engines])
    fields = ((b"content-type", b"application/json"),)

    def handle(exchange: Exchange) -> None:
        relay = Relay(exchange)
        asked = (exchange.method, exchange.path, exchange.body)
        call = connection_pool.send(next(addresses), *asked, relay, headers=fields)
        exchange.on_gone = call.cancel
        exchange.on_room = lambda there: call.resume() if there else call.pause()

    await open_port(handle, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(item) for item in sys.argv[2:]]))
