"""Between templates and the allocation program: columns in, a Plan out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.kv import LOSSLESS, wire_of
from potluck.core.values.plan import (
    BucketCapacity,
    Confidence,
    Deployment,
    LengthBucket,
    Plan,
    PlannedFlow,
    PlannedReplica,
    PlannedShare,
    PlannedThreshold,
    Prediction,
    Template,
)
from potluck.core.values.types import Codec, Link
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.perf.transfer import link_alpha_beta
from potluck.plan.allocate.allocation import Allocation
from potluck.plan.allocate.program import (
    Bytes,
    ColumnCount,
    ColumnKey,
    ColumnPin,
    DemandBucket,
    Floats,
    FlowProgram,
    LinkRow,
    ModelColumns,
    NodeSupply,
    price_of,
)
from potluck.plan.assemble.term_rows import charges_of, with_terms
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.templates.combo import combo_capacity
from potluck.plan.templates.group import GROUP_NAME
from potluck.plan.templates.pair import pair_capacity
from potluck.plan.timing.named_machines import machine_of
from potluck.plan.timing.network_cards import busy_limits, cards_of, late_s, link_bits_per_s, wire_bits
from potluck.plan.timing.rate_cache import RateCache, RateCaches
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, UNPROMISED_TTFT_S, range_per_s

MACHINE = "machine "  # Before the name of a machine among a fleet's node types.


class _ColumnRow(NamedTuple):
    """What a template is to the program, whatever is asked and rented."""

    prefill_per_s: Floats
    decode_per_s: Floats
    closed_per_s: Floats
    cards_bits_per_s: float


def _row(problem: PlanningProblem, demand: ModelDemand, template: Template, bits: Floats) -> _ColumnRow:
    table = np.zeros((3, len(demand.demands)))
    for capacity in template.capacity:
        rates = capacity.prefill_per_s, capacity.decode_per_s, capacity.closed_per_s
        table[:, capacity.bucket] = rates
    if not table[:2].any():
        return _ColumnRow(
            table[0], table[1], table[2], float("inf")
        )  # what is handed over inside is in its rate
    cards = cards_of(template.replicas, problem.by_name)
    busy, passes = busy_limits(demand, bits, cards, problem.headroom)
    table[:2] *= passes
    return _ColumnRow(table[0], table[1], table[2], busy * cards.all_bits_per_s)


def model_columns(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    group: Sequence[Template],
    node_supply: NodeSupply,
    codec: Codec,
    rate_cache: RateCache,
) -> ModelColumns:
    places = {node: column for column, node in enumerate(node_supply.nodes)}
    uses = np.zeros((len(group), len(node_supply.nodes)), np.uint8)
    bits = wire_bits(model_demand, codec)
    asked = tuple(
        demand.rate_per_s > 0 for demand in model_demand.demands
    )  # the tightest bucket that is asked for counts
    rows = [
        rate_cache.once_of((codec, asked), template, partial(_row, problem, model_demand, template, bits))
        for template in group
    ]
    for row, template in enumerate(group):
        for count in template.nodes:
            uses[row, places[count.node]] = count.count
        for machine in template.machines if template.kind == "group" else ():
            uses[row, places[f"{MACHINE}{machine}"]] = 1
    size = (len(group), len(model_demand.demands))
    rates = [np.array([row[place] for row in rows]).reshape(size) for place in range(3)]
    prefill, decode, closed = rates
    cards = np.array([row.cards_bits_per_s for row in rows])
    buckets = tuple(
        DemandBucket(
            f"{model_demand.name} up to {d.longest_tokens} tokens",
            d.rate_per_s,
            float(bits[d.bucket]),
            frozenset(
                (node_supply.regions.index(link.source), node_supply.regions.index(link.target))
                for link in problem.links
                if crossing_s(bits[d.bucket], link) > crossing_room_s(model_demand, d)
            ),
            d.firm,
            crossing,
        )
        for d, crossing in zip(
            model_demand.demands, _crossing_usd_per_h(problem, node_supply, uses, rates), strict=True
        )
    )
    return ModelColumns(
        model_demand.name,
        buckets,
        uses,
        prefill,
        decode,
        closed,
        sends_bits_per_s=cards,
        takes_bits_per_s=cards.copy(),
        ordered=bool(problem.links),
    )


def _crossing_usd_per_h(
    problem: PlanningProblem, node_supply: NodeSupply, uses: Bytes, rates: Sequence[Floats]
) -> list[float]:
    """By bucket, what a request a second that crosses a link counts for: a share of the least rent it takes."""
    buckets = rates[0].shape[1]
    if not (problem.complexity_share and problem.links and len(uses)):
        return [0.0] * buckets
    there = (uses[:, None, :] <= node_supply.available[None]).all(axis=2)
    price = np.where(there, uses @ node_supply.price_usd_per_h.T, np.inf).min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = [np.where(rate > 0, price[:, None] / rate, np.inf).min(axis=0) for rate in rates]
    whole = np.minimum(least[0] + least[1], least[2]) / problem.headroom
    return [float(usd) if np.isfinite(usd) else 0.0 for usd in problem.complexity_share * whole]


def crossing_s(wire_bits: float, link: Link) -> float:
    """Seconds that a mean prompt's KV is behind its prefill on a link that it has to itself.

    Layers are sent as they are computed, so only the last layer's part and a round trip are left when the
    link keeps up; a link that does not is limited by its bandwidth row. Half of the KV is taken as left.
    """
    return float(link_alpha_beta(link).time_s(wire_bits / 16))


def crossing_room_s(model_demand: ModelDemand, demand: BucketDemand) -> float:
    """The part of TTFT that templates leave free for handing KV over."""
    return (model_demand.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S) * HANDOVER_SHARE


@dataclass(frozen=True, slots=True)
class ProgramColumns:
    problem: PlanningProblem
    templates: tuple[tuple[Template, ...], ...]
    program: FlowProgram
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Of each model's demand, what the program was asked for, where that is not all."""
    books: RateCaches = field(default_factory=partial(RateCaches, None))  # What layouts were timed to do.

    def key(self, template: str, region: str) -> ColumnKey | None:
        regions = self.program.fleet.regions
        for group, members in enumerate(self.templates):
            for index, member in enumerate(members):
                if member.name == template and region in regions:
                    return ColumnKey(group, index, regions.index(region))
        return None

    def name(self, key: ColumnKey) -> tuple[str, str]:
        """(template, region)"""
        return self.templates[key.group][key.template].name, self.program.fleet.regions[key.region]

    def keys(self, names: Collection[tuple[str, str]]) -> list[ColumnKey]:
        """The columns of these names that there are."""
        regions = {region: place for place, region in enumerate(self.program.fleet.regions)}
        wanted: dict[str, list[int]] = {}
        for template, region in names:
            if region in regions:
                wanted.setdefault(template, []).append(regions[region])
        return [
            ColumnKey(group, index, region)
            for group, members in enumerate(self.templates)
            for index, template in enumerate(members)
            for region in wanted.get(template.name, ())
        ]

    def parts_usd_per_h(self, plan: Plan) -> float:
        """What the moving parts of a plan count for beside its cost, copies' and those of requests that cross."""
        total, models = 0.0, {model.name: model for model in self.program.models}
        for deployment in plan.deployments:
            key = self.key(deployment.template, deployment.region)
            total += 0.0 if key is None else deployment.count * self.program.part_usd_per_h(key)
        for flow in plan.flows:
            if flow.prefill_region != flow.decode_region:
                total += flow.rate_per_s * models[flow.model].buckets[flow.bucket].crossing_usd_per_h
        return total

    def counts_of(self, plan: Plan) -> dict[ColumnKey, int] | None:
        """A plan's copies as columns; None where one of its templates is not among them."""
        places = {
            template.name: (group, index)
            for group, members in enumerate(self.templates)
            for index, template in enumerate(members)
        }
        regions = self.program.fleet.regions
        counts: dict[ColumnKey, int] = {}
        for deployment in plan.deployments:
            if deployment.template not in places or deployment.region not in regions:
                return None
            key = ColumnKey(*places[deployment.template], regions.index(deployment.region))
            counts[key] = deployment.count
        return counts


