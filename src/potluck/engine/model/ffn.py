"""The gated feed-forward part: down(silu(gate x) * up x).

Both projections are kept negated. With n = -gate x and m = -up x the product is n m / (1 + exp(n)): no extra pass for
a sign, and silu is made of operations that round alike everywhere (exact.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.engine.model.loading import LayerLoader
from potluck.engine.numbers import threads
from potluck.engine.numbers.exact import in_vectors
from potluck.engine.numbers.matrix import (
    TILED,
    Matrix,
    Norm,
    TiledMatrix,
    across,
    add_product,
    feed_forward,
    product,
)


def negated(gate: Tensor, up: Tensor) -> Matrix:
    """Both side by side, as `gated` wants them."""
    return across(torch.cat([gate, up]).neg_())


def gated(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """silu(gate x) * up x, from the negated weights."""
    packed = product(x, weight, bias)
    half = packed.shape[1] // 2
    if in_vectors(packed, half):
        from potluck.engine.numbers.kernels.rows import gate as compiled_gate

        out = torch.empty(packed.shape[0], half)
        compiled_gate(*out.shape, packed.data_ptr(), 4 * packed.stride(0), out.data_ptr())
        return out
    gate = packed[:, :half]
    return (gate * packed[:, half:]).div_(torch.exp(gate).add_(1))


class DenseLayer:
    def __init__(self, hidden: int, width: int, load: LayerLoader, bias: bool = False) -> None:
        names = ("gate_proj", "up_proj")
        self._weight = negated(*(load.take(f"{name}.weight", width, hidden) for name in names))
        self._bias = torch.cat([load.take(f"{name}.bias", width) for name in names]).neg_() if bias else None
        self._down = across(load.take("down_proj.weight", hidden, width))
        self._fits = not bias and hidden % TILED == 0 and width % TILED == 0
        self._down_bias = load.take("down_proj.bias", hidden) if bias else None

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """x + the feed-forward part of norm(x)."""
        up, down = self._weight, self._down
        if isinstance(up, TiledMatrix) and isinstance(down, TiledMatrix) and self._fits:
            # On several threads the two products are cut by themselves, to the same effect.
            alone = threads.parts(x.shape[0] * up.depth * up.padded) == 1
            if alone:
                return feed_forward(x, norm, up, down)
        return self.add(x, norm(x))

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        out = add_product(residual, gated(x, self._weight, self._bias), self._down)
        return out if self._down_bias is None else out.add_(self._down_bias)
