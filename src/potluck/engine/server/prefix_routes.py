"""/prefixes: a prefix that one engine keeps is copied to another, for whoever knows only the names of its blocks.

    lend     to the one that has it           {"request": "m1", "blocks": ["<hex>", ...]}
                                              -> {"handle": H, "blocks": 12, "tokens": 192, "kv": "HOST:PORT"}
    fetch    to the one that is to have it    {"request": "m1", "blocks": [the same],
                                               "source": {"kv": "HOST:PORT", "handle": H}}
                                              -> {"blocks": 12, "tokens": 192, "moved_bytes": 4096}

A loan holds nothing: the bytes are read when the receiver comes, and if they have gone by then it is told so. The
handle is good once, for `lease_s`, for this request, this model and these blocks. What came is kept when all of it is
there; until then, and if something fails, nothing has changed.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future
from dataclasses import dataclass

from aiohttp import web

from potluck.api.http import HttpRefusal, shaped
from potluck.api.segments import KvSource
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.memory.prefix_transfer import PrefixReceiver, chain_hash
from potluck.engine.server.control_bodies import read_object
from potluck.engine.server.engine_service import SERVICE, EngineService
from potluck.engine.server.kv_connector import ASK_S
from potluck.engine.server.kv_peers import address_of
from potluck.engine.server.segment_routes import fetch_failure
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import Codec
from potluck.kv.fetch import FetchRequest, FetchResult
from potluck.kv.handles import bound_to, checked_handle, new_handle

NAME = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """The body of both calls, beside the blocks."""

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


async def lend(request: web.Request) -> web.Response:
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
        parcels = service.driver.ask(lambda loop, _: _lent(service, loop, lent, start)).result(ASK_S)
        return KvManifest(service.fingerprint, start, tokens, about), parcels

    def over() -> None:
        service.lent -= 1

    kv_connector = service.kv_connector
    assert kv_connector is not None
    kv_connector.lend(
        handle, bound_to(asked.request, service.fingerprint, about), read, service.limits.lease_s, over
    )
    service.lent += 1
    return web.json_response(
        {"handle": handle, "blocks": len(lent), "tokens": tokens, "kv": kv_connector.address}
    )


async def fetch(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked, names = _asked(service, await read_object(request))
    if asked.handle is not None:
        raise InputError("handle", "belongs into source")
    if asked.source is None:
        raise FormatError("source", "is missing; /prefixes/lend of the engine that has them tells it")
    service.must_be_peer(address_of(asked.source.kv, "source.kv"))
    async with service.admitted():
        if service.fetching >= service.limits.prefix_moves:
            raise HttpRefusal(429, f"{service.fetching} prefixes are being fetched; try again", "overloaded")
        if not await service.hub.ask(lambda loop, _: loop.prefixes.enabled):
            raise HttpRefusal(409, "this engine keeps no prefixes", "no_cache")
        service.fetching += 1
        try:
            async with asyncio.timeout(service.limits.handover_s):
                tokens, moved_bytes = await _fetched(service, asked.request, names, asked.source)
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
    parcels = loop.prefixes.lend(names, start)
    loop.counters.sent_bytes += sum(map(service.kv_transfer.kv_bytes, parcels))
    return parcels


async def _fetched(
    service: EngineService, request: str, names: tuple[int, ...], source: KvSource
) -> tuple[int, int]:
    """Tokens that can be resumed now, and the bytes that came for it."""
    kv_connector, hub = service.kv_connector, service.hub
    assert kv_connector is not None
    stop = len(names) * BLOCK_TOKENS
    held, have = await hub.ask(lambda loop, _: (loop.prefixes.held(names), loop.prefixes.lacks_from(names)))
    if held == stop:
        return stop, 0
    came: list[PrefixReceiver] = []

    async def begin(about: KvManifest) -> None:
        sound = 0 <= about.start < about.stop <= stop and not about.start % BLOCK_TOKENS
        if not sound or about.stop % BLOCK_TOKENS:
            raise FormatError("prefix", f"is of [{about.start}, {about.stop}), which are no blocks of these")
        came.append(await hub.ask(lambda loop, _: loop.prefixes.gathering(about.start, about.stop)))

    def accept(parcel: KvChunk) -> Future[None]:
        came[0].accept(parcel)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    wanted = FetchRequest(
        checked_handle(source.handle), request, service.fingerprint, chain_hash(names), have
    )
    found: FetchResult = await kv_connector.fetch(address_of(source.kv, "source.kv"), wanted, begin, accept)

    def adopt(loop: EngineLoop, _: float) -> int:
        loop.counters.received_bytes += found.moved_bytes
        return loop.prefixes.adopt(names[: came[0].stop // BLOCK_TOKENS], came[0])

    return await hub.ask(adopt), found.moved_bytes
