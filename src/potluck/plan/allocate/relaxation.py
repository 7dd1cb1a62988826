"""The linear relaxation by column generation, tightened by rows that hold because copies are whole.

With duals pi_br (prefill), rho_br (decode), delta_b (demand), mu_rc (nodes), beta (budget) and the cost factor k (1 +
K when cost is minimised, 0 when the fraction is maximised), a new column of region r has the reduced cost

    p_j (k + beta) + sum_c U_jc (mu_rc - gamma_rc) + e_j - sum_i lambda_i A_ij
        - h max_b max(P_jb pi_br, Q_jb rho_br, C_jb delta_b)

(gamma: reserved nodes, lambda: limits), since its time goes where it earns most. Where its network cards may bind, a
copy's time earns less, by a small linear program that is solved exactly (`_limit_by_network`). The negative reduced
costs, summed over all columns at their largest counts, correct the relaxation's value to a valid bound, also before
column generation has converged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Deadline, Milp, solve_milp
from potluck.plan.allocate.matrix import THETA, FlowRows
from potluck.plan.allocate.program import ColumnKey, CountLimit, Floats, FlowProgram, network_rows

COLUMNS_PER_ROUND = 12  # Columns added per model and region in one round.
RELATIVE_TOLERANCE = 1e-9
UNCAPPED = 1e9  # A cap on theta that never binds.


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Dual prices of the shared rows, per unit of the program (not of the scaled matrix)."""

    phase: Floats  # [2, bins, regions]: pi and rho.
    demand: Floats
    nodes: Floats
    links: Floats
    budget: float
    paid: Floats  # [regions, node types]: gamma.
    limits: Floats  # lambda, of either sign.


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The solved relaxation over `keys`; `bound` is valid for the whole program."""

    keys: list[ColumnKey]
    theta: float
    value: float
    bound: float
    duals: Duals
    reduced: list[Floats]
    """By model [templates, regions]: reduced costs of new columns, infinite where no copy fits."""
    converged: bool


class Pricer:
    """Prices all columns of a program at once: earnings, reduced costs, largest counts."""

    def __init__(self, program: FlowProgram) -> None:
        self.program = program
        node_supply = program.fleet
        self.uses = [model.uses.astype(np.float64) for model in program.models]
        self.most: list[Floats] = []
        """[templates, regions]: the largest count that a region's nodes allow."""
        for model, uses in zip(program.models, self.uses, strict=True):
            most = np.full((len(uses), len(node_supply.regions)), np.inf)
            for r in range(len(node_supply.regions)):
                with np.errstate(divide="ignore", invalid="ignore"):
                    most[:, r] = np.where(uses > 0, np.floor(node_supply.available[r] / uses), np.inf).min(
                        axis=1
                    )
            if model.allowed is not None:
                most[~model.allowed] = 0.0
            self.most.append(most)
        for pin in program.pins:
            if pin.exactly:  # its column is always there; no others of it may be added
                self.most[pin.key.group][pin.key.template, pin.key.region] = 0.0
        self.first_bin = np.cumsum([0, *(len(model.buckets) for model in program.models)])
        self.cards = [network_rows(model, program.headroom) for model in program.models]
        self.network_limited = [
            np.flatnonzero(np.any([np.isfinite(limit) for _, limit in cards], axis=0)) for cards in self.cards
        ]
        """By model, the templates whose network cards may bind."""

    def earnings(self, m: int, duals: Duals) -> Floats:
        """[templates, regions of the duals]: the most that one copy's time can earn."""
        model, first = self.program.models[m], int(self.first_bin[m])
        earned = np.zeros((len(model.uses), duals.phase.shape[2]))
        for b in range(len(model.buckets)):
            for r in range(earned.shape[1]):
                for p, table in enumerate((model.prefill_per_s, model.decode_per_s)):
                    if duals.phase[p, first + b, r] > 0:
                        np.maximum(earned[:, r], table[:, b] * duals.phase[p, first + b, r], out=earned[:, r])
            closed = model.closed_per_s[:, b, None] * duals.demand[first + b]
            np.maximum(earned, closed, out=earned)
        earned *= self.program.headroom
        if len(self.network_limited[m]):
            self._limit_by_network(m, duals, earned)
        return earned

    def _limit_by_network(self, m: int, duals: Duals, earned: Floats) -> None:
        """Lower the earnings of copies whose network cards may bind.

        A copy's time earns at most  max sum_b v_b x_b  with  sum_b x_b <= h  and  sum_b a_b x_b <= O  (v_b: the
        earnings of a copy busy with b, a_b: the bits it sends), and likewise for what it receives. By duality that is
        the least of  h t + O l(t) + I u(t)  over t, the price of its time, where l(t) = max_b (v_b - t)+ / a_b is the
        price of its cards: convex, with bends only where two of its lines cross or one ends.
        """
        model, first, rows = self.program.models[m], int(self.first_bin[m]), self.network_limited[m]
        span = slice(first, first + len(model.buckets))
        h, pairs = self.program.headroom, np.triu_indices(len(model.buckets), 1)
        closed = (model.closed_per_s[rows] * duals.demand[span]).max(axis=1, initial=0.0)
        for r in range(earned.shape[1]):
            lower, breakpoints = closed.copy(), [np.zeros((len(rows), 1))]
            directions: list[tuple[Floats, Floats, Floats]] = []
            for p, table in enumerate((model.prefill_per_s, model.decode_per_s)):
                value = table[rows] * duals.phase[p, span, r]
                kv_bits, limit = self.cards[m][p][0][rows], self.cards[m][p][1][rows]
                unlimited = (kv_bits <= 0) | ~np.isfinite(limit)[:, None]
                lower = np.maximum(lower, np.where(unlimited, value, 0.0).max(axis=1, initial=0.0))
                value, kv_bits = np.where(unlimited, 0.0, value), np.where(unlimited, 1.0, kv_bits)
                directions.append((value, kv_bits, np.where(np.isfinite(limit), limit, 0.0)))
                breakpoints.append(value)
                a, b = pairs
                with np.errstate(divide="ignore", invalid="ignore"):
                    determinant = value[:, a] * kv_bits[:, b] - value[:, b] * kv_bits[:, a]
                    crossing = determinant / (kv_bits[:, b] - kv_bits[:, a])
                breakpoints.append(np.where(np.isfinite(crossing), crossing, 0.0))
            time_prices = np.maximum(np.concatenate(breakpoints, axis=1), lower[:, None])
            total = h * time_prices
            for value, kv_bits, limit in directions:
                card_prices = (
                    np.maximum(value[:, None, :] - time_prices[:, :, None], 0.0) / kv_bits[:, None, :]
                )
                total += limit[:, None] * card_prices.max(axis=2, initial=0.0)
            earned[rows, r] = total.min(axis=1)

    def reduced(self, m: int, duals: Duals, factor: float) -> Floats:
        """[templates, regions]: reduced costs of a model's new columns; infinite where no copy fits."""
        price = self.program.fleet.price_usd_per_h
        node_price = price * (factor + duals.budget) + duals.nodes - duals.paid
        cost: Floats = self.uses[m] @ node_price.T - self.earnings(m, duals)
        fees = self.program.models[m].fees_usd_per_h
        if fees is not None:
            cost += fees * (float(factor > 0) + duals.budget)
        parts = self.program.models[m].complexity_usd_per_h
        if parts is not None and factor > 0:
            cost += parts
        for limit, dual in zip(self.program.limits, duals.limits.tolist(), strict=True):
            table = limit.copies[m]
            if table is not None and dual:
                cost -= dual * table
        cost[self.most[m] < 1] = np.inf
        return cost

    def first_keys(self) -> list[ColumnKey]:
        """Running and pinned columns, and the cheapest per unit of rate for each bucket, phase and region."""
        program = self.program
        keys = {count.key for count in program.running} | {pin.key for pin in program.pins}
        for m, model in enumerate(program.models):
            price = self.uses[m] @ program.fleet.price_usd_per_h.T
            price[self.most[m] < 1] = np.inf
            for table in (model.prefill_per_s, model.decode_per_s, model.closed_per_s):
                for b in range(len(model.buckets)):
                    if not table[:, b].any():
                        continue
                    with np.errstate(divide="ignore", invalid="ignore"):
                        ratio = np.where(table[:, b, None] > 0, price / table[:, b, None], np.inf)
                    for r in range(ratio.shape[1]):
                        t = int(np.argmin(ratio[:, r]))
                        if np.isfinite(ratio[t, r]):
                            keys.add(ColumnKey(m, t, r))
        return sorted(keys)

    def cheapest(self, reduced: list[Floats], limit: int, ceiling: float) -> list[ColumnKey]:
        """The `limit` columns of least reduced cost for each model and region, none above `ceiling`."""
        keys = []
        for m, table in enumerate(reduced):
            count = min(limit, len(table))
            for r in range(table.shape[1]):
                column = table[:, r]
                indices = (
                    np.argpartition(column, count - 1)[:count] if 0 < count < len(column) else range(count)
                )
                keys += [ColumnKey(m, int(t), r) for t in indices if column[t] <= min(ceiling, 1e300)]
        return keys


