"""Pieces put together to chunks, in whatever order and over whatever connections they come. No I/O, no clock.

The receiver believes nothing: all pieces of a chunk must say the same about it, lie on the grid that was agreed on,
and fit into the window that it granted. Memory is taken for a chunk only then. A piece is written by one connection
at a time, and never again once it was found sound, so that a straggler cannot spoil it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from potluck.core.errors import FormatError
from potluck.kv.chunks import KvChunk, sizes_of
from potluck.kv.frames import ChunkPiece, TransferEnd

MOST_OPEN = 4096
"""Chunks that have begun and are not complete; those without bytes are not held back by the window."""
SOUND = -1
FREE = -2


@dataclass(slots=True)
class _Open:
    chunk: KvChunk
    buffer: memoryview
    left: int
    cells: list[int] = field(default_factory=list)
    """Per piece: SOUND, FREE, or the connection that is writing it."""


class ChunkAssembly:
    """The chunks of one fetch; its caller sees to it that one thread at a time is in here."""

    def __init__(
        self,
        window_bytes: int,
        piece_bytes: int,
        take: Callable[[int], memoryview],
        give: Callable[[memoryview], None],
        most_chunk_bytes: int | None = None,
    ) -> None:
        """Memory for `window_bytes` of chunks, or for one alone that is larger, up to `most_chunk_bytes`."""
        self.released_bytes = 0
        self.used_bytes = 0
        self.chunks = 0
        self._window_bytes, self._piece_bytes = window_bytes, piece_bytes
        self._most_chunk_bytes = window_bytes if most_chunk_bytes is None else most_chunk_bytes
        self._take, self._give = take, give
        self._open: dict[int, _Open] = {}
        self._full: dict[int, memoryview] = {}
        self._seen: set[int] = set()
        self._total_bytes = 0
        self._highest = -1
        self._end: TransferEnd | None = None

    @property
    def complete(self) -> bool:
        return self._end is not None and self.chunks == self._end.chunks and not self._full

    def writer(self, piece: ChunkPiece) -> int | None:
        """The connection that is writing this very piece, if one is."""
        begun = self._open.get(piece.index)
        if begun is None:
            return None
        cell = begun.cells[self._cell(piece)]
        return cell if cell >= 0 else None

    def place(self, piece: ChunkPiece, conn: int) -> memoryview | None:
        """Where its data goes; None if it is there already. Nobody else may be writing it."""
        cell = self._cell(piece)
        index = piece.index
        if index in self._seen:
            return None
        begun = self._open.get(index)
        if begun is None:
            begun = self._begin(piece)
        elif begun.chunk != piece.chunk:
            raise FormatError(f"hand-over: chunk {index}", "is described in two ways")
        if begun.cells[cell] == SOUND:
            return None
        begun.cells[cell] = conn
        return begun.buffer[piece.offset : piece.offset + piece.count]

    def landed(self, piece: ChunkPiece) -> KvChunk | None:
        """A piece that was placed has come whole and sound; the chunk if it was the last of it."""
        begun = self._open[piece.index]
        begun.cells[self._cell(piece)] = SOUND
        begun.left -= 1
        if begun.left:
            return None
        del self._open[piece.index]
        self._seen.add(piece.index)
        self._full[piece.index] = begun.buffer
        self.chunks += 1
        split = sizes_of(begun.chunk).parameter_bytes
        data, parameters = begun.buffer[split:], begun.buffer[:split].toreadonly()
        return replace(begun.chunk, data=data, parameters=parameters)

    def spoiled(self, piece: ChunkPiece) -> None:
        """A piece that was placed did not come whole: it may be placed again."""
        begun = self._open.get(piece.index)
        if begun is not None and begun.cells[self._cell(piece)] != SOUND:
            begun.cells[self._cell(piece)] = FREE

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
        if highest >= end.chunks:
            raise FormatError("hand-over", f"has more chunks than the {end.chunks} that it names")
        all_begun = len(self._seen) + len(self._open) == end.chunks
        if total_bytes > end.total_bytes or (all_begun and total_bytes != end.total_bytes):
            raise FormatError("hand-over", f"has {total_bytes} bytes and says {end.total_bytes}")

    def _begin(self, piece: ChunkPiece) -> _Open:
        size = piece.chunk_bytes
        fits = not self.used_bytes or self.used_bytes + size <= self._window_bytes
        if not fits or size > self._most_chunk_bytes or len(self._open) >= MOST_OPEN:
            raise FormatError("hand-over", f"begins a chunk of {size} bytes beyond the window")
        highest = max(self._highest, piece.index)
        self._within(self._end, highest, self._total_bytes + size)
        buffer = self._take(size)
        self.used_bytes += size
        self._total_bytes += size
        self._highest = highest
        count = max(1, -(-size // self._piece_bytes))
        begun = _Open(piece.chunk, buffer, count, [FREE] * count)
        self._open[piece.index] = begun
        return begun

    def _cell(self, piece: ChunkPiece) -> int:
        cell, off = divmod(piece.offset, self._piece_bytes)
        if off or piece.count != min(self._piece_bytes, piece.chunk_bytes - piece.offset):
            raise FormatError(
                "hand-over", f"has a piece of {piece.count} bytes at {piece.offset}, off the grid"
            )
        return cell

    def close(self) -> None:
        """Give all memory back. Nobody may be writing any more."""
        for buffer in [begun.buffer for begun in self._open.values()] + list(self._full.values()):
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

    def take(self, chunk: KvChunk) -> None:
        """A chunk is there; FormatError if it was not expected."""
        key, piece = (chunk.layer, chunk.part), (chunk.first, chunk.stop)
        where = f"hand-over: layer {chunk.layer} {chunk.part}"
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
                "hand-over", f"{len(self._gaps)} chunks are missing, the first is layer {layer} {part}"
            )
