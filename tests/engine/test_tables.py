"""Rows and blocks: none is lost, none is given twice, windows keep what they need and no more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from potluck.core.errors import CapacityError, InputError
from potluck.engine.memory.block_tables import BlockTables, WindowGroup

ROWS, BLOCKS, WINDOW, WINDOW_BLOCKS, MOST = 5, 40, 37, 22, 400


class Sequences(RuleBasedStateMachine):
    """Sequences that open, grow, advance and close in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables((WindowGroup(None, BLOCKS), WindowGroup(WINDOW, WINDOW_BLOCKS)), ROWS, MOST)
        self.rooms: dict[int, int] = {}

    @precondition(lambda self: len(self.rooms) < ROWS)
    @rule()
    def open(self) -> None:
        row = self.tables.open()
        assert row not in self.rooms
        assert row == min(set(range(ROWS)) - set(self.rooms))
        self.rooms[row] = 0

    @precondition(lambda self: len(self.rooms) == ROWS)
    @rule()
    def open_too_many(self) -> None:
        with pytest.raises(CapacityError):
            self.tables.open()

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), more=st.integers(1, 80), arrives=st.booleans())
    def grow(self, data: st.DataObject, more: int, arrives: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rooms)))
        tokens = self.tables.lengths[row] + more
        since = tokens if arrives else self.tables.lengths[row]
        before = [self.tables.free_blocks(group) for group in (0, 1)]
        if not self.tables.can_grow(row, tokens, since):
            with pytest.raises(CapacityError):
                self.tables.grow(row, tokens, since)
            assert before == [self.tables.free_blocks(group) for group in (0, 1)]
            return
        self.tables.grow(row, tokens, since)
        self.rooms[row] = max(self.rooms[row], tokens)
        assert self.tables.room(0, row) >= tokens
        assert self.tables.room(1, row) >= tokens
        if arrives:
            self.advance_to(row, tokens)

    @precondition(lambda self: any(self.rooms.values()))
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(row for row, room in self.rooms.items() if room)))
        self.advance_to(row, data.draw(st.integers(self.tables.lengths[row], self.rooms[row])))

    def advance_to(self, row: int, length: int) -> None:
        self.tables.advance(row, length)
        self.tables.trim(row)
        seen = range(max(0, length - WINDOW + 1) // 16, -(-length // 16))
        assert self.tables.table(1)[row, list(seen)].all()
        assert not self.tables.table(1)[row, : seen.start].any()

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rooms)))
        self.tables.close(row)
        del self.rooms[row]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tables.check()
        for row in self.rooms:
            blocks = self.tables.table(0)[row, : self.tables.room(0, row) // 16].tolist()
            assert all(blocks)
            in_a_row = all(two == one + 1 for one, two in pairwise(blocks))
            assert self.tables.whole(0, row) == in_a_row


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=25)


@given(st.integers(1, 8), st.integers(1, 60))
def test_all_blocks_can_be_used(rows: int, blocks: int) -> None:
    tables = BlockTables((WindowGroup(None, blocks),), rows, blocks * 16)
    row = [tables.open() for _ in range(rows)][-1]
    tables.grow(row, blocks * 16)
    assert tables.free_blocks() == 0
    assert not tables.can_grow(row, blocks * 16 + 1)
    tables.close(row)
    assert tables.free_blocks() == blocks


def test_rows_with_room_at_home_lie_in_place() -> None:
    tables = BlockTables((WindowGroup(None, 64),), 4, 1024)
    rows = [tables.open() for _ in range(4)]
    for length in range(1, 257):
        for row in rows:
            tables.grow(row, length)
    assert all(tables.whole(0, row) for row in rows)
    starts = [int(tables.table(0)[row, 0]) for row in rows]
    assert len({two - one for one, two in pairwise(starts)}) == 1


def test_a_broken_table_is_noticed() -> None:
    tables = BlockTables((WindowGroup(None, 8),), 2, 64)
    tables.grow(tables.open(), 40)
    tables.check()
    table = tables.table(0)
    table[0, 1] = table[0, 0]
    with pytest.raises(AssertionError):
        tables.check()
    with pytest.raises(InputError):
        BlockTables((WindowGroup(None, 0),), 2, 64)
