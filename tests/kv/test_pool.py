"""Bytes in the pool and on disk: what is found is what was kept, whatever went where in between."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.core.errors import InputError
from potluck.core.replica.blocks import Checkpoint, block_hashes
from potluck.kv.disk_tier import HEADER, DiskTier
from potluck.kv.prefix_pool import PrefixPool

SIZE, BYTES = 4, 32
PROMPTS = st.builds(
    lambda blocks, rest: [token for block in blocks for token in [block] * SIZE] + rest,
    st.lists(st.integers(0, 1), max_size=5),
    st.lists(st.integers(0, 1), max_size=SIZE - 1),
)
"""Prompts that have much in common: of each block there are two."""


def hashes(tokens: list[int]) -> tuple[int, ...]:
    return block_hashes(tokens, "m", SIZE)


def data_of(tokens: list[int], size: int = BYTES) -> bytes:
    """What stands for the cache of exactly these tokens."""
    return np.random.default_rng(int.from_bytes(bytes(tokens) + b"\1", "little")).bytes(size)


def keep(pool: PrefixPool, tokens: list[int]) -> int:
    """The whole blocks of a prompt, the new ones in two pieces."""
    names = hashes(tokens)
    known = pool.index.depth(names)
    new = [data_of(tokens[: (place + 1) * SIZE]) for place in range(known, len(names))]
    return pool.keep(names, [[data[:5], memoryview(data)[5:]] for data in new])


def keep_checkpoint(pool: PrefixPool, tokens: list[int]) -> bool:
    whole = len(tokens) // SIZE * SIZE
    return pool.keep_checkpoint(hashes(tokens), tokens[whole:], [data_of([*tokens, 7], 70)])


class Bytes(RuleBasedStateMachine):
    """Against a set of all prefixes that were ever kept: nothing else is found, and its bytes are its own."""

    exact = False
    with_disk = False

    @initialize()
    def start(self) -> None:
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.disk = DiskTier(self.folder, 12 * 150) if self.with_disk else None
        self.pool = PrefixPool(9 * BYTES + 3, BYTES, exact=self.exact, block_tokens=SIZE, disk=self.disk)
        self.kept: set[tuple[int, ...]] = set()

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            self.temporary.cleanup()

    @rule(tokens=PROMPTS, checkpoint=st.booleans())
    def keep(self, tokens: list[int], checkpoint: bool) -> None:
        keep(self.pool, tokens)
        if self.exact and checkpoint and tokens and keep_checkpoint(self.pool, tokens):
            self.kept.add(tuple(tokens))
        if not self.exact:
            self.kept |= {tuple(tokens[:stop]) for stop in range(SIZE, len(tokens) + 1, SIZE)}

    @rule(tokens=PROMPTS)
    def find(self, tokens: list[int]) -> None:
        names = hashes(tokens)
        result = self.pool.find(tokens, names, len(tokens))
        for place in range(result.blocks):
            assert bytes(self.pool.read(names[place])) == data_of(tokens[: (place + 1) * SIZE])
        if result.tokens:
            assert tuple(tokens[: result.tokens]) in self.kept
        if self.exact and result.tokens:
            assert result.checkpoint is not None
            assert bytes(self.pool.read(result.checkpoint)) == data_of([*tokens[: result.tokens], 7], 70)

    @precondition(lambda self: self.pool._sums)
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A bit flips in memory; going round finds it before anybody reads it."""
        name = data.draw(st.sampled_from(list(self.pool._sums)))
        self.pool._memory[self.pool.index.places(name)[0] * BYTES] ^= 1
        before = self.pool.corrupted
        self.pool.verify()
        self.pool.verify()
        assert self.pool.corrupted == before + 1
        assert name not in self.pool.index

    @precondition(lambda self: self.with_disk)
    @rule(data=st.data(), cut=st.booleans())
    def spoil(self, data: st.DataObject, cut: bool) -> None:
        files = sorted(path for path in self.folder.rglob("*.kv") if path.stat().st_size)
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = bytearray(path.read_bytes())
        if cut:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 4
        path.write_bytes(content)

    @precondition(lambda self: self.with_disk)
    @rule(flushed=st.booleans())
    def crash(self, flushed: bool) -> None:
        """A new process with the same files, one of them half written."""
        if flushed:
            self.pool.flush()
        next(self.folder.iterdir()).joinpath("half.tmp").write_bytes(b"half")
        self.disk = DiskTier(self.folder, 12 * 150)
        self.pool = PrefixPool(9 * BYTES, BYTES, exact=self.exact, block_tokens=SIZE, disk=self.disk)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.used_bytes <= 9 * BYTES
        if self.disk is not None:
            assert self.disk.used_bytes <= 12 * 150
            assert len(list(self.folder.rglob("*.kv"))) == len(self.disk)


class ExactBytes(Bytes):
    exact = True


class DiskBytes(Bytes):
    with_disk = True


