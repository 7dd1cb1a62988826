"""The block pool equals a plain pool ordered by recency."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from potluck.core.errors import InputError
from potluck.core.replica import blocks
from potluck.core.replica.blocks import BlockNamer, BlockPlacement, BlockPool, Checkpoint, Name, block_hashes

SIZE = 4
PROMPTS = st.builds(
    lambda blocks, rest: [token for block in blocks for token in [block] * SIZE] + rest,
    st.lists(st.integers(0, 1), max_size=6),
    st.lists(st.integers(0, 1), max_size=SIZE - 1),
)
"""Prompts that have much in common: of each block there are two."""


def hashes(tokens: list[int]) -> tuple[int, ...]:
    return block_hashes(tokens, "m", SIZE)


@given(PROMPTS, PROMPTS)
def test_block_hashes_are_equal_exactly_for_equal_token_prefixes(one: list[int], two: list[int]) -> None:
    a, b = hashes(one), hashes(two)
    for place in range(min(len(a), len(b))):
        stop = (place + 1) * SIZE
        assert (a[place] == b[place]) == (one[:stop] == two[:stop])
    assert len(a) == len(one) // SIZE
    assert not set(a) & set(block_hashes(one, "another", SIZE))
    salted = block_hashes(one, "m", SIZE, salt="s")
    assert not set(salted) & {*a, *block_hashes(one, "m", SIZE, salt="t"), *block_hashes(one, "ms", SIZE)}
    assert salted == block_hashes(one, "m", SIZE, salt="s")


def test_block_hashes_have_the_values_stored_in_cache_files() -> None:
    """A change of names makes every cache on disk useless, and engines of two releases strangers."""
    assert [f"{name:032x}" for name in block_hashes(range(33), "m")] == [
        "0a8a44bb734b2eeaac6b6d72ad432c7b",
        "4401f09e615480673f45b5dd38940774",
    ]
    assert [f"{name:032x}" for name in block_hashes(range(33), "m", salt="tenant é")] == [
        "33db89c51ece1729d2bb65f5e04a6cd2",
        "da241d405b8add53de93e3d6bf021309",
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.sampled_from(["", "s", "t"])), max_size=12)
)
def test_block_namer_returns_the_block_hashes(asks: list[tuple[int, int, str]]) -> None:
    """Prompts that share beginnings of different lengths, in few runs, so that some are forgotten."""
    book = BlockNamer(2, block_tokens=1)
    for length, turn, salt in asks:
        tokens = [0] * (length * turn // 3) + [turn] * (length - length * turn // 3)
        assert book.names(tokens, "m", salt) == block_hashes(tokens, "m", 1, salt=salt)
    assert len(book._known) <= 2


def test_block_namer_hashes_only_tokens_it_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    book, tokens = BlockNamer(), list(range(1000))
    names = book.names(tokens, "m")
    seen: list[int] = []
    chain = blocks._chain
    monkeypatch.setattr(blocks, "_chain", lambda *of: (seen.append(len(of[1])), chain(*of))[1])
    assert book.names(tokens, "m") == names == block_hashes(tokens, "m")
    assert seen == [14 * 16 * 8, 62 * 16 * 8], "only what is behind the last whole run is hashed again"
    assert book.names([*tokens[:600], 5], "m") == names[:37]


def test_salt_with_the_bytes_of_a_block_gives_other_hashes() -> None:
    tokens = [97 + 256 * place for place in range(SIZE)] + [1] * SIZE
    salt = b"".join(token.to_bytes(8, "little") for token in tokens[:SIZE]).decode()
    assert not set(block_hashes(tokens, "m", SIZE)) & set(block_hashes(tokens[SIZE:], "m", SIZE, salt=salt))


def test_checkpoints_without_blocks_belong_to_their_root() -> None:
    pool = BlockPool(8, exact=True, block_tokens=SIZE)
    assert pool.keep_checkpoint((), (1, 2), 1, root=7)[0] is not None
    assert pool.longest([1, 2, 3], (), 3, root=7).tokens == 2
    assert pool.longest([1, 2, 3], (), 3).tokens == 0
    assert pool.longest([1, 2, 3], (), 3, root=8).tokens == 0
    assert pool.keep_checkpoint((), (1, 2), 1)[0] is not None
    assert pool.longest([1, 2, 3], (), 3).tokens == 2
    pool.check()


def test_token_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InputError, match="tokens: must be whole numbers"):
        block_hashes([1 << 63] * SIZE, "m", SIZE)


class PlainPool:
    """What the pool should do: entries by recency, most recent first; every use touches a whole chain."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.entries: list[Name] = []
        self.before: dict[Name, Name | None] = {}
        self.sizes: dict[Name, int] = {}

    @property
    def free(self) -> int:
        used = sum(self.sizes[name] for name in self.entries)
        return self.blocks - used

    def use(self, chain: list[Name]) -> None:
        self.entries = [*chain, *(name for name in self.entries if name not in chain)]

    def evict(self, blocks: int, guard: Name | None) -> list[Name]:
        gone: list[Name] = []
        while self.free < blocks:
            inner = {self.before[name] for name in self.entries}
            able = [n for n in self.entries if n not in inner and n != guard]
            if not able:
                break
            gone.append(able[-1])
            self.entries.remove(able[-1])
        return gone

    def lose(self, name: Name) -> set[Name]:
        lost = {name}
        while more := {n for n in self.entries if self.before[n] in lost} - lost:
            lost |= more
        self.entries = [n for n in self.entries if n not in lost]
        return lost


