"""/segments runs a part of a request.

`POST /segments` answers with lines of JSON. A segment that decodes: a line per token, then its end. One that hands
on: its handle, then `computed`, then its end once the cache was fetched, or cannot be any more: then the `code` says
why, and what was not computed yet is not. The status is only said with the first line, so that what fails before has
a status of its own. Closing the connection cancels.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from contextlib import AsyncExitStack

from aiohttp import web

from potluck.api.http import HttpRefusal
from potluck.api.segments import KvSource, SegmentRequest, segment_of
from potluck.core.errors import InputError, PotluckError
from potluck.core.values.kv_layout import kv_address
from potluck.engine.compute.executor import IncomingCache
from potluck.engine.loop.jobs import Job, JobComputed, JobEnded, OutputToken
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import ended, read_object
from potluck.engine.server.kv_connector import RECEIVER_GONE, Fate, KvNotDelivered
from potluck.engine.server.request_channels import RequestChannel
from potluck.kv.chunks import KvChunk, KvManifest, TransferDeclined, TransferError, token_hash
from potluck.kv.fetch import FetchRequest
from potluck.kv.handles import bound_to, checked_handle, new_handle

FINGERPRINT = "X-Potluck-Fingerprint"
"""Of the model and its weights: whoever sent a segment may check that it is still the engine it took it for."""


async def segments(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    segment_request, tokens = segment_of(await read_object(request))
    service.must_be(segment_request.model)
    if segment_request.own is not None:
        raise HttpRefusal(400, "own: this engine draws tokens, and no more", "unsupported", "own")
    if segment_request.source is not None:
        service.must_be_peer(kv_address(segment_request.source.kv, "source.kv"))
    job = await _job(service, segment_request, tokens)
    handle = None
    if job.hands_on:
        handle = new_handle() if segment_request.handle is None else checked_handle(segment_request.handle)
    fate: Fate | None = None
    async with service.admitted(), AsyncExitStack() as stack:
        channel = await stack.enter_async_context(service.run(job))
        if handle is not None:
            bound = bound_to(
                segment_request.request, service.fingerprint, token_hash(job.prompt[: job.whole])
            )
            connector = service.connector
            fate = connector.offer(handle, bound, channel, service.limits.deadline_s, segment_request.codec)
            stack.callback(connector.withdraw, handle, channel)
            stack.push_async_callback(_stop, asyncio.create_task(_watch(service, job, channel, fate)))
        if segment_request.source is not None:
            fetching = asyncio.create_task(
                _fetch(service, job, channel, segment_request, segment_request.source)
            )
            stack.push_async_callback(_stop, fetching)
        return await _tell(request, job, channel, handle, fate)


async def _job(service: EngineService, segment_request: SegmentRequest, tokens: tuple[int, ...]) -> Job:
    schema = ""
    if segment_request.stop is None:
        service.room_for(len(tokens), segment_request.max_tokens)
        schema = segment_request.sampling.json_schema
    if schema and (segment_request.ignore_eos or segment_request.min_tokens):
        raise InputError("json_schema", "ends the output when it is whole: without ignore_eos and min_tokens")
    ends = frozenset(segment_request.end_tokens) | (
        frozenset() if segment_request.ignore_eos else service.eos
    )
    return Job(
        service.hub.next_key(),
        tokens,
        start=segment_request.start,
        stop=segment_request.stop,
        output_tokens=0 if segment_request.stop is not None else segment_request.max_tokens,
        sampling=service.holding(
            segment_request.sampling.sampling, ends, len(tokens), segment_request.min_tokens
        ),
        ends=ends,
        priority=segment_request.priority,
        tenant=segment_request.tenant,
        weight=segment_request.weight,
        salt=segment_request.salt,
        generated=segment_request.generated,
        guide=await service.grammars.guide(schema),
    )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _tell(
    request: web.Request, job: Job, channel: RequestChannel, handle: str | None, fate: Fate | None
) -> web.StreamResponse:
    mark = request.app[SERVICE].fingerprint
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", FINGERPRINT: mark})

    async def say(line: dict[str, object]) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    service = request.app[SERVICE]
    if handle is not None and not job.received:
        await say({"handle": handle, "tokens": job.whole})
    async for event in channel:
        if isinstance(event, OutputToken):
            if event.gap_s is not None:
                service.metrics.gap(event.gap_s)
            line: dict[str, object] = {"token": event.choice.token}
            if event.choice.logprob is not None:
                line |= {"logprob": event.choice.logprob, "top": [list(pair) for pair in event.choice.top]}
            await say(line)
        elif isinstance(event, JobComputed):
            await say({"computed": job.whole - job.received, "handle": handle})
        elif isinstance(event, JobEnded):
            if event.problem and not response.prepared:
                raise channel.failure or ended(event)
            kv_not_delivered = None
            if fate is not None and not event.problem:
                kv_not_delivered = await _fetched(fate, service.limits.handover_s)
            await say(_end(event, job, channel, kv_not_delivered))
    await response.write_eof()
    return response


async def _fetched(fate: Fate, within_s: float) -> KvNotDelivered | None:
    """What was read out is still on its way: why it did not arrive, unless it did."""
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(fate)
    except TimeoutError:
        return KvNotDelivered(RECEIVER_GONE, f"the receiver had not all of the cache within {within_s:g} s")


def _end(
    job_ended: JobEnded, job: Job, channel: RequestChannel, kv_not_delivered: KvNotDelivered | None
) -> dict[str, object]:
    times = job_ended.times
    line: dict[str, object] = {
        "ended": "error" if kv_not_delivered else job_ended.reason,
        "prompt_tokens": len(job.prompt),
        "cached_tokens": times.cached_tokens,
        "output_tokens": channel.tokens,
    }
    if times.began_s is not None:
        line["queue_s"] = times.began_s - times.came_s
    if times.first_s is not None:
        line["ttft_s"] = times.first_s - times.came_s
    if kv_not_delivered is not None:
        line |= {"code": kv_not_delivered.code, "problem": kv_not_delivered.problem}
    elif job_ended.problem:
        line |= {"code": _code(job_ended, channel), "problem": job_ended.problem}
    return line


def _code(job_ended: JobEnded, channel: RequestChannel) -> str | None:
    """A word for what went wrong, the same as in the errors that have a status; None where there is none."""
    if isinstance(channel.failure, HttpRefusal):
        return channel.failure.code
    return job_ended.code or ("try_again" if job_ended.may_retry else None)


# The sender.


async def _watch(service: EngineService, job: Job, channel: RequestChannel, fate: Fate) -> None:
    """Nothing is computed for a receiver that is gone."""
    kv_not_delivered = await fate
    if kv_not_delivered is not None and channel.ended is None:
        channel.failure = HttpRefusal(502, kv_not_delivered.problem, kv_not_delivered.code)
        await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, kv_not_delivered.problem))


# The receiver.


async def _fetch(
    service: EngineService,
    job: Job,
    channel: RequestChannel,
    segment_request: SegmentRequest,
    source: KvSource,
) -> None:
    """Bring the cache of [0, start) here; whatever goes wrong ends the request."""
    try:
        async with asyncio.timeout(service.limits.handover_s):
            await _receive(service, job, channel, segment_request.request, source)
    except (PotluckError, OSError, TimeoutError, ValueError) as error:
        channel.failure = fetch_failure(error, source, service.limits.handover_s)
        line = str(channel.failure)
        await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, line))


def fetch_failure(error: Exception, source: KvSource, within_s: float) -> HttpRefusal:
    """Whose fault it was that a cache did not come: what was sent (422), the sender (424, 502), ours (503)."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, InputError):
        return HttpRefusal(422, line, "hand_over")
    if isinstance(error, TransferDeclined):
        return HttpRefusal(424, line, "hand_over")
    if isinstance(error, PotluckError) and not isinstance(error, TransferError):
        return HttpRefusal(503, f"hand-over: {line}", "try_again")
    if isinstance(error, TimeoutError):
        line = f"it took longer than {within_s:g} s"
    line = f"hand-over: the cache could not be fetched from {source.kv} ({line[:200]})"
    return HttpRefusal(502, line, "hand_over")


