"""Why the answer does not depend on how the work was cut.

A prompt may be computed whole, in chunks of any size, on two machines, beside any neighbours; its greedy tokens must
be the same each time. So on a CPU every row of a step is bit for bit independent of the rows beside it. Most of it by
loops of our own (kernels/), in which every row, and every query, is computed by itself in one fixed order. What is
left to a library takes more care:

- Matrix products. A library picks its algorithm, and so the order of its sums, by shape. With MKL in float32, rows of
  a product differ between 1, 8 and 64 rows, but not in its strict mode (`MKL_CBWR=AUTO,STRICT`, set in
  `__init__.py`): as fast from 16 rows up, half as fast for one. That mode is for Intel's processors: on AMD's, rows
  differ unless there are a multiple of 16. With OpenBLAS, on ARM, only a single row differs.
  `RowPadding` finds out what it takes here, and whether that is enough; `/status` says so.
- Sums over the context, in attention of latent layers. Masked keys are added as zeros, which change nothing as long
  as the sum is cut into the same parts. torch's attention goes through keys 512 at a time; a product over at most 192
  terms is one sum wherever we looked, and the first cut of one over 512 comes behind those. So the last part of a
  call has at most 192 columns or all 512 (`padded_columns`). Short windows are always one sum (`batch_layout.py`).
- Queries of a call, there too: taken 32 (or 64, or 256) at a time, and multiplied as rows of a product are. So there
  are as many as `RowPadding` wants, and never a lone last one, which OpenBLAS takes in another way (`attention`).
- Functions. torch's sigmoid, silu and complex product round otherwise at the last few elements of a tensor; exp does
  not. So `sigmoid` is made of exp here, and positions are turned in real numbers.
- Products of one row per head (`per_head`) take another path than those of many rows, so there are always many.

Machines with and without matrix tiles differ in the last bits, as do those with different vector instructions. On a
GPU results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.engine.numbers import Exactness

LANE = 16
"""Columns are taken in multiples of this, so that no vector is partly filled."""
PART = 512
LONGEST_SUM = 192
LEAST_ROWS = 16
QUERIES = 32


def padded_columns(columns: int) -> int:
    """How many columns of keys to look at, for queries whose last key is the `columns`-th."""
    whole, rest = divmod(columns, PART)
    if rest > LONGEST_SUM:
        return (whole + 1) * PART
    return whole * PART + -(-rest // LANE) * LANE


def sigmoid(x: Tensor) -> Tensor:
    return (torch.exp(-x) + 1).reciprocal()


def silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of a small tensor, in double precision, since log1p is another of those functions."""
    wide = x.double()
    return wide.clamp(min=0).add_(torch.exp(wide.abs().neg_()).add_(1).log_()).to(x.dtype)


def in_vectors(x: Tensor, width: int) -> bool:
    """Whether rows of `x` of so many numbers are for the compiled kernels."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and width % LANE == 0 and x.stride(-1) == 1


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is for triton_kernels.py."""
    return x.is_cuda


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, with half the calls of torch's own."""
    if x.dim() == 2 and in_vectors(x, x.shape[1]):
        from potluck.engine.numbers.kernels.rows import norm

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        norm(*x.shape, x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), eps, out.data_ptr())
        return out
    if x.dim() == 2 and on_gpu(x):
        from potluck.engine.numbers import triton_kernels

        return triton_kernels.norm(x, weight, eps)
    if x.dtype != torch.float32:
        # torch's own takes a weight of the last dimension only; here each head may have its own.
        own = weight if weight.dim() == 1 else None
        out = F.rms_norm(x, x.shape[-1:], own, eps)
        return out if own is not None else out.mul_(weight)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[..., queries, dim] over keys and values that all see alike, but for the mask."""
    count = queries.shape[-2]
    if queries.device.type == "cpu":
        rows = (filling_for(queries.dtype) or PLAIN).rows(count)
        rows += rows % QUERIES == 1
        if rows > count:
            last = [*range(count), *[count - 1] * (rows - count)]
            queries, mask = queries[..., last, :], mask[..., last, :]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)[..., :count, :]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[tokens, heads, a] by [heads, a, b] to [tokens, heads, b]."""
    tokens = x.shape[0]
    if tokens < LEAST_ROWS:
        x = F.pad(x, (0, 0, 0, 0, 0, LEAST_ROWS - tokens))
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)[:tokens]


SHAPES = ((16, 16), (20, 30), (64, 1), (64, 200), (256, 8), (256, 704), (704, 256), (2048, 300))
"""(depth, width) of matrices to try: partly filled vectors, sums in one part and in several, work for threads."""
ROWS = 48
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 33)
CONTEXTS = (40, 200, 720)
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


def multiply(x: Tensor, weight: Tensor, padding: RowPadding, added: Tensor | None = None) -> Tensor:
    """x @ weight + added, which is one row for all, or as many as x has."""
    count = x.shape[0]
    more = padding.rows(count) - count
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
    padding = filling_for(dtype) if device.type == "cpu" else None
    if padding is None:
        return Exactness(False, PLAIN.name)
    return Exactness(not latent or _latent_holds(dtype, torch.get_num_threads()), padding.name)


@cache
def _found(dtype: torch.dtype, threads: int) -> RowPadding | None:
    with torch.inference_mode():
        return next((padding for padding in FILLINGS if rows_are_independent(dtype, padding)), None)


def rows_are_independent(dtype: torch.dtype, padding: RowPadding) -> bool:
    """Whether each row of a product comes out the same alone and among any others."""
    generator = torch.Generator().manual_seed(1)
    for depth, width in SHAPES:
        weight, one = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (depth, 1))
        x, added = (torch.randn(ROWS, columns, generator=generator).to(dtype) for columns in (depth, width))

        def alone(rows: slice, x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return multiply(x[rows], weight, padding)

        def onto_one(rows: slice, x: Tensor = x, weight: Tensor = weight, added: Tensor = one[0]) -> Tensor:
            return multiply(x[rows], weight, padding, added)

        def onto_each(rows: slice, x: Tensor = x, weight: Tensor = weight, added: Tensor = added) -> Tensor:
            return multiply(x[rows], weight, padding, added[rows])

        if not all(_cut_alike(report) for report in (alone, onto_one, onto_each)):
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
    """Queries as a chunk, and each by itself, as model/attention.py has them."""
    kept = torch.randn(1, 1, padded_columns(count), HEAD_DIM, generator=generator).to(dtype)
    queries = torch.randn(chunk_tokens, HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
    ends = torch.arange(count - chunk_tokens, count)

    def mask(columns: int, ends: Tensor) -> Tensor:
        hidden = torch.arange(columns) > ends.view(1, 1, -1, 1)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    everywhere = kept.expand(HEADS, -1, -1, -1)
    together_mask = mask(kept.shape[2], ends)
    chunk = attention(queries.permute(1, 2, 0, 3), everywhere, everywhere, together_mask, 0.2)
    chunk = chunk.permute(2, 0, 1, 3)
    for place, end in enumerate(ends.tolist()):
        columns = padded_columns(end + 1)
        seen, own = kept[:, :, :columns], mask(columns, ends[place]).expand(-1, -1, HEADS, -1)
        rows = queries[place : place + 1].transpose(1, 2)
        alone = attention(rows, seen, seen, own, 0.2)
        if not torch.equal(alone.transpose(1, 2)[0], chunk[place]):
            return False
    return True
