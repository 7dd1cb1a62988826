"""Chunks put together to parcels, in whatever order and over whatever connections they come. No I/O, no clock.

The receiver believes nothing: all chunks of a parcel must say the same about it, lie on the grid that was agreed on,
and fit into the window that it granted. Memory is taken for a parcel only then. A chunk is written by one connection
at a time, and never again once it was found sound, so that a straggler cannot spoil it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from potluck.core.errors import FormatError
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import sizes
from potluck.kv.frames import ChunkHeader, ChunkPiece, TransferEnd

MOST_OPEN = 4096
"""Parcels that have begun and are not complete; those without bytes are not held back by the window."""
SOUND = -1
FREE = -2


@dataclass(slots=True)
class _Open:
    label: ChunkHeader
    buffer: memoryview
    left: int
    cells: list[int] = field(default_factory=list)
    """Per chunk: SOUND, FREE, or the connection that is writing it."""


class ChunkAssembly:
    """The parcels of one fetch; its caller sees to it that one thread at a time is in here."""

    def __init__(
        self,
        window_bytes: int,
        chunk_bytes: int,
        take: Callable[[int], memoryview],
        give: Callable[[memoryview], None],
        parcel_bytes: int | None = None,
    ) -> None:
        """Memory for `window_bytes` of parcels, or for one alone that is larger, up to `parcel_bytes`."""
        self.released_bytes = 0
        self.used_bytes = 0
        self.parcels = 0
        self._window_bytes, self._chunk_bytes = window_bytes, chunk_bytes
        self._parcel_bytes = window_bytes if parcel_bytes is None else parcel_bytes
        self._take, self._give = take, give
        self._open: dict[int, _Open] = {}
        self._full: dict[int, memoryview] = {}
        self._seen: set[int] = set()
        self._total_bytes = 0
        self._highest = -1
        self._end: TransferEnd | None = None

    @property
    def complete(self) -> bool:
        return self._end is not None and self.parcels == self._end.parcels and not self._full

    def writer(self, chunk: ChunkPiece) -> int | None:
        """The connection that is writing this very chunk, if one is."""
        parcel = self._open.get(chunk.label.index)
        if parcel is None:
            return None
        cell = parcel.cells[self._cell(chunk)]
        return cell if cell >= 0 else None

    def place(self, chunk: ChunkPiece, conn: int) -> memoryview | None:
        """Where its data goes; None if it is there already. Nobody else may be writing it."""
        cell = self._cell(chunk)
        index = chunk.label.index
        if index in self._seen:
            return None
        parcel = self._open.get(index)
        if parcel is None:
            parcel = self._begin(chunk)
        elif parcel.label != chunk.label:
            raise FormatError(f"hand-over: parcel {index}", "is described in two ways")
        if parcel.cells[cell] == SOUND:
            return None
        parcel.cells[cell] = conn
        return parcel.buffer[chunk.offset : chunk.offset + chunk.count]

    def landed(self, chunk: ChunkPiece) -> KvChunk | None:
        """A chunk that was placed has come whole and sound; the parcel if it was the last of it."""
        parcel = self._open[chunk.label.index]
        parcel.cells[self._cell(chunk)] = SOUND
        parcel.left -= 1
        if parcel.left:
            return None
        label = parcel.label
        del self._open[label.index]
        self._seen.add(label.index)
        self._full[label.index] = parcel.buffer
        self.parcels += 1
        split = sizes(label.part, label.dtype, label.shape, label.codec).parameter_bytes
        data, parameters = parcel.buffer[split:].toreadonly(), parcel.buffer[:split].toreadonly()
        return KvChunk(
            label.layer,
            label.part,
            label.first,
            label.stop,
            label.dtype,
            label.shape,
            data,
            label.codec,
            parameters,
            label.head,
        )

    def spoiled(self, chunk: ChunkPiece) -> None:
        """A chunk that was placed did not come whole: it may be placed again."""
        parcel = self._open.get(chunk.label.index)
        if parcel is not None and parcel.cells[self._cell(chunk)] != SOUND:
            parcel.cells[self._cell(chunk)] = FREE

    def release(self, index: int) -> None:
        buffer = self._full.pop(index)
        self.released_bytes += len(buffer)
        self.used_bytes -= len(buffer)
        self._give(buffer)

    def ended(self, end: TransferEnd) -> None:
        if self._end not in (None, end):
            raise FormatError("hand-over", "ends in two ways")
        self._within(end, self._highest, self._total_bytes)
        self._end = end

    def _within(self, end: TransferEnd | None, highest: int, total_bytes: int) -> None:
        """What was begun must fit what the end says, and when all is there, exactly."""
        if end is None:
            return
        if highest >= end.parcels:
            raise FormatError("hand-over", f"has more parcels than the {end.parcels} that it names")
        all_begun = len(self._seen) + len(self._open) == end.parcels
        if total_bytes > end.total_bytes or (all_begun and total_bytes != end.total_bytes):
            raise FormatError("hand-over", f"has {total_bytes} bytes and says {end.total_bytes}")

    def _begin(self, chunk: ChunkPiece) -> _Open:
        size = chunk.parcel_bytes
        fits = not self.used_bytes or self.used_bytes + size <= self._window_bytes
        if not fits or size > self._parcel_bytes or len(self._open) >= MOST_OPEN:
            raise FormatError("hand-over", f"begins a parcel of {size} bytes beyond the window")
        highest = max(self._highest, chunk.label.index)
        self._within(self._end, highest, self._total_bytes + size)
        buffer = self._take(size)
        self.used_bytes += size
        self._total_bytes += size
        self._highest = highest
        count = max(1, -(-size // self._chunk_bytes))
        parcel = _Open(chunk.label, buffer, count, [FREE] * count)
        self._open[chunk.label.index] = parcel
        return parcel

    def _cell(self, chunk: ChunkPiece) -> int:
        cell, off = divmod(chunk.offset, self._chunk_bytes)
        if off or chunk.count != min(self._chunk_bytes, chunk.parcel_bytes - chunk.offset):
            raise FormatError(
                "hand-over", f"has a chunk of {chunk.count} bytes at {chunk.offset}, off the grid"
            )
        return cell

    def close(self) -> None:
        """Give all memory back. Nobody may be writing any more."""
        for buffer in [parcel.buffer for parcel in self._open.values()] + list(self._full.values()):
            self._give(buffer)
        self._open.clear()
        self._full.clear()
        self.used_bytes = 0


Range = tuple[int, int]


def first_needed(start: int, stop: int, window: int | None) -> int:
    """The first token behind `start` that a query at `stop` can still see: what a layer with a window hands over."""
    return start if window is None else max(start, stop - window + 1)


class MissingParts:
    def __init__(self, wanted: Mapping[tuple[int, str], Range]) -> None:
        self._gaps: dict[tuple[int, str], list[Range]] = {key: [item] for key, item in wanted.items()}

    @property
    def missing(self) -> int:
        """Parts of layers that are not whole."""
        return len(self._gaps)

    def take(self, parcel: KvChunk) -> None:
        """A parcel is there; FormatError if it was not expected."""
        key, piece = (parcel.layer, parcel.part), (parcel.first, parcel.stop)
        where = f"hand-over: layer {parcel.layer} {parcel.part}"
        gaps = self._gaps.get(key)
        if gaps is None:
            raise FormatError(where, "is not expected, or came before")
        for place, gap in enumerate(gaps):
            if piece == gap:
                del gaps[place]
                break
            if gap[0] <= piece[0] < piece[1] <= gap[1]:
                rest = (gap[0], piece[0]), (piece[1], gap[1])
                gaps[place : place + 1] = [item for item in rest if item[0] < item[1]]
                break
        else:
            lacking = ", ".join(f"[{first}, {stop})" for first, stop in gaps[:3])
            raise FormatError(where, f"is of [{piece[0]}, {piece[1]}), expected of {lacking}")
        if not gaps:
            del self._gaps[key]

    def must_be_whole(self) -> None:
        if self._gaps:
            layer, part = min(self._gaps)
            raise FormatError(
                "hand-over", f"{len(self._gaps)} parcels are missing, the first is layer {layer} {part}"
            )
