"""Terms as rows of the integer program: allowed placements, failures to survive, charges beside rent.

Whether a column is allowed is a table; limits on copies and GPU types and one-time charges are limits with extra
variables; failures are outages or spare copies (`allocate/outages.py`). A copy is lost with any of its nodes: what
the remaining nodes of a combo could still serve is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values import fleet_cost
from potluck.core.values.fleet_cost import HEADS, offers_in
from potluck.core.values.plan import Charge, Plan, Template
from potluck.core.values.service import ModelTerms
from potluck.core.values.types import NodeOffer, Role
from potluck.perf.memory import weight_bytes
from potluck.perf.startup import startup_s
from potluck.plan.allocate.program import CountLimit, ExtraVariable, Floats, FlowProgram, NodeSupply, Outage
from potluck.plan.problem import ModelDemand, PlanningProblem

INFINITY = float("inf")
EGRESS, LOSSES, STORAGE = "egress", "preemptions", "weights in storage"


@dataclass(slots=True)
class TermRows:
    """Limits and extra variables of the program, collected row by row."""

    models: int
    limits: list[CountLimit] = field(default_factory=list)
    helpers: list[ExtraVariable] = field(default_factory=list)

    def add_limit(
        self,
        name: str,
        low: float,
        high: float,
        tables: Mapping[int, Floats],
        helpers: tuple[tuple[int, float], ...] = (),
    ) -> None:
        copies = tuple(tables.get(m) for m in range(self.models))
        self.limits.append(CountLimit(name, low, high, copies, helpers))

    def add_switch(self, name: str, tables: Mapping[int, Floats], most: float, usd_per_h: float = 0.0) -> int:
        """Add a binary variable that is 1 when any copy in the tables is rented; its index. `most`: upper bound."""
        index = len(self.helpers)
        self.helpers.append(ExtraVariable(name, usd_per_h=usd_per_h, row=len(self.limits)))
        self.add_limit(name, -INFINITY, 0.0, tables, ((index, -max(most, 1.0)),))
        return index


def with_terms(
    problem: PlanningProblem, groups: Sequence[Sequence[Template]], program: FlowProgram
) -> FlowProgram:
    """The program with the rows, charges and complexity penalties that the models' terms add."""
    models = tuple(
        replace(
            columns,
            allowed=_allowed(demand, group, program.fleet),
            fees_usd_per_h=_fees(problem, demand, group, program.fleet),
            complexity_usd_per_h=complexity_usd_per_h(
                problem, columns.uses, component_counts(group), program.fleet
            ),
        )
        for demand, group, columns in zip(problem.demands, groups, program.models, strict=True)
    )
    roles = [[{replica.role for replica in template.replicas} for template in group] for group in groups]
    phases = [
        np.array([phases_of(r) for r in roles_of_group], bool).reshape(len(roles_of_group), 2)
        for roles_of_group in roles
    ]
    rows = _rows(problem, [model.uses for model in models], phases, program.fleet)
    demands = problem.demands
    spare_shares = tuple(a.terms.survive_share if a.terms.survive == "node" else 0.0 for a in demands)
    return replace(
        program,
        models=models,
        limits=tuple(rows.limits),
        helpers=tuple(rows.helpers),
        outages=_outages(problem, program.fleet),
        spare=spare_shares if any(spare_shares) else (),
    )


def phases_of(roles: Set[Role]) -> tuple[bool, bool]:
    """(whether a copy with these roles prefills, whether it decodes)."""
    return roles != {"decode"}, roles != {"prefill"}


def _rows(
    problem: PlanningProblem,
    uses: Sequence[NDArray[np.integer]],
    phases: Sequence[NDArray[np.bool_]],
    node_supply: NodeSupply,
) -> TermRows:
    """All limits over the models' columns; `uses` is [templates, node types], `phases` [templates, phases]."""
    rows = TermRows(len(uses))
    for m, demand in enumerate(problem.demands):
        _limit_copies(rows, m, demand, phases[m], len(node_supply.regions))
        _limit_gpu_types(problem, rows, m, demand, uses[m], node_supply)
    _add_fixed_charges(problem, rows, uses, node_supply)
    return rows


