"""The door: solve an allocation program of either kind within a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

import numpy as np

from potluck.core.errors import InputError
from potluck.plan.allocate.allocation import (
    Allocation,
    ColumnShare,
    FlowRate,
    ShadowPrices,
    Shortfall,
    Status,
)
from potluck.plan.allocate.cover import State, solve_cover
from potluck.plan.allocate.cover_data import Cover, Multipliers, prepare
from potluck.plan.allocate.deadline import Clock, Deadline
from potluck.plan.allocate.dominated import told_in, without_needless
from potluck.plan.allocate.flow import FlowState, settle, start_vector
from potluck.plan.allocate.flow_price import prices_of
from potluck.plan.allocate.flow_rows import THETA, FlowRows
from potluck.plan.allocate.infeasible import largest_fraction
from potluck.plan.allocate.outages import solve_guarded
from potluck.plan.allocate.primal import recheck
from potluck.plan.allocate.program import (
    ColumnCount,
    ColumnKey,
    CoverProgram,
    Floats,
    FlowProgram,
    Program,
    as_flow,
    paid_usd_per_h,
    price_of,
)
from potluck.plan.allocate.survivors import Chosen

MOST_SHARE = 0.6
"""Of the time that is left, for the largest fraction that can be met; the rest is for its cheapest plan."""
OPTIMAL = 1e-6
"""A relative gap below this counts as none."""
IDLE = 1e-4
"""Of a copy's time: less than this is not worth a copy."""


def solve(
    program: Program,
    *,
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    warm: Allocation | None = None,
    starts: Sequence[Mapping[ColumnKey, int]] = (),
    clock: Clock = time.process_time,
    in_part: bool = True,
) -> Allocation:
    """The best plan found within the limit, with a proven lower bound; stops early at `gap_target`.

    `starts` are counts that the answer must not be worse than: it serves no less than any of them does, and for as
    much it costs no more.

    `warm` is the answer to an earlier program with the same templates, regions and node types: its prices
    start the column generation and its counts, where they still suffice, are the first plan. When demand
    cannot be met the answer says so, and is the cheapest plan found for the largest uniform fraction that can, or
    (not `in_part`) no plan.
    """
    if not time_limit_s > 0:
        raise InputError("time_limit_s", f"must be positive, is {time_limit_s}")
    if not 0 <= gap_target < 1:
        raise InputError("gap_target", f"must be at least 0 and below 1, is {gap_target}")
    start_cpu_s = time.process_time()
    deadline = Deadline(time_limit_s, clock)
    warm = warm if warm is not None and _fits(program, warm) else None
    if isinstance(program, CoverProgram):
        return _cover(program, deadline, gap_target, warm, start_cpu_s)
    return _flow(program, deadline, gap_target, warm, starts, start_cpu_s, in_part)


def _cover(
    program: CoverProgram, deadline: Deadline, gap_target: float, warm: Allocation | None, start_cpu_s: float
) -> Allocation:
    cover = prepare(program)
    state = State(cover, deadline, gap_target, infeasible=bool(cover.overpinned))
    if not cover.overpinned:
        prices, plan = _warm_cover(cover, warm) if warm is not None else (None, None)
        state = solve_cover(cover, deadline, gap_target, prices, plan)
    counts = _cover_counts(cover, state.plan) if state.plan is not None else {}
    shortfall = None
    if state.plan is None and (state.infeasible or not deadline.over):
        shortfall, counts = largest_fraction(as_flow(program), deadline, gap_target)
        if shortfall.fraction >= 1 - OPTIMAL:  # a plan after all
            shortfall = None
        else:
            counts = _cheapest_for(as_flow(program), shortfall.fraction, counts, deadline, gap_target)
    lower = cover.fixed_cost + max(state.lower, 0.0)
    return _answer(
        program,
        counts,
        found=state.plan is not None or (shortfall is None and bool(counts)),
        infeasible=state.infeasible,
        lower=lower,
        prices=_cover_prices(program, cover, state),
        solved=state.solved,
        shortfall=shortfall,
        start_cpu_s=start_cpu_s,
    )


