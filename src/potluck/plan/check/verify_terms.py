"""Rechecks what was asked beside demand, from the plan alone: where it runs, what losses leave, what is paid.

What is left after a loss is routed anew by a linear program of its own, written down from the plan's templates: it
shares nothing with the allocation but HiGHS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from potluck.core.values.kv import LOSSLESS
from potluck.core.values.plan import Plan
from potluck.plan.allocate.highs import INFINITY, Milp, solve_milp
from potluck.plan.assemble.columns import codecs_of, egress_usd_per_h
from potluck.plan.assemble.model_columns import crossing_room_s, crossing_s
from potluck.plan.assemble.term_rows import charges_of, domains, runs_in, share_asked
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.network_cards import busy_limits, cards_of, link_bits_per_s, wire_bits

SLACK = 1e-5
LIMIT_S = 60.0

Copies = Mapping[tuple[str, str], int]
"""(template, region) to how many."""


def broken_terms(problem: PlanningProblem, plan: Plan) -> Iterator[str]:
    """Every term that a plan breaks, in a sentence."""
    yield from _charges(problem, plan)
    for ask in problem.asks:
        yield from _near(plan, ask)
        if ask.terms.asked:
            yield from _placed(problem, plan, ask)
            yield from _counted(problem, plan, ask)
            yield from _survived(problem, plan, ask)


def _mine(plan: Plan, model: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for deployment in plan.deployments:
        if plan.template(deployment.template).model == model:
            key = (deployment.template, deployment.region)
            found[key] = found.get(key, 0) + deployment.count
    return found


def _placed(problem: PlanningProblem, plan: Plan, ask: ModelDemand) -> Iterator[str]:
    for name, region in _mine(plan, ask.name):
        if not runs_in(problem, ask, plan.template(name), region):
            yield f"{name}@{region}: is not where the limits of {ask.name} let it run"


def _near(plan: Plan, ask: ModelDemand) -> Iterator[str]:
    """First tokens are with the farthest users in time, wherever these are sent."""
    if not ask.origins:
        return
    for share in plan.shares:
        template = plan.template(share.template)
        if template.model != ask.name or share.phase == "decode" or not ask.demands[share.bucket].promised:
            continue
        seen_s = template.capacity[share.bucket].ttft_s + ask.far_s(share.region)
        if seen_s > ask.slo.ttft_s * (1 + SLACK):
            where = f"{share.template}@{share.region}"
            yield f"{where}: first tokens of bucket {share.bucket} reach the farthest users after {seen_s:.3g} s"


def _counted(problem: PlanningProblem, plan: Plan, ask: ModelDemand) -> Iterator[str]:
    mine, terms = _mine(plan, ask.name), ask.terms
    copies = sum(mine.values())
    if copies < terms.min_copies or (terms.max_copies is not None and copies > terms.max_copies):
        yield f"{ask.name}: {copies} copies, asked for {terms.min_copies} to {terms.max_copies or 'any number'}"
    kinds = {problem.node(node).gpu.name for name, _ in mine for node in plan.template(name).node_counts}
    if terms.max_gpu_kinds is not None and len(kinds) > terms.max_gpu_kinds:
        yield f"{ask.name}: {len(kinds)} kinds of GPU, at most {terms.max_gpu_kinds} asked for"


def _survived(problem: PlanningProblem, plan: Plan, ask: ModelDemand) -> Iterator[str]:
    for name, left in after_losses(problem, plan, ask):
        domain = "spot" if name == "spot nodes" else ask.terms.survive or "node"
        wanted = share_asked(ask.terms, domain) * plan.fraction_of(ask.name)
        if served_share(problem, plan, ask, left) < wanted - SLACK:
            yield f"{ask.name}: without {name} less than {wanted:.1%} of the demand would be served"


def after_losses(problem: PlanningProblem, plan: Plan, ask: ModelDemand) -> Iterator[tuple[str, Copies]]:
    """Every loss that a model's plan must survive, and the copies that it leaves."""
    mine = _mine(plan, ask.name)
    if ask.terms.survive == "node":
        for key in mine:
            yield f"a node of {key[0]}@{key[1]}", mine | {key: mine[key] - 1}
    for domain, each in domains(problem).items():
        if share_asked(ask.terms, domain) > 0:
            for name, cells in each:
                yield name, without(plan, mine, cells)


def without(plan: Plan, copies: Copies, cells: list[tuple[str, str]]) -> Copies:
    """The copies that have none of these nodes."""
    return {
        (name, region): count
        for (name, region), count in copies.items()
        if not any((region, node) in cells for node in plan.template(name).node_counts)
    }


def served_share(problem: PlanningProblem, plan: Plan, ask: ModelDemand, copies: Copies) -> float:
    """The largest share of a model's demand that some copies of its templates serve, however it is routed.

    Variables: the share; time of each column in each phase of each bucket; flows from region to region.
    """
    cost, upper = [-1.0], [1.0]
    rows: list[tuple[float, float, dict[int, float]]] = []

    def variable() -> int:
        cost.append(0.0)
        upper.append(INFINITY)
        return len(cost) - 1

    bits = wire_bits(ask, codecs_of(plan).get(ask.name, LOSSLESS))
    met = {d.bucket: {0: -d.rate_per_s} for d in ask.demands}
    phase: dict[tuple[str, int, str], dict[int, float]] = {}
    for (name, region), count in copies.items():
        if not count:
            continue
        template = plan.template(name)
        time: dict[int, float] = {}
        cards = cards_of(template.replicas, problem.by_name)
        busy, passes = busy_limits(ask, bits, cards, problem.headroom)
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
        rows += [
            (-INFINITY, busy * cards.all_bits_per_s * count / 1e9, each) for each in sent.values() if each
        ]
    loads = _flows(problem, ask, bits, phase, met, variable)
    for link in problem.links:
        if load := loads.get((link.source, link.target)):
            rows.append((-INFINITY, link_bits_per_s(link, problem.headroom) / 1e9, load))
    rows += [(0.0, INFINITY, each) for each in (*met.values(), *phase.values())]
    return _largest(cost, upper, rows)


def _flows(
    problem: PlanningProblem,
    ask: ModelDemand,
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
    for demand in ask.demands:
        for source in regions:
            for target in regions:
                link = links.get((source, target))
                if source != target and (
                    link is None
                    or crossing_s(float(bits[demand.bucket]), link) > crossing_room_s(ask, demand)
                ):
                    continue
                flow = variable()
                met[demand.bucket][flow] = 1.0
                phase.setdefault(("prefill", demand.bucket, source), {})[flow] = -1.0
                phase.setdefault(("decode", demand.bucket, target), {})[flow] = -1.0
                if source != target:
                    loads.setdefault((source, target), {})[flow] = float(bits[demand.bucket]) / 1e9
    return loads


def _largest(
    cost: list[float], upper: list[float], rows: list[tuple[float, float, dict[int, float]]]
) -> float:
    entries = [(i, column, value) for i, (*_, terms) in enumerate(rows) for column, value in terms.items()]
    row, column, value = (np.array(each) for each in zip(*entries, strict=True))
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
    said = {each.what: each.usd_per_h for each in plan.charges}
    for what in sorted({*real, *said}):
        if abs(real.get(what, 0.0) - said.get(what, 0.0)) > 1e-6 * max(1.0, real.get(what, 0.0)):
            yield f"charges ${real.get(what, 0.0):.4f}/h for {what}, not ${said.get(what, 0.0):.4f}/h"
