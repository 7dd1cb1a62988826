"""Caches that were read out of their rows before anybody came for them, because somebody else waited for a row.

Engines that hand on to each other fetch only so many caches at once. So a cache that is computed may have to wait for
its receiver while those that are fetched already wait to be computed behind it; in a ring of engines all would wait.
"""

from __future__ import annotations

from potluck.core.state.facts import OUTBOX_BYTES
from potluck.kv.chunks import KvManifest


class HostKvStore:
    """What lies in the host's memory, by the job's key. Changed by the loop, and by whoever sees a hand-over end."""

    def __init__(self, most_bytes: int = OUTBOX_BYTES) -> None:
        self.most_bytes = most_bytes
        self._found: dict[int, tuple[KvManifest, int]] = {}
        self._held_bytes = 0

    @property
    def full(self) -> bool:
        """Asked before a cache is read: one may go beyond."""
        return self._held_bytes >= self.most_bytes

    def put(self, key: int, about: KvManifest, size_bytes: int) -> None:
        self._found[key] = about, size_bytes
        self._held_bytes += size_bytes

    def taken(self, key: int) -> KvManifest | None:
        """Its receiver came, or never will; what it is, if it is here."""
        about, size_bytes = self._found.pop(key, (None, 0))
        self._held_bytes -= size_bytes
        return about