def _flow(
    program: FlowProgram,
    deadline: Deadline,
    gap_target: float,
    warm: Allocation | None,
    starts: Sequence[Mapping[ColumnKey, int]],
    start_cpu_s: float,
    in_part: bool,
) -> Allocation:
    program, stands = without_needless(program)
    begin = [told_in(each, stands) for each in starts]
    known = told_in(dict(warm.counts), stands) if warm is not None else {}
    reuse = [known] if warm is not None and warm.found else []
    keys = sorted({*known, *(key for each in begin for key in each)})
    state = solve_guarded(program, deadline, gap_target, keys, [*reuse, *begin])
    counts, shortfall = state.counts or {}, None
    if state.counts is None and in_part and (state.infeasible or starts or not deadline.over):
        part = deadline.part(MOST_SHARE)
        shortfall, counts = largest_fraction(program, part, gap_target, begin)
        if shortfall.fraction >= 1 - OPTIMAL:
            shortfall = None
        else:
            counts = _cheapest_for(program, shortfall.fraction, counts, deadline, gap_target)
    found = state.counts is not None or (shortfall is None and bool(counts))
    counts = without_idle(program, counts, shortfall.fraction if shortfall else 1.0, deadline)
    shares, flows, egress = _routed(program, counts, found, deadline)
    return _answer(
        program,
        counts,
        found=found,
        infeasible=state.infeasible,
        lower=max(state.lower, 0.0),
        prices=_flow_prices(program, state),
        solved=state.solved,
        shortfall=shortfall,
        start_cpu_s=start_cpu_s,
        routed=(shares, flows, egress),
    )


def _cheapest_for(
    program: FlowProgram, fraction: float, counts: dict[ColumnKey, int], deadline: Deadline, gap_target: float
) -> dict[ColumnKey, int]:
    """Counts for the fraction of demand that can be met: the cheapest found, for the most served may cost anything.

    That is CORAL's answer to scarcity: demand is scaled down alike for all, then planned for as ever.
    """
    if not fraction > 0 and not program.limits:
        return {pin.key: pin.copies for pin in program.pins if pin.copies}  # nothing is worth renting
    if not (fraction > 0 and counts) or deadline.over:
        return counts
    # By as much as the solver itself may err there may seem to be no plan; with ten times that there is one. The
    # counts at hand are where it begins, so that what it finds costs no more, egress included.
    for spare in (OPTIMAL, 10 * OPTIMAL):
        less = program.scaled(fraction * (1 - spare))
        state = solve_guarded(less, deadline, gap_target, list(counts), [counts])
        if state.counts is not None:
            return state.counts
    return counts


def without_idle(
    program: FlowProgram, counts: dict[ColumnKey, int], fraction: float, deadline: Deadline
) -> dict[ColumnKey, int]:
    """Counts without copies that nothing is asked of: they are left when time runs out, or where rent is free."""
    if not counts or not fraction > 0 or program.guarded or program.limits:
        return counts  # a copy that is idle may be there for others' loss, or because a limit says so
    rows = FlowRows(program, sorted({*counts, *(pin.key for pin in program.pins)}))
    settled = settle(rows, start_vector(rows, counts), True, deadline, fraction * (1 - OPTIMAL))
    if settled is None:
        return counts
    busy: dict[ColumnKey, float] = {}
    for share in rows.read(settled[1])[1]:
        busy[share.key] = busy.get(share.key, 0.0) + share.copies
    least = {pin.key: pin.copies for pin in program.pins}
    fewer = {
        key: max(min(n, ceil(busy.get(key, 0.0) / program.headroom - IDLE)), least.get(key, 0))
        for key, n in counts.items()
    }
    kept = {key: n for key, n in fewer.items() if n}
    if kept == counts:
        return counts
    again = settle(rows, start_vector(rows, kept), True, deadline, fraction * (1 - OPTIMAL))
    return counts if again is None else kept


def _answer(
    program: Program,
    counts: dict[ColumnKey, int],
    *,
    found: bool,
    infeasible: bool,
    lower: float,
    prices: ShadowPrices,
    solved: int,
    shortfall: Shortfall | None,
    start_cpu_s: float,
    routed: tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...], float] = ((), (), 0.0),
) -> Allocation:
    shares, flows, egress = routed
    rent, cost = cost_of(program, counts.items())
    cost += egress
    lower = min(lower, cost) if found else lower
    gap = (max(cost - lower, 0.0) / cost if cost > 0 else 0.0) if found else np.inf
    status: Status = "unknown"
    if found:
        status = "optimal" if gap <= OPTIMAL else "feasible"
    elif infeasible or (shortfall is not None and shortfall.fraction_bound < 1 - OPTIMAL):
        status = "infeasible"
    regions = len(program.fleet.regions)
    groups = program.demands if isinstance(program, CoverProgram) else program.models
    return Allocation(
        status=status,
        counts=tuple(ColumnCount(key, n) for key, n in sorted(counts.items()) if n),
        shares=shares,
        flows=flows,
        cost_usd_per_h=cost,
        rent_usd_per_h=rent,
        lower_bound_usd_per_h=lower,
        gap=gap,
        prices=prices,
        columns_seen=sum(len(group.uses) for group in groups) * regions,
        columns_solved=solved,
        cpu_s=time.process_time() - start_cpu_s,
        shortfall=shortfall,
    )


