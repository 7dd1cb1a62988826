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
from dataclasses import dataclass, replace

import numpy as np

from potluck.core.values.plan import Deployment, Plan, Template
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.assemble.columns import egress_usd_per_h, fleet_of
from potluck.plan.assemble.term_rows import charges_of, rent_usd_per_h, require_rows, suits
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory, allocated
from potluck.plan.templates.combo import efficiency_tokens_per_usd, served_per_s

Weight = Callable[[Floats, Floats], Floats]
Efficiency = Callable[[ModelDemand, Template], float]
ByModel = Mapping[str, Sequence[Template]]
MOST_COLUMNS = 20_000
"""Combos in all regions: with more the solver would take far longer than any limit before it is asked to stop."""
BOUND_SHARE = 0.25  # Of the time that is left, for the bound that says how far a choice is from the cheapest.


def efficient(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Combos counted in GPUs, each with equation 15 of its two types."""
    ranks = {(each.prefill, each.decode): each.ce_tokens_per_usd for each in factory.ranked(demand)}

    def ends(template: Template) -> tuple[str, str]:
        first_layout, last = template.replicas[0].layout, template.replicas[-1].layout
        return first_layout.stages[0].nodes[0].node, last.stages[0].nodes[0].node

    combos = [each for each in factory.gpu_combos(demand) if ends(each) in ranks]
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
    templates = {demand.name: efficient(factory, demand) for demand in factory.problem.asks}
    chosen = _choose(
        factory, settings, "cauchy-ce", templates, _over, lambda demand, template: template.ce_tokens_per_usd
    )
    if chosen is None:
        return _cauchy(factory, settings, "cauchy-ce", lambda price, efficiency: price)
    return _settled(factory, settings, "cauchy-ce", templates, chosen)


def _over(price: Floats, efficiency: Floats) -> Floats:
    return price / efficiency


def _cauchy(factory: TemplateFactory, settings: SolveSettings, name: str, weight: Weight) -> PlanOutcome:
    require_rows(factory.problem, name)
    templates = {demand.name: factory.combos(demand) for demand in factory.problem.asks}
    chosen = _choose(factory, settings, name, templates, weight, _served(factory))
    if chosen is None:  # the fallback: as much as the fleet can do
        return allocated(factory, settings, name, templates)
    return _settled(factory, settings, name, templates, chosen)


def _served(factory: TemplateFactory) -> Efficiency:
    prices = factory.prices
    return lambda demand, template: efficiency_tokens_per_usd(demand, template, prices)


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


@dataclass(frozen=True, slots=True, eq=False)
class ComboColumns:
    """Combos in regions that could host them, as arrays."""

    templates: list[Template]
    model: Ints
    region: Ints
    uses: Ints  # [columns, node types of the problem]
    goodput_per_s: Floats
    weight: Floats


def _columns(
    factory: TemplateFactory, templates: ByModel, weight: Weight, efficiency: Efficiency
) -> ComboColumns | None:
    problem, parts = factory.problem, list[ComboColumns]()
    node_supply = fleet_of(problem)
    places = {node: place for place, node in enumerate(node_supply.nodes)}
    for m, demand in enumerate(problem.asks):
        able = [(t, rate) for t in templates[demand.name] if (rate := served_per_s(demand, t)) > 0]
        mine = [template for template, _ in able]
        uses = np.zeros((len(mine), len(places)), np.int64)
        for row, template in enumerate(mine):
            for count in template.nodes:
                uses[row, places[count.node]] = count.count
        rates = np.array([rate for _, rate in able]) * problem.headroom
        fine = np.array([suits(demand, template) for template in mine], bool)
        worth = np.array([efficiency(demand, template) for template in mine])
        for r, region in enumerate(problem.regions):
            there = (uses <= node_supply.available[r]).all(axis=1)
            there &= fine & demand.terms.allows(region.name)
            rows = np.flatnonzero(there)
            cost = weight(uses[rows] @ node_supply.price_usd_per_h[r], worth[rows])
            here = np.full(len(rows), r)
            parts.append(
                ComboColumns([mine[row] for row in rows], here * 0 + m, here, uses[rows], rates[rows], cost)
            )
    if not any(len(part.templates) for part in parts):
        return None
    names = ("model", "region", "uses", "goodput_per_s", "weight")
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return ComboColumns([template for part in parts for template in part.templates], *arrays)


def _best(all_columns: ComboColumns, few: int) -> ComboColumns:
    """Per model and region a few: those of the least weight for what they serve."""
    rank = all_columns.weight / all_columns.goodput_per_s
    kept: list[Ints] = []
    place = all_columns.model * (1 + all_columns.region.max()) + all_columns.region
    for one in np.unique(place):
        rows = np.flatnonzero(place == one)
        kept.append(np.sort(rows[np.argsort(rank[rows], kind="stable")[:few]]))
    chosen = np.concatenate(kept)
    return ComboColumns(
        [all_columns.templates[row] for row in chosen],
        all_columns.model[chosen],
        all_columns.region[chosen],
        all_columns.uses[chosen],
        all_columns.goodput_per_s[chosen],
        all_columns.weight[chosen],
    )


def _choose(
    factory: TemplateFactory,
    settings: SolveSettings,
    name: str,
    templates: ByModel,
    weight: Weight,
    efficiency: Efficiency,
) -> tuple[Deployment, ...] | None:
    """The paper's counts; None where there are none, or none were found in time."""
    problem, result = factory.problem, _columns(factory, templates, weight, efficiency)
    if result is None:
        return None
    if (every := len(result.templates)) > MOST_COLUMNS:
        result = _best(result, MOST_COLUMNS // (len(problem.asks) * len(problem.regions)))
        factory.cut_short[name] = f"chose from the {len(result.templates):,} best of {every:,} combos"
    node_supply, count = fleet_of(problem), len(result.templates)
    row, kind = np.nonzero(result.uses)
    scale = float(result.weight.max()) or 1.0
    answer = solve_milp(
        Milp(
            cost=result.weight / scale,
            lower=np.zeros(count),
            upper=np.full(count, np.inf),
            integer=np.ones(count, bool),
            row_lower=np.array(
                [demand.rate_per_s for demand in problem.asks] + [-np.inf] * node_supply.available.size
            ),
            row_upper=np.concatenate([np.full(len(problem.asks), np.inf), node_supply.available.ravel()]),
            row=np.concatenate(
                [result.model, len(problem.asks) + result.region[row] * len(node_supply.nodes) + kind]
            ),
            column=np.concatenate([np.arange(count), row]),
            value=np.concatenate([result.goodput_per_s, result.uses[row, kind]]).astype(np.float64),
        ),
        time_limit_s=settings.left_s,
        gap_rel=1e-6,
    )
    if answer.x is None:
        return None
    return tuple(
        Deployment(template.name, problem.regions[region].name, int(n))
        for n, template, region in zip(
            answer.x.round().tolist(), result.templates, result.region.tolist(), strict=True
        )
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
