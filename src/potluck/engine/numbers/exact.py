"""Why the answer does not depend on how the work was cut.

A prompt may be computed whole, in chunks of any size, on two machines, beside any neighbours; its greedy tokens
must be the same each time. It is not enough that the results are nearly the same, since two logits may be nearly
the same too. So on a CPU every row of a step is made bit for bit independent of the rows beside it.

Most of it by loops of our own (kernels/), in which every row, and every query of attention, is computed by itself in
one fixed order: norms, gates, full and window attention, the delta rule, and products with weights of 16 bits where
the processor has matrix tiles. What is left to a library takes more care:

- Matrix products. A library picks its algorithm by shape, and another algorithm adds up in another order. Measured
  with MKL in float32: rows of a product differ in the last bits between 1, 8 and 64 rows. In its strict mode
  (`MKL_CBWR=AUTO,STRICT`, set in `__init__.py`) they do not, at the same speed from 16 rows up and about half the
  speed for one row. With OpenBLAS, on ARM, only a single row differs from all other numbers. `filling.py` finds out
  what it takes here, and whether that is enough; `/status` says so.
- Sums over the context, in attention of latent layers. Keys beyond a query's own position are masked, that is, added
  as zeros. Zeros change nothing as long as the sum is cut into the same parts. Measured: torch's attention goes
  through keys 512 at a time; a product over at most 384 terms is one sum; one over 512 is two halves. So the last
  part of a call has at most 384 columns or all 512 (`padded_columns`), and queries that end between 256 and 384
  within a part, which the second half would cut, go in calls of their own (`cut_of`). Short windows are always
  one sum (`step.py`).
- Queries of a chunk, there too. torch's attention takes them 32 (or 64, or 256) at a time, and OpenBLAS multiplies a
  block of a single one in another way. So a lone last one is computed twice (`chunk_attention`).
- Functions. torch's sigmoid, silu and complex product take another path for the last few elements of a tensor, with
  another rounding; exp, and any single addition or product, does not. So `sigmoid` is made of exp here, and positions
  are turned in real numbers.
- Products of one row per head (`per_head`) take another path than those of many rows, so there are always many.
- Linear attention is computed token by token, never in a chunked form that would round differently.

Machines with and without matrix tiles differ in the last bits, as do those with different vector instructions.

On a GPU nothing of this is promised: there the results are equal up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANE = 16
"""Columns are taken in multiples of this, so that no vector is partly filled."""
PART = 512
HALF = 256
LONGEST_SUM = 384
LEAST_ROWS = 16
QUERIES = 32


def padded_columns(columns: int) -> int:
    """How many columns of keys to look at, for queries whose last key is the `columns`-th."""
    whole, rest = divmod(columns, PART)
    if rest > LONGEST_SUM:
        return (whole + 1) * PART
    return whole * PART + -(-rest // LANE) * LANE


def cut_of(column: int) -> int:
    """Queries whose own columns have the same number here may share a call."""
    part, place = divmod(column, PART)
    return part if HALF <= place < LONGEST_SUM else -1


def next_cut(column: int) -> int:
    """The first column beyond this one where `cut_of` may change."""
    part, place = divmod(column, PART)
    return part * PART + next(cut for cut in (HALF, LONGEST_SUM, PART) if place < cut)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, with half the calls of torch's own."""
    if x.dim() == 2 and in_vectors(x, x.shape[1]):
        from potluck.engine.numbers.kernels.rows import norm

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        norm(*x.shape, x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), eps, out.data_ptr())
        return out
    if x.dtype != torch.float32:
        # torch's own takes a weight of the last dimension only; here each head may have its own.
        own = weight if weight.dim() == 1 else None
        out = F.rms_norm(x, x.shape[-1:], own, eps)
        return out if own is not None else out.mul_(weight)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)


def chunk_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[..., tokens, dim] queries over keys and values that all see alike, but for the mask."""
    count = queries.shape[-2]
    if count % QUERIES == 1:
        queries, mask = (torch.cat([x, x[..., -1:, :]], -2) for x in (queries, mask))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)[..., :count, :]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[tokens, heads, a] by [heads, a, b] to [tokens, heads, b]."""
    tokens = x.shape[0]
    if tokens < LEAST_ROWS:
        x = F.pad(x, (0, 0, 0, 0, 0, LEAST_ROWS - tokens))
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)[:tokens]
