"""One replica's block pool: which prefixes lie in which blocks, and what goes for lack of room.

A block holds 16 tokens of all layers that keep every token; its name is a chained hash of its tokens and all before.
Layers with a window or a state resume only at a *checkpoint*, whole blocks of the same pool (PrfaaS 3.2, Figure 4).
A block is kept only while the one before it is, so matches are found by bisection. What nothing builds on goes, the
least recently used first. The pool holds names and places; its owner holds the data (`kv/prefix_pool.py`)."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from heapq import heappop, heappush
from typing import NamedTuple

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS


class _CacheNode:
    __slots__ = ("children", "marks", "name", "parent", "pins", "places", "queued", "stamp")

    def __init__(
        self, name: Name, parent_node: _CacheNode | None, places: tuple[int, ...], stamp: int
    ) -> None:
        self.name = name
        self.parent = parent_node
        self.places = places  # None left: it is gone.
        self.stamp = stamp
        self.children = 0
        self.pins = 0
        self.queued = False  # Whether the queue has an entry for it, perhaps with an older stamp.
        self.marks: list[_CacheNode] | None = None


class BlockPool:
    """Names and places, and their only mutator. Ask first what there is, then keep what is new."""

    def __init__(self, blocks: int, *, exact: bool = False, block_tokens: int = BLOCK_TOKENS) -> None:
        if blocks < 0 or block_tokens < 1:
            raise InputError("block pool", "needs a size that is not negative and blocks of a token or more")
        self.blocks = blocks
        self.exact = exact  # Whether only checkpoints can be resumed.
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._nodes: dict[int, _CacheNode] = {}
        self._root = _CacheNode(0, None, (), 0)
        self._marks: dict[Checkpoint, _CacheNode] = {}
        self._queue: list[tuple[int, int, _CacheNode]] = []
        """What may be able to go: (stamp when it was put here, number, node)."""
        self._pushed = 0
        self._tick = 0
        self._block_news: dict[int, bool] = {}
        self._mark_news: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._nodes) + len(self._marks)

    def __contains__(self, name: Name) -> bool:
        return name in (self._marks if isinstance(name, Checkpoint) else self._nodes)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def places(self, name: Name) -> tuple[int, ...]:
        return self._node(name).places

    def names(self) -> Iterable[Name]:
        """All blocks and checkpoints; a block before what builds on it."""
        yield from self._nodes
        yield from self._marks

    def depth(self, hashes: Sequence[int]) -> int:
        nodes = self._nodes
        return bisect_left(hashes, True, key=lambda name: name not in nodes)

    def longest(
        self, tokens: Sequence[int], hashes: Sequence[int], most_tokens: int, root: int = 0
    ) -> PrefixHit:
        """What there is of a prompt, at most `most_tokens`; a use. `root` tells checkpoints without a block apart."""
        if most_tokens < 1:
            return NOTHING
        depth = self.depth(hashes)
        if not self.exact:
            depth = min(depth, most_tokens // self.block_tokens)
            if depth:
                self._tick += 1
                self._nodes[hashes[depth - 1]].stamp = self._tick
            return PrefixHit(depth * self.block_tokens, depth, None, depth)
        node: _CacheNode | None = self._nodes[hashes[depth - 1]] if depth else self._root
        blocks = depth
        while node is not None:
            after = hashes[blocks - 1] if blocks else root
            best = _longest_rest(node, after, tokens, blocks * self.block_tokens, most_tokens)
            if best is not None:
                self._tick += 1
                best.stamp = self._tick
                assert isinstance(best.name, Checkpoint)
                size = blocks * self.block_tokens + len(best.name.rest)
                return PrefixHit(size, blocks, best.name, depth)
            node = node.parent
            blocks -= 1
        return PrefixHit(0, 0, None, depth)

    def keep(self, hashes: Sequence[int]) -> tuple[list[BlockPlacement], list[BlockPlacement]]:
        """Keep a chain of blocks as far as there is room: (the new ones in order, those that went)."""
        depth, node = self._end(hashes)
        if depth == len(hashes):
            return [], []
        node.pins += 1
        gone = self._make_room(len(hashes) - depth)
        node.pins -= 1
        new = []
        for name in hashes[depth : depth + len(self._free)]:
            places = (self._free.pop(),)
            node = self._add_block(name, node, places)
            new.append(BlockPlacement(name, places))
        self._enqueue(node)
        return new, gone

    def keep_checkpoint(
        self, hashes: Sequence[int], rest: Sequence[int], blocks: int, root: int = 0
    ) -> tuple[BlockPlacement | None, list[BlockPlacement]]:
        """A checkpoint of so many blocks, behind a chain that is kept: (it, unless there or too large; who went)."""
        checkpoint = Checkpoint(hashes[-1] if hashes else root, tuple(rest))
        parent_node = self._nodes.get(hashes[-1]) if hashes else self._root
        if parent_node is None or blocks < 1 or len(hashes) + blocks > self.blocks:
            return None, []
        self._tick += 1
        there = self._marks.get(checkpoint)
        if there is not None:
            there.stamp = self._tick
            return None, []
        parent_node.pins += 1
        gone = self._make_room(blocks)
        parent_node.pins -= 1
        if len(self._free) < blocks:
            self._enqueue(parent_node)
            return None, gone
        node = _CacheNode(checkpoint, parent_node, self._take(blocks), self._tick)
        parent_node.children += 1
        parent_node.marks = [*(parent_node.marks or ()), node]
        self._marks[checkpoint] = node
        self._enqueue(node)
        if hashes and not rest:
            _note(self._mark_news, hashes[-1], True)
        return BlockPlacement(checkpoint, node.places), gone

    def drop(self, name: Name) -> list[BlockPlacement]:
        """It turned out to be bad: it goes, and all that builds on it, pinned or not."""
        lost = {id(self._node(name))}
        later = [node for node in self._nodes.values() if self._behind(node, lost)]
        marks = [mark for mark in self._marks.values() if id(mark) in lost or id(mark.parent) in lost]
        return [self._remove(node) for node in (*marks, *reversed(later))]

    def changes(self) -> CacheChanges:
        """What the world should hear, since it was last asked for. What came and went in between is in neither."""
        blocks, marks = self._block_news, self._mark_news
        cache_changes = CacheChanges(
            tuple(name for name, here in blocks.items() if here),
            tuple(name for name, here in blocks.items() if not here),
            tuple(name for name, here in marks.items() if here),
            tuple(name for name, here in marks.items() if not here),
        )
        blocks.clear()
        marks.clear()
        return cache_changes

    def everything(self) -> CacheChanges:
        """All there is, for one who has lost track; `changes` goes on from here."""
        self._block_news.clear()
        self._mark_news.clear()
        marked = tuple(mark.after for mark in self._marks if mark.after and not mark.rest)
        return CacheChanges(tuple(self._nodes), (), marked)

    def check(self) -> None:
        """Every block is in one place, every count is right; AssertionError if not."""
        nodes = [*self._nodes.values(), *self._marks.values()]
        used = [place for node in nodes for place in node.places]
        if sorted(used + self._free) != list(range(self.blocks)):
            raise AssertionError(f"{self.blocks} blocks, {len(used)} used, {len(self._free)} free")
        blocks = set(self._nodes.values())
        counts: dict[int, int] = {}
        for node in nodes:
            parent_node = node.parent
            if parent_node is None or (parent_node is not self._root and parent_node not in blocks):
                raise AssertionError(f"{node.name} is kept without what comes before it")
            counts[id(parent_node)] = counts.get(id(parent_node), 0) + 1
        for node in [self._root, *nodes]:
            if node.children != counts.get(id(node), 0):
                raise AssertionError(f"{node.name} counts {node.children} behind it")
            if node is not self._root and not (node.children or node.pins or node.queued):
                raise AssertionError(f"{node.name} could never go")

    # Inside.

    def _node(self, name: Name) -> _CacheNode:
        node = self._marks.get(name) if isinstance(name, Checkpoint) else self._nodes.get(name)
        if node is None:
            raise InputError("block pool", f"{name} is not kept")
        return node

    def _behind(self, node: _CacheNode, lost: set[int]) -> bool:
        if id(node) in lost or id(node.parent) in lost:
            lost.add(id(node))
            return True
        return False

    def _end(self, hashes: Sequence[int]) -> tuple[int, _CacheNode]:
        """How many leading blocks there are and the last of these, used now. The others must all be new."""
        depth = self.depth(hashes)
        others = hashes[depth:]
        if not self._nodes.keys().isdisjoint(others) or len(set(others)) != len(others):
            raise InputError("block pool", "names must be chained: none without those before it, none twice")
        self._tick += 1
        node = self._nodes[hashes[depth - 1]] if depth else self._root
        node.stamp = self._tick
        return depth, node

    def _take(self, blocks: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(blocks))

    def _add_block(self, name: int, parent_node: _CacheNode, places: tuple[int, ...]) -> _CacheNode:
        node = self._nodes[name] = _CacheNode(name, parent_node, places, self._tick)
        parent_node.children += 1
        _note(self._block_news, name, True)
        return node

    def _enqueue(self, node: _CacheNode) -> None:
        if not (node.children or node.pins or node.queued) and node is not self._root and node.places:
            node.queued = True
            self._pushed += 1
            heappush(self._queue, (node.stamp, self._pushed, node))

    def _make_room(self, blocks: int) -> list[BlockPlacement]:
        gone = []
        queue = self._queue
        while len(self._free) < blocks and queue:
            stamp, _, node = heappop(queue)
            node.queued = False
            if node.children or node.pins or not node.places:
                continue
            if node.stamp != stamp:
                self._enqueue(node)
                continue
            gone.append(self._remove(node))
        return gone

    def _remove(self, node: _CacheNode) -> BlockPlacement:
        name, parent_node, places = node.name, node.parent, node.places
        assert parent_node is not None
        if isinstance(name, Checkpoint):
            del self._marks[name]
            assert parent_node.marks is not None
            parent_node.marks = [mark for mark in parent_node.marks if mark is not node] or None
            if name.after and not name.rest:
                _note(self._mark_news, name.after, False)
        else:
            del self._nodes[name]
            _note(self._block_news, name, False)
        self._free.extend(places)
        node.places = ()
        parent_node.children -= 1
        parent_node.stamp = max(parent_node.stamp, node.stamp)
        self._enqueue(parent_node)
        return BlockPlacement(name, places)


def _longest_rest(
    node: _CacheNode, after: int, tokens: Sequence[int], start: int, most_tokens: int
) -> _CacheNode | None:
    """The checkpoint behind a block, or behind a root, that goes furthest along `tokens`."""
    best, most = None, -1
    for mark in node.marks or ():
        assert isinstance(mark.name, Checkpoint)
        rest = mark.name.rest
        size = len(rest)
        if not most < size <= most_tokens - start or mark.name.after != after:
            continue
        if rest and tuple(tokens[start + size - 1 : start + size]) != rest[-1:]:
            continue  # the last token tells most of them apart
        if tuple(tokens[start : start + size]) == rest:
            best, most = mark, size
    return best


def _note(news: dict[int, bool], name: int, here: bool) -> None:
    """Note a change, unless it undoes one that nobody has heard of."""
    if news.pop(name, here) is here:
        news[name] = here


HASH_BYTES = 16  # Wide enough that nobody can make two prefixes of one name, and so read another's cache.


LONGEST_SALT = 200
RUN_BLOCKS = 16  # Blocks that a name book remembers together.


def chain_root(model: str = "", salt: str = "") -> bytes:
    """Where the names of a model's blocks begin: its fingerprint, then the salt of who shares with nobody else."""
    root = blake2b(model.encode(), digest_size=HASH_BYTES).digest()
    if not salt:
        return root
    # Under a person of its own, since a salt may read like the tokens of a block.
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(root + text, digest_size=HASH_BYTES, person=b"potluck salt").digest()