def duals_of(rows: FlowRows, dual: Floats) -> Duals:
    """Duals of the scaled matrix rows in units of the program."""
    node_supply = rows.program.fleet
    phase = np.zeros((2, len(rows.bins), len(node_supply.regions)))
    for (p, b, r), row in rows.phase.items():
        phase[p, b, r] = max(float(dual[row]), 0.0) / rows.scale[b] if rows.bins[b].rate_per_s > 0 else 0.0
    demand = [max(float(dual[row]), 0.0) / rows.scale[b] for b, row in enumerate(rows.demand)]
    active = np.array([numbered.rate_per_s > 0 for numbered in rows.bins], dtype=bool)
    nodes = np.zeros((len(node_supply.regions), len(node_supply.nodes)))
    for (r, c), row in rows.nodes.items():
        nodes[r, c] = max(-float(dual[row]), 0.0)
    links = [
        max(-float(dual[row]), 0.0) / link.bits_per_s
        for row, link in zip(rows.links, rows.program.links, strict=True)
    ]
    budget = max(-float(dual[rows.budget]), 0.0)
    paid = np.zeros_like(nodes)
    for (r, c), row in rows.paid.items():
        paid[r, c] = max(float(dual[row]), 0.0)
    limits = np.array([float(dual[row]) for row in rows.limits])
    return Duals(phase, np.where(active, demand, 0.0), nodes, np.array(links), budget, paid, limits)