class ExactDiskBytes(Bytes):
    exact = True
    with_disk = True


COURSE = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestBytes, TestExactBytes = Bytes.TestCase, ExactBytes.TestCase
TestDiskBytes, TestExactDiskBytes = DiskBytes.TestCase, ExactDiskBytes.TestCase
TestBytes.settings = TestExactBytes.settings = COURSE
TestDiskBytes.settings = TestExactDiskBytes.settings = COURSE


def test_prefix_evicted_from_memory_is_read_back_from_disk(tmp_path: Path) -> None:
    pool = PrefixPool(4 * BYTES, BYTES, block_tokens=SIZE, disk=DiskTier(tmp_path, 100_000))
    one, two = [0] * 16, [1] * 16
    assert keep(pool, one) == 4
    assert keep(pool, two) == 4
    assert pool.index.depth(hashes(one)) == 0
    assert pool.find(one, hashes(one), 16).tokens == 16
    assert bytes(pool.read(hashes(one)[3])) == data_of(one)


def test_corrupted_memory_block_is_not_written_to_disk(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 100_000)
    pool = PrefixPool(4 * BYTES, BYTES, block_tokens=SIZE, disk=disk)
    one, two = [0] * 16, [1] * 16
    keep(pool, one)
    pool._memory[pool.index.places(hashes(one)[2])[0] * BYTES + 5] ^= 1
    keep(pool, two)
    assert [name in disk for name in hashes(one)] == [True, True, False, True]
    assert pool.corrupted == 1
    assert pool.find(one, hashes(one), 16).tokens == 8


def test_restarted_pool_finds_prefixes_on_disk(tmp_path: Path) -> None:
    tokens = [0, 1] * 8
    first = PrefixPool(6 * BYTES, BYTES, exact=True, block_tokens=SIZE, disk=DiskTier(tmp_path, 100_000, "a"))
    keep(first, tokens)
    assert not keep_checkpoint(first, tokens), "3 blocks beside 4 do not fit in 6"
    keep(first, tokens[:12])
    assert keep_checkpoint(first, tokens[:9])
    keep(first, [1] * 24)  # pushes all of it out
    again = PrefixPool(6 * BYTES, BYTES, exact=True, block_tokens=SIZE, disk=DiskTier(tmp_path, 100_000, "a"))
    assert again.find(tokens, hashes(tokens), 16).tokens == 9
    other = PrefixPool(6 * BYTES, BYTES, exact=True, block_tokens=SIZE, disk=DiskTier(tmp_path, 100_000, "b"))
    assert other.find(tokens, hashes(tokens), 16).tokens == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_corrupted_disk_file_is_a_cache_miss(tmp_path_factory, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("disk")
    disk = DiskTier(folder, 10_000)
    name = data.draw(st.sampled_from([5, Checkpoint(5, (1, 2)), Checkpoint(0, ())]))
    disk.put(name, [b"abc" * 9, memoryview(b"de")])
    assert disk.get(name) == b"abc" * 9 + b"de"
    (path,) = folder.rglob("*.kv")
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "gone"]))
    if kind == "flip":
        content[where] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[where:]
    elif kind == "longer":
        content += b"x"
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)
    assert DiskTier(folder, 10_000).get(name) is None
    assert disk.get(name) is None
    assert name not in disk
    assert disk.used_bytes == 0


def test_disk_tier_removes_leftover_files_and_is_bounded(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10 * (HEADER.size + 16 + 50))
    for name in range(1, 30):
        disk.put(name, [bytes([name]) * 50])
    assert len(disk) == 10
    assert 29 in disk
    assert 19 not in disk
    (folder,) = tmp_path.iterdir()
    (folder / "half.tmp").write_bytes(b"half a file")
    (folder / "stranger.kv").write_bytes(b"x" * 100)
    smaller = DiskTier(tmp_path, 4 * (HEADER.size + 16 + 50))
    assert sorted(path.suffix for path in folder.iterdir()) == [".kv"] * 4
    assert smaller.get(29) == bytes([29]) * 50
    smaller.put(99, [b"x" * 100_000])
    assert 99 not in smaller


def test_failing_disk_only_reduces_the_cache(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10_000)
    (folder,) = tmp_path.iterdir()
    folder.rmdir()
    disk.put(1, [b"abc"])
    assert disk.failures == 1
    assert disk.get(1) is None


def test_prefix_pool_refuses_invalid_sizes_and_blocks(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        PrefixPool(-1, 10)
    with pytest.raises(InputError):
        DiskTier(tmp_path, -1)
    with pytest.raises(InputError, match="block name"):
        DiskTier(tmp_path, 1000).put(1 << 128, [b""])
    pool = PrefixPool(100, 10)
    with pytest.raises(InputError, match="all new"):
        pool.keep((1, 2), [[b"x" * 10]])
    with pytest.raises(InputError, match="10 bytes"):
        pool.keep((1,), [[b"x" * 9]])
    pool.check()
