"""Clients of a world: what they ask for, how they behave, and what they got."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from worlds import mock
from worlds.engines import END, right_answer
from worlds.virtual import Process

if TYPE_CHECKING:
    from worlds.world import World

LETTERS = [chr(code) for code in range(0x20, 0x7F)] + [chr(code) for code in range(0xC0, 0x17F)]
AGAIN = frozenset({0, 429, 500, 502, 503, 504})
TRIES = 8
KEYED = ("retries", "twins", "reuses")  # They send an Idempotency-Key.
SPARE = "sk-spare"  # A key that is taken away in the end.
LONGEST_S = 400.0  # After which a client thinks that it will never be answered.


@dataclass(frozen=True)
class Ask:
    """One request of the workload."""

    number: int
    at_s: float
    key: int
    prompt: int
    most: int
    least: int
    stream: bool
    how: str = "patient"  # Or leaves, stalls, trickles, stranger, retries, twins, reuses, retired.
    amount: float = 0.0
    shipped: bool = False  # It is answered by mock engines that ship, which draw otherwise.

    def tokens(self) -> list[int]:
        chance = random.Random(f"prompt {self.number} {self.key}")
        return [chance.randrange(1, 250) for _ in range(self.prompt)]

    @lru_cache  # noqa: B019  (a world's process ends with it)
    def answer(self) -> list[int]:
        reckoned = mock.right_answer if self.shipped else right_answer
        return reckoned(self.tokens(), self.most, self.least)

    @property
    def status(self) -> int:
        """What it is answered where all is well."""
        return 401 if self.how in ("stranger", "retired") else 200

    def body(self) -> bytes:
        body: dict[str, object] = {"model": "m", "prompt": self.tokens(), "max_tokens": self.most}
        if self.shipped:
            body["temperature"] = 0
        if self.least:
            body["min_tokens"] = self.least
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()


@dataclass
class Outcome:
    """What a client saw of one try."""

    ask: Ask
    began_s: float
    ended_s: float = 0.0
    status: int = 0  # 0: no answer, or one that was cut.
    code: str = ""
    whole: bool = False
    left: bool = False  # The client itself went.
    replayed: bool = False
    word: str = ""
    server: str = ""  # The process that had it.
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        tokens = self.ask.answer()
        shown = tokens[:-1] if tokens[-1] == END else tokens
        finish = "stop" if tokens[-1] == END else "length"
        counts = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
        return (self.text, self.finish, counts) == (text_of(shown), finish, (self.ask.prompt, len(tokens)))

    @property
    def begins_right(self) -> bool:
        """As far as it goes."""
        return text_of([token for token in self.ask.answer() if token != END]).startswith(self.text)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


class Exchange(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.data = b""
        self.events = 0
        self.over: asyncio.Future[None] = loop.create_future()
        self.more: asyncio.Future[None] | None = None
        self._head: bytes | None = None
        self._size = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.events += data.count(b"data: ")
        if self._head is None and b"\r\n\r\n" in self.data:
            self._head = self.data.partition(b"\r\n\r\n")[0]
            if b"content-length: " in self._head:
                self._size = (
                    len(self._head) + 4 + int(self._head.split(b"content-length: ")[1].split(b"\r\n")[0])
                )
        if self.whole:
            self._end()
        elif self.more is not None and not self.more.done():
            self.more.set_result(None)

    @property
    def whole(self) -> bool:
        if self._head is None:
            return False
        return len(self.data) >= self._size if self._size >= 0 else self.data.endswith(b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        for future in (self.over, self.more):
            if future is not None and not future.done():
                future.set_result(None)

    def read(self, outcome: Outcome) -> None:
        if self._head is None:
            return
        lines = self._head.split(b"\r\n")
        outcome.whole, outcome.status = self.whole, int(lines[0].split()[1])
        outcome.replayed = b"x-potluck-replayed: 1" in lines
        body = self.data[len(self._head) + 4 :]
        if self._size < 0:
            body = _dechunked(body)
        if outcome.status != 200:
            outcome.code = str(json.loads(body)["error"].get("code")) if outcome.whole else ""
            return
        if b"text/event-stream" in self._head:
            self._read_events(body, outcome)
        elif outcome.whole:
            _take(json.loads(body), outcome)
        if not outcome.whole:
            outcome.status = 0

    @staticmethod
    def _read_events(body: bytes, outcome: Outcome) -> None:
        parts = body.split(b"\n\n")
        outcome.whole = outcome.whole and parts[-2:] == [b"data: [DONE]", b""]
        for part in parts[:-1]:
            if part.startswith(b"data: {"):
                _take(json.loads(part[6:]), outcome)


def _take(document: dict[str, Any], outcome: Outcome) -> None:
    if "error" in document:
        outcome.status, outcome.code = 599, str(document["error"].get("code"))
        return
    outcome.word = str(document["id"]).removeprefix("cmpl-")
    for choice in document["choices"]:
        outcome.text += choice["text"]
        outcome.finish = choice["finish_reason"] or outcome.finish
    outcome.usage = document.get("usage") or outcome.usage


def _dechunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, found, rest = data.partition(b"\r\n")
        if not found or not size:
            break
        count = int(size, 16)
        parts.append(rest[:count])
        data = rest[count + 2 :]
    return b"".join(parts)


class Client:
    """One request of one client, from its first try to its last."""

    def __init__(self, world: World, ask: Ask) -> None:
        self.world, self.ask, self.loop = world, ask, world.loop
        self.outcomes: list[Outcome] = []
        self.done = False
        self.process = Process(
            world.loop, f"client {ask.number}", world.loop.network.host(f"c{ask.number % 7}")
        )
        self.chance = random.Random(f"client {world.scenario.seed} {ask.number}")

    def start(self) -> None:
        self.process.run(self.loop.create_task, self._work())

    async def _work(self) -> None:
        tries = TRIES if self.ask.how in KEYED else 1
        if self.ask.how == "twins":
            other = Client(self.world, self.ask)
            self.world.clients.append(other)
            other.process.run(self.loop.create_task, other._tries(tries))
        await self._tries(tries)
        if self.ask.how == "reuses" and self.outcomes[-1].status == 200:
            outcome = await self._try(self.ask.body()[:-1] + b" }")
            lost = max(self.world.power_lost_s, default=-1.0) > self.outcomes[-1].began_s  # the kept answer
            if outcome.status not in (422, 0) and not self.world.faults["disk_full"] and not lost:
                self.world.breaks(
                    f"request {self.ask.number}: a key used again was answered {outcome.status}"
                )
        self.done = True

    async def _tries(self, tries: int) -> None:
        for number in range(tries):
            outcome = await self._try(self.ask.body())
            self.outcomes.append(outcome)
            self.world.ended(outcome)
            if outcome.left or outcome.status not in AGAIN | {599}:
                break
            if number + 1 < tries:
                await asyncio.sleep(min(20.0, 0.5 * 2**number) * self.chance.uniform(0.5, 1.0))
        self.done = True

    async def _try(self, body: bytes) -> Outcome:
        outcome = Outcome(self.ask, self.loop.now_s)
        exchange = Exchange(self.loop)
        try:
            async with asyncio.timeout(LONGEST_S):
                await self.loop.create_connection(lambda: exchange, *self.world.door(self.ask))
                await self._send(exchange, body)
                await self._behave(exchange, outcome)
        except OSError as error:
            outcome.code = type(error).__name__
        outcome.ended_s = self.loop.now_s
        if hasattr(exchange, "transport"):
            outcome.server = self.world.served_by(exchange.transport)
            exchange.read(outcome)
            (exchange.transport.close if self.chance.random() < 0.7 else exchange.transport.abort)()
        if outcome.ended_s - outcome.began_s >= LONGEST_S:
            outcome.code = "never"
        return outcome

    async def _send(self, exchange: Exchange, body: bytes) -> None:
        lines = [f"POST /v1/completions HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}"]
        secret = self.world.keys.secret(self.ask.key, self.loop.now_s)
        other = {"stranger": "sk-nobody", "retired": SPARE}
        lines.append(f"authorization: Bearer {other.get(self.ask.how, secret)}")
        if self.ask.how in KEYED:
            # Other tenants use the same, for other requests.
            before = [ask for ask in self.world.scenario.asks if ask.number < self.ask.number]
            own = sum(ask.key == self.ask.key for ask in before)
            lines.append(f"idempotency-key: {self.world.scenario.seed}-{own}")
        data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        if self.ask.how == "trickles":
            for place in range(0, len(data), 97):
                exchange.transport.write(data[place : place + 97])
                await asyncio.sleep(self.ask.amount * self.chance.random())
        else:
            exchange.transport.write(data)

    async def _behave(self, exchange: Exchange, outcome: Outcome) -> None:
        how, amount = self.ask.how, self.ask.amount
        if how == "leaves":
            while exchange.events < amount and not exchange.over.done():
                exchange.more = self.loop.create_future()
                await asyncio.wait([exchange.more], timeout=amount * 0.2)
                if not exchange.more.done():
                    break
            outcome.left = not exchange.over.done()
            return
        if how == "stalls":
            await asyncio.sleep(0.3)
            exchange.transport.pause_reading()
            await asyncio.sleep(amount)
            exchange.transport.resume_reading()
        await exchange.over
