"""What the aiohttp servers share: request targets of any form, and answers that do not name their software."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from potluck.api.http import HttpRefusal, absolute_target


class ServedRequest(web.Request):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Remove the `Server` header, which aiohttp sets just before this call and no setting of it turns off."""
        await super()._prepare_hook(response)
        response.headers.popall(hdrs.SERVER, None)


async def set_up(runner: web.AppRunner) -> web.Server:
    """Set a runner up so that its requests are `ServedRequest`s with targets in origin form."""
    await runner.setup()
    server, app = runner.server, runner.app
    assert server is not None

    def made(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        return app._make_request(in_origin_form(message), payload, protocol, writer, task, ServedRequest)

    server.request_factory = made
    return server


def in_origin_form(message: RawRequestMessage) -> RawRequestMessage:
    """A message whose target is an absolute URL as if it were sent to that URL's host with path and query alone."""
    parts = None if message.path.startswith("/") else absolute_target(message.method, message.path)
    if parts is None:
        return message
    authority, path, query = parts
    headers = CIMultiDict(message.headers)
    headers[hdrs.HOST] = authority
    return message._replace(
        path=f"{path}?{query}" if query else path,
        headers=CIMultiDictProxy(headers),
        url=URL("*", encoded=True) if path == "*" else URL.build(path=path, query_string=query, encoded=True),
    )


def check_target(request: web.BaseRequest) -> None:
    """Refuse a target that is neither a path nor an http URL, such as that of CONNECT."""
    if request.raw_path[:1] not in ("/", "*"):
        raise HttpRefusal(400, "the request's target must be a path that begins with /, or an http URL")
