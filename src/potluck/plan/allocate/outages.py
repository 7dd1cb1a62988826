"""Plans that survive losses: the remaining copies must still serve a share of the demand, with new routing.

For a loss s let n^s be the remaining copies: none of those with a lost node, or one fewer of one column. The largest
theta of the required demand that they serve, in any order of lengths, is a linear program; by its duals, for any n,

    theta <= sum_j E_j n^s_j + sum_l lambda_l bandwidth_l          E_j: what one copy's time earns (`relaxation.py`)

so a plan whose n^s falls short violates a row over counts that every plan surviving s satisfies. Such rows (Benders
cuts) are added until a plan violates none, so the last plan is proven cheapest. The loss of one copy of column k
removes E_k y_k, where y_k says whether there is one: n_k <= most_k y_k.

Such a row concerns one column, and the next solution could fail for another. One row covers all single copies: let M
be the largest E_j of a used column. Without one copy of it, sum_j E_j n_j - M >= c, where c is the required service
less the links' part, so with E_j <= M

    sum_j n_j E_j / (c + E_j)  >=  sum_j n_j E_j / (c + M)  >=  1

which is tight where all copies are equal. It holds for theta = 1, so it is used only where cost is minimised.

A plan that fails for single copies is repaired with one more copy of each, where nodes allow: that is the warm start
of the next program, and the plan if time runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from potluck.plan.allocate.decomposition import solve_models
from potluck.plan.allocate.flow import FlowState, Starts, start_vector
from potluck.plan.allocate.highs import INFINITY, Deadline, solve_milp
from potluck.plan.allocate.matrix import THETA, FlowRows
from potluck.plan.allocate.program import (
    ColumnKey,
    CountLimit,
    ExtraVariable,
    Floats,
    FlowProgram,
    ModelColumns,
    Outage,
)
from potluck.plan.allocate.relaxation import UNCAPPED, Duals, Pricer, duals_of, relax_flow

SERVICE_TOLERANCE = 1e-6  # Fraction by which service after a loss may fall short: the solver's tolerance.
MAX_ROOT_ROUNDS = 20  # Rounds of cuts on the relaxation before the first integer program.
ATTEMPT_SHARE = 0.4  # Share of the time left for each integer program but the last.

Attempt = Callable[[FlowProgram, Deadline, dict[ColumnKey, int]], FlowState]


class NodeLoss(NamedTuple):
    """A loss to survive: an outage of nodes, or one copy of a column; `shares`: required service by model."""

    name: str
    shares: tuple[float, ...]
    gone: Outage | None
    copy: ColumnKey | None


@dataclass(frozen=True, slots=True)
class AfterLoss:
    """Service after a loss: the largest fraction of the required demand, with its dual prices."""

    theta: float
    duals: Duals
    required: FlowProgram  # The program with the demand that must survive.


def losses(program: FlowProgram, keys: Mapping[ColumnKey, float]) -> list[NodeLoss]:
    """Losses to survive: all outages, and single copies of the given columns."""
    node_losses = [
        NodeLoss(outage.name, shares, outage, None)
        for outage in program.outages
        for shares in _firm_apart(program, outage.shares)
        if any(shares)
    ]
    for key in keys:
        share = program.spare[key.group] if program.spare else 0.0
        if share > 0:
            shares = tuple(share if m == key.group else 0.0 for m in range(len(program.models)))
            model = program.models[key.group].name
            where = program.fleet.regions[key.region]
            node_losses.append(NodeLoss(f"a copy of {model}[{key.template}]@{where}", shares, None, key))
    return node_losses


def _firm_apart(program: FlowProgram, shares: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Shares split into one vector for each model with firm demand, which must be met whole, and one for the rest."""
    firm = [m for m, model in enumerate(program.models) if _firm(model)]
    alone = [tuple(share if other == m else 0.0 for other, share in enumerate(shares)) for m in firm]
    return [*alone, tuple(0.0 if m in firm else share for m, share in enumerate(shares))]


