"""The gated feed-forward part: down(silu(gate x) * up x).

Both projections are kept negated. With n = -gate x and m = -up x the product is n m / (1 + exp(n)): no extra pass for
a sign, and silu is made of operations that round alike everywhere (exact.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.engine.exact import across, product
from potluck.engine.loading import Loader


def negated(gate: Tensor, up: Tensor) -> Tensor:
    """Both side by side, as `gated` wants them; matrices as [in, out]."""
    both = torch.cat([gate, up]).neg_()
    return across(both) if both.dim() == 2 else both


def gated(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate x) * up x, from the negated weights."""
    packed = product(x, weight, bias)
    half = packed.shape[1] // 2
    gate = packed[:, :half]
    return (gate * packed[:, half:]).div_(torch.exp(gate).add_(1))


class DenseLayer:
    def __init__(self, hidden: int, width: int, load: Loader, bias: bool = False) -> None:
        names = ("gate_proj", "up_proj")
        self._weight = negated(*(load.take(f"{name}.weight", width, hidden) for name in names))
        self._bias = negated(*(load.take(f"{name}.bias", width) for name in names)) if bias else None
        self._down = across(load.take("down_proj.weight", hidden, width))
        self._down_bias = load.take("down_proj.bias", hidden) if bias else None

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        out = torch.addmm(residual, gated(x, self._weight, self._bias), self._down)
        return out if self._down_bias is None else out.add_(self._down_bias)
