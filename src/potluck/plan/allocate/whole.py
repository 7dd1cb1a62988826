"""Rows that hold because copies are whole; a relaxation with them is close to the program itself.

At prices w_b of prefilling and v_b of decoding a model's buckets, the rows of demand, phases and time add up to

    W = sum_b (w_b + v_b) D_b  <=  sum_j E_j n_j          E_j: what a copy earns at these prices (`Pricer.earnings`)

A relaxation keeps that with a tenth of a copy that earns ten times W, and pays a tenth of its rent. But n_j is whole,
so such a copy is there or is not, and

    whole_w      sum_j min(E_j / W, 1) n_j >= theta

holds too: either some n_j >= 1 with E_j >= W, or nothing was cut off. Firm demand counts whole, whatever theta is.
Prices: each bucket's prefill, decode and both alone, then those that the relaxation itself ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.flow_price import Duals, Pricer, Relaxation, relax_flow
from potluck.plan.allocate.highs import INFINITY
from potluck.plan.allocate.limits import Limit
from potluck.plan.allocate.program import Floats

ROUNDS = 2
"""Of rows at the relaxation's own prices."""
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
    pricer: Pricer, rows: list[Limit], before: Relaxation, deadline: Deadline
) -> tuple[list[Limit], Relaxation] | None:
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


def _alone(pricer: Pricer, m: int) -> Iterator[Limit]:
    """Each bucket's phases alone, and both."""
    buckets = len(pricer.program.models[m].buckets)
    for prices in np.eye(buckets):
        for prefill, decode in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            if (row := _row(pricer, m, prices * prefill, prices * decode)) is not None:
                yield row


def _at(pricer: Pricer, duals: Duals) -> list[Limit]:
    """Each model's phases alone and both, at the least price that any region has for them."""
    found = []
    for m in range(len(pricer.program.models)):
        span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
        prefill, decode = duals.phase[0, span].min(axis=1), duals.phase[1, span].min(axis=1)
        for w, v in ((prefill, decode), (prefill, 0 * decode), (0 * prefill, decode)):
            if (row := _row(pricer, m, w, v)) is not None:
                found.append(row)
    return found


def _row(pricer: Pricer, m: int, prefill: Floats, decode: Floats) -> Limit | None:
    """The row at these prices; None where nothing is asked at them."""
    program = pricer.program
    model, regions = program.models[m], len(program.fleet.regions)
    worth = prefill + decode
    asked = sum(value * b.rate_per_s for value, b in zip(worth.tolist(), model.buckets, strict=True))
    firm = sum(value * b.rate_per_s for value, b in zip(worth.tolist(), model.buckets, strict=True) if b.firm)
    if not asked > 0:
        return None
    span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
    phase, demand = np.zeros((2, int(pricer.first_bin[-1]), regions)), np.zeros(int(pricer.first_bin[-1]))
    phase[0, span], phase[1, span], demand[span] = prefill[:, None], decode[:, None], worth
    nothing = np.zeros(0)
    earned = pricer.earnings(m, Duals(phase, demand, nothing, nothing, 0.0, nothing, nothing))
    tables: list[Floats | None] = [None] * len(program.models)
    tables[m] = np.minimum(earned * (1 + SLACK) / asked, 1.0)
    return Limit(
        f"whole copies of {model.name}", firm / asked, INFINITY, tuple(tables), theta=1 - firm / asked
    )
