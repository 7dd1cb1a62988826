"""Which prefixes vLLM holds, from what it tells of its blocks, under the names that a prefix index knows.

vLLM names a block by a hash of its own, and says which tokens it has and behind which other block it comes. Here each
becomes the names of its blocks of 16 tokens. The same tokens may lie in several of vLLM's blocks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from potluck.core.replica.block_values import CacheChanges, as_bytes, chain_root, names_behind
from potluck.core.state.facts import BLOCK_TOKENS


class HeldBlocks:
    """Changed by whoever hears vLLM."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        """What names begin with: its fingerprint."""
        self._names: dict[str, tuple[int, ...]] = {}
        """vLLM's hash to ours."""
        self._copies: dict[str, int] = {}
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        """Since `changes`, net."""

    def __len__(self) -> int:
        return len(self._names)

    def stored(
        self, hashes: Sequence[str], parent: str | None, tokens: Sequence[int], size: int, salt: str = ""
    ) -> None:
        """Blocks of `size` tokens came, one behind the other, the first behind `parent` or where a prompt begins."""
        if size < 1 or size % BLOCK_TOKENS or size * len(hashes) != len(tokens):
            return  # not of whole blocks of ours: nobody could name them
        if parent is None:
            before = chain_root(self.model, salt)
        elif parent in self._names:
            before = as_bytes(self._names[parent][-1])
        else:
            return  # what it follows was not told of
        for place, key in enumerate(hashes):
            known = self._names.get(key)
            if known is None:
                known = names_behind(before, tokens[place * size : (place + 1) * size])
                self._names[key] = known
                for name in known:
                    self._came(name)
            self._copies[key] = self._copies.get(key, 0) + 1
            before = as_bytes(known[-1])

    def removed(self, keys: Iterable[str]) -> None:
        for key in keys:
            left = self._copies.get(key, 0) - 1
            if left > 0:
                self._copies[key] = left
            elif left == 0:
                del self._copies[key]
                self._gone(self._names.pop(key))

    def cleared(self) -> None:
        for names in self._names.values():
            self._gone(names)
        self._names.clear()
        self._copies.clear()

    def changes(self) -> CacheChanges:
        found = CacheChanges(tuple(self._added), tuple(self._removed))
        self._added, self._removed = {}, {}
        return found

    def everything(self) -> CacheChanges:
        return CacheChanges(tuple(name for names in self._names.values() for name in names))

    def _came(self, name: int) -> None:
        if name in self._removed:
            del self._removed[name]
        else:
            self._added[name] = None

    def _gone(self, names: Iterable[int]) -> None:
        for name in names:
            if name in self._added:
                del self._added[name]
            else:
                self._removed[name] = None
