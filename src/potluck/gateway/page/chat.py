"""The playground's way to a model: a body goes on to the clients' port of this gateway, and its answer comes back.

A page may only ask where it came from, which is the operators' port. What the clients' port would ask of anybody it
asks here as well: a key, where it has keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from potluck.api.http_errors import HEADER, HttpRefusal

KEY_HEADER = "X-Potluck-Client-Key"
MOST_BODY_BYTES = 1_000_000
ANSWER_S = 120.0
PASSED_ON = ("Content-Type", "Retry-After", HEADER)


@dataclass(slots=True)
class PlaygroundProxy:
    """`url` is known once clients are listened for."""

    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.url:
            raise HttpRefusal(503, "the gateway does not listen for clients yet")
        body = await request.content.read(MOST_BODY_BYTES + 1)
        while len(body) <= MOST_BODY_BYTES and not request.content.at_eof():
            body += await request.content.read(MOST_BODY_BYTES + 1)
        if len(body) > MOST_BODY_BYTES:
            raise HttpRefusal(413, f"a question has at most {MOST_BODY_BYTES} bytes here")
        headers = {"Content-Type": "application/json"}
        if key := request.headers.get(KEY_HEADER):
            headers["Authorization"] = f"Bearer {key}"
        timeout = ClientTimeout(total=None, sock_read=ANSWER_S)
        path = f"{self.url}/v1/chat/completions"
        response: web.StreamResponse | None = None
        try:
            # The gateway's own port: whose name its certificate bears does not matter on the way to itself.
            async with (
                ClientSession(timeout=timeout) as session,
                session.post(path, data=body, headers=headers, ssl=False) as answer,
            ):
                kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
        except (ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            if response is None:
                raise HttpRefusal(502, f"the clients' port did not answer ({error})") from error
        return response