def limit_prices(
    problem: PlanningProblem, node_supply: NodeSupply, duals: Floats
) -> list[tuple[Floats, Floats]]:
    """Dual cost that limits add to a copy, for each model: ([phase, region], [region, node type]).

    Every limit counts a copy by its phase plus an amount for each of its nodes, so the cost is that of a probe copy
    of the phase without nodes plus that of probes with one node each.
    """
    type_count = len(node_supply.nodes)
    probes = np.vstack([np.zeros((2, type_count), np.int64), np.eye(type_count, dtype=np.int64)])
    phases = np.arange(2 + type_count)[:, None] == np.arange(2)
    phases[2:, 0] = True
    limits = _rows(
        problem, [probes] * len(problem.demands), [phases] * len(problem.demands), node_supply
    ).limits
    result = []
    for m in range(len(problem.demands)):
        total = np.zeros((2 + type_count, len(node_supply.regions)))
        for limit, dual in zip(limits, duals.tolist(), strict=True):
            table = limit.copies[m]
            if table is not None and dual:
                total -= dual * table
        result.append((total[:2], (total[2:] - total[0]).T))
    return result


def row_term(problem: PlanningProblem) -> str:
    """The first term that needs a row of the program, with its value; empty where there is none."""
    for demand in problem.demands:
        for name, words in demand.terms.asked.items():
            if name in ("redundancy", "max_spot_share", "max_gpu_kinds", "min_copies", "max_copies"):
                return f"{name} of {demand.name} ({words})"
    return ""


def require_no_row_terms(problem: PlanningProblem, strategy: str) -> None:
    """Raise InputError for terms that a strategy without the program's rows cannot keep."""
    if term := row_term(problem):
        reason = f"{strategy} chooses its copies by its own rule and cannot keep {term}; use auto"
        raise InputError("strategy", reason)


def runs_in(demand: ModelDemand, template: Template, region: str) -> bool:
    return demand.terms.allows(region) and suits(demand, template)


def suits(demand: ModelDemand, template: Template) -> bool:
    """Whether a model's terms allow this template, in whatever region."""
    terms = demand.terms
    if terms.nodes is not None and not set(template.node_counts) <= set(terms.nodes):
        return False
    for replica in template.replicas:
        layout = replica.layout
        # A node with several tensor-parallel groups appears several times in its layout.
        nodes = min(sum(layout.node_counts.values()), sum(template.node_counts.values()))
        if terms.max_stages is not None and len(layout.stages) > terms.max_stages:
            return False
        if terms.max_nodes is not None and nodes > terms.max_nodes:
            return False
    return True


def offers_of(problem: PlanningProblem) -> dict[tuple[str, str], NodeOffer]:
    return offers_in(problem.regions)


def _allowed(
    demand: ModelDemand, group: Sequence[Template], node_supply: NodeSupply
) -> NDArray[np.bool_] | None:
    if not demand.terms.asked:
        return None
    suitable = np.array([suits(demand, template) for template in group], bool)
    return np.outer(suitable, [demand.terms.allows(region) for region in node_supply.regions])


def component_counts(templates: Sequence[Template]) -> Floats:
    """Components of each template beyond one machine: its other machines, and one for KV transfer."""
    return np.array(
        [
            sum(count.count for count in t.nodes)
            - 1.0
            + (any(r.role != "mixed" for r in t.replicas) or any(c.decode_per_s > 0 for c in t.capacity))
            for t in templates
        ]
    )


def complexity_usd_per_h(
    problem: PlanningProblem, uses: NDArray[np.integer], component_counts: Floats, node_supply: NodeSupply
) -> Floats | None:
    """[templates, regions]: complexity penalty of a copy, by its components beyond one machine.

    Each component costs a share of the copy's rent. A small term prefers the smaller copies among equal plans, as a
    failure then costs less.
    """
    if not problem.complexity_share:
        return None
    rent_usd_per_h = uses @ node_supply.price_usd_per_h.T
    size_penalty = (
        SIZE_PENALTY * rent_usd_per_h / max(float(node_supply.price_usd_per_h.max(initial=0.0)), 1e-9)
    )
    return np.asarray(
        problem.complexity_share * rent_usd_per_h * (component_counts[:, None] + size_penalty), np.float64
    )


SIZE_PENALTY = 0.05  # Components that a copy counts for when it costs as much as the dearest node.


