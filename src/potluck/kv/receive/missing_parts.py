"""Which tokens of which layers of a hand-over have not come.

A layer may come in several pieces, one for each step of the sender, in any order. A state comes whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.errors import FormatError
from potluck.kv.chunks import KvChunk

Range = tuple[int, int]


def first_needed(start: int, stop: int, window: int | None) -> int:
    """The first token behind `start` that a query at `stop` can still see: what a layer with a window hands over."""
    return start if window is None else max(start, stop - window + 1)


class MissingParts:
    """The books of one hand-over."""

    def __init__(self, wanted: Mapping[tuple[int, str], Range]) -> None:
        self._gaps: dict[tuple[int, str], list[Range]] = {key: [each] for key, each in wanted.items()}

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
                gaps[place : place + 1] = [each for each in rest if each[0] < each[1]]
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
