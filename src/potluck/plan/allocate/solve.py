"""Solve an allocation program within a time limit, or find the largest fraction of demand that can be met."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from potluck.core.errors import InputError
from potluck.plan.allocate.allocation import (
    Allocation,
    ColumnShare,
    FlowRate,
    OrderingCost,
    Shortfall,
    Status,
)
from potluck.plan.allocate.flow import FlowState, Starts, close_gap, fix_counts, offer_counts, start_vector
from potluck.plan.allocate.highs import Clock, Deadline
from potluck.plan.allocate.matrix import THETA, FlowRows, numbered_buckets
from potluck.plan.allocate.outages import solve_guarded, solve_with_cuts
from potluck.plan.allocate.program import (
    ColumnCount,
    ColumnKey,
    Floats,
    FlowProgram,
    Ints,
    ModelColumns,
    node_price_usd_per_h,
    rent_usd_per_h,
)
from potluck.plan.allocate.relaxation import UNCAPPED, Pricer, Relaxation, relax_flow

MOST_SHARE = 0.6
"""Of the time that is left, for the largest fraction that can be met; the rest is for its cheapest plan."""
OPTIMAL = 1e-6  # A relative gap below this counts as none.
Routed = tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...], float, float]
"""Shares and flows for whole counts, what egress costs, and the fraction of demand that they serve."""
IDLE = 1e-4  # Of a copy's time: less than this is not worth a copy.


def solve(
    program: FlowProgram,
    *,
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    starts: Sequence[Mapping[ColumnKey, int]] = (),
    clock: Clock = time.process_time,
    in_part: bool = True,
) -> Allocation:
    """The best plan found within the limit, with a proven lower bound; stops early at `gap_target`.

    `starts` are counts that the answer must not be worse than: it serves no less than any of them does, and for as
    much it costs no more. When demand cannot be met the answer says so, and is the cheapest plan found for the
    largest uniform fraction that can, or (not `in_part`) no plan.
    """
    if not time_limit_s > 0:
        raise InputError("time_limit_s", f"must be positive, is {time_limit_s}")
    if not 0 <= gap_target < 1:
        raise InputError("gap_target", f"must be at least 0 and below 1, is {gap_target}")
    deadline = Deadline(time_limit_s, clock)
    program, stands = without_dominated(program)
    begin = [with_stand_ins(start, stands) for start in starts]
    counted = _counted(_in_order(program, ()), deadline, gap_target, begin, in_part)
    free = allocation = _routed(_in_order(program, ()), counted, deadline)
    ordered: list[int] = []
    while late := [m for m in out_of_order(program, allocation) if m not in ordered]:
        ordered += late
        held = _in_order(program, ordered)
        kept = _routed(held, counted, deadline)  # the same copies, in order
        most = allocation.cost_usd_per_h * (1 + max(gap_target, OPTIMAL))
        if not kept.flows or kept.fraction < allocation.fraction or kept.cost_usd_per_h > most:
            lower, counts = counted[0].lower, counted[1]
            counted = _counted(held, deadline, gap_target, [*begin, counts], in_part)
            counted[0].lower = max(counted[0].lower, lower)
            kept = _routed(held, counted, deadline)
        allocation = kept
    for told in cheaper_count_vectors(program, allocation):
        again = _routed(program, (counted[0], told, *counted[2:]), deadline)
        if again.shares and again.fraction >= allocation.fraction * (1 - OPTIMAL):
            allocation = again
            break
    if not ordered:
        return allocation
    usd = max(0.0, allocation.rent_usd_per_h - free.rent_usd_per_h) if allocation.found else None
    return replace(
        allocation, order=OrderingCost(tuple(ordered), usd, max(0.0, free.fraction - allocation.fraction))
    )


Counted = tuple[FlowState, dict[ColumnKey, int], bool, Shortfall | None]  # Counts, and whether all is served.


def _counted(
    program: FlowProgram, deadline: Deadline, gap_target: float, begin: Starts, in_part: bool
) -> Counted:
    state = solve_guarded(program, deadline, gap_target, begin)
    counts, shortfall = state.counts or {}, None
    if state.counts is None and in_part and (state.infeasible or begin or not deadline.over):
        part = deadline.part(MOST_SHARE)
        shortfall, counts = largest_fraction(program, part, gap_target, begin)
        if shortfall.fraction >= 1 - OPTIMAL:
            shortfall = None
        else:
            counts = _cheapest_for(program, shortfall.fraction, counts, deadline, gap_target)
    result = state.counts is not None or (shortfall is None and bool(counts))
    counts = without_idle(program, counts, shortfall.fraction if shortfall else 1.0, deadline)
    return state, counts, result, shortfall


def _routed(program: FlowProgram, counted: Counted, deadline: Deadline) -> Allocation:
    state, counts, result, shortfall = counted
    routed = reroute(program, counts, result, deadline) if counts else None
    allocation = _answer(program, state, counts, result, shortfall, routed)
    if shortfall is not None and routed is not None and routed[3] < shortfall.fraction * (1 - 10 * OPTIMAL):
        return replace(allocation, shortfall=replace(shortfall, fraction=routed[3]))
    return allocation


def _in_order(program: FlowProgram, models: Collection[int]) -> FlowProgram:
    """The program in which these models alone keep their lengths in order."""
    return replace(
        program, models=tuple(replace(each, ordered=m in models) for m, each in enumerate(program.models))
    )


def out_of_order(program: FlowProgram, allocation: Allocation) -> list[int]:
    """Ordered models of which somebody crosses a link who is shorter than somebody who stays."""
    rates = [(s.key.group, s.bucket, s.rate_per_s, False) for s in allocation.shares if s.phase == "closed"]
    rates += [(f.model, f.bucket, f.rate_per_s, f.source != f.target) for f in allocation.flows]
    late = []
    for m, model in enumerate(program.models):
        real = [x for x in rates if x[0] == m and x[2] > OPTIMAL * model.buckets[x[1]].rate_per_s]
        shortest = min((bucket for _, bucket, _, crosses in real if crosses), default=len(model.buckets))
        if model.ordered and any(bucket > shortest and not crosses for _, bucket, _, crosses in real):
            late.append(m)
    return late


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
        state = solve_guarded(less, deadline, gap_target, [counts])
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
    settled = fix_counts(rows, start_vector(rows, counts), True, deadline, fraction * (1 - OPTIMAL))
    if settled is None:
        return counts
    busy: dict[ColumnKey, float] = {}
    for share in rows.shares_and_flows(settled[1])[0]:
        busy[share.key] = busy.get(share.key, 0.0) + share.copies
    least = {pin.key: pin.copies for pin in program.pins}
    fewer = {
        key: max(min(n, ceil(busy.get(key, 0.0) / program.headroom - IDLE)), least.get(key, 0))
        for key, n in counts.items()
    }
    kept = {key: n for key, n in fewer.items() if n}
    if kept == counts:
        return counts
    again = fix_counts(rows, start_vector(rows, kept), True, deadline, fraction * (1 - OPTIMAL))
    return counts if again is None else kept


def _answer(
    program: FlowProgram,
    state: FlowState,
    counts: dict[ColumnKey, int],
    result: bool,
    shortfall: Shortfall | None,
    routed: Routed | None,
) -> Allocation:
    shares, flows, egress, _ = routed or ((), (), 0.0, 0.0)
    rent, cost = cost_of(program, counts)
    cost += egress
    lower = max(state.lower, 0.0)
    lower = min(lower, cost) if result else lower
    gap = (max(cost - lower, 0.0) / cost if cost > 0 else 0.0) if result else np.inf
    status: Status = "unknown"
    if result:
        status = "optimal" if gap <= OPTIMAL else "feasible"
    elif state.infeasible or (shortfall is not None and shortfall.fraction_bound < 1 - OPTIMAL):
        status = "infeasible"
    prices = np.zeros(program.fleet.available.shape)
    if state.prices is not None and state.counts is not None:
        prices = state.prices.duals.nodes
    return Allocation(
        status=status,
        counts=tuple(ColumnCount(key, n) for key, n in sorted(counts.items()) if n),
        shares=shares,
        flows=flows,
        cost_usd_per_h=cost,
        rent_usd_per_h=rent,
        lower_bound_usd_per_h=lower,
        gap=gap,
        node_prices_usd_per_h=prices,
        shortfall=shortfall,
    )


def cost_of(program: FlowProgram, counts: Mapping[ColumnKey, int]) -> tuple[float, float]:
    """(rent, rent with starts, fees, moving parts and fixed charges) of these counts, in USD an hour; no egress."""
    running = dict(program.running)
    rent = cost = rent_usd_per_h(program, counts)
    for key, count in counts.items():
        price = node_price_usd_per_h(program.fleet, program.models[key.group].uses[key.template], key.region)
        cost += program.init_penalty * price * max(0, count - running.get(key, 0))
        cost += (program.fee_usd_per_h(key) + program.copy_complexity_usd_per_h(key)) * count
    return rent, cost + program.fixed_usd_per_h(counts)


def reroute(
    program: FlowProgram, counts: dict[ColumnKey, int], whole: bool, deadline: Deadline
) -> Routed | None:
    """How whole counts are used; None when all of the demand is asked for (`whole`) and they do not suffice."""
    rows = FlowRows(program, sorted({*counts, *(pin.key for pin in program.pins)}))
    settled = fix_counts(rows, start_vector(rows, counts), whole, deadline)
    if settled is None:
        return None
    _, x = settled
    if not whole and x[THETA] > 0:
        # As much as can be served may go many ways: the cheapest of them.
        cheapest = fix_counts(rows, x, True, deadline, float(x[THETA]))
        x = x if cheapest is None else cheapest[1]
    shares, flows = rows.shares_and_flows(x)
    # The solver keeps variables above their lower bound of 0 within its tolerance only.
    egress = sum(
        rows.entries.cost[variable] * max(0.0, float(x[variable])) for variable in rows.flows.values()
    )
    return shares, flows, egress, max(0.0, float(x[THETA]))


def largest_service(program: FlowProgram, deadline: Deadline) -> Allocation:
    """As much as the pinned copies, and no others, can serve of the demand."""
    counts = {pin.key: pin.copies for pin in program.pins}
    routed = reroute(program, counts, False, deadline)
    theta = 0.0 if routed is None else routed[3]
    state = FlowState(Pricer(program), deadline, 0.0)
    return _answer(program, state, counts, False, Shortfall(theta, theta, ()), routed)


def without_dominated(program: FlowProgram) -> tuple[FlowProgram, list[Ints]]:
    """The program in which needless columns may not be used, and for each model which column stands for which.

    Needless is a column that uses no less of any node than another and does no more of anything. Where rows speak of
    copies (limits, losses) replacing it would not hold, so all columns stay.
    """
    same = [np.arange(len(model.uses)) for model in program.models]
    if program.limits or program.helpers or program.guarded:
        return program, same
    kept = {key for key, _ in program.running} | {pin.key for pin in program.pins}
    models, stands = [], []
    for m, model in enumerate(program.models):
        fixed = {pin.key.template for pin in program.pins if pin.exactly and pin.key.group == m}
        stand = _stands(model, {key.template for key in kept if key.group == m}, fixed)
        needed = stand == np.arange(len(stand))
        regions = len(program.fleet.regions)
        allowed = np.ones((len(stand), regions), bool) if model.allowed is None else model.allowed
        models.append(replace(model, allowed=allowed & needed[:, None]))
        stands.append(stand)
    return replace(program, models=tuple(models)), stands


def cheaper_count_vectors(program: FlowProgram, allocation: Allocation) -> Iterator[dict[ColumnKey, int]]:
    """Counts with few copies of columns that serve requests whole and decode for others, the fewest first.

    Columns of the same nodes that do one of both do as much of it, and are simpler to run. Where rows speak of copies
    all stay.
    """
    fixed = {key for key, _ in program.running} | {pin.key for pin in program.pins}
    copies, found = dict(allocation.counts), dict[ColumnKey, tuple[ColumnKey, ColumnKey, int]]()
    for key, n in copies.items():
        model, mine = program.models[key.group], [share for share in allocation.shares if share.key == key]
        busy = sum(share.copies for share in mine)
        serving = _alone(model, key, model.closed_per_s, model.decode_per_s)
        decoding = _alone(model, key, model.decode_per_s, model.closed_per_s)
        if key not in fixed and serving is not None and decoding is not None and busy > 0:
            whole = sum(share.copies for share in mine if share.phase == "closed")
            found[key] = serving, decoding, ceil(whole * n / busy - IDLE)  # so many must serve requests whole
    if not found or program.limits or program.helpers or program.guarded:
        return
    for way in range(4):
        counts = {key: n for key, n in allocation.counts if key not in found}
        for key, (serving, decoding, least) in found.items():
            n = copies[key]
            column, serve = ((serving, 0), (serving, n), (serving, least), (key, least))[way]
            for where, count in ((column, serve), (decoding, n - serve)):
                counts[where] = counts.get(where, 0) + count
        yield {key: n for key, n in counts.items() if n}


def _alone(model: ModelColumns, key: ColumnKey, does: Floats, not_this: Floats) -> ColumnKey | None:
    """A column of the same nodes that does as much of one thing and nothing of another, where this one does both."""
    if not (does[key.template].any() and not_this[key.template].any()):
        return None
    able = (model.uses == model.uses[key.template]).all(axis=1) & (does >= does[key.template]).all(axis=1)
    found = np.flatnonzero(able & ~not_this.any(axis=1))
    return key._replace(template=int(found[0])) if len(found) else None


def with_stand_ins(counts: Mapping[ColumnKey, int], stands: Sequence[Ints]) -> dict[ColumnKey, int]:
    """A plan with needless columns replaced by those that stand for them."""
    numbers: dict[ColumnKey, int] = {}
    for key, n in counts.items():
        other = key._replace(template=int(stands[key.group][key.template]))
        numbers[other] = numbers.get(other, 0) + n
    return numbers


def _stands(model: ModelColumns, kept: set[int], fixed: set[int]) -> Ints:
    """[templates]: the column that stands for each; itself where none makes it needless.

    A column of a `fixed` number cannot be taken more often in another's place.
    """
    count = len(model.uses)
    none = np.full(count, np.inf)
    sends = none if model.sends_bits_per_s is None else model.sends_bits_per_s
    takes = none if model.takes_bits_per_s is None else model.takes_bits_per_s
    more = [model.prefill_per_s, model.decode_per_s, model.closed_per_s, sends[:, None], takes[:, None]]
    if model.allowed is not None:
        more.append(model.allowed.astype(np.float64))
    more += [-fees for fees in (model.fees_usd_per_h, model.complexity_usd_per_h) if fees is not None]
    does = np.concatenate(more, axis=1)
    stand = np.arange(count)
    # Those with the fewest nodes and the most done come first: whatever makes a column needless is before it.
    order = np.lexsort(
        (np.arange(count), -np.nan_to_num(does, posinf=0.0).sum(axis=1), model.uses.sum(axis=1))
    )
    # It also has no node of a type that the column is without: so only such are compared.
    before: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place, j in enumerate(order.tolist()):
        types = tuple(np.flatnonzero(model.uses[j]).tolist())
        if j not in kept:
            fewer = [some for some in before if set(types).issuperset(some)]
            rows = [row for _, row in sorted(known for some in fewer for known in before[some])]
            uses = (model.uses[rows] <= model.uses[j]).all(axis=1)
            better = uses & (does[rows] >= does[j]).all(axis=1)
            if better.any():
                stand[j] = rows[int(np.argmax(better))]
                continue
        if j not in fixed:
            before.setdefault(types, []).append((place, j))
    return stand


def largest_fraction(
    program: FlowProgram,
    deadline: Deadline,
    gap_target: float = 0.0,
    starts: Sequence[dict[ColumnKey, int]] = (),
) -> tuple[Shortfall, dict[ColumnKey, int]]:
    """The shortfall, and the counts of a plan that meets that fraction: no less than any of `starts` does.

    The same rows with theta maximised. The relaxation's duals on nodes, links and budget say how much of theta one
    more unit would buy.
    """
    if over := overpinned(program):
        return Shortfall(0.0, 0.0, (), overpinned=over), {}
    missing = unserved(program, Pricer(program))
    state = solve_with_cuts(
        program,
        deadline,
        lambda flow_program, limit, best: _most(flow_program, limit, gap_target, [best, *starts]),
        at_cost=False,
    )
    if state.relaxed is None:
        names = tuple(limit.name for limit in program.limits) if state.infeasible else ()
        least = min(max(0.0, -state.upper), 1.0) if state.counts is not None else 0.0
        return Shortfall(least, 1.0, (), missing, unkept=names), state.counts or {}
    fraction = 0.0 if state.counts is None else min(max(0.0, -state.upper), 1.0)
    most = min(max(-state.lower, fraction), 1.0)
    binding = _binding(state.pricer.program, state.relaxed)
    return Shortfall(fraction, most, binding, missing), state.counts or {}


def _most(
    program: FlowProgram, deadline: Deadline, gap_target: float, starts: Sequence[dict[ColumnKey, int]]
) -> FlowState:
    """The largest theta; without a relaxation when not even nothing at all keeps the limits, or time ran out."""
    pricer = Pricer(program)
    state = FlowState(pricer, deadline, gap_target, at_cost=False)
    keys = sorted({*pricer.first_keys(), *(key for start in starts for key in start)})
    state.relaxed = relax_flow(pricer, deadline, at_cost=False, keys=keys, theta_cap=UNCAPPED)
    for counts in starts:
        if counts:
            offer_counts(state, counts)
    if state.relaxed is None:
        state.infeasible = state.counts is None and not deadline.over
        return state
    state.lower = state.relaxed.bound
    close_gap(state)
    return state


def overpinned(program: FlowProgram) -> tuple[str, ...]:
    """Node types, the budget and placements that the pinned copies alone exceed."""
    node_supply = program.fleet
    need = np.zeros(node_supply.available.shape, dtype=np.int64)
    banned: list[str] = []
    for key, count, _ in program.pins:
        uses = program.models[key.group].uses[key.template]
        need[key.region] += uses.astype(np.int64) * count
        allowed = program.models[key.group].allowed
        if count and allowed is not None and not allowed[key.template, key.region]:
            name = program.models[key.group].name
            banned.append(f"template {key.template} of {name} in {node_supply.regions[key.region]}")
    over = [node_supply.node_label(int(r), int(c)) for r, c in np.argwhere(need > node_supply.available)]
    rent = rent_usd_per_h(program, {pin.key: pin.copies for pin in program.pins})
    if program.budget_usd_per_h is not None and rent > program.budget_usd_per_h * (1 + 1e-9):
        over.append("budget")
    return (*over, *banned)


def unserved(program: FlowProgram, pricer: Pricer) -> tuple[str, ...]:
    """Demands for which no region has both phases, or a path between them, at any count."""
    regions = range(len(program.fleet.regions))
    paths = [(r, r) for r in regions] + [(link.source, link.target) for link in program.links]
    names = []
    for one in numbered_buckets(program):
        if one.rate_per_s <= 0:
            continue
        model = program.models[one.model]
        can = pricer.most[one.model] >= 1
        for pin in program.pins:
            if pin.key.group == one.model and pin.copies:
                can[pin.key.template, pin.key.region] = True

        def somewhere(
            table: np.ndarray[tuple[int, int], np.dtype[np.float64]],
            can: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = can,
            bucket: int = one.bucket,
        ) -> list[bool]:
            return [bool((can[:, r] & (table[:, bucket] > 0)).any()) for r in regions]

        prefill, decode = somewhere(model.prefill_per_s), somewhere(model.decode_per_s)
        joined = any(prefill[r] and decode[s] for r, s in paths if (r, s) not in one.demand.barred)
        if not joined and not any(somewhere(model.closed_per_s)):
            names.append(one.name)
    return tuple(names)


def _binding(program: FlowProgram, relaxed: Relaxation) -> tuple[str, ...]:
    node_supply, duals = program.fleet, relaxed.duals
    worth: list[tuple[float, str]] = []
    for r, c in np.argwhere(duals.nodes > 1e-12):
        # A type of which there is none at all still names what is missing.
        value = float(duals.nodes[r, c]) * max(int(node_supply.available[r, c]), 1)
        worth.append((value, node_supply.node_label(int(r), int(c))))
    for link, price in zip(program.links, duals.links.tolist(), strict=True):
        if price * link.bits_per_s > 1e-12:
            name = f"link {node_supply.regions[link.source]}->{node_supply.regions[link.target]}"
            worth.append((price * link.bits_per_s, name))
    for limit, dual in zip(program.limits, duals.limits.tolist(), strict=True):
        if abs(dual) > 1e-12:
            worth.append((abs(dual), limit.name))
    if duals.budget > 1e-12 and program.budget_usd_per_h is not None:
        worth.append((duals.budget * program.budget_usd_per_h, "budget"))
    return tuple(name for _, name in sorted(worth, key=lambda pair: (-pair[0], pair[1])))
