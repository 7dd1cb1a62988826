"""POST /segments before vLLM: the same lines as an embedded engine's (docs/engine.md).

A segment that decodes is one request to vLLM, whose tokens are passed on. One that hands on is a request for the
first tokens of the prompt and one token that nobody wants; its last line comes when the connector knows whether its
KV was fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.api.json_bodies import parse_object
from potluck.api.segments import UNSUPPORTED, segment_of
from potluck.kv.handles import checked_handle, new_handle
from potluck.vllm.adapter.adapter_service import SERVICE, ActiveSegment, AdapterService
from potluck.vllm.adapter.connector_events import SendResult
from potluck.vllm.adapter.passthrough import answer_own
from potluck.vllm.adapter.segment_lines import SegmentLines, end_of
from potluck.vllm.adapter.vllm_requests import (
    PromptPart,
    SegmentEvent,
    VllmEventReader,
    body_of,
    heard_of,
    refusal_of,
)
from potluck.vllm.transfer_params import address_of

LEASE_S = 10.0
"""How long a receiver that came is waited for when it is heard of no more, as the outbox has it."""


async def segments(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, tokens = segment_of(parse_object(await request.read()))
    service.must_be(asked.model)
    if asked.source is not None:
        service.must_be_peer(address_of(asked.source.kv))
    part = PromptPart(asked, tokens)
    if not part.hands_on and asked.own is None and asked.max_tokens < 1:
        raise HttpRefusal(400, f"max_tokens: must be at least 1, is {asked.max_tokens}", param="max_tokens")
    draws = asked.sampling
    if asked.generated and (draws.presence_penalty or draws.frequency_penalty or draws.json_schema):
        # vLLM takes what was generated before for the prompt, which these do not count.
        raise HttpRefusal(400, "vLLM cannot go on within an answer with penalties or a format", UNSUPPORTED)
    async with service.admitted(part.whole - part.received) as held:
        if part.hands_on:
            return await _hand_on(request, service, part, held)
        if asked.own is not None:
            return await answer_own(request, service, part, asked.own, held)
        return await _decode(request, service, part, held)


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
                for said in events.feed(data):
                    yield heard_of(said)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise HttpRefusal(503, f"vLLM broke off ({type(error).__name__})", "try_again") from error


async def _decode(
    request: web.Request, service: AdapterService, part: PromptPart, held: ActiveSegment
) -> web.StreamResponse:
    telling, came_s = SegmentLines(request, service), time.monotonic()
    reason, cached, told, first_s = None, 0, 0, None
    try:
        async with asyncio.timeout(service.limits.deadline_s):
            async for heard in _answer(service, part, None):
                cached = heard.cached_tokens or cached
                reason = heard.reason or reason
                if heard.lines:
                    if first_s is None:
                        first_s = time.monotonic()
                        held.computed()
                    told += len(heard.lines)
                    await telling.say(*heard.lines)
        if reason not in ("stop", "length") or not told:
            raise HttpRefusal(503, f"vLLM ended the request ({reason or 'without a word'})", "try_again")
    except (HttpRefusal, TimeoutError) as error:
        if not telling.begun:
            raise
        code = error.code if isinstance(error, HttpRefusal) else "deadline"
        line = str(error) or f"it took longer than {service.limits.deadline_s:g} s"
        return await telling.end(end_of("error", part, cached, told) | {"code": code, "problem": line})
    service.prompt_tokens += len(part.tokens)
    service.output_tokens += told
    end = end_of(reason, part, cached, told)
    if first_s is not None:
        end["ttft_s"] = first_s - came_s
    return await telling.end(end)


async def _hand_on(
    request: web.Request, service: AdapterService, part: PromptPart, held: ActiveSegment
) -> web.StreamResponse:
    asked, telling = part.asked, SegmentLines(request, service)
    handle = new_handle() if asked.handle is None else checked_handle(asked.handle)
    fate = service.connector_events.expect(handle)
    computing = asyncio.ensure_future(_computed(service, part, handle))
    limits = service.limits
    try:
        if not part.received:
            await telling.say({"handle": handle, "tokens": part.whole})
        either: list[asyncio.Future[Any]] = [fate, computing]
        await asyncio.wait(either, timeout=limits.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if fate.done() and not computing.done() and fate.result().state != "fetched":
            # Nothing is computed for a receiver that is gone.
            return await _lost(telling, part, fate.result(), 0)
        async with asyncio.timeout(limits.deadline_s):
            cached = await computing
        held.computed()
        await telling.say({"computed": part.whole - part.received, "handle": handle})
        service.prompt_tokens += part.whole - part.received
        gave = await _fate(service, fate)
        if gave.state != "fetched":
            return await _lost(telling, part, gave, cached)
        return await telling.end(end_of("handed_on", part, cached, 0))
    except (HttpRefusal, TimeoutError) as error:
        if not telling.begun:
            raise
        code = error.code if isinstance(error, HttpRefusal) else "deadline"
        end = end_of("error", part, 0, 0)
        return await telling.end(end | {"code": code, "problem": str(error) or "it took too long"})
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


async def _lost(telling: SegmentLines, part: PromptPart, gave: SendResult, cached: int) -> web.StreamResponse:
    code, line = "hand_over", gave.problem
    if gave.state == "gone":
        code = "receiver_gone" if gave.claimed else "not_fetched"
        line = gave.problem or "the receiver was not heard of in time"
    return await telling.end(end_of("error", part, cached, 0) | {"code": code, "problem": line})
