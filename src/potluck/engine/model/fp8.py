"""8-bit floats brought back to the numbers that they stand for; `scales.py` says which files have them."""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.errors import FormatError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SUFFIXES = ("_scale_inv", "_scale")


def brought_back(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, name: str, where: str
) -> Tensor:
    """The numbers that 8-bit floats stand for, in float32."""
    scale = scale.float()
    if not bool(torch.isfinite(scale).all()):
        raise FormatError(where, f"the scale of {name} is not finite; the file is damaged")
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    rows = weight.shape[0]
    if scale.numel() == rows and scale.shape[0] == rows:
        return weight.float() * scale.reshape(rows, *[1] * (weight.dim() - 1))
    if weight.dim() == 2 and scale.dim() == 2:
        high, wide = block or (-(-rows // scale.shape[0]), -(-weight.shape[1] // scale.shape[1]))
        expected = (-(-rows // high), -(-weight.shape[1] // wide))
        if tuple(scale.shape) == expected and (block is not None or _even(weight, scale)):
            whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, : weight.shape[1]]
            return weight.float() * whole
    raise FormatError(
        where, f"the scale of {name} has shape {list(scale.shape)}, which does not fit {list(weight.shape)}"
    )


def _even(weight: Tensor, scale: Tensor) -> bool:
    return weight.shape[0] % scale.shape[0] == 0 and weight.shape[1] % scale.shape[1] == 0