def block_hashes(
    tokens: Sequence[int], model: str = "", block_tokens: int = BLOCK_TOKENS, salt: str = ""
) -> tuple[int, ...]:
    """The names of the whole blocks in `tokens`. Different models share nothing, nor do different salts (tenants)."""
    return names_behind(chain_root(model, salt), tokens, block_tokens)


def names_behind(before: bytes, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
    """The names of the whole blocks in tokens that come behind a root, or behind a block (`as_bytes`)."""
    count = len(tokens) // block_tokens
    numbers: list[int] = []
    _chain(before, _packed(tokens, count * block_tokens), 8 * block_tokens, numbers)
    return tuple(numbers)


def as_bytes(name: int) -> bytes:
    return name.to_bytes(HASH_BYTES, "little")


class BlockNamer:
    """Names for one who names prompts all day: an LRU cache of runs of blocks, by a hash of all tokens so far."""

    def __init__(self, runs: int = 4096, block_tokens: int = BLOCK_TOKENS) -> None:
        """A run takes half a kilobyte."""
        self._most, self._block_tokens = runs, block_tokens
        self._known: dict[bytes, bytes] = {}
        """A run's hash to its names, as they are hashed, one behind the other."""

    def names(self, tokens: Sequence[int], model: str = "", salt: str = "") -> tuple[int, ...]:
        size = 8 * self._block_tokens
        data = _packed(tokens, len(tokens) // self._block_tokens * self._block_tokens)
        run_bytes, known = RUN_BLOCKS * size, self._known
        name, start = chain_root(model, salt), 0
        numbers: list[int] = []
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
                numbers += named
            else:
                places = range(0, len(run), HASH_BYTES)
                numbers += [int.from_bytes(run[at : at + HASH_BYTES], "little") for at in places]
            known[key] = run
            name = run[-HASH_BYTES:]
            start += run_bytes
        _chain(name, data[start:], size, numbers)
        return tuple(numbers)


def _packed(tokens: Sequence[int], count: int) -> bytes:
    try:
        return struct.pack(f"<{count}q", *(tokens if count == len(tokens) else tokens[:count]))
    except struct.error as error:
        raise InputError("tokens", "must be whole numbers of 64 bits") from error


def _chain(name: bytes, data: bytes, size: int, numbers: list[int]) -> bytes:
    """The names of blocks of so many bytes behind `name`; the last one as it is hashed."""
    hashed, number = blake2b, int.from_bytes
    for start in range(0, len(data), size):
        name = hashed(name + data[start : start + size], digest_size=HASH_BYTES).digest()
        numbers.append(number(name, "little"))
    return name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A length at which everything can be resumed: `rest` tokens behind block `after` (0, or a salt's: none)."""

    after: int
    rest: tuple[int, ...] = ()


Name = int | Checkpoint


class PrefixHit(NamedTuple):
    tokens: int
    blocks: int
    checkpoint: Checkpoint | None = None
    shared_blocks: int = 0
    """Blocks that there are, also behind the last checkpoint: others came this way, so one is wanted there."""


NOTHING = PrefixHit(0, 0)


class BlockPlacement(NamedTuple):
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
