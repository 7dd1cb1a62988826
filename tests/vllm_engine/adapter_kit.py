"""A vLLM adapter over a fake vLLM, with the test at the connector's end of the channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from potluck.api.http import ServedNames
from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.vllm.adapter.adapter_service import AdapterLimits, AdapterService, ConnectorEvents
from potluck.vllm.adapter.serve import build
from potluck.vllm.adapter_channel import AdapterChannel

HANDLE = "h" * 40
WORKER = {
    "worker": 0, "kv": ["127.0.0.1", 9000], "fingerprint": "vllm-1", "token_bytes": 512, "block_tokens": 32,
    "blocks": 100, "dtype": "float32", "version": VLLM_VERSION,
}  # fmt: skip


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdapterHarness:
    """An adapter's face before a made-up vLLM, whose connector's side of the channel is the test's."""

    def __init__(
        self, client: TestClient[Any, Any], service: AdapterService, channel: AdapterChannel
    ) -> None:
        self.client, self.service, self.channel = client, service, channel
        self.heard: list[dict[str, object]] = []

    def asked(self, **body: object) -> Any:
        text = {"request": "r", "model": "m", "tokens": list(range(100)), **body}
        return self.client.post("/segments", json=text)

    async def lines(self, **body: object) -> tuple[int, list[Any]]:
        async with self.asked(**body) as answer:
            return answer.status, [json.loads(line) async for line in answer.content]


@asynccontextmanager
async def running_adapter(tmp_path: Path, answer: Answer, **limits: float) -> AsyncIterator[AdapterHarness]:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:num_requests_running 0\n')

    async def models(request: web.Request) -> web.Response:
        listed = [{"id": "m", "max_model_len": 99, "parent": None}, {"id": "lora", "parent": "m"}]
        return web.json_response({"data": listed})

    async def rendered(request: web.Request) -> web.Response:
        """Ours, but for messages of one."""
        tokens = [9] * 100 if len((await request.json())["messages"]) == 1 else [*range(80), 7]
        return web.json_response({"token_ids": tokens})

    engine = web.Application()
    engine.router.add_post("/v1/completions", answer)
    engine.router.add_post("/v1/chat/completions", answer)
    engine.router.add_post("/v1/chat/completions/render", rendered)
    engine.router.add_get("/v1/models", models)
    engine.router.add_get("/metrics", metrics)
    connector_events = ConnectorEvents(tmp_path / "channel", 1)
    await connector_events.open()
    heard: list[dict[str, object]] = []
    channel = await asyncio.to_thread(AdapterChannel, str(tmp_path / "channel"), heard.append)
    channel.tell(WORKER)
    await connector_events.here.wait()
    async with TestServer(engine) as below:
        server: Any = SimpleNamespace(base=str(below.make_url("")).rstrip("/"))
        service = AdapterService("m", server, connector_events, AdapterLimits(**limits), frozenset())  # type: ignore[arg-type]
        async with TestClient(TestServer(build(service, None, ServedNames()))) as client:
            made = AdapterHarness(client, service, channel)
            made.heard = heard
            try:
                yield made
            finally:
                await service.close()
                channel.close()
                await connector_events.close()


async def streamed(request: web.Request, *said: object) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for item in said:
        await response.write(b"data: " + json.dumps(item).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def three_tokens(request: web.Request) -> web.StreamResponse:
    return await streamed(
        request,
        {"choices": [{"token_ids": [5, 6], "finish_reason": None}]},
        {"choices": [{"token_ids": [7], "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}},
    )
