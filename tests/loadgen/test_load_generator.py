"""The load generator: what it sends, what it counts, and from when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.types import Slo
from potluck.loadgen import load_client


class Server:
    """Answers each request with its `max_tokens` events, one at a time."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.gate: asyncio.Event | None = None

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.heads.append(head)
            self.bodies.append(body)
            if self.gate is not None:
                await self.gate.wait()
            writer.write(self.answer(body))
            await writer.drain()
        finally:
            self.open -= 1
            writer.close()

    def answer(self, body: dict[str, Any]) -> bytes:
        match body["model"]:
            case "full":
                return _http(429, b'{"error": {"message": "full"}}', "Retry-After: 3\r\n")
            case "cut":
                return _http(200, b'data: {"choices":[{"text":"a"}]}\n\n', length=1000)
            case "broken":
                return _http(200, b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n')
        chat = "messages" in body
        piece = {"delta": {"content": "a"}} if chat else {"text": "a"}
        text = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
        text += [{"choices": [piece]}] * body["max_tokens"]
        text += [{"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}]
        events = [f"data: {json.dumps(item)}\r\n\r\n" for item in text]
        return _http(200, ("".join(events) + ": nothing\n\ndata: [DONE]\n\n").encode())


def _http(status: int, body: bytes, extra: str = "", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    listening = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server, f"http://127.0.0.1:{port}/v1"


def test_load_generator_counts_answers_and_errors_by_kind() -> None:
    async def run() -> tuple[Server, list[load_client.TimedRequest]]:
        async with _serving() as (server, url):
            rows = [(0.0, name, 5, 3) for name in ("m", "m", "full", "cut", "broken")]
            asked = list(load_client.shots(rows, key="secret"))
            await load_client.fire(url, asked, within_s=10.0)
            return server, asked

    server, asked = asyncio.run(run())
    result = load_client.measured(asked, Slo(10.0, 10.0))
    assert (result.requests, result.answered, result.attained) == (5, 2, 2)
    assert dict(result.errors) == {"HTTP 429": 1, "cut off": 1, "error in the stream": 1}
    assert dict(result.examples) == {"HTTP 429": "full", "cut off": "cut off", "error in the stream": "gone"}
    assert result.attainment == pytest.approx(0.4), "who was refused kept no objective"
    assert result.output_tokens == 6
    assert asked[2].retry_after == "3"
    assert all(head.startswith("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:") for head in server.heads)
    assert all("Authorization: Bearer secret" in head for head in server.heads)
    assert all(len(body["prompt"]) == 5 and body["ignore_eos"] for body in server.bodies)
    assert "secret" not in repr(asked)


def test_chat_ttft_is_measured_to_its_first_text() -> None:
    async def run() -> tuple[Server, load_client.TimedRequest]:
        async with _serving() as (server, url):
            (request,) = load_client.shots([(0.0, "m", 9, 4)], style="chat", until_eos=True)
            await load_client.fire(url, [request], keep_text=True, within_s=10.0)
            return server, request

    server, request = asyncio.run(run())
    assert (request.pieces, request.told_tokens, request.text) == (4, 4, "aaaa")
    assert "ignore_eos" not in server.bodies[0]
    assert server.heads[0].startswith("POST /v1/chat/completions ")


def test_open_loop_latency_counts_from_the_scheduled_time() -> None:
    """A request that waits for its turn is late by that, whoever kept it."""
    request = load_client.TimedRequest(
        1.0, "m", [1], 3, sent_s=4.0, first_s=4.5, last_s=5.5, pieces=3, ended=True, done_s=5.5, status=200
    )
    result = load_client.measured([request], Slo(3.0, 1.0))
    assert result.ttft_s is not None
    assert result.ttft_s.mean == pytest.approx(3.5)
    assert result.late_s == pytest.approx(3.0)
    assert load_client.tpot_of(request) == pytest.approx(0.5)
    assert not load_client.kept(request, Slo(3.0, 1.0))
    assert load_client.kept(request, Slo(3.5, 0.5))


def test_closed_loop_keeps_its_concurrency() -> None:
    async def run() -> tuple[Server, list[load_client.TimedRequest]]:
        async with _serving() as (server, url):
            server.gate = asyncio.Event()
            rows = load_client.same([0.0] * 7, "m", 4, 2)
            running = asyncio.create_task(
                load_client.take_turns(url, load_client.shots(rows), 3, within_s=10.0)
            )
            while len(server.bodies) < 3:
                await asyncio.sleep(0.01)
            server.gate.set()
            return server, await running

    server, sent = asyncio.run(run())
    assert server.most_open == 3
    assert len(sent) == 7
    assert load_client.measured(sent).answered == 7
    assert max(request.at_s for request in sent) > 0, "the later ones begin later"


def test_unreachable_server_is_counted_as_no_connection() -> None:
    (request,) = load_client.shots([(0.0, "m", 1, 1)])
    asyncio.run(load_client.fire("http://127.0.0.1:9", [request], within_s=5.0))
    assert load_client.kind_of(request) == "no connection"
    for wrong in ("localhost:8000", "ftp://x", "http://", "http://h:99999"):
        with pytest.raises(InputError):
            load_client.server_of(wrong)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_observed_values(values: list[float]) -> None:
    result = load_client.percentiles(values)
    assert result is not None
    assert {result.p50, result.p90, result.p99, result.most} <= set(values)
    assert result.p50 <= result.p90 <= result.p99 <= result.most == max(values)
    assert sum(value <= result.p90 for value in values) >= 0.9 * len(values)


@given(st.integers(0, 10), st.floats(0.5, 50.0))
def test_poisson_times_have_their_rate_and_prompts_their_length(seed: int, rate_per_s: float) -> None:
    times = load_client.poisson(Random(seed), rate_per_s, 400, None)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 0.7 < 399 / times[-1] / rate_per_s < 1.4
    assert max(load_client.poisson(Random(seed), rate_per_s, None, 3.0)) <= 3.0
    assert len(load_client.prompt_of(Random(seed), 33, "ids")) == 33
    assert load_client.prompt_of(Random(seed), 33, "text") != load_client.prompt_of(
        Random(seed + 1), 33, "text"
    )
