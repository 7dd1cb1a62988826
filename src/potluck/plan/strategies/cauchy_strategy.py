"""CAUCHY's allocations over its combos (section 4.3), and the fallback of 3.3.2.

    minimise   Σ_n w_n x_n        x_n copies of combo n, whole
    subject to Σ_n T_mn x_n ≥ D_m for every model m, and the nodes of each type within what there is

    MC-LP    w_n = P_n              the cheapest deployment
    MCE-LP   w_n = 1 / C_n          the most cost-efficient combos, whatever they cost
    CO-LP    w_n = P_n / C_n        both (equation 16)

P_n is the combo's price, T_mn the goodput of the model's own mix of requests, C_n its tokens per dollar: those that
it is seen to serve, or in *cauchy-ce*, as printed, equation 15 of its two GPU types, which also shortlists them
(`templates.gpu_combo`). When the shortlist cannot meet demand, all combos are tried for the least cost, and when
these cannot either, the largest fraction that can is planned instead of giving up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.core.values.plan import Deployment, Plan, Template
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.assemble.columns import egress_usd_per_h
from potluck.plan.assemble.term_rows import charges_of, rent_usd_per_h, require_rows, runs_in
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory, allocated
from potluck.plan.templates.combo import efficiency_tokens_per_usd, served_per_s

Weight = Callable[[float, float], float]
Efficiency = Callable[[ModelDemand, Template], float]
ByModel = Mapping[str, Sequence[Template]]
BOUND_SHARE = 0.25
"""Of the time that is left, for the bound that says how far a choice is from the cheapest."""


def efficient(factory: TemplateFactory, ask: ModelDemand) -> list[Template]:
    """Combos counted in GPUs, each with equation 15 of its two types."""
    ranks = {(each.prefill, each.decode): each.ce_tokens_per_usd for each in factory.ranked(ask)}

    def ends(template: Template) -> tuple[str, str]:
        first, last = template.replicas[0].layout, template.replicas[-1].layout
        return first.stages[0].nodes[0].node, last.stages[0].nodes[0].node

    combos = [each for each in factory.gpu_combos(ask) if ends(each) in ranks]
    return [replace(each, ce_tokens_per_usd=ranks[ends(each)]) for each in combos]


def cauchy_co(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """CO-LP: price over cost efficiency."""
    return _cauchy(factory, settings, "cauchy", _over)


def cauchy_mc(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    return _cauchy(factory, settings, "cauchy-mc", lambda price, efficiency: price)


def cauchy_mce(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """MCE-LP: cost efficiency alone."""
    return _cauchy(factory, settings, "cauchy-mce", lambda price, efficiency: 1.0 / efficiency)


def cauchy_ce(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """CO-LP over combos counted in GPUs, ranked and shortlisted by equation 15."""
    require_rows(factory.problem, "cauchy-ce")
    templates = {ask.name: efficient(factory, ask) for ask in factory.problem.asks}
    chosen = _choose(factory, settings, templates, _over, lambda ask, template: template.ce_tokens_per_usd)
    if chosen is None:
        return _cauchy(factory, settings, "cauchy-ce", lambda price, efficiency: price)
    return _settled(factory, settings, "cauchy-ce", templates, chosen)


def _over(price: float, efficiency: float) -> float:
    return price / efficiency


def _cauchy(factory: TemplateFactory, settings: SolveSettings, name: str, weight: Weight) -> PlanOutcome:
    require_rows(factory.problem, name)
    templates = {ask.name: factory.combos(ask) for ask in factory.problem.asks}
    chosen = _choose(factory, settings, templates, weight, _served(factory))
    if chosen is None:  # the fallback: as much as the fleet can do
        return allocated(factory, settings, name, templates)
    return _settled(factory, settings, name, templates, chosen)


def _served(factory: TemplateFactory) -> Efficiency:
    prices = factory.prices
    return lambda ask, template: efficiency_tokens_per_usd(ask, template, prices)


def _settled(
    factory: TemplateFactory,
    settings: SolveSettings,
    name: str,
    templates: ByModel,
    chosen: tuple[Deployment, ...],
) -> PlanOutcome:
    """The plan with the paper's counts; routing within them is the program's with the counts pinned.

    How far it is from the cheapest plan of the same combos is seen by asking for that one.
    """
    pinned = replace(settings, pins=chosen, running=None)
    kept = {model: _only(group, chosen) for model, group in templates.items()}
    outcome = allocated(factory, pinned, name, kept)
    plan = _with_counts(outcome.plan, chosen, kept, factory.problem)
    short = replace(settings.within(BOUND_SHARE), running=None, pins=())
    bound = allocated(factory, short, name, templates).allocation.lower_bound_usd_per_h
    outcome = replace(outcome, plan=plan)
    cost = outcome.weighed_usd_per_h
    gap = max(0.0, cost - bound) / cost if cost > 0 else 0.0
    return replace(outcome, plan=replace(plan, gap=gap))


Columns = list[tuple[ModelDemand, Template, str, float]]


def _columns(factory: TemplateFactory, templates: ByModel) -> Columns:
    """(ask, combo, region, price) for every combo that a region could host."""
    columns: Columns = []
    for ask in factory.problem.asks:
        for template in templates[ask.name]:
            if served_per_s(ask, template) <= 0:
                continue
            for region in factory.problem.regions:
                if not runs_in(factory.problem, ask, template, region.name):
                    continue
                offers = [region.offer(node_count.node) for node_count in template.nodes]
                if all(o and o.available >= n.count for o, n in zip(offers, template.nodes, strict=True)):
                    price = sum(
                        o.price_usd_per_h * n.count for o, n in zip(offers, template.nodes, strict=True) if o
                    )
                    columns.append((ask, template, region.name, price))
    return columns


def _choose(
    factory: TemplateFactory,
    settings: SolveSettings,
    templates: ByModel,
    weight: Weight,
    efficiency: Efficiency,
) -> tuple[Deployment, ...] | None:
    problem, result = factory.problem, _columns(factory, templates)
    if not result:
        return None
    rows = {("demand", ask.name): i for i, ask in enumerate(problem.asks)}
    lower = [ask.rate_per_s for ask in problem.asks]
    upper = [np.inf] * len(lower)
    for region in problem.regions:
        for offer in region.offers:
            rows[region.name, offer.node] = len(rows)
            lower.append(-np.inf)
            upper.append(float(offer.available))
    entries: list[tuple[int, int, float]] = []
    cost = []
    for column, (ask, template, region_name, price) in enumerate(result):
        cost.append(weight(price, efficiency(ask, template)))
        goodput = served_per_s(ask, template) * problem.headroom
        entries.append((rows["demand", ask.name], column, goodput))
        entries += [(rows[region_name, each.node], column, float(each.count)) for each in template.nodes]
    row, place, value = (np.array(item) for item in zip(*entries, strict=True))
    scale = max(cost) or 1.0
    answer = solve_milp(
        Milp(
            cost=np.array(cost) / scale,
            lower=np.zeros(len(cost)),
            upper=np.full(len(cost), np.inf),
            integer=np.ones(len(cost), bool),
            row_lower=np.array(lower),
            row_upper=np.array(upper),
            row=row.astype(np.int64),
            column=place.astype(np.int64),
            value=value.astype(np.float64),
        ),
        time_limit_s=settings.left_s,
        gap_rel=1e-6,
    )
    if answer.x is None:
        return None
    counts = answer.x.round().astype(int)
    return tuple(
        Deployment(template.name, region, int(n))
        for n, (_, template, region, _) in zip(counts, result, strict=True)
        if n
    )


def _only(templates: Sequence[Template], chosen: tuple[Deployment, ...]) -> list[Template]:
    names = {deployment.template for deployment in chosen}
    return [template for template in templates if template.name in names]


def _with_counts(
    plan: Plan, chosen: tuple[Deployment, ...], kept: Mapping[str, list[Template]], problem: PlanningProblem
) -> Plan:
    """The plan with exactly the chosen counts and their price, also of copies that routing left idle."""
    used = {template.name: template for template in plan.templates}
    templates = tuple(used.get(t.name, t) for group in kept.values() for t in group)
    whole = replace(plan, templates=templates, deployments=chosen)
    charges = charges_of(problem, whole, egress_usd_per_h(problem, whole))
    return replace(whole, cost_usd_per_h=rent_usd_per_h(problem, whole.nodes), charges=charges)
