"""Solve the program within a time limit, or find the largest fraction of the demand that can be met."""

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

FRACTION_TIME_SHARE = 0.6
"""Share of the time left for finding the largest fraction that can be met; the rest is for its cheapest plan."""
OPTIMAL_GAP = 1e-6  # A relative gap below this counts as none.
Routing = tuple[tuple[ColumnShare, ...], tuple[FlowRate, ...], float, float]
"""(shares, flows, egress and crossing costs, served fraction) of fixed counts."""
IDLE_TIME = 1e-4  # Of a copy's time: below it the copy counts as idle.


def solve(
    program: FlowProgram,
    *,
    time_limit_s: float = 60.0,
    gap_target: float = 0.0,
    starts: Sequence[Mapping[ColumnKey, int]] = (),
    clock: Clock = time.process_time,
    in_part: bool = True,
) -> Allocation:
    """The best allocation found within the limit, with a proven lower bound; stops early at `gap_target`.

    The result is no worse than any of `starts`: it serves no less, and where it serves as much it costs no more. When
    the demand cannot be met, it is the cheapest allocation found for the largest fraction that can, common to all
    demands, or (not `in_part`) without copies.
    """
    if not time_limit_s > 0:
        raise InputError("time_limit_s", f"must be positive, is {time_limit_s}")
    if not 0 <= gap_target < 1:
        raise InputError("gap_target", f"must be at least 0 and below 1, is {gap_target}")
    deadline = Deadline(time_limit_s, clock)
    program, stand_ins = without_dominated(program)
    start_counts = [with_stand_ins(start, stand_ins) for start in starts]
    solved = _solve_counts(_with_ordered(program, ()), deadline, gap_target, start_counts, in_part)
    unordered = allocation = _allocation_of(_with_ordered(program, ()), solved, deadline)
    ordered: list[int] = []
    while disordered := [m for m in out_of_order(program, allocation) if m not in ordered]:
        ordered += disordered
        ordered_program = _with_ordered(program, ordered)
        rerouted = _allocation_of(ordered_program, solved, deadline)  # The same copies with ordered routing.
        max_cost_usd = allocation.cost_usd_per_h * (1 + max(gap_target, OPTIMAL_GAP))
        if (
            not rerouted.flows
            or rerouted.fraction < allocation.fraction
            or rerouted.cost_usd_per_h > max_cost_usd
        ):
            lower_bound, incumbent_counts = solved[0].lower, solved[1]
            solved = _solve_counts(
                ordered_program, deadline, gap_target, [*start_counts, incumbent_counts], in_part
            )
            solved[0].lower = max(solved[0].lower, lower_bound)
            rerouted = _allocation_of(ordered_program, solved, deadline)
        allocation = rerouted
    for candidate_counts in simpler_count_vectors(program, allocation):
        candidate = _allocation_of(program, (solved[0], candidate_counts, *solved[2:]), deadline)
        if candidate.shares and candidate.fraction >= allocation.fraction * (1 - OPTIMAL_GAP):
            allocation = candidate
            break
    if not ordered:
        return allocation
    extra_rent = max(0.0, allocation.rent_usd_per_h - unordered.rent_usd_per_h) if allocation.found else None
    return replace(
        allocation,
        order=OrderingCost(tuple(ordered), extra_rent, max(0.0, unordered.fraction - allocation.fraction)),
    )


SolvedCounts = tuple[FlowState, dict[ColumnKey, int], bool, Shortfall | None]
"""(state, counts, whether all demand is served, shortfall)"""


