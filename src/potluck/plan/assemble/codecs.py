"""Solve the program, choose each model's KV codec, and allocate a scarce fleet by priority.

The program is solved with the smallest allowed codec, so its bound holds for all codecs. Then, with the counts fixed,
each model gets the most exact codec with which these copies still serve as much.

When the fleet cannot meet all demand, it is allocated priority by priority: the largest fraction of the level's
demand, while the amounts given to higher priorities stay fixed (`BucketDemand.firm`). Models of one priority get the
same fraction; where not even one copy of each fits, they are planned one by one, cheapest first copy first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from potluck.core.values.kv import LOSSLESS
from potluck.core.values.plan import Deployment, Plan, Template
from potluck.core.values.types import Codec
from potluck.plan.allocate.allocation import Allocation, Shortfall
from potluck.plan.allocate.highs import Deadline
from potluck.plan.allocate.outages import survives
from potluck.plan.allocate.program import ColumnCount, ColumnKey
from potluck.plan.allocate.solve import reroute, solve
from potluck.plan.assemble.columns import ProgramColumns, columns
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.timing.rate_cache import RateCaches

FRACTION_TOLERANCE = 1e-9
SOLVER_TOLERANCE = 1e-6  # Relative: firm demand is what was served, less this error of the solver.

SolveProblem = Callable[[PlanningProblem], tuple[ProgramColumns, Allocation]]


def priorities(problem: PlanningProblem) -> list[int]:
    """Priorities of the models with demand, highest first."""
    return sorted(
        {demand.terms.priority for demand in problem.demands if demand.rate_per_s > 0}, reverse=True
    )


def is_uniform(problem: PlanningProblem, shortfall: Shortfall) -> bool:
    """Whether all models get the same fraction, so that no allocation by priority follows."""
    model_count = sum(demand.rate_per_s > 0 for demand in problem.demands)
    return len(priorities(problem)) < 2 and (shortfall.fraction > FRACTION_TOLERANCE or model_count < 2)


def first_copy_usd_per_h(program_columns: ProgramColumns, model: int) -> float:
    """Cost of the cheapest deployment that serves a model at all: one copy for both phases, or one for each."""
    node_supply, model_columns = program_columns.program.fleet, program_columns.program.models[model]
    placeable = np.where(
        (model_columns.uses[:, None, :] <= node_supply.available[None]).all(axis=2), 1.0, np.inf
    )
    cost = (model_columns.uses.astype(float) @ node_supply.price_usd_per_h.T + 1e-9) * placeable

    def cheapest(rates: NDArray[np.float64]) -> float:
        return float(cost[rates.max(axis=1, initial=0.0) > 0].min(initial=np.inf))

    return min(
        cheapest(model_columns.closed_per_s),
        cheapest(model_columns.prefill_per_s) + cheapest(model_columns.decode_per_s),
    )


def by_priority(
    problem: PlanningProblem, solve: SolveProblem, shortfall: Shortfall, first_copy_usd: Mapping[str, float]
) -> tuple[ProgramColumns, Allocation] | None:
    """The program and its allocation that serve priority after priority; None when nothing can be served, or no time.

    `first_copy_usd` is the cost per hour of a first copy of each model.
    """
    fractions: dict[str, float] = {demand.name: 0.0 for demand in problem.demands}
    solution: tuple[ProgramColumns, Allocation] | None = None
    last_shortfall, levels = shortfall, priorities(problem)
    pending_levels = [
        [a.name for a in problem.demands if a.terms.priority == rank and a.rate_per_s > 0] for rank in levels
    ]
    fraction = 0.0
    known_empty = len(levels) < 2  # The caller has solved a single level already, and it got nothing.
    while pending_levels:
        level = pending_levels.pop(0)
        if not known_empty:
            attempt = solve(_at_level(problem, fractions, level))
            attempt_shortfall = attempt[1].shortfall
            if attempt_shortfall is None and not attempt[1].found:
                return None  # Time ran out.
            fraction = 1.0 if attempt_shortfall is None else attempt_shortfall.fraction
            last_shortfall = last_shortfall if attempt_shortfall is None else attempt_shortfall
            solution = attempt if fraction > FRACTION_TOLERANCE or solution is None else solution
            fractions.update(
                dict.fromkeys(level, fraction if fraction >= 1 else fraction * (1 - SOLVER_TOLERANCE))
            )
        if len(level) > 1 and (known_empty or fraction <= FRACTION_TOLERANCE):
            pending_levels = [
                [name] for name in sorted(level, key=lambda name: first_copy_usd[name])
            ] + pending_levels
        known_empty = False
    if solution is None or not any(fractions.values()):
        return None
    least_fraction = min(fractions[demand.name] for demand in problem.demands if demand.rate_per_s > 0)
    bound = max(least_fraction, last_shortfall.fraction_bound)
    total_shortfall = replace(
        last_shortfall, fraction=least_fraction, fraction_bound=bound, unserved=shortfall.unserved
    )
    allocation = replace(solution[1], status="infeasible", shortfall=total_shortfall)
    return replace(solution[0], problem=problem, fractions=fractions), allocation


def served_shares(problem: PlanningProblem, plan: Plan) -> tuple[float, ...]:
    """Served shares of a plan, for comparing plans: for each priority the least share of a model, then the mean."""
    values: list[float] = []
    for priority in priorities(problem):
        demands = [
            demand
            for demand in problem.demands
            if demand.terms.priority == priority and demand.rate_per_s > 0
        ]
        shares = [plan.fraction_of(demand.name) for demand in demands]
        values += [round(min(shares), SHARE_DIGITS), round(sum(shares) / len(shares), SHARE_DIGITS)]
    return tuple(values)


SHARE_DIGITS = 6


def _at_level(problem: PlanningProblem, fractions: Mapping[str, float], level: list[str]) -> PlanningProblem:
    """The problem of one level: its models' whole demand, and the firm fractions of the models planned before."""

    def scaled(demand: ModelDemand) -> ModelDemand:
        share = 1.0 if demand.name in level else fractions[demand.name]
        firm = demand.name not in level and share > 0
        buckets = tuple(
            replace(bucket, rate_per_s=bucket.rate_per_s * share, firm=firm) for bucket in demand.buckets
        )
        return replace(demand, buckets=buckets)

    return replace(problem, demands=tuple(scaled(demand) for demand in problem.demands))


