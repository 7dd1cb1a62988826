"""Which connection goes when there are too many, and which have waited too long. No I/O, no clock.

A connection *waits* while no whole request has come over it: between requests, and with half a head or half a body.
It is *busy* from the request's last byte to the answer's. Only those that wait can be sent away; whoever fills a
server with half-sent requests then loses the oldest of them, and a request that comes whole is answered. Of several
addresses the one with the most that wait gives way, so that one client cannot crowd out the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Peer(Generic[K]):
    waiting: dict[K, None] = field(default_factory=dict)
    """Oldest first."""
    busy: int = 0


class ConnectionLimits(Generic[K]):
    """The connections of one listener, by the address that they came from."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._peers: dict[str, _Peer[K]] = {}
        self._peer_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._peer_of))

    @property
    def full(self) -> bool:
        return len(self) >= self.most

    def came(self, key: K, peer: str) -> None:
        self._peer_of[key] = peer
        self._peers.setdefault(peer, _Peer()).waiting[key] = None

    def waits(self, key: K) -> None:
        """Its request was answered; it goes to the end of those that wait."""
        name = self._peer_of.get(key)
        if name is not None:
            peer = self._peers[name]
            if key not in peer.waiting:
                peer.busy -= 1
                peer.waiting[key] = None

    def works(self, key: K) -> None:
        """Its request is whole."""
        name = self._peer_of.get(key)
        if name is not None:
            peer = self._peers[name]
            if key in peer.waiting:
                del peer.waiting[key]
                peer.busy += 1

    def left(self, key: K) -> None:
        name = self._peer_of.pop(key, None)
        if name is None:
            return
        peer = self._peers[name]
        if key in peer.waiting:
            del peer.waiting[key]
        else:
            peer.busy -= 1
        if not peer.waiting and not peer.busy:
            del self._peers[name]

    def oldest(self) -> K | None:
        """The one to send away: of the address with the most that wait, the one that waits longest."""
        crowded = max(self._peers.values(), key=lambda peer: len(peer.waiting), default=None)
        return next(iter(crowded.waiting), None) if crowded is not None else None
