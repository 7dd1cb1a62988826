"""What an engine acts as that has no GPU: a model on the GPUs that a plan has for it."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.values.layout import Layout
from potluck.core.values.precision import Format


@dataclass(frozen=True, slots=True)
class EmulatedReplica:
    """A model by its name in the catalog, laid out as planned."""

    model: str
    layout: Layout
    links: tuple[tuple[str, str, float, float], ...] = ()
    """(from machine, to machine, gbps, round trip in s) where the layout names machines; else their cards count."""
    weights: Format | None = None
    """In which they are; None: as the catalog has them."""
