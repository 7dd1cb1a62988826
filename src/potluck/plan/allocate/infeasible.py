"""When demand cannot be met: the largest uniform fraction that can, and which resources bind.

The same rows with demand_b asking for theta D_b, theta maximised. The relaxation's duals on nodes, links and
budget say how much of theta one more unit would buy; the integer program gives the fraction itself, with a
plan for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.plan.allocate.allocation import BindingResource, Shortfall
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.flow import FlowState, close, offer_counts
from potluck.plan.allocate.flow_price import UNCAPPED, Pricer, Relaxation, relax_flow
from potluck.plan.allocate.flow_rows import bins_of
from potluck.plan.allocate.outages import guarded
from potluck.plan.allocate.program import ColumnKey, FlowProgram, price_of

GBIT = 1e9


def largest_fraction(
    program: FlowProgram,
    deadline: Deadline,
    gap_target: float = 0.0,
    starts: Sequence[dict[ColumnKey, int]] = (),
) -> tuple[Shortfall, dict[ColumnKey, int]]:
    """The shortfall, and the counts of a plan that meets that fraction: no less than any of `starts` does."""
    if over := overpinned(program):
        return Shortfall(0.0, 0.0, (), overpinned=over), {}
    missing = unserved(program, Pricer(program))
    state = guarded(
        program,
        deadline,
        lambda each, limit, best: _most(each, limit, gap_target, [best, *starts]),
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
    keys = sorted({*pricer.first_keys(), *(key for each in starts for key in each)})
    state.relaxed = relax_flow(pricer, deadline, at_cost=False, keys=keys, theta_cap=UNCAPPED)
    for counts in starts:
        if counts:
            offer_counts(state, counts)
    if state.relaxed is None:
        state.infeasible = state.counts is None and not deadline.over
        return state
    state.lower = state.relaxed.bound
    close(state)
    return state


def overpinned(program: FlowProgram) -> tuple[str, ...]:
    """What the pinned copies alone need too much of."""
    fleet = program.fleet
    need = np.zeros(fleet.available.shape, dtype=np.int64)
    rent = 0.0
    banned: list[str] = []
    for key, count, _ in program.pins:
        uses = program.models[key.group].uses[key.template]
        need[key.region] += uses.astype(np.int64) * count
        rent += count * price_of(fleet, uses, key.region)
        allowed = program.models[key.group].allowed
        if count and allowed is not None and not allowed[key.template, key.region]:
            name = program.models[key.group].name
            banned.append(f"template {key.template} of {name} in {fleet.regions[key.region]}")
    over = [fleet.node_label(int(r), int(c)) for r, c in np.argwhere(need > fleet.available)]
    if program.budget_usd_per_h is not None and rent > program.budget_usd_per_h * (1 + 1e-9):
        over.append("budget")
    return (*over, *banned)


def unserved(program: FlowProgram, pricer: Pricer) -> tuple[str, ...]:
    """Demands for which no region has both phases, or a path between them, at any count."""
    regions = range(len(program.fleet.regions))
    paths = [(r, r) for r in regions] + [(link.source, link.target) for link in program.links]
    names = []
    for one in bins_of(program):
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
        joined = any(prefill[r] and decode[s] for r, s in paths if (r, s) not in one.barred)
        if not joined and not any(somewhere(model.closed_per_s)):
            names.append(one.name)
    return tuple(names)


def _binding(program: FlowProgram, relaxed: Relaxation) -> tuple[BindingResource, ...]:
    """Resources with a price, dearest first by what all of them together are worth."""
    fleet, duals = program.fleet, relaxed.duals
    found: list[tuple[float, BindingResource]] = []
    for r, c in np.argwhere(duals.nodes > 1e-12):
        each = float(duals.nodes[r, c])
        # A type of which there is none at all still names what is missing.
        worth = each * max(int(fleet.available[r, c]), 1)
        found.append((worth, BindingResource(fleet.node_label(int(r), int(c)), each)))
    for link, price in zip(program.links, duals.links.tolist(), strict=True):
        if price * link.bits_per_s > 1e-12:
            name = f"link {fleet.regions[link.source]}->{fleet.regions[link.target]}"
            found.append((price * link.bits_per_s, BindingResource(name, price * GBIT)))
    for limit, dual in zip(program.limits, duals.limits.tolist(), strict=True):
        if abs(dual) > 1e-12:
            found.append((abs(dual), BindingResource(limit.name, abs(dual))))
    if duals.budget > 1e-12 and program.budget_usd_per_h is not None:
        found.append((duals.budget * program.budget_usd_per_h, BindingResource("budget", duals.budget)))
    return tuple(binding for _, binding in sorted(found, key=lambda pair: (-pair[0], pair[1].name)))