def relax_flow(
    pricer: Pricer, deadline: Deadline, *, at_cost: bool, keys: list[ColumnKey], theta_cap: float = 1.0
) -> Relaxation | None:
    """Column generation from `keys`; None when no relaxation was solved (out of time, or infeasible).

    While the columns cannot satisfy all rows, columns that reduce the violation are added; the program is infeasible
    only when none is left. With a cap of 1 the maximisation of theta stops at 1, as its columns then suffice to start
    minimising cost.
    """
    program = pricer.program
    factor = 1.0 + program.init_penalty if at_cost else 0.0
    last_relaxation: Relaxation | None = None
    rows = FlowRows(program, sorted(set(keys)), order=False)
    while not deadline.over:
        milp = rows.milp(at_cost=at_cost, theta_cap=theta_cap, priced=True)
        milp_result = solve_milp(milp, time_limit_s=deadline.left_s, relax=True)
        if is_infeasible := milp_result.infeasible:
            milp_result = solve_milp(_elastic(rows, milp), time_limit_s=deadline.left_s, relax=True)
        if milp_result.x is None or milp_result.row_dual is None or not milp_result.finished:
            return last_relaxation
        duals = duals_of(rows, milp_result.row_dual)
        reduced = [
            pricer.reduced(m, duals, 0.0 if is_infeasible else factor) for m in range(len(program.models))
        ]
        bound_correction = 0.0
        for table, most in zip(reduced, pricer.most, strict=True):
            bound_correction += float((np.minimum(table, 0.0) * np.where(table < 0, most, 0.0)).sum())
        theta = float(milp_result.x[THETA])
        scale = max(abs(milp_result.objective), 1e-12)
        new_keys = (
            set(pricer.cheapest(reduced, COLUMNS_PER_ROUND, -RELATIVE_TOLERANCE * scale)) - rows.new.keys()
        )
        if not is_infeasible:
            bound = milp_result.objective + bound_correction
            last_relaxation = Relaxation(
                sorted(rows.new), theta, milp_result.objective, bound, duals, reduced, not new_keys
            )
        if not new_keys or (
            not is_infeasible and not at_cost and theta_cap <= 1 and theta >= 1 - RELATIVE_TOLERANCE
        ):
            return last_relaxation
        rows.add(sorted(new_keys))
    return last_relaxation


