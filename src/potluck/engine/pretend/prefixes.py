"""The prefix cache of an engine that pretends: names of blocks in the memory that running requests leave over.

It is the simulator's (`core.replica.spare`); beside each name is the history that its KV would stand for.
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.brain.facts import BLOCK_TOKENS
from potluck.core.replica.block_values import Changes, block_hashes
from potluck.core.replica.spare import SpareCache
from potluck.engine.memory.prefix import Read
from potluck.engine.pretend.cargo import Cargo
from potluck.engine.pretend.executor import PretendExecutor, parcel_of
from potluck.engine.pretend.history import NOTHING, after
from potluck.kv.parcels import Parcel


class PretendPrefixes:
    """As `memory.prefix.PrefixCache`, without bytes. Changed by the engine's loop alone."""

    def __init__(self, executor: PretendExecutor, cargo: Cargo, most_blocks: int | None = None) -> None:
        """`most_blocks`: no more than that, even if there is room; 0: none at all."""
        self._executor, self._cargo, self._most_blocks = executor, cargo, most_blocks
        self._cache = SpareCache(BLOCK_TOKENS, cargo.exact, cargo.state_tokens if cargo.exact else 0.0)
        self._histories: dict[int, int] = {}
        executor.grown = self._fit

    @property
    def exact(self) -> bool:
        return self._cargo.exact

    @property
    def enabled(self) -> bool:
        return self._most_blocks != 0

    @property
    def used_bytes(self) -> int:
        """As they would be."""
        return round(self._cache.held_tokens * self._cargo.token_bytes)

    def find(self, tokens: Sequence[int], most_tokens: int, salt: str = "") -> tuple[int, list[Parcel]]:
        """The longest known prefix of at most so many tokens, and the parcels of [0, that)."""
        if not len(self._cache) or most_tokens < BLOCK_TOKENS:
            return 0, []
        names = self._names(tokens[:most_tokens], salt)
        depth = self._cache.match(names)
        if not depth:
            return 0, []
        self._cache.keep(names[:depth])  # It was used just now.
        count, history = depth * BLOCK_TOKENS, self._histories[names[depth - 1]]
        return count, [parcel_of(history, layer, 0, count) for layer in range(self._cargo.layers)]

    def keep(self, tokens: Sequence[int], held: int, read: Read, salt: str = "") -> None:
        """Keep what a row has of its first `held` tokens, which is all that it holds."""
        if not self.enabled or held < BLOCK_TOKENS or (self.exact and held % BLOCK_TOKENS):
            return  # Where states are kept there must be one, and there is one only at the row's present length.
        names = self._names(tokens[:held], salt)
        history, histories = NOTHING, self._histories
        for place, name in enumerate(names):
            known = histories.get(name) if name in self._cache else None
            if known is None:
                known = after(history, tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
                histories[name] = known
            history = known
        self._cache.keep(names)
        self._fit()

    def changes(self) -> Changes:
        return self._cache.changes()

    def everything(self) -> Changes:
        return self._cache.everything()

    def verify(self) -> None:
        """Nothing decays: there are no bytes."""

    def flush(self) -> None:
        """Nothing is kept on disk."""

    def _names(self, tokens: Sequence[int], salt: str) -> tuple[int, ...]:
        return block_hashes(tokens, self._executor.fingerprint, salt=salt)

    def _fit(self) -> None:
        """Rows come first."""
        room = self._executor.free_blocks
        if self._most_blocks is not None:
            room = min(room, self._most_blocks)
        self._cache.shrink(room * BLOCK_TOKENS)
        if len(self._histories) > 2 * len(self._cache) + 1024:
            self._histories = {name: kept for name, kept in self._histories.items() if name in self._cache}