def _solve_counts(
    program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts, in_part: bool
) -> SolvedCounts:
    """The cheapest counts, or where the demand cannot be met and `in_part`, those for its largest fraction."""
    state = solve_guarded(program, deadline, gap_target, starts)
    counts, shortfall = state.counts or {}, None
    if state.counts is None and in_part and (state.infeasible or starts or not deadline.over):
        fraction_deadline = deadline.part(FRACTION_TIME_SHARE)
        shortfall, counts = largest_fraction(program, fraction_deadline, gap_target, starts)
        if shortfall.fraction >= 1 - OPTIMAL_GAP:
            shortfall = None
        else:
            counts = _cheapest_for(program, shortfall.fraction, counts, deadline, gap_target)
    serves_all = state.counts is not None or (shortfall is None and bool(counts))
    counts = without_idle(program, counts, shortfall.fraction if shortfall else 1.0, deadline)
    return state, counts, serves_all, shortfall


def _allocation_of(program: FlowProgram, solved_counts: SolvedCounts, deadline: Deadline) -> Allocation:
    """The allocation of these counts with their best routing."""
    state, counts, serves_all, shortfall = solved_counts
    routing = reroute(program, counts, serves_all, deadline) if counts else None
    allocation = _make_allocation(program, state, counts, serves_all, shortfall, routing)
    if (
        shortfall is not None
        and routing is not None
        and routing[3] < shortfall.fraction * (1 - 10 * OPTIMAL_GAP)
    ):
        return replace(allocation, shortfall=replace(shortfall, fraction=routing[3]))
    return allocation


def _with_ordered(program: FlowProgram, models: Collection[int]) -> FlowProgram:
    """The program in which only these models must let their longest requests cross links."""
    return replace(
        program, models=tuple(replace(model, ordered=m in models) for m, model in enumerate(program.models))
    )


def out_of_order(program: FlowProgram, allocation: Allocation) -> list[int]:
    """Ordered models with requests that cross a link although longer ones stay."""
    rates = [(s.key.group, s.bucket, s.rate_per_s, False) for s in allocation.shares if s.phase == "closed"]
    rates += [(f.model, f.bucket, f.rate_per_s, f.source != f.target) for f in allocation.flows]
    disordered = []
    for m, model in enumerate(program.models):
        nonzero_rates = [
            rate
            for rate in rates
            if rate[0] == m and rate[2] > OPTIMAL_GAP * model.buckets[rate[1]].rate_per_s
        ]
        shortest_crossing = min(
            (bucket for _, bucket, _, crosses in nonzero_rates if crosses), default=len(model.buckets)
        )
        if model.ordered and any(
            bucket > shortest_crossing and not crosses for _, bucket, _, crosses in nonzero_rates
        ):
            disordered.append(m)
    return disordered


def _cheapest_for(
    program: FlowProgram, fraction: float, counts: dict[ColumnKey, int], deadline: Deadline, gap_target: float
) -> dict[ColumnKey, int]:
    """The cheapest counts for the fraction of the demand that can be met; maximising the fraction ignores cost.

    As in CORAL under scarcity: all demand is scaled by the same fraction, then planned as usual.
    """
    if not fraction > 0 and not program.limits:
        return {
            pin.key: pin.copies for pin in program.pins if pin.copies
        }  # Nothing can be served, so nothing is rented.
    if not (fraction > 0 and counts) or deadline.over:
        return counts
    # The scaled program may be infeasible by the solver's tolerance, so it is tried again with ten times that slack.
    # The given counts are the start, so that the result costs no more, egress included.
    for slack in (OPTIMAL_GAP, 10 * OPTIMAL_GAP):
        scaled_program = program.scaled(fraction * (1 - slack))
        state = solve_guarded(scaled_program, deadline, gap_target, [counts])
        if state.counts is not None:
            return state.counts
    return counts


