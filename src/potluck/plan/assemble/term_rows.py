"""Terms as rows of the program: where a template may run, what must survive which loss, what is paid beside rent.

Whether a column may be at all is a table; copies, kinds of GPU and charges paid once are limits with helpers;
losses are outages or spare copies (`allocate/outages.py`). A copy counts as lost with any node of it: what the rest
of a combo could still do is not reckoned with.
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
    models: int
    limits: list[CountLimit] = field(default_factory=list)
    helpers: list[ExtraVariable] = field(default_factory=list)

    def limit(
        self,
        name: str,
        low: float,
        high: float,
        tables: Mapping[int, Floats],
        helpers: tuple[tuple[int, float], ...] = (),
    ) -> None:
        copies = tuple(tables.get(m) for m in range(self.models))
        self.limits.append(CountLimit(name, low, high, copies, helpers))

    def switch(self, name: str, tables: Mapping[int, Floats], most: float, usd_per_h: float = 0.0) -> int:
        """A helper that is 1 where any copy in the tables is there."""
        place = len(self.helpers)
        self.helpers.append(ExtraVariable(name, usd_per_h=usd_per_h, row=len(self.limits)))
        self.limit(name, -INFINITY, 0.0, tables, ((place, -max(most, 1.0)),))
        return place


def with_terms(
    problem: PlanningProblem, groups: Sequence[Sequence[Template]], program: FlowProgram
) -> FlowProgram:
    models = tuple(
        replace(
            columns,
            allowed=_allowed(demand, group, program.fleet),
            fees_usd_per_h=_fees(problem, demand, group, program.fleet),
            parts_usd_per_h=parts_usd_per_h(problem, columns.uses, further_parts(group), program.fleet),
        )
        for demand, group, columns in zip(problem.asks, groups, program.models, strict=True)
    )
    roles = [[{replica.role for replica in template.replicas} for template in group] for group in groups]
    does = [np.array([phases_of(r) for r in item], bool).reshape(len(item), 2) for item in roles]
    rows = _rows(problem, [model.uses for model in models], does, program.fleet)
    asks = problem.asks
    spare = tuple(a.terms.survive_share if a.terms.survive == "node" else 0.0 for a in asks)
    return replace(
        program,
        models=models,
        limits=tuple(rows.limits),
        helpers=tuple(rows.helpers),
        outages=_outages(problem, program.fleet),
        spare=spare if any(spare) else (),
    )


def phases_of(roles: Set[Role]) -> tuple[bool, bool]:
    """Whether a copy takes prompts, and whether it answers."""
    return roles != {"decode"}, roles != {"prefill"}


def _rows(
    problem: PlanningProblem,
    uses: Sequence[NDArray[np.integer]],
    does: Sequence[NDArray[np.bool_]],
    node_supply: NodeSupply,
) -> TermRows:
    """All limits over columns that use so many nodes, per model [templates, node types], and do [templates, 2]."""
    rows = TermRows(len(uses))
    for m, demand in enumerate(problem.asks):
        _copies(rows, m, demand, does[m], len(node_supply.regions))
        _kinds(problem, rows, m, demand, uses[m], node_supply)
    _fixed(problem, rows, uses, node_supply)
    return rows


def limit_prices(
    problem: PlanningProblem, node_supply: NodeSupply, duals: Floats
) -> list[tuple[Floats, Floats]]:
    """What limits make of a copy that does one phase, per model at these prices: ([phase, region], [region, node]).

    Every limit counts a copy as so much by what it does, and so much more for each of its nodes. So it is asked what
    it makes of copies of either phase without nodes, and of copies with one node.
    """
    types = len(node_supply.nodes)
    probes = np.vstack([np.zeros((2, types), np.int64), np.eye(types, dtype=np.int64)])
    does = np.arange(2 + types)[:, None] == np.arange(2)
    does[2:, 0] = True
    limits = _rows(problem, [probes] * len(problem.asks), [does] * len(problem.asks), node_supply).limits
    result = []
    for m in range(len(problem.asks)):
        total = np.zeros((2 + types, len(node_supply.regions)))
        for limit, dual in zip(limits, duals.tolist(), strict=True):
            table = limit.copies[m]
            if table is not None and dual:
                total -= dual * table
        result.append((total[:2], (total[2:] - total[0]).T))
    return result


def unsupported(problem: PlanningProblem) -> str:
    """The first term that needs the program's rows, in words; empty where there is none."""
    for demand in problem.asks:
        for name, words in demand.terms.asked.items():
            if name in ("redundancy", "max_spot_share", "max_gpu_kinds", "min_copies", "max_copies"):
                return f"{name} of {demand.name} ({words})"
    return ""


def require_rows(problem: PlanningProblem, strategy: str) -> None:
    """Refuses what a strategy that counts its own copies cannot keep."""
    if text := unsupported(problem):
        why = f"{strategy} picks its copies by its own rule and cannot keep {text}; use auto"
        raise InputError("strategy", why)


