"""CAUCHY's allocations over its combos (section 4.3), and the fallback of 3.3.2.

    minimise   Σ_n w_n x_n        x_n copies of combo n, whole
    subject to Σ_n T_mn x_n ≥ D_m for every model m, and the nodes of each type within what there is

    MC-LP    w_n = P_n              the cheapest deployment
    MCE-LP   w_n = 1 / C_n          the most cost-efficient combos, whatever they cost
    CO-LP    w_n = P_n / C_n        both (equation 16)

P_n is the combo's price, T_mn its goodput on the model's mix of requests, and C_n its tokens per dollar. C_n is
computed from that goodput, or in *cauchy-ce*, as printed, by equation 15 for the combo's two GPU types, which also
shortlists the combos (`templates.combo`). When the shortlist cannot meet the demand, the cheapest deployment of all
combos is planned; when that cannot either, the largest fraction of the demand that can be met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from potluck.core.values.plan import Deployment, Plan, Template
from potluck.plan.allocate.highs import Milp, solve_milp
from potluck.plan.allocate.program import Floats, Ints
from potluck.plan.assemble.columns import egress_usd_per_h, fleet_of
from potluck.plan.assemble.term_rows import charges_of, rent_usd_per_h, require_no_row_terms, suits
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory, solve_over
from potluck.plan.templates.combo import efficiency_tokens_per_usd, served_per_s

Weight = Callable[[Floats, Floats], Floats]
Efficiency = Callable[[ModelDemand, Template], float]
TemplatesByModel = Mapping[str, Sequence[Template]]
MAX_COLUMNS = 20_000
"""Combos over all regions. With more, the solver overruns its time limit before it can be interrupted."""
BOUND_SHARE = 0.25  # Share of the time left for the lower bound that the plan's gap is measured against.


def shortlisted_combos(factory: TemplateFactory, demand: ModelDemand) -> list[Template]:
    """Combos counted in GPUs, each with the cost efficiency that equation 15 gives its two node types."""
    efficiencies = {(pair.prefill, pair.decode): pair.ce_tokens_per_usd for pair in factory.ranked(demand)}

    def node_types(template: Template) -> tuple[str, str]:
        prefill, decode = template.replicas[0].layout, template.replicas[-1].layout
        return prefill.stages[0].nodes[0].node, decode.stages[0].nodes[0].node

    combos = [combo for combo in factory.gpu_combos(demand) if node_types(combo) in efficiencies]
    return [replace(combo, ce_tokens_per_usd=efficiencies[node_types(combo)]) for combo in combos]


def cauchy_co(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """CO-LP: weights are price divided by cost efficiency."""
    return _cauchy(factory, settings, "cauchy", _price_per_efficiency)


def cauchy_mc(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """MC-LP: weights are prices."""
    return _cauchy(factory, settings, "cauchy-mc", lambda price, efficiency: price)


def cauchy_mce(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """MCE-LP: weights are the inverse of cost efficiency."""
    return _cauchy(factory, settings, "cauchy-mce", lambda price, efficiency: 1.0 / efficiency)


def cauchy_ce(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
    """CO-LP over combos counted in GPUs, ranked and shortlisted by equation 15."""
    require_no_row_terms(factory.problem, "cauchy-ce")
    templates = {demand.name: shortlisted_combos(factory, demand) for demand in factory.problem.demands}
    chosen = _solve_counts(
        factory,
        settings,
        "cauchy-ce",
        templates,
        _price_per_efficiency,
        lambda demand, template: template.ce_tokens_per_usd,
    )
    if chosen is None:
        return _cauchy(factory, settings, "cauchy-ce", lambda price, efficiency: price)
    return _plan_with_counts(factory, settings, "cauchy-ce", templates, chosen)


def _price_per_efficiency(price: Floats, efficiency: Floats) -> Floats:
    return price / efficiency


def _cauchy(factory: TemplateFactory, settings: SolveSettings, name: str, weight: Weight) -> PlanOutcome:
    require_no_row_terms(factory.problem, name)
    templates = {demand.name: factory.combos(demand) for demand in factory.problem.demands}
    chosen = _solve_counts(factory, settings, name, templates, weight, _measured_efficiency(factory))
    if chosen is None:  # The fallback: the largest fraction that the fleet can serve.
        return solve_over(factory, settings, name, templates)
    return _plan_with_counts(factory, settings, name, templates, chosen)


def _measured_efficiency(factory: TemplateFactory) -> Efficiency:
    prices = factory.prices
    return lambda demand, template: efficiency_tokens_per_usd(demand, template, prices)


def _plan_with_counts(
    factory: TemplateFactory,
    settings: SolveSettings,
    name: str,
    templates: TemplatesByModel,
    chosen: tuple[Deployment, ...],
) -> PlanOutcome:
    """The plan with the paper's counts, routed by the program with these counts pinned.

    Its gap is measured against the lower bound of the cheapest plan over the same combos.
    """
    pinned = replace(settings, pins=chosen, running=None)
    used_templates = {model: _templates_in(group, chosen) for model, group in templates.items()}
    outcome = solve_over(factory, pinned, name, used_templates)
    plan = _with_counts(outcome.plan, chosen, used_templates, factory.problem)
    bound_settings = replace(settings.with_time_share(BOUND_SHARE), running=None, pins=())
    bound = solve_over(factory, bound_settings, name, templates).allocation.lower_bound_usd_per_h
    outcome = replace(outcome, plan=plan)
    cost = outcome.weighted_usd_per_h
    gap = max(0.0, cost - bound) / cost if cost > 0 else 0.0
    return replace(outcome, plan=replace(plan, gap=gap))


@dataclass(frozen=True, slots=True, eq=False)
class ComboColumns:
    """Combos in the regions with enough nodes for them, one array entry per combo and region."""

    templates: list[Template]
    model: Ints
    region: Ints
    uses: Ints  # [columns, node types of the problem]
    goodput_per_s: Floats
    weight: Floats


def _columns(
    factory: TemplateFactory, templates: TemplatesByModel, weight: Weight, efficiency: Efficiency
) -> ComboColumns | None:
    problem, columns_by_region = factory.problem, list[ComboColumns]()
    node_supply = fleet_of(problem)
    node_columns = {node: column for column, node in enumerate(node_supply.nodes)}
    for m, demand in enumerate(problem.demands):
        served_combos = [(t, rate) for t in templates[demand.name] if (rate := served_per_s(demand, t)) > 0]
        combos = [template for template, _ in served_combos]
        uses = np.zeros((len(combos), len(node_columns)), np.int64)
        for row, template in enumerate(combos):
            for count in template.nodes:
                uses[row, node_columns[count.node]] = count.count
        rates = np.array([rate for _, rate in served_combos]) * problem.headroom
        allowed = np.array([suits(demand, template) for template in combos], bool)
        efficiencies = np.array([efficiency(demand, template) for template in combos])
        for r, region in enumerate(problem.regions):
            placeable = (uses <= node_supply.available[r]).all(axis=1)
            placeable &= allowed & demand.terms.allows(region.name)
            rows = np.flatnonzero(placeable)
            cost = weight(uses[rows] @ node_supply.price_usd_per_h[r], efficiencies[rows])
            region_of_rows = np.full(len(rows), r)
            columns_by_region.append(
                ComboColumns(
                    [combos[row] for row in rows],
                    region_of_rows * 0 + m,
                    region_of_rows,
                    uses[rows],
                    rates[rows],
                    cost,
                )
            )
    if not any(len(combo_columns.templates) for combo_columns in columns_by_region):
        return None
    names = ("model", "region", "uses", "goodput_per_s", "weight")
    arrays = (
        np.concatenate([getattr(combo_columns, name) for combo_columns in columns_by_region])
        for name in names
    )
    return ComboColumns(
        [template for combo_columns in columns_by_region for template in combo_columns.templates], *arrays
    )


def _cheapest_per_region(all_columns: ComboColumns, limit: int) -> ComboColumns:
    """The `limit` combos of each model and region with the least weight per unit of goodput."""
    weight_per_goodput = all_columns.weight / all_columns.goodput_per_s
    kept_rows: list[Ints] = []
    cell = all_columns.model * (1 + all_columns.region.max()) + all_columns.region
    for cell_number in np.unique(cell):
        rows = np.flatnonzero(cell == cell_number)
        kept_rows.append(np.sort(rows[np.argsort(weight_per_goodput[rows], kind="stable")[:limit]]))
    chosen = np.concatenate(kept_rows)
    return ComboColumns(
        [all_columns.templates[row] for row in chosen],
        all_columns.model[chosen],
        all_columns.region[chosen],
        all_columns.uses[chosen],
        all_columns.goodput_per_s[chosen],
        all_columns.weight[chosen],
    )


def _solve_counts(
    factory: TemplateFactory,
    settings: SolveSettings,
    name: str,
    templates: TemplatesByModel,
    weight: Weight,
    efficiency: Efficiency,
) -> tuple[Deployment, ...] | None:
    """The copies that the paper's integer program rents; None where it is infeasible or ran out of time."""
    problem, combo_columns = factory.problem, _columns(factory, templates, weight, efficiency)
    if combo_columns is None:
        return None
    if (total := len(combo_columns.templates)) > MAX_COLUMNS:
        combo_columns = _cheapest_per_region(
            combo_columns, MAX_COLUMNS // (len(problem.demands) * len(problem.regions))
        )
        factory.shortened_strategies[name] = (
            f"chose from the {len(combo_columns.templates):,} best of {total:,} combos"
        )
    node_supply, column_count = fleet_of(problem), len(combo_columns.templates)
    row, node_type = np.nonzero(combo_columns.uses)
    scale = float(combo_columns.weight.max()) or 1.0
    milp_result = solve_milp(
        Milp(
            cost=combo_columns.weight / scale,
            lower=np.zeros(column_count),
            upper=np.full(column_count, np.inf),
            integer=np.ones(column_count, bool),
            row_lower=np.array(
                [demand.rate_per_s for demand in problem.demands] + [-np.inf] * node_supply.available.size
            ),
            row_upper=np.concatenate([np.full(len(problem.demands), np.inf), node_supply.available.ravel()]),
            row=np.concatenate(
                [
                    combo_columns.model,
                    len(problem.demands) + combo_columns.region[row] * len(node_supply.nodes) + node_type,
                ]
            ),
            column=np.concatenate([np.arange(column_count), row]),
            value=np.concatenate([combo_columns.goodput_per_s, combo_columns.uses[row, node_type]]).astype(
                np.float64
            ),
        ),
        time_limit_s=settings.left_s,
        gap_rel=1e-6,
    )
    if milp_result.x is None:
        return None
    return tuple(
        Deployment(template.name, problem.regions[region].name, int(n))
        for n, template, region in zip(
            milp_result.x.round().tolist(),
            combo_columns.templates,
            combo_columns.region.tolist(),
            strict=True,
        )
        if n
    )


def _templates_in(templates: Sequence[Template], chosen: tuple[Deployment, ...]) -> list[Template]:
    names = {deployment.template for deployment in chosen}
    return [template for template in templates if template.name in names]


def _with_counts(
    plan: Plan,
    chosen: tuple[Deployment, ...],
    templates_by_model: Mapping[str, list[Template]],
    problem: PlanningProblem,
) -> Plan:
    """The plan with exactly the chosen counts and their cost, including copies that routing leaves idle."""
    planned = {template.name: template for template in plan.templates}
    templates = tuple(planned.get(t.name, t) for group in templates_by_model.values() for t in group)
    full_plan = replace(plan, templates=templates, deployments=chosen)
    charges = charges_of(problem, full_plan, egress_usd_per_h(problem, full_plan))
    return replace(full_plan, cost_usd_per_h=rent_usd_per_h(problem, full_plan.nodes), charges=charges)
