"""/segments runs a part of a request; its cache comes and goes by way of `carriage.py`.

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
from potluck.engine.loop.messages import Job, JobComputed, JobEnded, OutputToken
from potluck.engine.server.channels import RequestChannel
from potluck.engine.server.control_bodies import read_object
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.error_replies import ended
from potluck.engine.server.kv_connector import RECEIVER_GONE, Fate, KvNotDelivered
from potluck.engine.server.kv_peers import address_of
from potluck.kv.chunks import KvChunk, KvManifest, TransferDeclined, TransferError, token_hash
from potluck.kv.fetch import FetchRequest
from potluck.kv.handles import bound_to, checked_handle, new_handle

FINGERPRINT = "X-Potluck-Fingerprint"
"""Of the model and its weights: whoever sent a segment may check that it is still the engine it took it for."""


async def segments(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, tokens = segment_of(await read_object(request))
    service.must_be(asked.model)
    if asked.own is not None:
        raise HttpRefusal(400, "own: this engine draws tokens, and no more", "unsupported", "own")
    if asked.source is not None:
        service.must_be_peer(address_of(asked.source.kv, "source.kv"))
    job = await _job(service, asked, tokens)
    handle = None
    if job.hands_on:
        handle = new_handle() if asked.handle is None else checked_handle(asked.handle)
    fate: Fate | None = None
    async with service.admitted(), AsyncExitStack() as stack:
        channel = await stack.enter_async_context(service.run(job))
        if handle is not None:
            bound = bound_to(asked.request, service.fingerprint, token_hash(job.prompt[: job.whole]))
            kv_connector = service.kv_connector
            assert kv_connector is not None
            whose = asked.tenant, asked.weight
            fate = kv_connector.offer(handle, bound, channel, service.limits.deadline_s, asked.codec, whose)
            stack.callback(kv_connector.withdraw, handle, channel)
            stack.push_async_callback(_stop, asyncio.create_task(_watch(service, job, channel, fate)))
        if asked.source is not None:
            fetching = asyncio.create_task(_fetch(service, job, channel, asked, asked.source))
            stack.push_async_callback(_stop, fetching)
        return await _tell(request, job, channel, handle, fate)


async def _job(service: EngineService, asked: SegmentRequest, tokens: tuple[int, ...]) -> Job:
    schema = ""
    if asked.stop is None:
        service.room_for(len(tokens), asked.max_tokens)
        schema = asked.sampling.json_schema
    if schema and (asked.ignore_eos or asked.min_tokens):
        raise InputError("json_schema", "ends the output when it is whole: without ignore_eos and min_tokens")
    ends = frozenset(asked.end_tokens) | (frozenset() if asked.ignore_eos else service.eos)
    return Job(
        service.hub.next_key(),
        tokens,
        start=asked.start,
        stop=asked.stop,
        output_tokens=0 if asked.stop is not None else asked.max_tokens,
        sampling=service.holding(asked.sampling.sampling, ends, len(tokens), asked.min_tokens),
        ends=ends,
        priority=asked.priority,
        tenant=asked.tenant,
        weight=asked.weight,
        salt=asked.salt,
        generated=asked.generated,
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
            lost = None
            if fate is not None and not event.problem:
                lost = await _fetched(fate, service.limits.handover_s)
            await say(_end(event, job, channel, lost))
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
    event: JobEnded, job: Job, channel: RequestChannel, lost: KvNotDelivered | None
) -> dict[str, object]:
    times = event.times
    line: dict[str, object] = {
        "ended": "error" if lost else event.reason,
        "prompt_tokens": len(job.prompt),
        "cached_tokens": times.cached_tokens,
        "output_tokens": channel.tokens,
    }
    if times.began_s is not None:
        line["queue_s"] = times.began_s - times.came_s
    if times.first_s is not None:
        line["ttft_s"] = times.first_s - times.came_s
    if lost is not None:
        line |= {"code": lost.code, "problem": lost.problem}
    elif event.problem:
        line |= {"code": _code(event, channel), "problem": event.problem}
    return line


def _code(event: JobEnded, channel: RequestChannel) -> str | None:
    """A word for what went wrong, the same as in the errors that have a status; None where there is none."""
    if isinstance(channel.failure, HttpRefusal):
        return channel.failure.code
    return event.code or ("try_again" if event.again else None)


# The sender.


async def _watch(service: EngineService, job: Job, channel: RequestChannel, fate: Fate) -> None:
    """Nothing is computed for a receiver that is gone."""
    lost = await fate
    if lost is not None and channel.ended is None:
        channel.failure = HttpRefusal(502, lost.problem, lost.code)
        await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, lost.problem))


# The receiver.


async def _fetch(
    service: EngineService, job: Job, channel: RequestChannel, asked: SegmentRequest, source: KvSource
) -> None:
    """Bring the cache of [0, start) here; whatever goes wrong ends the request."""
    try:
        async with asyncio.timeout(service.limits.handover_s):
            await _receive(service, job, channel, asked.request, source)
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
    kv_connector, hub = service.kv_connector, service.hub
    assert kv_connector is not None
    address = address_of(source.kv, "source.kv")
    have = await hub.ask(lambda loop, _: loop.look_up(job.key))
    tokens = token_hash(job.prompt[: job.received])
    wanted = FetchRequest(checked_handle(source.handle), request, service.fingerprint, tokens, have)

    def accept(parcel: KvChunk) -> Future[None]:
        plain, lossy = service.kv_transfer.restored(parcel), parcel.codec != "raw"
        return hub.driver.ask(lambda loop, _: loop.accept(channel.key, plain, lossy=lossy))

    def whole() -> Future[None]:
        return hub.driver.ask(lambda loop, _: loop.arrived(job.key))

    await kv_connector.fetch(address, wanted, lambda about: _begin(service, channel, about), accept, whole)


async def _begin(service: EngineService, channel: RequestChannel, about: KvManifest) -> None:
    await service.hub.ask(lambda loop, _: loop.want(channel.key))
    await channel.room
    await service.hub.ask(lambda loop, _: loop.expect(channel.key, about))
