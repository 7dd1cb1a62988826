"""Which replica holds which prefix, and whether to go there (longest cached prefix against load).

    score = affinity x seconds of prefill saved - seconds of waiting more

The index is made of what caches report: block hashes, chained, so that a block's hash stands for everything
before it. A replica that holds a request's i-th block therefore holds all before it, and the deepest block that
anybody holds is found by bisection. With block-level caches the prefix ends there. Layers with linear or window
state can only be resumed at lengths where their state was kept (`Cached.exact`); then the longest of those
within the shared blocks counts.

The index forgets the blocks that were not reported or asked for the longest, and per block all but the latest
holders: its memory is bounded, and what it forgets costs a missed saving, never a wrong answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import filterfalse

from potluck.core.events import Cached

MOST_BLOCKS = 200_000
MOST_HOLDERS = 16

Holders = dict[str, tuple[int, ...]]
"""Replica to the exact lengths that came with the block."""
Accepts = Callable[[str], bool]


class PrefixIndex:
    """Block hash to holders. Changed by the Brain at `Cached` events."""

    __slots__ = ("_blocks", "_held", "_most_blocks")

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._blocks: dict[int, Holders] = {}
        """Holders are never changed, only replaced, so that many blocks may share them."""
        self._held: dict[str, set[int]] = {}
        """The same the other way round."""
        self._most_blocks = most_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def update(self, event: Cached) -> None:
        blocks, replica = self._blocks, event.replica
        held = self._held.setdefault(replica, set())
        for block in held.intersection(event.removed):
            self._without(block, replica)
        held.difference_update(event.removed)
        fresh = tuple(filterfalse(blocks.__contains__, event.added))
        if len(fresh) < len(event.added):
            for block in filter(blocks.__contains__, event.added):
                holders = blocks.pop(block)
                if replica in holders:
                    del (holders := dict(holders))[replica]
                elif len(holders) >= MOST_HOLDERS:
                    oldest = next(iter(holders))
                    self._held[oldest].discard(block)
                    del (holders := dict(holders))[oldest]
                blocks[block] = {**holders, replica: event.exact}
        alone = {replica: event.exact}
        blocks.update(dict.fromkeys(fresh, alone))
        held.update(event.added)
        while len(blocks) > self._most_blocks:
            block = next(iter(blocks))
            for holder in blocks.pop(block):
                self._held[holder].discard(block)

    def forget(self, replica: str) -> None:
        """It is gone, and all that it held."""
        for block in self._held.pop(replica, ()):
            self._without(block, replica)

    def _without(self, block: int, replica: str) -> None:
        holders = self._blocks[block]
        if len(holders) == 1:
            del self._blocks[block]
        else:
            self._blocks[block] = {each: exact for each, exact in holders.items() if each != replica}

    def deepest(self, blocks: Sequence[int], accepts: Accepts) -> int:
        """How many leading blocks some accepted replica holds."""
        known = self._blocks
        high = _leading(blocks, known.__contains__)
        if high and any(map(accepts, known[blocks[high - 1]])):  # as a rule
            return high
        return _leading(blocks[:high], lambda block: any(map(accepts, known.get(block, ()))))

    def holders(self, block: int) -> Holders:
        """Who holds a block, the latest last; asking keeps it from being forgotten."""
        found = self._blocks.pop(block, None)
        if found is None:
            return {}
        self._blocks[block] = found
        return found

    def cached_tokens(
        self, blocks: Sequence[int], replica: str, block_tokens: int, prompt_tokens: int, exact: bool
    ) -> int:
        """Tokens of a prompt that a replica need not compute; the last one always is computed."""
        mine = self._held.get(replica)
        depth = _leading(blocks, mine.__contains__) if mine else 0
        if depth == 0:
            return 0
        held = min(depth * block_tokens, prompt_tokens - 1)
        if not exact:
            return held
        lengths = self._blocks[blocks[depth - 1]][replica]
        return max((length for length in lengths if length <= held), default=0)


def _leading(blocks: Sequence[int], there: Callable[[int], bool]) -> int:
    """How many leading blocks are there, by bisection: none is without those before it."""
    return len(blocks) - bisect_left(blocks[::-1], True, key=there)


def best_holder(saved_s: dict[str, float], waits_s: dict[str, float], default: str, affinity: float) -> str:
    """The replica with the best score; the default one when no other is better. All in order of mention."""
    best, most = default, affinity * saved_s.get(default, 0.0) - waits_s[default]
    for replica, saved in saved_s.items():
        score = affinity * saved - waits_s[replica]
        if score > most + 1e-12:
            best, most = replica, score
    return best
