"""Dantzig-Wolfe decomposition by model, for a bound far above the relaxation's.

Models share nodes, links and a budget. With prices mu on nodes, links counted for each model alone, and no budget,
the program decomposes into a small one for every model, and for any mu >= 0

    L(mu) = sum_m z_m(mu) - sum_rc mu_rc A_rc  <=  the cheapest plan        z_m: the least that m costs at p + mu

where z_m is of whole copies: the relaxation is weak because it rents a tenth of a copy, which cannot happen here. The
plans that models choose at some prices are columns of a master program

    min sum_mk c_mk y_mk    pick_m: sum_k y_mk = 1    nodes_rc: sum_mk use_mkrc y_mk <= A_rc

whose relaxation yields the next prices, and whose integer solution is a plan. Where nodes are plentiful mu is 0, and
the models' separate choices are the cheapest plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from potluck.plan.allocate.flow import (
    FlowState,
    Starts,
    close_gap,
    offer_counts,
    solve_flow,
    solve_relaxation,
)
from potluck.plan.allocate.highs import INFINITY, Deadline, Milp, solve_milp
from potluck.plan.allocate.program import ColumnKey, Floats, FlowProgram, NodeSupply

JOINT_FIRST_MAX_MODELS = 6  # Up to this many models, the undivided program is tried first.
DECOMPOSITION_SHARE, DECOMPOSITION_SHARE_MANY = 0.65, 0.9
"""Share of the time left for the decomposition, with up to JOINT_FIRST_MAX_MODELS models and with more."""
JOINT_FIRST_SHARE, JOINT_FIRST_MIN_S = 0.25, 1.0
"""Share of the time left, and seconds at least, for the first try on the undivided program: often enough."""
MAX_ROUNDS = 60
PRICE_BOX, BOX_SHRINK = 0.5, 0.4
"""Distance of the next prices from the best so far, relative to a node's price, and its factor after a round without
a better bound: the master program's unrestricted prices oscillate at first.
"""
MIN_MODEL_GAP, MAX_MODEL_GAP = 1e-4, 2e-3  # Relative gaps to which single models are solved.
TIGHTEN_SHARE = 0.5  # Share of the time left for solving one model again.
NEXT_ROUND_TIME_RATIO = 0.4
"""Expected time of a round relative to the one before: price changes affect only some of many models."""
RELATIVE_TOLERANCE = 1e-7
REPLANNED_MODELS = 3  # Models of a plan that are planned anew together.


@dataclass(frozen=True, slots=True, eq=False)
class ModelChoice:
    """A plan of one model: its copies, the nodes they use, and their cost without node prices mu."""

    counts: dict[ColumnKey, int]
    uses: Floats
    usd_per_h: float

    def cost_at(self, mu: Floats) -> float:
        """Cost per hour including the node prices mu."""
        return self.usd_per_h + float((self.uses * mu).sum())


class ModelDecomposition:
    """Alternates between node prices and single-model plans; improves `state`'s bound and counts."""

    def __init__(self, program: FlowProgram, state: FlowState, deadline: Deadline) -> None:
        self.state, self.deadline = state, deadline
        prices = program.fleet.price_usd_per_h * (1 + program.init_penalty)
        node_supply = replace(program.fleet, price_usd_per_h=prices)
        self.program = replace(
            program, fleet=node_supply, init_penalty=0.0, budget_usd_per_h=None, outages=(), spare=()
        )
        self.choices: list[list[ModelChoice]] = [[] for _ in self.program.models]
        self.bounds: list[list[tuple[Floats, float]]] = [[] for _ in self.program.models]
        """(mu, lower bound on z_m at mu) for each model, of all rounds."""
        self.mu = np.zeros(self.program.fleet.available.shape)
        self.model_bounds: list[float] = []
        """Lower bounds on z_m at `mu`."""

    def run(self, mu: Floats) -> None:
        """Improve prices, choices and bounds in rounds until they meet or time runs out; then the best plan."""
        state, width = self.state, PRICE_BOX
        if state.counts is not None:
            self._add_plan(state.counts)
        for _ in range(MAX_ROUNDS):
            left_before_s = self.deadline.left_s
            model_bounds = self.bounds_at(mu)
            if model_bounds is None:
                break
            bound = sum(model_bounds) - self._supply_value(mu)
            if bound > state.lower or not self.model_bounds:
                self.mu, self.model_bounds = mu, model_bounds
                state.lower = max(state.lower, min(bound, state.upper))
            else:
                width *= BOX_SHRINK
            self._offer_best_mix()
            if state.counts is None:
                self._plan_in_turn()
            if state.done or self.deadline.left_s < NEXT_ROUND_TIME_RATIO * (
                left_before_s - self.deadline.left_s
            ):
                break  # Another round would not finish in time.
            relaxed = next_prices(self.program, self.choices, self.mu, width, self.deadline)
            best_value = sum(
                self._best_choice_usd(m, self.mu) for m in range(len(self.choices))
            ) - self._supply_value(self.mu)
            if relaxed is None or relaxed[1] - best_value <= RELATIVE_TOLERANCE * abs(best_value):
                break  # No prices can give a better bound.
            mu = relaxed[0]
        self._tighten()
        self._improve()

    def _supply_value(self, mu: Floats) -> float:
        """sum_rc mu_rc A_rc: the value of all nodes at these prices."""
        return float((mu * self.program.fleet.available).sum())

    def _best_choice_usd(self, m: int, mu: Floats) -> float:
        """Least cost at these prices of the choices known for a model."""
        return min((choice.cost_at(mu) for choice in self.choices[m]), default=INFINITY)

    def bounds_at(self, mu: Floats) -> list[float] | None:
        """Lower bounds on all z_m at these prices; adds the plans found as choices. None when time runs out."""
        model_bounds = []
        for m in range(len(self.program.models)):
            # A bound from prices that were nowhere higher still holds.
            bound = max(
                (z for earlier_mu, z in self.bounds[m] if (earlier_mu <= mu + RELATIVE_TOLERANCE).all()),
                default=-INFINITY,
            )
            if bound < self._best_choice_usd(m, mu) * (1 - self._gap):
                if self.deadline.over:
                    return None
                bound = max(bound, self._solve_alone(m, mu, self.deadline.part(1 / (len(self.choices) - m))))
            if bound == -INFINITY:
                return None
            model_bounds.append(bound)
        return model_bounds

    @property
    def _gap(self) -> float:
        """Relative gap to which single models are solved: a part of the total gap."""
        state = self.state
        total_gap = (state.upper - state.lower) / state.upper if 0 < state.upper < INFINITY else INFINITY
        return max(min(0.1 * total_gap, MAX_MODEL_GAP), MIN_MODEL_GAP, state.gap_target)

    def _solve_alone(self, m: int, mu: Floats, deadline: Deadline) -> float:
        """Solve one model at these prices, add its plan as a choice; the lower bound on z_m."""
        node_supply = self.program.fleet
        priced_supply = replace(node_supply, price_usd_per_h=node_supply.price_usd_per_h + mu)
        start_choices = sorted(self.choices[m], key=lambda choice: choice.cost_at(mu))[:1]
        model_state = self._solve(
            [m], priced_supply, [model_choice.counts for model_choice in start_choices], deadline
        )
        if model_state.counts is not None:
            self._add_choice(m, model_state.counts, model_state.upper, mu)
        self.bounds[m].append((mu, model_state.lower))
        return model_state.lower

    def _tighten(self) -> None:
        """At the best prices, solve the models with the largest gaps again, with all the time left."""
        state = self.state
        gaps = [(self._best_choice_usd(m, self.mu) - bound, m) for m, bound in enumerate(self.model_bounds)]
        for gap, m in sorted(gaps, reverse=True):
            if gap <= self._gap * abs(self.model_bounds[m]) or state.done or self.deadline.over:
                continue
            self.model_bounds[m] = max(
                self.model_bounds[m], self._solve_alone(m, self.mu, self.deadline.part(TIGHTEN_SHARE))
            )
            state.lower = max(
                state.lower, min(sum(self.model_bounds) - self._supply_value(self.mu), state.upper)
            )
            self._offer_best_mix()

    def _solve(
        self,
        some_models: list[int],
        node_supply: NodeSupply,
        starts: list[dict[ColumnKey, int]],
        deadline: Deadline,
    ) -> FlowState:
        """Solve the program of some models on the given supply; counts are keyed as in the whole program."""
        index_of = {m: index for index, m in enumerate(some_models)}
        program = replace(
            self.program, models=tuple(self.program.models[m] for m in some_models), fleet=node_supply
        )
        starts_of_models = [
            {key._replace(group=index_of[key.group]): n for key, n in start.items()} for start in starts
        ]
        flow = solve_flow(program, deadline, self._gap, starts_of_models)
        if flow.counts is not None:
            flow.counts = {key._replace(group=some_models[key.group]): n for key, n in flow.counts.items()}
        return flow

    def _uses(self, counts: dict[ColumnKey, int]) -> Floats:
        uses = np.zeros(self.program.fleet.available.shape)
        for key, n in counts.items():
            uses[key.region] += self.program.models[key.group].uses[key.template].astype(np.float64) * n
        return uses

    def _add_choice(self, m: int, counts: dict[ColumnKey, int], value: float, mu: Floats) -> None:
        """Add a model's plan of this value at prices mu to its choices, unless it is known."""
        if all(choice.counts != counts for choice in self.choices[m]):
            uses = self._uses(counts)
            self.choices[m].append(ModelChoice(counts, uses, value - float((uses * mu).sum())))

    def _add_plan(self, counts: dict[ColumnKey, int]) -> None:
        """Add each model's part of a known plan to its choices."""
        for m in range(len(self.program.models)):
            counts_of_model = {key: n for key, n in counts.items() if key.group == m}
            rent = float((self._uses(counts_of_model) * self.program.fleet.price_usd_per_h).sum())
            program = self.program
            fees = sum(
                n * (program.fee_usd_per_h(key) + program.copy_complexity_usd_per_h(key))
                for key, n in counts_of_model.items()
            )
            if counts_of_model:
                self._add_choice(m, counts_of_model, rent + fees, self.mu * 0.0)

    def _offer_best_mix(self) -> None:
        """Offer the cheapest feasible mix of choices to the state, if it is better than the incumbent."""
        model_choices = cheapest_mix(self.program, self.choices, self.state.upper, self.deadline)
        if model_choices is not None:
            offer_counts(
                self.state,
                {key: n for model_choice in model_choices for key, n in model_choice.counts.items()},
            )

    def _plan_in_turn(self) -> None:
        """Offer a first plan, if time allows: models one by one on the nodes left, the costliest first."""
        node_supply, taken = self.program.fleet, dict[ColumnKey, int]()
        for _, m in sorted(((bound, m) for m, bound in enumerate(self.model_bounds)), reverse=True):
            available = node_supply.available - self._uses(taken).astype(np.int64)
            supply_left = replace(
                node_supply, available=available, price_usd_per_h=node_supply.price_usd_per_h + self.mu
            )
            model_state = self._solve([m], supply_left, [], self.deadline.part(0.1))
            if model_state.counts is None or self.deadline.over:
                return
            taken |= model_state.counts
        offer_counts(self.state, taken)
        if self.state.counts is not None:
            self._add_plan(self.state.counts)

    def _improve(self) -> None:
        """Plan a few models at a time anew on the nodes that the others leave, largest excess over the bound first.

        A plan's distance from the bound is each model's cost above z_m plus the value of idle nodes.
        """
        state, node_supply, tried = self.state, self.program.fleet, set[tuple[int, ...]]()
        while state.counts is not None and self.model_bounds and not state.done and not self.deadline.over:
            some_models = self._next_to_replan(state.counts, tried)
            if some_models is None:
                return
            tried.add(tuple(some_models))
            counts_before = {key: n for key, n in state.counts.items() if key.group in some_models}
            other_counts = {key: n for key, n in state.counts.items() if key.group not in some_models}
            supply_left = replace(
                node_supply, available=node_supply.available - self._uses(other_counts).astype(np.int64)
            )
            new_state = self._solve(some_models, supply_left, [counts_before], self.deadline.part(0.25))
            if new_state.counts is not None and new_state.counts != counts_before:
                upper = state.upper
                offer_counts(state, other_counts | new_state.counts)
                if state.upper < upper:
                    tried.clear()

    def _next_to_replan(self, counts: dict[ColumnKey, int], tried: set[tuple[int, ...]]) -> list[int] | None:
        """The next few models to plan anew, those furthest above their bounds first; None when all were tried."""
        excesses = []
        prices = self.program.fleet.price_usd_per_h + self.mu
        for m, bound in enumerate(self.model_bounds):
            counts_of_model = {key: n for key, n in counts.items() if key.group == m}
            excesses.append((float((self._uses(counts_of_model) * prices).sum()) - bound, m))
        order = [m for _, m in sorted(excesses, reverse=True)]
        for some_models in combinations(
            order, min(REPLANNED_MODELS, len(order) - 1)
        ):  # All models together are solved afterwards.
            if tuple(sorted(some_models)) not in tried:
                return sorted(some_models)
        return None