def loss_usd_per_h(problem: PlanningProblem, demand: ModelDemand, template: Template, region: str) -> float:
    """Expected cost of spot preemptions for one copy: rent while it restarts and repeats answers."""
    offers = offers_of(problem)
    preemptions_per_h = rent_usd_per_h = 0.0
    for node_count in template.nodes:
        offer = offers.get((region, node_count.node))
        if offer is not None:
            preemptions_per_h += node_count.count * (offer.preemptions_per_h if offer.spot else 0.0)
            rent_usd_per_h += node_count.count * offer.price_usd_per_h
    if not preemptions_per_h:
        return 0.0
    return preemptions_per_h * _hours_lost_per_preemption(demand) * rent_usd_per_h


def _hours_lost_per_preemption(demand: ModelDemand) -> float:
    """Hours of one copy lost to one preemption."""
    restart_s = startup_s(weight_bytes(demand.model)).total_s
    mean_output_tokens = sum(bucket.rate_per_s * bucket.output_tokens for bucket in demand.buckets) / max(
        demand.rate_per_s, 1e-12
    )
    # On average half of an answer was generated.
    repeated_s = (demand.slo.ttft_s + mean_output_tokens * demand.slo.tpot_s) / 2
    return (restart_s + repeated_s) / 3600


def losses_usd_per_h(
    problem: PlanningProblem, demand: ModelDemand, uses: NDArray[np.integer], node_supply: NodeSupply
) -> Floats:
    """[regions, templates]: expected cost of spot preemptions for copies that use `uses` [templates, node types]."""
    offers = offers_of(problem)
    losses_usd = np.zeros((len(node_supply.regions), len(uses)))
    for r, region in enumerate(node_supply.regions):
        offers_of_region = [offers.get((region, node.name)) for node in problem.nodes]
        preemptions_per_h = np.array(
            [o.preemptions_per_h if o is not None and o.spot else 0.0 for o in offers_of_region]
        )
        if preemptions_per_h.any():
            price_usd_per_h = np.array([0.0 if o is None else o.price_usd_per_h for o in offers_of_region])
            losses_usd[r] = (
                (uses @ preemptions_per_h) * (uses @ price_usd_per_h) * _hours_lost_per_preemption(demand)
            )
    return losses_usd


def _fees(
    problem: PlanningProblem, demand: ModelDemand, group: Sequence[Template], node_supply: NodeSupply
) -> Floats | None:
    if not any(offer.preemptions_per_h for region in problem.regions for offer in region.offers):
        return None
    table = [[loss_usd_per_h(problem, demand, t, region) for region in node_supply.regions] for t in group]
    return np.array(table, dtype=np.float64).reshape(len(group), len(node_supply.regions))


def _limit_copies(
    rows: TermRows, m: int, demand: ModelDemand, phases: NDArray[np.bool_], regions: int
) -> None:
    """Add the limits of `min_copies`, for each phase over the copies that run it, and of `max_copies`."""
    low, high = demand.terms.min_copies, demand.terms.max_copies
    ones = np.ones((len(phases), regions))
    for phase, verb in enumerate(("take prompts", "answer") if low else ()):
        name = f"at least {low} copies of {demand.name} that {verb}"
        rows.add_limit(name, float(low), INFINITY, {m: ones * phases[:, phase, None]})
    if high is not None:
        rows.add_limit(f"at most {high} copies of {demand.name}", -INFINITY, float(high), {m: ones})


def _limit_gpu_types(
    problem: PlanningProblem,
    rows: TermRows,
    m: int,
    demand: ModelDemand,
    uses: NDArray[np.integer],
    node_supply: NodeSupply,
) -> None:
    """Add a switch for each GPU type that the model uses, and a limit on their number."""
    max_types = demand.terms.max_gpu_kinds
    if max_types is None:
        return
    switches = []
    for gpu in sorted({node.gpu.name for node in problem.nodes}):
        node_columns = [c for c, name in enumerate(node_supply.nodes) if _gpu_of(problem, name) == gpu]
        gpu_nodes_per_copy = uses[:, node_columns].astype(np.float64).sum(axis=1)
        available = float(node_supply.available[:, node_columns].sum())
        table = np.repeat(gpu_nodes_per_copy[:, None], len(node_supply.regions), axis=1)
        switches.append(rows.add_switch(f"{gpu} for {demand.name}", {m: table}, available))
    name = f"at most {max_types} kinds of GPU for {demand.name}"
    rows.add_limit(name, -INFINITY, float(max_types), {}, tuple((index, 1.0) for index in switches))


