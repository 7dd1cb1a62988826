"""An OpenAI server that costs next to nothing: fixed answers, tokens at a fixed pace. For `gateway.py`.

    python benchmarks/gateway_upstream.py PORTS...     then `GET /pace?ms=20` sets the gap between tokens

All streams share one timer: each has its slot in the gap, so that tokens come one by one, as from engines.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import uvloop

SLOT_S = 0.002
TOKEN = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
)
WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"%b"},"logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":1000,"completion_tokens":64,"total_tokens":1064}}' % (b" word" * 64)
)
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"us"}]}'


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def fixed(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: bench\r\n"
    return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


STREAM = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: bench\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
ONE, END = framed(TOKEN), framed(LAST) + b"0\r\n\r\n"
ANSWER, KNOWN, FINE = fixed(WHOLE), fixed(MODELS), fixed(b'{"status":"ok","model_path":"bench"}')


class Paces:
    """Streams under way, by the slot in which their next token is due."""

    def __init__(self) -> None:
        self.gap_s = 0.02
        self.slots: dict[int, list[tuple[Server, int]]] = {}
        self.slot = 0
        self.spread = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._tick()

    def add(self, server: Server, tokens: int) -> None:
        gap = max(1, round(self.gap_s / SLOT_S))
        self.spread += 1
        self.slots.setdefault(self.slot + 1 + self.spread % gap, []).append((server, tokens))

    def _tick(self) -> None:
        due = int((self._loop.time() - self._began_s) / SLOT_S)
        gap = max(1, round(self.gap_s / SLOT_S))
        while self.slot < due:
            self.slot += 1
            for server, left in self.slots.pop(self.slot, ()):
                if server.gone:
                    continue
                if left:
                    server.transport.write(ONE)
                    self.slots.setdefault(self.slot + gap, []).append((server, left - 1))
                else:
                    server.transport.write(END)
        self._loop.call_later(SLOT_S, self._tick)


class Server(asyncio.Protocol):
    def __init__(self, paces: Paces) -> None:
        self._paces = paces
        self._held = b""
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def data_received(self, data: bytes) -> None:
        data = self._held + data if self._held else data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                break
            size = length_of(data[:end].lower())
            if len(data) < end + 4 + size:
                break
            self._answer(data[:end], data[end + 4 : end + 4 + size])
            data = data[end + 4 + size :]
        self._held = data

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST"):
            if b'"stream": true' in body or b'"stream":true' in body:
                self.transport.write(STREAM)
                asked = b'"max_tokens":' if b'"max_tokens":' in body else b'"max_completion_tokens":'
                self._paces.add(self, number(body, asked))
            else:
                self.transport.write(ANSWER)
        elif b"/pace?ms=" in head[:40]:
            self._paces.gap_s = number(head, b"?ms=") / 1000
            self.transport.write(FINE)
        else:
            self.transport.write(KNOWN if b"/models" in head[:30] else FINE)


def length_of(head: bytes) -> int:
    return number(head, b"content-length:") if b"content-length:" in head else 0


def number(text: bytes, after: bytes) -> int:
    at = text.find(after) + len(after)
    digits = text[at : at + 12].split(b",")[0].split(b"}")[0].split(b"\r")[0].split(b" HTTP")[0]
    return int(digits)


async def main(ports: list[int]) -> None:
    paces, loop = Paces(), asyncio.get_running_loop()
    paces.start()
    for port in ports:
        await loop.create_server(partial(Server, paces), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
