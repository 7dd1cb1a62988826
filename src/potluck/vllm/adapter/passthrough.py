"""The last segment of a client's own request: vLLM gets it as it came, and its events go back beside their tokens.

vLLM makes the prompt of a chat itself. KV is bound to the tokens that it was computed for, so that it never gets what
belongs to others; but it would compute everything anew, and the sender would wait for nothing. So it is asked first
what its prompt is, and where that begins otherwise whoever planned the route is told.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from potluck.api.http import HttpRefusal, error_object
from potluck.api.segments import CHATS, ClientBody
from potluck.vllm.adapter.adapter_service import ActiveSegment, AdapterService
from potluck.vllm.adapter.segment_lines import SegmentLines, end_of
from potluck.vllm.adapter.vllm_requests import (
    Json,
    PromptPart,
    VllmEventReader,
    cached_of,
    folded,
    moves_of,
    refusal_of,
)

OTHER_PROMPT = "other_prompt"
ALIVE_S = 1.0
RENDER = "/v1/chat/completions/render"
LONGEST_ERROR = 1 << 14
GIVEN_UP = (None, "abort", "error")
"""Reasons to end that are none."""


def own_request(part: PromptPart, own: ClientBody, within_s: float) -> Json:
    """What vLLM is asked."""
    body = own.body
    made: Json = {**body, "model": part.asked.model, "return_token_ids": True, "n": 1}
    if body.get("stream"):
        options = body.get("stream_options")
        made["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if isinstance(seed := body.get("seed"), int):
        made["seed"] = folded(seed)
    moves = moves_of(part, None, 0.0, within_s)
    if body.get("prompt_logprobs") is not None or body.get("echo"):
        moves.pop("kv_transfer_params", None)  # What is told of a prompt must be computed.
    return made | moves


@dataclass(slots=True)
class PassthroughEvent:
    """Of one event, or of a whole answer: its tokens, why it ended if it did, and what the client is told."""

    shown: Json
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    cached: int | None = None
    prompt_tokens: int | None = None

    @property
    def lines(self) -> list[Json]:
        lines: list[Json] = [{"token": token} for token in self.tokens]
        return [*lines, {"said": self.shown}]


def said_of(said: Json, *, ids: bool) -> PassthroughEvent:
    """`ids`: whether the client itself wants tokens."""
    found = PassthroughEvent(said, cached=cached_of(said))
    usage = said.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
        found.prompt_tokens = usage["prompt_tokens"]
    choices = said.get("choices")
    shown = {name: value for name, value in said.items() if name != "kv_transfer_params"}
    if isinstance(choices, list) and choices:
        choice = choices[0]
        found.tokens = list(choice.get("token_ids") or ())
        found.reason = choice.get("finish_reason")
        if not ids:
            kept = {
                name: value for name, value in choice.items() if name not in ("token_ids", "prompt_token_ids")
            }
            shown["choices"] = [kept]
    if not ids:
        shown.pop("prompt_token_ids", None)
    found.shown = shown
    return found


async def answer_own(
    request: web.Request, service: AdapterService, part: PromptPart, own: ClientBody, held: ActiveSegment
) -> web.StreamResponse:
    telling, came_s = SegmentLines(request, service), time.monotonic()
    told, cached, prompt_tokens = 0, 0, len(part.tokens)
    reason: str | None = None
    first_s: float | None = None
    try:
        async with asyncio.timeout(service.limits.deadline_s):
            if part.received and own.path == CHATS:
                prompt = await _prompt(service, part, own)
                if prompt is not None and prompt[: part.received] != list(part.tokens[: part.received]):
                    await telling.say({"prompt": prompt})
                    problem = "vLLM makes another prompt of these messages"
                    end = end_of("error", part, 0, 0) | {"code": OTHER_PROMPT, "problem": problem}
                    return await telling.end(end)
            async for said in _answer(service, part, own, telling):
                cached, reason = said.cached or cached, said.reason or reason
                prompt_tokens = said.prompt_tokens or prompt_tokens
                if said.tokens and first_s is None:
                    first_s = time.monotonic()
                    held.computed()
                told += len(said.tokens)
                await telling.say(*said.lines)
        if reason in GIVEN_UP or not told:
            raise HttpRefusal(503, f"vLLM ended the request ({reason or 'without a word'})", "try_again")
    except (HttpRefusal, TimeoutError) as error:
        if not telling.begun:
            raise
        code = error.code if isinstance(error, HttpRefusal) else "deadline"
        line = str(error) or f"it took longer than {service.limits.deadline_s:g} s"
        if isinstance(error, HttpRefusal) and error.status == 400:
            await telling.say({"refused": error_object(400, line, param=error.param, code=code)})
        return await telling.end(end_of("error", part, cached, told) | {"code": code, "problem": line})
    service.prompt_tokens += prompt_tokens
    service.output_tokens += told
    end = end_of("length" if reason == "length" else "stop", part, cached, told)
    end |= {"prompt_tokens": prompt_tokens, "ttft_s": (first_s or time.monotonic()) - came_s}
    return await telling.end(end)


async def _prompt(service: AdapterService, part: PromptPart, own: ClientBody) -> list[int] | None:
    """What vLLM makes of a chat; None where it does not say."""
    asked = {**own.body, "model": part.asked.model, "stream": False, "stream_options": None}
    try:
        async with service.session.post(f"{service.server.base}{RENDER}", json=asked) as answer:
            text = (
                await answer.content.read()
                if answer.status == 200
                else await answer.content.read(LONGEST_ERROR)
            )
            if answer.status in (400, 422):
                raise refusal_of(answer.status, text)
            found = json.loads(text).get("token_ids") if answer.status == 200 else None
            return found if isinstance(found, list) else None
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error


async def _answer(
    service: AdapterService, part: PromptPart, own: ClientBody, telling: SegmentLines
) -> AsyncIterator[PassthroughEvent]:
    body, ids = own_request(part, own, service.limits.handover_s), bool(own.body.get("return_token_ids"))
    alive = asyncio.create_task(_alive(service, telling)) if not body.get("stream") else None
    try:
        async with service.session.post(f"{service.server.base}{own.path}", json=body) as answer:
            if answer.status != 200:
                raise refusal_of(answer.status, await answer.content.read(LONGEST_ERROR))
            if not body.get("stream"):
                yield said_of(await answer.json(), ids=ids)
                return
            events = VllmEventReader()
            async for data in answer.content.iter_any():
                for said in events.feed(data):
                    yield said_of(said, ids=ids)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error
    finally:
        if alive is not None:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)


async def _alive(service: AdapterService, telling: SegmentLines) -> None:
    """An answer that comes at once says nothing until then; that vLLM goes on is told by its steps."""
    count = service.connector_events.steps.count
    while True:
        await asyncio.sleep(ALIVE_S)
        if service.connector_events.steps.count > count:
            count = service.connector_events.steps.count
            await telling.say({"steps": count})
