"""The bytes behind a block pool: one piece of memory cut into equal blocks, and files for what it has no room for.

`core.replica.blocks` says what is where and what goes; this holds the data, moves what goes to disk, and brings it
back when it is asked for. Names stand for all tokens before them, so a block from a file is as good as one that was
never away.

Every entry has a checksum from when it was written. When there is nothing else to do, `verify` goes round and
compares: what has changed goes, with all that builds on it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol
from zlib import crc32

import numpy as np

from potluck.core.errors import InputError
from potluck.core.replica.blocks import BlockPlacement, BlockPool, CacheChanges, Checkpoint, Name, PrefixHit
from potluck.core.routing.prefix_index import CacheAnnouncer
from potluck.core.state.events import CacheReported
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.kv.disk_tier import DiskTier, Pieces


class PrefixPool:
    """Data by name. Changed from one thread."""

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        *,
        exact: bool = False,
        block_tokens: int = BLOCK_TOKENS,
        disk: DiskTier | None = None,
    ) -> None:
        if capacity_bytes < 0 or block_bytes < 1:
            raise InputError("prefix pool", "needs a size that is not negative and blocks of a byte or more")
        self.block_bytes = block_bytes
        self.disk = disk
        self.index = BlockPool(capacity_bytes // block_bytes, exact=exact, block_tokens=block_tokens)
        """To read and to pin; only this object keeps or drops."""
        self._memory = memoryview(np.empty(self.index.blocks * block_bytes, np.uint8).data)
        self._sums: dict[Name, tuple[int, int]] = {}  # (bytes, checksum).
        self._round: Iterator[Name] = iter(())
        self.corrupted = 0  # Entries that were not what had been written.

    @property
    def used_bytes(self) -> int:
        return (self.index.blocks - self.index.free_blocks) * self.block_bytes

    def find(
        self, tokens: Sequence[int], hashes: Sequence[int], most_tokens: int, root: int = 0
    ) -> PrefixHit:
        """The longest prefix that can be resumed; what of it is on disk comes to memory."""
        if self.disk is not None and most_tokens > 0 and len(self.disk):
            self._fetch(self.disk, tokens, hashes, most_tokens, root)
        return self.index.longest(tokens, hashes, most_tokens, root)

    def read(self, name: Name) -> memoryview | bytes:
        """The data; of a block the memory itself, which is another's after the next `keep`."""
        places, size = self.index.places(name), self._sums[name][0]
        if len(places) == 1:
            return self._place(places[0])[:size]
        return b"".join(self._place(place) for place in places)[:size]

    def keep(self, hashes: Sequence[int], new: Sequence[Pieces]) -> int:
        """Keep a chain whose blocks beyond those that there are have this data; how many of them were taken."""
        if len(new) != len(hashes) - self.index.depth(hashes):
            raise InputError("prefix pool", f"needs the data of all new blocks, has {len(new)}")
        for pieces in new:
            if sum(memoryview(piece).nbytes for piece in pieces) != self.block_bytes:
                raise InputError("prefix pool", f"a block has {self.block_bytes} bytes")
        placed, gone = self.index.keep(hashes)
        self._let_go(gone)
        for one, pieces in zip(placed, new, strict=False):
            self._write(one, pieces)
        return len(placed)

    def keep_checkpoint(
        self, hashes: Sequence[int], rest: Sequence[int], pieces: Pieces, root: int = 0
    ) -> bool:
        """Keep what is needed to resume behind a chain that is kept and `rest`; whether that was new and fits."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        one, gone = self.index.keep_checkpoint(hashes, rest, -(-size // self.block_bytes), root)
        self._let_go(gone)
        if one is not None:
            self._write(one, pieces)
        return one is not None

    def changes(self) -> CacheChanges:
        return self.index.changes()

    def everything(self) -> CacheChanges:
        return self.index.everything()

    def flush(self) -> None:
        """All to disk, before the process ends; without it a restart finds only what memory had no room for."""
        if self.disk is not None:
            for name in list(self._sums):
                self._save(self.disk, name, self.index.places(name))

    def verify(self, most_bytes: int = 1 << 24) -> int:
        """Look at the next so many bytes of what is kept; how many entries had to go."""
        lost, seen = 0, 0
        while seen < most_bytes:
            name = next(self._round, None)
            if name is None:
                self._round = iter(list(self._sums))
                break
            if name not in self._sums:
                continue
            size, expected = self._sums[name]
            seen += size
            if crc32(self.read(name)) != expected:
                self.corrupted += 1
                gone = self.index.drop(name)
                lost += len(gone)
                for one in gone:
                    del self._sums[one.name]
        return lost

    def check(self) -> None:
        """Names and data agree, and no block is lost; AssertionError if not."""
        self.index.check()
        if set(self._sums) != set(self.index.names()):
            raise AssertionError("there is data without a name, or a name without data")

    # Inside.

    def _place(self, place: int) -> memoryview:
        return self._memory[place * self.block_bytes : (place + 1) * self.block_bytes]

    def _write(self, block_placement: BlockPlacement, pieces: Pieces) -> None:
        total, at = 0, 0
        checksum = 0
        places = iter(block_placement.places)
        room = self._place(next(places))
        for piece in pieces:
            view = memoryview(piece).cast("B")
            checksum = crc32(view, checksum)
            total += len(view)
            while len(view):
                if at == len(room):
                    room, at = self._place(next(places)), 0
                count = min(len(view), len(room) - at)
                room[at : at + count] = view[:count]
                view, at = view[count:], at + count
        self._sums[block_placement.name] = total, checksum

    def _let_go(self, gone: list[BlockPlacement]) -> None:
        """Before their blocks are written to: to disk, if there is one."""
        for name, places in gone:
            if self.disk is not None:
                self._save(self.disk, name, places)
            del self._sums[name]

    def _save(self, disk: DiskTier, name: Name, places: Sequence[int]) -> None:
        """To disk, if it is what it was."""
        if name in disk:
            return
        size, expected = self._sums[name]
        pieces = [self._place(place) for place in places]
        pieces[-1] = pieces[-1][: size - (len(pieces) - 1) * self.block_bytes]
        checksum = 0
        for piece in pieces:
            checksum = crc32(piece, checksum)
        if checksum == expected:
            disk.put(name, pieces)
        else:
            self.corrupted += 1

    def _fetch(
        self, disk: DiskTier, tokens: Sequence[int], hashes: Sequence[int], most_tokens: int, root: int
    ) -> None:
        """From disk what makes the prefix longer that can be resumed."""
        depth = self.index.depth(hashes)
        most = min(len(hashes), most_tokens // self.index.block_tokens)
        reach = depth
        while reach < most and hashes[reach] in disk:
            reach += 1
        checkpoint = None
        if self.index.exact:
            have = self.index.longest(tokens, hashes, most_tokens, root).tokens
            reach, checkpoint = self._resumable(disk, tokens, hashes, reach, most_tokens, root)
            if checkpoint is None or reach * self.index.block_tokens + len(checkpoint.rest) <= have:
                return
        loaded: list[Pieces] = []
        while depth + len(loaded) < reach:
            data = disk.get(hashes[depth + len(loaded)])
            if data is None or len(data) != self.block_bytes:
                break
            loaded.append([data])
        if loaded:
            self.keep(hashes[: depth + len(loaded)], loaded)
        if checkpoint is not None:
            data = disk.get(checkpoint)
            if data is not None:
                self.keep_checkpoint(hashes[:reach], checkpoint.rest, [data], root)

    def _resumable(
        self,
        disk: DiskTier,
        tokens: Sequence[int],
        hashes: Sequence[int],
        reach: int,
        most_tokens: int,
        root: int,
    ) -> tuple[int, Checkpoint | None]:
        """The longest checkpoint on disk behind at most `reach` blocks, and behind how many."""
        for blocks in range(reach, -1, -1):
            start = blocks * self.index.block_tokens
            fitting = [
                checkpoint
                for checkpoint in disk.behind(hashes[blocks - 1] if blocks else root)
                if start + len(checkpoint.rest) <= most_tokens
                and tuple(tokens[start : start + len(checkpoint.rest)]) == checkpoint.rest
            ]
            if fitting:
                return blocks, max(fitting, key=lambda each: len(each.rest))
        return reach, None


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