CROSSING: dict[
    str,
    Callable[
        [PlanningProblem, ModelDemand, Sequence[PlannedReplica], Codec, RateCache], tuple[BucketCapacity, ...]
    ],
] = {"combo": combo_capacity, "pair": pair_capacity}
"""Kinds of templates whose replicas hand KV over over the network, and what they serve then."""


def fleet_of(problem: PlanningProblem, machines: Sequence[str] = ()) -> NodeSupply:
    """Prices and availability as tables.

    A machine that some template names is a node type of its own, free, of which its region has one: so no two
    templates stand on it, nor a template twice. What it costs is in the type it is of.
    """
    nodes = tuple(node.name for node in problem.nodes) + tuple(f"{MACHINE}{name}" for name in machines)
    shape = (len(problem.regions), len(nodes))
    price, available, reserved = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, region in enumerate(problem.regions):
        for offer in region.offers:
            column = nodes.index(offer.node)
            price[row, column] = offer.price_usd_per_h
            available[row, column] = offer.available
            reserved[row, column] = min(offer.reserved, offer.available)
    for place, name in enumerate(machines, len(problem.nodes)):
        machine = machine_of(problem, name)
        for row, region in enumerate(problem.regions):
            available[row, place] = machine is not None and machine.gpus > 0 and machine.region == region.name
    paid = reserved if reserved.any() else None
    return NodeSupply(tuple(region.name for region in problem.regions), nodes, price, available, paid)