def _master_program(program: FlowProgram, choices: list[list[ModelChoice]]) -> tuple[list[ModelChoice], Milp]:
    """The master program: its columns, and the integer program that picks one choice for each model."""
    all_choices = [(m, choice) for m, group in enumerate(choices) for choice in group]
    models, nodes = len(choices), program.fleet.available.size
    entries: list[tuple[int, int, float]] = []
    for column_index, (m, model_choice) in enumerate(all_choices):
        used_nodes = np.flatnonzero(model_choice.uses.ravel())
        entries.append((m, column_index, 1.0))
        entries += [(models + int(c), column_index, float(model_choice.uses.ravel()[c])) for c in used_nodes]
    row, column, value = (np.array(item) for item in zip(*entries, strict=True))
    milp = Milp(
        cost=np.array([choice.usd_per_h for _, choice in all_choices]),
        lower=np.zeros(len(all_choices)),
        upper=np.full(len(all_choices), INFINITY),
        integer=np.ones(len(all_choices), bool),
        row_lower=np.concatenate([np.ones(models), np.full(nodes, -INFINITY)]),
        row_upper=np.concatenate([np.ones(models), program.fleet.available.ravel().astype(np.float64)]),
        row=row.astype(np.int64),
        column=column.astype(np.int64),
        value=value.astype(np.float64),
    )
    return [choice for _, choice in all_choices], milp


