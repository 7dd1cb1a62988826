"""`GET /`: one page for a person, self-contained. It holds no figures itself: it asks /status for them, with the key
that its reader types in where there is one, and forgets the key with the tab."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def page(_: web.Request) -> web.Response:
    text = (resources.files("potluck.engine.server") / "data" / "page.html").read_text("utf-8")
    return web.Response(text=text, content_type="text/html", headers=HEADERS)
