"""Rechecks a plan without the solver that made it.

It trusts nothing but the problem: replicas are timed again, nodes counted again, flows balanced again. Every
violation is a sentence; a plan without any is sound. Commands run this on every plan they print.
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
from potluck.plan.timing.rate_cache import unwritten
from potluck.plan.timing.replica_rates import fits, replica_capacity

LP_SLACK = 1e-5
LIMIT_S = 60.0

Copies = Mapping[tuple[str, str], int]  # (template, region) to how many.


def broken_terms(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every term that a plan breaks, in a sentence."""
    yield from _charges(problem, plan)
    for demand in problem.demands:
        yield from _near(plan, demand)
        if demand.terms.asked:
            yield from _placed(problem, plan, demand)
            yield from _counted(problem, plan, demand)
            yield from _survived(problem, plan, demand)


def _mine(plan: Plan, model: str) -> dict[tuple[str, str], int]:
    mine: dict[tuple[str, str], int] = {}
    for deployment in plan.deployments:
        if plan.template(deployment.template).model == model:
            key = (deployment.template, deployment.region)
            mine[key] = mine.get(key, 0) + deployment.count
    return mine


def _placed(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    for name, region in _mine(plan, demand.name):
        if not runs_in(demand, plan.template(name), region):
            yield f"{name}@{region}: is not where the limits of {demand.name} let it run"


def _near(plan: Plan, demand: ModelDemand) -> Iterator[str]:
    """First tokens are with the farthest users in time, wherever these are sent."""
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
        seen_s = template.capacity[share.bucket].ttft_s + demand.far_s(share.region)
        if seen_s > demand.slo.ttft_s * (1 + LP_SLACK):
            where = f"{share.template}@{share.region}"
            yield f"{where}: first tokens of bucket {share.bucket} reach the farthest users after {seen_s:.3g} s"


def _counted(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    mine, terms = _mine(plan, demand.name), demand.terms
    copies = sum(mine.values())
    for role, other in (
        ("prefill", "decode"),
        ("decode", "prefill"),
    ):  # copies of the other one alone do not count
        able = sum(
            n for (name, _), n in mine.items() if any(r.role != other for r in plan.template(name).replicas)
        )
        if able < terms.min_copies:
            yield f"{demand.name}: {able} copies that {role}, asked for {terms.min_copies} at least"
    if terms.max_copies is not None and copies > terms.max_copies:
        yield f"{demand.name}: {copies} copies, asked for {terms.max_copies} at most"
    kinds = {problem.node(node).gpu.name for name, _ in mine for node in plan.template(name).node_counts}
    if terms.max_gpu_kinds is not None and len(kinds) > terms.max_gpu_kinds:
        yield f"{demand.name}: {len(kinds)} kinds of GPU, at most {terms.max_gpu_kinds} asked for"


def _survived(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[str]:
    for name, left in after_losses(problem, plan, demand):
        domain = "spot" if name == "spot nodes" else demand.terms.survive or "node"
        wanted = required_share(demand.terms, domain) * plan.fraction_of(demand.name)
        if served_share(problem, plan, demand, left) < wanted - LP_SLACK:
            yield f"{demand.name}: without {name} less than {wanted:.1%} of the demand would be served"


def after_losses(problem: PlanningProblem, plan: Plan, demand: ModelDemand) -> Iterator[tuple[str, Copies]]:
    """Every loss that a model's plan must survive, and the copies that it leaves."""
    mine = _mine(plan, demand.name)
    if demand.terms.survive == "node":
        for key in mine:
            yield f"a node of {key[0]}@{key[1]}", mine | {key: mine[key] - 1}
    for domain, item in domains(problem).items():
        if required_share(demand.terms, domain) > 0:
            for name, cells in item:
                yield name, copies_without(plan, mine, cells)


def copies_without(plan: Plan, copies: Copies, cells: list[tuple[str, str]]) -> Copies:
    return {
        (name, region): count
        for (name, region), count in copies.items()
        if not any((region, node) in cells for node in plan.template(name).node_counts)
    }


def served_share(
    problem: PlanningProblem, plan: Plan, demand: ModelDemand, copies: Copies, largest: float = 1.0
) -> float:
    """The share of a model's demand that some copies of its templates serve, however it is routed; `largest` at most.

    Variables: the share; time of each column in each phase of each bucket; flows from region to region.
    """
    cost, upper = [-1.0], [largest]
    rows: list[tuple[float, float, dict[int, float]]] = []

    def variable() -> int:
        cost.append(0.0)
        upper.append(INFINITY)
        return len(cost) - 1

    bits = wire_bits(demand, codecs_of(plan).get(demand.name, LOSSLESS))
    met = {bucket.bucket: {0: -bucket.rate_per_s} for bucket in demand.buckets}
    phase: dict[tuple[str, int, str], dict[int, float]] = {}
    for (name, region), count in copies.items():
        if not count:
            continue
        template = plan.template(name)
        time: dict[int, float] = {}
        cards = cards_of(template.replicas, problem.by_name)
        busy, passes = busy_limits(demand, bits, cards, problem.headroom)
        sent: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for capacity in template.capacity:
            for what in ("prefill", "decode", "closed"):
                rate = getattr(capacity, f"{what}_per_s")
                if not rate or (what != "closed" and not passes[capacity.bucket]):
                    continue
                spent = variable()
                time[spent] = 1.0
                if what == "closed":
                    met[capacity.bucket][spent] = rate
                    continue
                phase.setdefault((what, capacity.bucket, region), {})[spent] = rate
                sent[what][spent] = rate * float(bits[capacity.bucket]) / 1e9
        rows.append((-INFINITY, problem.headroom * count, time))
        most = busy * cards.all_bits_per_s * count / 1e9
        rows += [(-INFINITY, most, item) for item in sent.values() if item]
    loads = _flows(problem, demand, bits, phase, met, variable)
    for link in problem.links:
        if load := loads.get((link.source, link.target)):
            rows.append((-INFINITY, link_bits_per_s(link, problem.headroom) / 1e9, load))
    rows += [(0.0, INFINITY, item) for item in (*met.values(), *phase.values())]
    return _largest(cost, upper, rows)


def _flows(
    problem: PlanningProblem,
    demand: ModelDemand,
    bits: np.ndarray[tuple[int], np.dtype[np.float64]],
    phase: dict[tuple[str, int, str], dict[int, float]],
    met: dict[int, dict[int, float]],
    variable: object,
) -> dict[tuple[str, str], dict[int, float]]:
    """Requests of each bucket from where they are prefilled to where they are decoded; what links then carry."""
    assert callable(variable)
    loads: dict[tuple[str, str], dict[int, float]] = {}
    links = {(link.source, link.target): link for link in problem.links}
    regions = [region.name for region in problem.regions]
    for bucket in demand.buckets:
        for source in regions:
            for target in regions:
                link, size = links.get((source, target)), float(bits[bucket.bucket])
                late = link is None or crossing_s(size, link) > crossing_room_s(demand, bucket)
                if source != target and late:
                    continue
                flow = variable()
                met[bucket.bucket][flow] = 1.0
                phase.setdefault(("prefill", bucket.bucket, source), {})[flow] = -1.0
                phase.setdefault(("decode", bucket.bucket, target), {})[flow] = -1.0
                if source != target:
                    loads.setdefault((source, target), {})[flow] = float(bits[bucket.bucket]) / 1e9
    return loads


def _largest(
    cost: list[float], upper: list[float], rows: list[tuple[float, float, dict[int, float]]]
) -> float:
    entries = [(i, column, value) for i, (*_, terms) in enumerate(rows) for column, value in terms.items()]
    row, column, value = (np.array(item) for item in zip(*entries, strict=True))
    answer = solve_milp(
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
        time_limit_s=LIMIT_S,
        relax=True,
    )
    return 0.0 if answer.x is None else float(answer.x[0])


def _charges(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    real = {each.what: each.usd_per_h for each in charges_of(problem, plan, egress_usd_per_h(problem, plan))}
    values = {charge.what: charge.usd_per_h for charge in plan.charges}
    for what in sorted({*real, *values}):
        if abs(real.get(what, 0.0) - values.get(what, 0.0)) > 1e-6 * max(1.0, real.get(what, 0.0)):
            yield f"charges ${real.get(what, 0.0):.4f}/h for {what}, not ${values.get(what, 0.0):.4f}/h"


ROLES: tuple[Role, Role, Role] = ("prefill", "decode", "mixed")
SLACK = 1e-6  # Relative rounding that a linear program may leave.


def verify(problem: PlanningProblem, plan: Plan, *, rerouted: bool = False) -> tuple[str, ...]:
    """What is wrong with a plan; `rerouted`: it is one in which only shares and flows are new."""
    broken = (*_names(problem, plan), *_formats(problem, plan), *_codecs(problem, plan))
    problem = problem.in_formats(plan.formats)
    broken += refusals(plan, {demand.name: demand.model for demand in problem.demands}, problem.engine)
    broken = (*broken, *_layers(problem, plan))
    broken = broken or tuple(_machines(problem, plan))
    broken = broken or tuple(_memory(problem, plan))
    if broken:  # nothing else can be asked of a plan that does not hang together
        return broken
    checks = (
        _capacity,
        _shared,
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
    # Timing replicas again takes most of the time, and does not depend on what they are sent.
    asked = checks[2:] if rerouted else checks
    return tuple(violation for check in asked for violation in check(problem, plan))


def _names(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Everything a plan names exists, and counts are whole and positive."""
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
            yield f"{share.template}@{share.region} takes requests but is not deployed"
    for template in plan.templates:
        if template.model not in models:
            yield f"{template.name}: unknown model {template.model!r}"


def _formats(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Weights are in a format that was allowed, and that is said of every model that has a choice."""
    for demand in problem.demands:
        chosen = plan.format_of(demand.name)
        if chosen is None and demand.formats:
            yield f"{demand.name}: the plan does not say which of {', '.join(demand.formats)} its weights are in"
        elif chosen is not None and chosen not in demand.formats:
            yield f"{demand.name}: weights in {chosen}, which nobody allowed"


def _codecs(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """KV crosses in codecs that were allowed."""
    for crossing in lossy_crossings(plan):
        if crossing.codec not in problem.codecs:
            yield f"{crossing.where}: KV crosses in {crossing.codec}, which the spec's kv_codecs does not allow"


def _layers(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every replica holds its whole model, on nodes that exist."""
    known = set(problem.by_name)
    for template in plan.templates:
        demand = problem.ask(template.model)
        for layout in {replica.layout for replica in template.replicas}:
            if demand is not None and layout.layer_count != demand.model.layer_count:
                layers = demand.model.layer_count
                yield f"{template.name}: a replica holds {layout.layer_count} layers, the model has {layers}"
            unknown = set(layout.node_counts) - known
            if unknown:
                yield f"{template.name}: unknown node {min(unknown)!r}"


def _machines(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Replicas have the GPUs they need: of what their template rents, and of the machines that they name."""
    for template in plan.templates:
        wanted: dict[str, int] = {}
        stood: set[tuple[str, str]] = set()
        for replica in template.replicas:
            for stage in replica.layout.stages:
                for node in stage.nodes:
                    wanted[node.node] = wanted.get(node.node, 0) + node.tp
                    stood.add((node.node, node.machine))
        for name, gpus in wanted.items():
            rented = template.node_counts.get(name, 0)
            named = sum(1 for node, machine in stood if node == name and machine)
            if gpus > rented * problem.node(name).gpus or named > rented:
                yield f"{template.name}: needs {gpus} GPUs on {named or 'some'} {name}, rents {rented}"
        for name, machine in sorted(stood):
            named_machine = machine_of(problem, machine) if machine else None
            if machine and (named_machine is None or named_machine.type.name != name):
                yield f"{template.name}: there is no {name} named {machine!r}"
        if template.kind == "group" and not all(machine for _, machine in stood):
            yield f"{template.name}: a group must name its machines"
    taken: dict[str, int] = {}
    holders: dict[str, int] = {}
    for deployment in plan.deployments:
        for machine, gpus in plan.template(deployment.template).machines.items():
            taken[machine] = taken.get(machine, 0) + gpus * deployment.count
            holders[machine] = holders.get(machine, 0) + deployment.count
            named_machine = machine_of(problem, machine)
            if named_machine is not None and named_machine.region != deployment.region:
                yield f"{deployment.template}: {machine!r} is in {named_machine.region}, not in {deployment.region}"
    for machine, gpus in sorted(taken.items()):
        named_machine = machine_of(problem, machine)
        if named_machine is not None and gpus > named_machine.gpus:
            yield f"machine {machine!r}: {gpus} GPUs taken of {named_machine.gpus}"
        elif holders[machine] > 1:
            yield f"machine {machine!r} is rented {holders[machine]} times"


def _memory(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    for template in plan.templates:
        demand = problem.ask(template.model)
        if demand is None:
            continue
        for layout in {replica.layout for replica in template.replicas}:
            if not fits(demand, layout, problem.by_name):
                yield f"{template.name}: the model does not fit in a replica's memory"


def _capacity(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No template promises more than its replicas do when they are timed again."""
    for template in plan.templates:
        demand = problem.ask(template.model)
        if demand is None:
            continue
        for claimed, real in zip(template.capacity, retimed(problem, demand, template), strict=True):
            for name in ("prefill_per_s", "decode_per_s", "closed_per_s"):
                text, seen = getattr(claimed, name), getattr(real, name)
                if text > seen * (1 + SLACK) + SLACK:
                    yield f"{template.name}: {name} of bucket {claimed.bucket} is {seen:.4g}, not {text:.4g}"


def _shared(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """What a group's copy serves is shared among its replicas without rest, none of them beyond its own rate."""
    for template in plan.templates:
        demand = problem.ask(template.model)
        if demand is None or not template.flows:
            continue
        for capacity in template.capacity:
            flows = [flow for flow in template.flows if flow.bucket == capacity.bucket]
            whole = sum(flow.share for flow in flows)
            if capacity.closed_per_s > 0 and abs(whole - 1.0) > SLACK:
                yield f"{template.name}: flows of bucket {capacity.bucket} add up to {whole:.4g}, not to 1"
        for index, replica in enumerate(template.replicas):
            timer = timer_of(problem, demand, replica.layout)
            layout, role = replica.layout, replica.role
            own = replica_capacity(demand, layout, problem.by_name, role, problem.headroom, timer=timer)
            for capacity, most in zip(template.capacity, own, strict=True):
                mine = (f for f in template.flows if f.bucket == capacity.bucket)
                load = sum(f.share for f in mine if index in (f.prefill, f.decode)) * capacity.closed_per_s
                rate = most.prefill_per_s + most.decode_per_s + most.closed_per_s
                if load > rate * (1 + SLACK) + SLACK:
                    yield f"{template.name}: replica {index} is sent {load:.4g} of {rate:.4g} req/s"


def retimed(problem: PlanningProblem, demand: ModelDemand, template: Template) -> tuple[BucketCapacity, ...]:
    """What a template can do at most, from its replicas alone.

    A closed group does no more than its prefilling replicas prefill and its decoding ones decode, and what
    its mixed replicas serve alone; in a combo the network cards count too. In a pair the mixed replicas are relieved
    of a part of the prefill; in a group of named machines the links between them count.
    """
    if template.kind in CAPACITY_FUNCTIONS and template.hands_over:
        return CAPACITY_FUNCTIONS[template.kind](
            problem, demand, template.replicas, template.codec, unwritten(demand)
        )
    if template.kind == "pipeline" and template.replicas[0].role == "mixed":
        return aggregated_capacity(problem, demand, template.replicas[0].layout)
    if template.kind == "group":
        return group_capacity(problem, demand, template.replicas, template.codec)
    sides = [_role(problem, demand, template, role) for role in ROLES]
    taken = _role(problem, demand, template, "mixed", "decode")  # by mixed replicas, of what others prefilled
    bucket_capacities = []
    for bucket in range(len(demand.buckets)):
        prefill, decode, mixed = (side[bucket][0] for side in sides)
        ttft_s, tpot_s = (max(side[bucket][place] for side in sides) for place in (1, 2))
        closed = min(prefill, decode) + mixed
        decode += taken[bucket][0]
        bucket_capacities.append(BucketCapacity(bucket, prefill, decode, closed, ttft_s, tpot_s))
    return tuple(bucket_capacities)


def _role(
    problem: PlanningProblem, demand: ModelDemand, template: Template, role: Role, does: Role | None = None
) -> list[tuple[float, float, float]]:
    """(requests/s, TTFT, TPOT) in each bucket of a template's replicas of one role together, if they do another's."""
    total = [(0.0, 0.0, 0.0)] * len(demand.buckets)
    members = [replica for replica in template.replicas if replica.role == role]
    for layout in {replica.layout for replica in members}:
        copies = sum(1 for replica in members if replica.layout == layout)
        timer = timer_of(problem, demand, layout)
        work = does or role
        rates = replica_capacity(demand, layout, problem.by_name, work, problem.headroom, copies, timer=timer)
        total = [
            (
                rate + c.prefill_per_s + c.decode_per_s + c.closed_per_s,
                max(ttft_s, c.ttft_s),
                max(tpot_s, c.tpot_s),
            )
            for (rate, ttft_s, tpot_s), c in zip(total, rates, strict=True)
        ]
    return total


def _nodes(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    for (region, node), count in plan.nodes.items():
        offer = next((r.offer(node) for r in problem.regions if r.name == region), None)
        available = offer.available if offer else 0
        if count > available:
            yield f"{region}: {count} {node} rented, {available} available"


def _time(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No deployment is busier than the headroom allows."""
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        busy = 0.0
        for share in plan.shares:
            if (share.template, share.region) == (deployment.template, deployment.region):
                rate = getattr(template.capacity[share.bucket], f"{share.phase}_per_s")
                busy += share.rate_per_s / rate if rate > 0 else float("inf")
        if busy > problem.headroom * deployment.count * (1 + SLACK) + SLACK:
            where = f"{deployment.template}@{deployment.region}"
            yield f"{where}: {busy:.3f} copies busy of {problem.headroom * deployment.count:.3f}"


def _demand(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    for demand in problem.demands:
        for bucket in demand.buckets:
            closed = _rate(plan, demand.name, bucket.bucket, "closed")
            flows = sum(
                f.rate_per_s for f in plan.flows if (f.model, f.bucket) == (demand.name, bucket.bucket)
            )
            wanted = bucket.rate_per_s * plan.fraction_of(demand.name)
            if closed + flows < wanted * (1 - SLACK) - SLACK:
                yield f"{demand.name} bucket {bucket.bucket}: {closed + flows:.4g} of {wanted:.4g} req/s served"


def _balance(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """What flows out of a region was prefilled there, and what flows in is decoded there."""
    for demand in problem.demands:
        for bucket in demand.buckets:
            for region in problem.regions:
                mine = [f for f in plan.flows if (f.model, f.bucket) == (demand.name, bucket.bucket)]
                out = sum(f.rate_per_s for f in mine if f.prefill_region == region.name)
                into = sum(f.rate_per_s for f in mine if f.decode_region == region.name)
                sides: Iterable[tuple[str, float]] = (("prefill", out), ("decode", into))
                for phase, flow in sides:
                    done = _rate(plan, demand.name, bucket.bucket, phase, region.name)
                    if flow > done * (1 + SLACK) + SLACK:
                        where = f"{demand.name} bucket {bucket.bucket} in {region.name}"
                        yield f"{where}: {phase} {done:.4g} of {flow:.4g} req/s"


def _links(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    load: dict[tuple[str, str], float] = {}
    for flow in plan.flows:
        model_demand = problem.ask(flow.model)
        if flow.prefill_region == flow.decode_region or model_demand is None:
            continue
        demand = model_demand.buckets[flow.bucket]
        key = (flow.prefill_region, flow.decode_region)
        bits = float(wire_bits(model_demand, flow.codec)[flow.bucket])
        load[key] = load.get(key, 0.0) + flow.rate_per_s * bits
        link = next((x for x in problem.links if (x.source, x.target) == key), None)
        if link is not None and crossing_s(bits, link) > crossing_room_s(model_demand, demand) * (1 + SLACK):
            yield f"{model_demand.name} bucket {flow.bucket}: its KV takes too long from {key[0]} to {key[1]}"
    for (source, target), bits in load.items():
        link = next((x for x in problem.links if (x.source, x.target) == (source, target)), None)
        if link is None:
            yield f"requests cross from {source} to {target}, which no link joins"
        elif bits > (most := link_bits_per_s(link, problem.headroom)) * (1 + SLACK):
            yield f"link {source} -> {target}: {bits / 1e9:.3g} Gbps, at most {most / 1e9:.3g} of {link.gbps:g}"


def _order(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Nobody crosses a link who is shorter than somebody who stays in a region."""
    for demand in problem.demands:
        across, home = crossing_and_local_rates(plan, demand.name)
        for (source, target), rates in across.items():
            shortest = next(bucket for bucket, rate in enumerate(rates) if rate)
            if any(home[shortest + 1 :]):
                yield f"{demand.name}: bucket {shortest} crosses from {source} to {target}, and longer ones stay"


def _cards(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """No network card inside a region carries more than lets KV be in time."""
    codecs = codecs_of(plan)
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        demand = problem.ask(template.model)
        where = f"{deployment.template}@{deployment.region}"
        mine = [s for s in plan.shares if (s.template, s.region) == (template.name, deployment.region)]
        if demand is None or not any(share.phase != "closed" for share in mine):
            continue
        bits = wire_bits(demand, codecs.get(demand.name, LOSSLESS))
        cards = cards_of(template.replicas, problem.by_name)
        busy, passes = busy_limits(demand, bits, cards, problem.headroom)
        for phase in ("prefill", "decode"):
            used = [share for share in mine if share.phase == phase and share.rate_per_s > 0]
            for share in used:
                if not passes[share.bucket]:
                    yield f"{where}: KV of bucket {share.bucket} takes too long over its network card"
            sent = sum(share.rate_per_s * float(bits[share.bucket]) for share in used)
            most = busy * cards.all_bits_per_s * deployment.count
            if sent > most * (1 + SLACK):
                yield f"{where}: {phase} puts {sent / 1e9:.3g} Gbps on network cards for {most / 1e9:.3g}"


def _cost(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    total = rent_usd_per_h(problem, plan.nodes)
    if not isclose(total, plan.cost_usd_per_h, rel_tol=1e-6, abs_tol=1e-6):
        yield f"costs ${total:.4f}/h, not ${plan.cost_usd_per_h:.4f}/h"
    total += sum(charge.usd_per_h for charge in plan.charges if charge.what != EGRESS)
    if problem.budget_usd_per_h is not None and total > problem.budget_usd_per_h * (1 + SLACK):
        yield f"costs ${total:.2f}/h, over the budget of ${problem.budget_usd_per_h:.2f}/h"


def _rate(plan: Plan, model: str, bucket: int, phase: str, region: str | None = None) -> float:
    total = 0.0
    for share in plan.shares:
        here = share.bucket == bucket and share.phase == phase and region in (None, share.region)
        if here and plan.template(share.template).model == model:
            total += share.rate_per_s
    return total
