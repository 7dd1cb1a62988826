"""The prefix cache of one replica: blocks of prompt KV that nobody uses at present, kept while there is room.

Blocks carry chained hashes, so a block stands for its whole prefix. Least recently used blocks go first, and a
prefix is touched from its end to its beginning, so a block never goes before the ones that build on it. The room is
what running requests leave over: cached blocks are given up as soon as those need the memory.

Models with linear or window layers can resume only where their state was kept, which is at the end of a prompt
(`exact`); such a state takes room of its own. The others resume at any block.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    """Block hash to whether state is kept at its end, least recently used first."""

    __slots__ = ("_chains", "_held", "_news", "_states", "block_tokens", "exact", "state_tokens")

    def __init__(self, block_tokens: int, exact: bool = False, state_tokens: float = 0.0) -> None:
        self.block_tokens = block_tokens
        self.exact = exact
        self.state_tokens = state_tokens
        self._held: dict[int, bool] = {}
        self._states = 0
        self._chains: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Exact caches: (new blocks, all lengths of that prompt at which state is kept), since last asked for."""
        self._news: dict[int, bool] = {}
        """Changes since they were last asked for: block to whether it is held now."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    @property
    def held_tokens(self) -> float:
        """Room it takes, in tokens of KV."""
        return len(self._held) * self.block_tokens + self._states * self.state_tokens

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks of a prompt can be resumed from."""
        held, usable = self._held, 0
        for place, block in enumerate(blocks):
            state = held.get(block)
            if state is None:
                break
            if state or not self.exact:
                usable = place + 1
        return usable

    def keep(self, blocks: Sequence[int], room_tokens: float) -> None:
        """A prompt with these blocks was computed or received: hold what fits."""
        held, news = self._held, self._news
        last = blocks[-1] if blocks else None
        fresh = [block for block in blocks if block not in held] if self.exact else []
        for block in reversed(blocks):
            state = held.pop(block, None)
            if state is None:
                state = False
                news[block] = True
            if block == last and self.exact and not state:
                state = True
                self._states += 1
            held[block] = state
        if fresh:
            size = self.block_tokens
            lengths = tuple((place + 1) * size for place, block in enumerate(blocks) if held[block])
            self._chains.append((tuple(fresh), lengths))
        self.shrink(room_tokens)

    def shrink(self, room_tokens: float) -> None:
        """Give up the least recently used blocks until what is left fits the room."""
        held, news = self._held, self._news
        over_tokens = len(held) * self.block_tokens + self._states * self.state_tokens - room_tokens
        while over_tokens > 0 and held:
            block = next(iter(held))
            over_tokens -= self.block_tokens
            if held.pop(block):
                self._states -= 1
                over_tokens -= self.state_tokens
            news[block] = False

    @property
    def changed(self) -> bool:
        return bool(self._news)

    def news(self) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """(added, removed, exact lengths) since the last call, as `Cached` events have them.

        What came and went in between is in neither. With exact caches each prompt has an entry of its own, since
        the lengths belong to it.
        """
        added = [block for block, there in self._news.items() if there]
        removed = tuple(block for block, there in self._news.items() if not there)
        self._news.clear()
        if not self.exact:
            return [(tuple(added), removed, ())] if added or removed else []
        wanted = set(added)
        found: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = (
            [((), removed, ())] if removed else []
        )
        for blocks, lengths in self._chains:
            kept = tuple(block for block in blocks if block in wanted)
            if kept:
                found.append((kept, (), lengths))
        self._chains.clear()
        return found
