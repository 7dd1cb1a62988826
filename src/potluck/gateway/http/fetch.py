"""Whole answers, for those who can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from potluck.core.errors import PotluckError
from potluck.gateway.interfaces import Address, EngineConnections, Headers


class NoResponse(PotluckError):
    """Whoever was asked did not answer, or not in time, or too much."""


class _Whole:
    """A listener that keeps all it hears."""

    def __init__(self, most_bytes: int) -> None:
        self.answer: asyncio.Future[tuple[int, Headers, bytes]] = asyncio.get_running_loop().create_future()
        self._most_bytes = most_bytes
        self._status = 0
        self._headers: Headers = {}
        self._parts: list[bytes] = []
        self._bytes = 0

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes and not self.answer.done():
            self.answer.set_exception(NoResponse(f"the answer is larger than {self._most_bytes} bytes"))

    def done(self) -> None:
        if not self.answer.done():
            self.answer.set_result((self._status, self._headers, b"".join(self._parts)))

    def lost(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(NoResponse(why))


async def fetch(
    outgoing: EngineConnections,
    address: Address,
    method: bytes,
    path: bytes,
    body: bytes = b"",
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    within_s: float = 5.0,
    most_bytes: int = 64_000_000,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body; raises `NoResponse`."""
    whole = _Whole(most_bytes)
    call = outgoing.send(address, method, path, body, whole, headers=headers, silence_s=within_s)
    try:
        async with asyncio.timeout(within_s):
            return await whole.answer
    except TimeoutError:
        raise NoResponse(f"{address.host}:{address.port} did not answer within {within_s:g} s") from None
    finally:
        call.cancel()
