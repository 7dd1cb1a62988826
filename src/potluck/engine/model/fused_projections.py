"""Projections that a file keeps in one tensor (Phi-3), taken apart by name.

Layers ask for queries, keys and values, and for gate and up, each by itself. `SplitSource` cuts the rows that they
want out of the tensor that has them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from potluck.core.values.model import DenseFfn, FullAttention, Model
from potluck.engine.model.checkpoint import WeightSource
from potluck.engine.model.config import EngineModelConfig

FUSED = ("phi3",)


@dataclass(frozen=True, slots=True)
class SplitSource:
    """A source whose files have `qkv_proj` and `gate_up_proj`."""

    whole: WeightSource
    model: Model

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint

    def has(self, name: str) -> bool:
        part = self._part(name)
        return self.whole.has(name if part is None else part[0])

    def take(self, name: str, *shape: int) -> Tensor:
        part = self._part(name)
        if part is None:
            return self.whole.take(name, *shape)
        fused, sizes, place = part
        tensor = self.whole.take(fused, sum(sizes), *shape[1:])
        first = sum(sizes[:place])
        return tensor[first : first + sizes[place]]

    def _part(self, name: str) -> tuple[str, tuple[int, ...], int] | None:
        """(the tensor with all of them, rows of each, which of them it is)"""
        words = name.split(".")  # model.layers.3.self_attn.q_proj.weight
        if len(words) != 6 or words[1] != "layers":
            return None
        layer, kind = self.model.layers[int(words[2])], words[4]
        if isinstance(layer.attention, FullAttention) and kind in ("q_proj", "k_proj", "v_proj"):
            heads, kv_heads, dim = layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim
            sizes: tuple[int, ...] = (heads * dim, kv_heads * dim, kv_heads * dim)
            return name.replace(kind, "qkv_proj"), sizes, "qkv".index(kind[0])
        if isinstance(layer.ffn, DenseFfn) and kind in ("gate_proj", "up_proj"):
            sizes = (layer.ffn.intermediate,) * 2
            return name.replace(kind, "gate_up_proj"), sizes, ("gate_proj", "up_proj").index(kind)
        return None


def parted(source: WeightSource, config: EngineModelConfig) -> WeightSource:
    """The source as layers ask it."""
    return SplitSource(source, config.model) if config.family in FUSED else source
