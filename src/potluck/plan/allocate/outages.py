"""Plans that survive losses: what a loss leaves must still serve a share of the demand, routed anew.

For a loss s let n^s be the copies that are left: none of those with a node that is gone, or one fewer of one column.
That they serve theta of the demand asked for, in any order, is a linear program; by its duals, whichever n is,

    theta <= sum_j E_j n^s_j + sum_l lambda_l bandwidth_l          E_j: what one copy's time earns (`relaxation.py`)

so a plan whose n^s falls short breaks a row over counts that every plan that survives s keeps. Such rows are added
until a plan breaks none (Benders), so the last is as cheap as it can be, and proven so. The loss of one copy of
column k takes E_k y_k away, where y_k says whether there is one: n_k <= most_k y_k.

Such a row knows one column; whoever loses single copies would go on to the next. One row for all of them: let M be
the largest E_j of a column that is used. Without one copy of it, sum_j E_j n_j - M >= c, where c is what is asked
less the links' part, so with E_j <= M

    sum_j n_j E_j / (c + E_j)  >=  sum_j n_j E_j / (c + M)  >=  1

which is tight where all copies are alike. It is written for theta = 1, and so only where cost is minimised.

A plan that falls short by single copies is mended by one more of each, where there are nodes: that is the plan if
time runs out, and where the next program begins.
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

SHORT = 1e-6  # By how much what is left may fall short: as much as the solver may err.
ROOT_ROUNDS = 20  # Rows from the relaxation before whole counts are asked for.
FIRST_SHARE = 0.4  # Of the time that is left, for each program but the last.

Attempt = Callable[[FlowProgram, Deadline, dict[ColumnKey, int]], FlowState]


class NodeLoss(NamedTuple):
    name: str
    shares: tuple[float, ...]
    gone: Outage | None
    copy: ColumnKey | None


@dataclass(frozen=True, slots=True)
class AfterLoss:
    """What a loss leaves: the fraction of what is asked for that is served, with its prices."""

    theta: float
    duals: Duals
    asked: FlowProgram


def losses(program: FlowProgram, keys: Mapping[ColumnKey, float]) -> list[NodeLoss]:
    node_losses = [
        NodeLoss(outage.name, shares, outage, None)
        for outage in program.outages
        for shares in _apart(program, outage.shares)
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


def _apart(program: FlowProgram, shares: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Models whose demand is firm by themselves, each of which must have all that is asked; the others together."""
    firm = [m for m, model in enumerate(program.models) if _firm(model)]
    alone = [tuple(share if other == m else 0.0 for other, share in enumerate(shares)) for m in firm]
    return [*alone, tuple(0.0 if m in firm else share for m, share in enumerate(shares))]


def _firm(model: ModelColumns) -> bool:
    return any(bucket.firm for bucket in model.buckets)


def _is_firm(program: FlowProgram, loss: NodeLoss) -> bool:
    return any(share and _firm(model) for share, model in zip(loss.shares, program.models, strict=True))