def _elastic(rows: FlowRows, milp: Milp) -> Milp:
    """The program that minimises the total violation of demands and limits."""
    row = np.array([*rows.demand, *rows.limits, *rows.limits], dtype=np.int64)
    value = np.ones(len(row))
    value[len(rows.demand) + len(rows.limits) :] = -1.0
    count = len(milp.cost)
    return replace(
        milp,
        cost=np.concatenate([np.zeros(count), np.ones(len(row))]),
        lower=np.concatenate([milp.lower, np.zeros(len(row))]),
        upper=np.concatenate([milp.upper, np.full(len(row), INFINITY)]),
        integer=np.concatenate([milp.integer, np.zeros(len(row), bool)]),
        row=np.concatenate([milp.row, row]),
        column=np.concatenate([milp.column, count + np.arange(len(row))]),
        value=np.concatenate([milp.value, value]),
    )


ROW_ROUNDS = 2  # Rounds of rows at the relaxation's own prices.
MAX_ROUNDING_UNITS = 3  # Copies in whose units each row is rounded.
MIN_UNIT_EARNINGS = 0.05  # Fraction of the demand's value that a copy must earn to be such a unit.
ROUNDING_SLACK = 1e-5
"""Relative amount by which E_j is rounded up: HiGHS accepts counts and demands within a millionth."""


def with_whole_copy_rows(
    pricer: Pricer, relaxed: Relaxation, deadline: Deadline
) -> tuple[Pricer, Relaxation] | None:
    """The program with rows for whole copies, and its relaxation at cost; None where time ran out.

    At prices w_b of prefilling and v_b of decoding a model's buckets, the rows of demand, phases and time add up to

        W = sum_b (w_b + v_b) D_b  <=  sum_j E_j n_j       E_j: earnings of a copy at these prices (`Pricer.earnings`)

    which a tenth of a copy that earns ten times W satisfies. As n_j is whole, this holds too:

        sum_j min(E_j / W, 1) n_j >= theta                 firm demand counts whole, whatever theta is

    Where one copy does not suffice, the same in units of the earnings of a copy u (mixed-integer rounding):

        sum_j (floor(a_j) + min(frac(a_j) / frac(b), 1)) n_j >= ceil(b)      a_j = E_j / E_u, b = W / E_u

    for theta = 1; below, the right side is scaled. Prices: each bucket's prefill, decode and both alone, then the
    final duals of the relaxation. Only binding rows are kept.
    """
    rows = [row for m in range(len(pricer.program.models)) for row in _bucket_rows(pricer, m)]
    rows += _dual_rows(pricer, relaxed.duals)
    result = _relax_with_rows(pricer, rows, relaxed, deadline)
    for _ in range(ROW_ROUNDS):
        if result is None:
            return None
        binding_rows, relaxation = result
        if not (more_rows := _dual_rows(pricer, relaxation.duals)):
            break
        next_result = _relax_with_rows(pricer, [*binding_rows, *more_rows], relaxation, deadline)
        if next_result is None or next_result[1].bound <= relaxation.bound * (1 + ROUNDING_SLACK):
            break
        result = next_result
    if result is None:
        return None
    return Pricer(replace(pricer.program, limits=(*pricer.program.limits, *result[0]))), result[1]


def _relax_with_rows(
    pricer: Pricer, rows: list[CountLimit], previous_relaxation: Relaxation, deadline: Deadline
) -> tuple[list[CountLimit], Relaxation] | None:
    """(the binding ones of these rows, the relaxation with them); without the other rows its value is the same."""
    limit_count = len(pricer.program.limits)
    program = replace(pricer.program, limits=(*pricer.program.limits, *rows))
    pricer_with_rows = Pricer(program)
    relaxation = relax_flow(pricer_with_rows, deadline, at_cost=True, keys=previous_relaxation.keys)
    if relaxation is None:
        return None
    binding = np.flatnonzero(relaxation.duals.limits[limit_count:])
    limits = np.concatenate(
        [relaxation.duals.limits[:limit_count], relaxation.duals.limits[limit_count:][binding]]
    )
    binding_rows = [rows[index] for index in binding.tolist()]
    return binding_rows, replace(relaxation, duals=replace(relaxation.duals, limits=limits))


