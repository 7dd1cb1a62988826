"""The cheapest plan that keeps every promise in simulation: a bounded search over plans, each judged by evidence.

Models share no replica, so a plan is a part for each model, and a part that was tried once need not be tried again
beside others (unless its KV crosses links that others use). Each model has a pool of parts:

    the plan on averages, and the plans of other strategies       restricted sets of columns, rivals
    the planner's plan for more demand than there is              headroom
    the planner's plan without the columns that missed            near-optimal alternatives
    a copy more of a column that missed, one less of one held     single steps

First one plan that holds is looked for, guided by queueing: the cheapest parts that are expected to hold, with ever
more to spare where some miss. Then all that costs less is tried, the cheapest first. What is left in the end is the
cheapest of all that evidence supports, or, where plans, solves or requests run out before, the cheapest so far.
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
from potluck.rehearse.queueing_margins import SURE, assembled, cost_by_model, late, restored, scaled
from potluck.rehearse.request_sources import FRESH
from potluck.rehearse.search_end import (
    HOLDS,
    HOLDS_IN_FRESH_RUNS,
    REQUESTS_LEFT_OUT,
    SearchEnd,
    no_larger_plan,
)

SAME_COST = 0.002  # a gap between costs that is not worth a trial
ABOUT_AS_CLOSE = 0.25  # of what a promise leaves open: nobody pays several times as much for so little
GROWTH, SMALL_GROWTH, NEAR = 1.25, 1.05, 0.5
"""What a part of the same columns must have to spare, over one that missed, or that missed by little: by less than so
much of what the promise leaves open.
"""
FEW = 4
"""Copies that need all of that growth. What chance asks for falls with the square root of how many there are."""
STEP = 0.1  # of a column's copies that are added or taken at once; one at least
LIKELY = 2.0  # Times as many late as may be: where queueing expects more, it is seldom wrong.
UNLIKELY = 6  # plans against its advice that are tried all the same, the cheapest
MOST_COMBINATIONS = 200  # of parts that are looked at for one that fits into the fleet


Judge = Callable[[Plan, Collection[str], int], tuple[Evidence, ...]]
"""What a plan does for some models, which are run together, in runs from a number on."""


@dataclass(frozen=True, slots=True)
class RehearsalRules:
    most_plans: int = 24  # That are tried.
    most_solves: int = 6  # Of the planner, beside the plans that are there at first.
    most_requests: int = 150_000  # Simulated in all, after which no further plan is begun.
    fresh: bool = False  # Whether the plan must hold again, in runs that no plan was chosen by.
    cv: float = 1.0  # How gaps between requests vary, for queueing.
    enough: Callable[[], bool] = lambda: False  # Asked before each further plan; ends the search.


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """What a plan has for one model, as a plan of that model alone."""

    model: str
    plan: Plan
    made: str  # How, in words.
    usd_per_h: float
    spare: float  # How many times the demand it serves on averages.
    late: float  # Share of requests that queueing expects to be late, over what may be.
    key: object

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(template.name for template in self.plan.templates)


@dataclass(frozen=True, slots=True)
class RehearsedPlan:
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
        """Of the model that is worst off."""
        return min((item.margin for item in self.evidence), default=0.0)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How it went. `chosen` is the cheapest plan that held, of the requests that any plan serves; None: none did."""

    steps: tuple[RehearsedPlan, ...]
    chosen: RehearsedPlan | None
    end: SearchEnd
    averages: PlanOutcome  # The plan that suffices on averages alone.

    @property
    def holds(self) -> bool:
        return self.chosen is not None and self.chosen.holds

    @property
    def best(self) -> RehearsedPlan:
        if self.chosen is not None:
            return self.chosen
        closest = max(rehearsed.margin for rehearsed in self.steps)
        close = [rehearsed for rehearsed in self.steps if rehearsed.margin >= closest - ABOUT_AS_CLOSE]
        return min(close, key=lambda rehearsed: (rehearsed.cost_usd_per_h, -rehearsed.margin))

    @property
    def outcome(self) -> PlanOutcome:
        """The best plan, with how far it is from the least that any plan costs on averages."""
        base_outcome, plan = self.averages, self.best.plan
        cost, least = plan.total_usd_per_h, base_outcome.plan.total_usd_per_h * (1 - base_outcome.plan.gap)
        gap = max(0.0, cost - least) / cost if cost > 0 else 0.0
        return replace(base_outcome, plan=replace(plan, strategy=base_outcome.plan.strategy, gap=gap))


