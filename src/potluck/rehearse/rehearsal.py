"""Search for the cheapest plan that meets all SLOs in simulation, within limits on plans, solves and requests.

Models share no replica, so a plan is a part for each model, and a simulated part need not be simulated again beside
other parts (unless its KV crosses links that others use). Each model has a pool of parts:

    the plan for mean traffic, and those of other strategies      restricted sets of columns
    the planner's plan for scaled-up demand                       headroom
    the planner's plan without the columns that missed            near-optimal alternatives
    a copy more of a column that missed, one fewer if it held     single steps

The search first looks for one plan that holds, guided by queueing estimates: the cheapest parts expected to hold,
with more and more spare capacity while some miss. Then it tries everything cheaper, cheapest first. The result is the
cheapest plan that holds, or the cheapest found so far when a limit is reached.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, sqrt

from potluck.core.errors import CapacityError
from potluck.core.values.plan import Deployment, Plan
from potluck.plan.assemble.columns import egress_usd_per_h
from potluck.plan.assemble.even_shares import balance_load
from potluck.plan.assemble.term_rows import SIZE_PENALTY, charges_of, component_counts, rent_usd_per_h
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import Planner, PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.verify import verify
from potluck.rehearse.evidence import Evidence
from potluck.rehearse.queueing_margins import (
    ALLOWED_LATE_SHARE,
    assembled,
    cost_by_model,
    late,
    restored,
    scaled,
)
from potluck.rehearse.request_sources import FRESH
from potluck.rehearse.search_end import (
    HOLDS,
    HOLDS_IN_FRESH_RUNS,
    REQUESTS_LEFT_OUT,
    SearchEnd,
    no_larger_plan,
)

MIN_SAVING_SHARE = 0.002  # Of a plan's cost; smaller savings are not worth a simulation.
EQUAL_MARGIN = 0.25  # Difference of SLO margins below which the cheaper plan is preferred.
GROWTH, SMALL_GROWTH, NEAR_MISS_MARGIN = 1.25, 1.05, 0.5
"""Growth of spare capacity after a miss of the same columns and after a near miss, and the margin of a near miss."""
FULL_GROWTH_MAX_COPIES = 4
"""Copies up to which the full growth applies; beyond, it falls with the square root of the number of copies."""
COPY_STEP_SHARE = 0.1  # Of a column's copies, added or removed in one step; at least one copy.
MAX_LATE_RATIO = 2.0
"""Expected late share relative to the allowed one, above which a part counts as unlikely to hold."""
MAX_UNLIKELY_PLANS = 6  # Plans tried although queueing estimates expect them to miss, cheapest first.
MAX_COMBINATIONS = 200  # Combinations of parts examined for one that fits the fleet.


Judge = Callable[[Plan, Collection[str], int], tuple[Evidence, ...]]
"""(plan, models, first run) to the evidence of these models, simulated together."""


@dataclass(frozen=True, slots=True)
class RehearsalRules:
    """Limits of the search."""

    most_plans: int = 24  # Simulated plans.
    most_solves: int = 6  # Planner runs, beside the plans given at first.
    most_requests: int = 150_000  # Simulated requests in all, after which no further plan is simulated.
    fresh: bool = False  # Whether the chosen plan must hold in fresh runs, which the search has not used.
    cv: float = 1.0  # Coefficient of variation of the gaps between requests, for queueing estimates.
    enough: Callable[[], bool] = lambda: False  # Checked before each further plan; true ends the search.


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """One model's part of a plan, as a plan of that model alone."""

    model: str
    plan: Plan
    made: str  # Description of its origin.
    usd_per_h: float
    spare: float  # Capacity for mean traffic relative to the demand.
    late: float  # Expected share of late requests, relative to the allowed share.
    key: object

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(template.name for template in self.plan.templates)


