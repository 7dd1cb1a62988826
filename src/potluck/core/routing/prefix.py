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

from collections.abc import Callable, Sequence

from potluck.core.events import Cached

MOST_BLOCKS = 200_000
MOST_HOLDERS = 16

Holders = dict[str, tuple[int, ...]]
"""Replica to the exact lengths that came with the block."""
Accepts = Callable[[str], bool]


class PrefixIndex:
    """Block hash to holders. Changed by the Brain at `Cached` events."""

    __slots__ = ("_blocks", "_most_blocks")

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._blocks: dict[int, Holders] = {}
        self._most_blocks = most_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def update(self, event: Cached) -> None:
        blocks = self._blocks
        for block in event.removed:
            holders = blocks.get(block)
            if holders is not None and holders.pop(event.replica, None) is not None and not holders:
                del blocks[block]
        for block in event.added:
            holders = blocks.pop(block, None)
            if holders is None:
                holders = {}
            holders.pop(event.replica, None)
            holders[event.replica] = event.exact
            if len(holders) > MOST_HOLDERS:
                del holders[next(iter(holders))]
            blocks[block] = holders
        while len(blocks) > self._most_blocks:
            del blocks[next(iter(blocks))]

    def deepest(self, blocks: Sequence[int], accepts: Accepts) -> int:
        """How many leading blocks some accepted replica holds."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if any(accepts(replica) for replica in self._blocks.get(blocks[middle - 1], ())):
                low = middle
            else:
                high = middle - 1
        return low

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
        depth = self.deepest(blocks, lambda each: each == replica)
        if depth == 0:
            return 0
        held = min(depth * block_tokens, prompt_tokens - 1)
        if not exact:
            return held
        lengths = self._blocks[blocks[depth - 1]][replica]
        return max((length for length in lengths if length <= held), default=0)


def best_holder(saved_s: dict[str, float], waits_s: dict[str, float], default: str, affinity: float) -> str:
    """The replica with the best score; the default one when no other is better. All in order of mention."""
    best, most = default, affinity * saved_s.get(default, 0.0) - waits_s[default]
    for replica, saved in saved_s.items():
        score = affinity * saved - waits_s[replica]
        if score > most + 1e-12:
            best, most = replica, score
    return best
