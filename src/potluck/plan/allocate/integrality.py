"""Rows that hold because copies are whole; a relaxation with them is close to the program itself.

At prices w_b of prefilling and v_b of decoding a model's buckets, the rows of demand, phases and time add up to

    W = sum_b (w_b + v_b) D_b  <=  sum_j E_j n_j          E_j: what a copy earns at these prices (`Pricer.earnings`)

A relaxation keeps that with a tenth of a copy that earns ten times W, and pays a tenth of its rent. But n_j is whole,
so such a copy is there or is not, and

    whole_w      sum_j min(E_j / W, 1) n_j >= theta

holds too: either some n_j >= 1 with E_j >= W, or nothing was cut off. Firm demand counts whole, whatever theta is.
Where one copy does not suffice, the same in units of what a copy u earns, rounded (a mixed-integer rounding):

    whole_wu     sum_j (floor(a_j) + min(frac(a_j) / frac(b), 1)) n_j >= ceil(b)        a_j = E_j / E_u, b = W / E_u

which is for theta = 1: below it the right side is scaled along, so that columns can be gathered that suffice.
Prices: each bucket's prefill, decode and both alone, then those that the relaxation itself ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.flow_price import Duals, Pricer, Relaxation, relax_flow
from potluck.plan.allocate.highs import INFINITY
from potluck.plan.allocate.limits import CountLimit
from potluck.plan.allocate.program import Floats, FlowProgram

ROUNDS = 2
"""Of rows at the relaxation's own prices."""
UNITS, LEAST = 3, 0.05
"""Units that each row is rounded in; what copies earn at least to be one."""
SLACK = 1e-5
"""By which E_j is rounded up: a count is whole for HiGHS within a millionth, and so may demand be met."""


def with_whole_rows(
    pricer: Pricer, relaxed: Relaxation, deadline: Deadline
) -> tuple[Pricer, Relaxation] | None:
    """The program with rows for whole copies, and its relaxation at cost; None where there was no time.

    Only rows that bind there are kept.
    """
    rows = [row for m in range(len(pricer.program.models)) for row in _alone(pricer, m)]
    rows += _at(pricer, relaxed.duals)
    found = _relaxed(pricer, rows, relaxed, deadline)
    for _ in range(ROUNDS):
        if found is None:
            return None
        kept, best = found
        if not (more := _at(pricer, best.duals)):
            break
        again = _relaxed(pricer, [*kept, *more], best, deadline)
        if again is None or again[1].bound <= best.bound * (1 + SLACK):
            break
        found = again
    if found is None:
        return None
    return Pricer(replace(pricer.program, limits=(*pricer.program.limits, *found[0]))), found[1]


def _relaxed(
    pricer: Pricer, rows: list[CountLimit], before: Relaxation, deadline: Deadline
) -> tuple[list[CountLimit], Relaxation] | None:
    """The rows that bind, and the relaxation with these alone: without the others it is the same."""
    own = len(pricer.program.limits)
    program = replace(pricer.program, limits=(*pricer.program.limits, *rows))
    again = Pricer(program)
    # With these rows the columns there are may not suffice: those that do join first.
    most = relax_flow(again, deadline, at_cost=False, keys=before.keys)
    found = None if most is None else relax_flow(again, deadline, at_cost=True, keys=most.keys)
    if found is None:
        return None
    binding = np.flatnonzero(found.duals.limits[own:])
    limits = np.concatenate([found.duals.limits[:own], found.duals.limits[own:][binding]])
    kept = [rows[place] for place in binding.tolist()]
    return kept, replace(found, duals=replace(found.duals, limits=limits))


def _alone(pricer: Pricer, m: int) -> Iterator[CountLimit]:
    """Each bucket's phases alone, and both."""
    buckets = len(pricer.program.models[m].buckets)
    for prices in np.eye(buckets):
        for prefill, decode in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            yield from _rows(pricer, m, prices * prefill, prices * decode)


def _at(pricer: Pricer, duals: Duals) -> list[CountLimit]:
    """Each model's phases alone and both, at the least price that any region has for them."""
    found = []
    for m in range(len(pricer.program.models)):
        span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
        prefill, decode = duals.phase[0, span].min(axis=1), duals.phase[1, span].min(axis=1)
        for w, v in ((prefill, decode), (prefill, 0 * decode), (0 * prefill, decode)):
            found += _rows(pricer, m, w, v)
    return found


def _rows(pricer: Pricer, m: int, prefill: Floats, decode: Floats) -> list[CountLimit]:
    """The rows at these prices; none where nothing is asked at them."""
    program = pricer.program
    model, regions = program.models[m], len(program.fleet.regions)
    worth = prefill + decode
    rates = np.array([bucket.rate_per_s for bucket in model.buckets])
    firm = np.array([bucket.firm for bucket in model.buckets], bool)
    asked = float(worth @ rates)
    if not asked > 0:
        return []
    span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
    phase, demand = np.zeros((2, int(pricer.first_bin[-1]), regions)), np.zeros(int(pricer.first_bin[-1]))
    phase[0, span], phase[1, span], demand[span] = prefill[:, None], decode[:, None], worth
    nothing = np.zeros(0)
    earned = pricer.earnings(m, Duals(phase, demand, nothing, nothing, 0.0, nothing, nothing))
    earned *= (1 + SLACK) / asked
    first = _limit(program, m, np.minimum(earned, 1.0), 1.0, float(worth[firm] @ rates[firm]) / asked)
    return [first, *(_rounded(program, m, earned, unit) for unit in _units(pricer, m, earned))]


def _units(pricer: Pricer, m: int, earned: Floats) -> list[float]:
    """What a copy earns of those that cost least for it and do not suffice alone."""
    if any(bucket.firm for bucket in pricer.program.models[m].buckets):
        return []
    cost = pricer.uses[m] @ pricer.program.fleet.price_usd_per_h.T
    able = (pricer.most[m] >= 1) & (earned > LEAST) & (earned < 1)
    ratio = np.where(able, cost / np.maximum(earned, LEAST), np.inf).ravel()
    order = np.argsort(ratio, kind="stable")[:UNITS]
    return sorted({float(earned.ravel()[place]) for place in order if np.isfinite(ratio[place])})


def _rounded(program: FlowProgram, m: int, earned: Floats, unit: float) -> CountLimit:
    """In units of so much, rounded up: what is asked for, and what is left of it after whole units."""
    asked = (1 - SLACK) / unit
    rest = asked - np.floor(asked)
    whole = np.floor(earned / unit)
    return _limit(
        program,
        m,
        whole + np.minimum((earned / unit - whole) / max(rest, SLACK), 1.0),
        float(np.ceil(asked)),
        0.0,
    )


def _limit(program: FlowProgram, m: int, table: Floats, low: float, firm: float) -> CountLimit:
    tables: list[Floats | None] = [None] * len(program.models)
    tables[m] = table
    name = f"whole copies of {program.models[m].name}"
    return CountLimit(name, low * firm, INFINITY, tuple(tables), theta=low * (1 - firm))
