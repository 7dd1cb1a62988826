"""Models apart: prices of nodes at which every model plans by itself, for a bound far above the relaxation's.

Models share nodes, links and a budget. With prices mu on nodes, links for each model as if it were alone, and no
budget, the program falls apart into a small one for every model, and for any mu >= 0

    L(mu) = sum_m z_m(mu) - sum_rc mu_rc A_rc  <=  the cheapest plan        z_m: the least that m costs at p + mu

where z_m is of whole copies: a node that is rented for a tenth of a copy, which makes the relaxation weak, is rented
whole here. What the models choose at some prices are columns of a master program (Dantzig and Wolfe)

    min sum_mk c_mk y_mk    pick_m: sum_k y_mk = 1    nodes_rc: sum_mk use_mkrc y_mk <= A_rc

whose relaxation has the next prices, and whose whole solution is a plan. Where nodes are in plenty mu is 0, and what
models choose apart is the cheapest plan there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from potluck.plan.allocate.flow import FlowState, Starts, begun, close, offer_counts, solve_flow
from potluck.plan.allocate.highs import INFINITY, Deadline, Milp, solve_milp
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram, NodeSupply

SHARE, MANY, MOST = 0.65, 6, 0.9
"""Of the time that is left, for models apart; the rest is for all at once, of which little comes with many."""
SOON, SOON_S = 0.25, 1.0
"""Of the time that is left, for a few models all at once: often enough; so long at least, where there is as much."""
ROUNDS = 60
BOX, NARROWER = 0.5, 0.4
"""How far the next prices may be from the best so far, as a share of a node's price, and how much less after each
that gave no better bound: the master's own prices swing wildly at first.
"""
FINE, COARSE = 1e-4, 2e-3  # How closely each model is solved, at most and at first.
TIGHTEN_SHARE = 0.5  # Of the time that is left, for a model that is solved once more.
AGAIN = 0.4
"""What a round takes of the time of the one before: many models are not concerned by prices that rise elsewhere."""
NOUGHT = 1e-7
TOGETHER = 3  # Models that are planned anew beside the others of a plan.


@dataclass(frozen=True, slots=True, eq=False)
class ModelChoice:
    """A plan of one model: its copies, the nodes they take, and what they cost without prices on nodes."""

    counts: dict[ColumnKey, int]
    uses: Floats
    usd_per_h: float

    def at(self, mu: Floats) -> float:
        return self.usd_per_h + float((self.uses * mu).sum())


class ModelDecomposition:
    def __init__(self, program: FlowProgram, state: FlowState, deadline: Deadline) -> None:
        self.state, self.deadline = state, deadline
        prices = program.fleet.price_usd_per_h * (1 + program.init_penalty)
        node_supply = replace(program.fleet, price_usd_per_h=prices)
        self.program = replace(
            program, fleet=node_supply, init_penalty=0.0, budget_usd_per_h=None, outages=(), spare=()
        )
        self.choices: list[list[ModelChoice]] = [[] for _ in self.program.models]
        self.seen: list[list[tuple[Floats, float]]] = [[] for _ in self.program.models]
        """(mu, bound on z_m there) of each model."""
        self.mu = np.zeros(self.program.fleet.available.shape)
        self.least: list[float] = []
        """z_m at these prices, or bounds on it."""

    def run(self, mu: Floats) -> None:
        """Prices, choices and bounds in turn, until they meet or time is over; then plans near the best one."""
        state, width = self.state, BOX
        if state.counts is not None:
            self._take(state.counts)
        for _ in range(ROUNDS):
            before_s = self.deadline.left_s
            least = self.costs(mu)
            if least is None:
                break
            bound = sum(least) - self._rest(mu)
            if bound > state.lower or not self.least:
                self.mu, self.least = mu, least
                state.lower = max(state.lower, min(bound, state.upper))
            else:
                width *= NARROWER
            self._offer()
            if state.counts is None:
                self._in_turn()
            if state.done or self.deadline.left_s < AGAIN * (before_s - self.deadline.left_s):
                break  # another round would not end in time
            relaxed = master(self.program, self.choices, self.mu, width, self.deadline)
            chosen = sum(self._best(m, self.mu) for m in range(len(self.choices))) - self._rest(self.mu)
            if relaxed is None or relaxed[1] - chosen <= NOUGHT * abs(chosen):
                break  # no prices promise a better bound
            mu = relaxed[0]
        self._tighten()
        self._improve()

    def _rest(self, mu: Floats) -> float:
        return float((mu * self.program.fleet.available).sum())

    def _best(self, m: int, mu: Floats) -> float:
        return min((choice.at(mu) for choice in self.choices[m]), default=INFINITY)

    def costs(self, mu: Floats) -> list[float] | None:
        """z_m at these prices, or bounds on them; what models choose joins. None when time is over before."""
        values = []
        for m in range(len(self.program.models)):
            # No price is lower than it was there, so neither is what the model costs.
            known = max((z for at, z in self.seen[m] if (at <= mu + NOUGHT).all()), default=-INFINITY)
            if known < self._best(m, mu) * (1 - self._gap):
                if self.deadline.over:
                    return None
                known = max(known, self._alone(m, mu, self.deadline.part(1 / (len(self.choices) - m))))
            if known == -INFINITY:
                return None
            values.append(known)
        return values

    @property
    def _gap(self) -> float:
        """How closely models are to be solved: a part of what all of them together are off by."""
        state = self.state
        off = (state.upper - state.lower) / state.upper if 0 < state.upper < INFINITY else INFINITY
        return max(min(0.1 * off, COARSE), FINE, state.gap_target)

    def _alone(self, m: int, mu: Floats, deadline: Deadline) -> float:
        node_supply = self.program.fleet
        priced = replace(node_supply, price_usd_per_h=node_supply.price_usd_per_h + mu)
        known = sorted(self.choices[m], key=lambda each: each.at(mu))[:1]
        solved = self._solved([m], priced, [model_choice.counts for model_choice in known], deadline)
        if solved.counts is not None:
            self._add(m, solved.counts, solved.upper, mu)
        self.seen[m].append((mu, solved.lower))
        return solved.lower

    def _tighten(self) -> None:
        """At the best prices, the models that were not solved to the end, with all the time there is."""
        state = self.state
        loose = [(self._best(m, self.mu) - z, m) for m, z in enumerate(self.least)]
        for off, m in sorted(loose, reverse=True):
            if off <= self._gap * abs(self.least[m]) or state.done or self.deadline.over:
                continue
            self.least[m] = max(self.least[m], self._alone(m, self.mu, self.deadline.part(TIGHTEN_SHARE)))
            state.lower = max(state.lower, min(sum(self.least) - self._rest(self.mu), state.upper))
            self._offer()

    def _solved(
        self, some: list[int], node_supply: NodeSupply, starts: list[dict[ColumnKey, int]], deadline: Deadline
    ) -> FlowState:
        """Some of the models on some fleet; counts are told in the numbers of the whole program."""
        place = {m: at for at, m in enumerate(some)}
        program = replace(self.program, models=tuple(self.program.models[m] for m in some), fleet=node_supply)
        near = [{key._replace(group=place[key.group]): n for key, n in start.items()} for start in starts]
        flow = solve_flow(program, deadline, self._gap, near)
        if flow.counts is not None:
            flow.counts = {key._replace(group=some[key.group]): n for key, n in flow.counts.items()}
        return flow

    def _uses(self, counts: dict[ColumnKey, int]) -> Floats:
        uses = np.zeros(self.program.fleet.available.shape)
        for key, n in counts.items():
            uses[key.region] += self.program.models[key.group].uses[key.template].astype(np.float64) * n
        return uses

    def _add(self, m: int, counts: dict[ColumnKey, int], value: float, mu: Floats) -> None:
        if all(choice.counts != counts for choice in self.choices[m]):
            uses = self._uses(counts)
            self.choices[m].append(ModelChoice(counts, uses, value - float((uses * mu).sum())))

    def _take(self, counts: dict[ColumnKey, int]) -> None:
        """A plan that is known already, model by model, at what its nodes cost."""
        for m in range(len(self.program.models)):
            mine = {key: n for key, n in counts.items() if key.group == m}
            rent = float((self._uses(mine) * self.program.fleet.price_usd_per_h).sum())
            program = self.program
            fees = sum(
                n * (program.fee_usd_per_h(key) + program.part_usd_per_h(key)) for key, n in mine.items()
            )
            if mine:
                self._add(m, mine, rent + fees, self.mu * 0.0)

    def _offer(self) -> None:
        """The best whole mix of choices, where it is a plan and better than what is known."""
        model_choices = cheapest_mix(self.program, self.choices, self.state.upper, self.deadline)
        if model_choices is not None:
            offer_counts(
                self.state,
                {key: n for model_choice in model_choices for key, n in model_choice.counts.items()},
            )

    def _in_turn(self) -> None:
        """A plan, if there is time: one model after the other on the nodes that are left, the dearest first."""
        node_supply, taken = self.program.fleet, dict[ColumnKey, int]()
        for _, m in sorted(((z, m) for m, z in enumerate(self.least)), reverse=True):
            left = node_supply.available - self._uses(taken).astype(np.int64)
            priced = replace(
                node_supply, available=left, price_usd_per_h=node_supply.price_usd_per_h + self.mu
            )
            solved = self._solved([m], priced, [], self.deadline.part(0.1))
            if solved.counts is None or self.deadline.over:
                return
            taken |= solved.counts
        offer_counts(self.state, taken)
        if self.state.counts is not None:
            self._take(self.state.counts)

    def _improve(self) -> None:
        """A few models at a time planned anew on the nodes that the others leave: first who lost most by sharing.

        A plan's distance from the bound is what each model pays above z_m, and the worth of nodes left idle.
        """
        state, node_supply, tried = self.state, self.program.fleet, set[tuple[int, ...]]()
        while state.counts is not None and self.least and not state.done and not self.deadline.over:
            some = self._losers(state.counts, tried)
            if some is None:
                return
            tried.add(tuple(some))
            before = {key: n for key, n in state.counts.items() if key.group in some}
            rest = {key: n for key, n in state.counts.items() if key.group not in some}
            left = replace(node_supply, available=node_supply.available - self._uses(rest).astype(np.int64))
            solved = self._solved(some, left, [before], self.deadline.part(0.25))
            if solved.counts is not None and solved.counts != before:
                upper = state.upper
                offer_counts(state, rest | solved.counts)
                if state.upper < upper:
                    tried.clear()

    def _losers(self, counts: dict[ColumnKey, int], tried: set[tuple[int, ...]]) -> list[int] | None:
        """The next few models to plan anew; None when all were tried."""
        lost = []
        prices = self.program.fleet.price_usd_per_h + self.mu
        for m, least in enumerate(self.least):
            mine = {key: n for key, n in counts.items() if key.group == m}
            lost.append((float((self._uses(mine) * prices).sum()) - least, m))
        order = [m for _, m in sorted(lost, reverse=True)]
        for some in combinations(order, min(TOGETHER, len(order) - 1)):  # all at once is what comes next
            if tuple(sorted(some)) not in tried:
                return sorted(some)
        return None


def _mix(program: FlowProgram, choices: list[list[ModelChoice]]) -> tuple[list[ModelChoice], Milp]:
    every = [(m, choice) for m, group in enumerate(choices) for choice in group]
    models, nodes = len(choices), program.fleet.available.size
    entries: list[tuple[int, int, float]] = []
    for place, (m, model_choice) in enumerate(every):
        used = np.flatnonzero(model_choice.uses.ravel())
        entries.append((m, place, 1.0))
        entries += [(models + int(c), place, float(model_choice.uses.ravel()[c])) for c in used]
    row, column, value = (np.array(item) for item in zip(*entries, strict=True))
    milp = Milp(
        cost=np.array([choice.usd_per_h for _, choice in every]),
        lower=np.zeros(len(every)),
        upper=np.full(len(every), INFINITY),
        integer=np.ones(len(every), bool),
        row_lower=np.concatenate([np.ones(models), np.full(nodes, -INFINITY)]),
        row_upper=np.concatenate([np.ones(models), program.fleet.available.ravel().astype(np.float64)]),
        row=row.astype(np.int64),
        column=column.astype(np.int64),
        value=value.astype(np.float64),
    )
    return [choice for _, choice in every], milp


def cheapest_mix(
    program: FlowProgram, choices: list[list[ModelChoice]], below: float, deadline: Deadline
) -> list[ModelChoice] | None:
    if not all(choices):
        return None
    every, milp = _mix(program, choices)
    answer = solve_milp(milp, time_limit_s=deadline.final_s)
    if answer.x is None or answer.objective >= below * (1 - NOUGHT):
        return None
    return [model_choice for model_choice, y in zip(every, answer.x, strict=True) if y > 0.5]


def master(
    program: FlowProgram, choices: list[list[ModelChoice]], mu: Floats, width: float, deadline: Deadline
) -> tuple[Floats, float] | None:
    """The prices for which the choices so far promise the highest bound, near the best known, and that bound.

    None where a model has no choice yet, or time is over.
    Near: nodes beyond those there are may be had at a price somewhat above, and given back for somewhat below.
    """
    if not all(choices):
        return None
    every, milp = _mix(program, choices)
    nodes, models, count = mu.size, len(choices), len(every)
    far = (width * np.maximum(program.fleet.price_usd_per_h, mu)).ravel()
    above, below = mu.ravel() + far, np.maximum(mu.ravel() - far, 0.0)
    place = np.arange(nodes)
    milp = replace(
        milp,
        cost=np.concatenate([milp.cost, above, -below]),
        lower=np.zeros(count + 2 * nodes),
        upper=np.full(count + 2 * nodes, INFINITY),
        integer=np.zeros(count + 2 * nodes, bool),
        row=np.concatenate([milp.row, models + place, models + place]),
        column=np.concatenate([milp.column, count + place, count + nodes + place]),
        value=np.concatenate([milp.value, np.full(nodes, -1.0), np.ones(nodes)]),
    )
    answer = solve_milp(milp, time_limit_s=deadline.final_s, relax=True)
    if answer.x is None or answer.row_dual is None or not answer.finished:
        return None
    return np.maximum(-answer.row_dual[models:], 0.0).reshape(mu.shape), answer.objective


def falls_apart(program: FlowProgram) -> bool:
    """Whether nothing but nodes, links and a budget joins its models."""
    joined = (program.limits, program.helpers, program.running, program.pins)
    bound = any(joined) or program.guarded or program.fleet.reserved is not None
    return len(program.models) > 1 and not bound


def solve_models(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    """The cheapest plan, or the proof that there is none: all at once,
    where that is soon done; else models apart first, where they can be, then together.
    """
    state = begun(program, deadline, gap_target, starts)
    apart = falls_apart(program)
    if state.ready and apart and len(program.models) <= MANY:
        state.deadline = deadline.part(min(SHARE, max(SOON, SOON_S / max(deadline.left_s, SOON_S))))
        close(state)
        state.deadline = deadline
    if state.ready and not state.done and apart:
        assert state.relaxed is not None
        part = deadline.part(SHARE if len(program.models) <= MANY else MOST)
        ModelDecomposition(program, state, part).run(state.relaxed.duals.nodes)
    if state.ready:
        close(state)
    return state
