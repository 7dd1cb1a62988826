"""Products whose rows do not depend on each other, whatever library torch has here: found by trying.

A library picks its algorithm by shape. Measured: MKL in its strict mode takes one for all numbers of rows; OpenBLAS
takes another for a single row, which adds up in another order, and one for all others. So a few ways are tried in
turn, the cheapest first, and the first that gives each row the same bits alone and among others is taken. Whoever
takes rows as they are pays nothing for it: that is a plain matrix (`matrix.across`).

The answer depends on the machine, the library, the numbers' format and the threads, not on who asks: every process
of a pipeline finds the same on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.engine.numbers.exact import QUERIES, chunk_attention, padded_columns, per_head
from potluck.engine.numbers.exactness import Exactness

SHAPES = ((16, 16), (20, 30), (64, 1), (64, 200), (256, 8), (256, 704), (704, 256), (2048, 300))
"""(depth, width) of matrices to try: partly filled vectors, sums in one part and in several, work for threads."""
ROWS = 48
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 33)
CONTEXTS = (40, 200, 640)
HEADS, HEAD_DIM = 4, 24


@dataclass(frozen=True, slots=True)
class RowPadding:
    """Rows of zeros are added until there are at least so many, and a multiple of so many."""

    name: str
    least: int = 1
    multiple: int = 1

    def rows(self, count: int) -> int:
        return max(self.least, -(-count // self.multiple) * self.multiple)


PLAIN = RowPadding("plain")
FILLINGS = (PLAIN, RowPadding("pairs", least=2), RowPadding("strips", multiple=16))


def multiply(x: Tensor, weight: Tensor, filling: RowPadding, added: Tensor | None = None) -> Tensor:
    """x @ weight + added, which is one row for all, or as many as x has."""
    count = x.shape[0]
    more = filling.rows(count) - count
    if more:
        x = F.pad(x, (0, 0, 0, more))
        if added is not None and added.dim() == 2:
            added = F.pad(added, (0, 0, 0, more))
    out = torch.mm(x, weight) if added is None else torch.addmm(added, x, weight)
    return out[:count] if more else out


def filling_for(dtype: torch.dtype) -> RowPadding | None:
    """How to multiply on a CPU; None where no way was found."""
    return _found(dtype, torch.get_num_threads())


def exactness(device: torch.device, dtype: torch.dtype, *, latent: bool = False) -> Exactness:
    """Of a model; `latent`: whether it has latent layers, whose attention is left to torch."""
    found = filling_for(dtype) if device.type == "cpu" else None
    if found is None:
        return Exactness(False, PLAIN.name)
    return Exactness(not latent or _latent_holds(dtype, torch.get_num_threads()), found.name)


def together(parts: list[Exactness]) -> Exactness:
    """Of a pipeline whose workers found these."""
    names = sorted({part.products for part in parts})
    return Exactness(all(part.holds for part in parts), "+".join(names))


@cache
def _found(dtype: torch.dtype, threads: int) -> RowPadding | None:
    with torch.inference_mode():
        return next((filling for filling in FILLINGS if rows_are_independent(dtype, filling)), None)


def rows_are_independent(dtype: torch.dtype, filling: RowPadding) -> bool:
    """Whether each row of a product comes out the same alone and among any others."""
    generator = torch.Generator().manual_seed(1)
    for depth, width in SHAPES:
        weight, one = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (depth, 1))
        x, added = (torch.randn(ROWS, columns, generator=generator).to(dtype) for columns in (depth, width))

        def alone(rows: slice, x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return multiply(x[rows], weight, filling)

        def onto_one(rows: slice, x: Tensor = x, weight: Tensor = weight, added: Tensor = one[0]) -> Tensor:
            return multiply(x[rows], weight, filling, added)

        def onto_each(rows: slice, x: Tensor = x, weight: Tensor = weight, added: Tensor = added) -> Tensor:
            return multiply(x[rows], weight, filling, added[rows])

        if not all(_cut_alike(each) for each in (alone, onto_one, onto_each)):
            return False
    return True


def _cut_alike(call: Callable[[slice], Tensor]) -> bool:
    whole = call(slice(0, ROWS))
    parts = [slice(first, first + count) for count in COUNTS for first in (0, ROWS - count)]
    return all(torch.equal(call(part), whole[part]) for part in parts)


@cache
def _latent_holds(dtype: torch.dtype, threads: int) -> bool:
    """What latent layers do beside plain products: products per head, and torch's attention over one key head."""
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        weight = torch.randn(HEADS, HEAD_DIM, 40, generator=generator).to(dtype)
        x = torch.randn(ROWS, HEADS, HEAD_DIM, generator=generator).to(dtype)
        if not _cut_alike(lambda rows: per_head(x[rows], weight)):
            return False
        chunks = (3, QUERIES + 1)
        return all(_attention_is_cut_alike(c, q, generator, dtype) for c in CONTEXTS for q in chunks)


def _attention_is_cut_alike(
    count: int, chunk_tokens: int, generator: torch.Generator, dtype: torch.dtype
) -> bool:
    """Queries as a chunk, and each by itself, as attention/paged.py has them."""
    kept = torch.randn(1, 1, padded_columns(count), HEAD_DIM, generator=generator).to(dtype)
    queries = torch.randn(chunk_tokens, HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
    ends = torch.arange(count - chunk_tokens, count)

    def mask(columns: int, ends: Tensor) -> Tensor:
        hidden = torch.arange(columns) > ends.view(1, 1, -1, 1)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    everywhere = kept.expand(HEADS, -1, -1, -1)
    together_mask = mask(kept.shape[2], ends)
    chunk = chunk_attention(queries.permute(1, 2, 0, 3), everywhere, everywhere, together_mask, 0.2)
    chunk = chunk.permute(2, 0, 1, 3)
    for place, end in enumerate(ends.tolist()):
        columns = padded_columns(end + 1)
        seen, own = kept[:, :, :columns], mask(columns, ends[place]).expand(-1, -1, HEADS, -1)
        rows = queries[place : place + 1].transpose(1, 2)
        alone = F.scaled_dot_product_attention(rows, seen, seen, attn_mask=own, scale=0.2)
        if not torch.equal(alone.transpose(1, 2)[0], chunk[place]):
            return False
    return True
