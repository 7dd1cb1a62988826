"""Verify a plan independently of the solver that made it.

Only the problem is trusted: replicas are timed again, nodes counted again, flows balanced again. Every violation is
reported as a sentence; a plan without violations is valid. Commands verify every plan they print.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isclose

import numpy as np

from potluck.core.values.engine_abilities import refusals
from potluck.core.values.kv import LOSSLESS, lossy_crossings
from potluck.core.values.plan import BucketCapacity, Plan, Template
from potluck.core.values.types import Role
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.assemble.columns import (
    CAPACITY_FUNCTIONS,
    codecs_of,
    crossing_and_local_rates,
    crossing_room_s,
    crossing_s,
    egress_usd_per_h,
)
from potluck.plan.assemble.term_rows import (
    EGRESS,
    charges_of,
    domains,
    rent_usd_per_h,
    required_share,
    runs_in,
)
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.group import group_capacity
from potluck.plan.templates.placement_table import aggregated_capacity
from potluck.plan.timing.named_machines import machine_of, timer_of
from potluck.plan.timing.network_cards import busy_limits, cards_of, link_bits_per_s, wire_bits
from potluck.plan.timing.rate_cache import memory_rate_cache
from potluck.plan.timing.replica_rates import fits, replica_capacity

LP_TOLERANCE = 1e-5  # Relative error accepted in shares that a linear program computes.
LP_LIMIT_S = 60.0

Copies = Mapping[tuple[str, str], int]  # (template, region) to number of copies.


def broken_terms(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """A sentence for every term or charge that the plan violates."""
    yield from _check_charges(problem, plan)
    for demand in problem.demands:
        yield from _check_user_ttft(plan, demand)
        if demand.terms.asked:
            yield from _check_placement(problem, plan, demand)
            yield from _check_copies(problem, plan, demand)
            yield from _check_survival(problem, plan, demand)


def _copies_of_model(plan: Plan, model: str) -> dict[tuple[str, str], int]:
    copies: dict[tuple[str, str], int] = {}
    for deployment in plan.deployments:
        if plan.template(deployment.template).model == model:
            key = (deployment.template, deployment.region)
            copies[key] = copies.get(key, 0) + deployment.count
    return copies


def _check_placement(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    for name, region in _copies_of_model(plan, demand.name):
        if not runs_in(demand, plan.template(name), region):
            yield f"{name}@{region}: the terms of {demand.name} do not allow this placement"


def _check_user_ttft(plan: Plan, demand: ModelDemand) -> Iterator[str]:
    """TTFT plus the round trip to the farthest users is within the objective, in every region of the plan."""
    if not demand.origins:
        return
    for share in plan.shares:
        template = plan.template(share.template)
        if (
            template.model != demand.name
            or share.phase == "decode"
            or not demand.buckets[share.bucket].promised
        ):
            continue
        user_ttft_s = template.capacity[share.bucket].ttft_s + demand.max_rtt_s(share.region)
        if user_ttft_s > demand.slo.ttft_s * (1 + LP_TOLERANCE):
            where = f"{share.template}@{share.region}"
            ttft = f"TTFT of bucket {share.bucket} is {user_ttft_s:.3g} s for the farthest users"
            yield f"{where}: {ttft}, the objective {demand.slo.ttft_s:.3g} s"


def _check_copies(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    copies_by_key, terms = _copies_of_model(plan, demand.name), demand.terms
    copy_count = sum(copies_by_key.values())
    for phase, other_phase in (
        ("prefill", "decode"),
        ("decode", "prefill"),
    ):  # Copies that only run the other phase do not count.
        phase_copies = sum(
            count
            for (name, _), count in copies_by_key.items()
            if any(r.role != other_phase for r in plan.template(name).replicas)
        )
        if phase_copies < terms.min_copies:
            yield f"{demand.name}: {phase_copies} copies for {phase}, min_copies is {terms.min_copies}"
    if terms.max_copies is not None and copy_count > terms.max_copies:
        yield f"{demand.name}: {copy_count} copies, max_copies is {terms.max_copies}"
    gpu_types = {
        problem.node(node).gpu.name for name, _ in copies_by_key for node in plan.template(name).node_counts
    }
    if terms.max_gpu_kinds is not None and len(gpu_types) > terms.max_gpu_kinds:
        yield f"{demand.name}: {len(gpu_types)} GPU types, max_gpu_kinds is {terms.max_gpu_kinds}"


def _check_survival(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    for name, remaining in after_losses(problem, plan, demand):
        domain = "spot" if name == "spot nodes" else demand.terms.survive or "node"
        required = required_share(demand.terms, domain) * plan.fraction_of(demand.name)
        if served_share(problem, plan, demand, remaining) < required - LP_TOLERANCE:
            yield f"{demand.name}: without {name} less than the required {required:.1%} of the demand is served"


def after_losses(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[tuple[str, Copies]]:
    """(name, remaining copies) of every loss that the model's terms require it to survive."""
    copies = _copies_of_model(plan, demand.name)
    if demand.terms.survive == "node":
        for key in copies:
            yield f"a node of {key[0]}@{key[1]}", copies | {key: copies[key] - 1}
    for domain, named_domains in domains(problem).items():
        if required_share(demand.terms, domain) > 0:
            for name, cells in named_domains:
                yield name, copies_without(plan, copies, cells)


