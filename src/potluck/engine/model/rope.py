"""Rotary positions: the angles, and turning a vector by them.

The two numbers of a pair stand half a head apart. Models that keep them side by side (DeepSeek) have the rows of
their projections reordered when they are loaded; queries and keys are reordered alike, so their products stay.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor

from potluck.engine.model.config import RopeConfig


def frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians per position for each of the `dim` / 2 pairs (float64)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_tokens * plain / (2 * pi)
        spread = rope.high_freq_factor - rope.low_freq_factor
        kept = ((turns - rope.low_freq_factor) / spread).clamp(0, 1)
        return plain * kept + plain / rope.factor * (1 - kept)
    if rope.kind == "yarn":
        # The indices of the pairs that turn so often within the original context.
        spans = [rope.original_tokens / (turns * 2 * pi) for turns in (rope.beta_fast, rope.beta_slow)]
        low, high = (dim * log(span) / (2 * log(rope.theta)) for span in spans)
        if rope.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        spread = 0.001 if low == high else high - low
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / spread).clamp(0, 1)
        return plain / rope.factor * ramp + plain * (1 - ramp)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.factors, dtype=torch.float64)
    return plain


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def amplitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.kind == "longrope":
        return sqrt(1 + log(rope.factor) / log(rope.original_tokens)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def latent_sharpness(rope: RopeConfig) -> float:
    """What DeepSeek multiplies the softmax scale by, for long contexts."""
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_scale(rope.factor, rope.mscale_all_dim) ** 2


def angles(rope: RopeConfig, dim: int, positions: int) -> Tensor:
    """[positions, 2, dim]: the factors of a vector and of its swapped halves, for `turn`."""
    steps = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies(rope, dim).float()[None]
    cos, sin = steps.cos() * amplitude(rope), steps.sin() * amplitude(rope)
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1)


class RopeAngles:
    """What the tokens of a step are turned by, for each number of rotated dimensions."""

    def __init__(self, tables: dict[int, Tensor], positions: Tensor) -> None:
        self.tables = tables
        self._positions = positions
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def by(self, dim: int) -> tuple[Tensor, Tensor]:
        """Two of [tokens, 1, dim], for `turn`; looked up once a step."""
        if dim not in self._found:
            rows = self.tables[dim].index_select(0, self._positions)
            self._found[dim] = rows[:, :1], rows[:, 1:]
        return self._found[dim]


def turn(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the leading numbers of `x` [tokens, heads, dim]; in place."""
    cos, sin = by
    size = cos.shape[-1]
    part, half = x[..., :size], size // 2
    # The arithmetic is float32 whatever the format. One rounding per operation: see exact.py.
    swapped = torch.cat([part[..., half:], part[..., :half]], -1).float().mul_(sin)
    if part.dtype == torch.float32:
        part.mul_(cos).add_(swapped)
    else:
        part.copy_(part.float().mul_(cos).add_(swapped))
    return x


def halves_apart(rope: RopeConfig, head_dim: int, rotated: int) -> Tensor:
    """Indices that bring a stored head into our order; what is not rotated stays behind."""
    index = torch.arange(head_dim)
    if not rope.interleaved:
        return index
    return torch.cat([index[:rotated].view(-1, 2).T.flatten(), index[rotated:]])
