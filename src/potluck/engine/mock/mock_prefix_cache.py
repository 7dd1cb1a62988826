"""The prefix cache of a mock engine: names of blocks in the memory that running requests leave over.

It is the simulator's (`core.replica.spare_cache`); beside each name is the history that its KV would stand for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import takewhile

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.replica.blocks import CacheChanges
from potluck.core.replica.spare_cache import SpareCache
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.memory.prefix_cache import PrefixCache, Read, ReceivedPrefix
from potluck.engine.mock.mock_executor import DTYPE, NOTHING, MockExecutor, after, chunk_of
from potluck.engine.mock.mock_transfer import KvSizes
from potluck.kv.chunks import KvChunk


def lent(histories: Sequence[int], layer: int, start: int, stop: int) -> KvChunk:
    """What stands for a layer's KV of whole blocks, of tokens [start, stop)."""
    data = struct.pack(f"<{len(histories)}Q", *histories)
    return KvChunk(layer, "latent", start, stop, DTYPE, (len(histories), 2), data)


class MockReceivedPrefix(ReceivedPrefix):
    """Chunks of tokens [start, stop) as they come. Without tokens to go by, a chunk holds the hash at the end of each
    block; all layers say the same."""

    def __init__(self, layers: int, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.histories: tuple[int, ...] = ()
        """At the end of each block."""
        self._layers = set(range(layers))

    def accept(self, chunk: KvChunk) -> None:
        where = f"prefix: layer {chunk.layer} {chunk.part}"
        if chunk.layer not in self._layers:
            raise FormatError(where, "is not expected, or came before")
        count = (self.stop - self.start) // BLOCK_TOKENS
        expected = ("raw", DTYPE, (count, 2), self.start, self.stop, 8 * count)
        text = (chunk.codec, chunk.dtype, tuple(chunk.shape), chunk.first, chunk.stop, len(chunk.data))
        if text != expected:
            raise FormatError(where, f"is {text}, expected {expected}")
        histories = struct.unpack(f"<{count}Q", bytes(chunk.data))
        if self.histories not in ((), histories):
            raise FormatError(where, "is not the KV of the same tokens as another layer's")
        self.histories = histories
        self._layers.remove(chunk.layer)

    def finish(self) -> None:
        if self._layers:
            raise FormatError("prefix", f"{len(self._layers)} chunks are missing")


class MockPrefixCache(PrefixCache):
    def __init__(self, executor: MockExecutor, sizes: KvSizes, most_blocks: int | None = None) -> None:
        """`most_blocks`: no more than that, even if there is room; 0: none at all."""
        super().__init__(executor.config, 0, executor.fingerprint)
        self._executor, self._sizes, self._most_blocks = executor, sizes, most_blocks
        self._cache = SpareCache(BLOCK_TOKENS, sizes.exact, sizes.state_tokens if sizes.exact else 0.0)
        self._histories: dict[int, int] = {}
        executor.grown = self._fit

    @property
    def exact(self) -> bool:
        return self._sizes.exact

    @property
    def enabled(self) -> bool:
        return self._most_blocks != 0

    @property
    def used_bytes(self) -> int:
        return round(self._cache.held_tokens * self._sizes.token_bytes)

    def find(self, tokens: Sequence[int], most_tokens: int, salt: str = "") -> tuple[int, list[KvChunk]]:
        if not len(self._cache) or most_tokens < BLOCK_TOKENS:
            return 0, []
        names = self._hashes(tokens[:most_tokens], salt)
        depth = self._cache.match(names)
        if not depth:
            return 0, []
        self._cache.keep(names[:depth])  # It was used just now.
        count, history = depth * BLOCK_TOKENS, self._histories[names[depth - 1]]
        return count, [chunk_of(history, layer, 0, count) for layer in range(self._sizes.layers)]

    def keep(self, tokens: Sequence[int], held: int, read: Read, salt: str = "") -> None:
        if not self.enabled or held < BLOCK_TOKENS or (self.exact and held % BLOCK_TOKENS):
            return  # Where states are kept there must be one, and there is one only at the row's present length.
        names = self._hashes(tokens[:held], salt)
        history, histories = NOTHING, self._histories
        for place, name in enumerate(names):
            known = histories.get(name) if name in self._cache else None
            if known is None:
                known = after(history, tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
                histories[name] = known
            history = known
        self._cache.keep(names)
        self._fit()

    def held(self, names: Sequence[int]) -> int:
        return self._cache.match(names) * BLOCK_TOKENS

    def lacks_from(self, names: Sequence[int]) -> int:
        most = len(names) - 1 if self.exact else len(names)
        return min(self._depth(names), most) * BLOCK_TOKENS

    def lend(self, names: Sequence[int], start: int) -> list[KvChunk]:
        stop = len(names) * BLOCK_TOKENS
        if self.held(names) != stop:
            raise InputError("prefix", "is no longer held here")
        self._cache.keep(names)  # It was used just now.
        histories = [self._histories[name] for name in names[start // BLOCK_TOKENS :]]
        return [lent(histories, layer, start, stop) for layer in range(self._sizes.layers)]

    def gathering(self, start: int, stop: int) -> MockReceivedPrefix:
        return MockReceivedPrefix(self._sizes.layers, start, stop)

    def adopt(self, names: tuple[int, ...], came: ReceivedPrefix) -> int:
        assert isinstance(came, MockReceivedPrefix), "as `gathering` made it"
        came.finish()
        if self._depth(names) * BLOCK_TOKENS < came.start:
            raise CapacityError("the blocks before those that came have gone meanwhile")
        self._histories.update(zip(names[came.start // BLOCK_TOKENS :], came.histories, strict=True))
        self._cache.keep(names)
        self._fit()
        return self.held(names)

    def _depth(self, names: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(self._cache.__contains__, names))

    def changes(self) -> CacheChanges:
        return self._cache.changes()

    def everything(self) -> CacheChanges:
        return self._cache.everything()

    def _fit(self) -> None:
        """Rows come first."""
        room = self._executor.free_blocks
        if self._most_blocks is not None:
            room = min(room, self._most_blocks)
        self._cache.shrink(room * BLOCK_TOKENS)
        if len(self._histories) > 2 * len(self._cache) + 1024:
            self._histories = {name: kept for name, kept in self._histories.items() if name in self._cache}