def copies_without(plan: Plan, copies: Copies, cells: list[tuple[str, str]]) -> Copies:
    """The copies that use none of these (region, node type) pairs."""
    return {
        (name, region): count
        for (name, region), count in copies.items()
        if not any((region, node) in cells for node in plan.template(name).node_counts)
    }


def served_share(
    problem: PlanningProblem, plan: Plan, demand: ModelDemand, copies: Copies, largest: float = 1.0
) -> float:
    """The largest share of a model's demand, up to `largest`, that these copies can serve with any routing.

    A linear program over the share, the time of each column in each phase of each bucket, and flows between regions.
    """
    cost, upper = [-1.0], [largest]
    rows: list[tuple[float, float, dict[int, float]]] = []

    def new_variable() -> int:
        cost.append(0.0)
        upper.append(INFINITY)
        return len(cost) - 1

    bits = wire_bits(demand, codecs_of(plan).get(demand.name, LOSSLESS))
    demand_rows = {bucket.bucket: {0: -bucket.rate_per_s} for bucket in demand.buckets}
    phase_rows: dict[tuple[str, int, str], dict[int, float]] = {}
    for (name, region), count in copies.items():
        if not count:
            continue
        template = plan.template(name)
        time: dict[int, float] = {}
        cards = cards_of(template.replicas, problem.by_name)
        utilization_limit, passes_bucket = busy_limits(demand, bits, cards, problem.headroom)
        sent_gbit: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for capacity in template.capacity:
            for phase in ("prefill", "decode", "closed"):
                rate = getattr(capacity, f"{phase}_per_s")
                if not rate or (phase != "closed" and not passes_bucket[capacity.bucket]):
                    continue
                time_variable = new_variable()
                time[time_variable] = 1.0
                if phase == "closed":
                    demand_rows[capacity.bucket][time_variable] = rate
                    continue
                phase_rows.setdefault((phase, capacity.bucket, region), {})[time_variable] = rate
                sent_gbit[phase][time_variable] = rate * float(bits[capacity.bucket]) / 1e9
        rows.append((-INFINITY, problem.headroom * count, time))
        card_gbit_per_s = utilization_limit * cards.all_bits_per_s * count / 1e9
        rows += [(-INFINITY, card_gbit_per_s, item) for item in sent_gbit.values() if item]
    link_terms = _add_flows(problem, demand, bits, phase_rows, demand_rows, new_variable)
    for link in problem.links:
        if terms := link_terms.get((link.source, link.target)):
            rows.append((-INFINITY, link_bits_per_s(link, problem.headroom) / 1e9, terms))
    rows += [(0.0, INFINITY, item) for item in (*demand_rows.values(), *phase_rows.values())]
    return _maximise_first(cost, upper, rows)


