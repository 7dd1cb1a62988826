"""What the prefix cache says of itself, numbered, for whoever keeps an index of all replicas (`core.routing.index`).

A reader names the epoch and the last report that it has, and gets those after it, or, when they are no longer there
or it knows another epoch, all that the cache holds. So a lost answer costs nothing, several readers do not disturb
each other, and nobody has to be told that somebody missed something.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from potluck.core.errors import InputError
from potluck.core.replica.block_values import CacheChanges
from potluck.core.routing.prefix_index import CacheAnnouncer
from potluck.core.state.events import CacheReported

MOST_REPORTS = 256
EPOCH_BITS = 48
"""Fits a number of any JSON reader. Epochs are drawn: a restarted engine knows nothing of the one before."""


class HeldPrefixes(Protocol):
    """What is held, and what changed since that was last asked."""

    def changes(self) -> CacheChanges: ...

    def everything(self) -> CacheChanges: ...


class CacheFeed:
    """Read and changed in one thread alone."""

    def __init__(self, prefixes: HeldPrefixes, epoch: int | None = None) -> None:
        self._prefixes = prefixes
        self.epoch = secrets.randbits(EPOCH_BITS) if epoch is None else epoch
        self._announcer = CacheAnnouncer("", self.epoch)
        self._reports: deque[CacheReported] = deque(maxlen=MOST_REPORTS)

    def after(self, epoch: int | None, sequence: int) -> list[CacheReported]:
        """What a reader lacks that has all up to a report of an epoch."""
        changes = self._prefixes.changes()
        if changes:
            self._reports.append(self._announcer.report(changes))
        last = self._announcer.sequence
        first = last - len(self._reports) + 1
        if epoch != self.epoch or not first - 1 <= sequence <= last:
            return [self._announcer.snapshot(self._prefixes.everything())]
        return [report for report in self._reports if report.sequence > sequence]


def place_in(query: Mapping[str, str]) -> tuple[int | None, int]:
    """Where a reader is, from what it asks: `?epoch=E&after=N`."""
    unknown = set(query) - {"epoch", "after"}
    if unknown:
        raise InputError(min(unknown), "unknown; /cache takes epoch and after")
    for name, text in query.items():
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InputError(name, "must be a whole number")
    epoch = query.get("epoch")
    return None if epoch is None else int(epoch), int(query.get("after", "0"))


def as_json(report: CacheReported) -> dict[str, object]:
    """Names are numbers of 128 bits, which JSON readers would round: as hexadecimal text."""
    names = {
        kind: [f"{name:032x}" for name in getattr(report, kind)]
        for kind in ("added", "removed", "marked", "unmarked")
    }
    return {"sequence": report.sequence, "whole": report.whole, **names}
