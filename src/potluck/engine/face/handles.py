"""Handles: who holds one may fetch the cache of one request, once, for a while.

A handle is made up by whoever plans the route, or by the sender. It is bound to the request, the model with its
weights and the tokens; a fetch must name them all, and every way of being wrong gets the same answer after the same
comparisons. Kept are only hashes of handles, so that looking one up says nothing about the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass

from potluck.core.errors import InputError
from potluck.engine.face.errors import Refused
from potluck.engine.face.hub import Channel

HANDLE = re.compile(r"[A-Za-z0-9_-]{32,128}")
MOST_WAITING = 1024


def new_handle() -> str:
    return secrets.token_urlsafe(32)


def checked_handle(handle: str) -> str:
    if not HANDLE.fullmatch(handle):
        raise InputError("handle", "must be 32 to 128 letters, digits, - and _")
    return handle


@dataclass(frozen=True, slots=True)
class Held:
    """A cache that can be fetched."""

    digest: bytes
    bound: bytes
    channel: Channel
    expires_s: float


def bound_to(request: str, fingerprint: str, token_hash: str) -> bytes:
    return hashlib.sha256(f"{len(request)} {request} {fingerprint} {token_hash}".encode()).digest()


class Handles:
    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}
        self._changed = asyncio.Condition()
        self._waiting = 0

    async def offer(self, handle: str, bound: bytes, channel: Channel, lasts_s: float) -> None:
        digest = _digest(handle)
        async with self._changed:
            if digest in self._held:
                raise InputError("handle", "is in use")
            self._held[digest] = Held(digest, bound, channel, time.monotonic() + lasts_s)
            self._changed.notify_all()

    def withdraw(self, handle: str, channel: Channel) -> None:
        """Nobody can fetch it any more; a handle that another request has taken up since stays."""
        held = self._held.get(_digest(handle))
        if held is not None and held.channel is channel:
            del self._held[held.digest]

    async def take(self, handle: str, bound: bytes, wait_s: float) -> Channel:
        """The channel of a handle, which is then used up. A receiver may come before the sender has begun."""
        digest = _digest(handle)
        if self._waiting >= MOST_WAITING:
            raise Refused(429, "too many wait for a cache")
        self._waiting += 1
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: digest in self._held), wait_s)
        except TimeoutError:
            raise _unknown() from None
        finally:
            self._waiting -= 1
        held = self._held.get(digest)
        if held is None:  # taken or withdrawn since
            raise _unknown()
        right = hmac.compare_digest(held.bound, bound) & hmac.compare_digest(held.digest, digest)
        if not right or held.expires_s < time.monotonic():
            raise _unknown()
        del self._held[digest]
        return held.channel


def _digest(handle: str) -> bytes:
    return hashlib.sha256(handle.encode()).digest()


def _unknown() -> Refused:
    return Refused(404, "handle: is unknown, has expired, was used, or is for another request", "handle")
