"""An engine's server in this process: a small model, a tokenizer of single characters, a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, ClientTimeout
from engine_models import KINDS, VOCAB
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.tokenizer import ModelTokenizer
from potluck.core.values.model import Model
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.serve import EngineSettings, local_executor, service_of
from potluck.engine.server.engine_app import EngineServer, open_server
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.http_connection import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.kv.peer_connections import ANY_PORT

NAME = "tiny"
TRIAL = KvSettings(fleet=(("127.0.0.1", ANY_PORT),))  # Caches may come from any engine of this machine.
LETTERS = [chr(code) for code in range(0x20, 0x7F)] + [chr(code) for code in range(0xC0, 0x17F)]


def letter_tokenizer() -> ModelTokenizer:
    """Token n is the n-th letter."""
    vocab = {letter: place for place, letter in enumerate(LETTERS[:VOCAB])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = Fuse()
    return ModelTokenizer(tokenizer)


def letters_of(tokens: list[int] | tuple[int, ...]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def make_service(
    kind: str = "hybrid",
    limits: RequestLimits | None = None,
    text: bool = True,
    kv: KvSettings = TRIAL,
    **fields: Any,
) -> EngineService:
    settings = EngineSettings(
        **{"max_running": 8, "max_tokens": 512, "prefix_cache_bytes": 2_000_000, **fields}
    )
    config = KINDS[kind]
    model: Model = config.model
    executor = local_executor(config, RandomSource(7), settings.size(model), "cpu")
    words = letter_tokenizer() if text else None
    return service_of(executor, settings, name=NAME, tokenizer=words, limits=limits, kv=kv)


class Client:
    def __init__(self, service: EngineService, session: ClientSession, url: str, key: str | None) -> None:
        self.service, self.session, self.url = service, session, url
        self.kv = service.kv_connector.address if service.kv_connector else ""
        """Where caches are fetched from it."""
        self.opened: EngineServer
        """The server, if it is in this process."""
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=self.headers) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=self.headers) as reply:
            text = await reply.text()
            if reply.headers["Content-Type"].startswith("application/json"):
                return reply.status, json.loads(text)
            if reply.headers["Content-Type"].startswith("text/event-stream"):
                assert text.endswith("data: [DONE]\n\n")
                events = [line.removeprefix("data: ") for line in text.split("\n\n")[:-2]]
                return reply.status, [json.loads(event) for event in events]
            return reply.status, [json.loads(line) for line in text.splitlines()]

    async def put(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.put(self.url + path, json=body, headers=self.headers) as reply:
            return reply.status, await reply.json()

    async def segment(self, tokens: list[int], **fields: object) -> tuple[int, Any]:
        return await self.post("/segments", {"request": "r", "model": NAME, "tokens": tokens, **fields})

    async def until_idle(self) -> None:
        """All requests have ended, and no block is lost."""
        for _ in range(6000):
            if await self.service.hub.ask(lambda loop, _: loop.idle):
                break
            await asyncio.sleep(0.01)
        await self.service.hub.ask(lambda loop, _: loop.check())
        assert await self.service.hub.ask(lambda loop, _: loop.idle)


@asynccontextmanager
async def engine_client(service: EngineService, key: str | None = None) -> AsyncIterator[Client]:
    opened = await open_server(service, "127.0.0.1", 0, api_key=key)
    async with ClientSession(timeout=ClientTimeout(total=60)) as session:
        client = Client(service, session, opened.address, key)
        client.opened = opened
        try:
            yield client
        finally:
            await opened.close()


def run_async(resolved: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(resolved())  # type: ignore[arg-type]


def tokens_in(lines: list[dict[str, Any]]) -> list[int]:
    return [line["token"] for line in lines if "token" in line]