def _add_flows(
    problem: PlanningProblem,
    demand: ModelDemand,
    bits: np.ndarray[tuple[int], np.dtype[np.float64]],
    phase_rows: dict[tuple[str, int, str], dict[int, float]],
    demand_rows: dict[int, dict[int, float]],
    new_variable: object,
) -> dict[tuple[str, str], dict[int, float]]:
    """Add flow variables from prefill to decode regions to the rows; returns their terms in the rows of links."""
    assert callable(new_variable)
    link_terms: dict[tuple[str, str], dict[int, float]] = {}
    links = {(link.source, link.target): link for link in problem.links}
    regions = [region.name for region in problem.regions]
    for bucket in demand.buckets:
        for source in regions:
            for target in regions:
                link, kv_bits = links.get((source, target)), float(bits[bucket.bucket])
                too_slow = link is None or crossing_s(kv_bits, link) > crossing_room_s(demand, bucket)
                if source != target and too_slow:
                    continue
                flow = new_variable()
                demand_rows[bucket.bucket][flow] = 1.0
                phase_rows.setdefault(("prefill", bucket.bucket, source), {})[flow] = -1.0
                phase_rows.setdefault(("decode", bucket.bucket, target), {})[flow] = -1.0
                if source != target:
                    link_terms.setdefault((source, target), {})[flow] = float(bits[bucket.bucket]) / 1e9
    return link_terms


def _maximise_first(
    cost: list[float], upper: list[float], rows: list[tuple[float, float, dict[int, float]]]
) -> float:
    """The largest value of variable 0; rows are (low, high, coefficients by variable)."""
    entries = [(i, column, value) for i, (*_, terms) in enumerate(rows) for column, value in terms.items()]
    row, column, value = (np.array(item) for item in zip(*entries, strict=True))
    milp_result = solve_milp(
        Milp(
            cost=np.array(cost),
            lower=np.zeros(len(cost)),
            upper=np.array(upper),
            integer=np.zeros(len(cost), bool),
            row_lower=np.array([low for low, *_ in rows]),
            row_upper=np.array([high for _, high, _ in rows]),
            row=row.astype(np.int64),
            column=column.astype(np.int64),
            value=value.astype(np.float64),
        ),
        time_limit_s=LP_LIMIT_S,
        relax=True,
    )
    return 0.0 if milp_result.x is None else float(milp_result.x[0])


