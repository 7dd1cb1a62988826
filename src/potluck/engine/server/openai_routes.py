"""OpenAI's endpoints, for an engine that stands alone: /v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from potluck.api.http import HttpRefusal, parse_object
from potluck.api.large_json import INLINE_BODY_BYTES, read_large_object
from potluck.api.openai_replies import (
    LAST_EVENT,
    Json,
    ReplyHead,
    event,
    model_entry,
    offset_behind,
    part_choices,
    usage,
    whole_choice,
)
from potluck.api.openai_requests import (
    ChatRequest,
    CompletionRequest,
    EngineAbilities,
    chat_chars,
    chat_of,
    chat_prompt,
    completion_of,
    sampling_of,
)
from potluck.api.text_stream import TextDelta, TextRules, TextStream
from potluck.api.tool_calls import ToolCall
from potluck.api.tool_requests import forced_call_problem
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.sampling import MOST_LOGPROBS, SampledToken
from potluck.engine.compute.logit_edits import UnfitFormat
from potluck.engine.loop.jobs import Job, JobEnded, OutputToken
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import ended, error_body, read_body

T = TypeVar("T")
LARGE_BODY_SWITCH_S = 0.0005
"""Interpreter switch interval once a thread has read a large body."""


async def answer(service: EngineService, job: Job, text_rules: TextRules) -> AsyncGenerator[TextDelta]:
    """The answer to a job, as it comes. Leaving early cancels the job."""
    growth = TextStream(service.text, text_rules, job.ends)
    async with service.run(job) as channel:
        async for job_ended in channel:
            if isinstance(job_ended, OutputToken):
                if job_ended.gap_s is not None:
                    service.metrics.gap(job_ended.gap_s)
                delta = growth.feed(job_ended.choice)
                if delta.finish is None:
                    yield delta
                    continue
                await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, reason="stop"))
                end = await channel.end()
                yield replace(delta, cached_tokens=end.times.cached_tokens)
                return
            elif isinstance(job_ended, JobEnded):
                if job_ended.reason not in ("stop", "length"):
                    raise channel.failure or ended(job_ended)
                yield growth.end(job_ended.reason, job_ended.times.cached_tokens)


async def whole_answer(service: EngineService, job: Job, text_rules: TextRules) -> TextDelta:
    texts: list[str] = []
    choices: list[SampledToken] = []
    calls: list[ToolCall] = []
    finish, cached = None, 0
    async for delta in answer(service, job, text_rules):
        texts.append(delta.text)
        choices += delta.choices
        calls += delta.calls
        finish, cached = delta.finish or finish, max(cached, delta.cached_tokens)
    return TextDelta("".join(texts), tuple(choices), finish, cached, tuple(calls))


EMBEDDED = EngineAbilities(most_logprobs=MOST_LOGPROBS, draws=True)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_entry(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.must_be(request.match_info["id"])
    return web.json_response(_entry(service))


def _entry(service: EngineService) -> Json:
    return model_entry(service.name, service.created_s, service.most_tokens)


async def _read(request: web.Request, read: Callable[[dict[str, object], EngineAbilities], T]) -> T:
    """A client's request; a large one is parsed and checked in a thread, in short steps."""
    raw = await read_body(request)
    if len(raw) <= INLINE_BODY_BYTES:
        return read(parse_object(raw), EMBEDDED)
    # The event loop gets its turn back from the thread sooner.
    sys.setswitchinterval(min(LARGE_BODY_SWITCH_S, sys.getswitchinterval()))
    return await asyncio.to_thread(lambda: read(read_large_object(raw).values, EMBEDDED))


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    completion_request, prompts = await _read(request, completion_of)
    service.must_be(completion_request.model)
    _must_decode(service)
    async with service.admitted():
        jobs = []
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = tuple(
                    await service.encode(prompt, special=completion_request.add_special_tokens is not False)
                )
            jobs += await _jobs(service, completion_request, prompt)
        return await _reply(
            request, OpenAIReply(service, _head(service, completion_request), completion_request, jobs)
        )


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, messages = await _read(request, chat_of)
    service.must_be(asked.model)
    _must_decode(service)
    async with service.admitted():
        tokenizer = service.must_have_text
        if chat_chars(messages, asked) > service.most_tokens * tokenizer.longest_token_chars:
            raise CapacityError(f"the messages cannot fit in {service.most_tokens} tokens")
        prompt = await asyncio.to_thread(chat_prompt, tokenizer, asked, messages)
        added = asked.add_special_tokens
        special = not tokenizer.chat_has_specials if added is None else added
        jobs = await _jobs(service, asked, tuple(await service.encode(prompt, special=special)))
        return await _reply(request, OpenAIReply(service, _head(service, asked), asked, jobs))


