"""Who can resume how much of a prompt, as routing asks it; and the score."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.routing.prefix_affinity import best_holder
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.events import CacheReported

CHAINS = [tuple(100 * chain + place if place > 1 else place for place in range(8)) for chain in range(1, 4)]
"""Three prompts of eight blocks that share their first two."""

chain_steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)), max_size=25
)


@given(chain_steps, st.integers(0, 2), st.sets(st.sampled_from("abc")), st.booleans())
def test_the_deepest_prefix_of_those_that_are_wanted_is_found(
    steps: list[tuple[str, int, int, int]], asked: int, wanted: set[str], exact: bool
) -> None:
    """Caches hold prefixes (a block never goes before those that build on it), so bisection finds the longest."""
    index = PrefixIndex()
    held: dict[str, set[int]] = {name: set() for name in "abc"}
    marks: dict[str, set[int]] = {name: set() for name in "abc"}
    for number, (replica, chain, longest, kept) in enumerate(steps):
        blocks = CHAINS[chain]
        added = [block for block in blocks[:longest] if block not in held[replica]]
        held[replica] |= set(added)
        ends = (blocks[longest - 1],) if longest else ()
        marks[replica] |= set(ends)
        # Only what nothing else builds on may go.
        others = {block for other in CHAINS if other != blocks for block in other}
        gone = [block for block in blocks[kept:] if block in held[replica] and block not in others]
        before = sum(step[0] == replica for step in steps[:number])
        index.apply(CacheReported(replica, 2 * before + 1, tuple(added), marked=ends), "here")
        index.apply(CacheReported(replica, 2 * before + 2, (), tuple(gone)), "here")
        held[replica] -= set(gone)
        marks[replica] -= set(gone)
    blocks = CHAINS[asked]

    def depth(replica: str) -> int:
        depth = next((n for n, block in enumerate(blocks) if block not in held[replica]), len(blocks))
        while exact and depth and blocks[depth - 1] not in marks[replica]:
            depth -= 1
        return depth

    deepest, holders = index.deepest(blocks, wanted.__contains__, exact=exact)
    assert deepest == max((depth(name) for name in wanted), default=0)
    if not exact:
        assert sorted(holders) == sorted(name for name in wanted if deepest and depth(name) == deepest)
    for name in "abc":
        assert index.held_by(name, blocks, exact=exact) == depth(name)
    assert all(depth(name) >= deepest for name in holders)


def test_saved_prefill_is_weighed_against_waiting() -> None:
    saved = {"here": 0.0, "warm": 2.0}
    assert best_holder(saved, {"here": 0.0, "warm": 1.9}, "here", 1.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 1.0) == "here"
    assert best_holder(saved, {"here": 0.0, "warm": 2.1}, "here", 2.0) == "warm"
    assert best_holder(saved, {"here": 0.0, "warm": 0.1}, "here", 0.0) == "here"
    assert best_holder(saved, {"here": 1.0, "warm": 0.5}, "here", 0.0) == "warm"
