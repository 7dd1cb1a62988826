"""The prefix cache by itself: what comes out is, byte by byte, what the rows held."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_models import KINDS, opened, prompt, run, runner

from potluck.core.replica.blocks import pool_layout
from potluck.engine.compute.runner import Runner
from potluck.engine.memory.handover import KvChunk, pack
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.kv.disk_tier import DiskTier


def computed(engine: Runner, tokens: list[int]) -> int:
    row = opened(engine, len(tokens))
    run(engine, row, tokens, [len(tokens)])
    return row


def keep(cache: PrefixCache, engine: Runner, row: int, tokens: list[int]) -> None:
    cache.keep(tokens, len(tokens), lambda layer, start, stop: pack(engine, row, layer, start, stop))


def same(found: list[KvChunk], engine: Runner, row: int, stop: int) -> None:
    layers = range(engine.config.model.layer_count)
    expected = {(p.layer, p.part): p for layer in layers for p in pack(engine, row, layer, 0, stop)}
    assert {(parcel.layer, parcel.part) for parcel in found} == set(expected)
    for parcel in found:
        wanted = expected[parcel.layer, parcel.part]
        assert (parcel.first, parcel.stop, parcel.dtype, parcel.shape) == (
            wanted.first,
            wanted.stop,
            wanted.dtype,
            wanted.shape,
        )
        assert bytes(parcel.data) == bytes(wanted.data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 32, 75])
def test_what_is_found_is_what_was_kept(kind: str, length: int) -> None:
    engine, tokens = runner(KINDS[kind], rows=2, blocks=40), prompt(length)
    row = computed(engine, tokens)
    cache = PrefixCache(KINDS[kind], 10_000_000, "salt")
    keep(cache, engine, row, tokens)
    cache.verify()
    held, parcels = cache.find([*tokens, 1], length)
    assert held == (length if cache.exact else length // 16 * 16)
    if held == length:
        same(parcels, engine, row, held)
    assert cache.find(tokens[: length - 1], length - 1)[0] == (0 if cache.exact else (length - 1) // 16 * 16)
    assert PrefixCache(KINDS[kind], 10_000_000, "salt").find(tokens, length) == (0, [])
    layout = pool_layout(KINDS[kind].model, element_bytes=4)
    assert cache._pool is None or cache.exact == layout.exact
    if cache._pool is not None and any(group.kind == "tokens" for group in layout.groups):
        assert cache._pool.block_bytes == layout.block_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 40])
def test_prefixes_are_shared_under_one_salt_alone(kind: str, length: int, tmp_path: Path) -> None:
    engine, tokens = runner(KINDS[kind], rows=2, blocks=40), prompt(length)
    row = computed(engine, tokens)
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
def test_what_went_to_disk_comes_back_after_a_restart(kind: str, tmp_path: Path) -> None:
    engine = runner(KINDS[kind], rows=3, blocks=80)
    one, two = prompt(64, 1), prompt(64, 2)
    rows = [computed(engine, one), computed(engine, two)]
    sizes = PrefixCache(KINDS[kind], 10_000_000)
    keep(sizes, engine, rows[0], one)
    room = int(sizes.used_bytes * 1.2)  # for one of them
    cache = PrefixCache(KINDS[kind], room, "s", DiskTier(tmp_path, 10_000_000))
    keep(cache, engine, rows[0], one)
    keep(cache, engine, rows[1], two)
    cache.flush()
    again = PrefixCache(KINDS[kind], room, "s", DiskTier(tmp_path, 10_000_000))
    keep(again, engine, rows[1], two)
    held, parcels = again.find([*one, 5], 64)
    assert held == 64
    same(parcels, engine, rows[0], 64)
    again.verify()
