"""Which templates each strategy chooses from. One place, so that whoever scales chooses from the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from potluck.core.values.plan import Template
from potluck.plan.problem import Ask
from potluck.plan.strategies.base import Workshop


def efficient(workshop: Workshop, ask: Ask) -> list[Template]:
    """Combos counted in GPUs, each with equation 15 of its two types."""
    ranks = {(each.prefill, each.decode): each.ce_tokens_per_usd for each in workshop.ranked(ask)}

    def ends(template: Template) -> tuple[str, str]:
        first, last = template.replicas[0].layout, template.replicas[-1].layout
        return first.stages[0].nodes[0].node, last.stages[0].nodes[0].node

    return [replace(each, ce_tokens_per_usd=ranks[ends(each)]) for each in workshop.gpu_combos(ask)]


def distinct(workshop: Workshop, ask: Ask) -> list[Template]:
    """All kinds but groups."""
    return [*whole_nodes(workshop, ask), *workshop.pipelines(ask)]


def whole_nodes(workshop: Workshop, ask: Ask) -> list[Template]:
    """The same without pipelines, one template per name: an aggregated combo is a mixed replica."""
    made = [
        *workshop.homogeneous(ask),
        *workshop.combos(ask),
        *workshop.gpu_combos(ask),
        *workshop.pairs(ask),
        *workshop.aggregated(ask),
    ]
    return list({template.name: template for template in made}.values())


KINDS: dict[str, Callable[[Workshop, Ask], list[Template]]] = {
    "auto": distinct,
    "melange": lambda workshop, ask: workshop.mixed(ask),
    "cauchy": lambda workshop, ask: workshop.combos(ask),
    "cauchy-mc": lambda workshop, ask: workshop.combos(ask),
    "cauchy-mce": lambda workshop, ask: workshop.combos(ask),
    "cauchy-ce": efficient,
    "cronus": lambda workshop, ask: [*workshop.mixed(ask), *workshop.pairs(ask)],
    "prfaas": lambda workshop, ask: workshop.phased(ask),
    "coral": lambda workshop, ask: [*workshop.phased(ask), *workshop.pipelines(ask)],
}
"""Strategy to the templates of a model. `homo` picks a type for the demand at hand, `thunderserve` names machines:
nothing else may be started for them."""


def templates_of(workshop: Workshop, strategy: str, ask: Ask) -> list[Template]:
    make = KINDS.get(strategy)
    return [] if make is None else make(workshop, ask)
