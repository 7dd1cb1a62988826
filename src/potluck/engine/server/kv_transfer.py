"""How parcels go over the wire: under which codec they are what, when they may go, and what is told of it."""

from __future__ import annotations

from typing import Protocol

from potluck.engine.compute.emulated import EmulatedNic
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import Codec
from potluck.kv.kv_codec import packed, restored
from potluck.kv.peer_connections import LinkReport


class KvTransfer(Protocol):
    @property
    def light(self) -> bool:
        """Whether parcels are so small that no thread is needed for them."""

    def kv_bytes(self, parcel: KvChunk) -> int:
        """What it counts as on the wire."""

    def packed(self, parcel: KvChunk, codec: Codec) -> KvChunk: ...

    def restored(self, parcel: KvChunk) -> KvChunk: ...

    def due_s(self, parcel: KvChunk) -> float | None:
        """When a parcel that is handed in now may go, by the monotonic clock; None: at once."""

    def leaves(self, peer: str, parcel: KvChunk) -> KvChunk:
        """It goes there now: the parcel as it goes."""

    def here_s(self, peer: str, parcel: KvChunk) -> float | None:
        """When a parcel that came from there is here, by the monotonic clock; None: at once. Called in any thread."""

    def fetched(self, peer: str, kv_bytes: int, wall_s: float) -> None:
        """A cache came whole from there."""

    def told(self, report: LinkReport) -> LinkReport:
        """What is said of a link."""


class PlainKvTransfer:
    """Parcels as they are; the card of an emulated GPU, if there is one, takes its time."""

    light = False

    def __init__(self, card: EmulatedNic | None = None) -> None:
        self._card = card

    def kv_bytes(self, parcel: KvChunk) -> int:
        return len(parcel.data) + len(parcel.parameters)

    def packed(self, parcel: KvChunk, codec: Codec) -> KvChunk:
        return packed(parcel, codec)

    def restored(self, parcel: KvChunk) -> KvChunk:
        return restored(parcel)

    def due_s(self, parcel: KvChunk) -> float | None:
        return None if self._card is None else self._card.due_s(parcel)

    def leaves(self, peer: str, parcel: KvChunk) -> KvChunk:
        return parcel  # the connections count for themselves

    def here_s(self, peer: str, parcel: KvChunk) -> float | None:
        return None

    def fetched(self, peer: str, kv_bytes: int, wall_s: float) -> None:
        """As above."""

    def told(self, report: LinkReport) -> LinkReport:
        return report
