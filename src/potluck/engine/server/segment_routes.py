"""/segments runs a part of a request; /prefixes copies a kept prefix from one engine to another.

`POST /segments` answers with lines of JSON. A segment that decodes: a line per token, then its end. One that hands
on: its handle, then `computed`, then its end once the cache was fetched, or cannot be any more: then the `code` says
why, and what was not computed yet is not. The status is only said with the first line, so that what fails before has
a status of its own. Closing the connection cancels.

    /prefixes/lend     to the engine that has it    {"request": "m1", "blocks": ["<hex>", ...]}
                                                    -> {"handle": H, "blocks": 12, "tokens": 192, "kv": "HOST:PORT"}
    /prefixes/fetch    to the one that wants it     {"request": "m1", "blocks": [the same],
                                                     "source": {"kv": "HOST:PORT", "handle": H}}
                                                    -> {"blocks": 12, "tokens": 192, "moved_bytes": 4096}

A loan holds nothing: the bytes are read when the receiver comes. The handle is good once, for `lease_s`, for this
request, this model and these blocks. What came is kept when all of it is there.
"""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiohttp import web

from potluck.api.http import HttpRefusal, shaped
from potluck.api.segments import KvSource, SegmentRequest, segment_of
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.kv_layout import kv_address
from potluck.engine.compute.executor import IncomingCache
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.jobs import Job, JobComputed, JobEnded, OutputToken
from potluck.engine.memory.prefix_cache import ReceivedPrefix, chain_hash
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.http_connection import ended, read_object
from potluck.engine.server.kv_connector import ASK_S, RECEIVER_GONE, Fate, KvNotDelivered
from potluck.engine.server.request_channels import RequestChannel
from potluck.kv.chunks import KvChunk, KvManifest, TransferDeclined, TransferError, token_hash
from potluck.kv.codec_layout import Codec
from potluck.kv.fetch import FetchRequest, FetchResult
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
    return job_ended.code or ("try_again" if job_ended.again else None)


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


