"""An engine that lies: before a real one, it passes everything on but segments, which it answers with garbage.

    python tools/lying_engine.py http://127.0.0.1:8000        says {"url": ...} and serves until it is ended

It looks well to whoever asks how it is; only what it answers is worth nothing, each time in another way.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count

from aiohttp import ClientSession, web

MOST_BYTES = 16_000_000
LINES = [
    b"<html>502 Bad Gateway</html>\n",
    b'{"token":5}\n{"token":99999999}\n',
    b'{"token":5}\n{"token":6}\n{"ended":"length","prompt_tokens":1,"cached_tokens":0,"output_tokens":2}\n',
    b'{"token":5}\n{"tok',
    b'{"ended":"stop","prompt_tokens":1,"cached_tokens":0,"output_tokens":0}\n',
    b'{"nothing":1}\n',
    b"\x00\xff\xfe\n",
]
"""Its lies, but for tokens that could be right: nobody can tell those from the truth."""


def app(behind: str) -> web.Application:
    turns = count()

    async def lie(request: web.Request) -> web.StreamResponse:
        await request.read()
        turn = next(turns)
        if turn % (len(LINES) + 1) == len(LINES):
            return web.json_response({"error": {"message": "no", "code": None}}, status=500)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        await asyncio.sleep(0.05)
        lines = LINES[turn % len(LINES)]
        # A token that came before is believed, so there must be none.
        await answer.write(lines.removeprefix(b'{"token":5}\n').removeprefix(b'{"token":6}\n'))
        await answer.write_eof()
        return answer

    async def pass_on(request: web.Request) -> web.Response:
        body = await request.read()
        async with session.request(request.method, behind + request.path_qs, data=body) as answer:
            received = await answer.read()
            return web.Response(status=answer.status, body=received, content_type=answer.content_type)

    made = web.Application(client_max_size=MOST_BYTES)
    session: ClientSession

    async def with_session(_: web.Application):  # type: ignore[no-untyped-def]
        nonlocal session
        session = ClientSession()
        yield
        await session.close()

    made.cleanup_ctx.append(with_session)
    made.router.add_post("/segments", lie)
    made.router.add_route("*", "/{path:.*}", pass_on)
    return made


async def main(behind: str) -> None:
    runner = web.AppRunner(app(behind), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