def cost_of(program: Program, counts: Iterable[tuple[ColumnKey, int]]) -> tuple[float, float]:
    """Rent that is still to be paid, and that with the initialisation penalty and fees."""
    groups = program.demands if isinstance(program, CoverProgram) else program.models
    running, held = dict(program.running), dict(counts)
    rent = cost = 0.0
    for key, count in held.items():
        price = price_of(program.fleet, groups[key.group].uses[key.template], key.region)
        rent += price * count
        cost += price * (count + program.init_penalty * max(0, count - running.get(key, 0)))
        if isinstance(program, FlowProgram):
            cost += program.fee_usd_per_h(key) * count
    if isinstance(program, FlowProgram):
        cost += program.fixed_usd_per_h(held)
    paid = paid_usd_per_h(program, held)
    return rent - paid, cost - paid


def _routed(
    program: FlowProgram, counts: dict[ColumnKey, int], found: bool, deadline: Deadline
) -> tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...], float]:
    """Shares and flows for whole counts, and what egress costs."""
    routed = reroute(program, counts, found, deadline) if counts else None
    return ((), (), 0.0) if routed is None else routed[:3]


def reroute(
    program: FlowProgram, counts: dict[ColumnKey, int], whole: bool, deadline: Deadline
) -> tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...], float, float] | None:
    """Shares and flows for whole counts, what egress costs, and the fraction of demand that they serve.

    None when all of it is asked for (`whole`) and these copies do not suffice.
    """
    rows = FlowRows(program, sorted({*counts, *(pin.key for pin in program.pins)}))
    settled = settle(rows, start_vector(rows, counts), whole, deadline)
    if settled is None:
        return None
    _, x = settled
    if not whole and x[THETA] > 0:
        # As much as can be served may go many ways: the cheapest of them.
        cheapest = settle(rows, x, True, deadline, float(x[THETA]))
        x = x if cheapest is None else cheapest[1]
    _, shares, flows = rows.read(x)
    egress = sum(rows.entries.cost[variable] * float(x[variable]) for variable in rows.flows.values())
    return shares, flows, egress, float(x[THETA])


def _fits(program: Program, warm: Allocation) -> bool:
    """Whether an earlier answer speaks of the same regions and node types, and of columns that exist."""
    groups = program.demands if isinstance(program, CoverProgram) else program.models
    if warm.prices.nodes_usd_per_h.shape != program.fleet.available.shape:
        return False
    return all(
        key.group < len(groups) and key.template < len(groups[key.group].uses) for key, _ in warm.counts
    )


def _warm_cover(cover: Cover, warm: Allocation) -> tuple[tuple[Multipliers, Floats] | None, Chosen | None]:
    names = [demand.name for demand in cover.program.demands]
    place = {names.index(group.name): d for d, group in enumerate(cover.groups)}
    prices = None
    if len(warm.prices.demands_usd_per_h) == len(names):
        earn = np.array([warm.prices.demands_usd_per_h[names.index(group.name)] for group in cover.groups])
        if (earn > 0).all():
            prices = (Multipliers(warm.prices.nodes_usd_per_h, warm.prices.budget), earn)
    left = dict(warm.counts) if warm.found else {}
    for key, count in cover.fixed:
        left[key] = left.get(key, 0) - count
    new: dict[tuple[int, int, int], int] = {}
    for key, count in left.items():
        if count > 0 and key.group in place:
            d = place[key.group]
            rows = np.flatnonzero(cover.groups[d].origin == key.template)
            if len(rows) and cover.groups[d].fits[rows[0], key.region]:
                new[(d, int(rows[0]), key.region)] = count
    return prices, recheck(cover, Chosen(new, {}, 0.0))


def _cover_counts(cover: Cover, plan: Chosen) -> dict[ColumnKey, int]:
    names = {demand.name: d for d, demand in enumerate(cover.program.demands)}
    counts = dict(cover.fixed)
    for (d, row, region), count in plan.new.items():
        group = cover.groups[d]
        key = ColumnKey(names[group.name], int(group.origin[row]), region)
        counts[key] = counts.get(key, 0) + count
    for tag, count in plan.old.items():
        key = cover.olds[tag].key
        counts[key] = counts.get(key, 0) + count
    return counts


def _cover_prices(program: CoverProgram, cover: Cover, state: State) -> ShadowPrices:
    at = state.bound.at if state.bound is not None else cover.zero()
    demands = dict.fromkeys((demand.name for demand in program.demands), 0.0)
    if state.relaxed is not None:
        for group, earn in zip(cover.groups, state.relaxed.earn.tolist(), strict=True):
            demands[group.name] = earn * program.headroom
    return ShadowPrices(at.nodes, tuple(demands.values()), (), at.budget)


def _flow_prices(program: FlowProgram, state: FlowState) -> ShadowPrices:
    if state.prices is not None and state.counts is not None:
        return prices_of(state.prices.duals)
    bins = sum(len(model.buckets) for model in program.models)
    nodes = np.zeros(program.fleet.available.shape)
    return ShadowPrices(nodes, (0.0,) * bins, (0.0,) * len(program.links))