def cheapest_mix(
    program: FlowProgram, choices: list[list[ModelChoice]], below: float, deadline: Deadline
) -> list[ModelChoice] | None:
    """One choice for each model that together fit the fleet at the least cost; None unless cheaper than `below`."""
    if not all(choices):
        return None
    all_choices, milp = _master_program(program, choices)
    milp_result = solve_milp(milp, time_limit_s=deadline.final_s)
    if milp_result.x is None or milp_result.objective >= below * (1 - RELATIVE_TOLERANCE):
        return None
    return [model_choice for model_choice, y in zip(all_choices, milp_result.x, strict=True) if y > 0.5]


def next_prices(
    program: FlowProgram, choices: list[list[ModelChoice]], mu: Floats, width: float, deadline: Deadline
) -> tuple[Floats, float] | None:
    """(node prices with the highest bound over the choices so far, that bound), near the best known prices.

    To stay near, the relaxation may buy nodes at `width` above the known prices and sell them at `width` below. None
    where a model has no choice yet, or time is over.
    """
    if not all(choices):
        return None
    all_choices, milp = _master_program(program, choices)
    nodes, models, count = mu.size, len(choices), len(all_choices)
    distance = (width * np.maximum(program.fleet.price_usd_per_h, mu)).ravel()
    above, below = mu.ravel() + distance, np.maximum(mu.ravel() - distance, 0.0)
    node_index = np.arange(nodes)
    milp = replace(
        milp,
        cost=np.concatenate([milp.cost, above, -below]),
        lower=np.zeros(count + 2 * nodes),
        upper=np.full(count + 2 * nodes, INFINITY),
        integer=np.zeros(count + 2 * nodes, bool),
        row=np.concatenate([milp.row, models + node_index, models + node_index]),
        column=np.concatenate([milp.column, count + node_index, count + nodes + node_index]),
        value=np.concatenate([milp.value, np.full(nodes, -1.0), np.ones(nodes)]),
    )
    milp_result = solve_milp(milp, time_limit_s=deadline.final_s, relax=True)
    if milp_result.x is None or milp_result.row_dual is None or not milp_result.finished:
        return None
    return np.maximum(-milp_result.row_dual[models:], 0.0).reshape(mu.shape), milp_result.objective


