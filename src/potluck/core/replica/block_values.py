"""What a block pool is asked and what it answers: names, and what was found, placed and changed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import NamedTuple

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS

HASH_BYTES = 16
"""Wide enough that nobody can make two prefixes of one name, and so read another's cache."""


LONGEST_SALT = 200
RUN_BLOCKS = 16
"""Blocks that a name book remembers together."""


def chain_root(model: str = "", salt: str = "") -> bytes:
    """Where the names of a model's blocks begin: its fingerprint, then the salt of who shares with nobody else."""
    root = blake2b(model.encode(), digest_size=HASH_BYTES).digest()
    if not salt:
        return root
    # Under a person of its own, since a salt may read like the tokens of a block.
    said = salt.encode("utf-8", "surrogatepass")
    return blake2b(root + said, digest_size=HASH_BYTES, person=b"potluck salt").digest()


def block_hashes(
    tokens: Sequence[int],
    model: str = "",
    block_tokens: int = BLOCK_TOKENS,
    most: int | None = None,
    salt: str = "",
) -> tuple[int, ...]:
    """The names of the whole blocks in `tokens`. Different models share nothing, nor do different salts (tenants)."""
    return names_behind(chain_root(model, salt), tokens, block_tokens, most)


def names_behind(
    before: bytes, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS, most: int | None = None
) -> tuple[int, ...]:
    """The names of the whole blocks in tokens that come behind a root, or behind a block (`as_bytes`)."""
    count = len(tokens) // block_tokens
    if most is not None:
        count = min(count, most)
    found: list[int] = []
    _chain(before, _packed(tokens, count * block_tokens), 8 * block_tokens, found)
    return tuple(found)


def as_bytes(name: int) -> bytes:
    """A name as it goes into those behind it."""
    return name.to_bytes(HASH_BYTES, "little")


class BlockNamer:
    """Names for one who names prompts all day: what begins as an earlier prompt did is not worked out again.

    Remembered are runs of blocks, by a hash of their tokens and all before them; no tokens are. The least recently
    used are forgotten.
    """

    def __init__(self, runs: int = 4096, block_tokens: int = BLOCK_TOKENS) -> None:
        """A run takes half a kilobyte."""
        self._most, self._block_tokens = runs, block_tokens
        self._known: dict[bytes, bytes] = {}
        """A run's hash to its names, as they are hashed, one behind the other."""

    def names(self, tokens: Sequence[int], model: str = "", salt: str = "") -> tuple[int, ...]:
        """What `block_hashes` says."""
        size = 8 * self._block_tokens
        data = _packed(tokens, len(tokens) // self._block_tokens * self._block_tokens)
        run_bytes, known = RUN_BLOCKS * size, self._known
        name, start = chain_root(model, salt), 0
        found: list[int] = []
        while start + run_bytes <= len(data):
            piece = data[start : start + run_bytes]
            key = sha256(name + piece).digest()
            run = known.pop(key, None)
            if run is None:
                named: list[int] = []
                _chain(name, piece, size, named)
                run = b"".join([as_bytes(number) for number in named])
                if len(known) >= self._most:
                    del known[next(iter(known))]
                found += named
            else:
                found += [
                    int.from_bytes(run[place : place + HASH_BYTES], "little")
                    for place in range(0, len(run), HASH_BYTES)
                ]
            known[key] = run
            name = run[-HASH_BYTES:]
            start += run_bytes
        _chain(name, data[start:], size, found)
        return tuple(found)


def _packed(tokens: Sequence[int], count: int) -> bytes:
    try:
        return struct.pack(f"<{count}q", *(tokens if count == len(tokens) else tokens[:count]))
    except struct.error as error:
        raise InputError("tokens", "must be whole numbers of 64 bits") from error


def _chain(name: bytes, data: bytes, size: int, found: list[int]) -> bytes:
    """The names of blocks of so many bytes behind `name`; the last one as it is hashed."""
    hashed, number = blake2b, int.from_bytes
    for start in range(0, len(data), size):
        name = hashed(name + data[start : start + size], digest_size=HASH_BYTES).digest()
        found.append(number(name, "little"))
    return name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A length at which everything can be resumed: behind the block `after`, `rest` further tokens.

    Without a block before it `after` is 0, or what stands for a salt.
    """

    after: int
    rest: tuple[int, ...] = ()


Name = int | Checkpoint


class PrefixHit(NamedTuple):
    """The longest prefix that can be resumed."""

    tokens: int
    blocks: int
    checkpoint: Checkpoint | None = None
    shared_blocks: int = 0
    """Blocks that there are, also behind the last checkpoint: others came this way, so one is wanted there."""


NOTHING = PrefixHit(0, 0)


class BlockPlacement(NamedTuple):
    """Something new, and the blocks that it goes to."""

    name: Name
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """What came and went, net, since last asked for. `marked`: blocks at whose end everything can be resumed."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    unmarked: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.marked or self.unmarked)
