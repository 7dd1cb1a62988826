"""The spare prefix cache equals a plain reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.replica.blocks import CacheChanges
from potluck.core.replica.spare_cache import SpareCache

CHAINS = [tuple(range(10 * group, 10 * group + length)) for group in range(4) for length in (1, 2, 4, 7, 10)]


def _place(block: int) -> int:
    return block % 10 + 1


def _up_to(block: int) -> tuple[int, ...]:
    """The prompt that ends with a block."""
    return tuple(range(block - block % 10, block + 1))


@given(st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 25)), max_size=40), st.booleans())
def test_spare_cache_keeps_the_newest_blocks_and_no_block_without_its_prefix(
    uses: list[tuple[tuple[int, ...], int]], exact: bool
) -> None:
    cache = SpareCache(16, exact)
    order: list[int] = []  # Reference: most recent last; of one prompt, its beginning last.
    message: set[int] = set()
    marked: set[int] = set()
    for chain, room in uses:
        cache.keep(chain)
        cache.shrink(room * 16)
        order = [block for block in order if block not in chain] + list(reversed(chain))
        order = order[max(0, len(order) - room) :]
        assert {block for block in range(40) if block in cache} == set(order)
        assert cache.held_tokens <= room * 16
        for item in CHAINS:
            depth = next((i for i, block in enumerate(item) if block not in order), len(item))
            assert all(block not in order for block in item[depth:]), "a block without its prefix"
            if exact:
                assert cache.match(item) <= depth
            else:
                assert cache.match(item) == depth
        if len(order) % 2:
            changes = cache.changes()
            message = (message - set(changes.removed)) | set(changes.added)
            marked = (marked - set(changes.unmarked)) | set(changes.marked)
            assert message == set(order)
            assert marked == {
                block for block in order if exact and cache.match(_up_to(block)) == _place(block)
            }
        if len(order) % 5 == 0:
            cache_changes = cache.everything()
            message, marked = set(cache_changes.added), set(cache_changes.marked)
            assert message == set(order)
            assert not cache.changed


def test_exact_spare_cache_resumes_only_at_prompt_ends() -> None:
    cache = SpareCache(16, exact=True, state_tokens=8.0)
    cache.keep((1, 2, 3))
    cache.shrink(1000)
    assert cache.match((1, 2, 3, 4)) == 3
    assert cache.match((1, 2)) == 0
    cache.keep((1, 2))
    cache.shrink(1000)
    assert cache.match((1, 2, 9)) == 2
    assert cache.held_tokens == 3 * 16 + 2 * 8
    assert cache.changes() == CacheChanges((1, 2, 3), (), (3, 2), ())
    cache.keep((1, 2, 3, 4))
    cache.shrink(1000)
    assert cache.changes() == CacheChanges((4,), (), (4,), ())
    assert cache.everything() == CacheChanges((1, 2, 3, 4), (), (4, 3, 2), ())
    cache.shrink(0)
    assert (len(cache), cache.held_tokens) == (0, 0)
    assert cache.changes() == CacheChanges((), (4, 3, 2, 1), (), (4, 3, 2))


def test_block_added_and_evicted_between_reports_is_reported_as_evicted() -> None:
    cache = SpareCache(16)
    cache.keep((1, 2))
    cache.shrink(16)
    assert cache.changes() == CacheChanges((1,), (2,))
    assert not cache.changed
    assert not cache.changes()
