"""What a browser loads: files of this package, read once, and the headers that keep everything else out."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import NamedTuple

from potluck.runtime.style import base_css

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FIRST, BASE = "index.html", "base.css"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing inline, nothing from elsewhere, in nobody's frame."""


class StaticFile(NamedTuple):
    body: bytes
    kind: str
    tag: str
    """Another one when the file is another."""


@cache
def files() -> dict[str, StaticFile]:
    """By name."""
    found = {BASE: _read_file(BASE, base_css().encode())}
    for each in sorted(
        resources.files("potluck.gateway.page").joinpath("data").iterdir(), key=lambda one: one.name
    ):
        if each.name[each.name.rfind(".") :] in KINDS:
            found[each.name] = _read_file(each.name, each.read_bytes())
    return found


def _read_file(name: str, body: bytes) -> StaticFile:
    return StaticFile(body, KINDS[name[name.rfind(".") :]], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
