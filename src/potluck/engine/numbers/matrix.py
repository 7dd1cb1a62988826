"""Weights as matrices, and products with them.

Where a CPU has matrix tiles (Intel AMX) and the weights fit into 16 bits each, as they were stored, they are laid out
for `kernels/products.py`: as exact as float32, several times as fast. Everywhere else torch multiplies, with rows
added where its library wants some (`RowPadding`). Which of these it is depends on the weights and the machine alone,
never on the rows, so that cutting work changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from potluck.engine.numbers.exact import PLAIN, RowPadding, filling_for, multiply, on_gpu, rms_norm

ROWS, DEPTH, PARTS, WIDE, STRIP = 16, 32, 3, 4, 64
"""As in kernels/products.py, which is slow to load and not needed with a GPU."""
TILED = WIDE * ROWS
"""Widths that are not filled up are multiples of this."""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class TiledMatrix:
    """A matrix [depth, width] for the tiles of a CPU."""

    __slots__ = ("_tiles", "depth", "operand", "padded", "width")

    def __init__(self, depth: int, width: int, tiles: Tensor) -> None:
        """`tiles` is [columns, depth / 32, 16, 32], 16 pairs of rows by 16 columns, filled up with zeros."""
        self.depth, self.width = depth, width
        self.padded = tiles.shape[0] * ROWS
        self._tiles = tiles
        self.operand = (tiles.data_ptr(), depth // DEPTH, tiles.shape[0])
        """As the kernels want it."""

    def product(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        from potluck.engine.numbers.kernels.products import multiply

        if x.stride(1) != 1:
            x = x.contiguous()
        rows, wide = x.shape[0], self.padded
        out = torch.empty(rows, wide)
        scales, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        source, stride = (residual.data_ptr(), 4 * residual.stride(0)) if residual is not None else (0, 0)
        tiles, depth, columns = self.operand

        def some(begin: int, stop: int) -> None:
            parts, shapes = _scratch(self.depth)
            place = 4 * TILED * begin
            weight = (tiles + 2 * TILED * begin * self.depth, depth, WIDE * (stop - begin))
            rest = (source + place if source else 0, stride, out.data_ptr() + place, 4 * wide)
            given = (rows, x.data_ptr(), 4 * x.stride(0), scales, eps, weight)
            multiply(*given, *rest, parts.data_ptr(), shapes)

        over_threads(columns // WIDE, thread_count(rows * self.depth * wide), some)
        return out if wide == self.width else out[:, : self.width]


def _scratch(depth: int) -> tuple[Tensor, np.ndarray]:
    return torch.empty(STRIP * depth * (2 * PARTS + 4), dtype=torch.uint8), np.zeros(64, np.uint8)


@dataclass(frozen=True, slots=True)
class PaddedMatrix:
    """A matrix [depth, width] that torch multiplies with more rows than there are."""

    weight: Tensor
    filling: RowPadding


Matrix = Tensor | TiledMatrix | PaddedMatrix
"""[in, out]"""


@cache
def _have_tiles() -> bool:
    from potluck.engine.numbers.kernels.products import available

    return available()


def across(weight: Tensor) -> Matrix:
    """A matrix as `product` wants it: [in, out], from [out, in] as it is stored."""
    if weight.device.type != "cpu":
        return weight.contiguous().T  # a slice of wider rows is not aligned, and several times as slow
    if weight.dtype == torch.float32 and weight.shape[1] % DEPTH == 0:
        short = weight.bfloat16()
        if torch.equal(short.float(), weight) and _have_tiles():
            return _tiled(short)
    # A CPU is a tenth faster when it also lies in memory like that.
    matrix, padding = weight.T.contiguous(), filling_for(weight.dtype) or PLAIN
    return matrix if padding == PLAIN else PaddedMatrix(matrix, padding)


def _tiled(weight: Tensor) -> TiledMatrix:
    width, depth = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -width % (WIDE * ROWS)))
    tiles = padded.view(-1, ROWS, depth // DEPTH, ROWS, 2).permute(0, 2, 3, 1, 4)
    return TiledMatrix(
        depth, width, tiles.reshape(len(padded) // ROWS, depth // DEPTH, ROWS, DEPTH).contiguous()
    )


def product(x: Tensor, weight: Matrix, bias: Tensor | None = None, *, norm: Norm | None = None) -> Tensor:
    """norm(x) @ weight + bias."""
    if isinstance(weight, TiledMatrix):
        out = weight.product(x, norm, None)
        return out if bias is None else out.add_(bias)
    x = x if norm is None else norm(x)
    if isinstance(weight, PaddedMatrix):
        return multiply(x, weight.weight, weight.filling, bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def add_product(residual: Tensor, x: Tensor, weight: Matrix) -> Tensor:
    """residual + x @ weight; on a GPU in place."""
    if isinstance(weight, TiledMatrix):
        if weight.width == weight.padded:
            return weight.product(x, None, residual)
        return weight.product(x, None, None).add_(residual)
    if isinstance(weight, PaddedMatrix):
        return multiply(x, weight.weight, weight.filling, residual)
    if on_gpu(x):
        return residual.addmm_(x, weight)
    return torch.addmm(residual, x, weight)


def feed_forward(x: Tensor, norm: Norm, up: TiledMatrix, down: TiledMatrix) -> Tensor:
    """x + down(gate(up(norm(x)))), where `gate` halves its rows (ffn.py): in one go, on one thread."""
    from potluck.engine.numbers.kernels import products

    out = torch.empty(x.shape[0], down.padded)
    parts, shapes = _scratch(max(up.depth, down.depth))
    between = torch.empty(STRIP, up.padded * 3 // 2)
    stride, scales, eps = 4 * x.stride(0), norm.weight.data_ptr(), norm.eps
    rest = (up.operand, down.operand, out.data_ptr(), between.data_ptr(), parts.data_ptr(), shapes)
    products.feed_forward(x.shape[0], x.data_ptr(), stride, scales, eps, *rest)
    return out


WORTH = 20_000_000
"""Products for which a thread is woken: some tens of microseconds of work."""


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="potluck-kernel")


def thread_count(work: int) -> int:
    """Threads for so many products."""
    return max(1, min(torch.get_num_threads(), work // WORTH))


def over_threads(count: int, threads: int, call: Callable[[int, int], None]) -> None:
    """`call(begin, stop)` for ranges that together are [0, count)."""
    if threads == 1 or count == 1:
        call(0, count)
        return
    cuts = [count * part // threads for part in range(threads + 1)]
    ranges = [(begin, stop) for begin, stop in pairwise(cuts) if begin < stop]
    others = [_pool(threads - 1).submit(call, *item) for item in ranges[1:]]
    call(*ranges[0])
    for other in others:
        other.result()