def _check_charges(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    computed = {
        charge.what: charge.usd_per_h for charge in charges_of(problem, plan, egress_usd_per_h(problem, plan))
    }
    stated = {charge.what: charge.usd_per_h for charge in plan.charges}
    for purpose in sorted({*computed, *stated}):
        if abs(computed.get(purpose, 0.0) - stated.get(purpose, 0.0)) > 1e-6 * max(
            1.0, computed.get(purpose, 0.0)
        ):
            amounts = computed.get(purpose, 0.0), stated.get(purpose, 0.0)
            yield f"charges are ${amounts[0]:.4f}/h for {purpose}, not ${amounts[1]:.4f}/h"


ROLES: tuple[Role, Role, Role] = ("prefill", "decode", "mixed")
ROUNDING_TOLERANCE = 1e-6  # Relative rounding error of a linear program.


def verify(problem: PlanningProblem, plan: Plan, *, rerouted: bool = False) -> tuple[str, ...]:
    """All violations of a plan. `rerouted`: only shares and flows changed, so replicas are not timed again."""
    violations = (*_names(problem, plan), *_formats(problem, plan), *_codecs(problem, plan))
    problem = problem.in_formats(plan.formats)
    violations += refusals(plan, {demand.name: demand.model for demand in problem.demands}, problem.engine)
    violations = (*violations, *_layers(problem, plan))
    violations = violations or tuple(_machines(problem, plan))
    violations = violations or tuple(_memory(problem, plan))
    if violations:  # The other checks need a consistent plan.
        return violations
    checks = (
        _capacity,
        _group_flows,
        _nodes,
        _time,
        _demand,
        _balance,
        _links,
        _order,
        _cards,
        _cost,
        broken_terms,
    )
    # Timing replicas takes most of the time and does not depend on shares and flows.
    selected_checks = checks[2:] if rerouted else checks
    return tuple(violation for check in selected_checks for violation in check(problem, plan))


def _names(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """All names in the plan exist, and counts are positive integers."""
    regions = {region.name for region in problem.regions}
    models = {demand.name for demand in problem.demands}
    templates = {template.name for template in plan.templates}
    for deployment in plan.deployments:
        if deployment.template not in templates:
            yield f"deployment of an unknown template {deployment.template!r}"
        if deployment.region not in regions:
            yield f"deployment in an unknown region {deployment.region!r}"
        if int(deployment.count) != deployment.count or deployment.count < 1:
            yield f"{deployment.template}@{deployment.region}: {deployment.count} copies"
    deployed = {(item.template, item.region) for item in plan.deployments}
    for share in plan.shares:
        if (share.template, share.region) not in deployed:
            yield f"{share.template}@{share.region} has requests but is not deployed"
    for template in plan.templates:
        if template.model not in models:
            yield f"{template.name}: unknown model {template.model!r}"


def _formats(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every model with a choice of weight formats has one that the spec allows."""
    for demand in problem.demands:
        chosen = plan.format_of(demand.name)
        if chosen is None and demand.formats:
            yield f"{demand.name}: the plan names no weight format; the spec allows {', '.join(demand.formats)}"
        elif chosen is not None and chosen not in demand.formats:
            yield f"{demand.name}: weight format {chosen} is not allowed by the spec"


def _codecs(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """KV is sent only in codecs that the spec allows."""
    for crossing in lossy_crossings(plan):
        if crossing.codec not in problem.codecs:
            yield f"{crossing.where}: KV codec {crossing.codec} is not in the spec's kv_codecs"


def _layers(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every replica holds its whole model, on nodes that exist."""
    node_names = set(problem.by_name)
    for template in plan.templates:
        demand = problem.demand_of(template.model)
        for layout in {replica.layout for replica in template.replicas}:
            if demand is not None and layout.layer_count != demand.model.layer_count:
                layers = demand.model.layer_count
                yield f"{template.name}: a replica holds {layout.layer_count} layers, the model has {layers}"
            unknown = set(layout.node_counts) - node_names
            if unknown:
                yield f"{template.name}: unknown node {min(unknown)!r}"


def _machines(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Templates rent the GPUs that their replicas use, and named machines exist and are not used twice."""
    for template in plan.templates:
        gpus_needed: dict[str, int] = {}
        used_machines: set[tuple[str, str]] = set()
        for replica in template.replicas:
            for stage in replica.layout.stages:
                for node in stage.nodes:
                    gpus_needed[node.node] = gpus_needed.get(node.node, 0) + node.tp
                    used_machines.add((node.node, node.machine))
        for name, gpus in gpus_needed.items():
            rented = template.node_counts.get(name, 0)
            named_count = sum(1 for node, machine in used_machines if node == name and machine)
            if gpus > rented * problem.node(name).gpus or named_count > rented:
                yield f"{template.name}: needs {gpus} GPUs on {named_count or 'some'} {name}, rents {rented}"
        for name, machine in sorted(used_machines):
            named_machine = machine_of(problem, machine) if machine else None
            if machine and (named_machine is None or named_machine.type.name != name):
                yield f"{template.name}: no {name} is named {machine!r}"
        if template.kind == "group" and not all(machine for _, machine in used_machines):
            yield f"{template.name}: a group must name its machines"
    gpus_taken: dict[str, int] = {}
    use_count: dict[str, int] = {}
    for deployment in plan.deployments:
        for machine, gpus in plan.template(deployment.template).machines.items():
            gpus_taken[machine] = gpus_taken.get(machine, 0) + gpus * deployment.count
            use_count[machine] = use_count.get(machine, 0) + deployment.count
            named_machine = machine_of(problem, machine)
            if named_machine is not None and named_machine.region != deployment.region:
                yield f"{deployment.template}: {machine!r} is in {named_machine.region}, not in {deployment.region}"
    for machine, gpus in sorted(gpus_taken.items()):
        named_machine = machine_of(problem, machine)
        if named_machine is not None and gpus > named_machine.gpus:
            yield f"machine {machine!r}: {gpus} GPUs used, it has {named_machine.gpus}"
        elif use_count[machine] > 1:
            yield f"machine {machine!r} is rented {use_count[machine]} times"


def _memory(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every model fits in the memory of its replicas."""
    for template in plan.templates:
        demand = problem.demand_of(template.model)
        if demand is None:
            continue
        for layout in {replica.layout for replica in template.replicas}:
            if not fits(demand, layout, problem.by_name):
                yield f"{template.name}: the model does not fit in a replica's memory"


def _capacity(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No template claims a higher rate than its replicas reach when timed again."""
    for template in plan.templates:
        demand = problem.demand_of(template.model)
        if demand is None:
            continue
        for claimed, timed in zip(template.capacity, retimed(problem, demand, template), strict=True):
            for name in ("prefill_per_s", "decode_per_s", "closed_per_s"):
                claimed_per_s, timed_per_s = getattr(claimed, name), getattr(timed, name)
                if claimed_per_s > timed_per_s * (1 + ROUNDING_TOLERANCE) + ROUNDING_TOLERANCE:
                    rates = f"{timed_per_s:.4g}, not {claimed_per_s:.4g}"
                    yield f"{template.name}: {name} of bucket {claimed.bucket} is {rates}"


def _group_flows(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """The flows inside a group add up to all its requests, and no replica gets more than its own rate."""
    for template in plan.templates:
        demand = problem.demand_of(template.model)
        if demand is None or not template.flows:
            continue
        for capacity in template.capacity:
            flows = [flow for flow in template.flows if flow.bucket == capacity.bucket]
            total = sum(flow.share for flow in flows)
            if capacity.closed_per_s > 0 and abs(total - 1.0) > ROUNDING_TOLERANCE:
                yield f"{template.name}: flows of bucket {capacity.bucket} add up to {total:.4g}, not to 1"
        for index, replica in enumerate(template.replicas):
            timer = timer_of(problem, demand, replica.layout)
            layout, role = replica.layout, replica.role
            replica_limits = replica_capacity(
                demand, layout, problem.by_name, role, problem.headroom, timer=timer
            )
            for capacity, replica_limit in zip(template.capacity, replica_limits, strict=True):
                bucket_flows = (f for f in template.flows if f.bucket == capacity.bucket)
                load = (
                    sum(f.share for f in bucket_flows if index in (f.prefill, f.decode))
                    * capacity.closed_per_s
                )
                rate = replica_limit.prefill_per_s + replica_limit.decode_per_s + replica_limit.closed_per_s
                if load > rate * (1 + ROUNDING_TOLERANCE) + ROUNDING_TOLERANCE:
                    yield f"{template.name}: replica {index} gets {load:.4g} req/s, its capacity is {rate:.4g}"


def retimed(problem: PlanningProblem, demand: ModelDemand, template: Template) -> tuple[BucketCapacity, ...]:
    """The capacity of a template, computed from its replicas alone.

    A closed group serves the lesser of its prefill and decode rates, plus what its mixed replicas serve; in a combo
    the network cards limit it too. In a pair, part of the prefill moves off the mixed replicas; in a group of named
    machines the links between them limit it.
    """
    if template.kind in CAPACITY_FUNCTIONS and template.hands_over:
        return CAPACITY_FUNCTIONS[template.kind](
            problem, demand, template.replicas, template.codec, memory_rate_cache(demand)
        )
    if template.kind == "pipeline" and template.replicas[0].role == "mixed":
        return aggregated_capacity(problem, demand, template.replicas[0].layout)
    if template.kind == "group":
        return group_capacity(problem, demand, template.replicas, template.codec)
    rates_by_role = [_role_rates(problem, demand, template, role) for role in ROLES]
    extra_decode = _role_rates(
        problem, demand, template, "mixed", "decode"
    )  # Decode rate of mixed replicas for prompts prefilled elsewhere.
    bucket_capacities = []
    for bucket in range(len(demand.buckets)):
        prefill, decode, mixed = (rates[bucket][0] for rates in rates_by_role)
        ttft_s, tpot_s = (max(rates[bucket][column] for rates in rates_by_role) for column in (1, 2))
        closed = min(prefill, decode) + mixed
        decode += extra_decode[bucket][0]
        bucket_capacities.append(BucketCapacity(bucket, prefill, decode, closed, ttft_s, tpot_s))
    return tuple(bucket_capacities)


def _role_rates(
    problem: PlanningProblem, demand: ModelDemand, template: Template, role: Role, does: Role | None = None
) -> list[tuple[float, float, float]]:
    """(requests/s, TTFT, TPOT) by bucket of all replicas of one role together; `does`: the role that they run."""
    totals = [(0.0, 0.0, 0.0)] * len(demand.buckets)
    members = [replica for replica in template.replicas if replica.role == role]
    for layout in {replica.layout for replica in members}:
        copies = sum(1 for replica in members if replica.layout == layout)
        timer = timer_of(problem, demand, layout)
        run_role = does or role
        rates = replica_capacity(
            demand, layout, problem.by_name, run_role, problem.headroom, copies, timer=timer
        )
        totals = [
            (
                rate + c.prefill_per_s + c.decode_per_s + c.closed_per_s,
                max(ttft_s, c.ttft_s),
                max(tpot_s, c.tpot_s),
            )
            for (rate, ttft_s, tpot_s), c in zip(totals, rates, strict=True)
        ]
    return totals


def _nodes(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No more nodes are rented than are available."""
    for (region, node), count in plan.nodes.items():
        offer = next((r.offer(node) for r in problem.regions if r.name == region), None)
        available = offer.available if offer else 0
        if count > available:
            yield f"{region}: {count} {node} rented, {available} available"


def _time(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No deployment's utilization exceeds the headroom."""
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        busy = 0.0
        for share in plan.shares:
            if (share.template, share.region) == (deployment.template, deployment.region):
                rate = getattr(template.capacity[share.bucket], f"{share.phase}_per_s")
                busy += share.rate_per_s / rate if rate > 0 else float("inf")
        if busy > problem.headroom * deployment.count * (1 + ROUNDING_TOLERANCE) + ROUNDING_TOLERANCE:
            where = f"{deployment.template}@{deployment.region}"
            yield f"{where}: load of {busy:.3f} copies, the headroom allows {problem.headroom * deployment.count:.3f}"


def _demand(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """The planned fraction of every bucket's demand is served."""
    for demand in problem.demands:
        for bucket in demand.buckets:
            closed = _rate(plan, demand.name, bucket.bucket, "closed")
            flows = sum(
                f.rate_per_s for f in plan.flows if (f.model, f.bucket) == (demand.name, bucket.bucket)
            )
            planned = bucket.rate_per_s * plan.fraction_of(demand.name)
            if closed + flows < planned * (1 - ROUNDING_TOLERANCE) - ROUNDING_TOLERANCE:
                yield f"{demand.name} bucket {bucket.bucket}: {closed + flows:.4g} of {planned:.4g} req/s served"


def _balance(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Flows out of a region do not exceed its prefill, and flows into it do not exceed its decode."""
    for demand in problem.demands:
        for bucket in demand.buckets:
            for region in problem.regions:
                bucket_flows = [f for f in plan.flows if (f.model, f.bucket) == (demand.name, bucket.bucket)]
                outflow = sum(f.rate_per_s for f in bucket_flows if f.prefill_region == region.name)
                inflow = sum(f.rate_per_s for f in bucket_flows if f.decode_region == region.name)
                sides: Iterable[tuple[str, float]] = (("prefill", outflow), ("decode", inflow))
                for phase, flow in sides:
                    phase_rate = _rate(plan, demand.name, bucket.bucket, phase, region.name)
                    if flow > phase_rate * (1 + ROUNDING_TOLERANCE) + ROUNDING_TOLERANCE:
                        where = f"{demand.name} bucket {bucket.bucket} in {region.name}"
                        yield f"{where}: {phase} {phase_rate:.4g} of {flow:.4g} req/s"


def _links(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Flows between regions use existing links within their bandwidth and the TTFT objective."""
    bits_by_link: dict[tuple[str, str], float] = {}
    for flow in plan.flows:
        demand = problem.demand_of(flow.model)
        if flow.prefill_region == flow.decode_region or demand is None:
            continue
        bucket = demand.buckets[flow.bucket]
        key = (flow.prefill_region, flow.decode_region)
        bits = float(wire_bits(demand, flow.codec)[flow.bucket])
        bits_by_link[key] = bits_by_link.get(key, 0.0) + flow.rate_per_s * bits
        link = next((x for x in problem.links if (x.source, x.target) == key), None)
        if link is not None and crossing_s(bits, link) > crossing_room_s(demand, bucket) * (
            1 + ROUNDING_TOLERANCE
        ):
            where = f"{demand.name} bucket {flow.bucket}"
            yield f"{where}: KV transfer from {key[0]} to {key[1]} exceeds the TTFT objective"
    for (source, target), bits in bits_by_link.items():
        link = next((x for x in problem.links if (x.source, x.target) == (source, target)), None)
        if link is None:
            yield f"requests flow from {source} to {target}, but no link joins them"
        elif bits > (limit_bits_per_s := link_bits_per_s(link, problem.headroom)) * (1 + ROUNDING_TOLERANCE):
            usable = f"{limit_bits_per_s / 1e9:.3g} of {link.gbps:g} Gbps are usable"
            yield f"link {source} -> {target}: {bits / 1e9:.3g} Gbps, {usable}"


def _order(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No requests cross a link while longer ones of the same model stay in a region."""
    for demand in problem.demands:
        rates_by_link, local_rates = crossing_and_local_rates(plan, demand.name)
        for (source, target), rates in rates_by_link.items():
            shortest = next(bucket for bucket, rate in enumerate(rates) if rate)
            if any(local_rates[shortest + 1 :]):
                yield f"{demand.name}: bucket {shortest} crosses from {source} to {target}, but longer ones stay"


def _cards(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No network card inside a region carries more KV than can arrive within the TTFT objective."""
    codecs = codecs_of(plan)
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        demand = problem.demand_of(template.model)
        where = f"{deployment.template}@{deployment.region}"
        shares_here = [s for s in plan.shares if (s.template, s.region) == (template.name, deployment.region)]
        if demand is None or not any(share.phase != "closed" for share in shares_here):
            continue
        bits = wire_bits(demand, codecs.get(demand.name, LOSSLESS))
        cards = cards_of(template.replicas, problem.by_name)
        utilization_limit, passes_bucket = busy_limits(demand, bits, cards, problem.headroom)
        for phase in ("prefill", "decode"):
            phase_shares = [share for share in shares_here if share.phase == phase and share.rate_per_s > 0]
            for share in phase_shares:
                if not passes_bucket[share.bucket]:
                    yield f"{where}: KV transfer of bucket {share.bucket} is too slow over its network card"
            sent_bits_per_s = sum(share.rate_per_s * float(bits[share.bucket]) for share in phase_shares)
            limit_bits_per_s = utilization_limit * cards.all_bits_per_s * deployment.count
            if sent_bits_per_s > limit_bits_per_s * (1 + ROUNDING_TOLERANCE):
                needed = f"{phase} needs {sent_bits_per_s / 1e9:.3g} Gbps of network cards"
                yield f"{where}: {needed}, limit {limit_bits_per_s / 1e9:.3g}"


def _cost(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """The stated rent is that of the nodes, and the total is within the budget."""
    total = rent_usd_per_h(problem, plan.nodes)
    if not isclose(total, plan.cost_usd_per_h, rel_tol=1e-6, abs_tol=1e-6):
        yield f"costs ${total:.4f}/h, not ${plan.cost_usd_per_h:.4f}/h"
    total += sum(charge.usd_per_h for charge in plan.charges if charge.what != EGRESS)
    if problem.budget_usd_per_h is not None and total > problem.budget_usd_per_h * (1 + ROUNDING_TOLERANCE):
        yield f"costs ${total:.2f}/h, over the budget of ${problem.budget_usd_per_h:.2f}/h"


def _rate(plan: Plan, model: str, bucket: int, phase: str, region: str | None = None) -> float:
    """Requests/s of a bucket in one phase, in one region or in all."""
    total = 0.0
    for share in plan.shares:
        matches = share.bucket == bucket and share.phase == phase and region in (None, share.region)
        if matches and plan.template(share.template).model == model:
            total += share.rate_per_s
    return total
