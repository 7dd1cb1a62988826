"""A prefix cache in spare memory, for the simulator and emulated engines; `blocks.py` is for those that hold bytes.

Least recently used blocks go first, and a prefix is touched from its end, so none goes before those that build on it.
With linear or window layers (`exact`) a prompt resumes only where a state was kept, which takes room of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, filterfalse, islice, repeat
from math import ceil
from typing import Final

from potluck.core.replica.blocks import CacheChanges

FEW: Final = 8
"""So many blocks are looked at one by one, which takes less time than to make what goes over all of them."""


class SpareCache:
    """Block hash to whether state is kept at its end, least recently used first."""

    __slots__ = ("_held", "_marks", "_news", "_states", "block_tokens", "exact", "state_tokens")

    def __init__(self, block_tokens: int, exact: bool = False, state_tokens: float = 0.0) -> None:
        self.block_tokens = block_tokens
        self.exact = exact
        self.state_tokens = state_tokens
        self._held: dict[int, bool] = {}
        self._states = 0
        self._news: dict[int, bool] = {}
        """Changes since they were last asked for: block to whether it is held now."""
        self._marks: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    @property
    def held_tokens(self) -> float:
        return len(self._held) * self.block_tokens + self._states * self.state_tokens

    def match(self, blocks: Sequence[int]) -> int:
        held, depth = self._held, 0
        for block in blocks:
            if block not in held:
                break
            depth += 1
        if self.exact:
            while depth and not held[blocks[depth - 1]]:
                depth -= 1
        return depth

    def keep(self, blocks: Sequence[int]) -> None:
        """A prompt with these blocks was computed or received; `shrink` must follow."""
        held = self._held
        if len(blocks) <= FEW and not self.exact:
            news = self._news
            for block in blocks:
                if block not in held:
                    news[block] = True
            for block in reversed(blocks):
                held[block] = held.pop(block, False)
            return
        fresh = tuple(filterfalse(held.__contains__, blocks))
        self._news.update(dict.fromkeys(fresh, True))
        states = list(map(held.pop, reversed(blocks), repeat(False)))
        if self.exact and blocks and not states[0]:
            states[0] = True
            self._states += 1
            self._marks[blocks[-1]] = True
        held.update(zip(reversed(blocks), states, strict=True))

    def shrink(self, room_tokens: float) -> None:
        held = self._held
        over_tokens = len(held) * self.block_tokens + self._states * self.state_tokens - room_tokens
        if over_tokens <= 0:
            return
        if not self._states:
            news = self._news
            for block in list(islice(held, ceil(over_tokens / self.block_tokens))):
                del held[block]
                news[block] = False
            return
        victims = []
        for block, state in held.items():
            if over_tokens <= 0:
                break
            over_tokens -= self.block_tokens + (self.state_tokens if state else 0.0)
            victims.append(block)
        states = list(map(held.pop, victims))
        self._news.update(dict.fromkeys(victims, False))
        self._states -= sum(states)
        self._marks.update(dict.fromkeys(compress(victims, states), False))

    @property
    def changed(self) -> bool:
        return bool(self._news or self._marks)

    def changes(self) -> CacheChanges:
        """What came and went since the last call, net: what did both in between may be among what went."""
        cache_changes = CacheChanges(*_apart(self._news), *_apart(self._marks))
        self._news.clear()
        self._marks.clear()
        return cache_changes

    def everything(self) -> CacheChanges:
        self._news.clear()
        self._marks.clear()
        held = self._held
        # The front of a chain is the most recent, and is named first.
        return CacheChanges(tuple(reversed(held)), (), tuple(compress(held, held.values())))


def _apart(news: dict[int, bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(compress(news, news.values())), tuple(filterfalse(news.__getitem__, news))