@dataclass(slots=True)
class _PlanSearch:
    factory: TemplateFactory
    planner: Planner
    settings: SolveSettings
    judge: Judge
    rules: RehearsalRules
    pools: dict[str, list[ModelPart]] = field(default_factory=dict)
    keys: set[object] = field(default_factory=set)  # Of all parts in the pools.
    seen: dict[object, Evidence] = field(default_factory=dict)
    """By a part's key, with the parts beside it where they share links. Others may have tried it too."""
    missed: set[object] = field(default_factory=set)  # Keys of what was tried here and did not hold.
    needed: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    """What a model's part of the same templates should have to spare, after one that missed."""
    roomy: dict[str, float] = field(default_factory=dict)
    """What any part of a model should have to spare, after one that missed."""
    asked: dict[str, float] = field(default_factory=dict)
    """The most demand that was planned for, times what there is."""
    no_larger: SearchEnd | None = None  # What binds, once the planner found no plan for that.
    unfit: bool = False  # Whether parts were left to try that do not fit into the fleet together.
    steps: list[RehearsedPlan] = field(default_factory=list)
    solves: int = 0
    requests: int = 0
    whole: list[dict[str, ModelPart]] = field(default_factory=list)
    """Parts that were planned together, and so fit together."""

    @property
    def problem(self) -> PlanningProblem:
        return self.factory.problem

    def run(self, outcome: PlanOutcome) -> tuple[RehearsedPlan | None, SearchEnd]:
        self.pools = {demand.name: [] for demand in self.problem.demands if demand.rate_per_s > 0}
        self.offer(outcome.plan, outcome.plan.strategy)
        for plan in outcome.alternatives:
            self.offer(plan, plan.strategy)
        best_plan = self._first_that_holds()
        while best_plan is not None:
            best_plan = self._cheapest_below(best_plan)
            if not self.rules.fresh and all(item.long for item in best_plan.evidence):
                return best_plan, HOLDS
            verdict = self._try(best_plan.parts, best_plan.plan, fresh=True)
            if verdict.suffices:
                return verdict, HOLDS_IN_FRESH_RUNS
            self._learn(verdict)
            self._vary(verdict, more=True)
            held = [
                rehearsed for rehearsed in self.steps if rehearsed.suffices and not self._missed(rehearsed)
            ]
            best_plan = (
                min(held, key=lambda rehearsed: rank_usd_per_h(self.problem, rehearsed.plan), default=None)
                or self._first_that_holds()
            )
        return None, self._end()

    def _end(self) -> SearchEnd:
        """Why the search ended without a plan that holds: its limits first, then what stands in the way."""
        rules, tried = self.rules, len(self.steps)
        if rules.enough():
            return SearchEnd("time", f"the search reached its time limit after {tried} {_plans(tried)}")
        if tried >= rules.most_plans:
            return SearchEnd("plans", f"the search reached its limit of {rules.most_plans} plans")
        if self.requests >= rules.most_requests:
            limit = f"its limit of {rules.most_requests:,} simulated requests"
            return SearchEnd("requests", f"the search reached {limit} after {tried} {_plans(tried)}")
        if self.unfit:
            what = "the plans of single models that are left to try do not fit into the fleet together"
            return SearchEnd("combinations", what)
        if self.no_larger is not None:
            return self.no_larger
        most = max(self.asked.values(), default=1.0)
        runs = f"{self.solves} planner runs, the limit of the search, for up to {most:.3g} times the demand"
        return SearchEnd("solves", f"{tried} {_plans(tried)} missed, and {runs} gave no other plan")

    @property
    def _spent(self) -> bool:
        rules = self.rules
        over = len(self.steps) >= rules.most_plans or self.requests >= rules.most_requests
        return bool(self.steps) and (over or self.rules.enough())

    def _first_that_holds(self) -> RehearsedPlan | None:
        """Some plan that holds, cheap if queueing is right."""
        while not self._spent:
            able = {name: self._likely(name, roomy=True) for name in self.pools}
            if self._solve_for_more([name for name, parts in able.items() if not parts]):
                continue
            # Where no part is expected to hold, the one with most to spare is the best guess.
            rehearsed = self._next({name: parts or self._open(name, -1)[:1] for name, parts in able.items()})
            if rehearsed is None:
                if self._solve_for_another():
                    continue
                return None
            if rehearsed.suffices:
                return rehearsed
            self._learn(rehearsed)
            self._vary(rehearsed, more=True)
        return None

    def _solve_for_another(self) -> bool:
        """Plan the models that have no part left to try, for more than any part that missed, then without the columns
        that missed; whether that gave a new part. Not where parts are left that do not fit together."""
        names = [name for name in self.pools if not self._open(name)]
        if not names and not self.unfit:  # what missed did so beside others, over links that they share
            names = list(self.pools)
        for name in names:
            self.asked[name] = max(self.asked.get(name, 1.0), self.roomy.get(name, 1.0))
        while names and not self.no_larger and self.solves < self.rules.most_solves and not self._spent:
            if self._solve_for_more(names):
                return True
        missed = [part for name in names for part in self.pools[name] if part.key in self.missed]
        columns = frozenset(column for part in missed for column in part.columns)
        return bool(columns) and self._planned(names, {}, columns)

    def _likely(self, name: str, most_late: float = 1.0, roomy: bool = False) -> list[ModelPart]:
        """Parts that held, or that are expected to; `roomy`: with more to spare than all that missed."""
        least = self.roomy.get(name, 0.0) if roomy else 0.0
        return [
            part
            for part in self._open(name)
            if self._held(part)
            or (
                part.late <= most_late
                and part.spare >= max(least, self.needed.get((name, part.columns), 0.0))
            )
        ]

    def _open(self, name: str, roomiest: int = 0) -> list[ModelPart]:
        """Parts that are not known to miss, the cheapest first, or those with most to spare."""
        parts = [part for part in self.pools[name] if part.key not in self.missed]
        return sorted(parts, key=lambda part: roomiest * part.spare or part.usd_per_h)

    def _held(self, part: ModelPart) -> bool:
        item = self.seen.get(part.key)
        return item is not None and item.suffices

    def _learn(self, rehearsed: RehearsedPlan) -> None:
        for item in rehearsed.evidence:
            if not item.suffices:
                part = rehearsed.parts[item.model]
                growth = SMALL_GROWTH if item.margin > -NEAR else max(SMALL_GROWTH, _growth(part.plan))
                self.needed[part.model, part.columns] = part.spare * growth
                least = part.spare * (1.0 + STEP / 4)
                self.roomy[part.model] = max(self.roomy.get(part.model, 0.0), least)

    def _cheapest_below(self, best_plan: RehearsedPlan) -> RehearsedPlan:
        """What is cheaper than a plan that holds, the cheapest first: what is likely to hold, then a few others.

        Of what is likely, first what has more to spare than all that missed: where there is time for few plans, these
        are the ones.
        """
        self._vary(best_plan, more=False)
        missed = [rehearsed for rehearsed in self.steps if not rehearsed.suffices]
        # Of a large plan the same columns with a share more are all but what another solve finds.
        if missed and not any(large(part.plan) for part in best_plan.parts.values()):
            self._solve_above(max(missed, key=lambda rehearsed: rehearsed.margin))
        unlikely = 0
        while not self._spent:
            rehearsed = self._next(
                {name: self._likely(name, LIKELY, roomy=True) for name in self.pools}, best_plan.plan
            )
            if rehearsed is None:
                rehearsed = self._next(
                    {name: self._likely(name, LIKELY) for name in self.pools}, best_plan.plan
                )
            if rehearsed is None and unlikely < UNLIKELY:
                unlikely += 1
                rehearsed = self._next({name: self._open(name) for name in self.pools}, best_plan.plan)
            if rehearsed is None:
                break
            if rehearsed.suffices:
                best_plan = rehearsed
                self._vary(rehearsed, more=False)
                continue
            self._learn(rehearsed)
            self._vary(rehearsed, more=True)
            if not any(large(part.plan) for part in rehearsed.parts.values()):
                self._solve_above(rehearsed)
                self._solve_without(rehearsed)
        return best_plan

    def _next(
        self, pools: Mapping[str, Sequence[ModelPart]], below: Plan | None = None
    ) -> RehearsedPlan | None:
        """Try the cheapest combination of parts that fits; none that costs as much as `below`."""
        most = None if below is None else rank_usd_per_h(self.problem, below) * (1 - SAME_COST)
        self.unfit = False
        for parts in self._combinations(pools):
            plan = self._joined(parts)
            if most is not None and rank_usd_per_h(self.problem, plan) >= most:
                return None
            if self.missed.isdisjoint(self._keys(parts, plan).values()):
                if not verify(self.problem, plan):
                    return self._try(parts, plan)
                self.unfit = True
        return None

    def _combinations(self, pools: Mapping[str, Sequence[ModelPart]]) -> Iterator[dict[str, ModelPart]]:
        """One part of each pool, the cheapest sums first; then those that were planned together."""
        names = sorted(pools)
        if not names or not all(pools[name] for name in names):
            return
        start = (0,) * len(names)
        heap, known = [(sum(pools[name][0].usd_per_h for name in names), start)], {start}
        for _ in range(MOST_COMBINATIONS):
            if not heap:
                return
            usd_per_h, places = heappop(heap)
            yield {name: pools[name][place] for name, place in zip(names, places, strict=True)}
            for turn, name in enumerate(names):
                after = (*places[:turn], places[turn] + 1, *places[turn + 1 :])
                if after[turn] < len(pools[name]) and after not in known:
                    known.add(after)
                    step = pools[name][after[turn]].usd_per_h - pools[name][places[turn]].usd_per_h
                    heappush(heap, (usd_per_h + step, after))
        chosen = {name: {part.key for part in parts} for name, parts in pools.items()}
        for parts in self.whole:
            if all(part.key in chosen[name] for name, part in parts.items()):
                yield parts

    def _joined(self, parts: Mapping[str, ModelPart]) -> Plan:
        plan = assembled({name: part.plan for name, part in parts.items()}, self.problem)
        return costed(plan, self.problem, self.settings.running)

    def _keys(self, parts: Mapping[str, ModelPart], plan: Plan) -> dict[str, object]:
        joined = crossing(plan)
        beside = frozenset(parts[name].key for name in joined if name in parts)
        return {
            name: (part.key, beside) if name in joined and len(beside) > 1 else part.key
            for name, part in parts.items()
        }

    def _missed(self, rehearsed: RehearsedPlan) -> bool:
        return not self.missed.isdisjoint(self._keys(rehearsed.parts, rehearsed.plan).values())

    def _try(self, parts: Mapping[str, ModelPart], plan: Plan, fresh: bool = False) -> RehearsedPlan:
        """Run what was not run before; what shares links, together."""
        keys, number, joined = self._keys(parts, plan), len(self.steps) + 1, crossing(plan)
        left = [name for name in sorted(keys) if fresh or keys[name] not in self.seen]
        groups = [[name] for name in left if name not in joined]
        groups += [group] if (group := sorted(joined & set(keys))) and set(group) & set(left) else []
        new: dict[str, Evidence] = {}
        first_run = FRESH * (1 + sum(rehearsed.fresh for rehearsed in self.steps)) if fresh else 0
        self.factory.report_progress(f"rehearsing plan {number}")
        for group in groups:
            for item in self.judge(plan, group, first_run):
                new[item.model] = item
                self.requests += item.requests
                # Tried again with ever new runs, anything passes some day: what was refuted stays so.
                if not fresh or not item.suffices:
                    self.seen[keys[item.model]] = item
        evidence = tuple(new.get(name) or self.seen[keys[name]] for name in sorted(keys))
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
        """Put a plan's parts into the pools; whether one of them is new. `problem`: of some models alone."""
        problem = problem or self.problem
        real = restored(plan, problem, factors) if factors else plan
        if not plan.deployments or (real.fraction < 1 and self.keys):
            return False
        even = balance_load(problem, real, self.settings.time_limit_s, self.settings.clock)
        parts = {}
        for name in [demand.name for demand in problem.demands if demand.name in self.pools]:
            asked = (factors or {}).get(name, 1.0)
            parts[name] = self._part(
                even, name, made if abs(asked - 1) < 1e-3 else f"{made} for x {asked:.3g}"
            )
        before = len(self.keys)
        for name, part in parts.items():
            if part.key not in self.keys:
                self.keys.add(part.key)
                self.pools[name].append(part)
        self.whole += [parts] if len(parts) == len(self.pools) else []
        return len(self.keys) > before

    def _part(self, plan: Plan, name: str, made: str) -> ModelPart:
        own = costed(assembled({name: plan}, self.problem), self.problem, self.settings.running)
        demand = next(demand for demand in self.problem.demands if demand.name == name)
        allowed = SURE * (1.0 - demand.slo.attainment)
        expected = late(replace(self.problem, demands=(demand,)), own, self.rules.cv)[name]
        return ModelPart(
            name,
            own,
            made,
            rank_usd_per_h(self.problem, own),
            spare_of(own, self.problem, name),
            expected / allowed,
            part_key(own),
        )

    def _vary(self, rehearsed: RehearsedPlan, more: bool) -> None:
        """Offer each part with copies more, where it missed, or fewer, where it held, of one of its columns."""
        verdicts = {item.model: item.suffices for item in rehearsed.evidence}
        for name, part in rehearsed.parts.items():
            if verdicts.get(name, True) == more:
                continue
            if large(part.plan):
                self._offer_more(part) if more else self._offer_halfway(part)
            for place, deployment in enumerate(part.plan.deployments):
                change = max(1, ceil(STEP * deployment.count)) * (1 if more else -1)
                others = part.plan.deployments[:place], part.plan.deployments[place + 1 :]
                count = deployment.count + change
                kept = (replace(deployment, count=count),) if count > 0 else ()
                self._offer_copies(part, (*others[0], *kept, *others[1]), varied(part.made, change))

    def _offer_more(self, part: ModelPart) -> None:
        """With a share more of each of its columns."""
        self._offer_counts(part, lambda d: ceil(d.count * (1 + STEP / 2)))

    def _offer_halfway(self, part: ModelPart) -> None:
        """Between a part that held and the one of the same columns that missed with most to spare."""
        alike = [p for p in self.pools[part.model] if p.key in self.missed and p.columns == part.columns]
        if alike:
            below = max(alike, key=lambda p: p.spare)
            self.needed[part.model, part.columns] = below.spare
            counts = {(d.template, d.region): d.count for d in below.plan.deployments}
            self._offer_counts(part, lambda d: (d.count + counts.get((d.template, d.region), 0) + 1) // 2)

    def _offer_counts(self, part: ModelPart, count: Callable[[Deployment], int]) -> None:
        after = tuple(replace(d, count=count(d)) for d in part.plan.deployments)
        change = sum(d.count for d in after) - sum(d.count for d in part.plan.deployments)
        self._offer_copies(part, after, varied(part.made, change))

    def _offer_copies(self, part: ModelPart, deployments: tuple[Deployment, ...], made: str) -> None:
        counts = {(deployment.template, deployment.region): deployment.count for deployment in deployments}
        pins = [pin for pin in self.settings.pins if pin.template.startswith(f"{part.model}: ")]
        if any(counts.get((pin.template, pin.region), 0) < pin.count for pin in pins):
            return
        names = {deployment.template for deployment in deployments}
        templates = tuple(template for template in part.plan.templates if template.name in names)
        other = replace(part.plan, templates=templates, deployments=deployments)
        demand = next(demand for demand in self.problem.demands if demand.name == part.model)
        alone, other = replace(self.problem, demands=(demand,)), costed(other, self.problem, None)
        even = balance_load(alone, other, self.settings.time_limit_s, self.settings.clock)
        if not deployments or even is other:
            return  # they do not suffice on averages, or there are no more nodes
        new = self._part(even, part.model, made)
        if new.key not in self.keys:
            self.keys.add(new.key)
            self.pools[part.model].append(new)

    def _solve_for_more(self, names: Sequence[str]) -> bool:
        """Plan for more of these models, and for more than those parts serve that are not expected to hold."""
        if not names or self.no_larger:
            return False
        for name in names:
            known = [
                part.spare for part in self.pools[name] if part.spare < self.asked.get(name, 1.0) * GROWTH
            ]
            self.asked[name] = max([self.asked.get(name, 1.0), *known]) * (1.0 + STEP)
        return self._planned(names, self.asked)

    def _solve_above(self, rehearsed: RehearsedPlan) -> None:
        """Plan for a little more than the parts that missed have capacity for: the next plan that is another one."""
        missed = [item.model for item in rehearsed.evidence if not item.suffices]
        self._planned(missed, {name: rehearsed.parts[name].spare * (1.0 + STEP / 2) for name in missed})

    def _solve_without(self, rehearsed: RehearsedPlan) -> None:
        """Plan without the columns of the parts that missed."""
        missed = {item.model for item in rehearsed.evidence if not item.suffices}
        names = {t.name for name in missed for t in rehearsed.parts[name].plan.templates}
        self._planned(missed, {}, frozenset(names))

    def _planned(
        self, names: Collection[str], factors: Mapping[str, float], without: frozenset[str] = frozenset()
    ) -> bool:
        """Plan some models anew on what the others leave of the fleet; all of them where that does not suffice."""
        apart = self._apart(names)
        for problem in (apart, self.problem) if len(names) < len(self.pools) else (self.problem,):
            if self.solves >= self.rules.most_solves or self.rules.enough():
                return False
            self.solves += 1
            self.factory.report_progress(
                "planning with headroom" if factors else "planning without what missed"
            )
            asked = {demand.name: factors.get(demand.name, 1.0) for demand in problem.demands}
            shop = replace(self.factory, problem=scaled(problem, asked))
            without -= {deployment.template for deployment in self.settings.pins}
            if without:  # what is made of the templates that are left is not for others
                shop = replace(shop, excluded=without, templates_by_kind=dict(shop.templates_by_kind))
            outcome = self.planner(shop, self._settings(problem))
            if outcome.plan.fraction >= 1:
                break
        if factors and outcome.plan.fraction < 1:
            self.no_larger = no_larger_plan(self.problem, outcome.allocation, asked, names)
        word = "" if factors else ", other columns"
        made = (outcome.plan, *outcome.alternatives)
        return sum(self.offer(plan, f"{plan.strategy}{word}", asked, problem) for plan in made) > 0

    def _apart(self, names: Collection[str]) -> PlanningProblem:
        """The problem of some models, on the nodes that are left beside the likeliest part of each other one."""
        demands = tuple(demand for demand in self.problem.demands if demand.name in names)
        used: Counter[tuple[str, str]] = Counter()
        for name in self.pools.keys() - set(names):
            likely = self._likely(name) or self._open(name, -1)
            used.update(likely[0].plan.nodes if likely else {})
        left = self.problem.with_nodes(lambda region, o: max(0, o.available - used[region, o.node]))
        return replace(left, demands=demands)

    def _settings(self, problem: PlanningProblem) -> SolveSettings:
        """Without what is asked or known of models that are not planned."""
        names = tuple(demand.name for demand in problem.demands)
        if len(names) == len(self.problem.demands):
            return self.settings
        running_plan = self.settings.running
        pins = [p for p in self.settings.pins if p.template.split(": ")[0] in names]
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
    """The cheapest plan that keeps every promise in simulation.

    `outcome` is the planner's answer where it was asked before; `seen` is what the same judge said of parts before.
    """
    outcome = outcome or planner(factory, settings)
    if not outcome.plan.deployments:
        raise CapacityError("no plan was found to rehearse; allow more time, or see the plan without it")
    search = _PlanSearch(factory, planner, settings, judge, rules or RehearsalRules())
    search.seen = {} if seen is None else seen
    chosen_plan, end = search.run(outcome)
    if chosen_plan is not None and not chosen_plan.holds:
        end = REQUESTS_LEFT_OUT
    return Rehearsal(tuple(search.steps), chosen_plan, end, outcome)


def _plans(count: int) -> str:
    return "plan" if count == 1 else "plans"


def _growth(plan: Plan) -> float:
    copies = sum(deployment.count for deployment in plan.deployments)
    return 1.0 + (GROWTH - 1.0) * min(1.0, sqrt(FEW / max(1, copies)))


def large(plan: Plan) -> bool:
    """Whether a share more of each column is a small step."""
    copies = sum(deployment.count for deployment in plan.deployments)
    return copies * STEP / 2 >= len(plan.deployments)


def varied(made: str, change: int) -> str:
    """In words, with so many copies more or fewer than the last."""
    before = re.fullmatch(r"(.*), (\d+) (more|fewer)", made)
    if before is not None and (before[3] == "more") == (change > 0):
        made, change = before[1], change + int(before[2]) * (1 if change > 0 else -1)
    return f"{made}, {abs(change)} {'more' if change > 0 else 'fewer'}"


def rank_usd_per_h(problem: PlanningProblem, plan: Plan) -> float:
    """What plans are chosen by: cost, starts, and what moving parts count for, as in the program."""
    if not problem.complexity_share:
        return plan.total_usd_per_h + plan.start_usd_per_h
    prices = {(r.name, o.node): o.price_usd_per_h for r in problem.regions for o in r.offers}
    dearest = max([*prices.values(), 1e-9])
    parts_usd = 0.0
    rents = cost_by_model(plan, problem)
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        price = sum(prices[deployment.region, node.node] * node.count for node in template.nodes)
        (parts,) = component_counts([template])
        parts_usd += deployment.count * price * (float(parts) + SIZE_PENALTY * price / dearest)
    parts_usd += sum(rents[model] for model in crossing(plan))
    return plan.total_usd_per_h + plan.start_usd_per_h + problem.complexity_share * parts_usd


def costed(plan: Plan, problem: PlanningProblem, running_plan: Plan | None) -> Plan:
    """A plan that was put together, with what it costs."""
    started = 0.0
    if running_plan is not None and problem.init_penalty > 0:
        before = {(d.template, d.region): d.count for d in running_plan.deployments}
        new = [
            replace(d, count=count)
            for d in plan.deployments
            if (count := d.count - before.get((d.template, d.region), 0)) > 0
        ]
        started = problem.init_penalty * sum(
            cost_by_model(replace(plan, deployments=tuple(new)), problem).values()
        )
    return replace(
        plan,
        cost_usd_per_h=rent_usd_per_h(problem, plan.nodes),
        charges=charges_of(problem, plan, egress_usd_per_h(problem, plan)),
        start_usd_per_h=started,
    )


def spare_of(plan: Plan, problem: PlanningProblem, model: str) -> float:
    """How many times a model's demand a plan serves, as busy as replicas may be."""
    item = next((item for item in plan.predictions if item.model == model), None)
    return (
        0.0
        if item is None or not item.demand_per_s > 0
        else item.capacity_per_s * problem.headroom / item.demand_per_s
    )


def part_key(plan: Plan) -> object:
    """Equal for plans which deploy a model and route its requests alike."""
    shares = {
        (s.template, s.region, s.bucket, s.phase, f"{s.rate_per_s:.5g}")
        for s in plan.shares
        if s.rate_per_s > 0
    }
    flows = {(f.bucket, f.prefill_region, f.decode_region, f"{f.rate_per_s:.5g}") for f in plan.flows}
    return plan.formats, frozenset(plan.deployments), frozenset(shares), frozenset(flows)


def crossing(plan: Plan) -> set[str]:
    """Models whose KV crosses links between regions, which others may use."""
    return {flow.model for flow in plan.flows if flow.prefill_region != flow.decode_region}


def tried(judge: Judge, plan: Plan, models: Collection[str]) -> tuple[Evidence, ...]:
    """What a judge says of one plan: model by model, those that share links together."""
    joined = sorted(crossing(plan) & set(models))
    groups = [*([name] for name in sorted(models) if name not in joined), *([joined] if joined else [])]
    items = (item for group in groups for item in judge(plan, group, 0))
    return tuple(sorted(items, key=lambda item: item.model))
