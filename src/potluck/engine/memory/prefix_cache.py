"""Prefix caching: the caches of prompts that were computed, kept as bytes, and put into sequences that begin alike.

It is a hand-over to oneself: chunks out of one row, and later into another. Layers that keep every token are stored
block by block, so that prefixes share what they have in common. If there are others (windows, states), what they need
at the end of the prefix is stored as a checkpoint, with what paged layers have behind the last whole block.
`kv.prefix_pool` holds the bytes, `core.replica.blocks` says what is where and what goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck.core.replica.blocks import CacheChanges, PrefixHit, block_hashes, chain_root
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Attention, FullAttention, LatentAttention, LinearAttention, Model
from potluck.engine.model.config import EngineModelConfig
from potluck.kv.chunks import KvChunk
from potluck.kv.codec_layout import Part
from potluck.kv.disk_tier import DiskTier
from potluck.kv.prefix_pool import PrefixPool


def expected_parts(
    model: Model, start: int, stop: int
) -> dict[tuple[int, Part], tuple[int, tuple[int, ...]]]:
    """(layer, part) to the first token and the shape of what must come for blocks [start, stop)."""
    result: dict[tuple[int, Part], tuple[int, tuple[int, ...]]] = {}
    for place, layer in enumerate(model.layers):
        kind = layer.attention
        if isinstance(kind, LatentAttention):
            shape = (stop - start, 1, kind.kv_lora_rank + kind.qk_rope_head_dim)
            result[place, "latent"] = start, shape
        elif isinstance(kind, FullAttention):
            first = start if kind.window is None else max(0, stop - kind.window + 1)
            result[place, "kv"] = first, (stop - first, 2, kind.kv_heads, kind.head_dim)
        elif isinstance(kind, LinearAttention):
            result[place, "conv"] = stop, (kind.conv_kernel - 1, kind.conv_channels)
            result[place, "memory"] = stop, (kind.value_heads, kind.key_head_dim, kind.value_head_dim)
    return result


Read = Callable[[int, int, int], tuple[KvChunk, ...]]
"""(layer, start, stop) to what that layer has of a row."""


def keeps_all(attention: Attention) -> bool:
    """Whether the layer's cache is one entry per token, all kept."""
    if isinstance(attention, FullAttention):
        return attention.window is None
    return isinstance(attention, LatentAttention)