def runs_in(demand: ModelDemand, template: Template, region: str) -> bool:
    return demand.terms.allows(region) and suits(demand, template)


def suits(demand: ModelDemand, template: Template) -> bool:
    """Whether a model's terms let it run on such copies, wherever that is."""
    terms = demand.terms
    if terms.nodes is not None and not set(template.node_counts) <= set(terms.nodes):
        return False
    for replica in template.replicas:
        layout = replica.layout
        # A node of several groups is several times in its layout.
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
    fine = np.array([suits(demand, template) for template in group], bool)
    return np.outer(fine, [demand.terms.allows(region) for region in node_supply.regions])


def further_parts(templates: Sequence[Template]) -> Floats:
    """Of each template, the machines after its first and the hand-over of KV, to others or inside."""
    return np.array(
        [
            sum(count.count for count in t.nodes)
            - 1.0
            + (any(r.role != "mixed" for r in t.replicas) or any(c.decode_per_s > 0 for c in t.capacity))
            for t in templates
        ]
    )


def parts_usd_per_h(
    problem: PlanningProblem, uses: NDArray[np.integer], parts: Floats, node_supply: NodeSupply
) -> Floats | None:
    """[templates, regions]: what a copy with so many further parts counts for beside its cost.

    A part counts for a share of the copy's rent. Of plans that are then alike the one of smaller copies is taken: it
    loses less with each.
    """
    if not problem.complexity_share:
        return None
    price = uses @ node_supply.price_usd_per_h.T
    large = LARGE_COPY * price / max(float(node_supply.price_usd_per_h.max(initial=0.0)), 1e-9)
    return np.asarray(problem.complexity_share * price * (parts[:, None] + large), np.float64)


LARGE_COPY = 0.05  # Of a moving part, what a copy counts for that costs as much as the dearest node.


def loss_usd_per_h(problem: PlanningProblem, demand: ModelDemand, template: Template, region: str) -> float:
    """What preemptions of its spot nodes cost one copy: rent while it starts anew and for answers it makes twice."""
    offers = offers_of(problem)
    often = price = 0.0
    for node_count in template.nodes:
        offer = offers.get((region, node_count.node))
        if offer is not None:
            often += node_count.count * (offer.preemptions_per_h if offer.spot else 0.0)
            price += node_count.count * offer.price_usd_per_h
    if not often:
        return 0.0
    return often * _lost_h(demand) * price


def _lost_h(demand: ModelDemand) -> float:
    """Hours of a copy that one preemption costs."""
    start = startup_s(weight_bytes(demand.model)).total_s
    output = sum(d.rate_per_s * d.output_tokens for d in demand.demands) / max(demand.rate_per_s, 1e-12)
    twice_s = (demand.slo.ttft_s + output * demand.slo.tpot_s) / 2  # half of an answer is there, on average
    return (start + twice_s) / 3600


def losses_usd_per_h(
    problem: PlanningProblem, demand: ModelDemand, uses: NDArray[np.integer], node_supply: NodeSupply
) -> Floats:
    """[regions, templates]: the same of copies that use so many nodes of the problem's types."""
    offers = offers_of(problem)
    losses_usd = np.zeros((len(node_supply.regions), len(uses)))
    for r, region in enumerate(node_supply.regions):
        there = [offers.get((region, node.name)) for node in problem.nodes]
        often = np.array([o.preemptions_per_h if o is not None and o.spot else 0.0 for o in there])
        if often.any():
            price = np.array([0.0 if o is None else o.price_usd_per_h for o in there])
            losses_usd[r] = (uses @ often) * (uses @ price) * _lost_h(demand)
    return losses_usd


def _fees(
    problem: PlanningProblem, demand: ModelDemand, group: Sequence[Template], node_supply: NodeSupply
) -> Floats | None:
    if not any(offer.preemptions_per_h for region in problem.regions for offer in region.offers):
        return None
    table = [[loss_usd_per_h(problem, demand, t, region) for region in node_supply.regions] for t in group]
    return np.array(table, dtype=np.float64).reshape(len(group), len(node_supply.regions))


def _copies(rows: TermRows, m: int, demand: ModelDemand, does: NDArray[np.bool_], regions: int) -> None:
    """A phase counts only the copies that do it, so that one beside them that is never asked counts for nothing."""
    low, high = demand.terms.min_copies, demand.terms.max_copies
    ones = np.ones((len(does), regions))
    for phase, what in enumerate(("take prompts", "answer") if low else ()):
        name = f"at least {low} copies of {demand.name} that {what}"
        rows.limit(name, float(low), INFINITY, {m: ones * does[:, phase, None]})
    if high is not None:
        rows.limit(f"at most {high} copies of {demand.name}", -INFINITY, float(high), {m: ones})


