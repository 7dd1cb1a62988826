"""Which block of the cache holds which tokens of which sequence.

A running sequence has a row. Layers that must keep the same tokens form a group: all layers that see everything are
one, those with the same window another; linear layers need no blocks, their state lies at the row itself. For each
group a row has a table: entry i names the block with tokens 16 i to 16 i + 15. Block 0 belongs to nobody and holds
zeros; it stands wherever nothing is kept.

Where possible the blocks of a row follow each other: each row has a stretch of the group's blocks as its home and
takes others only when that is full. Blocks in a row can be read where they lie; scattered ones are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from potluck.core.errors import CapacityError, InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.numbers.exact import PART

SPARE_COLUMNS = PART // BLOCK_TOKENS
"""Tables are this much wider than the longest sequence, since attention rounds up."""


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Layers that keep the same tokens: all of them, or the last `window`; `blocks` is what they share."""

    window: int | None
    blocks: int


class BlockTables:
    def __init__(self, groups: tuple[WindowGroup, ...], rows: int, max_tokens: int) -> None:
        for group in groups:
            if group.blocks < 1 or rows < 1:
                raise InputError(
                    "cache", f"{rows} rows and {group.blocks} blocks are too few to run anything"
                )
        self.groups = groups
        self.rows = rows
        self.max_tokens = max_tokens
        self.lengths = [0] * rows
        """Tokens whose cache entries a row has."""
        self._free_rows = list(range(rows))
        self._pools = [_Pool(group, rows, max_tokens) for group in groups]

    def open(self) -> int:
        if not self._free_rows:
            raise CapacityError(f"all {self.rows} rows are taken")
        row = heappop(self._free_rows)
        self.lengths[row] = 0
        return row

    def close(self, row: int) -> None:
        for pool in self._pools:
            pool.release(row)
        self.lengths[row] = 0
        heappush(self._free_rows, row)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def free_blocks(self, group: int = 0) -> int:
        return self._pools[group].free

    def can_grow(self, row: int, tokens: int, since: int = 0) -> bool:
        return tokens <= self.max_tokens and all(
            pool.missing(row, tokens, since) <= pool.free for pool in self._pools
        )

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        """Give a row room for `tokens`; windows need none for what no query from `since` on can see."""
        for pool in self._pools:
            if tokens > pool.stop[row] * BLOCK_TOKENS:
                break
        else:  # as nearly always, and many times for each step
            return
        if not self.can_grow(row, tokens, since):
            raise CapacityError(f"no room for {tokens} tokens; ask can_grow first")
        for pool in self._pools:
            pool.grow(row, tokens, since)

    def advance(self, row: int, length: int) -> None:
        """A row holds `length` tokens, or will when the step that is under way has passed all layers."""
        self.lengths[row] = length

    def trim(self, row: int) -> None:
        """Windows drop what no later query can see."""
        for pool in self._pools:
            if pool.window is not None:
                pool.trim(row, self.lengths[row])

    def table(self, group: int) -> np.ndarray:
        """[rows, blocks of the longest sequence and some]; read only."""
        return self._pools[group].table

    def whole(self, group: int, row: int) -> bool:
        """Whether the row's blocks follow each other, from its first token on."""
        pool = self._pools[group]
        return pool.window is None and pool.unbroken[row] == pool.stop[row]

    def room(self, group: int, row: int) -> int:
        return self._pools[group].stop[row] * BLOCK_TOKENS

    def check(self) -> None:
        """Every block is free or in exactly one table, and every idle row is empty."""
        for pool in self._pools:
            pool.check()
        for row in self._free_rows:
            if any(pool.stop[row] for pool in self._pools) or self.lengths[row]:
                raise AssertionError(f"row {row} is idle and not empty")


class _Pool:
    def __init__(self, group: WindowGroup, rows: int, max_tokens: int) -> None:
        width = -(-max_tokens // BLOCK_TOKENS) + SPARE_COLUMNS
        self.window = group.window
        self.table = np.zeros((rows, width), dtype=np.int64)
        self.start = [0] * rows
        """First block that a row still has (windows drop the ones before it)."""
        self.stop = [0] * rows
        self.unbroken = [0] * rows
        self.free = self.total = group.blocks
        self._home = group.blocks // rows if group.window is None else 0
        self._taken = bytearray(group.blocks + 1)
        self._heap = [-block for block in range(1, group.blocks + 1)]
        heapify(self._heap)
        self._in_heap = bytearray(b"\1" * (group.blocks + 1))

    def first_needed(self, since: int) -> int:
        """The first block that a query at `since` or later can see."""
        return 0 if self.window is None else max(0, since - self.window + 1) // BLOCK_TOKENS

    def missing(self, row: int, tokens: int, since: int) -> int:
        return max(0, -(-tokens // BLOCK_TOKENS) - max(self.stop[row], self.first_needed(since)))

    def grow(self, row: int, tokens: int, since: int) -> None:
        stop = -(-tokens // BLOCK_TOKENS)
        if stop <= self.stop[row]:
            return
        begin = max(self.stop[row], min(self.first_needed(since), stop))
        if self.stop[row] == 0:
            self.start[row] = begin
        for index in range(begin, stop):  # what is skipped, no query will see
            block = self._take(row, index)
            if self.unbroken[row] == index and (index == 0 or block == self.table[row, index - 1] + 1):
                self.unbroken[row] = index + 1
            self.table[row, index] = block
        self.stop[row] = stop

    def _take(self, row: int, index: int) -> int:
        home = 1 + row * self._home + index
        if index >= self._home or self._taken[home]:
            home = 0
        while not home:  # the highest free block: the rows that use it as their home open last
            block = -heappop(self._heap)
            self._in_heap[block] = 0
            home = 0 if self._taken[block] else block
        self._taken[home] = 1
        self.free -= 1
        return home

    def _give(self, block: int) -> None:
        if not block:  # a place that was skipped
            return
        self._taken[block] = 0
        self.free += 1
        if not self._in_heap[block]:
            self._in_heap[block] = 1
            heappush(self._heap, -block)

    def trim(self, row: int, length: int) -> None:
        first = min(self.first_needed(length), self.stop[row])
        for index in range(self.start[row], first):
            self._give(int(self.table[row, index]))
            self.table[row, index] = 0
        self.start[row] = max(first, self.start[row])

    def release(self, row: int) -> None:
        for index in range(self.start[row], self.stop[row]):
            self._give(int(self.table[row, index]))
        self.table[row, : self.stop[row]] = 0
        self.start[row] = self.stop[row] = self.unbroken[row] = 0

    def check(self) -> None:
        held = [int(block) for block in self.table.ravel() if block]
        if len(held) != len(set(held)) or len(held) + self.free != self.total:
            raise AssertionError(f"{len(held)} blocks held and {self.free} free of {self.total}")
        if any(not self._taken[block] for block in held) or sum(self._taken) != len(held):
            raise AssertionError("a block is held and free at once, or neither")