def _bucket_rows(pricer: Pricer, m: int) -> Iterator[CountLimit]:
    """Rows at unit prices of each bucket's prefill, decode, and both."""
    buckets = len(pricer.program.models[m].buckets)
    for prices in np.eye(buckets):
        for prefill, decode in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            yield from _priced_rows(pricer, m, prices * prefill, prices * decode)


def _dual_rows(pricer: Pricer, duals: Duals) -> list[CountLimit]:
    """Rows at the duals of each model's prefill, decode, and both; the least dual over regions."""
    count_limits = []
    for m in range(len(pricer.program.models)):
        span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
        prefill, decode = duals.phase[0, span].min(axis=1), duals.phase[1, span].min(axis=1)
        for w, v in ((prefill, decode), (prefill, 0 * decode), (0 * prefill, decode)):
            count_limits += _priced_rows(pricer, m, w, v)
    return count_limits


def _priced_rows(pricer: Pricer, m: int, prefill: Floats, decode: Floats) -> list[CountLimit]:
    """The rows of a model at these prices of prefill and decode by bucket; empty where the demand has no value."""
    program = pricer.program
    model, regions = program.models[m], len(program.fleet.regions)
    prices = prefill + decode
    rates = np.array([bucket.rate_per_s for bucket in model.buckets])
    firm = np.array([bucket.firm for bucket in model.buckets], bool)
    demand_value = float(prices @ rates)
    if not demand_value > 0:
        return []
    span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
    # The prices hold in all regions, so the duals have a single region.
    phase, demand = np.zeros((2, int(pricer.first_bin[-1]), 1)), np.zeros(int(pricer.first_bin[-1]))
    phase[0, span], phase[1, span], demand[span] = prefill[:, None], decode[:, None], prices
    no_duals = np.zeros(0)
    earned = pricer.earnings(m, Duals(phase, demand, no_duals, no_duals, 0.0, no_duals, no_duals))
    earned = np.repeat(earned * ((1 + ROUNDING_SLACK) / demand_value), regions, axis=1)
    single_copy_row = _count_row(
        program, m, np.minimum(earned, 1.0), 1.0, float(prices[firm] @ rates[firm]) / demand_value
    )
    return [
        single_copy_row,
        *(_rounded_row(program, m, earned, unit) for unit in _rounding_units(pricer, m, earned)),
    ]


def _rounding_units(pricer: Pricer, m: int, earned: Floats) -> list[float]:
    """Earnings of the copies with the least cost per value, as units for mixed-integer rounding."""
    if any(bucket.firm for bucket in pricer.program.models[m].buckets):
        return []
    cost = pricer.uses[m] @ pricer.program.fleet.price_usd_per_h.T
    usable = (pricer.most[m] >= 1) & (earned > MIN_UNIT_EARNINGS) & (earned < 1)
    ratio = np.where(usable, cost / np.maximum(earned, MIN_UNIT_EARNINGS), np.inf).ravel()
    order = np.argsort(ratio, kind="stable")[:MAX_ROUNDING_UNITS]
    return sorted({float(earned.ravel()[index]) for index in order if np.isfinite(ratio[index])})


def _rounded_row(program: FlowProgram, m: int, earned: Floats, unit: float) -> CountLimit:
    """The mixed-integer rounding row in units of a copy's earnings."""
    demand_units = (1 - ROUNDING_SLACK) / unit
    fraction = demand_units - np.floor(demand_units)
    whole_units = np.floor(earned / unit)
    return _count_row(
        program,
        m,
        whole_units + np.minimum((earned / unit - whole_units) / max(fraction, ROUNDING_SLACK), 1.0),
        float(np.ceil(demand_units)),
        0.0,
    )


def _count_row(program: FlowProgram, m: int, table: Floats, low: float, firm: float) -> CountLimit:
    """A limit on one model's counts, whose lower bound scales with theta but for its firm part."""
    tables: list[Floats | None] = [None] * len(program.models)
    tables[m] = table
    name = f"whole copies of {program.models[m].name}"
    return CountLimit(name, low * firm, INFINITY, tuple(tables), theta=low * (1 - firm))