def without_idle(
    program: FlowProgram, counts: dict[ColumnKey, int], fraction: float, deadline: Deadline
) -> dict[ColumnKey, int]:
    """SolvedCounts without idle copies, which remain when time runs out, or where rent is free."""
    if not counts or not fraction > 0 or program.guarded or program.limits:
        return counts  # Idle copies may be spares, or required by a limit.
    rows = FlowRows(program, sorted({*counts, *(pin.key for pin in program.pins)}))
    solution = fix_counts(rows, start_vector(rows, counts), True, deadline, fraction * (1 - OPTIMAL_GAP))
    if solution is None:
        return counts
    busy_copies: dict[ColumnKey, float] = {}
    for share in rows.shares_and_flows(solution[1])[0]:
        busy_copies[share.key] = busy_copies.get(share.key, 0.0) + share.copies
    pinned = {pin.key: pin.copies for pin in program.pins}
    needed = {
        key: max(min(n, ceil(busy_copies.get(key, 0.0) / program.headroom - IDLE_TIME)), pinned.get(key, 0))
        for key, n in counts.items()
    }
    needed_counts = {key: n for key, n in needed.items() if n}
    if needed_counts == counts:
        return counts
    solution_without_idle = fix_counts(
        rows, start_vector(rows, needed_counts), True, deadline, fraction * (1 - OPTIMAL_GAP)
    )
    return counts if solution_without_idle is None else needed_counts


def _make_allocation(
    program: FlowProgram,
    state: FlowState,
    counts: dict[ColumnKey, int],
    serves_all: bool,
    shortfall: Shortfall | None,
    routing: Routing | None,
) -> Allocation:
    """The allocation with its cost, gap, status and dual prices."""
    shares, flows, egress, _ = routing or ((), (), 0.0, 0.0)
    rent, cost = cost_of(program, counts)
    cost += egress
    lower_bound = max(state.lower, 0.0)
    lower_bound = min(lower_bound, cost) if serves_all else lower_bound
    gap = (max(cost - lower_bound, 0.0) / cost if cost > 0 else 0.0) if serves_all else np.inf
    status: Status = "unknown"
    if serves_all:
        status = "optimal" if gap <= OPTIMAL_GAP else "feasible"
    elif state.infeasible or (shortfall is not None and shortfall.fraction_bound < 1 - OPTIMAL_GAP):
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
        lower_bound_usd_per_h=lower_bound,
        gap=gap,
        node_prices_usd_per_h=prices,
        shortfall=shortfall,
    )


def cost_of(program: FlowProgram, counts: Mapping[ColumnKey, int]) -> tuple[float, float]:
    """(rent, rent plus start-up penalty, fees, complexity and one-time charges) in USD/h, without egress."""
    running = dict(program.running)
    rent = cost = rent_usd_per_h(program, counts)
    for key, count in counts.items():
        price = node_price_usd_per_h(program.fleet, program.models[key.group].uses[key.template], key.region)
        cost += program.init_penalty * price * max(0, count - running.get(key, 0))
        cost += (program.fee_usd_per_h(key) + program.copy_complexity_usd_per_h(key)) * count
    return rent, cost + program.fixed_usd_per_h(counts)


def reroute(
    program: FlowProgram, counts: dict[ColumnKey, int], serve_all: bool, deadline: Deadline
) -> Routing | None:
    """The cheapest routing over fixed counts; None when they cannot serve all demand and `whole` requires it."""
    rows = FlowRows(program, sorted({*counts, *(pin.key for pin in program.pins)}))
    solution = fix_counts(rows, start_vector(rows, counts), serve_all, deadline)
    if solution is None:
        return None
    _, x = solution
    if not serve_all and x[THETA] > 0:
        # Many routings serve the largest fraction: take the cheapest.
        cheapest = fix_counts(rows, x, True, deadline, float(x[THETA]))
        x = x if cheapest is None else cheapest[1]
    shares, flows = rows.shares_and_flows(x)
    # The solver may leave variables below 0 within its tolerance.
    egress = sum(
        rows.entries.cost[variable] * max(0.0, float(x[variable])) for variable in rows.flows.values()
    )
    return shares, flows, egress, max(0.0, float(x[THETA]))


