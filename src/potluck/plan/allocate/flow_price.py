"""Pricing every column of the general program at once, and its linear relaxation by column generation.

With duals pi_br (prefill), rho_br (decode), delta_b (demand), mu_rc (nodes), beta (budget) and the cost
factor k (1 + K when cost is minimised, 0 when the fraction is maximised), a new column of region r has the
reduced cost

    p_j (k + beta) + sum_c U_jc (mu_rc - gamma_rc) + e_j - sum_i lambda_i A_ij
        - h max_b max(P_jb pi_br, Q_jb rho_br, C_jb delta_b)

(gamma: nodes that are paid for already, lambda: limits), since its time goes where it earns most. Where its
network cards may bind, a copy's time earns less: that little linear program is priced exactly (`_carded`). Summed
over all columns with their largest counts, what is negative in it corrects the relaxation's value to a valid bound,
also before the last column has come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from potluck.plan.allocate.allocation import ShadowPrices
from potluck.plan.allocate.deadline import Deadline
from potluck.plan.allocate.flow_rows import THETA, FlowRows
from potluck.plan.allocate.highs import solve_milp
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram, card_rows

PER_ROUND = 12
TOLERANCE = 1e-9
UNCAPPED = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Prices of the shared rows, per unit of the program (not of the scaled matrix)."""

    phase: Floats
    """[2, bins, regions]: pi and rho."""
    demand: Floats
    nodes: Floats
    links: Floats
    budget: float
    paid: Floats
    """[regions, node types]: gamma."""
    limits: Floats
    """lambda, of either sign."""


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
    """What of pricing does not depend on the duals."""

    def __init__(self, program: FlowProgram) -> None:
        self.program = program
        fleet = program.fleet
        self.uses = [model.uses.astype(np.float64) for model in program.models]
        self.most: list[Floats] = []
        """[templates, regions]: the largest count that a region's nodes allow."""
        for model, uses in zip(program.models, self.uses, strict=True):
            most = np.full((len(uses), len(fleet.regions)), np.inf)
            for r in range(len(fleet.regions)):
                with np.errstate(divide="ignore", invalid="ignore"):
                    most[:, r] = np.where(uses > 0, np.floor(fleet.available[r] / uses), np.inf).min(axis=1)
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
        """[templates, regions]: what one copy's time earns at best."""
        model, first = self.program.models[m], int(self.first_bin[m])
        best = np.zeros(self.most[m].shape)
        for b in range(len(model.buckets)):
            for r in range(len(self.program.fleet.regions)):
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
        h = self.program.headroom
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
                for a, b in combinations(range(value.shape[1]), 2):
                    with np.errstate(divide="ignore", invalid="ignore"):
                        cross = value[:, a] * made[:, b] - value[:, b] * made[:, a]
                        at = cross / (made[:, b] - made[:, a])
                    bends.append(np.where(np.isfinite(at), at, 0.0)[:, None])
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
    fleet = rows.program.fleet
    phase = np.zeros((2, len(rows.bins), len(fleet.regions)))
    for (p, b, r), row in rows.phase.items():
        phase[p, b, r] = max(float(dual[row]), 0.0) / rows.scale[b] if rows.bins[b].rate_per_s > 0 else 0.0
    demand = [max(float(dual[row]), 0.0) / rows.scale[b] for b, row in enumerate(rows.demand)]
    live = np.array([one.rate_per_s > 0 for one in rows.bins], dtype=bool)
    nodes = np.zeros((len(fleet.regions), len(fleet.nodes)))
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


def prices_of(duals: Duals) -> ShadowPrices:
    return ShadowPrices(duals.nodes, tuple(duals.demand.tolist()), tuple(duals.links.tolist()), duals.budget)


def relax_flow(
    pricer: Pricer,
    deadline: Deadline,
    *,
    at_cost: bool,
    keys: list[ColumnKey],
    theta_cap: float = 1.0,
) -> Relaxation | None:
    """Column generation from `keys`; None when no relaxation could be solved (out of time, or no solution).

    With a cap of 1 the maximisation of theta stops as soon as 1 is reached, for its columns are then enough
    to start minimising cost.
    """
    program = pricer.program
    known = sorted(set(keys))
    factor = 1.0 + program.init_penalty if at_cost else 0.0
    last: Relaxation | None = None
    while not deadline.over:
        rows = FlowRows(program, known)
        problem = rows.milp(at_cost=at_cost, theta_cap=theta_cap, priced=True)
        answer = solve_milp(problem, time_limit_s=deadline.left_s, relax=True)
        if answer.x is None or answer.row_dual is None or not answer.finished:
            return last
        duals = duals_of(rows, answer.row_dual)
        reduced = [pricer.reduced(m, duals, factor) for m in range(len(program.models))]
        short = 0.0
        for table, most in zip(reduced, pricer.most, strict=True):
            short += float((np.minimum(table, 0.0) * np.where(table < 0, most, 0.0)).sum())
        theta = float(answer.x[THETA])
        scale = max(abs(answer.objective), 1e-12)
        fresh = set(pricer.cheapest(reduced, PER_ROUND, -TOLERANCE * scale)) - set(known)
        bound = answer.objective + short
        last = Relaxation(known, theta, answer.objective, bound, duals, reduced, not fresh)
        if not fresh or (not at_cost and theta_cap <= 1 and theta >= 1 - TOLERANCE):
            return last
        known = sorted({*known, *fresh})
    return last
