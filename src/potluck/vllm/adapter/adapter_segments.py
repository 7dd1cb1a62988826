"""POST /segments before vLLM: the same lines as an embedded engine's (docs/engine.md).

A segment that decodes is one request to vLLM, whose tokens are passed on. One that hands on is a request for the
first tokens of the prompt and one token that nobody wants; its last line comes when the connector knows whether its
KV was fetched.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from potluck.api.http import HttpRefusal, error_object, parse_object
from potluck.api.segments import CHATS, UNSUPPORTED, ClientBody, segment_of
from potluck.core.values.kv_layout import kv_address
from potluck.kv.handles import checked_handle, new_handle
from potluck.vllm.adapter.adapter_service import SERVICE, ActiveSegment, AdapterService, SendResult
from potluck.vllm.adapter.vllm_requests import (
    Json,
    PromptPart,
    SegmentEvent,
    VllmEventReader,
    body_of,
    cached_of,
    folded,
    heard_of,
    moves_of,
    refusal_of,
)

FINGERPRINT = "X-Potluck-Fingerprint"


class SegmentLines:
    """Lines of an answer; its status is only said with the first."""

    def __init__(self, request: web.Request, service: AdapterService) -> None:
        headers = {"Content-Type": "application/x-ndjson", FINGERPRINT: service.fingerprint}
        self._request, self._response = request, web.StreamResponse(headers=headers)

    async def say(self, *lines: dict[str, object]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        await self._response.write(text)

    async def end(self, line: dict[str, object]) -> web.StreamResponse:
        await self.say(line)
        await self._response.write_eof()
        return self._response

    @property
    def begun(self) -> bool:
        return self._response.prepared


def end_of(reason: str | None, part: PromptPart, cached: int, told: int) -> dict[str, object]:
    own = max(0, min(cached - part.received, len(part.tokens))) if not part.hands_on else cached
    return {"ended": reason, "prompt_tokens": len(part.tokens), "cached_tokens": own, "output_tokens": told}


LEASE_S = 10.0
"""How long a receiver that came is waited for when it is heard of no more, as the KV sender has it."""


async def segments(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    segment_request, tokens = segment_of(parse_object(await request.read()))
    service.must_be(segment_request.model)
    if segment_request.source is not None:
        service.must_be_peer(kv_address(segment_request.source.kv, "source.kv"))
    part = PromptPart(segment_request, tokens)
    if not part.hands_on and segment_request.own is None and segment_request.max_tokens < 1:
        raise HttpRefusal(
            400, f"max_tokens: must be at least 1, is {segment_request.max_tokens}", param="max_tokens"
        )
    draws = segment_request.sampling
    if segment_request.generated and (draws.presence_penalty or draws.frequency_penalty or draws.json_schema):
        # vLLM takes what was generated before for the prompt, which these do not count.
        raise HttpRefusal(400, "vLLM cannot go on within an answer with penalties or a format", UNSUPPORTED)
    async with service.admitted(part.whole - part.received) as segment:
        if part.hands_on:
            return await _hand_on(request, service, part, segment)
        if segment_request.own is not None:
            return await answer_own(request, service, part, segment_request.own, segment)
        return await _decode(request, service, part, segment)


async def _answer(
    service: AdapterService, part: PromptPart, handle: str | None
) -> AsyncIterator[SegmentEvent]:
    """What vLLM says to a segment; Refused where it does not take it, or breaks off."""
    limits = service.limits
    lasts_s = min(limits.deadline_s + limits.lease_s, 3600.0)
    body = body_of(part, handle, lasts_s, limits.handover_s)
    url = f"{service.server.base}/v1/completions"
    try:
        async with service.session.post(url, json=body) as answer:
            if answer.status != 200:
                raise refusal_of(answer.status, await answer.content.read(1 << 14))
            events = VllmEventReader()
            async for data in answer.content.iter_any():
                for text in events.feed(data):
                    yield heard_of(text, part.asked.sampling.logprobs)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error


async def _decode(
    request: web.Request, service: AdapterService, part: PromptPart, segment: ActiveSegment
) -> web.StreamResponse:
    segment_lines, came_s = SegmentLines(request, service), time.monotonic()
    reason, cached, number, first_s = None, 0, 0, None
    try:
        async with asyncio.timeout(service.limits.deadline_s):
            async for heard in _answer(service, part, None):
                cached = heard.cached_tokens or cached
                reason = heard.reason or reason
                if heard.lines:
                    if first_s is None:
                        first_s = time.monotonic()
                        segment.computed()
                    number += len(heard.lines)
                    await segment_lines.say(*heard.lines)
        if reason not in ("stop", "length") or not number:
            raise HttpRefusal(503, f"vLLM ended the request ({reason or 'without a word'})", "try_again")
    except (HttpRefusal, TimeoutError) as refusal:
        if not segment_lines.begun:
            raise
        code = refusal.code if isinstance(refusal, HttpRefusal) else "deadline"
        line = str(refusal) or f"it took longer than {service.limits.deadline_s:g} s"
        return await segment_lines.end(
            end_of("error", part, cached, number) | {"code": code, "problem": line}
        )
    service.prompt_tokens += len(part.tokens)
    service.output_tokens += number
    end = end_of(reason, part, cached, number)
    if first_s is not None:
        end["ttft_s"] = first_s - came_s
    return await segment_lines.end(end)


async def _hand_on(
    request: web.Request, service: AdapterService, part: PromptPart, segment: ActiveSegment
) -> web.StreamResponse:
    segment_request, segment_lines = part.asked, SegmentLines(request, service)
    handle = new_handle() if segment_request.handle is None else checked_handle(segment_request.handle)
    fate = service.connector_events.expect(handle)
    computing = asyncio.ensure_future(_computed(service, part, handle))
    limits = service.limits
    try:
        if not part.received:
            await segment_lines.say({"handle": handle, "tokens": part.whole})
        either: list[asyncio.Future[Any]] = [fate, computing]
        await asyncio.wait(either, timeout=limits.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if fate.done() and not computing.done() and fate.result().state != "fetched":
            # Nothing is computed for a receiver that is gone.
            return await _lost(segment_lines, part, fate.result(), 0)
        async with asyncio.timeout(limits.deadline_s):
            cached = await computing
        segment.computed()
        await segment_lines.say({"computed": part.whole - part.received, "handle": handle})
        service.prompt_tokens += part.whole - part.received
        result = await _fate(service, fate)
        if result.state != "fetched":
            return await _lost(segment_lines, part, result, cached)
        return await segment_lines.end(end_of("handed_on", part, cached, 0))
    except (HttpRefusal, TimeoutError) as refusal:
        if not segment_lines.begun:
            raise
        code = refusal.code if isinstance(refusal, HttpRefusal) else "deadline"
        end = end_of("error", part, 0, 0)
        return await segment_lines.end(end | {"code": code, "problem": str(refusal) or "it took too long"})
    finally:
        computing.cancel()
        await asyncio.gather(computing, return_exceptions=True)
        service.connector_events.forget(handle)


async def _computed(service: AdapterService, part: PromptPart, handle: str) -> int:
    """Until the prompt is computed; how much of it was cached."""
    cached, reason = 0, None
    async for heard in _answer(service, part, handle):
        cached, reason = heard.cached_tokens or cached, heard.reason or reason
    if reason not in ("stop", "length"):
        raise HttpRefusal(503, f"vLLM ended the request ({reason or 'without a word'})", "try_again")
    return max(0, cached - part.received)


async def _fate(service: AdapterService, fate: asyncio.Future[SendResult]) -> SendResult:
    within_s = min(service.limits.handover_s, service.limits.lease_s + LEASE_S)
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(fate)
    except TimeoutError:
        return SendResult("gone", False, f"it was not fetched within {within_s:g} s")


async def _lost(
    segment_lines: SegmentLines, part: PromptPart, result: SendResult, cached: int
) -> web.StreamResponse:
    code, line = "hand_over", result.problem
    if result.state == "gone":
        code = "receiver_gone" if result.claimed else "not_fetched"
        line = result.problem or "the receiver was not heard of in time"
    return await segment_lines.end(end_of("error", part, cached, 0) | {"code": code, "problem": line})


OTHER_PROMPT = "other_prompt"
ALIVE_S = 1.0
RENDER = "/v1/chat/completions/render"
LONGEST_ERROR = 1 << 14
GIVEN_UP = (None, "abort", "error")  # Reasons to end that are none.


def own_request(part: PromptPart, client_body: ClientBody, within_s: float) -> Json:
    body = client_body.body
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
    passthrough_event = PassthroughEvent(said, cached=cached_of(said))
    usage = said.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
        passthrough_event.prompt_tokens = usage["prompt_tokens"]
    choices = said.get("choices")
    shown = {name: value for name, value in said.items() if name != "kv_transfer_params"}
    if isinstance(choices, list) and choices:
        choice = choices[0]
        passthrough_event.tokens = list(choice.get("token_ids") or ())
        passthrough_event.reason = choice.get("finish_reason")
        if not ids:
            kept = {
                name: value for name, value in choice.items() if name not in ("token_ids", "prompt_token_ids")
            }
            shown["choices"] = [kept]
    if not ids:
        shown.pop("prompt_token_ids", None)
    passthrough_event.shown = shown
    return passthrough_event


async def answer_own(
    request: web.Request,
    service: AdapterService,
    part: PromptPart,
    client_body: ClientBody,
    segment: ActiveSegment,
) -> web.StreamResponse:
    segment_lines, came_s = SegmentLines(request, service), time.monotonic()
    number, cached, prompt_tokens = 0, 0, len(part.tokens)
    reason: str | None = None
    first_s: float | None = None
    try:
        async with asyncio.timeout(service.limits.deadline_s):
            if part.received and client_body.path == CHATS:
                prompt = await _prompt(service, part, client_body)
                if prompt is not None and prompt[: part.received] != list(part.tokens[: part.received]):
                    await segment_lines.say({"prompt": prompt})
                    problem = "vLLM makes another prompt of these messages"
                    end = end_of("error", part, 0, 0) | {"code": OTHER_PROMPT, "problem": problem}
                    return await segment_lines.end(end)
            async for event in _answer_own(service, part, client_body, segment_lines):
                cached, reason = event.cached or cached, event.reason or reason
                prompt_tokens = event.prompt_tokens or prompt_tokens
                if event.tokens and first_s is None:
                    first_s = time.monotonic()
                    segment.computed()
                number += len(event.tokens)
                await segment_lines.say(*event.lines)
        if reason in GIVEN_UP or not number:
            raise HttpRefusal(503, f"vLLM ended the request ({reason or 'without a word'})", "try_again")
    except (HttpRefusal, TimeoutError) as refusal:
        if not segment_lines.begun:
            raise
        code = refusal.code if isinstance(refusal, HttpRefusal) else "deadline"
        line = str(refusal) or f"it took longer than {service.limits.deadline_s:g} s"
        if isinstance(refusal, HttpRefusal) and refusal.status == 400:
            await segment_lines.say({"refused": error_object(400, line, param=refusal.param, code=code)})
        return await segment_lines.end(
            end_of("error", part, cached, number) | {"code": code, "problem": line}
        )
    service.prompt_tokens += prompt_tokens
    service.output_tokens += number
    end = end_of("length" if reason == "length" else "stop", part, cached, number)
    end |= {"prompt_tokens": prompt_tokens, "ttft_s": (first_s or time.monotonic()) - came_s}
    return await segment_lines.end(end)


async def _prompt(service: AdapterService, part: PromptPart, client_body: ClientBody) -> list[int] | None:
    """What vLLM makes of a chat; None where it does not say."""
    asked = {**client_body.body, "model": part.asked.model, "stream": False, "stream_options": None}
    try:
        async with service.session.post(f"{service.server.base}{RENDER}", json=asked) as answer:
            text = (
                await answer.content.read()
                if answer.status == 200
                else await answer.content.read(LONGEST_ERROR)
            )
            if answer.status in (400, 422):
                raise refusal_of(answer.status, text)
            load = json.loads(text).get("token_ids") if answer.status == 200 else None
            return load if isinstance(load, list) else None
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error


async def _answer_own(
    service: AdapterService, part: PromptPart, client_body: ClientBody, segment_lines: SegmentLines
) -> AsyncIterator[PassthroughEvent]:
    body, ids = (
        own_request(part, client_body, service.limits.handover_s),
        bool(client_body.body.get("return_token_ids")),
    )
    alive = asyncio.create_task(_alive(service, segment_lines)) if not body.get("stream") else None
    try:
        async with service.session.post(f"{service.server.base}{client_body.path}", json=body) as answer:
            if answer.status != 200:
                raise refusal_of(answer.status, await answer.content.read(LONGEST_ERROR))
            if not body.get("stream"):
                yield said_of(await answer.json(), ids=ids)
                return
            events = VllmEventReader()
            async for data in answer.content.iter_any():
                for text in events.feed(data):
                    yield said_of(text, ids=ids)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error
    finally:
        if alive is not None:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)


async def _alive(service: AdapterService, segment_lines: SegmentLines) -> None:
    """An answer that comes at once says nothing until then; that vLLM goes on is told by its steps."""
    count = service.connector_events.steps.count
    while True:
        await asyncio.sleep(ALIVE_S)
        if service.connector_events.steps.count > count:
            count = service.connector_events.steps.count
            await segment_lines.say({"steps": count})
