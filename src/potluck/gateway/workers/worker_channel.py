"""Lines between the desk's process and a worker's. What is sent in one turn of the loop goes out in one write.

Every line begins with a letter that says what it is. Nothing on it runs anything: it is JSON, and events and actions
are written as the log writes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from potluck.core.errors import PotluckError

MOST_BYTES = 64_000_000
"""Of a line that has not ended, or of what the other side has not read."""
MOST_KEPT = 100_000
"""Lines that wait for a connection."""
LAZY_S = 0.005
"""How long news wait for company that change nothing at once: the other process is woken less often."""

log = logging.getLogger(__name__)


class WorkerChannel(asyncio.Protocol):
    """One end of the wire: `heard` gets each line's letter and the rest of it, `gone` is called when it is cut.

    It may then be connected again; lines whose letter is in `kept` wait for that, others are dropped.
    """

    def __init__(
        self, heard: Callable[[str, str], None], gone: Callable[[], None], kept: frozenset[str] = frozenset()
    ) -> None:
        self._heard, self._gone, self._kept = heard, gone, kept
        self._out: list[str] = []
        self._soon = False
        self._lazy: asyncio.TimerHandle | None = None
        self._held = b""
        self._wire: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, letter: str, text: str) -> None:
        """`text` has no line end."""
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self.flush)
        self._out.append(f"{letter}{text}\n")

    def later(self, letter: str, text: str) -> None:
        """Something that nobody waits for: it goes with what is next, and in its place in the order."""
        if self._lazy is None and not self._soon:
            self._lazy = self._loop.call_later(LAZY_S, self.flush)
        self._out.append(f"{letter}{text}\n")

    def flush(self) -> None:
        out, self._out = self._out, []
        self._soon = False
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if self._wire is None or self._wire.is_closing():
            self._out = [line for line in out if line[0] in self._kept][-MOST_KEPT:]
            return
        if not out:
            return
        self._wire.write("".join(out).encode())
        if self._wire.get_write_buffer_size() > MOST_BYTES:
            log.error("a worker or the desk reads nothing any more")
            self._wire.abort()

    def close(self) -> None:
        self.flush()
        if self._wire is not None:
            self._wire.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._wire.set_write_buffer_limits(MOST_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wire, self._held = None, b""
        self._gone()

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def data_received(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        data, _, self._held = data.rpartition(b"\n")
        try:
            for text in data.decode().split("\n") if data else ():
                self._heard(text[:1], text[1:])
            if len(self._held) > MOST_BYTES:
                raise ValueError("a line without an end")
        except (PotluckError, ValueError, KeyError, TypeError, IndexError):
            log.exception("what came from the other side cannot be read")
            assert self._wire is not None
            self._wire.abort()