SERVED_TOLERANCE = 1e-6
MIN_PART_SHARE = 0.1  # Of the time limit: what a priority gets at least, even after the limit.
CODEC_LIMIT_S = 10.0  # For the linear programs that choose the codecs.


def solve_with_codecs(
    problem: PlanningProblem,
    templates: Mapping[str, Sequence[Template]],
    *,
    running_plan: Plan | None = None,
    pins: Sequence[Deployment] = (),
    exactly: bool = False,
    starts: Sequence[Plan] = (),
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    clock: Callable[[], float] = time.process_time,
    rate_caches: RateCaches | None = None,
    in_part: bool = True,
) -> tuple[ProgramColumns, Allocation]:
    """The program over some templates and its allocation, each model's KV in the most exact codec that suffices.

    Where not all demand fits, models of higher priority come first; unless `in_part`, nothing is planned then.
    """
    deadline = Deadline(time_limit_s, clock)

    def solve_problem(planning_problem: PlanningProblem) -> tuple[ProgramColumns, Allocation]:
        smallest = dict.fromkeys(
            (demand.name for demand in planning_problem.demands), planning_problem.codecs[-1]
        )
        program_columns = columns(
            planning_problem,
            templates,
            running_plan=running_plan,
            pins=pins,
            exactly=exactly,
            codecs=smallest,
            rate_caches=rate_caches,
        )
        allocation = solve(
            program_columns.program,
            starts=[counts for plan in starts if (counts := program_columns.counts_of(plan)) is not None],
            time_limit_s=max(deadline.left_s / time_parts, MIN_PART_SHARE * time_limit_s),
            gap_target=gap_target,
            clock=clock,
            in_part=in_part,
        )
        if len(planning_problem.codecs) < 2 or not allocation.counts:
            return program_columns, allocation
        return _choose_codecs(program_columns, allocation, Deadline(CODEC_LIMIT_S, clock))

    time_parts = len(priorities(problem)) + 1 if len(priorities(problem)) > 1 else 1
    program_columns, allocation = solve_problem(problem)
    if allocation.shortfall is None or is_uniform(problem, allocation.shortfall):
        return program_columns, allocation
    time_parts = len(problem.demands)
    first_copy_usd = {
        demand.name: first_copy_usd_per_h(program_columns, m) for m, demand in enumerate(problem.demands)
    }
    return by_priority(problem, solve_problem, allocation.shortfall, first_copy_usd) or (
        program_columns,
        allocation,
    )


