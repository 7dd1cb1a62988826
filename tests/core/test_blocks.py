"""The prefix index against a plain model of it: what is found is kept, whole, and the least recent goes first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.blocks import BlockIndex, Checkpoint, block_hashes
from potluck.core.errors import InputError

SIZE = 4
PROMPTS = st.lists(st.integers(0, 1), max_size=30)


def hashes(tokens: list[int]) -> tuple[int, ...]:
    return block_hashes(tokens, "m", SIZE)


@given(PROMPTS, PROMPTS)
def test_blocks_share_a_name_exactly_when_all_up_to_them_is_the_same(one: list[int], two: list[int]) -> None:
    a, b = hashes(one), hashes(two)
    for place in range(min(len(a), len(b))):
        stop = (place + 1) * SIZE
        assert (a[place] == b[place]) == (one[:stop] == two[:stop])
    assert len(a) == len(one) // SIZE
    assert block_hashes(one, "m", SIZE, most=2) == a[:2]
    assert not set(a) & set(block_hashes(one, "another", SIZE))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), PROMPTS), max_size=40), st.integers(0, 8))
def test_blocks_are_kept_as_a_list_by_recency_would(uses: list[tuple[bool, list[int]]], room: int) -> None:
    index = BlockIndex(room * 10, block_tokens=SIZE)
    recent: list[int] = []  # the model: names, most recent first
    for keeps, tokens in uses:
        names = list(hashes(tokens))
        held = 0
        while held < len(names) and names[held] in recent:
            held += 1
        if keeps:
            new, gone = index.keep(names, 10)
            names = names[:room]
            assert [names[place] for place in new] == [name for name in names if name not in recent]
            recent = names + [name for name in recent if name not in names]
            assert set(gone) == set(recent[room:])
            recent = recent[:room]
        else:
            most = len(tokens) - 1
            found = index.longest(tokens, names, most)
            assert found.blocks == min(held, max(most, 0) // SIZE)
            assert found.tokens == found.blocks * SIZE
            used = names[: found.blocks]
            recent = used + [name for name in recent if name not in used]
        assert len(index) == len(recent)
        assert all(name in index for name in recent)
        assert index.used_bytes == 10 * len(recent) <= room * 10


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), PROMPTS), max_size=40), st.integers(0, 60))
def test_checkpoints_are_found_at_exact_lengths_only(uses: list[tuple[bool, list[int]]], room: int) -> None:
    index = BlockIndex(room * 10, exact=True, block_tokens=SIZE)
    kept: set[tuple[int, ...]] = set()
    for keeps, tokens in uses:
        names = hashes(tokens)
        whole = len(names) * SIZE
        if keeps and tokens:
            index.keep(names, 10)
            checkpoint, _ = index.keep_checkpoint(names, tokens[whole:], 25)
            if checkpoint is not None:
                assert checkpoint in index
                kept.add(tuple(tokens))
        else:
            found = index.longest(tokens, names, len(tokens) - 1)
            if found.tokens:
                assert tuple(tokens[: found.tokens]) in kept
                assert found.checkpoint in index
                assert found.checkpoint == Checkpoint(
                    names[found.blocks - 1] if found.blocks else 0,
                    tuple(tokens[found.blocks * SIZE : found.tokens]),
                )
                assert all(name in index for name in names[: found.blocks])
            longer = [
                length for length in range(found.tokens + 1, len(tokens)) if tuple(tokens[:length]) in kept
            ]
            alive = [
                length
                for length in longer
                if Checkpoint(
                    names[length // SIZE - 1] if length >= SIZE else 0,
                    tuple(tokens[length // SIZE * SIZE : length]),
                )
                in index
            ]
            assert not alive
        assert index.used_bytes <= room * 10


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError):
        BlockIndex(-1)
    assert BlockIndex(0).keep((1, 2), 10) == ([], [])
    assert BlockIndex(5).keep_checkpoint((), (1,), 10) == (None, [])