NAME = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    request: str
    model: str | None = None
    """Checked if given; names are of one model's blocks in any case."""
    codec: Codec = "raw"
    """What the link may ask for; what is kept for others must be exact, so that it always goes raw."""
    source: KvSource | None = None
    """Of a fetch: who lends it, under which handle."""
    handle: str | None = None
    """Of a loan: under which it can be fetched; made up and told if not given."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.request) <= 200 or not self.request.isprintable():
            raise InputError("request", "must be a name of 1 to 200 characters")


async def lend_prefix(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked, names = _asked(service, await read_object(request))
    if asked.source is not None:
        raise InputError("source", "is only for /prefixes/fetch")
    if service.problem:
        raise HttpRefusal(503, f"the engine has failed ({service.problem})", "failed")
    if service.lent >= service.limits.prefix_moves:
        raise HttpRefusal(429, f"{service.lent} prefixes are lent; try again", "overloaded")
    handle = new_handle() if asked.handle is None else checked_handle(asked.handle)
    tokens = await service.hub.ask(lambda loop, _: loop.prefixes.held(names))
    if not tokens:
        raise HttpRefusal(404, "no prefix of these blocks is kept here", "not_held")
    about = chain_hash(names)
    lent = names[: tokens // BLOCK_TOKENS]

    def read(have: int) -> tuple[KvManifest, list[KvChunk]]:
        # There is always something to send, if only the last block again.
        start = min(have, tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        chunks = service.driver.ask(lambda loop, _: _lent(service, loop, lent, start)).result(ASK_S)
        return KvManifest(service.fingerprint, start, tokens, about), chunks

    def over() -> None:
        service.lent -= 1

    service.connector.lend(
        handle, bound_to(asked.request, service.fingerprint, about), read, service.limits.lease_s, over
    )
    service.lent += 1
    return web.json_response(
        {"handle": handle, "blocks": len(lent), "tokens": tokens, "kv": service.connector.address}
    )


async def fetch_prefix(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked, names = _asked(service, await read_object(request))
    if asked.handle is not None:
        raise InputError("handle", "belongs into source")
    if asked.source is None:
        raise FormatError("source", "is missing; /prefixes/lend of the engine that has them tells it")
    service.must_be_peer(kv_address(asked.source.kv, "source.kv"))
    async with service.admitted():
        if service.fetching >= service.limits.prefix_moves:
            raise HttpRefusal(429, f"{service.fetching} prefixes are being fetched; try again", "overloaded")
        if not await service.hub.ask(lambda loop, _: loop.prefixes.enabled):
            raise HttpRefusal(409, "this engine keeps no prefixes", "no_cache")
        service.fetching += 1
        try:
            async with asyncio.timeout(service.limits.handover_s):
                tokens, moved_bytes = await _fetch_prefix(service, asked.request, names, asked.source)
        except (PotluckError, OSError, TimeoutError, ValueError) as error:
            raise fetch_failure(error, asked.source, service.limits.handover_s) from error
        finally:
            service.fetching -= 1
    return web.json_response({"blocks": tokens // BLOCK_TOKENS, "tokens": tokens, "moved_bytes": moved_bytes})


def _asked(service: EngineService, body: dict[str, object]) -> tuple[PrefixRequest, tuple[int, ...]]:
    body = dict(body)
    given = body.pop("blocks", None)
    source = body.get("source")
    if isinstance(source, dict):
        body["source"] = {"type": "KvSource", **source}
    asked = shaped(PrefixRequest, body)
    if asked.model is not None:
        service.must_be(asked.model)
    most = service.most_tokens // BLOCK_TOKENS
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise FormatError("blocks", f"must be a list of 1 to {most} names")
    for place, name in enumerate(given):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise FormatError(f"blocks[{place}]", "must be 1 to 32 hexadecimal digits, as /cache has them")
    names = tuple(int(name, 16) for name in given)
    if len(set(names)) != len(names):
        raise InputError("blocks", "must be a chain, in which no name stands twice")
    return asked, names


def _lent(service: EngineService, loop: EngineLoop, names: tuple[int, ...], start: int) -> list[KvChunk]:
    """In the loop's thread."""
    chunks = loop.prefixes.lend(names, start)
    loop.counters.sent_bytes += sum(map(service.kv_transfer.kv_bytes, chunks))
    return chunks


async def _fetch_prefix(
    service: EngineService, request: str, names: tuple[int, ...], source: KvSource
) -> tuple[int, int]:
    """Tokens that can be resumed now, and the bytes that came for it."""
    channels = service.hub
    stop = len(names) * BLOCK_TOKENS
    held, have = await channels.ask(
        lambda loop, _: (loop.prefixes.held(names), loop.prefixes.lacks_from(names))
    )
    if held == stop:
        return stop, 0
    came: list[ReceivedPrefix] = []

    async def begin(manifest: KvManifest) -> None:
        sound = 0 <= manifest.start < manifest.stop <= stop and not manifest.start % BLOCK_TOKENS
        if not sound or manifest.stop % BLOCK_TOKENS:
            raise FormatError(
                "prefix", f"is of [{manifest.start}, {manifest.stop}), which are no blocks of these"
            )
        came.append(
            await channels.ask(lambda loop, _: loop.prefixes.gathering(manifest.start, manifest.stop))
        )

    def accept(chunk: KvChunk, exact: bool) -> Future[None]:
        if not exact:
            raise FormatError("prefix", "came in fewer bits than are kept here")
        came[0].accept(chunk)
        return _done()

    fetch_request = FetchRequest(
        checked_handle(source.handle), request, service.fingerprint, chain_hash(names), have
    )
    fetch_result: FetchResult = await service.connector.fetch(
        kv_address(source.kv, "source.kv"), fetch_request, source.connections, begin, accept
    )

    def adopt(loop: EngineLoop, _: float) -> int:
        loop.counters.received_bytes += fetch_result.moved_bytes
        return loop.prefixes.adopt(names[: came[0].stop // BLOCK_TOKENS], came[0])

    return await channels.ask(adopt), fetch_result.moved_bytes