def gone_columns(
    program: FlowProgram, outage: Outage, m: int
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[templates, regions]: the columns of a model that an outage takes."""
    return (program.models[m].uses > 0).astype(np.int64) @ outage.gone.T.astype(np.int64) > 0


def left_after(
    program: FlowProgram, counts: Mapping[ColumnKey, float], loss: NodeLoss, deadline: Deadline
) -> AfterLoss | None:
    """What the copies that a loss leaves can do; None when time ran out."""
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
    dead = [
        None if loss.gone is None or not share else gone_columns(program, loss.gone, m)
        for m, share in enumerate(loss.shares)
    ]
    kept: dict[ColumnKey, float] = {}
    for key, count in counts.items():
        table = dead[key.group]
        if not loss.shares[key.group] or (table is not None and table[key.template, key.region]):
            continue
        remain = count - min(count, 1.0) if key == loss.copy else count
        if remain > 0:
            kept[key] = remain
    rows = FlowRows(flow_program, sorted(kept), order=False)
    milp = rows.milp(at_cost=False, theta_cap=UNCAPPED)
    for key, count in kept.items():
        milp.lower[rows.new[key]] = milp.upper[rows.new[key]] = count
    answer = solve_milp(milp, time_limit_s=max(deadline.final_s, 0.1), relax=True)
    if answer.x is None or answer.row_dual is None or not answer.finished:
        return None
    return AfterLoss(float(answer.x[THETA]), duals_of(rows, answer.row_dual), flow_program)


def _worth(program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss) -> tuple[list[Floats | None], float]:
    """What a copy of each column is worth at the prices of what a loss leaves, and what the links are."""
    pricer = Pricer(after_loss.asked)
    tables: list[Floats | None] = []
    for m, share in enumerate(loss.shares):
        if not share:
            tables.append(None)
            continue
        worth = pricer.earnings(m, after_loss.duals)
        if loss.gone is not None:
            worth[gone_columns(program, loss.gone, m)] = 0.0
        tables.append(worth)
    prices = after_loss.duals.links.tolist()
    return tables, sum(price * link.bits_per_s for price, link in zip(prices, program.links, strict=True))


def row_for_all(program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss) -> CountLimit | None:
    """The row that the loss of any single copy asks for at these prices; None where the links alone would do."""
    tables, links = _worth(program, loss, after_loss)
    rest = 1.0 - links
    if rest <= SHORT:
        return None
    parts = tuple(None if table is None else table / (rest + table) for table in tables)
    return CountLimit(f"enough without any copy ({loss.name})", 1.0 - SHORT / 10, INFINITY, parts)


def cut_of(program: FlowProgram, loss: NodeLoss, after_loss: AfterLoss) -> tuple[FlowProgram, CountLimit]:
    """The row that a loss asks for at these prices, and the program with the helper that it needs."""
    tables, links = _worth(program, loss, after_loss)
    helpers: tuple[tuple[int, float], ...] = ()
    if loss.copy is not None:
        key = loss.copy
        program, place = _with_helper(program, key)
        table = tables[key.group]
        assert table is not None
        helpers = ((place, -float(table[key.template, key.region])),)
    name, firm = f"enough without {loss.name}", _is_firm(program, loss)
    low = (1.0 if firm else 0.0) - links - SHORT / 10
    return program, CountLimit(name, low, INFINITY, tuple(tables), helpers, theta=0.0 if firm else 1.0)


def _with_helper(program: FlowProgram, key: ColumnKey) -> tuple[FlowProgram, int]:
    """The program with a variable that says whether there is a copy of a column, and its place."""
    name = f"some of {tuple(key)}"
    for place, helper in enumerate(program.helpers):
        if helper.name == name:
            return program, place
    model = program.models[key.group]
    uses = model.uses[key.template]
    held = np.flatnonzero(uses)
    most = float((program.fleet.available[key.region][held] // uses[held]).min())
    table = np.zeros((len(model.uses), len(program.fleet.regions)))
    table[key.template, key.region] = 1.0
    tables = tuple(table if m == key.group else None for m in range(len(program.models)))
    place = len(program.helpers)
    limit = CountLimit(name, -INFINITY, 0.0, tables, ((place, -max(most, 1.0)),))
    helpers = (*program.helpers, ExtraVariable(name))
    return replace(program, helpers=helpers, limits=(*program.limits, limit)), place


def broken(
    program: FlowProgram,
    counts: Mapping[ColumnKey, float],
    theta: float,
    deadline: Deadline,
    *,
    single: bool = True,
) -> list[tuple[NodeLoss, AfterLoss]]:
    """The losses after which less than `theta` of what is asked for would be served."""
    result = []
    for loss in losses(program, counts if single else {}):
        after_loss = left_after(program, counts, loss, deadline)
        wanted = 1.0 if _is_firm(program, loss) else theta
        if after_loss is not None and after_loss.theta < wanted - SHORT:
            result.append((loss, after_loss))
    return result


def survives(program: FlowProgram, counts: Mapping[ColumnKey, int], theta: float, deadline: Deadline) -> bool:
    return not program.guarded or not broken(program, counts, theta, deadline)


def with_cuts(program: FlowProgram, result: list[tuple[NodeLoss, AfterLoss]], at_cost: bool) -> FlowProgram:
    limits = []
    for loss, after_loss in result:
        program, limit = cut_of(program, loss, after_loss)
        limits.append(limit)
        if loss.copy is not None and at_cost and (more := row_for_all(program, loss, after_loss)) is not None:
            limits.append(more)
    return replace(program, limits=(*program.limits, *limits))


def guarded(program: FlowProgram, deadline: Deadline, attempt: Attempt, *, at_cost: bool) -> FlowState:
    """Attempts at ever more rows, until one breaks none; `state.pricer.program` has them all."""
    if not program.guarded:
        return attempt(program, deadline, {})
    program = _root(program, deadline) if at_cost else program
    best: dict[ColumnKey, int] = {}
    while True:
        state = attempt(program, deadline.part(FIRST_SHARE), best)
        if state.counts is None:
            break
        counts = state.counts
        result = broken(program, counts, _theta(state), deadline)
        if not result and not state.done and not deadline.over:
            # Sound but not proven: the same once more with all the time there is, from here.
            state = attempt(program, deadline, counts)
            counts = state.counts or counts
            result = broken(program, counts, _theta(state), deadline) if state.counts else []
        if not result:
            return state
        if state.at_cost and (mended := _mended(program, counts, result, deadline)):
            best = mended
        program = with_cuts(program, result, at_cost)
        if deadline.over:
            break
    if best:
        # No time for a cheaper one: what was mended stands, with the bound of the last program.
        last = attempt(program, deadline.part(FIRST_SHARE), best)
        lower = max(state.lower, last.lower) if np.isfinite(state.lower) else last.lower
        if last.counts is not None and survives(program, last.counts, 1.0, deadline):
            last.lower = max(last.lower, min(lower, last.upper))
            return last
    state.counts, state.upper = None, INFINITY
    return state


def _theta(state: FlowState) -> float:
    return 1.0 if state.at_cost else -state.upper


def _root(program: FlowProgram, deadline: Deadline) -> FlowProgram:
    """Rows that the relaxation breaks: of nodes that go together, and those for the loss of any single copy."""
    keys = Pricer(program).first_keys()
    for _ in range(ROOT_ROUNDS):
        pricer = Pricer(program)
        relaxed = relax_flow(pricer, deadline, at_cost=True, keys=keys)
        if relaxed is None:
            return program
        rows = FlowRows(program, relaxed.keys, order=False)
        answer = solve_milp(rows.milp(at_cost=True, priced=True), time_limit_s=deadline.left_s, relax=True)
        if answer.x is None:
            return program
        counts = {key: float(answer.x[variable]) for key, variable in rows.new.items()}
        for key, variable in rows.old.items():
            counts[key] += float(answer.x[variable])
        counts = {key: count for key, count in counts.items() if count > SHORT}
        result = broken(program, counts, 1.0, deadline, single=False)
        more = _short_of_any(program, counts, deadline)
        if not (result or more) or deadline.over:
            return program
        program, keys = with_cuts(program, result, True), relaxed.keys
        program = replace(program, limits=(*program.limits, *more))
    return program


def _short_of_any(
    program: FlowProgram, counts: Mapping[ColumnKey, float], deadline: Deadline
) -> list[CountLimit]:
    """Per model the row for the loss of any copy, at the prices of all copies, where fractions of copies break it."""
    short = []
    for m, share in enumerate(program.spare):
        if not share:
            continue
        shares = tuple(share if other == m else 0.0 for other in range(len(program.models)))
        loss = NodeLoss(program.models[m].name, shares, None, None)
        after_loss = left_after(program, counts, loss, deadline)
        row = None if after_loss is None else row_for_all(program, loss, after_loss)
        table = None if row is None else row.copies[m]
        if row is None or table is None:
            continue
        have = sum(n * float(table[key.template, key.region]) for key, n in counts.items() if key.group == m)
        if have < row.low - SHORT:
            short.append(row)
    return short


def _mended(
    program: FlowProgram,
    counts: Mapping[ColumnKey, int],
    result: list[tuple[NodeLoss, AfterLoss]],
    deadline: Deadline,
) -> dict[ColumnKey, int]:
    """One more copy wherever losing one leaves too little; empty where nodes, budget or another loss forbid it."""
    mended = dict(counts)
    for loss, _ in result:
        if loss.copy is None:
            return {}
        mended[loss.copy] += 1
    rows = FlowRows(program, sorted(mended))
    milp = rows.milp(at_cost=True)
    x = start_vector(rows, mended)
    whole = np.array(sorted([*rows.new.values(), *rows.old.values()]), dtype=np.int64)
    if (x[whole] > np.array(rows.entries.upper)[whole] + 0.5).any():
        return {}
    milp.lower[whole] = milp.upper[whole] = x[whole]
    answer = solve_milp(milp, time_limit_s=max(deadline.final_s, 0.1))
    if answer.x is None or broken(program, mended, 1.0, deadline):
        return {}
    return mended


def solve_guarded(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    def attempt(flow_program: FlowProgram, limit: Deadline, best: dict[ColumnKey, int]) -> FlowState:
        return solve_models(flow_program, limit, gap_target, [best] if best else starts)

    return guarded(program, deadline, attempt, at_cost=True)