class PoolMachine(RuleBasedStateMachine):
    """Both pools live through the same; `exact` and the size come from the subclasses."""

    exact = False
    size = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.size, exact=self.exact, block_tokens=SIZE)
        self.plain = PlainPool(self.size)
        self.heard: set[int] = set()
        self.marked: set[int] = set()
        self.places: dict[Name, tuple[int, ...]] = {}

    def held(self, names: tuple[int, ...]) -> int:
        count = 0
        while count < len(names) and names[count] in self.plain.entries:
            count += 1
        return count

    def went(self, gone: list[BlockPlacement], expected: Any) -> None:
        assert [one.name for one in gone] == list(expected)
        for one in gone:
            assert self.places.pop(one.name) == one.places

    @rule(tokens=PROMPTS, less=st.integers(0, 5))
    def look(self, tokens: list[int], less: int) -> None:
        names, most = hashes(tokens), len(tokens) - less
        result = self.pool.longest(tokens, names, most)
        depth = self.held(names)
        if not self.exact:
            blocks = min(depth, max(most, 0) // SIZE)
            assert (result.tokens, result.blocks) == (blocks * SIZE, blocks)
            self.plain.use(list(names[:blocks]))
            return
        lengths = (
            [
                length
                for length in range(max(most, -1) + 1)
                for whole in range(length // SIZE + 1)
                if whole <= depth
                and Checkpoint(names[whole - 1] if whole else 0, tuple(tokens[whole * SIZE : length]))
                in self.plain.entries
            ]
            if most > 0
            else []
        )
        assert result.tokens == max(lengths, default=0)
        if most > 0:
            assert result.shared_blocks == depth
        if result.checkpoint is not None:
            after = names[result.blocks - 1] if result.blocks else 0
            assert result.checkpoint == Checkpoint(after, tuple(tokens[result.blocks * SIZE : result.tokens]))
            self.plain.use([*names[: result.blocks], result.checkpoint])

    @rule(tokens=PROMPTS)
    def keep(self, tokens: list[int]) -> None:
        names = hashes(tokens)
        depth = self.held(names)
        self.plain.use(list(names[:depth]))
        gone = self.plain.evict(len(names) - depth, names[depth - 1] if depth else None)
        fitting = names[: depth + self.plain.free]
        new, went = self.pool.keep(names)
        self.went(went, gone)
        assert [one.name for one in new] == list(fitting[depth:])
        self.places.update({one.name: one.places for one in new})
        for place, name in enumerate(fitting):
            self.plain.before[name] = fitting[place - 1] if place else None
            self.plain.sizes[name] = 1
        self.plain.use(list(fitting))

    @precondition(lambda self: self.exact)
    @rule(tokens=PROMPTS, blocks=st.integers(1, 3), split=st.booleans())
    def keep_checkpoint(self, tokens: list[int], blocks: int, split: bool) -> None:
        names = hashes(tokens)
        rest = tokens[len(names) * SIZE :] if split else []
        name = Checkpoint(names[-1] if names else 0, tuple(rest))
        placed, gone = self.pool.keep_checkpoint(names, rest, blocks)
        if self.held(names) < len(names) or len(names) + blocks > self.size:
            assert (placed, gone) == (None, [])
            return
        if name in self.plain.entries:
            assert (placed, gone) == (None, [])
            self.plain.use([*names, name])
            return
        expected = self.plain.evict(blocks, names[-1] if names else None)
        self.went(gone, expected)
        if self.plain.free < blocks:
            assert placed is None
            return
        assert placed is not None
        assert placed.name == name
        assert len(placed.places) == blocks
        self.places[name] = placed.places
        self.plain.before[name], self.plain.sizes[name] = (names[-1] if names else None), blocks
        self.plain.use([*names, name])

    @precondition(lambda self: self.plain.entries)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.plain.entries))
        gone = self.pool.drop(name)
        assert {one.name for one in gone} == self.plain.lose(name)
        for one in gone:
            del self.places[one.name]

    @rule(whole=st.booleans())
    def hear(self, whole: bool) -> None:
        """The world keeps up, by changes or by a snapshot."""
        if whole:
            result = self.pool.everything()
            self.heard, self.marked = set(), set()
            assert not self.pool.changes()
        else:
            result = self.pool.changes()
            assert not set(result.added) & self.heard
            assert set(result.removed) <= self.heard
        self.heard = (self.heard | set(result.added)) - set(result.removed)
        self.marked = (self.marked | set(result.marked)) - set(result.unmarked)
        assert self.heard == {name for name in self.plain.entries if isinstance(name, int)}
        assert self.marked == {
            n.after for n in self.plain.entries if isinstance(n, Checkpoint) and n.after and not n.rest
        }

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert set(self.pool.names()) == set(self.plain.entries)
        assert self.pool.free_blocks == self.plain.free >= 0
        assert all(self.pool.places(name) == places for name, places in self.places.items())