def columns(
    problem: PlanningProblem,
    templates: Mapping[str, Sequence[Template]],
    *,
    running_plan: Plan | None = None,
    pins: Sequence[Deployment] = (),
    exactly: bool = False,
    codecs: Mapping[str, Codec] | None = None,
    rate_caches: RateCaches | None = None,
) -> ProgramColumns:
    """The program over some templates of each model; running ones that are still known keep their price.

    Pins ask for at least so many copies, or for exactly so many. `codecs` says in which each model's KV crosses;
    what is not named crosses as it is.
    """
    rate_caches = RateCaches(None) if rate_caches is None else rate_caches
    chosen = {demand.name: (codecs or {}).get(demand.name, LOSSLESS) for demand in problem.asks}
    groups = tuple(
        tuple(
            _in_codec(problem, demand, each, chosen[demand.name], rate_caches)
            for each in templates.get(demand.name, ())
        )
        for demand in problem.asks
    )
    named = {
        machine for group in groups for each in group if each.kind == "group" for machine in each.machines
    }
    node_supply = fleet_of(problem, sorted(named))
    models = tuple(
        model_columns(
            problem, demand, group, node_supply, chosen[demand.name], rate_caches.of(problem, demand)
        )
        for demand, group in zip(problem.asks, groups, strict=True)
    )
    links = links_of(problem.links, node_supply.regions, problem.headroom)
    bare = with_terms(problem, groups, FlowProgram(node_supply, models, links))
    program_columns = ProgramColumns(problem, groups, bare, chosen, books=rate_caches)
    counts = tuple(
        ColumnCount(key, deployment.count)
        for deployment in (running_plan.deployments if running_plan else ())
        if (key := program_columns.key(deployment.template, deployment.region)) is not None
    )
    program = replace(
        bare,
        running=counts,
        pins=tuple(_pin(program_columns, pin, exactly) for pin in pins),
        init_penalty=problem.init_penalty,
        headroom=problem.headroom,
        budget_usd_per_h=problem.budget_usd_per_h,
    )
    return ProgramColumns(problem, groups, program, chosen, books=rate_caches)


def _in_codec(
    problem: PlanningProblem,
    model_demand: ModelDemand,
    template: Template,
    codec: Codec,
    rate_caches: RateCaches,
) -> Template:
    """A template whose parts hand KV over in this codec; groups of machines have one of their own."""
    if template.codec == codec or template.kind not in CROSSING or not template.hands_over:
        return template
    rate_cache = rate_caches.of(problem, model_demand)

    def make() -> Template:
        capacity = CROSSING[template.kind](problem, model_demand, template.replicas, codec, rate_cache)
        return replace(template, capacity=capacity, codec=codec)

    asked = tuple(
        demand.rate_per_s > 0 for demand in model_demand.demands
    )  # cards are as busy as these let them be
    return rate_cache.once_of(("in", codec, asked), template, make)


def codecs_of(plan: Plan) -> dict[str, Codec]:
    result = {t.model: t.codec for t in plan.templates if t.kind in CROSSING and t.hands_over}
    return result | {flow.model: flow.codec for flow in plan.flows}


def links_of(links: Sequence[Link], regions: Sequence[str], headroom: float) -> tuple[LinkRow, ...]:
    """Links by region index, with what they are planned to carry."""
    return tuple(
        LinkRow(
            regions.index(link.source),
            regions.index(link.target),
            link_bits_per_s(link, headroom),
            link.egress_usd_per_gb,
        )
        for link in links
    )