def _firm(model: ModelColumns) -> bool:
    return any(bucket.firm for bucket in model.buckets)


def _is_firm(program: FlowProgram, loss: NodeLoss) -> bool:
    return any(share and _firm(model) for share, model in zip(loss.shares, program.models, strict=True))


def lost_columns(
    program: FlowProgram, outage: Outage, m: int
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[templates, regions]: whether an outage takes the column of a model."""
    return (program.models[m].uses > 0).astype(np.int64) @ outage.gone.T.astype(np.int64) > 0


def service_after_loss(
    program: FlowProgram, counts: Mapping[ColumnKey, float], loss: NodeLoss, deadline: Deadline
) -> AfterLoss | None:
    """The service of the copies that remain after a loss; None when time ran out."""
    models = tuple(
        replace(m, buckets=tuple(replace(b, rate_per_s=b.rate_per_s * share, firm=False) for b in m.buckets))
        for m, share in zip(program.models, loss.shares, strict=True)
    )
    flow_program = replace(
        program,
        models=models,
        running=(),
        pins=(),
        limits=(),
        helpers=(),
        outages=(),
        spare=(),
        budget_usd_per_h=None,
    )
    lost = [
        None if loss.gone is None or not share else lost_columns(program, loss.gone, m)
        for m, share in enumerate(loss.shares)
    ]
    remaining: dict[ColumnKey, float] = {}
    for key, count in counts.items():
        table = lost[key.group]
        if not loss.shares[key.group] or (table is not None and table[key.template, key.region]):
            continue
        count_left = count - min(count, 1.0) if key == loss.copy else count
        if count_left > 0:
            remaining[key] = count_left
    rows = FlowRows(flow_program, sorted(remaining), order=False)
    milp = rows.milp(at_cost=False, theta_cap=UNCAPPED)
    for key, count in remaining.items():
        milp.lower[rows.new[key]] = milp.upper[rows.new[key]] = count
    milp_result = solve_milp(milp, time_limit_s=max(deadline.final_s, 0.1), relax=True)
    if milp_result.x is None or milp_result.row_dual is None or not milp_result.finished:
        return None
    return AfterLoss(float(milp_result.x[THETA]), duals_of(rows, milp_result.row_dual), flow_program)


def _copy_earnings(
    program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss
) -> tuple[list[Floats | None], float]:
    """(earnings of a copy of each column, value of the links) at the dual prices after a loss."""
    pricer = Pricer(after_loss.required)
    tables: list[Floats | None] = []
    for m, share in enumerate(loss.shares):
        if not share:
            tables.append(None)
            continue
        earnings = pricer.earnings(m, after_loss.duals)
        if loss.gone is not None:
            earnings[lost_columns(program, loss.gone, m)] = 0.0
        tables.append(earnings)
    prices = after_loss.duals.links.tolist()
    return tables, sum(price * link.bits_per_s for price, link in zip(prices, program.links, strict=True))


def any_copy_row(program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss) -> CountLimit | None:
    """The row that covers the loss of any single copy at these prices; None where the links alone suffice."""
    tables, link_value = _copy_earnings(program, loss, after_loss)
    required = 1.0 - link_value
    if required <= SERVICE_TOLERANCE:
        return None
    coefficients = tuple(None if table is None else table / (required + table) for table in tables)
    return CountLimit(
        f"enough without any copy ({loss.name})", 1.0 - SERVICE_TOLERANCE / 10, INFINITY, coefficients
    )


def benders_cut(
    program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss
) -> tuple[FlowProgram, CountLimit]:
    """(program with the extra variable of the cut, Benders cut of a loss) at these prices."""
    tables, link_value = _copy_earnings(program, loss, after_loss)
    helpers: tuple[tuple[int, float], ...] = ()
    if loss.copy is not None:
        key = loss.copy
        program, index = _with_presence_variable(program, key)
        table = tables[key.group]
        assert table is not None
        helpers = ((index, -float(table[key.template, key.region])),)
    name, is_firm = f"enough without {loss.name}", _is_firm(program, loss)
    low = (1.0 if is_firm else 0.0) - link_value - SERVICE_TOLERANCE / 10
    return program, CountLimit(name, low, INFINITY, tuple(tables), helpers, theta=0.0 if is_firm else 1.0)


def _with_presence_variable(program: FlowProgram, key: ColumnKey) -> tuple[FlowProgram, int]:
    """The program with a binary variable for the presence of a column's copies, and the variable's index."""
    name = f"some of {tuple(key)}"
    for index, helper in enumerate(program.helpers):
        if helper.name == name:
            return program, index
    model = program.models[key.group]
    uses = model.uses[key.template]
    used_types = np.flatnonzero(uses)
    max_count = float((program.fleet.available[key.region][used_types] // uses[used_types]).min())
    table = np.zeros((len(model.uses), len(program.fleet.regions)))
    table[key.template, key.region] = 1.0
    tables = tuple(table if m == key.group else None for m in range(len(program.models)))
    index = len(program.helpers)
    limit = CountLimit(name, -INFINITY, 0.0, tables, ((index, -max(max_count, 1.0)),))
    helpers = (*program.helpers, ExtraVariable(name))
    return replace(program, helpers=helpers, limits=(*program.limits, limit)), index


def unsurvived_losses(
    program: FlowProgram,
    counts: Mapping[ColumnKey, float],
    theta: float,
    deadline: Deadline,
    *,
    single: bool = True,
) -> list[tuple[NodeLoss, AfterLoss]]:
    """The losses after which less than `theta` of the required demand can be served, with the service after each."""
    result = []
    for loss in losses(program, counts if single else {}):
        after_loss = service_after_loss(program, counts, loss, deadline)
        required_theta = 1.0 if _is_firm(program, loss) else theta
        if after_loss is not None and after_loss.theta < required_theta - SERVICE_TOLERANCE:
            result.append((loss, after_loss))
    return result


def survives(program: FlowProgram, counts: Mapping[ColumnKey, int], theta: float, deadline: Deadline) -> bool:
    """Whether `theta` of the required demand is served after every loss."""
    return not program.guarded or not unsurvived_losses(program, counts, theta, deadline)


def add_cuts(program: FlowProgram, result: list[tuple[NodeLoss, AfterLoss]], at_cost: bool) -> FlowProgram:
    """The program with the cuts of these losses."""
    limits = []
    for loss, after_loss in result:
        program, limit = benders_cut(program, loss, after_loss)
        limits.append(limit)
        if loss.copy is not None and at_cost and (row := any_copy_row(program, loss, after_loss)) is not None:
            limits.append(row)
    return replace(program, limits=(*program.limits, *limits))


def solve_with_cuts(
    program: FlowProgram, deadline: Deadline, attempt: Attempt, *, at_cost: bool
) -> FlowState:
    """Attempt the program with more and more cuts until its counts survive all losses.

    `state.pricer.program` of the result has all cuts.
    """
    if not program.guarded:
        return attempt(program, deadline, {})
    program = _with_root_cuts(program, deadline) if at_cost else program
    start_counts: dict[ColumnKey, int] = {}
    while True:
        state = attempt(program, deadline.part(ATTEMPT_SHARE), start_counts)
        if state.counts is None:
            break
        counts = state.counts
        result = unsurvived_losses(program, counts, _served_theta(state), deadline)
        if not result and not state.done and not deadline.over:
            # Feasible but not proven cheapest: continue from here with all the time left.
            state = attempt(program, deadline, counts)
            counts = state.counts or counts
            result = (
                unsurvived_losses(program, counts, _served_theta(state), deadline) if state.counts else []
            )
        if not result:
            return state
        if state.at_cost and (repaired := _repaired_counts(program, counts, result, deadline)):
            start_counts = repaired
        program = add_cuts(program, result, at_cost)
        if deadline.over:
            break
    if start_counts:
        # No time for a cheaper plan: the repaired counts stand, with the bound of the last program.
        last_state = attempt(program, deadline.part(ATTEMPT_SHARE), start_counts)
        lower = max(state.lower, last_state.lower) if np.isfinite(state.lower) else last_state.lower
        if last_state.counts is not None and survives(program, last_state.counts, 1.0, deadline):
            last_state.lower = max(last_state.lower, min(lower, last_state.upper))
            return last_state
    state.counts, state.upper = None, INFINITY
    return state


def _served_theta(state: FlowState) -> float:
    return 1.0 if state.at_cost else -state.upper


def _with_root_cuts(program: FlowProgram, deadline: Deadline) -> FlowProgram:
    """The program with the cuts that its relaxation violates: of outages, and for the loss of any single copy."""
    keys = Pricer(program).first_keys()
    for _ in range(MAX_ROOT_ROUNDS):
        pricer = Pricer(program)
        relaxed = relax_flow(pricer, deadline, at_cost=True, keys=keys)
        if relaxed is None:
            return program
        rows = FlowRows(program, relaxed.keys, order=False)
        milp_result = solve_milp(
            rows.milp(at_cost=True, priced=True), time_limit_s=deadline.left_s, relax=True
        )
        if milp_result.x is None:
            return program
        counts = {key: float(milp_result.x[variable]) for key, variable in rows.new.items()}
        for key, variable in rows.old.items():
            counts[key] += float(milp_result.x[variable])
        counts = {key: count for key, count in counts.items() if count > SERVICE_TOLERANCE}
        result = unsurvived_losses(program, counts, 1.0, deadline, single=False)
        copy_rows = _violated_copy_rows(program, counts, deadline)
        if not (result or copy_rows) or deadline.over:
            return program
        program, keys = add_cuts(program, result, True), relaxed.keys
        program = replace(program, limits=(*program.limits, *copy_rows))
    return program


def _violated_copy_rows(
    program: FlowProgram, counts: Mapping[ColumnKey, float], deadline: Deadline
) -> list[CountLimit]:
    """For each model the row for the loss of any copy, where the relaxation's fractional copies violate it."""
    violated = []
    for m, share in enumerate(program.spare):
        if not share:
            continue
        shares = tuple(share if other == m else 0.0 for other in range(len(program.models)))
        loss = NodeLoss(program.models[m].name, shares, None, None)
        after_loss = service_after_loss(program, counts, loss, deadline)
        row = None if after_loss is None else any_copy_row(program, loss, after_loss)
        table = None if row is None else row.copies[m]
        if row is None or table is None:
            continue
        value = sum(n * float(table[key.template, key.region]) for key, n in counts.items() if key.group == m)
        if value < row.low - SERVICE_TOLERANCE:
            violated.append(row)
    return violated


def _repaired_counts(
    program: FlowProgram,
    counts: Mapping[ColumnKey, int],
    result: list[tuple[NodeLoss, AfterLoss]],
    deadline: Deadline,
) -> dict[ColumnKey, int]:
    """Counts with one more copy of each column whose loss is not survived; empty where that is infeasible."""
    repaired = dict(counts)
    for loss, _ in result:
        if loss.copy is None:
            return {}
        repaired[loss.copy] += 1
    rows = FlowRows(program, sorted(repaired))
    milp = rows.milp(at_cost=True)
    x = start_vector(rows, repaired)
    count_variables = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    if (x[count_variables] > np.array(rows.entries.upper)[count_variables] + 0.5).any():
        return {}
    milp.lower[count_variables] = milp.upper[count_variables] = x[count_variables]
    milp_result = solve_milp(milp, time_limit_s=max(deadline.final_s, 0.1))
    if milp_result.x is None or unsurvived_losses(program, repaired, 1.0, deadline):
        return {}
    return repaired


def solve_guarded(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    """The cheapest counts that survive all losses, or the proof that there are none."""

    def attempt(flow_program: FlowProgram, limit: Deadline, best: dict[ColumnKey, int]) -> FlowState:
        return solve_models(flow_program, limit, gap_target, [best] if best else starts)

    return solve_with_cuts(program, deadline, attempt, at_cost=True)