def largest_service(program: FlowProgram, deadline: Deadline) -> Allocation:
    """The allocation of the pinned copies alone that serves the largest fraction of the demand."""
    counts = {pin.key: pin.copies for pin in program.pins}
    routing = reroute(program, counts, False, deadline)
    theta = 0.0 if routing is None else routing[3]
    state = FlowState(Pricer(program), deadline, 0.0)
    return _make_allocation(program, state, counts, False, Shortfall(theta, theta, ()), routing)


def without_dominated(program: FlowProgram) -> tuple[FlowProgram, list[Ints]]:
    """(the program without dominated columns, for each model the column that replaces each column).

    A column is dominated when another uses no more of any node and serves no less of anything. Where rows count
    copies (limits, losses), dominance does not hold, so all columns stay.
    """
    own_indices = [np.arange(len(model.uses)) for model in program.models]
    if program.limits or program.helpers or program.guarded:
        return program, own_indices
    required_keys = {key for key, _ in program.running} | {pin.key for pin in program.pins}
    models, stand_ins = [], []
    for m, model in enumerate(program.models):
        exact_pins = {pin.key.template for pin in program.pins if pin.exactly and pin.key.group == m}
        stand_in = _stand_ins(model, {key.template for key in required_keys if key.group == m}, exact_pins)
        undominated = stand_in == np.arange(len(stand_in))
        regions = len(program.fleet.regions)
        allowed = np.ones((len(stand_in), regions), bool) if model.allowed is None else model.allowed
        models.append(replace(model, allowed=allowed & undominated[:, None]))
        stand_ins.append(stand_in)
    return replace(program, models=tuple(models)), stand_ins


def simpler_count_vectors(program: FlowProgram, allocation: Allocation) -> Iterator[dict[ColumnKey, int]]:
    """Equivalent counts with fewer copies of columns that serve whole requests and also decode for others.

    Columns on the same nodes that do only one of these serve as much of it, and are simpler to operate. Yields no
    counts where rows count copies.
    """
    fixed = {key for key, _ in program.running} | {pin.key for pin in program.pins}
    copies, replacements = dict(allocation.counts), dict[ColumnKey, tuple[ColumnKey, ColumnKey, int]]()
    for key, n in copies.items():
        model, shares = program.models[key.group], [share for share in allocation.shares if share.key == key]
        busy_copies = sum(share.copies for share in shares)
        serving = _single_purpose_column(model, key, model.closed_per_s, model.decode_per_s)
        decoding = _single_purpose_column(model, key, model.decode_per_s, model.closed_per_s)
        if key not in fixed and serving is not None and decoding is not None and busy_copies > 0:
            serving_copies = sum(share.copies for share in shares if share.phase == "closed")
            replacements[key] = (
                serving,
                decoding,
                ceil(serving_copies * n / busy_copies - IDLE_TIME),
            )  # Copies that must serve whole requests.
    if not replacements or program.limits or program.helpers or program.guarded:
        return
    for variant in range(4):
        counts = {key: n for key, n in allocation.counts if key not in replacements}
        for key, (serving, decoding, min_serving) in replacements.items():
            n = copies[key]
            column, serve_count = ((serving, 0), (serving, n), (serving, min_serving), (key, min_serving))[
                variant
            ]
            for target, count in ((column, serve_count), (decoding, n - serve_count)):
                counts[target] = counts.get(target, 0) + count
        yield {key: n for key, n in counts.items() if n}


def _single_purpose_column(
    model: ModelColumns, key: ColumnKey, does: Floats, not_this: Floats
) -> ColumnKey | None:
    """A column on the same nodes with the rates `does` and without the rates `not_this`, where this one has both."""
    if not (does[key.template].any() and not_this[key.template].any()):
        return None
    same_nodes = (model.uses == model.uses[key.template]).all(axis=1) & (does >= does[key.template]).all(
        axis=1
    )
    columns = np.flatnonzero(same_nodes & ~not_this.any(axis=1))
    return key._replace(template=int(columns[0])) if len(columns) else None


