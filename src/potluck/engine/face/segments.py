"""/segments runs a part of a request; /kv gives its cache to whoever holds the handle.

`POST /segments` answers with lines of JSON. A segment that decodes: a line per token, then its end. One that hands
on: its handle, then `computed`, then its end once the cache was fetched or its lease is over. The status is only
said with the first line, so that what fails before has a status of its own. Closing the connection cancels.

`POST /kv` answers with frames (`frames.py`): parcels as the sender's layers are computed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from aiohttp import ClientError, ClientResponse, ClientTimeout, web

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.engine.face.bodies import SegmentAsk, Source, read_object, segment_of
from potluck.engine.face.errors import Refused, ended
from potluck.engine.face.handles import bound_to, checked_handle, new_handle
from potluck.engine.face.hub import Channel
from potluck.engine.face.service import SERVICE, Service
from potluck.engine.frames import (
    Closing,
    FrameReader,
    Opening,
    Problem,
    closing,
    opening,
    parcel_frames,
    problem,
)
from potluck.engine.handover import Manifest, Parcel, token_hash
from potluck.engine.requests import Computed, Ended, Job, Token

READ_BYTES = 1 << 18


async def segments(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked, tokens = segment_of(await read_object(request))
    service.must_be(asked.model)
    if asked.stop is None and service.role == "prefill":
        raise Refused(409, "this engine's role is prefill: it does not decode", "role")
    if asked.stop is not None and service.role == "decode":
        raise Refused(409, "this engine's role is decode: it hands nothing on", "role")
    job = _job(service, asked, tokens)
    handle = None
    if job.hands_on:
        handle = new_handle() if asked.handle is None else checked_handle(asked.handle)
    async with service.admitted(), AsyncExitStack() as stack:
        channel = await stack.enter_async_context(service.run(job))
        if handle is not None:
            bound = bound_to(asked.request, service.fingerprint, token_hash(job.prompt[: job.whole]))
            await service.handles.offer(handle, bound, channel, service.limits.deadline_s)
            stack.callback(service.handles.withdraw, handle, channel)
        if asked.source is not None:
            fetching = asyncio.create_task(_fetch(service, job, channel, asked, asked.source))
            stack.push_async_callback(_stop, fetching)
        return await _tell(request, job, channel, handle)


def _job(service: Service, asked: SegmentAsk, tokens: tuple[int, ...]) -> Job:
    if asked.stop is None:
        service.room_for(len(tokens), asked.max_tokens)
    ends = frozenset(asked.end_tokens) | (frozenset() if asked.ignore_eos else service.eos)
    return Job(
        service.hub.next_key(),
        tokens,
        start=asked.start,
        stop=asked.stop,
        output_tokens=0 if asked.stop is not None else asked.max_tokens,
        sampling=asked.sampling.sampling,
        ends=ends,
        priority=asked.priority,
    )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _tell(request: web.Request, job: Job, channel: Channel, handle: str | None) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

    async def say(line: dict[str, object]) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    metrics = request.app[SERVICE].metrics
    if handle is not None and not job.received:
        await say({"handle": handle, "tokens": job.whole})
    async for event in channel:
        if isinstance(event, Token):
            if event.gap_s is not None:
                metrics.gap(event.gap_s)
            line: dict[str, object] = {"token": event.choice.token}
            if event.choice.logprob is not None:
                line |= {"logprob": event.choice.logprob, "top": [list(pair) for pair in event.choice.top]}
            await say(line)
        elif isinstance(event, Computed):
            await say({"computed": job.whole - job.received, "handle": handle})
        elif isinstance(event, Ended):
            if event.problem and not response.prepared:
                raise channel.failure or ended(event)
            await say(_end(event, job, channel))
    await response.write_eof()
    return response


def _end(event: Ended, job: Job, channel: Channel) -> dict[str, object]:
    times = event.times
    line: dict[str, object] = {
        "ended": event.reason,
        "prompt_tokens": len(job.prompt),
        "cached_tokens": times.cached_tokens,
        "output_tokens": channel.tokens,
    }
    if times.began_s is not None:
        line["queue_s"] = times.began_s - times.came_s
    if times.first_s is not None:
        line["ttft_s"] = times.first_s - times.came_s
    if event.problem:
        line["problem"] = event.problem
    return line


# The receiver.


async def _fetch(service: Service, job: Job, channel: Channel, asked: SegmentAsk, source: Source) -> None:
    """Bring the cache of [0, start) here; whatever goes wrong ends the request."""
    try:
        async with asyncio.timeout(service.limits.handover_s):
            await _receive(service, job, channel, asked.request, source)
    except (PotluckError, ClientError, OSError, TimeoutError, ValueError) as error:
        channel.failure = _failure(error, source, service.limits.handover_s)
        line = str(channel.failure)
        await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, line))


def _failure(error: Exception, source: Source, within_s: float) -> Refused:
    """Whose fault it was that a cache did not come: what was sent (422), the sender (424, 502), ours (503)."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(422, line, "hand_over")
    if isinstance(error, PotluckError):
        return Refused(503, f"hand-over: {line}", "try_again")
    if isinstance(error, TimeoutError):
        line = f"it took longer than {within_s:g} s"
    line = f"hand-over: the cache could not be fetched from {source.url} ({line[:200]})"
    return Refused(502, line, "hand_over")


