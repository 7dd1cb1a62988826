"""Pipelines by price: those that the program's own duals ask for, until no other would lower what it costs.

The program over the templates so far is relaxed; its duals price every pipeline of the libraries (`templates.shelf`),
and those that might earn more than they cost are timed and join. When none is left, the relaxation's bound holds for
all pipelines, timed or not. Copies are whole, so a pipeline that loses a little in the relaxation may still be in the
best plan: once a plan is known, those that lose less than what lies between it and the relaxation join too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from potluck.core.values.plan import Template
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.flow_price import Duals, Pricer, relax_flow
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram, NodeSupply
from potluck.plan.assemble.columns import columns
from potluck.plan.assemble.term_rows import limit_prices, losses_usd_per_h
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import SolveSettings, TemplateFactory
from potluck.plan.timing.stage_rates import Integers

FEW = 4
"""Pipelines per model, bucket and phase that join in a round."""
ROUNDS = 40
NOUGHT = 1e-7
SAME = 1e-4
"""Of a plan's cost: not worth another look."""
ByModel = Mapping[str, Sequence[Template]]


@dataclass(slots=True)
class ColumnGrowth:
    """How far it went."""

    rounds: int = 0
    added: int = 0
    complete: bool = False
    """Whether no pipeline that was left would lower the bound."""


def grow(
    factory: TemplateFactory,
    settings: SolveSettings,
    others: ByModel,
    plan_usd_per_h: float | None = None,
    rounds: int = ROUNDS,
) -> ColumnGrowth:
    """Time what the program over `others` and the pipelines so far asks for; with a plan, what might undercut it."""
    problem, done, keys = factory.problem, ColumnGrowth(), list[ColumnKey]()
    deadline = Deadline(settings.left_s, settings.clock)
    while done.rounds < rounds and not factory.enough():
        templates = {ask.name: [*others.get(ask.name, ()), *factory.pipelines(ask)] for ask in problem.asks}
        smallest = dict.fromkeys((ask.name for ask in problem.asks), problem.codecs[-1])
        program = columns(problem, templates, pins=(), codecs=smallest, books=factory.books).program
        relaxed = _relaxed(program, deadline, keys)
        if relaxed is None:
            return done
        keys, duals, factor, value = relaxed
        ceiling = -NOUGHT * max(abs(value), 1.0)
        # Maximising the fraction, a dollar means nothing: only those that would raise it join.
        if plan_usd_per_h is not None and factor > 0:
            ceiling = max(plan_usd_per_h * (1 - SAME) - value, ceiling)
        added = _taken(factory, program, duals, factor, ceiling)
        done.rounds += 1
        done.added += added
        if not added:
            done.complete = True
            return done
    return done


def _relaxed(
    program: FlowProgram, deadline: Deadline, keys: list[ColumnKey]
) -> tuple[list[ColumnKey], Duals, float, float] | None:
    """Columns, duals, what a dollar counts and the value of the relaxation; None where there was no time."""
    pricer = Pricer(program)
    known = sorted({*pricer.first_keys(), *keys})
    most = relax_flow(pricer, deadline, at_cost=False, keys=known)
    if most is None:
        return None
    if most.theta < 1 - 1e-6:
        return most.keys, most.duals, 0.0, most.value
    least = relax_flow(pricer, deadline, at_cost=True, keys=most.keys)
    if least is None:
        return None
    return least.keys, least.duals, 1.0 + program.init_penalty, least.value


def _taken(
    factory: TemplateFactory, program: FlowProgram, duals: Duals, factor: float, ceiling: float
) -> int:
    """Time the rows that are worth it; how many templates came of it."""
    problem, added, first = factory.problem, 0, 0
    for m, ask in enumerate(problem.asks):
        buckets = len(ask.demands)
        placement_table = factory.shelves.get(ask.key)
        if placement_table is not None:
            mine = duals.phase[:, first : first + buckets]
            costs = copy_costs(problem, m, placement_table.uses, program.fleet, duals, factor)
            rows = placement_table.worth(problem, ask, costs, mine, FEW, ceiling)
            if placement_table.take(rows):
                added += len(rows)
                factory.made["pipeline", ask.key] = placement_table.templates
            elif len(rows):
                added += len(rows)  # they can do nothing, but the next ones might
        first += buckets
    return added


def copy_costs(
    problem: PlanningProblem, m: int, uses: Integers, fleet: NodeSupply, duals: Duals, factor: float
) -> Floats:
    """[regions, placements]: what a copy costs at these prices, before what it earns, as `Pricer.reduced` has it.

    `uses` is [placements, node types of the problem]: reserved nodes, limits and losses of spot nodes count.
    """
    places = [fleet.nodes.index(node.name) for node in problem.nodes]
    price = fleet.price_usd_per_h * (factor + duals.budget) + duals.nodes - duals.paid
    per_copy, per_node = limit_prices(problem, fleet, duals.limits)[m]
    whole = np.zeros((len(uses), len(fleet.nodes)), np.int64)
    whole[:, places] = uses
    losses = losses_usd_per_h(problem, problem.asks[m], whole, fleet) * (float(factor > 0) + duals.budget)
    return np.asarray((price + per_node) @ whole.T + per_copy[:, None] + losses, np.float64)
