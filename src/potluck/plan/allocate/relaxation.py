"""The linear relaxation by column generation: every column priced at once, and rows that hold as copies are whole.

With duals pi_br (prefill), rho_br (decode), delta_b (demand), mu_rc (nodes), beta (budget) and the cost factor k (1 +
K when cost is minimised, 0 when the fraction is maximised), a new column of region r has the reduced cost

    p_j (k + beta) + sum_c U_jc (mu_rc - gamma_rc) + e_j - sum_i lambda_i A_ij
        - h max_b max(P_jb pi_br, Q_jb rho_br, C_jb delta_b)

(gamma: nodes that are paid for already, lambda: limits), since its time goes where it earns most. Where its network
cards may bind, a copy's time earns less: that little linear program is priced exactly (`_carded`). Summed over all
columns with their largest counts, what is negative in it corrects the relaxation's value to a valid bound, also
before the last column has come in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from potluck.plan.allocate.highs import INFINITY, Deadline, Milp, solve_milp
from potluck.plan.allocate.matrix import THETA, FlowRows
from potluck.plan.allocate.program import ColumnKey, CountLimit, Floats, FlowProgram, card_rows

PER_ROUND = 12
TOLERANCE = 1e-9
UNCAPPED = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Prices of the shared rows, per unit of the program (not of the scaled matrix)."""

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
    """Per model [templates, regions]: reduced costs of new columns, infinite where one cannot be."""
    converged: bool


class Pricer:
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
        self.cards = [card_rows(model, program.headroom) for model in program.models]
        self.carded = [
            np.flatnonzero(np.any([np.isfinite(limit) for _, limit in cards], axis=0)) for cards in self.cards
        ]
        """Per model the templates whose network cards may bind."""

    def earnings(self, m: int, duals: Duals) -> Floats:
        """[templates, regions of the prices]: what one copy's time earns at best."""
        model, first = self.program.models[m], int(self.first_bin[m])
        best = np.zeros((len(model.uses), duals.phase.shape[2]))
        for b in range(len(model.buckets)):
            for r in range(best.shape[1]):
                for p, table in enumerate((model.prefill_per_s, model.decode_per_s)):
                    if duals.phase[p, first + b, r] > 0:
                        np.maximum(best[:, r], table[:, b] * duals.phase[p, first + b, r], out=best[:, r])
            closed = model.closed_per_s[:, b, None] * duals.demand[first + b]
            np.maximum(best, closed, out=best)
        best *= self.program.headroom
        if len(self.carded[m]):
            self._carded(m, duals, best)
        return best

    def _carded(self, m: int, duals: Duals, best: Floats) -> None:
        """Lower what copies earn whose network cards may bind.

        A copy's time earns at most  max sum_b v_b x_b  with  sum_b x_b <= h  and  sum_b a_b x_b <= O  (v_b what a
        copy busy with b earns, a_b the bits it makes), and likewise for what it receives. By duality that is the
        least of  h t + O l(t) + I u(t)  over t, the price of its time, where l(t) = max_b (v_b - t)+ / a_b is the
        price of its cards: convex, and bent only where two of its lines cross or one ends.
        """
        model, first, rows = self.program.models[m], int(self.first_bin[m]), self.carded[m]
        span = slice(first, first + len(model.buckets))
        h, pairs = self.program.headroom, np.triu_indices(len(model.buckets), 1)
        closed = (model.closed_per_s[rows] * duals.demand[span]).max(axis=1, initial=0.0)
        for r in range(best.shape[1]):
            least, bends = closed.copy(), [np.zeros((len(rows), 1))]
            sides: list[tuple[Floats, Floats, Floats]] = []
            for p, table in enumerate((model.prefill_per_s, model.decode_per_s)):
                value = table[rows] * duals.phase[p, span, r]
                made, limit = self.cards[m][p][0][rows], self.cards[m][p][1][rows]
                free = (made <= 0) | ~np.isfinite(limit)[:, None]
                least = np.maximum(least, np.where(free, value, 0.0).max(axis=1, initial=0.0))
                value, made = np.where(free, 0.0, value), np.where(free, 1.0, made)
                sides.append((value, made, np.where(np.isfinite(limit), limit, 0.0)))
                bends.append(value)
                a, b = pairs
                with np.errstate(divide="ignore", invalid="ignore"):
                    cross = value[:, a] * made[:, b] - value[:, b] * made[:, a]
                    at = cross / (made[:, b] - made[:, a])
                bends.append(np.where(np.isfinite(at), at, 0.0))
            time = np.maximum(np.concatenate(bends, axis=1), least[:, None])
            total = h * time
            for value, made, limit in sides:
                over = np.maximum(value[:, None, :] - time[:, :, None], 0.0) / made[:, None, :]
                total += limit[:, None] * over.max(axis=2, initial=0.0)
            best[rows, r] = total.min(axis=1)

    def reduced(self, m: int, duals: Duals, factor: float) -> Floats:
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
        """Running and pinned columns, and per bucket, phase and region the best value for money."""
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
        """Per model and region the `limit` columns of least reduced cost, none above `ceiling`."""
        keys = []
        for m, table in enumerate(reduced):
            few = min(limit, len(table))
            for r in range(table.shape[1]):
                column = table[:, r]
                pick = np.argpartition(column, few - 1)[:few] if 0 < few < len(column) else range(few)
                keys += [ColumnKey(m, int(t), r) for t in pick if column[t] <= min(ceiling, 1e300)]
        return keys