class PrefixCache:
    def __init__(
        self,
        config: EngineModelConfig,
        capacity_bytes: int,
        fingerprint: str = "",
        disk: DiskTier | None = None,
    ) -> None:
        attentions = [layer.attention for layer in config.model.layers]
        self._paged = [index for index, kind in enumerate(attentions) if keeps_all(kind)]
        self._others = [index for index, kind in enumerate(attentions) if not keeps_all(kind)]
        self._capacity_bytes = capacity_bytes
        self._fingerprint = fingerprint
        self._disk = disk
        self._pool: PrefixPool | None = None
        """Made when the first prefix is kept: only then is it known how large a block is."""
        self._kinds: list[tuple[KvChunk, int]] = []
        """Of each paged layer an empty chunk, and the bytes of a block."""

    @property
    def exact(self) -> bool:
        """Whether a prefix can be resumed only at lengths at which `keep` was called."""
        return bool(self._others)

    @property
    def used_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.used_bytes

    @property
    def enabled(self) -> bool:
        return self._capacity_bytes > 0

    def find(self, tokens: Sequence[int], most_tokens: int, salt: str = "") -> tuple[int, list[KvChunk]]:
        """The longest known prefix of at most so many tokens, and the chunks of [0, that).

        Only what was kept under the same salt is known.
        """
        if self._pool is None or most_tokens < 1:
            return 0, []
        hashes = self._hashes(tokens[:most_tokens], salt)
        prefix_hit = self._pool.find(tokens, hashes, most_tokens, self._root(salt))
        return prefix_hit.tokens, self._chunks(self._pool, hashes, prefix_hit) if prefix_hit.tokens else []

    def keep(self, tokens: Sequence[int], held: int, read: Read, salt: str = "") -> None:
        """Keep what a row has of its first `held` tokens, which is all that it holds."""
        if not self.enabled or not held:
            return
        hashes = self._hashes(tokens[:held], salt)
        if hashes:
            self._keep_blocks(hashes, read)
        if self.exact:
            self._keep_rest(tokens, hashes, held, read, self._root(salt))

    # What there is.

    def changes(self) -> CacheChanges:
        """Blocks that came and went since last asked for, for whoever keeps track of who has what."""
        return CacheChanges() if self._pool is None else self._pool.changes()

    def everything(self) -> CacheChanges:
        """All that there is; `changes` goes on from here."""
        return CacheChanges() if self._pool is None else self._pool.everything()

    def verify(self) -> None:
        """Something to do when idle: look for bytes that have changed, and for blocks that are lost."""
        if self._pool is not None:
            self._pool.verify()
            self._pool.check()

    def flush(self) -> None:
        """Before the process ends: what is in memory goes to disk, where there is one."""
        if self._pool is not None:
            self._pool.flush()

    def _hashes(self, tokens: Sequence[int], salt: str) -> tuple[int, ...]:
        return block_hashes(tokens, self._fingerprint, salt=salt) if self._paged else ()

    def _root(self, salt: str) -> int:
        """What checkpoints stand behind that have no block before them."""
        return int.from_bytes(chain_root(self._fingerprint, salt), "little") if salt else 0

    def _keep_blocks(self, hashes: tuple[int, ...], read: Read) -> None:
        known = 0 if self._pool is None else self._pool.index.depth(hashes)
        start, stop = known * BLOCK_TOKENS, len(hashes) * BLOCK_TOKENS
        runs = [read(layer, start, stop)[0] for layer in self._paged] if start < stop else []
        pool = self._made(runs)
        sizes = [size for _, size in self._kinds]
        new = [
            [memoryview(run.data)[place * size :][:size] for run, size in zip(runs, sizes, strict=True)]
            for place in range(len(hashes) - known)
        ]
        pool.keep(hashes, new)

    def _keep_rest(
        self, tokens: Sequence[int], hashes: tuple[int, ...], held: int, read: Read, root: int
    ) -> None:
        whole = len(hashes) * BLOCK_TOKENS
        chunks = [chunk for layer in self._others for chunk in read(layer, 0, held)]
        ends = [read(layer, whole, held)[0] for layer in self._paged] if whole < held else []
        about = [(p.layer, p.part, p.first, p.stop, p.dtype, p.shape, len(p.data)) for p in chunks + ends]
        head = json.dumps(about).encode()
        pieces = [len(head).to_bytes(4, "little"), head, *(chunk.data for chunk in chunks + ends)]
        self._made(ends, sum(map(len, pieces))).keep_checkpoint(hashes, tokens[whole:held], pieces, root)

    def _made(self, runs: list[KvChunk], otherwise_bytes: int = 0) -> PrefixPool:
        """The pool. Its blocks are 16 tokens of all paged layers; without any, as large as the first checkpoint."""
        if self._pool is None:
            for run in runs:
                size = len(run.data) // run.shape[0] * BLOCK_TOKENS
                self._kinds.append((replace(run, first=0, stop=0, data=b""), size))
            block_bytes = sum(size for _, size in self._kinds) or otherwise_bytes
            self._pool = PrefixPool(self._capacity_bytes, block_bytes, exact=self.exact, disk=self._disk)
        return self._pool

    def _chunks(
        self, pool: PrefixPool, hashes: Sequence[int], prefix_hit: PrefixHit, skip: int = 0
    ) -> list[KvChunk]:
        """Those of [0, found), but of layers that keep every token without the first blocks."""
        # Copies, since they may be put aside while others use the pool.
        tail = [] if prefix_hit.checkpoint is None else _unpacked(bytes(pool.read(prefix_hit.checkpoint)))
        chunks = [chunk for chunk in tail if chunk.layer in self._others]
        ends = {chunk.layer: chunk.data for chunk in tail if chunk.layer not in self._others}
        blocks = [memoryview(pool.read(name)) for name in hashes[skip : prefix_hit.blocks]]
        at, first = 0, skip * BLOCK_TOKENS
        for kind, size in self._kinds:
            pieces = [block[at : at + size] for block in blocks]
            data = b"".join([*pieces, ends[kind.layer]] if kind.layer in ends else pieces)
            shape = (prefix_hit.tokens - first, *kind.shape[1:])
            chunks.append(replace(kind, first=first, stop=prefix_hit.tokens, shape=shape, data=data))
            at += size
        return chunks


def _unpacked(content: bytes) -> list[KvChunk]:
    view = memoryview(content)
    start = 4 + int.from_bytes(view[:4], "little")
    unpacked = []
    for layer, part, first, stop, dtype, shape, size in json.loads(bytes(view[4:start])):
        unpacked.append(KvChunk(layer, part, first, stop, dtype, tuple(shape), view[start : start + size]))
        start += size
    return unpacked
