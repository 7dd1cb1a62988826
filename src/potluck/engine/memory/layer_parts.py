"""What each layer of a model hands over, for the books of a hand-over (`kv/assembly.py`)."""

from __future__ import annotations

from potluck.core.values.model import FullAttention, LinearAttention, Model
from potluck.kv.assembly import MissingParts, Range, first_needed

__all__ = ["MissingParts", "first_needed", "ranges"]


def ranges(model: Model, start: int, stop: int) -> dict[tuple[int, str], Range]:
    """What each layer of a model hands over of the tokens [start, stop), by layer and part."""
    found: dict[tuple[int, str], Range] = {}
    for layer, each in enumerate(model.layers):
        attention = each.attention
        if isinstance(attention, LinearAttention):
            found[layer, "conv"] = found[layer, "memory"] = (stop, stop)
        elif isinstance(attention, FullAttention):
            found[layer, "kv"] = (first_needed(start, stop, attention.window), stop)
        else:
            found[layer, "latent"] = (start, stop)
    return found
