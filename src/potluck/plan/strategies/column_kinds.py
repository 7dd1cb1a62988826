"""Which templates each strategy chooses from. One place, so that whoever scales chooses from the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from potluck.core.values.plan import Template
from potluck.plan.problem import ModelDemand
from potluck.plan.strategies.template_factory import TemplateFactory


def efficient(factory: TemplateFactory, ask: ModelDemand) -> list[Template]:
    """Combos counted in GPUs, each with equation 15 of its two types."""
    ranks = {(each.prefill, each.decode): each.ce_tokens_per_usd for each in factory.ranked(ask)}

    def ends(template: Template) -> tuple[str, str]:
        first, last = template.replicas[0].layout, template.replicas[-1].layout
        return first.stages[0].nodes[0].node, last.stages[0].nodes[0].node

    return [replace(each, ce_tokens_per_usd=ranks[ends(each)]) for each in factory.gpu_combos(ask)]


def distinct(factory: TemplateFactory, ask: ModelDemand) -> list[Template]:
    """All kinds but groups."""
    return [*whole_nodes(factory, ask), *factory.pipelines(ask)]


def whole_nodes(factory: TemplateFactory, ask: ModelDemand) -> list[Template]:
    """The same without pipelines, one template per name: an aggregated combo is a mixed replica."""
    made = [
        *factory.homogeneous(ask),
        *factory.combos(ask),
        *factory.gpu_combos(ask),
        *factory.pairs(ask),
        *factory.aggregated(ask),
    ]
    return list({template.name: template for template in made}.values())


KINDS: dict[str, Callable[[TemplateFactory, ModelDemand], list[Template]]] = {
    "auto": distinct,
    "melange": lambda factory, ask: factory.mixed(ask),
    "cauchy": lambda factory, ask: factory.combos(ask),
    "cauchy-mc": lambda factory, ask: factory.combos(ask),
    "cauchy-mce": lambda factory, ask: factory.combos(ask),
    "cauchy-ce": efficient,
    "cronus": lambda factory, ask: [*factory.mixed(ask), *factory.pairs(ask)],
    "prfaas": lambda factory, ask: factory.phased(ask),
    "coral": lambda factory, ask: [*factory.phased(ask), *factory.pipelines(ask)],
}
"""Strategy to the templates of a model. `homo` picks a type for the demand at hand, `thunderserve` names machines:
nothing else may be started for them."""


def templates_of(factory: TemplateFactory, strategy: str, ask: ModelDemand) -> list[Template]:
    make = KINDS.get(strategy)
    return [] if make is None else make(factory, ask)