def with_stand_ins(counts: Mapping[ColumnKey, int], stand_ins: Sequence[Ints]) -> dict[ColumnKey, int]:
    """SolvedCounts with dominated columns replaced by their stand-ins."""
    replaced: dict[ColumnKey, int] = {}
    for key, n in counts.items():
        other = key._replace(template=int(stand_ins[key.group][key.template]))
        replaced[other] = replaced.get(other, 0) + n
    return replaced


def _stand_ins(model: ModelColumns, kept: set[int], fixed: set[int]) -> Ints:
    """[templates]: the column that replaces each one; itself unless it is dominated.

    Columns in `kept` are never replaced; a column in `fixed` has a fixed count and replaces no other.
    """
    count = len(model.uses)
    unlimited = np.full(count, np.inf)
    sends = unlimited if model.sends_bits_per_s is None else model.sends_bits_per_s
    takes = unlimited if model.takes_bits_per_s is None else model.takes_bits_per_s
    abilities = [model.prefill_per_s, model.decode_per_s, model.closed_per_s, sends[:, None], takes[:, None]]
    if model.allowed is not None:
        abilities.append(model.allowed.astype(np.float64))
    abilities += [-fees for fees in (model.fees_usd_per_h, model.complexity_usd_per_h) if fees is not None]
    ability_table = np.concatenate(abilities, axis=1)
    stand_in = np.arange(count)
    # Fewest nodes and largest rates first, so that a column comes after those that dominate it.
    order = np.lexsort(
        (np.arange(count), -np.nan_to_num(ability_table, posinf=0.0).sum(axis=1), model.uses.sum(axis=1))
    )
    # A dominating column uses only node types of the dominated one, so only such columns are compared.
    undominated_by_types: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, j in enumerate(order.tolist()):
        types = tuple(np.flatnonzero(model.uses[j]).tolist())
        if j not in kept:
            subset_types = [
                other_types for other_types in undominated_by_types if set(types).issuperset(other_types)
            ]
            rows = [
                row
                for _, row in sorted(
                    candidate
                    for other_types in subset_types
                    for candidate in undominated_by_types[other_types]
                )
            ]
            uses = (model.uses[rows] <= model.uses[j]).all(axis=1)
            dominates = uses & (ability_table[rows] >= ability_table[j]).all(axis=1)
            if dominates.any():
                stand_in[j] = rows[int(np.argmax(dominates))]
                continue
        if j not in fixed:
            undominated_by_types.setdefault(types, []).append((rank, j))
    return stand_in


def largest_fraction(
    program: FlowProgram,
    deadline: Deadline,
    gap_target: float = 0.0,
    starts: Sequence[dict[ColumnKey, int]] = (),
) -> tuple[Shortfall, dict[ColumnKey, int]]:
    """(shortfall, counts that meet its fraction), the fraction being no less than that of any of `starts`.

    Solves the same rows with theta maximised. The relaxation's duals on nodes, links and budget are the gain of theta
    per additional unit.
    """
    if exceeded := overpinned(program):
        return Shortfall(0.0, 0.0, (), overpinned=exceeded), {}
    unserved_names = unserved(program, Pricer(program))
    state = solve_with_cuts(
        program,
        deadline,
        lambda flow_program, limit, start_counts: _maximise_theta(
            flow_program, limit, gap_target, [start_counts, *starts]
        ),
        at_cost=False,
    )
    if state.relaxed is None:
        limit_names = tuple(limit.name for limit in program.limits) if state.infeasible else ()
        fraction = min(max(0.0, -state.upper), 1.0) if state.counts is not None else 0.0
        return Shortfall(fraction, 1.0, (), unserved_names, unkept=limit_names), state.counts or {}
    fraction = 0.0 if state.counts is None else min(max(0.0, -state.upper), 1.0)
    fraction_bound = min(max(-state.lower, fraction), 1.0)
    binding = _binding(state.pricer.program, state.relaxed)
    return Shortfall(fraction, fraction_bound, binding, unserved_names), state.counts or {}


