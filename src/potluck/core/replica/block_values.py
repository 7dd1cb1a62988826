"""What a block pool is asked and what it answers: names, and what was found, placed and changed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from potluck.core.brain.facts import BLOCK_TOKENS

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
    rest: tuple[int, ...] = ()


Name = int | Checkpoint


class Found(NamedTuple):
    """The longest prefix that can be resumed."""

    tokens: int
    blocks: int
    checkpoint: Checkpoint | None = None
    shared_blocks: int = 0
    """Blocks that there are, also behind the last checkpoint: others came this way, so one is wanted there."""


NOTHING = Found(0, 0)


class Placed(NamedTuple):
    """Something new, and the blocks that it goes to."""

    name: Name
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What came and went, net, since last asked for. `marked`: blocks at whose end everything can be resumed."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    unmarked: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.marked or self.unmarked)