def _gpu_of(problem: PlanningProblem, node: str) -> str:
    node_type = problem.by_name.get(node)
    return "" if node_type is None else node_type.gpu.name


def storage_usd_per_h(problem: PlanningProblem, demand: ModelDemand, region: str) -> float:
    """Cost of storing a model's weights in a region."""
    offered_region = next(item for item in problem.regions if item.name == region)
    return fleet_cost.storage_usd_per_h(offered_region, float(weight_bytes(demand.model)))


def _add_fixed_charges(
    problem: PlanningProblem, rows: TermRows, uses: Sequence[NDArray[np.integer]], node_supply: NodeSupply
) -> None:
    """Add a switch with a price for each one-time charge: a region's head node, a model's weights in storage."""
    for r, region in enumerate(problem.regions):
        node_count = float(node_supply.available[r].sum())
        tables = {}
        for m, model_uses in enumerate(uses):
            tables[m] = np.zeros((len(model_uses), len(node_supply.regions)))
            tables[m][:, r] = 1.0
        if region.head_usd_per_h:
            rows.add_switch(f"head node of {region.name}", tables, node_count, region.head_usd_per_h)
        for m, demand in enumerate(problem.demands):
            if price := storage_usd_per_h(problem, demand, region.name):
                rows.add_switch(
                    f"weights of {demand.name} in {region.name}", {m: tables[m]}, node_count, price
                )


def domains(problem: PlanningProblem) -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    """Failure domains by kind (zone, region, spot): names with the (region, node type) pairs that fail together."""
    zones: dict[tuple[str, str], list[tuple[str, str]]] = {}
    regions: dict[str, list[tuple[str, str]]] = {}
    spot_offers = []
    for region in problem.regions:
        for offer in region.offers:
            cell = (region.name, offer.node)
            regions.setdefault(region.name, []).append(cell)
            zones.setdefault((region.name, offer.zone), []).append(cell)
            if offer.spot:
                spot_offers.append(cell)
    zone_domains = [
        (f"zone {zone} of {name}" if zone else f"{name} outside its zones", cells)
        for (name, zone), cells in zones.items()
    ]
    return {
        "zone": zone_domains,
        "region": [(f"region {name}", cells) for name, cells in regions.items()],
        "spot": [("spot nodes", spot_offers)] if spot_offers else [],
    }


def required_share(terms: ModelTerms, domain: str) -> float:
    """Share of the demand that must be served after the loss of one domain of this kind."""
    if domain == "spot":
        return 0.0 if terms.max_spot_share is None else 1.0 - terms.max_spot_share
    return terms.survive_share if terms.survive == domain else 0.0


def _outages(problem: PlanningProblem, node_supply: NodeSupply) -> tuple[Outage, ...]:
    outages = []
    for domain, named_domains in domains(problem).items():
        shares = tuple(required_share(demand.terms, domain) for demand in problem.demands)
        if not any(shares):
            continue
        for name, cells in named_domains:
            lost = np.zeros(node_supply.available.shape, dtype=bool)
            for region, node in cells:
                lost[node_supply.regions.index(region), node_supply.nodes.index(node)] = True
            if domain == "region":  # Named machines are node types of their own.
                lost[node_supply.regions.index(cells[0][0])] = True
            outages.append(Outage(name, lost, shares))
    return tuple(outages)


def charges_of(problem: PlanningProblem, plan: Plan, egress_usd_per_h: float) -> tuple[Charge, ...]:
    """All charges beside rent, by purpose; zero charges are left out."""
    demands_by_model = {demand.name: demand for demand in problem.demands}
    losses = storage = 0.0
    stored: set[tuple[str, str]] = set()
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        demand = demands_by_model[template.model]
        losses += deployment.count * loss_usd_per_h(problem, demand, template, deployment.region)
        stored.add((demand.name, deployment.region))
    for name, region in stored:
        storage += storage_usd_per_h(problem, demands_by_model[name], region)
    heads = fleet_cost.heads_usd_per_h(problem.regions, {region for _, region in stored})
    parts = ((EGRESS, egress_usd_per_h), (LOSSES, losses), (STORAGE, storage), (HEADS, heads))
    return tuple(Charge(what, float(usd)) for what, usd in parts if usd > 1e-12)


def rent_usd_per_h(problem: PlanningProblem, nodes: Mapping[tuple[str, str], int]) -> float:
    return fleet_cost.rent_usd_per_h(offers_of(problem), nodes)