def plan_of(program_columns: ProgramColumns, allocation: Allocation, strategy: str) -> Plan:
    """The plan that an allocation describes, with only the templates it uses."""
    problem = program_columns.problem
    regions = program_columns.program.fleet.regions
    used: dict[str, Template] = {}
    deployments = []
    for key, count in allocation.counts:
        if count:
            template = program_columns.templates[key.group][key.template]
            used[template.name] = template
            deployments.append(Deployment(template.name, regions[key.region], count))
    shares = _trimmed(program_columns, allocation)
    flows = tuple(
        PlannedFlow(
            problem.asks[f.model].name,
            f.bucket,
            regions[f.source],
            regions[f.target],
            f.rate_per_s,
            program_columns.codecs.get(problem.asks[f.model].name, LOSSLESS),
        )
        for f in allocation.flows
        if f.rate_per_s > 0
    )
    fraction = 1.0 if allocation.found else 0.0
    if allocation.shortfall is not None:
        fraction = allocation.shortfall.fraction
    gap = allocation.gap if np.isfinite(allocation.gap) else 1.0
    plan = Plan(
        strategy,
        tuple(used.values()),
        tuple(sorted(deployments, key=lambda d: (d.template, d.region))),
        tuple(
            LengthBucket(d.model, d.bucket, d.longest_tokens, d.rate_per_s, d.new_tokens / d.input_tokens)
            for demand in problem.asks
            for d in demand.demands
        ),
        shares,
        flows,
        tuple(_prediction(program_columns, demand, used, deployments, shares) for demand in problem.asks),
        allocation.rent_usd_per_h,
        max(0.0, gap),
        fraction,
        _starts_usd_per_h(program_columns.program, allocation),
        formats=tuple((demand.name, demand.model.weights_are) for demand in problem.asks if demand.formats),
        engine=problem.engine.engine,
    )
    charges = charges_of(problem, plan, egress_usd_per_h(problem, plan))
    wires = tuple(wire_of(link) for link in problem.links)
    return replace(plan, charges=charges, thresholds=thresholds_of(plan), wires=wires)


ROUNDING = 1e-6  # Of a bucket's demand: what a solver may leave where nothing should be.


def across_and_home(plan: Plan, model: str) -> tuple[dict[tuple[str, str], list[float]], list[float]]:
    """Rates by bucket, without what a solver may leave where nothing should be: of each link, and of who stays."""
    mine = {template.name for template in plan.templates if template.model == model}
    asked = [bucket.rate_per_s for bucket in plan.buckets if bucket.model == model]
    flows = [flow for flow in plan.flows if flow.model == model]
    closed = [share for share in plan.shares if share.phase == "closed" and share.template in mine]
    rates = [(s.region, s.region, s.bucket, s.rate_per_s) for s in closed]
    rates += [(f.prefill_region, f.decode_region, f.bucket, f.rate_per_s) for f in flows]
    across: dict[tuple[str, str], list[float]] = {}
    home = [0.0] * len(asked)
    for source, target, bucket, rate in rates:
        if rate > ROUNDING * asked[bucket]:
            crossing = across.setdefault((source, target), [0.0] * len(asked)) if source != target else home
            crossing[bucket] += rate
    return across, home


def thresholds_of(plan: Plan) -> tuple[PlannedThreshold, ...]:
    """From which length on its flows cross: inside the first bucket that does, as much of it as crosses. None of
    models that cross whole, or not at all, or of which a longer one stays than one that crosses."""
    thresholds = []
    for model in dict.fromkeys(flow.model for flow in plan.flows):
        buckets = [bucket for bucket in plan.buckets if bucket.model == model]
        across, home = across_and_home(plan, model)
        first = {link: next(i for i, rate in enumerate(rates) if rate) for link, rates in across.items()}
        if not any(home) or any(home[min(first.values(), default=0) + 1 :]):
            continue
        for link, place in first.items():
            low, high = buckets[place - 1].longest_tokens if place else 0, buckets[place].longest_tokens
            crossing = sum(rates[place] for rates in across.values())
            tokens = high - crossing / (crossing + home[place]) * (high - low)
            thresholds.append(PlannedThreshold(model, *link, tokens * buckets[place].new_share))
    return tuple(thresholds)


def egress_usd_per_h(problem: PlanningProblem, plan: Plan) -> float:
    prices = {(link.source, link.target): link.egress_usd_per_gb for link in problem.links}
    asks, total = {demand.name: demand for demand in problem.asks}, 0.0
    for flow in plan.flows:
        price = prices.get((flow.prefill_region, flow.decode_region), 0.0)
        if price:
            bits = float(wire_bits(asks[flow.model], flow.codec)[flow.bucket])
            total += flow.rate_per_s * bits / 8e9 * 3600 * price
    return total


