"""What clients of the engine's own calls write, read strictly; OpenAI's bodies are read by potluck.api."""

from __future__ import annotations

import asyncio

from aiohttp import web

from potluck.api.http import HttpRefusal, parse_object
from potluck.core.errors import FormatError
from potluck.engine.server.engine_service import SERVICE
from potluck.engine.server.http_connection import arrived

BODY_S = 30.0
"""In which a body must have come."""


async def read_object(request: web.Request, *, optional: bool = False) -> dict[str, object]:
    """The body as a JSON object, within its time and size."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(request)
    except TimeoutError:
        raise HttpRefusal(408, f"the body did not come within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise FormatError("body", "cannot be decoded as its headers say") from error
    arrived(request)
    return {} if optional and not raw else parse_object(raw)


async def _read(request: web.Request) -> bytes:
    service, reader = request.app[SERVICE], request.content
    most_bytes = service.limits.body_bytes
    if (request.content_length or 0) > most_bytes:
        raise web.HTTPRequestEntityTooLarge(most_bytes, request.content_length or 0)
    parts, size = [], 0
    try:
        while part := await reader.readany():
            size += len(part)
            if size > most_bytes:
                raise web.HTTPRequestEntityTooLarge(most_bytes, size)
            service.uploads.grow(reader, len(part))
            parts.append(part)
    finally:
        service.uploads.done(reader)
    return b"".join(parts)