def duals_of(rows: FlowRows, dual: Floats) -> Duals:
    node_supply = rows.program.fleet
    phase = np.zeros((2, len(rows.bins), len(node_supply.regions)))
    for (p, b, r), row in rows.phase.items():
        phase[p, b, r] = max(float(dual[row]), 0.0) / rows.scale[b] if rows.bins[b].rate_per_s > 0 else 0.0
    demand = [max(float(dual[row]), 0.0) / rows.scale[b] for b, row in enumerate(rows.demand)]
    live = np.array([one.rate_per_s > 0 for one in rows.bins], dtype=bool)
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
    return Duals(phase, np.where(live, demand, 0.0), nodes, np.array(links), budget, paid, limits)


def relax_flow(
    pricer: Pricer, deadline: Deadline, *, at_cost: bool, keys: list[ColumnKey], theta_cap: float = 1.0
) -> Relaxation | None:
    """Column generation from `keys`; None when no relaxation could be solved (out of time, or no solution).

    Where the columns at hand keep not all rows, those come in first that lessen what they fall short by: that there
    is no solution is known only once no column does. With a cap of 1 the maximisation of theta stops as soon as 1 is
    reached, for its columns are then enough to start minimising cost.
    """
    program = pricer.program
    factor = 1.0 + program.init_penalty if at_cost else 0.0
    last_relaxation: Relaxation | None = None
    rows = FlowRows(program, sorted(set(keys)), order=False)
    while not deadline.over:
        milp = rows.milp(at_cost=at_cost, theta_cap=theta_cap, priced=True)
        answer = solve_milp(milp, time_limit_s=deadline.left_s, relax=True)
        if lacking := answer.infeasible:
            answer = solve_milp(_elastic(rows, milp), time_limit_s=deadline.left_s, relax=True)
        if answer.x is None or answer.row_dual is None or not answer.finished:
            return last_relaxation
        duals = duals_of(rows, answer.row_dual)
        reduced = [pricer.reduced(m, duals, 0.0 if lacking else factor) for m in range(len(program.models))]
        short = 0.0
        for table, most in zip(reduced, pricer.most, strict=True):
            short += float((np.minimum(table, 0.0) * np.where(table < 0, most, 0.0)).sum())
        theta = float(answer.x[THETA])
        scale = max(abs(answer.objective), 1e-12)
        fresh = set(pricer.cheapest(reduced, PER_ROUND, -TOLERANCE * scale)) - rows.new.keys()
        if not lacking:
            bound = answer.objective + short
            last_relaxation = Relaxation(
                sorted(rows.new), theta, answer.objective, bound, duals, reduced, not fresh
            )
        if not fresh or (not lacking and not at_cost and theta_cap <= 1 and theta >= 1 - TOLERANCE):
            return last_relaxation
        rows.add(sorted(fresh))
    return last_relaxation


def _elastic(rows: FlowRows, milp: Milp) -> Milp:
    """The least by which demands and limits together fall short, or are exceeded."""
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


ROUNDS = 2  # Of rows at the relaxation's own prices.
UNITS, LEAST = 3, 0.05  # Units that each row is rounded in; what copies earn at least to be one.
SLACK = 1e-5
"""By which E_j is rounded up: a count is whole for HiGHS within a millionth, and so may demand be met."""


