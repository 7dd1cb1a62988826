"""Mock engines of a world: their HTTP and KV faces as the gateway and other engines see them, and what fails in them.

The next token is a hash of all tokens before it, so that any answer can be checked whatever became of it on the way.
KV is that hash: a receiver knows the tokens, and takes no other. The engine that ships as a mock has threads for its
KV; this one speaks the same HTTP (docs/engine.md) within the world's loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from worlds.loop import WorldLoop
from worlds.virtual import DEAD, Process

VOCAB, END = 280, 0
MOST_SENT = 60  # Segments of one request: of 16 attempts, with prompts apart.
MOST_REFUSED, MOST_REFUSED_BY_ONE_BRAIN = 5, 4  # With two retries; a later Brain counts failures from 0.
REFUSALS = ((503, "try_again"), (429, "overloaded"), (500, "internal_error"))
MASK = (1 << 64) - 1
HTTP, KV = 8000, 9000
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nx-potluck-fingerprint: %b\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LIES = ("vocabulary", "early", "counts", "more", "garbage", "no_http", "silent_end", "huge")


def history_of(tokens: Sequence[int], before: int = 0x243F6A8885A308D3) -> int:
    for token in tokens:
        before = (before * 0x9E3779B97F4A7C15 + (token + 1) * 0xD6E8FEB86659FD93) & MASK
    return before


def next_token(history: int, barred: bool) -> int:
    mixed = ((history ^ (history >> 29)) * 0xBF58476D1CE4E5B9) & MASK
    token = ((mixed ^ (mixed >> 32)) >> 3) % VOCAB
    return 1 if barred and token == END else token


def right_answer(prompt: Sequence[int], most: int, least: int) -> list[int]:
    history, tokens = history_of(prompt), []
    while len(tokens) < most:
        tokens.append(next_token(history, len(tokens) < least))
        if tokens[-1] == END:
            break
        history = history_of(tokens[-1:], history)
    return tokens


class SegmentRun:
    """One segment at this engine: a prompt's part that is handed on, or the decode."""

    def __init__(self, engine: Engine, connection: EngineHttp, body: dict[str, Any]) -> None:
        self.engine, self.connection, self.body = engine, connection, body
        self.tokens: list[int] = body["tokens"]
        self.output = 0
        self.history = 0
        self.timer: asyncio.TimerHandle | None = None
        self.halted: Any = None  # What goes on when an engine that was stuck is not any more.
        self.fetching: asyncio.Task[None] | None = None
        self.over = False
        self.known = engine.statuses > 1  # Whoever asks a second time has the first answer.
        engine.running[self] = None
        engine.loop.told("segment", engine.name, body["request"])
        fingerprint = engine.fingerprint.encode()
        connection.write((STREAM % fingerprint) + CHUNKED)
        if self.hands_on:
            self.say({"handle": body["handle"], "tokens": body["stop"]})
        if "source" in body:
            self.fetching = engine.loop.create_task(self._fetch())
        else:
            self._compute()

    @property
    def hands_on(self) -> bool:
        return "stop" in self.body

    def say(self, *lines: object) -> None:
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        self.connection.piece(text)

    def _later(self, wait_s: float, call: Any) -> None:
        self.timer = self.engine.loop.call_later(wait_s * self.engine.slow, call)

    def _compute(self) -> None:
        start = self.body.get("start", 0)
        stop = self.body["stop"] if self.hands_on else len(self.tokens)
        self._later(0.01 + (stop - start) * self.engine.token_s / 20, self._computed)

    async def _fetch(self) -> None:
        source = self.body["source"]
        host, _, port = source["kv"].rpartition(":")
        wanted = history_of(self.tokens[: self.body["start"]])
        try:
            async with asyncio.timeout(20.0):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{source['handle']} {self.engine.kv_version} {self.known:d}\n".encode())
                line = await reader.readline()
                writer.close()
        except (OSError, TimeoutError) as error:
            line = str(error).encode()
        if self.over:
            return
        self.fetching = None
        if line != b"%d\n" % wanted:
            self.end("error", "hand_over")
        else:
            self._compute()

    def _computed(self) -> None:
        engine, body = self.engine, self.body
        if engine.stuck:
            self.halted = self._computed
            return
        engine.prompt_tokens += len(self.tokens)
        if self.hands_on:
            self.say({"computed": body["stop"] - body.get("start", 0), "handle": body["handle"]})
            if engine.kept.setdefault(body["handle"], self) is not self:
                engine.loop.broken.append("one handle is of two caches")
            self._later(30.0 / engine.slow, self._not_fetched)
        else:
            self.history = history_of(self.tokens)
            self._decode()

    def fetched(self) -> None:
        if not self.over:
            self.end("handed_on")

    def _not_fetched(self) -> None:
        self.end("error", "not_fetched")

    def _decode(self) -> None:
        engine, body = self.engine, self.body
        if engine.stuck:
            self.halted = self._decode
            return
        if engine.lies and engine.loop.chance.random() < 0.4:
            self._lie(engine.loop.chance.choice(engine.lies))
            return
        lines: list[bytes] = []
        for _ in range(engine.loop.chance.randint(1, engine.burst)):
            token = next_token(self.history, self.output < body["min_tokens"])
            self.history = history_of((token,), self.history)
            self.output += 1
            lines.append(b'{"token":%d}\n' % token)
            ended = token in body.get("end_tokens", ())
            if ended or self.output >= body["max_tokens"]:
                break
        brought = engine.loop.brought
        brought[body["request"]] = max(len(self.tokens) + self.output, brought.get(body["request"], 0))
        self.connection.piece(b"".join(lines))
        if ended or self.output >= body["max_tokens"]:
            self.end("stop" if ended else "length")
            return
        self._later(len(lines) * engine.token_s, self._decode)

    def _lie(self, how: str) -> None:
        self.engine.loop.told("lie", self.engine.name, how)
        if how == "vocabulary":
            self.say({"token": 10_000})
        elif how == "early" and self.output < self.body["min_tokens"]:
            self.say({"token": END})
            self.output += 1
            self.end("stop")
        elif how == "more" and self.output:
            self.say({"ended": "length", **self.counts}, {"token": 3})
        elif how == "garbage":
            self.connection.piece(self.engine.loop.chance.randbytes(40) + b"\n")
        elif how == "no_http":
            self.connection.write(b"\0\1\2 what\r\n\r\n")
        elif how == "silent_end":
            self.over = True
            self.engine.running.pop(self, None)
            self.connection.finish()
        elif how == "huge":
            self.connection.piece(b"[" * 70_000)
        else:
            self.output += 3
            self.end("length")
        if not self.over:  # it does not know, and goes on until it hears that nobody listens
            self._later(self.engine.token_s, self._decode)

    @property
    def counts(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.tokens), "cached_tokens": 0, "output_tokens": self.output}

    def end(self, reason: str, code: str = "") -> None:
        if self.over:
            return
        self.say({"ended": reason, **self.counts, **({"code": code} if code else {})})
        self.drop()
        self.connection.finish()

    def drop(self) -> None:
        self.over = True
        self.engine.running.pop(self, None)
        self.engine.kept.pop(self.body.get("handle", ""), None)
        if self.timer is not None:
            self.timer.cancel()
        if self.fetching is not None:
            self.fetching.cancel()