class ExactMachine(PoolMachine):
    exact = True
    size = 9


COURSE = settings(max_examples=25, stateful_step_count=50, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = COURSE
TestExactPool = ExactMachine.TestCase
TestExactPool.settings = COURSE


def test_hybrid_model_resumes_only_at_checkpointed_lengths() -> None:
    """Twelve shared tokens are there, but the state was put aside after eight: eight can be resumed."""
    tokens = list(range(20))
    names = block_hashes(tokens, "m", SIZE)
    full, hybrid = BlockPool(8, block_tokens=SIZE), BlockPool(8, exact=True, block_tokens=SIZE)
    for pool in (full, hybrid):
        pool.keep(names[:3])
    hybrid.keep_checkpoint(names[:2], (), 2)
    assert full.longest(tokens, names, 19).tokens == 12
    result = hybrid.longest(tokens, names, 19)
    assert (result.tokens, result.blocks, result.shared_blocks) == (8, 2, 3)
    assert hybrid.longest(tokens, names, 7).tokens == 0


def test_block_is_as_recent_as_the_blocks_behind_it() -> None:
    pool = BlockPool(3, block_tokens=SIZE)
    pool.keep((1, 2))
    pool.keep((3,))
    pool.longest((), (1, 2), 2 * SIZE)
    assert [one.name for one in pool.keep((4,))[1]] == [3], "1 and 2 were used later"
    assert [one.name for one in pool.keep((5,))[1]] == [2]


def test_keeping_a_checkpoint_again_makes_it_most_recent() -> None:
    pool = BlockPool(3, exact=True, block_tokens=SIZE)
    for token in (1, 2, 3):
        pool.keep_checkpoint((), (token,), 1)
    assert pool.keep_checkpoint((), (1,), 1) == (None, [])
    assert [one.name for one in pool.keep_checkpoint((), (4,), 1)[1]] == [Checkpoint(0, (2,))]


def test_block_pool_check_detects_a_corrupted_free_list() -> None:
    pool = BlockPool(4, block_tokens=SIZE)
    pool.keep(block_hashes(list(range(12)), "m", SIZE))
    pool.check()
    pool._free.append(pool._free[-1])
    with pytest.raises(AssertionError, match="4 blocks"):
        pool.check()


def test_block_pool_refuses_invalid_sizes_and_chains() -> None:
    with pytest.raises(InputError):
        BlockPool(-1)
    pool = BlockPool(0)
    assert pool.keep((1, 2)) == ([], [])
    assert BlockPool(5).keep_checkpoint((), (1,), 6) == (None, [])
    pool = BlockPool(5)
    pool.keep((1, 2))
    for chain in ((7, 8, 1), (4, 4)):
        with pytest.raises(InputError, match="chained"):
            pool.keep(chain)
    with pytest.raises(InputError, match="not kept"):
        pool.places(9)
    pool.check()
