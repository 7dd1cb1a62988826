"""Requests sent at given times whatever becomes of those before (open loop), each timed token by token.

Lean on purpose: on a machine with two cores the client must not be what is measured. Prompts are token numbers, so
that lengths are exact; answers are streamed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools


@dataclass(slots=True)
class Shot:
    """One request: what is asked, when, and what came of it. Times are seconds since the run began."""

    at_s: float
    model: str
    prompt: Sequence[int]
    max_tokens: int
    key: str = ""
    extra: dict[str, object] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    sent_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    longest_gap_s: float = 0.0
    pieces: int = 0
    """Events with text."""
    status: int = 0
    retry_after: str = ""
    text: str = ""
    ended: bool = False
    """The whole answer came."""
    done_s: float = -1.0
    """When nothing more was to come, for better or worse."""
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        """From when it should have been sent: a client that was late is not the server's merit."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.max_tokens - 1) if self.max_tokens > 1 else 0.0


class _Shooting(asyncio.Protocol):
    """One connection for one request."""

    def __init__(self, shot: Shot, start_s: float, keep_text: bool, done: asyncio.Future[None]) -> None:
        self._shot, self._start_s, self._keep, self._done = shot, start_s, keep_text, done
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none, but does the same
        self._transport = transport
        shot = self._shot
        body = json.dumps(
            {
                "model": shot.model,
                "prompt": list(shot.prompt),
                "max_tokens": shot.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                **shot.extra,
            }
        ).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {shot.key}"] if shot.key else []),
            *(f"{name}: {value}" for name, value in shot.headers),
        ]
        shot.sent_s = time.monotonic() - self._start_s
        transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._shot.retry_after = value.decode()

    def on_headers_complete(self) -> None:
        self._shot.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        shot = self._shot
        if shot.status != 200:
            shot.problem += data.decode("utf-8", "replace")[:300]
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        now_s = time.monotonic() - self._start_s
        for event in events:
            if event == b"data: [DONE]":
                shot.ended = not shot.problem
            elif event.startswith(b'data: {"error"'):
                shot.problem = event.decode("utf-8", "replace")[:300]
            else:
                self._piece(event, now_s)

    def _piece(self, event: bytes, now_s: float) -> None:
        shot = self._shot
        if self._keep:
            for choice in json.loads(event[6:])["choices"]:
                shot.text += choice["text"]
        shot.pieces += 1
        if shot.first_s < 0:
            shot.first_s = now_s
        else:
            shot.longest_gap_s = max(shot.longest_gap_s, now_s - shot.last_s)
        shot.last_s = now_s

    def on_message_complete(self) -> None:
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("" if self._shot.ended else f"cut off {exc or ''}")

    def _end(self, problem: str) -> None:
        if problem and not self._shot.problem:
            self._shot.problem = problem
        if not self._done.done():
            self._shot.done_s = time.monotonic() - self._start_s
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def fire(url: str, shots: Sequence[Shot], *, keep_text: bool = False, within_s: float = 600.0) -> float:
    """Send all of them in time; returns when the run began, by the monotonic clock."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    start_s = time.monotonic() + 0.2

    async def one(shot: Shot) -> None:
        await asyncio.sleep(max(0.0, start_s + shot.at_s - time.monotonic()))
        done: asyncio.Future[None] = loop.create_future()
        try:
            await loop.create_connection(
                lambda: _Shooting(shot, start_s, keep_text, done), parts.hostname, parts.port
            )
            await asyncio.wait_for(done, within_s)
        except (OSError, TimeoutError) as error:
            shot.problem = shot.problem or f"{type(error).__name__} {error}"

    await asyncio.gather(*(one(shot) for shot in shots))
    return start_s


def shoot(url: str, shots: Sequence[Shot], *, keep_text: bool = False, within_s: float = 600.0) -> None:
    """The same from plain code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(fire(url, shots, keep_text=keep_text, within_s=within_s))