def with_whole_copy_rows(
    pricer: Pricer, relaxed: Relaxation, deadline: Deadline
) -> tuple[Pricer, Relaxation] | None:
    """The program with rows for whole copies, and its relaxation at cost; None where there was no time.

    At prices w_b of prefilling and v_b of decoding a model's buckets, the rows of demand, phases and time add up to

        W = sum_b (w_b + v_b) D_b  <=  sum_j E_j n_j       E_j: what a copy earns at these prices (`Pricer.earnings`)

    which a relaxation keeps with a tenth of a copy that earns ten times W. But n_j is whole, so this holds too:

        sum_j min(E_j / W, 1) n_j >= theta                 firm demand counts whole, whatever theta is

    Where one copy does not suffice, the same in units of what a copy u earns, rounded (a mixed-integer rounding):

        sum_j (floor(a_j) + min(frac(a_j) / frac(b), 1)) n_j >= ceil(b)      a_j = E_j / E_u, b = W / E_u

    which is for theta = 1: below it the right side is scaled along. Prices: each bucket's prefill, decode and both
    alone, then those that the relaxation itself ends with. Only rows that bind are kept.
    """
    rows = [row for m in range(len(pricer.program.models)) for row in _alone(pricer, m)]
    rows += _at(pricer, relaxed.duals)
    result = _relaxed(pricer, rows, relaxed, deadline)
    for _ in range(ROUNDS):
        if result is None:
            return None
        kept, best = result
        if not (more := _at(pricer, best.duals)):
            break
        again = _relaxed(pricer, [*kept, *more], best, deadline)
        if again is None or again[1].bound <= best.bound * (1 + SLACK):
            break
        result = again
    if result is None:
        return None
    return Pricer(replace(pricer.program, limits=(*pricer.program.limits, *result[0]))), result[1]


def _relaxed(
    pricer: Pricer, rows: list[CountLimit], previous_relaxation: Relaxation, deadline: Deadline
) -> tuple[list[CountLimit], Relaxation] | None:
    """The rows that bind, and the relaxation with these alone: without the others it is the same."""
    own = len(pricer.program.limits)
    program = replace(pricer.program, limits=(*pricer.program.limits, *rows))
    again = Pricer(program)
    relaxation = relax_flow(again, deadline, at_cost=True, keys=previous_relaxation.keys)
    if relaxation is None:
        return None
    binding = np.flatnonzero(relaxation.duals.limits[own:])
    limits = np.concatenate([relaxation.duals.limits[:own], relaxation.duals.limits[own:][binding]])
    kept = [rows[place] for place in binding.tolist()]
    return kept, replace(relaxation, duals=replace(relaxation.duals, limits=limits))


def _alone(pricer: Pricer, m: int) -> Iterator[CountLimit]:
    """Each bucket's phases alone, and both."""
    buckets = len(pricer.program.models[m].buckets)
    for prices in np.eye(buckets):
        for prefill, decode in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            yield from _rows(pricer, m, prices * prefill, prices * decode)


def _at(pricer: Pricer, duals: Duals) -> list[CountLimit]:
    """Each model's phases alone and both, at the least price that any region has for them."""
    count_limits = []
    for m in range(len(pricer.program.models)):
        span = slice(int(pricer.first_bin[m]), int(pricer.first_bin[m + 1]))
        prefill, decode = duals.phase[0, span].min(axis=1), duals.phase[1, span].min(axis=1)
        for w, v in ((prefill, decode), (prefill, 0 * decode), (0 * prefill, decode)):
            count_limits += _rows(pricer, m, w, v)
    return count_limits


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
    # The prices are those of all regions, so that one column stands for them.
    phase, demand = np.zeros((2, int(pricer.first_bin[-1]), 1)), np.zeros(int(pricer.first_bin[-1]))
    phase[0, span], phase[1, span], demand[span] = prefill[:, None], decode[:, None], worth
    nothing = np.zeros(0)
    earned = pricer.earnings(m, Duals(phase, demand, nothing, nothing, 0.0, nothing, nothing))
    earned = np.repeat(earned * ((1 + SLACK) / asked), regions, axis=1)
    first = _limit(program, m, np.minimum(earned, 1.0), 1.0, float(worth[firm] @ rates[firm]) / asked)
    return [first, *(_rounded(program, m, earned, unit) for unit in _units(pricer, m, earned))]


def _units(pricer: Pricer, m: int, earned: Floats) -> list[float]:
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
