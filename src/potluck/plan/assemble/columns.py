"""The integer program of a problem's templates, and the plan of its allocation."""

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
    node_price_usd_per_h,
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

MACHINE_PREFIX = "machine "  # Marks a named machine among a fleet's node types.


class _ColumnRow(NamedTuple):
    """Rates and network limit of a template in the program, independent of demand rates and supply."""

    prefill_per_s: Floats
    decode_per_s: Floats
    closed_per_s: Floats
    cards_bits_per_s: float


def _column_row(
    problem: PlanningProblem, demand: ModelDemand, template: Template, bits: Floats
) -> _ColumnRow:
    """The template's row of rates by bucket, without the buckets that its network cards cannot pass on in time."""
    table = np.zeros((3, len(demand.buckets)))
    for capacity in template.capacity:
        rates = capacity.prefill_per_s, capacity.decode_per_s, capacity.closed_per_s
        table[:, capacity.bucket] = rates
    if not table[:2].any():
        return _ColumnRow(
            table[0], table[1], table[2], float("inf")
        )  # KV transfer inside a closed group is part of its rate.
    cards = cards_of(template.replicas, problem.by_name)
    busy, passes = busy_limits(demand, bits, cards, problem.headroom)
    table[:2] *= passes
    return _ColumnRow(table[0], table[1], table[2], busy * cards.all_bits_per_s)