def _choose_codecs(
    program_columns: ProgramColumns, allocation: Allocation, deadline: Deadline
) -> tuple[ProgramColumns, Allocation]:
    """The same copies with each model's KV in the most exact codec in which they still serve as much."""
    problem, best_solution = program_columns.problem, (program_columns, allocation)
    names = [
        demand.name
        for m, demand in enumerate(problem.demands)
        if _transfers_kv(program_columns, allocation, m)
    ]
    chosen = dict(program_columns.codecs)
    chosen.update((demand.name, LOSSLESS) for demand in problem.demands if demand.name not in names)
    if len(names) > 1:  # Usually the most exact codec fits for all models at once.
        all_exact = chosen | dict.fromkeys(names, problem.codecs[0])
        if (rerouted := _with_codecs(program_columns, allocation, all_exact, deadline)) is not None:
            return rerouted
    for name in names:
        for codec in problem.codecs:
            rerouted = _with_codecs(program_columns, allocation, chosen | {name: codec}, deadline)
            if rerouted is not None:
                chosen, best_solution = chosen | {name: codec}, rerouted
                break
    return best_solution


def _transfers_kv(program_columns: ProgramColumns, allocation: Allocation, model: int) -> bool:
    """Whether the allocation sends a model's KV over the network."""
    inside = any(
        key.group == model and program_columns.templates[model][key.template].hands_over
        for key, _ in allocation.counts
    )
    return inside or any(flow.model == model for flow in allocation.flows)


def _with_codecs(
    program_columns: ProgramColumns, allocation: Allocation, codecs: Mapping[str, Codec], deadline: Deadline
) -> tuple[ProgramColumns, Allocation] | None:
    """The same copies with KV in these codecs; None when they serve less, or survive fewer losses."""
    used_templates = [
        sorted({key.template for key, _ in allocation.counts if key.group == m})
        for m in _models(program_columns)
    ]
    problem = program_columns.problem
    used_columns = columns(
        problem,
        {
            demand.name: [program_columns.templates[m][t] for t in used_templates[m]]
            for m, demand in enumerate(problem.demands)
        },
        codecs=codecs,
        rate_caches=program_columns.rate_caches,
    )
    counts = {
        ColumnKey(key.group, used_templates[key.group].index(key.template), key.region): n
        for key, n in allocation.counts
    }
    routed = reroute(used_columns.program, counts, allocation.found, deadline)
    if routed is None:
        return None
    required_fraction = 1.0 if allocation.shortfall is None else allocation.shortfall.fraction
    if not survives(used_columns.program, counts, required_fraction - SERVED_TOLERANCE, deadline):
        return None
    shares, flows, _, fraction = routed
    if allocation.shortfall is not None and fraction < allocation.shortfall.fraction - SERVED_TOLERANCE:
        return None
    column_counts = tuple(ColumnCount(key, n) for key, n in sorted(counts.items()))
    running = tuple(
        ColumnCount(ColumnKey(key.group, used_templates[key.group].index(key.template), key.region), n)
        for key, n in program_columns.program.running
        if key.template in used_templates[key.group]
    )
    used_columns = replace(used_columns, program=replace(used_columns.program, running=running))
    return used_columns, replace(allocation, counts=column_counts, shares=shares, flows=flows)


def _models(program_columns: ProgramColumns) -> range:
    return range(len(program_columns.problem.demands))
