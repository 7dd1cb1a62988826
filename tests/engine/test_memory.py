"""Rows and blocks: none is lost, none is given twice, windows keep what they need and no more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from engine_models import KINDS, logits_of, open_row, prompt, runner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from potluck.core.errors import CapacityError, InputError
from potluck.engine.compute.handover import pack
from potluck.engine.compute.runner import Runner
from potluck.engine.memory.block_tables import BlockTables, WindowGroup
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.kv.chunks import KvChunk
from potluck.kv.disk_tier import DiskTier

ROWS, BLOCKS, WINDOW, WINDOW_BLOCKS, MOST = 5, 40, 37, 22, 400


class Sequences(RuleBasedStateMachine):
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
def test_all_blocks_of_a_table_can_be_used(rows: int, blocks: int) -> None:
    tables = BlockTables((WindowGroup(None, blocks),), rows, blocks * 16)
    row = [tables.open() for _ in range(rows)][-1]
    tables.grow(row, blocks * 16)
    assert tables.free_blocks() == 0
    assert not tables.can_grow(row, blocks * 16 + 1)
    tables.close(row)
    assert tables.free_blocks() == blocks


def test_rows_with_space_in_place_stay_contiguous() -> None:
    tables = BlockTables((WindowGroup(None, 64),), 4, 1024)
    rows = [tables.open() for _ in range(4)]
    for length in range(1, 257):
        for row in rows:
            tables.grow(row, length)
    assert all(tables.whole(0, row) for row in rows)
    starts = [int(tables.table(0)[row, 0]) for row in rows]
    assert len({two - one for one, two in pairwise(starts)}) == 1


def test_corrupted_block_table_is_detected() -> None:
    tables = BlockTables((WindowGroup(None, 8),), 2, 64)
    tables.grow(tables.open(), 40)
    tables.check()
    table = tables.table(0)
    table[0, 1] = table[0, 0]
    with pytest.raises(AssertionError):
        tables.check()
    with pytest.raises(InputError):
        BlockTables((WindowGroup(None, 0),), 2, 64)


def computed_row(engine: Runner, tokens: list[int]) -> int:
    row = open_row(engine, len(tokens))
    logits_of(engine, row, tokens, [len(tokens)])
    return row


def keep(cache: PrefixCache, engine: Runner, row: int, tokens: list[int]) -> None:
    cache.keep(tokens, len(tokens), lambda layer, start, stop: pack(engine, row, layer, start, stop))


def assert_equal_chunks(kv_chunks: list[KvChunk], engine: Runner, row: int, stop: int) -> None:
    layers = range(engine.config.model.layer_count)
    expected = {(p.layer, p.part): p for layer in layers for p in pack(engine, row, layer, 0, stop)}
    assert {(chunk.layer, chunk.part) for chunk in kv_chunks} == set(expected)
    for chunk in kv_chunks:
        wanted = expected[chunk.layer, chunk.part]
        assert (chunk.first, chunk.stop, chunk.dtype, chunk.shape) == (
            wanted.first,
            wanted.stop,
            wanted.dtype,
            wanted.shape,
        )
        assert bytes(chunk.data) == bytes(wanted.data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 32, 75])
def test_kept_prefix_is_found_with_its_contents(kind: str, length: int) -> None:
    engine, tokens = runner(KINDS[kind], rows=2, blocks=40), prompt(length)
    row = computed_row(engine, tokens)
    cache = PrefixCache(KINDS[kind], 10_000_000, "salt")
    keep(cache, engine, row, tokens)
    cache.verify()
    held, chunks = cache.find([*tokens, 1], length)
    assert held == (length if cache.exact else length // 16 * 16)
    if held == length:
        assert_equal_chunks(chunks, engine, row, held)
    assert cache.find(tokens[: length - 1], length - 1)[0] == (0 if cache.exact else (length - 1) // 16 * 16)
    assert PrefixCache(KINDS[kind], 10_000_000, "salt").find(tokens, length) == (0, [])
    assert cache._pool is None or cache.exact == KINDS[kind].model.exact_prefix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 40])
def test_prefixes_are_shared_only_under_one_salt(kind: str, length: int, tmp_path: Path) -> None:
    engine, tokens = runner(KINDS[kind], rows=2, blocks=40), prompt(length)
    row = computed_row(engine, tokens)
    disk = DiskTier(tmp_path, 10_000_000)
    cache = PrefixCache(KINDS[kind], 10_000_000, "model", disk)

    def read(layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        return pack(engine, row, layer, start, stop)

    cache.keep(tokens, length, read, "acme")
    cache.flush()
    held = length if cache.exact else length // 16 * 16
    # From memory, and from disk after a restart.
    for one in (cache, PrefixCache(KINDS[kind], 10_000_000, "model", DiskTier(tmp_path, 10_000_000))):
        if one is not cache:
            one.keep(prompt(length, 9), length, read)
        assert one.find([*tokens, 1], length)[0] == 0
        assert one.find([*tokens, 1], length, "other")[0] == 0
        assert one.find([*tokens, 1], length, "acme")[0] == held
        one.verify()


@pytest.mark.parametrize("kind", ["full", "hybrid", "linear"])
def test_prefixes_on_disk_are_found_after_a_restart(kind: str, tmp_path: Path) -> None:
    engine = runner(KINDS[kind], rows=3, blocks=80)
    one, two = prompt(64, 1), prompt(64, 2)
    rows = [computed_row(engine, one), computed_row(engine, two)]
    sizes = PrefixCache(KINDS[kind], 10_000_000)
    keep(sizes, engine, rows[0], one)
    room = int(sizes.used_bytes * 1.2)  # for one of them
    cache = PrefixCache(KINDS[kind], room, "s", DiskTier(tmp_path, 10_000_000))
    keep(cache, engine, rows[0], one)
    keep(cache, engine, rows[1], two)
    cache.flush()
    again = PrefixCache(KINDS[kind], room, "s", DiskTier(tmp_path, 10_000_000))
    keep(again, engine, rows[1], two)
    held, chunks = again.find([*one, 5], 64)
    assert held == 64
    assert_equal_chunks(chunks, engine, rows[0], 64)
    again.verify()