def _starts_usd_per_h(program: FlowProgram, allocation: Allocation) -> float:
    """CORAL's I: K times the price of every copy that does not run yet."""
    running = dict(program.running)
    cost = 0.0
    for key, count in allocation.counts:
        uses = program.models[key.group].uses[key.template]
        cost += price_of(program.fleet, uses, key.region) * max(0, count - running.get(key, 0))
    return program.init_penalty * cost


def _trimmed(program_columns: ProgramColumns, allocation: Allocation) -> tuple[PlannedShare, ...]:
    """Shares without the slack that a linear program may leave: no more is prefilled than flows on."""
    wanted: dict[tuple[int, int, str, int], float] = {}
    for flow in allocation.flows:
        for phase, region in (("prefill", flow.source), ("decode", flow.target)):
            key = (flow.model, flow.bucket, phase, region)
            wanted[key] = wanted.get(key, 0.0) + flow.rate_per_s
    offered: dict[tuple[int, int, str, int], float] = {}
    for share in allocation.shares:
        key = (share.key.group, share.bucket, share.phase, share.key.region)
        offered[key] = offered.get(key, 0.0) + share.rate_per_s
    kept = []
    for share in allocation.shares:
        key = (share.key.group, share.bucket, share.phase, share.key.region)
        rate = share.rate_per_s
        if share.phase != "closed":
            rate *= min(1.0, wanted.get(key, 0.0) / max(offered[key], 1e-30))
        if rate > 1e-12:
            template = program_columns.templates[share.key.group][share.key.template].name
            place = program_columns.program.fleet.regions[share.key.region]
            kept.append(PlannedShare(template, place, share.bucket, share.phase, rate))
    return tuple(kept)


def _pin(program_columns: ProgramColumns, deployment: Deployment, exactly: bool) -> ColumnPin:
    key = program_columns.key(deployment.template, deployment.region)
    if key is None:
        if f": {GROUP_NAME}" in deployment.template:
            how = "a search of another length may find others; give --running with the plan that has it"
            raise InputError("pin", f"no search found {deployment.template!r}: {how}")
        known = [template.name for group in program_columns.templates for template in group]
        raise UnknownNameError("pin", f"{deployment.template}@{deployment.region}", known)
    return ColumnPin(key, deployment.count, exactly)


def _prediction(
    program_columns: ProgramColumns,
    model_demand: ModelDemand,
    used: Mapping[str, Template],
    deployments: Sequence[Deployment],
    shares: Sequence[PlannedShare],
) -> Prediction:
    """What to expect of a model; TTFT with what its KV is late over cards as busy as planned."""
    mine = [share for share in shares if used[share.template].model == model_demand.name]
    finished = [share for share in mine if share.phase in ("decode", "closed")]
    served = sum(share.rate_per_s for share in finished)
    prefilled = sum(share.rate_per_s for share in mine if share.phase == "prefill")
    ttft = _mean([(s.rate_per_s, _capacity(used, s).ttft_s) for s in mine if s.phase != "decode"])
    if prefilled > 0:
        bits = wire_bits(model_demand, program_columns.codecs.get(model_demand.name, LOSSLESS))
        copies = {(d.template, d.region): d.count for d in deployments}
        begun = sum(share.rate_per_s for share in mine if share.phase != "decode")
        ttft += (
            late_s(model_demand, bits, program_columns.problem.by_name, used, copies, mine)
            * prefilled
            / begun
        )
    tpot = _mean([(s.rate_per_s, _capacity(used, s).tpot_s) for s in finished])
    trust = [used[d.template].confidence for d in deployments if used[d.template].model == model_demand.name]
    confidence: Confidence = max(trust, key=ORDER.index) if trust else "assumed"
    tokens = {demand.bucket: (demand.input_tokens, demand.output_tokens) for demand in model_demand.demands}
    own = program_columns.fractions.get(model_demand.name) if program_columns.fractions else None
    return Prediction(
        model_demand.name,
        model_demand.rate_per_s,
        served / program_columns.problem.headroom,
        ttft,
        tpot,
        confidence,
        sum(share.rate_per_s * tokens[share.bucket][0] for share in finished),
        sum(share.rate_per_s * tokens[share.bucket][1] for share in finished),
        own,
        *range_per_s(
            model_demand,
            mine,
            used,
            program_columns.problem.by_name,
            served / program_columns.problem.headroom,
        ),
    )


def _capacity(used: Mapping[str, Template], share: PlannedShare) -> BucketCapacity:
    return used[share.template].capacity[share.bucket]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(rate for rate, _ in pairs)
    return sum(rate * value for rate, value in pairs) / weight if weight > 0 else 0.0
