"""Prefix caching: the caches of prompts that were computed, kept as bytes, and put into sequences that begin alike.

It is a hand-over to oneself: parcels out of one row, and later into another. Layers that keep every token are stored
block by block, so that prefixes share what they have in common. If there are others (windows, states), what they need
at the end of the prefix is stored beside the blocks, together with the tokens behind the last whole one.
`core.blocks` says what is where and what goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck.core.blocks import BlockIndex, Name, block_hashes
from potluck.core.facts import BLOCK_TOKENS
from potluck.core.model import Attention, FullAttention, LatentAttention
from potluck.engine.config import Config
from potluck.engine.handover import Parcel

Read = Callable[[int, int, int], tuple[Parcel, ...]]
"""(layer, start, stop) to what that layer has of a row."""


def keeps_all(attention: Attention) -> bool:
    """Whether the layer's cache is one entry per token, all kept."""
    if isinstance(attention, FullAttention):
        return attention.window is None
    return isinstance(attention, LatentAttention)


class PrefixCache:
    """Parcels by name. Changed by the engine's loop alone."""

    def __init__(self, config: Config, capacity_bytes: int, salt: str = "") -> None:
        attentions = [layer.attention for layer in config.model.layers]
        self._paged = [index for index, kind in enumerate(attentions) if keeps_all(kind)]
        self._others = [index for index, kind in enumerate(attentions) if not keeps_all(kind)]
        self._index = BlockIndex(capacity_bytes, exact=bool(self._others))
        self._data: dict[Name, tuple[Parcel, ...]] = {}
        self._salt = salt

    @property
    def exact(self) -> bool:
        """Whether a prefix can be resumed only at lengths at which `keep` was called."""
        return self._index.exact

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    @property
    def enabled(self) -> bool:
        return self._index.capacity_bytes > 0

    def find(self, tokens: Sequence[int], most_tokens: int) -> tuple[int, list[Parcel]]:
        """The longest known prefix of at most so many tokens, and the parcels of [0, that)."""
        if not self.enabled or most_tokens < 1 or not self._data:
            return 0, []
        hashes = block_hashes(tokens, self._salt, most=most_tokens // BLOCK_TOKENS)
        found = self._index.longest(tokens, hashes, most_tokens)
        if not found.tokens:
            return 0, []
        parts = [self._data[name] for name in hashes[: found.blocks]]
        tail = () if found.checkpoint is None else self._data[found.checkpoint]
        parcels = [parcel for parcel in tail if parcel.layer in self._others]
        ends = {parcel.layer: parcel for parcel in tail if parcel.layer not in self._others}
        for place, layer in enumerate(self._paged):
            pieces = [part[place] for part in parts] + ([ends[layer]] if layer in ends else [])
            parcels.append(_joined(pieces, found.tokens))
        return found.tokens, parcels

    def keep(self, tokens: Sequence[int], held: int, read: Read) -> None:
        """Keep what a row has of its first `held` tokens, which is all that it holds."""
        if not self.enabled or not held:
            return
        hashes = block_hashes(tokens[:held], self._salt)
        if self._paged and hashes:
            self._keep_blocks(hashes, read)
        if self.exact:
            self._keep_rest(tokens, hashes, held, read)

    def _keep_blocks(self, hashes: tuple[int, ...], read: Read) -> None:
        known = 0
        while known < len(hashes) and hashes[known] in self._index:
            known += 1
        start, stop = known * BLOCK_TOKENS, len(hashes) * BLOCK_TOKENS
        if known == len(hashes):
            self._index.keep(hashes, 0)
            return
        runs = [read(layer, start, stop)[0] for layer in self._paged]
        block_bytes = sum(len(run.data) for run in runs) // (len(hashes) - known)
        new, gone = self._index.keep(hashes, block_bytes)
        for place in new:
            self._data[hashes[place]] = tuple(_block(run, place - known) for run in runs)
        self._forget(gone)

    def _keep_rest(self, tokens: Sequence[int], hashes: tuple[int, ...], held: int, read: Read) -> None:
        whole = len(hashes) * BLOCK_TOKENS
        blocks = hashes if self._paged else ()
        rest = tokens[whole if self._paged else 0 : held]
        parcels = [parcel for layer in self._others for parcel in read(layer, 0, held)]
        if whole < held:
            parcels += [parcel for layer in self._paged for parcel in read(layer, whole, held)]
        size_bytes = sum(len(parcel.data) for parcel in parcels) + 8 * len(rest)
        name, gone = self._index.keep_checkpoint(blocks, rest, size_bytes)
        if name is not None:
            self._data[name] = tuple(replace(parcel, data=bytes(parcel.data)) for parcel in parcels)
        self._forget(gone)

    def _forget(self, names: list[Name]) -> None:
        for name in names:
            del self._data[name]


def _block(run: Parcel, place: int) -> Parcel:
    size = len(run.data) * BLOCK_TOKENS // run.shape[0]
    first = run.first + place * BLOCK_TOKENS
    data = bytes(run.data[place * size : (place + 1) * size])
    shape = (BLOCK_TOKENS, *run.shape[1:])
    return replace(run, first=first, stop=first + BLOCK_TOKENS, shape=shape, data=data)


def _joined(pieces: list[Parcel], stop: int) -> Parcel:
    data = b"".join(piece.data for piece in pieces)
    return replace(pieces[0], first=0, stop=stop, shape=(stop, *pieces[0].shape[1:]), data=data)