def is_separable(program: FlowProgram) -> bool:
    """Whether models share only nodes, links and a budget, so that the program can be decomposed."""
    joint_parts = (program.limits, program.helpers, program.running, program.pins)
    is_joined = any(joint_parts) or program.guarded or program.fleet.reserved is not None
    return len(program.models) > 1 and not is_joined


def solve_models(program: FlowProgram, deadline: Deadline, gap_target: float, starts: Starts) -> FlowState:
    """The cheapest solution, or the proof that there is none.

    Few models are tried together first, for a short time; then separable models by decomposition; then together.
    """
    state = solve_relaxation(program, deadline, gap_target, starts)
    separable = is_separable(program)
    if state.ready and separable and len(program.models) <= JOINT_FIRST_MAX_MODELS:
        state.deadline = deadline.part(
            min(
                DECOMPOSITION_SHARE,
                max(JOINT_FIRST_SHARE, JOINT_FIRST_MIN_S / max(deadline.left_s, JOINT_FIRST_MIN_S)),
            )
        )
        close_gap(state)
        state.deadline = deadline
    if state.ready and not state.done and separable:
        assert state.relaxed is not None
        part_deadline = deadline.part(
            DECOMPOSITION_SHARE if len(program.models) <= JOINT_FIRST_MAX_MODELS else DECOMPOSITION_SHARE_MANY
        )
        ModelDecomposition(program, state, part_deadline).run(state.relaxed.duals.nodes)
    if state.ready:
        close_gap(state)
    return state
