"""What a peer sends of a kept prefix is checked before it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_models import KINDS, prompt, runner
from test_prefix import computed, keep

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.replica.blocks import block_hashes
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.engine.memory.prefix_transfer import ReceivedPrefix
from potluck.kv.chunks import KvChunk

CONFIG, LENGTH = KINDS["hybrid"], 48


@pytest.fixture(scope="module")
def lent() -> tuple[tuple[int, ...], list[KvChunk]]:
    """Names, and the parcels of all of them."""
    engine, tokens = runner(CONFIG, rows=2, blocks=40), prompt(LENGTH)
    cache = PrefixCache(CONFIG, 10_000_000, "m")
    keep(cache, engine, computed(engine, tokens), tokens)
    names = block_hashes(tokens, "m")
    assert (cache.held(names), cache.lacks_from(names)) == (LENGTH, LENGTH - 16)
    with pytest.raises(InputError, match="no longer held"):
        cache.lend((*names, 5), 0)
    return names, cache.lend(names, 0)


def test_what_is_sound_is_kept_and_gone_over_to_others(lent: Any) -> None:
    names, parcels = lent
    cache, came = PrefixCache(CONFIG, 10_000_000, "m"), ReceivedPrefix(CONFIG.model, 0, LENGTH)
    for parcel in reversed(parcels):
        came.accept(parcel)
    assert cache.adopt(names, came) == LENGTH
    assert sorted(map(plain, cache.lend(names, 0))) == sorted(map(plain, parcels))
    assert set(cache.changes().added) == set(names)
    cache.verify()
    late = ReceivedPrefix(CONFIG.model, 32, LENGTH)
    for parcel in cache.lend(names, 32):
        late.accept(parcel)
    with pytest.raises(CapacityError, match="gone meanwhile"):
        PrefixCache(CONFIG, 10_000_000, "m").adopt(names, late)
    assert cache.adopt(names, late) == LENGTH


def plain(parcel: KvChunk) -> tuple[Any, ...]:
    return parcel.layer, parcel.part, parcel.first, parcel.stop, parcel.shape, bytes(parcel.data)


def test_what_is_not_sound_is_refused(lent: Any) -> None:
    _, parcels = lent
    tokens = next(parcel for parcel in parcels if parcel.part == "kv" and parcel.first == 0)
    holes = np.frombuffer(tokens.data, np.float32).copy()
    holes[3] = np.nan
    for wrong, says in (
        (replace(tokens, layer=99), "not expected"),
        (replace(tokens, first=16), "expected [0, 48)"),
        (replace(tokens, shape=(1, *tokens.shape[1:])), "expected [0, 48)"),
        (replace(tokens, dtype="int64"), "is int64"),
        (replace(tokens, codec="int8"), "must be exact"),
        (replace(tokens, data=bytes(tokens.data)[:-1]), "bytes"),
        (replace(tokens, data=holes.tobytes()), "not finite"),
    ):
        with pytest.raises(FormatError) as caught:
            ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(wrong)
        assert says in str(caught.value)
    for dtype, good, bad in (
        ("float16", 0x7BFF, 0x7C00),
        ("bfloat16", 0x7F7F, 0xFF80),
        ("bfloat16", 1, 0x7FC0),
    ):
        numbers = np.full(len(tokens.data) // 4, good, "<u2")
        ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(replace(tokens, dtype=dtype, data=numbers.tobytes()))
        numbers[-1] = bad
        with pytest.raises(FormatError, match="not finite"):
            ReceivedPrefix(CONFIG.model, 0, LENGTH).accept(
                replace(tokens, dtype=dtype, data=numbers.tobytes())
            )
    came = ReceivedPrefix(CONFIG.model, 0, LENGTH)
    came.accept(tokens)
    with pytest.raises(FormatError, match="came before"):
        came.accept(tokens)
    with pytest.raises(FormatError, match="parcels are missing"):
        PrefixCache(CONFIG, 10_000_000, "m").adopt(lent[0], came)
