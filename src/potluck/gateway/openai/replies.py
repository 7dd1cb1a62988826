"""Small answers: errors and lists, as a status, a body and headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil

from potluck.api.http_errors import HttpRefusal, error_object
from potluck.core.state.actions import RefusalReason, Refuse
from potluck.gateway.interfaces import Exchange
from potluck.gateway.openai.quota import KeyQuota, QuotaExceeded

Pairs = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
AS_IT_COMES = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Proxies on the way pass parts of a stream on at once."""

REFUSALS: Mapping[RefusalReason, tuple[int, str]] = {
    "overloaded": (429, "overloaded"),
    "no_capacity": (503, "no_capacity"),
    "too_long": (400, "context_length_exceeded"),
    "deadline": (504, "deadline_exceeded"),
    "unknown_model": (404, "model_not_found"),
    "unknown_class": (400, "unknown_class"),
    "retries": (502, "upstream_failed"),
    "lost": (502, "upstream_failed"),
}
"""What the Brain says no with, as a status and a code."""
AGAIN = frozenset({429, 503})
"""With these comes Retry-After."""


class RateLimited(HttpRefusal):
    """Too much for now: with when to try again, and what is left."""

    def __init__(self, message: str, code: str, retry_after_s: float, lines: bytes = b"") -> None:
        super().__init__(429, message, code)
        self.retry_after_s = retry_after_s
        self.lines = lines


def limited(allowance: KeyQuota, spent: QuotaExceeded, now_s: float) -> RateLimited:
    """That a key has used all it may for now."""
    quota = allowance.quota
    what = {
        "requests": f"{quota.requests_per_min:g} requests a minute" if quota.requests_per_min else "",
        "tokens": f"{quota.tokens_per_min:g} tokens a minute" if quota.tokens_per_min else "",
        "concurrent": f"{quota.concurrent} requests at once",
    }[spent.kind]
    line = f"this key may use {what}; try again in {spent.retry_after_s:.1f} s"
    return RateLimited(line, "rate_limit_exceeded", spent.retry_after_s, allowance.headers(now_s))


def refused_by_brain(refusal: Refuse) -> tuple[HttpRefusal, float | None]:
    """As an error, and when to try again."""
    status, code = REFUSALS[refusal.reason]
    return HttpRefusal(status, refusal.detail or refusal.reason, code), refusal.retry_after_s


def compact(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def error_bytes(error: HttpRefusal) -> bytes:
    return compact(error_object(error.status, str(error), param=error.param, code=error.code))


def reply_error(
    exchange: Exchange, tag: tuple[bytes, bytes], error: HttpRefusal, after_s: float | None
) -> None:
    headers: Pairs = [JSON, tag]
    lines = b""
    if isinstance(error, RateLimited):
        after_s, lines = error.retry_after_s, error.lines
    if error.status in AGAIN:
        headers.append((b"retry-after", b"%d" % max(1, ceil(1.0 if after_s is None else after_s))))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    exchange.reply(error.status, error_bytes(error), headers, lines)


def reply_json(exchange: Exchange, tag: tuple[bytes, bytes], body: object, status: int = 200) -> None:
    exchange.reply(status, compact(body), [JSON, tag])