def _kinds(
    problem: PlanningProblem,
    rows: TermRows,
    m: int,
    demand: ModelDemand,
    uses: NDArray[np.integer],
    node_supply: NodeSupply,
) -> None:
    most = demand.terms.max_gpu_kinds
    if most is None:
        return
    switches = []
    for gpu in sorted({node.gpu.name for node in problem.nodes}):
        cells = [c for c, name in enumerate(node_supply.nodes) if _gpu_of(problem, name) == gpu]
        mine = uses[:, cells].astype(np.float64).sum(axis=1)
        total = float(node_supply.available[:, cells].sum())
        table = np.repeat(mine[:, None], len(node_supply.regions), axis=1)
        switches.append(rows.switch(f"{gpu} for {demand.name}", {m: table}, total))
    name = f"at most {most} kinds of GPU for {demand.name}"
    rows.limit(name, -INFINITY, float(most), {}, tuple((place, 1.0) for place in switches))


def _gpu_of(problem: PlanningProblem, node: str) -> str:
    node_type = problem.by_name.get(node)
    return "" if node_type is None else node_type.gpu.name


def storage_usd_per_h(problem: PlanningProblem, demand: ModelDemand, region: str) -> float:
    there = next(item for item in problem.regions if item.name == region)
    return fleet_cost.storage_usd_per_h(there, float(weight_bytes(demand.model)))


def _fixed(
    problem: PlanningProblem, rows: TermRows, uses: Sequence[NDArray[np.integer]], node_supply: NodeSupply
) -> None:
    """Charges that are paid once: a region's head node, a model's weights in a region's storage."""
    for r, region in enumerate(problem.regions):
        most = float(node_supply.available[r].sum())
        tables = {}
        for m, mine in enumerate(uses):
            tables[m] = np.zeros((len(mine), len(node_supply.regions)))
            tables[m][:, r] = 1.0
        if region.head_usd_per_h:
            rows.switch(f"head node of {region.name}", tables, most, region.head_usd_per_h)
        for m, demand in enumerate(problem.asks):
            if price := storage_usd_per_h(problem, demand, region.name):
                rows.switch(f"weights of {demand.name} in {region.name}", {m: tables[m]}, most, price)


def domains(problem: PlanningProblem) -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    """What may go at once, by kind of domain (`spot`: all spot nodes): a name, and the (region, node) that go."""
    zones: dict[tuple[str, str], list[tuple[str, str]]] = {}
    regions: dict[str, list[tuple[str, str]]] = {}
    spot = []
    for region in problem.regions:
        for offer in region.offers:
            cell = (region.name, offer.node)
            regions.setdefault(region.name, []).append(cell)
            zones.setdefault((region.name, offer.zone), []).append(cell)
            if offer.spot:
                spot.append(cell)
    named = [
        (f"zone {zone} of {name}" if zone else f"{name} outside its zones", cells)
        for (name, zone), cells in zones.items()
    ]
    return {
        "zone": named,
        "region": [(f"region {name}", cells) for name, cells in regions.items()],
        "spot": [("spot nodes", spot)] if spot else [],
    }


def share_asked(terms: ModelTerms, domain: str) -> float:
    """Of the demand, what must be served without one such domain."""
    if domain == "spot":
        return 0.0 if terms.max_spot_share is None else 1.0 - terms.max_spot_share
    return terms.survive_share if terms.survive == domain else 0.0


def _outages(problem: PlanningProblem, node_supply: NodeSupply) -> tuple[Outage, ...]:
    outages = []
    for domain, item in domains(problem).items():
        shares = tuple(share_asked(demand.terms, domain) for demand in problem.asks)
        if not any(shares):
            continue
        for name, cells in item:
            gone = np.zeros(node_supply.available.shape, dtype=bool)
            for region, node in cells:
                gone[node_supply.regions.index(region), node_supply.nodes.index(node)] = True
            if domain == "region":  # named machines are nodes of their own
                gone[node_supply.regions.index(cells[0][0])] = True
            outages.append(Outage(name, gone, shares))
    return tuple(outages)


def charges_of(problem: PlanningProblem, plan: Plan, egress_usd_per_h: float) -> tuple[Charge, ...]:
    """All that is paid beside rent, by what for; without those that are nothing."""
    asks = {demand.name: demand for demand in problem.asks}
    losses = storage = 0.0
    stored: set[tuple[str, str]] = set()
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        demand = asks[template.model]
        losses += deployment.count * loss_usd_per_h(problem, demand, template, deployment.region)
        stored.add((demand.name, deployment.region))
    for name, region in stored:
        storage += storage_usd_per_h(problem, asks[name], region)
    heads = fleet_cost.heads_usd_per_h(problem.regions, {region for _, region in stored})
    parts = ((EGRESS, egress_usd_per_h), (LOSSES, losses), (STORAGE, storage), (HEADS, heads))
    return tuple(Charge(what, float(usd)) for what, usd in parts if usd > 1e-12)


def rent_usd_per_h(problem: PlanningProblem, nodes: Mapping[tuple[str, str], int]) -> float:
    return fleet_cost.rent_usd_per_h(offers_of(problem), nodes)
