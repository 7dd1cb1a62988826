"""What all engines of a model can do, beyond running segments: whoever is asked must be able to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from potluck.gateway.interfaces import Endpoint


class ModelAbilities(NamedTuple):
    owns: frozenset[str]
    """Models whose engines take clients' own requests."""
    adapters: dict[str, str]
    """Adapters that all engines of a model have, and the model."""


def skills_of(endpoints: Iterable[Endpoint]) -> ModelAbilities:
    by_model: dict[str, list[Endpoint]] = {}
    for each in endpoints:
        by_model.setdefault(each.model, []).append(each)
    owns = frozenset(model for model, found in by_model.items() if all(each.own for each in found))
    adapters = {
        name: model
        for model, found in by_model.items()
        for name in frozenset.intersection(*(frozenset(each.adapters) for each in found))
        if name not in by_model
    }
    return ModelAbilities(owns, adapters)
