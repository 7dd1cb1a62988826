"""OpenAI's endpoints, for an engine that stands alone: /v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from potluck.api.stops import StopScanner
from potluck.api.tokens import SPEAKERS
from potluck.core.errors import CapacityError, InputError
from potluck.engine.compute.sample import Sampling
from potluck.engine.face.answers import Head, part_choice, usage, whole_choice
from potluck.engine.face.bodies import Common, chat_of, completion_of, read_object
from potluck.engine.face.errors import Refused, error_body
from potluck.engine.face.generate import Delta, answer, whole_answer
from potluck.engine.face.service import SERVICE, Service
from potluck.engine.loop.requests import Job


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    entry = {
        "id": service.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "potluck",
        "max_model_len": service.most_tokens,
    }
    return web.json_response({"object": "list", "data": [entry]})


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, prompts = completion_of(await read_object(request))
    service.must_be(asked.model)
    _must_decode(service)
    async with service.admitted():
        jobs = []
        for prompt in prompts:
            tokens = tuple(await service.encode(prompt)) if isinstance(prompt, str) else prompt
            jobs += _jobs(service, asked, tokens, asked.max_tokens, asked.logprobs)
        head = Head(f"cmpl-{secrets.token_hex(12)}", int(time.time()), service.name, chat=False)
        return await _reply(request, Reply(service, head, asked, jobs, asked.logprobs is not None))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, messages = chat_of(await read_object(request), SPEAKERS)
    service.must_be(asked.model)
    _must_decode(service)
    async with service.admitted():
        text = service.must_have_text
        if (
            sum(len(message["content"]) for message in messages)
            > service.most_tokens * text.longest_token_chars
        ):
            raise CapacityError(f"the messages cannot fit in {service.most_tokens} tokens")
        prompt = await asyncio.to_thread(text.chat, messages)
        tokens = tuple(await service.encode(prompt, special=not text.chat_has_specials))
        if asked.top_logprobs and not asked.logprobs:
            raise InputError("top_logprobs", "needs logprobs to be true")
        jobs = _jobs(service, asked, tokens, asked.limit, asked.top_logprobs if asked.logprobs else None)
        head = Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), service.name, chat=True)
        return await _reply(request, Reply(service, head, asked, jobs, asked.logprobs))


def _must_decode(service: Service) -> None:
    if service.role == "prefill":
        raise Refused(409, "this engine's role is prefill: it hands on what it computes", "role")


def _jobs(
    service: Service, asked: Common, tokens: tuple[int, ...], limit: int | None, logprobs: int | None
) -> list[Job]:
    StopScanner(asked.stops)  # says what is wrong with them
    if not tokens:
        raise InputError("prompt", "must have at least one token")
    output = service.room_for(len(tokens), limit)
    seed = secrets.randbits(62) if asked.seed is None else asked.seed
    ends = frozenset() if asked.ignore_eos else service.eos
    ways = [asked.sampling(seed + (place << 32), logprobs) for place in range(asked.n)]
    return [_job(service, tokens, output, way, ends, asked.priority) for way in ways]


def _job(
    service: Service, tokens: tuple[int, ...], output: int, way: Sampling, ends: frozenset[int], priority: int
) -> Job:
    return Job(
        service.hub.next_key(), tokens, output_tokens=output, sampling=way, ends=ends, priority=priority
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """All that is needed to answer once the jobs are known."""

    service: Service
    head: Head
    asked: Common
    jobs: Sequence[Job]
    logprobs: bool

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return sum(len(job.prompt) for job in self.jobs[:: self.asked.n])


async def _reply(request: web.Request, reply: Reply) -> web.StreamResponse:
    if reply.asked.stream:
        return await _stream(request, reply)
    service, head, stops = reply.service, reply.head, reply.asked.stops
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(whole_answer(service, job, stops)) for job in reply.jobs]
    found = [task.result() for task in tasks]
    choices = [
        whole_choice(head, index, delta, service.text, logprobs=reply.logprobs)
        for index, delta in enumerate(found)
    ]
    output = sum(len(delta.choices) for delta in found)
    cached = sum(delta.cached_tokens for delta in found)
    return web.json_response(
        head.reply(choices, chunk=False, usage=usage(reply.prompt_tokens, output, cached))
    )


async def _stream(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Server-sent events. The status is only said with the first part, so that errors before it have their own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    head, words, output, cached = reply.head, reply.service.text, 0, 0
    offsets = [0] * len(reply.jobs)
    seen: set[int] = set()
    try:
        async with aclosing(_merged(reply)) as parts:
            async for index, delta in parts:
                if not response.prepared:
                    await response.prepare(request)
                output += len(delta.choices)
                cached += delta.cached_tokens
                first = index not in seen
                if delta.text or delta.finish or first or reply.logprobs:
                    seen.add(index)
                    choice = part_choice(
                        head, index, delta, words, logprobs=reply.logprobs, offset=offsets[index], first=first
                    )
                    offsets[index] += len(delta.text)
                    await response.write(_event(head.reply([choice], chunk=True)))
        if reply.asked.stream_options.include_usage:
            whole = usage(reply.prompt_tokens, output, cached)
            await response.write(_event(head.reply([], chunk=True, usage=whole)))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await response.write(_event(error_body(error)[1]))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _merged(reply: Reply) -> AsyncGenerator[tuple[int, Delta]]:
    """The parts of all answers, as they come."""
    if len(reply.jobs) == 1:
        async with aclosing(answer(reply.service, reply.jobs[0], reply.asked.stops)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    parts: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        # Errors go through the queue: a task group that fails cancels whoever writes to the client at that moment.
        try:
            async for delta in answer(reply.service, job, reply.asked.stops):
                parts.put_nowait((index, delta))
            parts.put_nowait(None)
        except Exception as error:
            parts.put_nowait(error)

    async with asyncio.TaskGroup() as group:
        pumps = [group.create_task(pump(index, job)) for index, job in enumerate(reply.jobs)]
        left = len(pumps)
        try:
            while left:
                part = await parts.get()
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    left -= 1
                else:
                    yield part
        finally:
            for task in pumps:
                task.cancel()
