"""Which replica of which cluster holds which prefix: one index over all block pools, made of what they report.

Reports are numbered. What comes early waits for what is missing; until then the replica is *stale*: left out of
answers, and `apply` says that a snapshot is wanted. A block's holders are the bits of one number. Names are chained,
so the longest match is found by bisection. Blocks neither reported nor matched for the longest are forgotten."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from potluck.core.errors import InputError
from potluck.core.replica.blocks import CacheChanges
from potluck.core.state.events import CacheReported

MOST_BLOCKS: Final = 1_000_000
MOST_LATE: Final = 64  # Reports of one replica that wait for an earlier one.
SWEEP_AT: Final = 32  # Bits out of use before they are swept out.


Accepts = Callable[[str], bool]


class CacheAnnouncer:
    def __init__(self, replica: str, epoch: int) -> None:
        self._replica, self._epoch = replica, epoch
        self.sequence = 0

    def report(self, changes: CacheChanges) -> CacheReported:
        self.sequence += 1
        return self._said(changes, False)

    def snapshot(self, cache_changes: CacheChanges) -> CacheReported:
        return self._said(cache_changes, True)

    def _said(self, changes: CacheChanges, whole: bool) -> CacheReported:
        kinds = (changes.added, changes.removed, changes.marked, changes.unmarked)
        return CacheReported(self._replica, self.sequence, *kinds, self._epoch, whole)


class PrefixMatch(NamedTuple):
    blocks: int
    replicas: tuple[str, ...]


@dataclass(slots=True)
class _Source:
    cluster: str
    epoch: int
    bit: int
    sequence: int = 0
    late: dict[int, CacheReported] = field(default_factory=dict)

    @property
    def stale(self) -> bool:
        return bool(self.late)


class PrefixIndex:
    """Changed by `apply` and `forget`, and by the bound on its size."""

    def __init__(self, most_blocks: int = MOST_BLOCKS, most_late: int = MOST_LATE) -> None:
        if most_blocks < 1 or most_late < 1:
            raise InputError("prefix index", "needs room for a block and for a late report")
        self._most_blocks, self._most_late = most_blocks, most_late
        self._blocks: dict[int, int] = {}
        """Name to holders, least recently reported or matched first; behind a block those that build on it."""
        self._marks: dict[int, int] = {}
        """The same for blocks at whose end layers with a window or a state can be resumed."""
        self._sources: dict[str, _Source] = {}
        self._names: dict[int, str] = {}
        self._clusters: dict[str, int] = {}
        self._fresh = 0
        self._bits = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def stale(self, replica: str) -> bool:
        source = self._sources.get(replica)
        return source is not None and source.stale

    def apply(self, event: CacheReported, cluster: str) -> bool:
        """Take in a report of a replica of that cluster; whether a snapshot is wanted of it."""
        source = self._sources.get(event.replica)
        if source is not None and event.epoch < source.epoch:
            return source.stale
        if source is None or event.epoch > source.epoch:
            self.forget(event.replica)
            source = self._enter(event.replica, cluster, event.epoch)
        if event.whole:
            if event.sequence < source.sequence:
                return source.stale
            source = self._replaced(event, source)
        elif event.sequence > source.sequence:
            source.late[event.sequence] = event
            if len(source.late) > self._most_late:  # only a snapshot will help, and what comes behind it
                del source.late[min(source.late)]
        self._catch_up(source)
        self._bound()
        return source.stale

    def forget(self, replica: str) -> None:
        source = self._sources.pop(replica, None)
        if source is None:
            return
        bit = 1 << source.bit
        self._fresh &= ~bit
        del self._names[source.bit]
        left = self._clusters[source.cluster] & ~bit
        if left:
            self._clusters[source.cluster] = left
        else:
            del self._clusters[source.cluster]
        self._dead += 1
        if self._dead >= SWEEP_AT:
            self._sweep()

    def longest(self, blocks: Sequence[int], *, exact: bool = False) -> dict[str, PrefixMatch]:
        """For each cluster that holds some of a prompt, how much; `exact`: where layers with a state can resume."""
        known, fresh = self._blocks, self._fresh
        high = _leading(blocks, len(blocks), known, fresh)
        if not high:
            return {}
        prefix_matches = {}
        for cluster, bits in self._clusters.items():
            bits &= fresh
            depth = high
            if not known[blocks[high - 1]] & bits:
                depth = _leading(blocks, high, known, bits)
            while exact and depth and not self._marks.get(blocks[depth - 1], 0) & bits:
                depth -= 1
            if depth:
                holders = (self._marks if exact else known)[blocks[depth - 1]] & bits
                prefix_matches[cluster] = PrefixMatch(depth, self._who(holders))
        if 4 * len(known) > 3 * self._most_blocks:
            self._touch(blocks[:high])
        return prefix_matches

    def deepest(
        self, blocks: Sequence[int], accepts: Accepts, *, exact: bool = False
    ) -> tuple[int, list[str]]:
        """The longest prefix that somebody acceptable can resume from, and who they are."""
        known, fresh = self._blocks, self._fresh
        high = _leading(blocks, len(blocks), known, fresh)
        if not high:
            return 0, []
        texts = [*filter(accepts, self._who(known[blocks[high - 1]] & fresh))]
        if not texts:

            def nobody(name: int) -> bool:
                return not any(map(accepts, self._who(known.get(name, 0) & fresh)))

            high = bisect_left(blocks, True, 0, high, key=nobody)
        while exact and high and not any(map(accepts, self.holders(blocks[high - 1], exact=True))):
            high -= 1
        if not high:
            return 0, []
        if exact or not texts:
            texts = [*filter(accepts, self.holders(blocks[high - 1], exact=exact))]
        if 4 * len(known) > 3 * self._most_blocks:
            self._touch(blocks[:high])
        return high, texts

    def held_by(self, replica: str, blocks: Sequence[int], *, exact: bool = False) -> int:
        source = self._sources.get(replica)
        if source is None or source.stale:
            return 0
        depth = _leading(blocks, len(blocks), self._blocks, 1 << source.bit)
        while exact and depth and not self._marks.get(blocks[depth - 1], 0) >> source.bit & 1:
            depth -= 1
        return depth

    def holders(self, block: int, *, exact: bool = False) -> tuple[str, ...]:
        return self._who((self._marks if exact else self._blocks).get(block, 0) & self._fresh)

    def view(self) -> Mapping[str, tuple[int, frozenset[int]]]:
        """Replica to (last report taken in, blocks), those that are stale left out; slow, to look at."""
        fresh = {name: source for name, source in self._sources.items() if not source.stale}
        return {
            name: (
                source.sequence,
                frozenset(b for b, bits in self._blocks.items() if bits >> source.bit & 1),
            )
            for name, source in fresh.items()
        }

    # Inside.

    def _enter(self, replica: str, cluster: str, epoch: int) -> _Source:
        source = self._sources[replica] = _Source(cluster, epoch, self._bits)
        self._names[self._bits] = replica
        self._clusters[cluster] = self._clusters.get(cluster, 0) | 1 << self._bits
        self._bits += 1
        return source

    def _replaced(self, event: CacheReported, old_source: _Source) -> _Source:
        """All anew under a new bit, which costs nothing for what was known before."""
        self.forget(event.replica)
        source = self._enter(event.replica, old_source.cluster, event.epoch)
        source.sequence = event.sequence
        source.late = {number: late for number, late in old_source.late.items() if number > event.sequence}
        self._take_in(source, event)
        return source

    def _catch_up(self, source: _Source) -> None:
        while event := source.late.pop(source.sequence + 1, None):
            self._take_in(source, event)
            source.sequence = event.sequence
        if source.stale:
            self._fresh &= ~(1 << source.bit)
        else:
            self._fresh |= 1 << source.bit

    def _take_in(self, source: _Source, changes: CacheReported) -> None:
        bit = 1 << source.bit
        _clear(self._marks, changes.unmarked, bit)
        _clear(self._blocks, changes.removed, bit)
        _clear(self._marks, changes.removed, bit)
        _set(self._blocks, changes.added, bit)
        _set(self._marks, changes.marked, bit)

    def _touch(self, names: Sequence[int]) -> None:
        for table in (self._blocks, self._marks):
            for name in reversed(names):
                bits = table.pop(name, 0)
                if bits:
                    table[name] = bits

    def _bound(self) -> None:
        if max(len(self._blocks), len(self._marks)) <= self._most_blocks:
            return
        if self._dead:
            self._sweep()
        for table in (self._blocks, self._marks):
            over = len(table) - self._most_blocks
            if over > 0:  # and some more, so that it is not done at every report
                for name in list(islice(table, over + self._most_blocks // 16)):
                    del table[name]

    def _sweep(self) -> None:
        """Take the bits out of use out of the blocks, and number the others anew."""
        order = sorted(self._names)
        alive = sum(1 << bit for bit in order)
        together = order == list(range(len(order)))
        for table in (self._blocks, self._marks):
            for name, bits in list(table.items()):
                kept = bits & alive
                if not kept:
                    del table[name]
                elif together:
                    table[name] = kept
                else:
                    table[name] = sum(1 << new for new, old in enumerate(order) if kept >> old & 1)
        numbers = {old: new for new, old in enumerate(order)}
        fresh = self._fresh
        self._names = {numbers[bit]: name for bit, name in self._names.items()}
        self._fresh = sum(1 << new for old, new in numbers.items() if fresh >> old & 1)
        for source in self._sources.values():
            source.bit = numbers[source.bit]
        for cluster, bits in self._clusters.items():
            self._clusters[cluster] = sum(1 << new for old, new in numbers.items() if bits >> old & 1)
        self._bits, self._dead = len(order), 0

    def _who(self, bits: int) -> tuple[str, ...]:
        texts = []
        while bits:
            low = bits & -bits
            texts.append(self._names[low.bit_length() - 1])
            bits ^= low
        return tuple(texts)


def _leading(blocks: Sequence[int], most: int, known: Mapping[int, int], bits: int) -> int:
    """How many of the first blocks somebody of `bits` holds."""
    low = 0
    while low < most:  # `bisect_left` with a key, written out: it would call back for each
        middle = (low + most) // 2
        if known.get(blocks[middle], 0) & bits:
            low = middle + 1
        else:
            most = middle
    return low


def _clear(table: dict[int, int], names: Iterable[int], bit: int) -> None:
    for name in names:
        bits = table.get(name, 0) & ~bit
        if bits:
            table[name] = bits
        else:
            table.pop(name, None)


def _set(table: dict[int, int], names: Sequence[int], bit: int) -> None:
    """Chains are reported from the front; from the back they become recent, so that ends are forgotten first."""
    for name in reversed(names):
        table[name] = table.pop(name, 0) | bit
