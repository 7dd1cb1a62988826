"""What layers are built with: a source of tensors, a prefix, and where the tensors shall live."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from potluck.engine.model.checkpoint import WeightSource


@dataclass(frozen=True, slots=True)
class LayerLoader:
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    norm_plus_one: bool = False

    def under(self, name: str) -> LayerLoader:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.source.take(self.prefix + name, *shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weight, which some models store as the difference from 1."""
        weight = self.take(name, size)
        return weight + 1 if self.norm_plus_one else weight
