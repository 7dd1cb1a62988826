"""Cached blocks reported by vLLM under the names of the prefix index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.replica.blocks import CacheChanges, block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.events import CacheReported
from potluck.vllm.adapter_channel import HeldBlocks

TOKENS = list(range(96))


def keys(tokens: list[int], size: int) -> list[str]:
    """As vLLM would call its blocks: by all tokens up to their ends."""
    return [str(tokens[: stop + size]) for stop in range(0, len(tokens) - size + 1, size)]


def test_reported_blocks_have_the_names_of_the_gateway() -> None:
    for size in (16, 32, 48):
        held, names = HeldBlocks("m"), keys(TOKENS, size)
        held.stored(names[:1], None, TOKENS[:size], size, "salt")
        held.stored(names[1:], names[0], TOKENS[size:], size)
        assert held.changes() == CacheChanges(block_hashes(TOKENS, "m", salt="salt"))
        assert not held.changes()
        assert held.everything().added == block_hashes(TOKENS, "m", salt="salt")


def test_prefix_block_is_evicted_after_its_last_copy_is_gone() -> None:
    held, names = HeldBlocks("m"), keys(TOKENS, 32)
    for _ in range(2):
        held.stored(names, None, TOKENS, 32)
    held.changes()
    held.removed(names[2:])
    assert not held.changes()
    held.removed(names[2:])
    assert held.changes() == CacheChanges(removed=block_hashes(TOKENS, "m")[4:])
    held.cleared()
    assert (held.changes().removed, len(held)) == (block_hashes(TOKENS, "m")[:4], 0)


def test_blocks_without_a_known_parent_or_size_are_left_out() -> None:
    held, names = HeldBlocks("m"), keys(TOKENS, 32)
    held.stored(names[1:], "unknown", TOKENS[32:], 32)
    held.stored(["a"], None, TOKENS[:24], 24)  # no whole blocks of ours
    held.stored(names[:2], None, TOKENS[:32], 32)
    held.stored([], None, [], 0)
    held.removed(["never"])
    assert (held.changes(), len(held)) == (CacheChanges(), 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=30))
def test_prefix_index_fed_by_reports_equals_the_vllm_cache(steps: list[tuple[int, int, bool]]) -> None:
    """Three prompts that share a beginning, stored and taken away from their ends; copies included."""
    prompts = [[*TOKENS[:32], *range(1000 * n, 1000 * n + 64)] for n in range(3)]
    held, index, copies = HeldBlocks("m"), PrefixIndex(), [[0, 0, 0] for _ in prompts]
    for number, (which, depth, comes) in enumerate(steps, 1):
        names = keys(prompts[which], 32)
        if comes:
            held.stored(names[:depth], None, prompts[which][: 32 * depth], 32)
            copies[which] = [count + (place < depth) for place, count in enumerate(copies[which])]
        elif copies[which][depth - 1] and (depth == 3 or copies[which][depth] < copies[which][depth - 1]):
            held.removed([names[depth - 1]])
            copies[which][depth - 1] -= 1
        changes = held.changes()
        index.apply(CacheReported("r", number, changes.added, changes.removed), "here")
        for tokens, counts in zip(prompts, copies, strict=True):
            shared = sum(copy[0] for copy in copies)
            expected = next((place for place, count in enumerate([shared, *counts[1:]]) if not count), 3)
            assert index.held_by("r", block_hashes(tokens, "m")) == 2 * expected