class EngineHttp(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._held = b""
        self._run: SegmentRun | None = None
        self._waiting = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.write = transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        if self._run is not None:
            self._run.drop()

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        while True:
            head, found, rest = self._held.partition(b"\r\n\r\n")
            if not found:
                return
            size = (
                int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                if b"content-length: " in head
                else 0
            )
            if len(rest) < size:
                return
            self._held = rest[size:]
            method, path, _ = head.split(b" ", 2)
            self._asked(method, path.partition(b"?")[0], rest[:size])

    def _asked(self, method: bytes, path: bytes, body: bytes) -> None:
        engine = self.engine
        if engine.mute:
            return
        if path == b"/status":
            self.reply(engine.status())
        elif path == b"/segments":
            self._segment(json.loads(body))
        elif path == b"/cache":
            self.reply('{"epoch":1,"reports":[]}')
        elif path == b"/drain":
            engine.draining = not json.loads(body or b"{}").get("resume", False)
            self.reply("{}")
        elif path == b"/role":
            engine.role = json.loads(body)["role"]
            self.reply("{}")
        elif path == b"/peers":
            engine.loop.call_later(engine.peers_s, self._meet, frozenset(json.loads(body)["peers"]))
        elif path == b"/health":
            self.reply("{}")
        else:
            self.refuse(404, "not_found")

    def _meet(self, peers: frozenset[str]) -> None:
        self.engine.peers = peers
        self.reply("{}")

    def _segment(self, body: dict[str, Any]) -> None:
        engine, chance = self.engine, self.engine.loop.chance
        engine.salted(body)
        if engine.refuses and chance.random() < engine.refuses:
            refusal = REFUSALS[engine.refusal % len(REFUSALS)]
            # It counts against its retries, once for an attempt: of both segments of one, each may be refused.
            if refusal[0] == 429 and not body.get("start", 0):
                count = engine.loop.refused[body["request"]] = engine.loop.refused.get(body["request"], 0) + 1
                if count == (MOST_REFUSED if engine.loop.replaces_brains else MOST_REFUSED_BY_ONE_BRAIN):
                    engine.loop.broken.append(f"a request that was refused {count - 1} times is sent again")
            self.refuse(*refusal)
        elif engine.draining:
            self.refuse(503, "draining")
        elif "source" in body and body["source"]["kv"] not in engine.peers:
            engine.strange(body["source"]["kv"])
            self.refuse(403, "not_a_peer")
        else:
            self._run = SegmentRun(engine, self, body)

    def reply(self, text: str) -> None:
        body = text.encode()
        self.write(OK % len(body) + body)

    def refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": {"message": code, "code": code}}).encode()
        self.write(b"HTTP/1.1 %d Other\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    def piece(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        self._run = None
        self.write(b"0\r\n\r\n")


class EngineKv(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._held = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._held.endswith(b"\n"):
            handle, *self._peer = self._held.split()
            self._look(handle.decode(), 200)

    def _look(self, handle: str, tries: int) -> None:
        """The receiver may come before the prompt is computed."""
        engine = self.engine
        run = engine.kept.get(handle)
        if run is None or engine.mute:
            if tries and not self.transport.is_closing():
                engine.loop.call_later(0.05, self._look, handle, tries - 1)
            else:
                self.transport.close()
            return
        other_release = int(self._peer[0]) != engine.kv_version
        if other_release and run.known and int(self._peer[1]):
            engine.loop.broken.append(
                f"{engine.name} is to hand KV to an engine that is known to be of another release"
            )
        if engine.forgets or other_release:
            engine.loop.told("kv lost", engine.name, handle[:6])
            self.transport.abort()
            run.end("error", "hand_over")
            return
        history = history_of(run.tokens[: run.body["stop"]]) ^ (1 if engine.wrong_kv else 0)
        self.transport.write(b"%d\n" % history)
        run.fetched()


class Engine:
    """One engine process. A fault sets some of these; a restart begins anew."""

    def __init__(
        self, loop: WorldLoop, process: Process, role: str, fingerprint: str, token_s: float
    ) -> None:
        self.loop, self.process, self.role, self.fingerprint = loop, process, role, fingerprint
        self.token_s, self.name = token_s, process.host.name
        self.began_s, self.boots_s = loop.now_s, 0.0
        self.running: dict[SegmentRun, None] = {}
        self.prompt_tokens, self.statuses, self.kv_version = 0, 0, 2
        self.kept: dict[str, SegmentRun] = {}
        self.burst = 4
        self.slow = 1.0
        self.refuses, self.refusal = 0.0, 0
        self.lies: tuple[str, ...] = ()
        self.draining = self.stuck = self.mute = self.forgets = self.wrong_kv = False
        self.peers = frozenset[str]()
        # One that has just begun has other things to do. Apart from what else is drawn.
        self.peers_s = random.Random(f"{self.name} {self.began_s}").choice((0.0, 0.02, 0.6, 1.5))
        loop.network.held.pop((self.name, HTTP), None)
        process.run(loop.create_task, self._listen())

    async def _listen(self) -> None:
        await self.loop.create_server(lambda: EngineHttp(self), self.name, HTTP)
        await self.loop.create_server(lambda: EngineKv(self), self.name, KV)

    @property
    def url(self) -> str:
        return f"http://{self.name}:{HTTP}"

    @property
    def alive(self) -> bool:
        return self.process.state != DEAD

    def status(self) -> str:
        state = ("drained" if not self.running else "draining") if self.draining else "ready"
        running = len(self.running)
        self.statuses += 1
        return (
            f'{{"model":"m","fingerprint":"{self.fingerprint}","role":"{self.role}","state":"{state}",'
            f'"kv":"{self.name}:{KV}","uptime_s":{self.loop.now_s - self.began_s!r},"waiting":0,"running":{running},'
            f'"todo_tokens":0,"context_tokens":{40 * running},"free_blocks":{9000 - running},"total_blocks":9000,'
            f'"step_mean_s":{self.token_s!r},"prompt_tokens":{self.prompt_tokens},"links":[],"kv_version":{self.kv_version},"version":"1"}}'
        )

    def unstick(self) -> None:
        """What stood still goes on."""
        self.stuck = False
        for run in tuple(self.running):
            halted, run.halted = run.halted, None
            if halted is not None and self.alive:
                self.process.run(halted)

    def strange(self, kv: str) -> None:
        """It is to fetch from somebody it was not told of: nobody may be sent there so early, unless one of them, or
        the gateway, was in trouble since it began, or the gateway may not know yet that it began anew."""
        self.loop.told("not a peer", self.name, kv)
        source = kv.partition(":")[0]
        if self.statuses > 1 and not any(
            trouble.to_s >= self.loop.now_s
            and (trouble.where in ("gw", "brain", source) or trouble.from_s > self.began_s)
            for trouble in self.loop.troubles
        ):
            self.loop.broken.append(f"{self.name} gets requests before it has heard of {kv}")

    def salted(self, body: dict[str, Any]) -> None:
        """Prefixes are shared by salt: one that two tenants have would show one the other's. A tenant has one salt in
        all segments and attempts of all its requests. And a request is not sent for ever."""
        sent = self.loop.sent[body["request"]] = self.loop.sent.get(body["request"], 0) + 1
        if sent == MOST_SENT:
            self.loop.broken.append(f"a request was sent to engines {sent} times")
        alone = any(item.where != self.name and item.to_s >= self.began_s for item in self.loop.troubles)
        if self.fingerprint != "f" and self.statuses > 1 and not alone:
            self.loop.broken.append(f"{self.name} has other weights than all others, and is sent requests")
        tenant, salt = body.get("tenant", ""), body.get("salt", "")
        salts = self.loop.salts
        sharing = [other for other, known in salts.items() if salt and known == salt and other != tenant]
        if sharing:
            self.loop.broken.append(f"{self.name}: tenants {tenant} and {sharing[0]} share a salt")
        elif not salt:
            self.loop.broken.append(f"{self.name}: segment {sent} of a request of {tenant} has no salt")
        elif salts.setdefault(tenant, salt) != salt:
            self.loop.broken.append(f"{self.name}: segment {sent} of a request of {tenant} has another salt")