async def _receive(
    service: EngineService, job: Job, channel: RequestChannel, request: str, source: KvSource
) -> None:
    """Room is only taken when the first bytes come: a sender may be long in coming, or never come."""
    channels = service.hub
    address = kv_address(source.kv, "source.kv")
    tokens = token_hash(job.prompt[: job.received])
    fetch_request = FetchRequest(
        checked_handle(source.handle), request, service.fingerprint, tokens, channel.have
    )

    coming: list[IncomingCache] = []

    async def begin(manifest: KvManifest) -> None:
        while (incoming := await channels.ask(lambda loop, _: loop.expect(channel.key, manifest))) is None:
            await channel.room
        coming.append(incoming)

    def accept(chunk: KvChunk, exact: bool) -> Future[None]:
        if not coming[0].beside:
            return channels.driver.ask(lambda loop, _: loop.accept(channel.key, chunk, lossy=not exact))
        coming[0].accept(chunk)
        size_bytes = len(chunk.data)
        channels.driver.ask(lambda loop, _: loop.accepted(channel.key, size_bytes, lossy=not exact))
        return _done()

    def whole() -> Future[None]:
        return channels.driver.ask(lambda loop, _: loop.arrived(job.key))

    await service.connector.fetch(address, fetch_request, source.connections, begin, accept, whole)


def _done() -> Future[None]:
    result: Future[None] = Future()
    result.set_result(None)
    return result
