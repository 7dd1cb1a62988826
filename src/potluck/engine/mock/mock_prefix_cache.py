"""The prefix cache of a mock engine: names of blocks in the memory that running requests leave over.

It is the simulator's (`core.replica.spare_cache`); beside each name is the history that its KV would stand for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import takewhile

from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.replica.blocks import CacheChanges, block_hashes
from potluck.core.replica.spare_cache import SpareCache
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.memory.prefix_cache import PrefixReceiver, Read
from potluck.engine.mock.mock_executor import DTYPE, NOTHING, MockExecutor, after, chunk_of
from potluck.engine.mock.mock_transfer import KvSizes
from potluck.kv.chunks import KvChunk


def lent(histories: Sequence[int], layer: int, start: int, stop: int) -> KvChunk:
    """What stands for a layer's KV of whole blocks, of tokens [start, stop)."""
    data = struct.pack(f"<{len(histories)}Q", *histories)
    return KvChunk(layer, "latent", start, stop, DTYPE, (len(histories), 2), data)


class MockReceivedPrefix:
    """Chunks of tokens [start, stop) as they come. Without tokens to go by, a chunk holds the hash at the end of each
    block; all layers say the same."""

    def __init__(self, layers: int, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.histories: tuple[int, ...] | None = None
        self._missing = set(range(layers))

    def accept(self, chunk: KvChunk) -> None:
        where = f"prefix: layer {chunk.layer} {chunk.part}"
        if chunk.layer not in self._missing:
            raise FormatError(where, "is not expected, or came before")
        count = (self.stop - self.start) // BLOCK_TOKENS
        expected = ("raw", DTYPE, (count, 2), self.start, self.stop, 8 * count)
        text = (chunk.codec, chunk.dtype, tuple(chunk.shape), chunk.first, chunk.stop, len(chunk.data))
        if text != expected:
            raise FormatError(where, f"is {text}, expected {expected}")
        histories = struct.unpack(f"<{count}Q", bytes(chunk.data))
        if self.histories not in (None, histories):
            raise FormatError(where, "is not the KV of the same tokens as another layer's")
        self.histories = histories
        self._missing.remove(chunk.layer)

    def finish(self) -> tuple[int, ...]:
        """The history at the end of each block."""
        if self._missing or self.histories is None:
            raise FormatError("prefix", f"{len(self._missing)} chunks are missing")
        return self.histories


class MockPrefixCache:
    """As `memory.prefix_cache.PrefixCache`, without bytes. Changed by the engine's loop alone."""

    def __init__(self, executor: MockExecutor, sizes: KvSizes, most_blocks: int | None = None) -> None:
        """`most_blocks`: no more than that, even if there is room; 0: none at all."""
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
        """As they would be."""
        return round(self._cache.held_tokens * self._sizes.token_bytes)

    def find(self, tokens: Sequence[int], most_tokens: int, salt: str = "") -> tuple[int, list[KvChunk]]:
        """The longest known prefix of at most so many tokens, and the chunks of [0, that)."""
        if not len(self._cache) or most_tokens < BLOCK_TOKENS:
            return 0, []
        names = self._names(tokens[:most_tokens], salt)
        depth = self._cache.match(names)
        if not depth:
            return 0, []
        self._cache.keep(names[:depth])  # It was used just now.
        count, history = depth * BLOCK_TOKENS, self._histories[names[depth - 1]]
        return count, [chunk_of(history, layer, 0, count) for layer in range(self._sizes.layers)]

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

    # Between two engines, by the names of blocks.

    def held(self, names: Sequence[int]) -> int:
        """Tokens of the longest prefix of these blocks that can be resumed."""
        return self._cache.match(names) * BLOCK_TOKENS

    def lacks_from(self, names: Sequence[int]) -> int:
        """The token behind the leading blocks that are here; what a peer has to send begins there."""
        # Of the last block there is always something to send: what windows and states have behind it.
        most = len(names) - 1 if self.exact else len(names)
        return min(self._depth(names), most) * BLOCK_TOKENS

    def lend(self, names: Sequence[int], start: int) -> list[KvChunk]:
        """The chunks of these blocks from token `start` on."""
        stop = len(names) * BLOCK_TOKENS
        if self.held(names) != stop:
            raise InputError("prefix", "is no longer held here")
        self._cache.keep(names)  # It was used just now.
        histories = [self._histories[name] for name in names[start // BLOCK_TOKENS :]]
        return [lent(histories, layer, start, stop) for layer in range(self._sizes.layers)]

    def gathering(self, start: int, stop: int) -> MockReceivedPrefix:
        """For what is to come of the blocks of tokens [start, stop)."""
        return MockReceivedPrefix(self._sizes.layers, start, stop)

    def adopt(self, names: tuple[int, ...], prefix_receiver: PrefixReceiver) -> int:
        """Keep what came of these blocks; how many tokens of them can be resumed now."""
        assert isinstance(prefix_receiver, MockReceivedPrefix), "as `gathering` made it"
        histories = prefix_receiver.finish()
        if self._depth(names) * BLOCK_TOKENS < prefix_receiver.start:
            raise CapacityError("the blocks before those that came have gone meanwhile")
        self._histories.update(zip(names[prefix_receiver.start // BLOCK_TOKENS :], histories, strict=True))
        self._cache.keep(names)
        self._fit()
        return self.held(names)

    def _depth(self, names: Sequence[int]) -> int:
        """How many leading blocks there are."""
        return sum(1 for _ in takewhile(self._cache.__contains__, names))

    # What there is.

    def changes(self) -> CacheChanges:
        return self._cache.changes()

    def everything(self) -> CacheChanges:
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