def _maximise_theta(
    program: FlowProgram, deadline: Deadline, gap_target: float, starts: Sequence[dict[ColumnKey, int]]
) -> FlowState:
    """The state with the largest theta; no relaxation when the limits conflict at theta 0, or time ran out."""
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
    """Node types, budget and placement rules that the pinned copies alone exceed."""
    node_supply = program.fleet
    needed = np.zeros(node_supply.available.shape, dtype=np.int64)
    forbidden: list[str] = []
    for key, count, _ in program.pins:
        uses = program.models[key.group].uses[key.template]
        needed[key.region] += uses.astype(np.int64) * count
        allowed = program.models[key.group].allowed
        if count and allowed is not None and not allowed[key.template, key.region]:
            name = program.models[key.group].name
            forbidden.append(f"template {key.template} of {name} in {node_supply.regions[key.region]}")
    exceeded = [
        node_supply.node_label(int(r), int(c)) for r, c in np.argwhere(needed > node_supply.available)
    ]
    rent = rent_usd_per_h(program, {pin.key: pin.copies for pin in program.pins})
    if program.budget_usd_per_h is not None and rent > program.budget_usd_per_h * (1 + 1e-9):
        exceeded.append("budget")
    return (*exceeded, *forbidden)


def unserved(program: FlowProgram, pricer: Pricer) -> tuple[str, ...]:
    """Demands that no count of any columns serves, with both phases in one region or over a link."""
    regions = range(len(program.fleet.regions))
    paths = [(r, r) for r in regions] + [(link.source, link.target) for link in program.links]
    names = []
    for numbered in numbered_buckets(program):
        if numbered.rate_per_s <= 0:
            continue
        model = program.models[numbered.model]
        can_host = pricer.most[numbered.model] >= 1
        for pin in program.pins:
            if pin.key.group == numbered.model and pin.copies:
                can_host[pin.key.template, pin.key.region] = True

        def somewhere(
            table: np.ndarray[tuple[int, int], np.dtype[np.float64]],
            can_host: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = can_host,
            bucket: int = numbered.bucket,
        ) -> list[bool]:
            return [bool((can_host[:, r] & (table[:, bucket] > 0)).any()) for r in regions]

        prefill, decode = somewhere(model.prefill_per_s), somewhere(model.decode_per_s)
        has_path = any(prefill[r] and decode[s] for r, s in paths if (r, s) not in numbered.demand.barred)
        if not has_path and not any(somewhere(model.closed_per_s)):
            names.append(numbered.name)
    return tuple(names)


def _binding(program: FlowProgram, relaxed: Relaxation) -> tuple[str, ...]:
    """Names of the binding resources, by the value of their supply at the relaxation's duals, highest first."""
    node_supply, duals = program.fleet, relaxed.duals
    values: list[tuple[float, str]] = []
    for r, c in np.argwhere(duals.nodes > 1e-12):
        # A node type with no supply is named too.
        value = float(duals.nodes[r, c]) * max(int(node_supply.available[r, c]), 1)
        values.append((value, node_supply.node_label(int(r), int(c))))
    for link, price in zip(program.links, duals.links.tolist(), strict=True):
        if price * link.bits_per_s > 1e-12:
            name = f"link {node_supply.regions[link.source]}->{node_supply.regions[link.target]}"
            values.append((price * link.bits_per_s, name))
    for limit, dual in zip(program.limits, duals.limits.tolist(), strict=True):
        if abs(dual) > 1e-12:
            values.append((abs(dual), limit.name))
    if duals.budget > 1e-12 and program.budget_usd_per_h is not None:
        values.append((duals.budget * program.budget_usd_per_h, "budget"))
    return tuple(name for _, name in sorted(values, key=lambda pair: (-pair[0], pair[1])))