async def _receive(service: Service, job: Job, channel: Channel, request: str, source: Source) -> None:
    """Room is only taken when the first bytes come: a sender may be long in coming, or never come."""
    if not source.url.startswith(("http://", "https://")):
        raise InputError("source.url", "must begin with http:// or https://")
    have = await service.hub.ask(lambda loop, _: loop.look_up(job.key))
    body = {
        "handle": checked_handle(source.handle),
        "request": request,
        "fingerprint": service.fingerprint,
        "token_hash": token_hash(job.prompt[: job.received]),
        "have": have,
    }
    reader = FrameReader(service.limits.parcel_bytes)
    about: Manifest | None = None
    taken, said = 0, -1
    client = service.client
    assert client is not None
    address = source.url.rstrip("/") + "/kv"
    timeout = ClientTimeout(total=service.limits.handover_s)
    async with client.post(address, json=body, timeout=timeout, allow_redirects=False) as reply:
        if reply.status != 200:
            raise Refused(
                424, f"hand-over: the sender answers {reply.status} {await _message(reply)}", "hand_over"
            )
        async for data in reply.content.iter_chunked(READ_BYTES):
            for frame in reader.feed(data):
                if said >= 0:
                    raise FormatError("hand-over", "goes on behind its end")
                if isinstance(frame, Opening) and about is None:
                    about = frame.manifest
                elif isinstance(frame, Parcel) and about is not None:
                    if not taken:
                        await _begin(service, channel, about)
                    await _accept(service, channel, frame)
                    taken += 1
                elif isinstance(frame, Closing):
                    said = frame.parcels
                elif not isinstance(frame, Problem):
                    raise FormatError("hand-over", "frames are out of order")
                else:
                    raise Refused(424, f"hand-over: the sender failed ({frame.line})", "hand_over")
        reader.close()
    if said != taken:
        raise FormatError("hand-over", f"{taken} parcels came, {said} were sent")
    await service.hub.ask(lambda loop, _: loop.arrived(job.key))


async def _begin(service: Service, channel: Channel, about: Manifest) -> None:
    await service.hub.ask(lambda loop, _: loop.want(channel.key))
    await channel.room
    await service.hub.ask(lambda loop, _: loop.expect(channel.key, about))


async def _accept(service: Service, channel: Channel, parcel: Parcel) -> None:
    await service.hub.ask(lambda loop, _: loop.accept(channel.key, parcel))


async def _message(reply: ClientResponse) -> str:
    raw = await reply.content.read(2000)
    try:
        return str(json.loads(raw)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return ""


# The sender.


async def kv(request: web.Request) -> web.StreamResponse:
    """The cache of one segment, for the holder of its handle."""
    service = request.app[SERVICE]
    body = await read_object(request)
    names = ("handle", "request", "fingerprint", "token_hash")
    wrong = [name for name in names if not isinstance(body.get(name), str)]
    have = body.get("have")
    if wrong or set(body) != {*names, "have"} or type(have) is not int:
        raise FormatError(wrong[0] if wrong else "body", f"must have {', '.join(names)} and have")
    handle = checked_handle(str(body["handle"]))
    bound = bound_to(str(body["request"]), str(body["fingerprint"]), str(body["token_hash"]))
    channel = await service.handles.take(handle, bound, service.limits.attach_s)
    about = await service.hub.ask(lambda loop, now_s: loop.attach(channel.key, have, now_s))
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    await response.prepare(request)
    async with asyncio.timeout(service.limits.handover_s):
        await _send(service, channel, response, about)
    await response.write_eof()
    return response


async def _send(service: Service, channel: Channel, response: web.StreamResponse, about: Manifest) -> None:
    await response.write(opening(about, 0))
    sent = 0
    while True:
        event = await channel.parcels.get()
        if isinstance(event, Ended):
            await response.write(problem(event.problem or event.reason))
            break
        for parcel in event.parcels:
            await service.pace(parcel)
            for piece in parcel_frames(parcel):
                await response.write(piece)
            sent += 1
        if event.last:
            await response.write(closing(sent))
            break