def _head(service: EngineService, completion_request: CompletionRequest | ChatRequest) -> ReplyHead:
    chat = isinstance(completion_request, ChatRequest)
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    return ReplyHead(
        name, int(time.time()), service.name, chat, completion_request.stream_options.include_usage
    )


def _must_decode(service: EngineService) -> None:
    if service.role == "prefill":
        raise HttpRefusal(409, "this engine's role is prefill: it hands on what it computes", "role")


async def _jobs(
    service: EngineService, completion_request: CompletionRequest | ChatRequest, tokens: tuple[int, ...]
) -> list[Job]:
    if not tokens:
        raise InputError("prompt", "must have at least one token")
    output = service.room_for(len(tokens), completion_request.limit)
    if completion_request.min_tokens > output:
        raise InputError("min_tokens", f"there is room for {output}, not {completion_request.min_tokens}")
    seed = secrets.randbits(62) if completion_request.seed is None else completion_request.seed
    ends = frozenset(completion_request.stop_token_ids) | (
        frozenset() if completion_request.ignore_eos else service.eos
    )
    jobs = []
    forced = isinstance(completion_request, ChatRequest) and completion_request.tool_choice == "required"
    for place in range(completion_request.n):
        drawn = seed + (place << 32)
        sampling = sampling_of(
            completion_request, service.defaults, seed=drawn, logprobs=completion_request.reported
        )
        sampling = service.holding(sampling, ends, len(tokens), completion_request.min_tokens)
        try:
            guide = await service.grammars.guide(sampling.json_schema)
        except UnfitFormat as error:
            if not forced:
                raise
            raise HttpRefusal(400, forced_call_problem(str(error)), error.code, "tool_choice") from error
        job = Job(
            service.hub.next_key(),
            tokens,
            output_tokens=output,
            sampling=sampling,
            ends=ends,
            priority=completion_request.priority,
            salt=completion_request.cache_salt or "",
            guide=guide,
        )
        jobs.append(job)
    return jobs


@dataclass(frozen=True, slots=True)
class OpenAIReply:
    service: EngineService
    head: ReplyHead
    asked: CompletionRequest | ChatRequest
    jobs: Sequence[Job]

    @property
    def logprobs(self) -> bool:
        return self.asked.reported is not None

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return sum(len(job.prompt) for job in self.jobs[:: self.asked.n])


async def _reply(request: web.Request, reply: OpenAIReply) -> web.StreamResponse:
    if reply.asked.stream:
        return await _stream(request, reply)
    service, head, text_rules = reply.service, reply.head, reply.asked.shown
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(whole_answer(service, job, text_rules)) for job in reply.jobs]
    text_deltas = [task.result() for task in tasks]
    choices = [
        whole_choice(head, index, delta, service.text, logprobs=reply.logprobs)
        for index, delta in enumerate(text_deltas)
    ]
    output = sum(len(delta.choices) for delta in text_deltas)
    cached = sum(delta.cached_tokens for delta in text_deltas)
    return web.json_response(
        head.reply(choices, chunk=False, usage=usage(reply.prompt_tokens, output, cached))
    )


async def _stream(request: web.Request, reply: OpenAIReply) -> web.StreamResponse:
    """Server-sent events. The status is only said with the first part, so that errors before it have their own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    head, words, output, cached = reply.head, reply.service.text, 0, 0
    offsets = [0] * len(reply.jobs)
    seen: set[int] = set()

    def so_far() -> Json | None:
        continuous = reply.asked.stream_options.continuous
        return usage(reply.prompt_tokens, output, cached) if continuous else None

    try:
        async with aclosing(_merged(reply)) as parts:
            async for index, delta in parts:
                if not response.prepared:
                    await response.prepare(request)
                output += len(delta.choices)
                cached += delta.cached_tokens
                first = index not in seen
                if not (delta.text or delta.calls or delta.finish or first or reply.logprobs):
                    continue
                seen.add(index)
                choices = part_choices(
                    head, index, delta, words, logprobs=reply.logprobs, offset=offsets[index], first=first
                )
                for choice in choices:
                    offsets[index] = offset_behind(choice, offsets[index])
                    await response.write(event(head.reply([choice], chunk=True, usage=so_far())))
        if reply.asked.stream_options.include_usage:
            whole = usage(reply.prompt_tokens, output, cached)
            await response.write(event(head.reply([], chunk=True, usage=whole)))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await response.write(event(error_body(error)[1]))
    await response.write(LAST_EVENT)
    await response.write_eof()
    return response


async def _merged(reply: OpenAIReply) -> AsyncGenerator[tuple[int, TextDelta]]:
    if len(reply.jobs) == 1:
        async with aclosing(answer(reply.service, reply.jobs[0], reply.asked.shown)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    parts: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        # Errors go through the queue: a task group that fails cancels whoever writes to the client at that moment.
        try:
            async for delta in answer(reply.service, job, reply.asked.shown):
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
