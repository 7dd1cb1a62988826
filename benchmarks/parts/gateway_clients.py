"""Clients that cost next to nothing: as fast as answered, at a rate, or many streams at once. For `gateway.py`."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from parts.gateway_proxies import PAGES

HEADERS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    b"User-Agent: OpenAI/Python 3.0.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 3.0.0\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Runtime: CPython\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
)
PROMPT_BYTES = 4000  # About 1,000 tokens.
TEXT = re.sub(rb"[^A-Za-z0-9,.]+", b" ", b" ".join(page.read_bytes() for page in PAGES))
"""No two prompts are alike: each begins somewhere else in this project's own pages."""
KEY = b"sk-bench"


def prompt(number: int) -> bytes:
    at = number * 7919 % (len(TEXT) - PROMPT_BYTES)
    return b"%08d %b" % (number, TEXT[at : at + PROMPT_BYTES])


def request(number: int, tokens: int, stream: bool, key: bytes = KEY) -> bytes:
    body = (
        b'{"model": "bench", "messages": [{"role": "user", "content": "%b"}], "max_tokens": %d, "stream": %b}'
        % (prompt(number), tokens, b"true" if stream else b"false")
    )
    return HEADERS % (key, len(body)) + body


@dataclass
class Result:
    answers: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # Of streams, as soon as all of them have begun.
    awaited: int = 0  # Streams that have not begun.


class Client(asyncio.Protocol):
    def __init__(self, result: Result, stream: bool, timed: bool) -> None:
        self._result, self._stream, self._timed = result, stream, timed
        self._free: asyncio.Future[None] | None = None
        self._held = b""
        self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._free is not None and not self._free.done():
            self._end(f"the connection ended ({exc})")

    async def ask(self, data: bytes) -> None:
        self._free = asyncio.get_running_loop().create_future()
        self._held, self._tokens = b"", 0
        self._sent_s = self._heard_s = time.perf_counter()
        self.transport.write(data)
        await self._free

    def data_received(self, data: bytes) -> None:
        if self._stream:
            now_s = time.perf_counter()
            if self._timed and self._tokens and not self._result.awaited:
                self._result.gaps_s.append(now_s - self._heard_s)
            self._heard_s = now_s
            held = self._held + data
            before = self._tokens
            self._tokens += held.count(b"data: ") - self._held.count(b"data: ")
            if self._tokens and not before:
                self._result.awaited -= 1
            if held.endswith(b"0\r\n\r\n") and b"[DONE]" in held:
                self._result.tokens += self._tokens
                self._end("")
            elif not self._tokens and held[:12] != b"HTTP/1.1 200"[: len(held)]:
                self._end(held[:300].decode(errors="replace"))
            self._held = held[-240:] if self._tokens else held
            return
        held = self._held = self._held + data if self._held else data
        if held.endswith(b"}}"):
            self._end("" if held.startswith(b"HTTP/1.1 200") else held[:300].decode(errors="replace"))

    def _end(self, wrong: str) -> None:
        if self._free is None or self._free.done():
            return
        result = self._result
        result.answers += 1
        if wrong:
            result.wrong.append(wrong)
        if self._timed:
            result.latencies_s.append(time.perf_counter() - self._sent_s)
        self._free.set_result(None)


async def join(port: int, result: Result, stream: bool, timed: bool = False) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(result, stream, timed), "127.0.0.1", port)
    return client


async def closed(port: int, clients: int, requests: int) -> Result:
    """Each asks as soon as it was answered."""
    result = Result()
    left = iter(range(requests))

    async def work() -> None:
        client = await join(port, result, False)
        for number in left:
            await client.ask(request(number, 64, False))
        client.transport.close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return result


async def at_rate(port: int, rate: float, seconds: float, clients: int = 32) -> Result:
    """So many a second, whether answered or not."""
    result = Result()
    free = [await join(port, result, False, True) for _ in range(clients)]
    busy: set[asyncio.Task[None]] = set()
    began_s = time.perf_counter()

    async def one(client: Client, number: int) -> None:
        await client.ask(request(number, 64, False))
        free.append(client)

    for number in range(int(rate * seconds)):
        wait_s = began_s + number / rate - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        while not free:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(one(free.pop(), number))
        busy.add(task)
        task.add_done_callback(busy.discard)
    await asyncio.gather(*busy)
    for client in free:
        client.transport.close()
    return result


async def streams(port: int, clients: int, tokens: int, timed: bool = False) -> Result:
    result = Result(awaited=clients)

    async def work(number: int) -> None:
        client = await join(port, result, True, timed)
        await client.ask(request(number * 1000, tokens, True))
        client.transport.close()

    await asyncio.gather(*(work(number) for number in range(clients)))
    return result