@dataclass(frozen=True, slots=True)
class RehearsedPlan:
    """A simulated plan with its evidence."""

    number: int
    parts: Mapping[str, ModelPart]
    evidence: tuple[Evidence, ...]
    plan: Plan
    fresh: bool = False

    @property
    def cost_usd_per_h(self) -> float:
        return self.plan.total_usd_per_h

    @property
    def holds(self) -> bool:
        return all(item.holds for item in self.evidence)

    @property
    def suffices(self) -> bool:
        return all(item.suffices for item in self.evidence)

    @property
    def made(self) -> dict[str, str]:
        return {name: part.made for name, part in self.parts.items()}

    @property
    def margin(self) -> float:
        """The smallest margin of any model."""
        return min((item.margin for item in self.evidence), default=0.0)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of the search. `chosen` is the cheapest plan that held for the requests it serves; None: none did."""

    steps: tuple[RehearsedPlan, ...]
    chosen: RehearsedPlan | None
    end: SearchEnd
    averages: PlanOutcome  # The cheapest plan for mean traffic.

    @property
    def holds(self) -> bool:
        return self.chosen is not None and self.chosen.holds

    @property
    def best(self) -> RehearsedPlan:
        """The chosen plan; without one, the cheapest of those closest to their SLOs."""
        if self.chosen is not None:
            return self.chosen
        best_margin = max(rehearsed.margin for rehearsed in self.steps)
        near_best = [rehearsed for rehearsed in self.steps if rehearsed.margin >= best_margin - EQUAL_MARGIN]
        return min(near_best, key=lambda rehearsed: (rehearsed.cost_usd_per_h, -rehearsed.margin))

    @property
    def outcome(self) -> PlanOutcome:
        """The best plan, with its gap against the lower bound for mean traffic."""
        base_outcome, plan = self.averages, self.best.plan
        cost, lower_bound = (
            plan.total_usd_per_h,
            base_outcome.plan.total_usd_per_h * (1 - base_outcome.plan.gap),
        )
        gap = max(0.0, cost - lower_bound) / cost if cost > 0 else 0.0
        return replace(base_outcome, plan=replace(plan, strategy=base_outcome.plan.strategy, gap=gap))


@dataclass(slots=True)
class _PlanSearch:
    """State of the search: pools of parts, evidence so far, and what the next parts need."""

    factory: TemplateFactory
    planner: Planner
    settings: SolveSettings
    judge: Judge
    rules: RehearsalRules
    pools: dict[str, list[ModelPart]] = field(default_factory=dict)
    keys: set[object] = field(default_factory=set)  # Of all parts in the pools.
    evidence: dict[object, Evidence] = field(default_factory=dict)
    """Evidence by part key, plus the parts beside it where they share links; may hold results of earlier searches."""
    missed: set[object] = field(default_factory=set)  # Keys of parts that missed in this search.
    needed: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    """Spare capacity needed by a model's part of the same templates, after one that missed."""
    needed_spare: dict[str, float] = field(default_factory=dict)
    """Spare capacity needed by any part of a model, after one that missed."""
    planned_factors: dict[str, float] = field(default_factory=dict)
    """Largest factor on each model's demand that was planned for."""
    no_larger: SearchEnd | None = (
        None  # The binding limits, once the planner found no plan for these factors.
    )
    combinations_unfit: bool = False  # Whether the parts left to try do not fit the fleet together.
    steps: list[RehearsedPlan] = field(default_factory=list)
    solves: int = 0
    requests: int = 0
    joint_parts: list[dict[str, ModelPart]] = field(default_factory=list)
    """Parts of one plan, which fit the fleet together."""

    @property
    def problem(self) -> PlanningProblem:
        return self.factory.problem

    def run(self, outcome: PlanOutcome) -> tuple[RehearsedPlan | None, SearchEnd]:
        self.pools = {demand.name: [] for demand in self.problem.demands if demand.rate_per_s > 0}
        self.offer(outcome.plan, outcome.plan.strategy)
        for plan in outcome.alternatives:
            self.offer(plan, plan.strategy)
        best_plan = self._find_first()
        while best_plan is not None:
            best_plan = self._cheapest_below(best_plan)
            if not self.rules.fresh and all(item.long for item in best_plan.evidence):
                return best_plan, HOLDS
            verdict = self._simulate(best_plan.parts, best_plan.plan, fresh=True)
            if verdict.suffices:
                return verdict, HOLDS_IN_FRESH_RUNS
            self._raise_needed_spare(verdict)
            self._offer_variants(verdict, more=True)
            held = [
                rehearsed for rehearsed in self.steps if rehearsed.suffices and not self._missed(rehearsed)
            ]
            best_plan = (
                min(held, key=lambda rehearsed: rank_usd_per_h(self.problem, rehearsed.plan), default=None)
                or self._find_first()
            )
        return None, self._end_without_plan()

    def _end_without_plan(self) -> SearchEnd:
        """Reason why the search ended without a plan that holds: its limits first, then the binding resources."""
        rules, plan_count = self.rules, len(self.steps)
        if rules.enough():
            return SearchEnd(
                "time", f"the search reached its time limit after {plan_count} {_plans(plan_count)}"
            )
        if plan_count >= rules.most_plans:
            return SearchEnd("plans", f"the search reached its limit of {rules.most_plans} plans")
        if self.requests >= rules.most_requests:
            limit = f"its limit of {rules.most_requests:,} simulated requests"
            return SearchEnd(
                "requests", f"the search reached {limit} after {plan_count} {_plans(plan_count)}"
            )
        if self.combinations_unfit:
            reason = "the plans of single models that are left to try do not fit into the fleet together"
            return SearchEnd("combinations", reason)
        if self.no_larger is not None:
            return self.no_larger
        largest_factor = max(self.planned_factors.values(), default=1.0)
        limit = f"{self.solves} planner runs, the limit of the search"
        solves = f"{limit}, for up to {largest_factor:.3g} times the demand"
        return SearchEnd(
            "solves", f"{plan_count} {_plans(plan_count)} missed, and {solves} gave no other plan"
        )

    @property
    def _is_exhausted(self) -> bool:
        """Whether a limit of the search is reached."""
        rules = self.rules
        over = len(self.steps) >= rules.most_plans or self.requests >= rules.most_requests
        return bool(self.steps) and (over or self.rules.enough())

    def _find_first(self) -> RehearsedPlan | None:
        """Find any plan that holds, starting with the cheapest parts that queueing estimates favour."""
        while not self._is_exhausted:
            likely = {name: self._likely_parts(name, roomy=True) for name in self.pools}
            if self._solve_for_more([name for name, parts in likely.items() if not parts]):
                continue
            # Where no part is expected to hold, the one with the most spare capacity is tried.
            rehearsed = self._simulate_next(
                {name: parts or self._untested_parts(name, -1)[:1] for name, parts in likely.items()}
            )
            if rehearsed is None:
                if self._solve_for_another():
                    continue
                return None
            if rehearsed.suffices:
                return rehearsed
            self._raise_needed_spare(rehearsed)
            self._offer_variants(rehearsed, more=True)
        return None

    def _solve_for_another(self) -> bool:
        """Plan the models without untested parts for more than the missed parts, then without the missed columns.

        Returns whether that gave a new part. Does nothing for models whose untested parts do not fit together.
        """
        names = [name for name in self.pools if not self._untested_parts(name)]
        if (
            not names and not self.combinations_unfit
        ):  # The misses occurred beside other parts, over shared links.
            names = list(self.pools)
        for name in names:
            self.planned_factors[name] = max(
                self.planned_factors.get(name, 1.0), self.needed_spare.get(name, 1.0)
            )
        while (
            names and not self.no_larger and self.solves < self.rules.most_solves and not self._is_exhausted
        ):
            if self._solve_for_more(names):
                return True
        missed = [part for name in names for part in self.pools[name] if part.key in self.missed]
        columns = frozenset(column for part in missed for column in part.columns)
        return bool(columns) and self._plan_models(names, {}, columns)

    def _likely_parts(self, name: str, most_late: float = 1.0, roomy: bool = False) -> list[ModelPart]:
        """Parts that held or are expected to; `roomy`: with more spare capacity than all parts that missed."""
        needed_spare = self.needed_spare.get(name, 0.0) if roomy else 0.0
        return [
            part
            for part in self._untested_parts(name)
            if self._held(part)
            or (
                part.late <= most_late
                and part.spare >= max(needed_spare, self.needed.get((name, part.columns), 0.0))
            )
        ]

    def _untested_parts(self, name: str, roomiest: int = 0) -> list[ModelPart]:
        """Parts that have not missed, cheapest first, or with `roomiest` = -1 largest spare capacity first."""
        parts = [part for part in self.pools[name] if part.key not in self.missed]
        return sorted(parts, key=lambda part: roomiest * part.spare or part.usd_per_h)

    def _held(self, part: ModelPart) -> bool:
        item = self.evidence.get(part.key)
        return item is not None and item.suffices

    def _raise_needed_spare(self, rehearsed: RehearsedPlan) -> None:
        """Raise the spare capacity needed by the models that missed."""
        for item in rehearsed.evidence:
            if not item.suffices:
                part = rehearsed.parts[item.model]
                growth = (
                    SMALL_GROWTH if item.margin > -NEAR_MISS_MARGIN else max(SMALL_GROWTH, _growth(part.plan))
                )
                self.needed[part.model, part.columns] = part.spare * growth
                needed_spare = part.spare * (1.0 + COPY_STEP_SHARE / 4)
                self.needed_spare[part.model] = max(self.needed_spare.get(part.model, 0.0), needed_spare)

    def _cheapest_below(self, best_plan: RehearsedPlan) -> RehearsedPlan:
        """The cheapest plan that holds, after trying cheaper ones: likely parts first, then a few unlikely ones.

        Among likely parts, those with more spare capacity than all that missed come first, in case the search must
        end early.
        """
        self._offer_variants(best_plan, more=False)
        missed = [rehearsed for rehearsed in self.steps if not rehearsed.suffices]
        # For a large plan, another solve finds about the same as a share more of the same columns.
        if missed and not any(large(part.plan) for part in best_plan.parts.values()):
            self._solve_above(max(missed, key=lambda rehearsed: rehearsed.margin))
        unlikely = 0
        while not self._is_exhausted:
            rehearsed = self._simulate_next(
                {name: self._likely_parts(name, MAX_LATE_RATIO, roomy=True) for name in self.pools},
                best_plan.plan,
            )
            if rehearsed is None:
                rehearsed = self._simulate_next(
                    {name: self._likely_parts(name, MAX_LATE_RATIO) for name in self.pools}, best_plan.plan
                )
            if rehearsed is None and unlikely < MAX_UNLIKELY_PLANS:
                unlikely += 1
                rehearsed = self._simulate_next(
                    {name: self._untested_parts(name) for name in self.pools}, best_plan.plan
                )
            if rehearsed is None:
                break
            if rehearsed.suffices:
                best_plan = rehearsed
                self._offer_variants(rehearsed, more=False)
                continue
            self._raise_needed_spare(rehearsed)
            self._offer_variants(rehearsed, more=True)
            if not any(large(part.plan) for part in rehearsed.parts.values()):
                self._solve_above(rehearsed)
                self._solve_without(rehearsed)
        return best_plan

    def _simulate_next(
        self, pools: Mapping[str, Sequence[ModelPart]], below: Plan | None = None
    ) -> RehearsedPlan | None:
        """Simulate the cheapest combination of parts that fits the fleet and costs less than `below`."""
        max_usd_per_h = (
            None if below is None else rank_usd_per_h(self.problem, below) * (1 - MIN_SAVING_SHARE)
        )
        self.combinations_unfit = False
        for parts in self._combinations(pools):
            plan = self._join(parts)
            if max_usd_per_h is not None and rank_usd_per_h(self.problem, plan) >= max_usd_per_h:
                return None
            if self.missed.isdisjoint(self._keys(parts, plan).values()):
                if not verify(self.problem, plan):
                    return self._simulate(parts, plan)
                self.combinations_unfit = True
        return None

    def _combinations(self, pools: Mapping[str, Sequence[ModelPart]]) -> Iterator[dict[str, ModelPart]]:
        """One part of each pool, by increasing total cost; then the parts that were planned together."""
        names = sorted(pools)
        if not names or not all(pools[name] for name in names):
            return
        start = (0,) * len(names)
        heap, visited = [(sum(pools[name][0].usd_per_h for name in names), start)], {start}
        for _ in range(MAX_COMBINATIONS):
            if not heap:
                return
            usd_per_h, indices = heappop(heap)
            yield {name: pools[name][index] for name, index in zip(names, indices, strict=True)}
            for position, name in enumerate(names):
                next_indices = (*indices[:position], indices[position] + 1, *indices[position + 1 :])
                if next_indices[position] < len(pools[name]) and next_indices not in visited:
                    visited.add(next_indices)
                    extra_usd_per_h = (
                        pools[name][next_indices[position]].usd_per_h
                        - pools[name][indices[position]].usd_per_h
                    )
                    heappush(heap, (usd_per_h + extra_usd_per_h, next_indices))
        pool_keys = {name: {part.key for part in parts} for name, parts in pools.items()}
        for parts in self.joint_parts:
            if all(part.key in pool_keys[name] for name, part in parts.items()):
                yield parts

    def _join(self, parts: Mapping[str, ModelPart]) -> Plan:
        """The plan of these parts, with its cost."""
        plan = assembled({name: part.plan for name, part in parts.items()}, self.problem)
        return costed(plan, self.problem, self.settings.running)

    def _keys(self, parts: Mapping[str, ModelPart], plan: Plan) -> dict[str, object]:
        """Evidence key of each part; parts that share links include the keys of one another."""
        joined = crossing(plan)
        beside = frozenset(parts[name].key for name in joined if name in parts)
        return {
            name: (part.key, beside) if name in joined and len(beside) > 1 else part.key
            for name, part in parts.items()
        }

    def _missed(self, rehearsed: RehearsedPlan) -> bool:
        return not self.missed.isdisjoint(self._keys(rehearsed.parts, rehearsed.plan).values())

    def _simulate(self, parts: Mapping[str, ModelPart], plan: Plan, fresh: bool = False) -> RehearsedPlan:
        """Simulate the parts without evidence, those that share links together, and record the result."""
        keys, number, sharing_links = self._keys(parts, plan), len(self.steps) + 1, crossing(plan)
        pending = [name for name in sorted(keys) if fresh or keys[name] not in self.evidence]
        groups = [[name] for name in pending if name not in sharing_links]
        groups += (
            [group] if (group := sorted(sharing_links & set(keys))) and set(group) & set(pending) else []
        )
        new_evidence: dict[str, Evidence] = {}
        first_run = FRESH * (1 + sum(rehearsed.fresh for rehearsed in self.steps)) if fresh else 0
        self.factory.report_progress(f"rehearsing plan {number}")
        for group in groups:
            for item in self.judge(plan, group, first_run):
                new_evidence[item.model] = item
                self.requests += item.requests
                # A miss is final: with enough fresh runs, any plan would pass once by chance.
                if not fresh or not item.suffices:
                    self.evidence[keys[item.model]] = item
        evidence = tuple(new_evidence.get(name) or self.evidence[keys[name]] for name in sorted(keys))
        self.missed |= {keys[item.model] for item in evidence if not item.suffices}
        rehearsed = RehearsedPlan(number, parts, evidence, plan, fresh)
        self.steps.append(rehearsed)
        return rehearsed

    def offer(
        self,
        plan: Plan,
        made: str,
        factors: Mapping[str, float] | None = None,
        problem: PlanningProblem | None = None,
    ) -> bool:
        """Add a plan's parts to the pools; whether any is new. `problem`: of the plan, if it has only some models."""
        problem = problem or self.problem
        restored_plan = restored(plan, problem, factors) if factors else plan
        if not plan.deployments or (restored_plan.fraction < 1 and self.keys):
            return False
        balanced = balance_load(problem, restored_plan, self.settings.time_limit_s, self.settings.clock)
        parts = {}
        for name in [demand.name for demand in problem.demands if demand.name in self.pools]:
            factor = (factors or {}).get(name, 1.0)
            parts[name] = self._make_part(
                balanced, name, made if abs(factor - 1) < 1e-3 else f"{made} for x {factor:.3g}"
            )
        known_count = len(self.keys)
        for name, part in parts.items():
            if part.key not in self.keys:
                self.keys.add(part.key)
                self.pools[name].append(part)
        self.joint_parts += [parts] if len(parts) == len(self.pools) else []
        return len(self.keys) > known_count

    def _make_part(self, plan: Plan, name: str, made: str) -> ModelPart:
        """One model's part of a plan, with its queueing estimate."""
        part_plan = costed(assembled({name: plan}, self.problem), self.problem, self.settings.running)
        demand = next(demand for demand in self.problem.demands if demand.name == name)
        allowed_share = ALLOWED_LATE_SHARE * (1.0 - demand.slo.attainment)
        late_share = late(replace(self.problem, demands=(demand,)), part_plan, self.rules.cv)[name]
        return ModelPart(
            name,
            part_plan,
            made,
            rank_usd_per_h(self.problem, part_plan),
            spare_of(part_plan, self.problem, name),
            late_share / allowed_share,
            part_key(part_plan),
        )

    def _offer_variants(self, rehearsed: RehearsedPlan, more: bool) -> None:
        """Offer variants of each part with more copies of one column if it missed, or fewer if it held."""
        verdicts = {item.model: item.suffices for item in rehearsed.evidence}
        for name, part in rehearsed.parts.items():
            if verdicts.get(name, True) == more:
                continue
            if large(part.plan):
                self._offer_more(part) if more else self._offer_halfway(part)
            for index, deployment in enumerate(part.plan.deployments):
                change = max(1, ceil(COPY_STEP_SHARE * deployment.count)) * (1 if more else -1)
                others = part.plan.deployments[:index], part.plan.deployments[index + 1 :]
                count = deployment.count + change
                changed = (replace(deployment, count=count),) if count > 0 else ()
                self._offer_copies(part, (*others[0], *changed, *others[1]), varied(part.made, change))

    def _offer_more(self, part: ModelPart) -> None:
        """Offer the part with a share more of each of its columns."""
        self._offer_counts(part, lambda d: ceil(d.count * (1 + COPY_STEP_SHARE / 2)))

    def _offer_halfway(self, part: ModelPart) -> None:
        """Offer counts between a part that held and the largest part of the same columns that missed."""
        missed_parts = [
            p for p in self.pools[part.model] if p.key in self.missed and p.columns == part.columns
        ]
        if missed_parts:
            largest_missed = max(missed_parts, key=lambda p: p.spare)
            self.needed[part.model, part.columns] = largest_missed.spare
            counts = {(d.template, d.region): d.count for d in largest_missed.plan.deployments}
            self._offer_counts(part, lambda d: (d.count + counts.get((d.template, d.region), 0) + 1) // 2)

    def _offer_counts(self, part: ModelPart, count: Callable[[Deployment], int]) -> None:
        after = tuple(replace(d, count=count(d)) for d in part.plan.deployments)
        change = sum(d.count for d in after) - sum(d.count for d in part.plan.deployments)
        self._offer_copies(part, after, varied(part.made, change))

    def _offer_copies(self, part: ModelPart, deployments: tuple[Deployment, ...], made: str) -> None:
        """Add a part with other counts to its pool, if pins, nodes and mean traffic allow."""
        counts = {(deployment.template, deployment.region): deployment.count for deployment in deployments}
        pins = [pin for pin in self.settings.pins if pin.template.startswith(f"{part.model}: ")]
        if any(counts.get((pin.template, pin.region), 0) < pin.count for pin in pins):
            return
        names = {deployment.template for deployment in deployments}
        templates = tuple(template for template in part.plan.templates if template.name in names)
        part_plan = replace(part.plan, templates=templates, deployments=deployments)
        demand = next(demand for demand in self.problem.demands if demand.name == part.model)
        model_problem, part_plan = (
            replace(self.problem, demands=(demand,)),
            costed(part_plan, self.problem, None),
        )
        balanced = balance_load(model_problem, part_plan, self.settings.time_limit_s, self.settings.clock)
        if not deployments or balanced is part_plan:
            return  # Too few for mean traffic, or not enough nodes.
        new_part = self._make_part(balanced, part.model, made)
        if new_part.key not in self.keys:
            self.keys.add(new_part.key)
            self.pools[part.model].append(new_part)

    def _solve_for_more(self, names: Sequence[str]) -> bool:
        """Plan for a larger factor on these models' demand than the parts that are not expected to hold serve."""
        if not names or self.no_larger:
            return False
        for name in names:
            spare_of_parts = [
                part.spare
                for part in self.pools[name]
                if part.spare < self.planned_factors.get(name, 1.0) * GROWTH
            ]
            self.planned_factors[name] = max([self.planned_factors.get(name, 1.0), *spare_of_parts]) * (
                1.0 + COPY_STEP_SHARE
            )
        return self._plan_models(names, self.planned_factors)

    def _solve_above(self, rehearsed: RehearsedPlan) -> None:
        """Plan for slightly more than the capacity of the parts that missed, which yields the next larger plan."""
        missed = [item.model for item in rehearsed.evidence if not item.suffices]
        self._plan_models(
            missed, {name: rehearsed.parts[name].spare * (1.0 + COPY_STEP_SHARE / 2) for name in missed}
        )

    def _solve_without(self, rehearsed: RehearsedPlan) -> None:
        """Plan without the columns of the parts that missed."""
        missed = {item.model for item in rehearsed.evidence if not item.suffices}
        names = {t.name for name in missed for t in rehearsed.parts[name].plan.templates}
        self._plan_models(missed, {}, frozenset(names))

    def _plan_models(
        self, names: Collection[str], factors: Mapping[str, float], without: frozenset[str] = frozenset()
    ) -> bool:
        """Plan some models anew on the nodes that the others leave, or all models where these do not suffice."""
        own_problem = self._problem_of(names)
        for problem in (own_problem, self.problem) if len(names) < len(self.pools) else (self.problem,):
            if self.solves >= self.rules.most_solves or self.rules.enough():
                return False
            self.solves += 1
            self.factory.report_progress(
                "planning for more demand" if factors else "planning without the columns that missed"
            )
            scaling_factors = {demand.name: factors.get(demand.name, 1.0) for demand in problem.demands}
            factory = replace(self.factory, problem=scaled(problem, scaling_factors))
            without -= {deployment.template for deployment in self.settings.pins}
            if without:  # Templates made without the excluded ones must not enter the shared cache.
                factory = replace(
                    factory, excluded=without, templates_by_kind=dict(factory.templates_by_kind)
                )
            outcome = self.planner(factory, self._settings_for(problem))
            if outcome.plan.fraction >= 1:
                break
        if factors and outcome.plan.fraction < 1:
            self.no_larger = no_larger_plan(self.problem, outcome.allocation, scaling_factors, names)
        suffix = "" if factors else ", other columns"
        plans = (outcome.plan, *outcome.alternatives)
        return (
            sum(self.offer(plan, f"{plan.strategy}{suffix}", scaling_factors, problem) for plan in plans) > 0
        )

    def _problem_of(self, names: Collection[str]) -> PlanningProblem:
        """The problem of some models on the nodes left beside the likeliest part of each other model."""
        demands = tuple(demand for demand in self.problem.demands if demand.name in names)
        used: Counter[tuple[str, str]] = Counter()
        for name in self.pools.keys() - set(names):
            likely_parts = self._likely_parts(name) or self._untested_parts(name, -1)
            used.update(likely_parts[0].plan.nodes if likely_parts else {})
        remaining = self.problem.with_nodes(lambda region, o: max(0, o.available - used[region, o.node]))
        return replace(remaining, demands=demands)

    def _settings_for(self, problem: PlanningProblem) -> SolveSettings:
        """The settings restricted to the problem's models."""
        names = tuple(demand.name for demand in problem.demands)
        if len(names) == len(self.problem.demands):
            return self.settings
        running_plan = self.settings.running
        pins = [pin for pin in self.settings.pins if pin.template.split(": ")[0] in names]
        return replace(
            self.settings,
            running=running_plan and running_plan.of_models(names),
            pins=tuple(pins),
            start_plans=(),
        )


def rehearse(
    factory: TemplateFactory,
    planner: Planner,
    settings: SolveSettings,
    judge: Judge,
    rules: RehearsalRules | None = None,
    outcome: PlanOutcome | None = None,
    seen: dict[object, Evidence] | None = None,
) -> Rehearsal:
    """Search for the cheapest plan that meets all SLOs in simulation.

    `outcome` is the planner's result, if it is known already; `seen` is earlier evidence of the same judge by part.
    """
    outcome = outcome or planner(factory, settings)
    if not outcome.plan.deployments:
        raise CapacityError("no plan was found to simulate; allow more time, or plan without simulation")
    search = _PlanSearch(factory, planner, settings, judge, rules or RehearsalRules())
    search.evidence = {} if seen is None else seen
    chosen_plan, end = search.run(outcome)
    if chosen_plan is not None and not chosen_plan.holds:
        end = REQUESTS_LEFT_OUT
    return Rehearsal(tuple(search.steps), chosen_plan, end, outcome)


def _plans(count: int) -> str:
    return "plan" if count == 1 else "plans"


def _growth(plan: Plan) -> float:
    """Growth of spare capacity after a miss; smaller for plans of many copies."""
    copies = sum(deployment.count for deployment in plan.deployments)
    return 1.0 + (GROWTH - 1.0) * min(1.0, sqrt(FULL_GROWTH_MAX_COPIES / max(1, copies)))


def large(plan: Plan) -> bool:
    """Whether the plan has so many copies that a share more of each column is at least one copy."""
    copies = sum(deployment.count for deployment in plan.deployments)
    return copies * COPY_STEP_SHARE / 2 >= len(plan.deployments)


def varied(made: str, change: int) -> str:
    """The description of a part with this many copies more or fewer."""
    match = re.fullmatch(r"(.*), (\d+) (more|fewer)", made)
    if match is not None and (match[3] == "more") == (change > 0):
        made, change = match[1], change + int(match[2]) * (1 if change > 0 else -1)
    return f"{made}, {abs(change)} {'more' if change > 0 else 'fewer'}"


def rank_usd_per_h(problem: PlanningProblem, plan: Plan) -> float:
    """Cost by which plans are ranked: charges, starts and complexity penalty, as in the integer program."""
    if not problem.complexity_share:
        return plan.total_usd_per_h + plan.start_usd_per_h
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    dearest = max([*prices.values(), 1e-9])
    complexity_usd = 0.0
    rents = cost_by_model(plan, problem)
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        copy_usd_per_h = sum(prices[deployment.region, node.node] * node.count for node in template.nodes)
        (component_count,) = component_counts([template])
        complexity_usd += (
            deployment.count
            * copy_usd_per_h
            * (float(component_count) + SIZE_PENALTY * copy_usd_per_h / dearest)
        )
    complexity_usd += sum(rents[model] for model in crossing(plan))
    return plan.total_usd_per_h + plan.start_usd_per_h + problem.complexity_share * complexity_usd


def costed(plan: Plan, problem: PlanningProblem, running_plan: Plan | None) -> Plan:
    """A combined plan with its rent, charges and start-up cost."""
    start_usd_per_h = 0.0
    if running_plan is not None and problem.init_penalty > 0:
        running_counts = {(d.template, d.region): d.count for d in running_plan.deployments}
        new_deployments = [
            replace(d, count=count)
            for d in plan.deployments
            if (count := d.count - running_counts.get((d.template, d.region), 0)) > 0
        ]
        start_usd_per_h = problem.init_penalty * sum(
            cost_by_model(replace(plan, deployments=tuple(new_deployments)), problem).values()
        )
    return replace(
        plan,
        cost_usd_per_h=rent_usd_per_h(problem, plan.nodes),
        charges=charges_of(problem, plan, egress_usd_per_h(problem, plan)),
        start_usd_per_h=start_usd_per_h,
    )


def spare_of(plan: Plan, problem: PlanningProblem, model: str) -> float:
    """Capacity of a plan within the headroom, relative to the model's demand."""
    prediction = next((prediction for prediction in plan.predictions if prediction.model == model), None)
    return (
        0.0
        if prediction is None or not prediction.demand_per_s > 0
        else prediction.capacity_per_s * problem.headroom / prediction.demand_per_s
    )


def part_key(plan: Plan) -> object:
    """A key that is equal for plans with the same deployments and routing of a model."""
    shares = {
        (s.template, s.region, s.bucket, s.phase, f"{s.rate_per_s:.5g}")
        for s in plan.shares
        if s.rate_per_s > 0
    }
    flows = {(f.bucket, f.prefill_region, f.decode_region, f"{f.rate_per_s:.5g}") for f in plan.flows}
    return plan.formats, frozenset(plan.deployments), frozenset(shares), frozenset(flows)


def crossing(plan: Plan) -> set[str]:
    """Models whose KV crosses links between regions, which other models may use too."""
    return {flow.model for flow in plan.flows if flow.prefill_region != flow.decode_region}


def tried(judge: Judge, plan: Plan, models: Collection[str]) -> tuple[Evidence, ...]:
    """The evidence of one plan: model by model, those that share links together."""
    joined = sorted(crossing(plan) & set(models))
    groups = [*([name] for name in sorted(models) if name not in joined), *([joined] if joined else [])]
    items = (item for group in groups for item in judge(plan, group, 0))
    return tuple(sorted(items, key=lambda item: item.model))
