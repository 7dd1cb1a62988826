"""How a layer's keys and values lie in vLLM's blocks, and how they cross: tokens x 2 x heads x width, in their order.

What crosses says nothing of blocks, so sender and receiver may have blocks of unlike sizes and orders, and codecs see
keys and values as they are. vLLM has a layer as (blocks, heads, tokens of a block, content), whatever the strides.

`PlainBlocks`: content is a token's key and then its value (GPUs), or one latent.
`PackedBlocks`: a head's block is all its keys and then all its values, in an order that suits the processor's
instructions (CPUs). Which order that is, is found out: numbers are written by vLLM's own function, and then looked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.kv.assembly import first_needed
from potluck.kv.codec_layout import ITEM_BYTES, Part

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Keys and values (tokens, heads, width) into a cache (blocks, heads, tokens, content) at slots."""
DIGIT = 128
"""Numbers below this are exact in every format."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV: what a token of it is."""

    part: Part
    heads: int
    width: int
    dtype: str
    block_tokens: int

    def of(self, tokens: int) -> tuple[int, ...]:
        return (tokens, 2, self.heads, self.width) if self.part == "kv" else (tokens, self.heads, self.width)

    @property
    def token_bytes(self) -> int:
        return (2 if self.part == "kv" else 1) * self.heads * self.width * ITEM_BYTES[self.dtype]


Table = tuple[int, ...]
"""A request's blocks, in the order of its tokens."""
Tables = Sequence[Sequence[int]]
"""Of one request: its blocks, one list for each group of layers that vLLM gives blocks to together."""


class LayerBlocks(Protocol):
    """One layer's blocks."""

    shape: LayerShape
    device: torch.device

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        """Tokens [first, stop) of a request whose blocks are these; a new tensor, on the blocks' device."""

    def write(self, table: Table, first: int, values: Tensor) -> None:
        """Tokens from `first` on."""


NO_BLOCK = 0
"""Stands where vLLM has given a block back, or never took one: a window has passed it."""


@dataclass(frozen=True, slots=True)
class VllmLayer:
    """A layer's blocks, and which of a request's tables they are in."""

    blocks: LayerBlocks
    group: int = 0
    window: int | None = None
    """Tokens that a query sees, where vLLM keeps no others."""

    @property
    def shape(self) -> LayerShape:
        return self.blocks.shape

    def first(self, start: int, stop: int) -> int:
        """The first token behind `start` that crosses in a hand-over up to `stop`."""
        return first_needed(start, stop, self.window)

    def read(self, tables: Tables, first: int, stop: int) -> Tensor:
        return self.blocks.read(self._table(tables, first, stop), first, stop)

    def write(self, tables: Tables, first: int, values: Tensor) -> None:
        self.blocks.write(self._table(tables, first, first + len(values)), first, values)

    def _table(self, tables: Tables, first: int, stop: int) -> Table:
        table, size = tables[self.group], self.shape.block_tokens
        used = table[first // size : -(-stop // size)]
        if len(used) * size < stop - first // size * size or NO_BLOCK in used:
            raise InputError("vLLM", f"holds no blocks for all of the tokens [{first}, {stop})")
        return tuple(table)


@lru_cache(maxsize=64)
def slots(table: Table, first: int, stop: int, size: int, pinned: bool) -> Tensor:
    """Each token's block and its place in that, 2 x tokens. All layers ask for the same, one after the other."""
    places = torch.arange(first, stop)
    found = torch.stack((torch.tensor(table, dtype=torch.long)[places // size], places % size))
    return found.pin_memory() if pinned else found


class PlainBlocks:
    def __init__(self, cache: Tensor, part: Part) -> None:
        _, heads, tokens, content = cache.shape
        self.shape = LayerShape(
            part, heads, content // 2 if part == "kv" else content, format_of(cache), tokens
        )
        self._cache, self.device = cache, cache.device

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        blocks, places = self._slots(table, first, stop)
        found = self._cache[blocks, :, places]
        return self._split(found).contiguous()

    def write(self, table: Table, first: int, values: Tensor) -> None:
        blocks, places = self._slots(table, first, first + len(values))
        if self.shape.part == "kv":
            values = values.permute(0, 2, 1, 3).reshape(len(values), self.shape.heads, -1)
        self._cache[blocks, :, places] = values.to(self._cache.device)

    def _split(self, found: Tensor) -> Tensor:
        if self.shape.part != "kv":
            return found
        return found.view(len(found), self.shape.heads, 2, self.shape.width).permute(0, 2, 1, 3)

    def _slots(self, table: Table, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Launched and not waited for: whoever computes calls this between two layers."""
        found = slots(table, first, stop, self.shape.block_tokens, self.device.type == "cuda")
        blocks, places = found.to(self.device, non_blocking=True)
        return blocks, places


class PackedBlocks:
    def __init__(self, cache: Tensor, write: Write) -> None:
        blocks, heads, tokens, content = cache.shape
        self.shape = LayerShape("kv", heads, content // 2, format_of(cache), tokens)
        self._cache, self._write, self.device = cache, write, cache.device
        self._halves = cache.view(blocks, heads, 2, tokens * content // 2)
        self._order = order(cache, write)

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        shape, size = self.shape, self.shape.block_tokens
        used = torch.tensor(table[first // size : -(-stop // size)], dtype=torch.long)
        halves = self._halves[used]
        each = [halves[:, :, half, self._order[half]] for half in (0, 1)]
        found = torch.stack(each, 1).view(len(used), 2, shape.heads, size, shape.width)
        found = found.permute(0, 3, 1, 2, 4).reshape(len(used) * size, 2, shape.heads, shape.width)
        skipped = first // size * size
        return found[first - skipped : stop - skipped].contiguous()

    def write(self, table: Table, first: int, values: Tensor) -> None:
        blocks, places = slots(table, first, first + len(values), self.shape.block_tokens, False)
        at = blocks * self.shape.block_tokens + places
        self._write(values[:, 0].contiguous(), values[:, 1].contiguous(), self._cache, at)


def order(cache: Tensor, write: Write) -> tuple[Tensor, Tensor]:
    """Where a block's keys, and its values, are found, token by token: two lists of places in half a head's block."""
    _, heads, tokens, content = cache.shape
    width = content // 2
    number = torch.arange(tokens * width).view(tokens, 1, width).expand(tokens, heads, width)
    found = torch.zeros(2, tokens * width, dtype=torch.long)
    digits = 1
    while digits < tokens * width:
        trial = torch.zeros(2, heads, tokens, content, dtype=cache.dtype)
        digit = (number // digits % DIGIT).to(cache.dtype).contiguous()
        write(digit, digit.clone(), trial, torch.arange(tokens, 2 * tokens))
        found += trial[1].view(heads, 2, -1)[-1].float().round().long() * digits
        digits *= DIGIT
    if not all(torch.equal(half.sort().values, torch.arange(tokens * width)) for half in found):
        raise InputError("vLLM", "lays out its blocks in a way that this connector cannot follow")
    return found[0].argsort(), found[1].argsort()


def format_of(cache: Tensor) -> str:
    name = str(cache.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise InputError("--kv-cache-dtype", f"{name} cannot be handed over; {', '.join(ITEM_BYTES)} can")
    return name