def model_columns(
    problem: PlanningProblem,
    demand: ModelDemand,
    group: Sequence[Template],
    node_supply: NodeSupply,
    codec: Codec,
    rate_cache: RateCache,
) -> ModelColumns:
    """The columns of one model's templates: nodes, rates by bucket, network limits."""
    node_columns = {node: column for column, node in enumerate(node_supply.nodes)}
    uses = np.zeros((len(group), len(node_supply.nodes)), np.uint8)
    bits = wire_bits(demand, codec)
    has_demand = tuple(
        bucket.rate_per_s > 0 for bucket in demand.buckets
    )  # Only buckets with demand limit the network cards.
    rows = [
        rate_cache.once_of(
            (codec, has_demand), template, partial(_column_row, problem, demand, template, bits)
        )
        for template in group
    ]
    for row, template in enumerate(group):
        for count in template.nodes:
            uses[row, node_columns[count.node]] = count.count
        for machine in template.machines if template.kind == "group" else ():
            uses[row, node_columns[f"{MACHINE_PREFIX}{machine}"]] = 1
    size = (len(group), len(demand.buckets))
    rates = [np.array([row[phase] for row in rows]).reshape(size) for phase in range(3)]
    prefill, decode, closed = rates
    cards = np.array([row.cards_bits_per_s for row in rows])
    buckets = tuple(
        DemandBucket(
            f"{demand.name} up to {d.longest_tokens} tokens",
            d.rate_per_s,
            float(bits[d.bucket]),
            frozenset(
                (node_supply.regions.index(link.source), node_supply.regions.index(link.target))
                for link in problem.links
                if crossing_s(bits[d.bucket], link) > crossing_room_s(demand, d)
            ),
            d.firm,
            crossing,
        )
        for d, crossing in zip(
            demand.buckets, _crossing_usd_per_h(problem, node_supply, uses, rates), strict=True
        )
    )
    return ModelColumns(
        demand.name,
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
    """Complexity penalty of 1 request/s over a link, by bucket: a share of the least rent that serves it."""
    bucket_count = rates[0].shape[1]
    if not (problem.complexity_share and problem.links and len(uses)):
        return [0.0] * bucket_count
    placeable = (uses[:, None, :] <= node_supply.available[None]).all(axis=2)
    price = np.where(placeable, uses @ node_supply.price_usd_per_h.T, np.inf).min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        least_by_phase = [np.where(rate > 0, price[:, None] / rate, np.inf).min(axis=0) for rate in rates]
    least_rent = np.minimum(least_by_phase[0] + least_by_phase[1], least_by_phase[2]) / problem.headroom
    return [float(usd) if np.isfinite(usd) else 0.0 for usd in problem.complexity_share * least_rent]


def crossing_s(wire_bits: float, link: Link) -> float:
    """Seconds from the end of a mean prompt's prefill to the arrival of its KV, on an otherwise idle link.

    Layers are sent as they are computed, so a fast link has only the last layers left to send; slow links are limited
    by their bandwidth row. Half of the KV is assumed left.
    """
    return float(link_alpha_beta(link).time_s(wire_bits / 16))


def crossing_room_s(model_demand: ModelDemand, demand: BucketDemand) -> float:
    """The part of the TTFT objective that templates reserve for KV transfer."""
    return (model_demand.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S) * HANDOVER_SHARE


@dataclass(frozen=True, slots=True)
class ProgramColumns:
    """The integer program with the problem and the templates that its indices refer to."""

    problem: PlanningProblem
    templates: tuple[tuple[Template, ...], ...]
    program: FlowProgram
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Fraction of each model's demand in the program, where it is not all."""
    rate_caches: RateCaches = field(default_factory=partial(RateCaches, None))  # Rates of timed layouts.

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
        """The columns with these (template, region) names that exist."""
        regions = {
            region: index_of_region for index_of_region, region in enumerate(self.program.fleet.regions)
        }
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

    def complexity_usd_per_h(self, plan: Plan) -> float:
        """Complexity penalty of a plan: of its copies, and of requests that cross links."""
        total, models = 0.0, {model.name: model for model in self.program.models}
        for deployment in plan.deployments:
            key = self.key(deployment.template, deployment.region)
            total += 0.0 if key is None else deployment.count * self.program.copy_complexity_usd_per_h(key)
        for flow in plan.flows:
            if flow.prefill_region != flow.decode_region:
                total += flow.rate_per_s * models[flow.model].buckets[flow.bucket].crossing_usd_per_h
        return total

    def counts_of(self, plan: Plan) -> dict[ColumnKey, int] | None:
        """Copies of a plan by column; None when one of its templates is not in the program."""
        indices_of_template = {
            template.name: (group, index)
            for group, members in enumerate(self.templates)
            for index, template in enumerate(members)
        }
        regions = self.program.fleet.regions
        counts: dict[ColumnKey, int] = {}
        for deployment in plan.deployments:
            if deployment.template not in indices_of_template or deployment.region not in regions:
                return None
            key = ColumnKey(*indices_of_template[deployment.template], regions.index(deployment.region))
            counts[key] = deployment.count
        return counts


CAPACITY_FUNCTIONS: dict[
    str,
    Callable[
        [PlanningProblem, ModelDemand, Sequence[PlannedReplica], Codec, RateCache], tuple[BucketCapacity, ...]
    ],
] = {"combo": combo_capacity, "pair": pair_capacity}
"""Template kinds whose replicas transfer KV over the network, with the function for their capacity."""


def fleet_of(problem: PlanningProblem, machines: Sequence[str] = ()) -> NodeSupply:
    """Prices and availability as tables over regions and node types.

    A machine that a template names is added as a node type with one free node in its region, so that at most one copy
    uses it. Its rent is charged under its real node type.
    """
    nodes = tuple(node.name for node in problem.nodes) + tuple(f"{MACHINE_PREFIX}{name}" for name in machines)
    shape = (len(problem.regions), len(nodes))
    price, available, reserved = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, region in enumerate(problem.regions):
        for offer in region.offers:
            column = nodes.index(offer.node)
            price[row, column] = offer.price_usd_per_h
            available[row, column] = offer.available
            reserved[row, column] = min(offer.reserved, offer.available)
    for column_of_machine, name in enumerate(machines, len(problem.nodes)):
        machine = machine_of(problem, name)
        for row, region in enumerate(problem.regions):
            available[row, column_of_machine] = (
                machine is not None and machine.gpus > 0 and machine.region == region.name
            )
    reserved_or_none = reserved if reserved.any() else None
    return NodeSupply(
        tuple(region.name for region in problem.regions), nodes, price, available, reserved_or_none
    )


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
    """The program over the given templates; running copies are exempt from the start-up penalty.

    Pins require at least their count of copies, or exactly (`exactly`). `codecs` maps models to KV codecs; models
    without an entry send KV uncompressed.
    """
    rate_caches = RateCaches(None) if rate_caches is None else rate_caches
    chosen = {demand.name: (codecs or {}).get(demand.name, LOSSLESS) for demand in problem.demands}
    groups = tuple(
        tuple(
            _in_codec(problem, demand, template, chosen[demand.name], rate_caches)
            for template in templates.get(demand.name, ())
        )
        for demand in problem.demands
    )
    named_machines = {
        machine
        for group in groups
        for template in group
        if template.kind == "group"
        for machine in template.machines
    }
    node_supply = fleet_of(problem, sorted(named_machines))
    models = tuple(
        model_columns(
            problem, demand, group, node_supply, chosen[demand.name], rate_caches.of(problem, demand)
        )
        for demand, group in zip(problem.demands, groups, strict=True)
    )
    links = links_of(problem.links, node_supply.regions, problem.headroom)
    program_without_counts = with_terms(problem, groups, FlowProgram(node_supply, models, links))
    program_columns = ProgramColumns(problem, groups, program_without_counts, chosen, rate_caches=rate_caches)
    counts = tuple(
        ColumnCount(key, deployment.count)
        for deployment in (running_plan.deployments if running_plan else ())
        if (key := program_columns.key(deployment.template, deployment.region)) is not None
    )
    program = replace(
        program_without_counts,
        running=counts,
        pins=tuple(_pin(program_columns, pin, exactly) for pin in pins),
        init_penalty=problem.init_penalty,
        headroom=problem.headroom,
        budget_usd_per_h=problem.budget_usd_per_h,
    )
    return ProgramColumns(problem, groups, program, chosen, rate_caches=rate_caches)


def _in_codec(
    problem: PlanningProblem,
    demand: ModelDemand,
    template: Template,
    codec: Codec,
    rate_caches: RateCaches,
) -> Template:
    """The template with its KV transfer in this codec; groups of machines keep their own codec."""
    if template.codec == codec or template.kind not in CAPACITY_FUNCTIONS or not template.hands_over:
        return template
    rate_cache = rate_caches.of(problem, demand)

    def with_codec() -> Template:
        capacity = CAPACITY_FUNCTIONS[template.kind](problem, demand, template.replicas, codec, rate_cache)
        return replace(template, capacity=capacity, codec=codec)

    has_demand = tuple(
        bucket.rate_per_s > 0 for bucket in demand.buckets
    )  # Only buckets with demand limit the network cards.
    return rate_cache.once_of(("in", codec, has_demand), template, with_codec)


def codecs_of(plan: Plan) -> dict[str, Codec]:
    """The KV codec of each model that transfers KV over the network."""
    codecs = {t.model: t.codec for t in plan.templates if t.kind in CAPACITY_FUNCTIONS and t.hands_over}
    return codecs | {flow.model: flow.codec for flow in plan.flows}


def links_of(links: Sequence[Link], regions: Sequence[str], headroom: float) -> tuple[LinkRow, ...]:
    """Links by region index, with the bandwidth they may be planned to carry."""
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
    """The plan of an allocation, with only the templates it uses."""
    problem = program_columns.problem
    regions = program_columns.program.fleet.regions
    used: dict[str, Template] = {}
    deployments = []
    for key, count in allocation.counts:
        if count:
            template = program_columns.templates[key.group][key.template]
            used[template.name] = template
            deployments.append(Deployment(template.name, regions[key.region], count))
    shares = _used_shares(program_columns, allocation)
    flows = tuple(
        PlannedFlow(
            problem.demands[f.model].name,
            f.bucket,
            regions[f.source],
            regions[f.target],
            f.rate_per_s,
            program_columns.codecs.get(problem.demands[f.model].name, LOSSLESS),
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
            LengthBucket(
                bucket.model,
                bucket.bucket,
                bucket.longest_tokens,
                bucket.rate_per_s,
                bucket.new_tokens / bucket.input_tokens,
            )
            for demand in problem.demands
            for bucket in demand.buckets
        ),
        shares,
        flows,
        tuple(_prediction(program_columns, demand, used, deployments, shares) for demand in problem.demands),
        allocation.rent_usd_per_h,
        max(0.0, gap),
        fraction,
        _starts_usd_per_h(program_columns.program, allocation),
        formats=tuple(
            (demand.name, demand.model.weights_are) for demand in problem.demands if demand.formats
        ),
        engine=problem.engine.engine,
    )
    charges = charges_of(problem, plan, egress_usd_per_h(problem, plan))
    wires = tuple(wire_of(link) for link in problem.links)
    return replace(plan, charges=charges, thresholds=thresholds_of(plan), wires=wires)


RATE_TOLERANCE = 1e-6  # Of a bucket's demand: rates below it are solver noise.


def crossing_and_local_rates(
    plan: Plan, model: str
) -> tuple[dict[tuple[str, str], list[float]], list[float]]:
    """(rates by bucket over each link, rates by bucket within regions) of a model, without solver noise."""
    templates = {template.name for template in plan.templates if template.model == model}
    bucket_rates = [bucket.rate_per_s for bucket in plan.buckets if bucket.model == model]
    flows = [flow for flow in plan.flows if flow.model == model]
    closed = [share for share in plan.shares if share.phase == "closed" and share.template in templates]
    rates = [(s.region, s.region, s.bucket, s.rate_per_s) for s in closed]
    rates += [(f.prefill_region, f.decode_region, f.bucket, f.rate_per_s) for f in flows]
    rates_by_link: dict[tuple[str, str], list[float]] = {}
    local_rates = [0.0] * len(bucket_rates)
    for source, target, bucket, rate in rates:
        if rate > RATE_TOLERANCE * bucket_rates[bucket]:
            link_rates = (
                rates_by_link.setdefault((source, target), [0.0] * len(bucket_rates))
                if source != target
                else local_rates
            )
            link_rates[bucket] += rate
    return rates_by_link, local_rates


def thresholds_of(plan: Plan) -> tuple[PlannedThreshold, ...]:
    """The prompt length from which each model's requests cross each link.

    It lies inside the first bucket that crosses, by the share of the bucket that does. Models get no threshold when
    all their requests cross, or none, or when a longer bucket stays than one that crosses.
    """
    thresholds = []
    for model in dict.fromkeys(flow.model for flow in plan.flows):
        buckets = [bucket for bucket in plan.buckets if bucket.model == model]
        rates_by_link, local_rates = crossing_and_local_rates(plan, model)
        first = {
            link: next(i for i, rate in enumerate(rates) if rate) for link, rates in rates_by_link.items()
        }
        if not any(local_rates) or any(local_rates[min(first.values(), default=0) + 1 :]):
            continue
        for link, index in first.items():
            low, high = buckets[index - 1].longest_tokens if index else 0, buckets[index].longest_tokens
            crossing = sum(rates[index] for rates in rates_by_link.values())
            tokens = high - crossing / (crossing + local_rates[index]) * (high - low)
            thresholds.append(PlannedThreshold(model, *link, tokens * buckets[index].new_share))
    return tuple(thresholds)


def egress_usd_per_h(problem: PlanningProblem, plan: Plan) -> float:
    """Egress charges for the KV that a plan sends over links."""
    prices = {(link.source, link.target): link.egress_usd_per_gb for link in problem.links}
    demands, total = {demand.name: demand for demand in problem.demands}, 0.0
    for flow in plan.flows:
        price = prices.get((flow.prefill_region, flow.decode_region), 0.0)
        if price:
            bits = float(wire_bits(demands[flow.model], flow.codec)[flow.bucket])
            total += flow.rate_per_s * bits / 8e9 * 3600 * price
    return total


def _starts_usd_per_h(program: FlowProgram, allocation: Allocation) -> float:
    """CORAL's I: K times the price of every copy that is not running yet."""
    running = dict(program.running)
    cost = 0.0
    for key, count in allocation.counts:
        uses = program.models[key.group].uses[key.template]
        cost += node_price_usd_per_h(program.fleet, uses, key.region) * max(0, count - running.get(key, 0))
    return program.init_penalty * cost


def _used_shares(program_columns: ProgramColumns, allocation: Allocation) -> tuple[PlannedShare, ...]:
    """Shares scaled down to the flows: the linear program may leave slack between a phase and its flows."""
    flow_rates: dict[tuple[int, int, str, int], float] = {}
    for flow in allocation.flows:
        for phase, region in (("prefill", flow.source), ("decode", flow.target)):
            key = (flow.model, flow.bucket, phase, region)
            flow_rates[key] = flow_rates.get(key, 0.0) + flow.rate_per_s
    share_rates: dict[tuple[int, int, str, int], float] = {}
    for share in allocation.shares:
        key = (share.key.group, share.bucket, share.phase, share.key.region)
        share_rates[key] = share_rates.get(key, 0.0) + share.rate_per_s
    planned_shares = []
    for share in allocation.shares:
        key = (share.key.group, share.bucket, share.phase, share.key.region)
        rate = share.rate_per_s
        if share.phase != "closed":
            rate *= min(1.0, flow_rates.get(key, 0.0) / max(share_rates[key], 1e-30))
        if rate > 1e-12:
            template = program_columns.templates[share.key.group][share.key.template].name
            region_name = program_columns.program.fleet.regions[share.key.region]
            planned_shares.append(PlannedShare(template, region_name, share.bucket, share.phase, rate))
    return tuple(planned_shares)


def _pin(program_columns: ProgramColumns, deployment: Deployment, exactly: bool) -> ColumnPin:
    """The pin of a deployment; raises UnknownNameError when the program lacks its template."""
    key = program_columns.key(deployment.template, deployment.region)
    if key is None:
        if f": {GROUP_NAME}" in deployment.template:
            hint = "a search of another length may find others; give --running with the plan that has it"
            raise InputError("pin", f"no search found {deployment.template!r}: {hint}")
        template_names = [template.name for group in program_columns.templates for template in group]
        raise UnknownNameError("pin", f"{deployment.template}@{deployment.region}", template_names)
    return ColumnPin(key, deployment.count, exactly)


def _prediction(
    program_columns: ProgramColumns,
    demand: ModelDemand,
    used: Mapping[str, Template],
    deployments: Sequence[Deployment],
    shares: Sequence[PlannedShare],
) -> Prediction:
    """The prediction for one model; its TTFT includes the KV transfer over network cards at planned utilization."""
    model_shares = [share for share in shares if used[share.template].model == demand.name]
    finished = [share for share in model_shares if share.phase in ("decode", "closed")]
    served_per_s = sum(share.rate_per_s for share in finished)
    prefilled_per_s = sum(share.rate_per_s for share in model_shares if share.phase == "prefill")
    ttft = _mean([(s.rate_per_s, _capacity(used, s).ttft_s) for s in model_shares if s.phase != "decode"])
    if prefilled_per_s > 0:
        bits = wire_bits(demand, program_columns.codecs.get(demand.name, LOSSLESS))
        copies = {(d.template, d.region): d.count for d in deployments}
        started_per_s = sum(share.rate_per_s for share in model_shares if share.phase != "decode")
        ttft += (
            late_s(demand, bits, program_columns.problem.by_name, used, copies, model_shares)
            * prefilled_per_s
            / started_per_s
        )
    tpot = _mean([(s.rate_per_s, _capacity(used, s).tpot_s) for s in finished])
    confidences = [used[d.template].confidence for d in deployments if used[d.template].model == demand.name]
    confidence: Confidence = max(confidences, key=ORDER.index) if confidences else "assumed"
    tokens = {bucket.bucket: (bucket.input_tokens, bucket.output_tokens) for bucket in demand.buckets}
    fraction = program_columns.fractions.get(demand.name) if program_columns.fractions else None
    return Prediction(
        demand.name,
        demand.rate_per_s,
        served_per_s / program_columns.problem.headroom,
        ttft,
        tpot,
        confidence,
        sum(share.rate_per_s * tokens[share.bucket][0] for share in finished),
        sum(share.rate_per_s * tokens[share.bucket][1] for share in finished),
        fraction,
        *range_per_s(
            demand,
            model_shares,
            used,
            program_columns.problem.by_name,
            served_per_s / program_columns.problem.headroom,
        ),
    )


def _capacity(used: Mapping[str, Template], share: PlannedShare) -> BucketCapacity:
    return used[share.template].capacity[share.bucket]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(rate for rate, _ in pairs)
    return sum(rate * value for rate, value in pairs) / weight if weight > 0 else 0.0
