"""One replica's prefix cache: which blocks of which prefixes are kept, and what goes when there is no room.

A block is named by a hash that is chained: it stands for its own tokens and all before them, so a prompt finds what
it shares with others by comparing names from the front. A block is kept only while the one before it is: each use
of a prefix makes its blocks more recent from the last to the first, and the least recent goes first.

Layers with a window or a state cannot resume after any block, only at lengths where what they need was put aside: a
checkpoint, named by the blocks before it and the tokens behind those. It goes before its blocks do.

The index holds names and sizes; whoever owns it holds the data, and copies it into a sequence that begins. So a
block is never shared between running sequences, and nothing needs to be counted or pinned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from potluck.core.errors import InputError
from potluck.core.facts import BLOCK_TOKENS

HASH_BYTES = 16
"""Wide enough that nobody can make two prefixes of one name, and so read another's cache."""


def block_hashes(
    tokens: Sequence[int], salt: str = "", block_tokens: int = BLOCK_TOKENS, most: int | None = None
) -> tuple[int, ...]:
    """The names of the whole blocks in `tokens`; different salts (models, tenants) share nothing."""
    name = blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    found = []
    count = len(tokens) // block_tokens
    for index in range(count if most is None else min(count, most)):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        name = blake2b(name + struct.pack(f"<{block_tokens}q", *block), digest_size=HASH_BYTES).digest()
        found.append(int.from_bytes(name, "little"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A length at which everything can be resumed: behind the block `after` (0: none), `rest` further tokens."""

    after: int
    rest: tuple[int, ...]


Name = int | Checkpoint


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix that can be resumed."""

    tokens: int
    blocks: int
    checkpoint: Checkpoint | None = None


NOTHING = Found(0, 0)


class BlockIndex:
    """Names and sizes of what is kept, and their only mutator."""

    __slots__ = ("_block_tokens", "_checkpoints", "_sizes", "capacity_bytes", "exact", "used_bytes")

    def __init__(self, capacity_bytes: int, *, exact: bool = False, block_tokens: int = BLOCK_TOKENS) -> None:
        if capacity_bytes < 0 or block_tokens < 1:
            raise InputError(
                "prefix cache", "needs a size that is not negative and blocks of a token or more"
            )
        self.capacity_bytes = capacity_bytes
        self.exact = exact
        """Whether only checkpoints can be resumed."""
        self.used_bytes = 0
        self._block_tokens = block_tokens
        self._sizes: dict[Name, int] = {}
        """Least recently used first."""
        self._checkpoints: dict[int, list[Checkpoint]] = {}
        """By the block that they stand behind."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        return name in self._sizes

    def longest(self, tokens: Sequence[int], hashes: Sequence[int], most_tokens: int) -> Found:
        """What there is of a prompt, at most `most_tokens`; the use counts as recent."""
        if most_tokens < 1:
            return NOTHING
        depth = 0
        while depth < len(hashes) and hashes[depth] in self._sizes:
            depth += 1
        if not self.exact:
            depth = min(depth, most_tokens // self._block_tokens)
            self._touch(hashes[:depth])
            return Found(depth * self._block_tokens, depth)
        for blocks in range(depth, -1, -1):
            start = blocks * self._block_tokens
            behind = self._checkpoints.get(hashes[blocks - 1] if blocks else 0, ())
            fitting = [
                item
                for item in behind
                if start + len(item.rest) <= most_tokens
                and tuple(tokens[start : start + len(item.rest)]) == item.rest
            ]
            if fitting:
                best = max(fitting, key=lambda item: len(item.rest))
                self._touch([*hashes[:blocks], best])
                return Found(start + len(best.rest), blocks, best)
        return NOTHING

    def keep(self, hashes: Sequence[int], block_bytes: int) -> tuple[list[int], list[Name]]:
        """Keep a chain of blocks as far as there is room: (places in the chain that are new, names that went)."""
        fitting = hashes[: self.capacity_bytes // block_bytes] if block_bytes else hashes
        new = [place for place, name in enumerate(fitting) if name not in self._sizes]
        for place in new:
            self._sizes[fitting[place]] = block_bytes
            self.used_bytes += block_bytes
        self._touch(fitting)
        return new, self._evict()

    def keep_checkpoint(
        self, hashes: Sequence[int], rest: Sequence[int], size_bytes: int
    ) -> tuple[Checkpoint | None, list[Name]]:
        """Keep a checkpoint behind blocks that are all kept: (it, unless there already or too large; who went)."""
        checkpoint = Checkpoint(hashes[-1] if hashes else 0, tuple(rest))
        below = sum(self._sizes.get(name, 0) for name in hashes)
        if any(name not in self._sizes for name in hashes) or below + size_bytes > self.capacity_bytes:
            return None, []
        if checkpoint in self._sizes:
            self._touch([*hashes, checkpoint])
            return None, []
        self._sizes[checkpoint] = size_bytes
        self.used_bytes += size_bytes
        self._checkpoints.setdefault(checkpoint.after, []).append(checkpoint)
        self._touch([*hashes, checkpoint])
        return checkpoint, self._evict()

    def _touch(self, chain: Sequence[Name]) -> None:
        for name in reversed(chain):
            self._sizes[name] = self._sizes.pop(name)

    def _evict(self) -> list[Name]:
        gone: list[Name] = []
        while self.used_bytes > self.capacity_bytes:
            name = next(iter(self._sizes))
            self.used_bytes -= self._sizes.pop(name)
            if isinstance(name, Checkpoint):
                behind = self._checkpoints[name.after]
                behind.remove(name)
                if not behind:
                    del self._checkpoints[name.after]
            gone.append(name)
        return gone
