"""Bodies that have not come whole: how many bytes of them there may be at once."""

from __future__ import annotations

from aiohttp import StreamReader

from potluck.api.http import HttpRefusal


class Uploads:
    """Where there are too many bytes, the largest body goes: whoever holds the most lets the others through."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[StreamReader, int] = {}
        self.held_bytes = 0

    def grow(self, reader: StreamReader, size: int) -> None:
        self._held[reader] = self._held.get(reader, 0) + size
        self.held_bytes += size
        while self.held_bytes > self._most_bytes:
            largest = max(self._held, key=self._held.__getitem__)
            self.done(largest)
            refused = HttpRefusal(503, "too much is being sent to this engine; try again", "overloaded")
            if largest is reader:
                raise refused
            largest.set_exception(refused)

    def done(self, reader: StreamReader) -> None:
        self.held_bytes -= self._held.pop(reader, 0)
