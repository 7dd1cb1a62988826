"""The index of cached prefixes against a plain model of it, its bounds, and the score."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.events import Cached
from potluck.core.routing.prefix import MOST_HOLDERS, PrefixIndex, best_holder

CHAINS = [tuple(100 * chain + place if place > 1 else place for place in range(8)) for chain in range(1, 4)]
"""Three prompts of eight blocks that share their first two."""

chain_steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)), max_size=25
)


@given(chain_steps, st.integers(0, 2))
def test_the_deepest_prefix_is_found(steps: list[tuple[str, int, int, int]], asked: int) -> None:
    """Caches hold prefixes (a block never goes before those that build on it), so bisection finds the longest."""
    index = PrefixIndex()
    held: dict[str, set[int]] = {name: set() for name in "abc"}
    for replica, chain, longest, kept in steps:
        blocks = CHAINS[chain]
        added = [block for block in blocks[:longest] if block not in held[replica]]
        held[replica] |= set(added)
        index.update(Cached(replica, tuple(added), ()))
        gone = [block for block in blocks[kept:] if block in held[replica]]
        # Only what nothing else builds on may go.
        others = {block for other in CHAINS if other != blocks for block in other}
        gone = [block for block in gone if block not in others]
        held[replica] -= set(gone)
        index.update(Cached(replica, (), tuple(gone)))
    blocks = CHAINS[asked]

    def depth(replica: str) -> int:
        return next((n for n, block in enumerate(blocks) if block not in held[replica]), len(blocks))

    assert index.deepest(blocks, lambda _: True) == max(depth(name) for name in "abc")
    for name in "abc":
        assert index.cached_tokens(blocks, name, 16, 1000, exact=False) == 16 * depth(name)


def test_the_last_token_is_always_computed() -> None:
    index = PrefixIndex()
    index.update(Cached("a", (1, 2), ()))
    assert index.cached_tokens((1, 2), "a", 16, 32, exact=False) == 31


def test_exact_lengths_are_the_only_places_to_resume() -> None:
    index = PrefixIndex()
    index.update(Cached("a", (1, 2, 3, 4), (), exact=(32, 64)))
    assert index.cached_tokens((1, 2, 3, 4), "a", 16, 100, exact=True) == 64
    assert index.cached_tokens((1, 2, 3, 9), "a", 16, 100, exact=True) == 32  # 48 are shared
    assert index.cached_tokens((1, 9), "a", 16, 100, exact=True) == 0
    assert index.cached_tokens((1, 9), "a", 16, 100, exact=False) == 16
    assert index.cached_tokens((1, 2, 3, 4), "b", 16, 100, exact=True) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 500)), max_size=200))
def test_memory_is_bounded(news: list[tuple[str, int]]) -> None:
    index = PrefixIndex(most_blocks=20)
    for replica, block in news:
        index.update(Cached(replica, (block, block + 1), ()))
        assert len(index) <= 20


def test_a_block_keeps_its_latest_holders() -> None:
    index = PrefixIndex()
    for number in range(MOST_HOLDERS + 5):
        index.update(Cached(f"r{number}", (7,), ()))
    assert list(index.holders(7)) == [f"r{number}" for number in range(5, MOST_HOLDERS + 5)]


def test_what_was_asked_for_lately_is_forgotten_last() -> None:
    index = PrefixIndex(most_blocks=2)
    index.update(Cached("a", (1, 2), ()))
    index.holders(1)
    index.update(Cached("a", (3,), ()))
    assert index.holders(1) == {"a": ()}
    assert index.holders(2) == {}


def test_saved_prefill_is_weighed_against_waiting() -> None:
    saved = {"here": 0.0, "warm": 2.0}
    assert best_holder(saved, {"here": 0.0, "warm": 1.9}, "here", 1.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 1.0) == "here"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 2.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 0.1}, "here", 0.0) == "here"
    assert best_holder(saved, {"here": 1.0, "warm": 0.5}, "here", 0.0) == "warm"
