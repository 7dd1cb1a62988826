"""Index of the prefix blocks that replicas hold, over all clusters, built from their cache reports.

Reports are numbered. A report that arrives early waits for the missing ones; until then the replica is *stale*: it is
left out of answers, and `apply` returns that a snapshot is needed. A block's holders are the bits of one integer.
Block names are chained hashes, so the longest match is found by bisection. Blocks that were neither reported nor
matched for the longest time are evicted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from potluck.core.errors import InputError
from potluck.core.replica.blocks import CacheChanges
from potluck.core.state.events import CacheReported

MAX_BLOCKS: Final = 1_000_000
MAX_PENDING_REPORTS: Final = 64  # Reports of one replica that may wait for an earlier one.
SWEEP_UNUSED_BITS: Final = 32  # Unused bits after which all bits are renumbered.


Accepts = Callable[[str], bool]


class CacheAnnouncer:
    def __init__(self, replica: str, epoch: int) -> None:
        self._replica, self._epoch = replica, epoch
        self.sequence = 0

    def report(self, changes: CacheChanges) -> CacheReported:
        self.sequence += 1
        return self._report_of(changes, False)

    def snapshot(self, cache_changes: CacheChanges) -> CacheReported:
        return self._report_of(cache_changes, True)

    def _report_of(self, changes: CacheChanges, whole: bool) -> CacheReported:
        kinds = (changes.added, changes.removed, changes.marked, changes.unmarked)
        return CacheReported(self._replica, self.sequence, *kinds, self._epoch, whole)


class PrefixMatch(NamedTuple):
    blocks: int
    replicas: tuple[str, ...]


@dataclass(slots=True)
class _ReplicaSource:
    cluster: str
    epoch: int
    bit: int
    sequence: int = 0
    pending: dict[int, CacheReported] = field(default_factory=dict)

    @property
    def stale(self) -> bool:
        return bool(self.pending)


class PrefixIndex:
    """Changed by `apply` and `forget`, and by evictions at its size limit."""

    def __init__(self, most_blocks: int = MAX_BLOCKS, most_late: int = MAX_PENDING_REPORTS) -> None:
        if most_blocks < 1 or most_late < 1:
            raise InputError("prefix index", "needs room for a block and for a late report")
        self._max_blocks, self._max_pending = most_blocks, most_late
        self._blocks: dict[int, int] = {}
        """Block -> holders, least recently reported or matched first; a block comes after those that build on it."""
        self._checkpoints: dict[int, int] = {}
        """The same for checkpoints: blocks at whose end window or linear layers can be resumed."""
        self._sources: dict[str, _ReplicaSource] = {}
        self._replicas: dict[int, str] = {}
        self._clusters: dict[str, int] = {}
        self._fresh_bits = 0
        self._next_bit = 0
        self._unused_bits = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def stale(self, replica: str) -> bool:
        source = self._sources.get(replica)
        return source is not None and source.stale

    def apply(self, event: CacheReported, cluster: str) -> bool:
        """Apply a cache report of a replica in that cluster; returns whether a snapshot is needed from it."""
        source = self._sources.get(event.replica)
        if source is not None and event.epoch < source.epoch:
            return source.stale
        if source is None or event.epoch > source.epoch:
            self.forget(event.replica)
            source = self._register(event.replica, cluster, event.epoch)
        if event.whole:
            if event.sequence < source.sequence:
                return source.stale
            source = self._replace_all(event, source)
        elif event.sequence > source.sequence:
            source.pending[event.sequence] = event
            # Only a snapshot can help now; drop the oldest report.
            if len(source.pending) > self._max_pending:
                del source.pending[min(source.pending)]
        self._apply_pending(source)
        self._evict_excess()
        return source.stale

    def forget(self, replica: str) -> None:
        source = self._sources.pop(replica, None)
        if source is None:
            return
        bit = 1 << source.bit
        self._fresh_bits &= ~bit
        del self._replicas[source.bit]
        left = self._clusters[source.cluster] & ~bit
        if left:
            self._clusters[source.cluster] = left
        else:
            del self._clusters[source.cluster]
        self._unused_bits += 1
        if self._unused_bits >= SWEEP_UNUSED_BITS:
            self._compact_bits()

    def longest(self, blocks: Sequence[int], *, exact: bool = False) -> dict[str, PrefixMatch]:
        """Per cluster, the longest matching prefix; `exact`: only up to a checkpoint."""
        blocks_held, fresh_bits = self._blocks, self._fresh_bits
        depth_limit = _matching_blocks(blocks, len(blocks), blocks_held, fresh_bits)
        if not depth_limit:
            return {}
        prefix_matches = {}
        for cluster, bits in self._clusters.items():
            bits &= fresh_bits
            depth = depth_limit
            if not blocks_held[blocks[depth_limit - 1]] & bits:
                depth = _matching_blocks(blocks, depth_limit, blocks_held, bits)
            while exact and depth and not self._checkpoints.get(blocks[depth - 1], 0) & bits:
                depth -= 1
            if depth:
                holders = (self._checkpoints if exact else blocks_held)[blocks[depth - 1]] & bits
                prefix_matches[cluster] = PrefixMatch(depth, self._replicas_of(holders))
        if 4 * len(blocks_held) > 3 * self._max_blocks:
            self._mark_recent(blocks[:depth_limit])
        return prefix_matches

    def deepest(
        self, blocks: Sequence[int], accepts: Accepts, *, exact: bool = False
    ) -> tuple[int, list[str]]:
        """(matching blocks, replicas) of the longest prefix that an accepted replica can resume from."""
        blocks_held, fresh_bits = self._blocks, self._fresh_bits
        depth = _matching_blocks(blocks, len(blocks), blocks_held, fresh_bits)
        if not depth:
            return 0, []
        replicas = [*filter(accepts, self._replicas_of(blocks_held[blocks[depth - 1]] & fresh_bits))]
        if not replicas:

            def no_accepted_holder(name: int) -> bool:
                return not any(map(accepts, self._replicas_of(blocks_held.get(name, 0) & fresh_bits)))

            depth = bisect_left(blocks, True, 0, depth, key=no_accepted_holder)
        while exact and depth and not any(map(accepts, self.holders(blocks[depth - 1], exact=True))):
            depth -= 1
        if not depth:
            return 0, []
        if exact or not replicas:
            replicas = [*filter(accepts, self.holders(blocks[depth - 1], exact=exact))]
        if 4 * len(blocks_held) > 3 * self._max_blocks:
            self._mark_recent(blocks[:depth])
        return depth, replicas

    def held_by(self, replica: str, blocks: Sequence[int], *, exact: bool = False) -> int:
        source = self._sources.get(replica)
        if source is None or source.stale:
            return 0
        depth = _matching_blocks(blocks, len(blocks), self._blocks, 1 << source.bit)
        while exact and depth and not self._checkpoints.get(blocks[depth - 1], 0) >> source.bit & 1:
            depth -= 1
        return depth

    def holders(self, block: int, *, exact: bool = False) -> tuple[str, ...]:
        return self._replicas_of(
            (self._checkpoints if exact else self._blocks).get(block, 0) & self._fresh_bits
        )

    def blocks_by_replica(self) -> Mapping[str, tuple[int, frozenset[int]]]:
        """Replica -> (last applied report, blocks), stale replicas left out; slow, for inspection."""
        fresh = {name: source for name, source in self._sources.items() if not source.stale}
        return {
            name: (
                source.sequence,
                frozenset(b for b, bits in self._blocks.items() if bits >> source.bit & 1),
            )
            for name, source in fresh.items()
        }

    # Inside.

    def _register(self, replica: str, cluster: str, epoch: int) -> _ReplicaSource:
        source = self._sources[replica] = _ReplicaSource(cluster, epoch, self._next_bit)
        self._replicas[self._next_bit] = replica
        self._clusters[cluster] = self._clusters.get(cluster, 0) | 1 << self._next_bit
        self._next_bit += 1
        return source

    def _replace_all(self, event: CacheReported, old_source: _ReplicaSource) -> _ReplicaSource:
        """Replace all that is known of a replica, under a new bit, so that no old block has to be visited."""
        self.forget(event.replica)
        source = self._register(event.replica, old_source.cluster, event.epoch)
        source.sequence = event.sequence
        source.pending = {
            number: pending for number, pending in old_source.pending.items() if number > event.sequence
        }
        self._apply_changes(source, event)
        return source

    def _apply_pending(self, source: _ReplicaSource) -> None:
        while event := source.pending.pop(source.sequence + 1, None):
            self._apply_changes(source, event)
            source.sequence = event.sequence
        if source.stale:
            self._fresh_bits &= ~(1 << source.bit)
        else:
            self._fresh_bits |= 1 << source.bit

    def _apply_changes(self, source: _ReplicaSource, changes: CacheReported) -> None:
        bit = 1 << source.bit
        _clear_bit(self._checkpoints, changes.unmarked, bit)
        _clear_bit(self._blocks, changes.removed, bit)
        _clear_bit(self._checkpoints, changes.removed, bit)
        _set_bit(self._blocks, changes.added, bit)
        _set_bit(self._checkpoints, changes.marked, bit)

    def _mark_recent(self, names: Sequence[int]) -> None:
        for table in (self._blocks, self._checkpoints):
            for name in reversed(names):
                bits = table.pop(name, 0)
                if bits:
                    table[name] = bits

    def _evict_excess(self) -> None:
        if max(len(self._blocks), len(self._checkpoints)) <= self._max_blocks:
            return
        if self._unused_bits:
            self._compact_bits()
        for table in (self._blocks, self._checkpoints):
            excess = len(table) - self._max_blocks
            if excess > 0:  # Evict a sixteenth more, so that not every report evicts.
                for name in list(islice(table, excess + self._max_blocks // 16)):
                    del table[name]

    def _compact_bits(self) -> None:
        """Remove unused bits from all blocks, and renumber the others."""
        used_bits = sorted(self._replicas)
        used_mask = sum(1 << bit for bit in used_bits)
        contiguous = used_bits == list(range(len(used_bits)))
        for table in (self._blocks, self._checkpoints):
            for name, bits in list(table.items()):
                remaining_bits = bits & used_mask
                if not remaining_bits:
                    del table[name]
                elif contiguous:
                    table[name] = remaining_bits
                else:
                    table[name] = sum(
                        1 << new for new, old in enumerate(used_bits) if remaining_bits >> old & 1
                    )
        new_numbers = {old: new for new, old in enumerate(used_bits)}
        fresh_bits = self._fresh_bits
        self._replicas = {new_numbers[bit]: name for bit, name in self._replicas.items()}
        self._fresh_bits = sum(1 << new for old, new in new_numbers.items() if fresh_bits >> old & 1)
        for source in self._sources.values():
            source.bit = new_numbers[source.bit]
        for cluster, bits in self._clusters.items():
            self._clusters[cluster] = sum(1 << new for old, new in new_numbers.items() if bits >> old & 1)
        self._next_bit, self._unused_bits = len(used_bits), 0

    def _replicas_of(self, bits: int) -> tuple[str, ...]:
        replicas = []
        while bits:
            lowest_bit = bits & -bits
            replicas.append(self._replicas[lowest_bit.bit_length() - 1])
            bits ^= lowest_bit
        return tuple(replicas)


def _matching_blocks(blocks: Sequence[int], high: int, holders: Mapping[int, int], bits: int) -> int:
    """The number of leading blocks that a replica in `bits` holds."""
    low = 0
    while low < high:  # Bisection by hand: `bisect_left` with a key calls back for each step.
        middle = (low + high) // 2
        if holders.get(blocks[middle], 0) & bits:
            low = middle + 1
        else:
            high = middle
    return low


def _clear_bit(table: dict[int, int], names: Iterable[int], bit: int) -> None:
    for name in names:
        bits = table.get(name, 0) & ~bit
        if bits:
            table[name] = bits
        else:
            table.pop(name, None)


def _set_bit(table: dict[int, int], names: Sequence[int], bit: int) -> None:
    """Set a bit, from the end of the chain, so that ends are less recent and evicted first."""
    for name in reversed(names):
        table[name] = table.pop(name, 0) | bit
