"""Rubbish for the gateway's public port: no crash, no 500, no growth.

A gateway whose engines answer at once gets spoiled, oversized and cut requests, plain noise, and, where it is on the
path, what schemathesis makes up. A crash is a 500, an answer that is no HTTP, or a gateway that is gone. Growth is
what its memory gains from the second half of the noise.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from parts import common
from potluck.core.values.sampling import SampledToken
from potluck.gateway.admin.counters import Counters
from potluck.gateway.http.server import open_port
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import AnswerSink, ChoiceRequest

SEED = 14
MODEL = "tiny"
TARGETS = {"crashes": ("==", 0.0), "growth_mb": ("<=", 8.0), "unanswered": ("==", 0.0)}
PATHS = "/v1/completions /v1/chat/completions /v1/models /v1/embeddings /ready /%"
SOUND: list[dict[str, Any]] = [
    {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "n": 2, "stop": ["x"], "logprobs": 2},
    {"model": MODEL, "prompt": [[1], [2, 3]], "stream": True, "stream_options": {"include_usage": True}},
    {"model": "plain", "messages": [{"role": "user", "content": "Hi"}], "seed": 3, "temperature": 0.5},
]
TEXT: tuple[str, dict[str, Any]] = ("text_completion", {"text": "y"})
CHAT: tuple[str, dict[str, Any]] = ("chat.completion", {"message": {"role": "assistant", "content": "y"}})
EXTRAS = ("", "x-potluck-class: batch\r\n", "x-potluck-deadline-ms: 1e9\r\n", "Origin: http://x\r\n")
INTEGERS = (-1, 0, 1, 1 << 31, 1 << 63, -(1 << 70))
LIMITS = (None, True, *INTEGERS, 1e308, "", "x" * 5000, [], {}, [[]], "\u0000", "é")


class Instant:
    def begin(self, asked: ChoiceRequest, answer: AnswerSink) -> None:
        if not asked.prompt:
            answer.relay_begin(200, b"application/json")
            kind, part = CHAT if b"chat" in asked.path else TEXT
            body = {"id": "x", "created": 1, "model": "plain", "object": kind}
            body |= {"choices": [{"index": 0, "finish_reason": "stop", **part}]}
            answer.relay(json.dumps(body).encode())
            answer.relay_end()
        elif not answer.tokens([SampledToken(7, -0.5, ((7, -0.5),)), SampledToken(8, -0.5, ())]):
            answer.finished("length", 0)

    def cancel(self, request: str) -> None: ...

    def room(self, request: str, there: bool) -> None: ...

    def act(self, actions: object) -> None: ...

    def gone(self, replica: str) -> None: ...


async def serve() -> None:
    cards = {
        MODEL: ModelCard(MODEL, 4096, None, vocab=100),
        "plain": ModelCard("plain", 4096, None, plain=True),
    }
    listener = await open_port(ClientHandler(cards, Instant(), Counters()), "127.0.0.1", 0)
    print(listener.address, flush=True)
    await asyncio.Event().wait()


class Gateway:
    def __init__(self) -> None:
        arguments = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.address = ("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        self.sent = self.crashes = self.unanswered = 0

    def send(self, data: bytes, *, answered: bool = True, chunk: int = 1 << 16, whole: bool = True) -> int:
        """The status of its answer; 0 where there is none."""
        self.sent += 1
        with socket.create_connection(self.address, timeout=20) as link:
            try:
                for place in range(0, len(data), chunk):
                    link.sendall(data[place : place + chunk])
                if not whole:
                    return 0
                link.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has heard enough
            answer = self._heard(link)
        match = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
        if match is None:
            self.crashes += bool(answer)
            self.unanswered += answered and not answer
            return 0
        self.crashes += match[1] == b"500"
        return int(match[1])

    def _heard(self, link: socket.socket) -> bytes:
        text = b""
        try:
            while len(text) < 64 and (more := link.recv(4096)):
                text += more
        except OSError:
            pass
        return text

    @property
    def memory_mb(self) -> float:
        return common.resident_bytes(self.process.pid) / 1e6

    def end(self) -> None:
        self.crashes += self.process.poll() is not None
        self.process.terminate()
        self.process.wait(10)


def request(path: str, body: bytes, method: str = "POST", extra: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode("latin-1", "replace") + body


def spoiled(draw: random.Random) -> bytes:
    body: Any = dict(draw.choice(SOUND))
    for _ in range(draw.randint(0, 3)):
        others = ("service_tier", "priority", "top_p", "stop_token_ids", "max_completion_tokens")
        body[draw.choice([*body, *others])] = draw.choice(LIMITS)
    data = json.dumps(body).encode()
    if draw.random() < 0.3:
        place = draw.randrange(len(data))
        data = data[:place] + draw.randbytes(draw.randint(0, 4)) + data[place + draw.randint(0, 4) :]
    return data


def noise(gateway: Gateway, draw: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        kind = draw.random()
        method = draw.choice(("POST", "POST", "POST", "GET", "PUT", "TRACE", "x"))
        extra = draw.choice(EXTRAS)
        whole = request(draw.choice(PATHS.split()), spoiled(draw), method, extra)
        if kind < 0.7:
            gateway.send(whole)
        elif kind < 0.85:
            gateway.send(whole[: draw.randrange(len(whole))], answered=False, whole=draw.random() < 0.5)
        else:
            gateway.send(draw.randbytes(draw.randint(1, 400)) + b"\r\n\r\n", answered=False)


def too_much(gateway: Gateway) -> None:
    """1 MB of headers, 100 MB of body, told or not, and deep nesting."""
    large = b"x" * (1 << 20)
    first = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for head in (b"X-A: " + large, b"\r\n".join(b"X-%d: 1" % n for n in range(90_000)), b"Cookie: " + large):
        gateway.send(first + head + b"\r\n\r\n", answered=False)
    body = b'{"model": "tiny", "prompt": "' + b"x" * 100_000_000 + b'"}'
    gateway.send(request("/v1/completions", body), answered=False)
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    gateway.send(chunked + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 1600, answered=False)
    for nested in (b"[" * 1_000_000, b'{"a":' * 500_000):
        gateway.send(request("/v1/chat/completions", nested))


def schemathesis(gateway: Gateway, examples: int) -> dict[str, float]:
    tool = shutil.which("schemathesis")
    if tool is None:
        common.say("gateway_fuzz: schemathesis is not on the path, its part is left out")
        return {}
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [tool, "run", f"{gateway.url}/openapi.json"]
    command += ["--checks", checks, "--max-examples", str(examples), "--seed", str(SEED), "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps notes where it runs
        completed = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=folder)
    if completed.returncode:
        common.say(completed.stdout[-6000:] + completed.stderr[-2000:])
    return {"schemathesis_failures": float(completed.returncode != 0)}


def measure(quick: bool) -> dict[str, float]:
    draw, gateway = random.Random(SEED), Gateway()
    rounds = 1_500 if quick else 20_000
    began_s = time.monotonic()
    try:
        too_much(gateway)
        noise(gateway, draw, rounds // 2)
        before_mb = gateway.memory_mb
        noise(gateway, draw, rounds // 2)
        too_much(gateway)
        growth_mb = gateway.memory_mb - before_mb
        more = schemathesis(gateway, 20 if quick else 100)
        gateway.crashes += gateway.send(request("/health", b"", "GET")) != 200
    finally:
        gateway.end()
    return {
        "requests": float(gateway.sent),
        "crashes": float(gateway.crashes),
        "unanswered": float(gateway.unanswered),
        "growth_mb": round(max(growth_mb, 0.0), 1),
        "seconds": round(time.monotonic() - began_s, 1),
        **more,
    }


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asyncio.run(serve())
    else:
        common.run("gateway_fuzz", measure, TARGETS, seeds=(SEED,))
