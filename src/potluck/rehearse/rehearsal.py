"""The rehearsal: plan, simulate, give each model more or less headroom, plan again, until the cheapest plan holds.

    factors 1 ─▶ plan for factor x demand, evened ─▶ the same plan at real demand ─▶ runs ─▶ evidence per model
        ▲                                                                                        │
        └──────────────── per model: misses: more; holds: less; both seen: between ◀─────────────┘

All models are searched at once, one plan and one set of runs per round, with the same requests in every round. When
every model's factor has settled, the plan made of each model's best must hold as a whole, and again in runs that no
round has seen; if it does not, the models that missed get a little more and the search goes on. A model's part of a
plan that was tried already is not run again, unless its KV crosses links that others use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt

from potluck.core.errors import CapacityError
from potluck.core.values.plan import Plan
from potluck.plan.assemble.even_shares import evened
from potluck.plan.problem import PlanningProblem
from potluck.plan.strategies.template_factory import PlanOutcome, SolveSettings, TemplateFactory
from potluck.plan.verify import verify
from potluck.rehearse.evidence import Evidence, TrialSetup, evidence_of, of_models
from potluck.rehearse.queueing_margins import Factors, assembled, cost_by_model, reached, restored, scaled
from potluck.rehearse.request_sources import FRESH

GROWTH = 1.5
SMALL_GROWTH = 1.1
"""From a factor that held in the search and did not in the end, or that nearly does."""
SAME_COST = 0.005
"""Relative; a gap between costs that is not worth a round."""


@dataclass(frozen=True, slots=True)
class FactorBracket:
    """Where the factor lies. `factor` is the one to plan for next.

    The least factor that holds gives the cheapest plan. Whether a plan holds is only nearly monotone in the factor,
    so only a factor whose own plan held is ever taken.
    """

    floor: float
    """No factor below it: 1 x the planner's headroom is a fleet that is busy all the time on averages alone."""
    ceiling: float
    factor: float = 1.0
    missed: float | None = None
    """The largest known to miss."""
    held: float | None = None
    """The smallest known to hold."""
    missed_usd_per_h: float = 0.0
    held_usd_per_h: float = 0.0
    done: bool = False
    """Nothing is left to try; `factor` is `held`, or all there is."""


def told(
    bracket: FactorBracket, at: float, usd_per_h: float, holds: bool, tolerance: float, growth: float = GROWTH
) -> FactorBracket:
    """What a trial at a factor means; until one holds, the next is `growth` times as much."""
    if holds:
        if bracket.held is None or at <= bracket.held:
            bracket = replace(bracket, held=at, held_usd_per_h=usd_per_h)
        if bracket.missed is not None and bracket.missed >= at:
            bracket = replace(bracket, missed=None)
    elif at < (bracket.held or inf) and at >= (bracket.missed or 0.0):
        bracket = replace(bracket, missed=at, missed_usd_per_h=usd_per_h)
    return _aimed(bracket, tolerance, growth)


def refuted(bracket: FactorBracket, at: float, usd_per_h: float) -> FactorBracket:
    """A factor that held does not after all: beside other models, or with fresh runs."""
    nearby = at * SMALL_GROWTH
    missed = replace(bracket, held=None, missed=at, missed_usd_per_h=usd_per_h, done=at >= bracket.ceiling)
    return replace(missed, factor=min(nearby, bracket.ceiling))


def _aimed(bracket: FactorBracket, tolerance: float, growth: float) -> FactorBracket:
    missed, held = bracket.missed, bracket.held
    if held is None:
        assert missed is not None
        if missed >= bracket.ceiling:
            return replace(bracket, factor=bracket.ceiling, done=True)
        return replace(bracket, factor=min(missed * growth, bracket.ceiling), done=False)
    if missed is None:
        if held <= bracket.floor * (1 + 1e-9):
            return replace(bracket, factor=held, done=True)
        return replace(bracket, factor=max(held / GROWTH, bracket.floor), done=False)
    cheaper = bracket.missed_usd_per_h < bracket.held_usd_per_h * (1 - SAME_COST)
    if held / missed <= 1 + tolerance or not cheaper:
        return replace(bracket, factor=held, done=True)
    return replace(bracket, factor=sqrt(missed * held), done=False)


Planner = Callable[[TemplateFactory, SolveSettings], PlanOutcome]
Known = tuple[Factors, PlanOutcome]
"""What each model's demand was multiplied by, and what the planner said."""
HELD = "holds in the runs that it was tried in"
SAME_FACTOR = 1e-6
NEAR = 0.5
"""In units of what a promise leaves open: a little more may do for so small a miss."""
ABOUT_AS_CLOSE = 0.25
"""In units of what a promise leaves open: nobody pays several times as much for so little."""


@dataclass(frozen=True, slots=True)
class RehearsalRules:
    runs: int = 5
    """Per round, and as many fresh ones in the end."""
    most_rounds: int = 30
    tolerance: float = 0.05
    """Factors closer than this are not told apart."""
    most_factor: float = 16.0
    verdict_runs: int = 10
    first: bool = False
    """The first plan that holds will do: not the cheapest, and without fresh runs."""


@dataclass(frozen=True, slots=True)
class RehearsedPlan:
    number: int
    factors: dict[str, float]
    """What each model's demand was multiplied by, as far as the fleet goes."""
    cost_usd_per_h: float
    evidence: tuple[Evidence, ...]
    plan: Plan
    """For the real demand."""
    outcome: PlanOutcome
    """As the planner gave it, for the multiplied demand."""
    fresh: bool = False
    short: bool = False
    """Whether the fleet could not give what was asked for."""

    @property
    def holds(self) -> bool:
        return all(item.holds for item in self.evidence)

    @property
    def margin(self) -> float:
        """Of the model that is worst off."""
        return min((item.margin for item in self.evidence), default=0.0)

    def margin_of(self, model: str) -> float:
        return next((item.margin for item in self.evidence if item.model == model), 0.0)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How it went. `chosen` is the cheapest step that held, in fresh runs too; None when none did."""

    steps: tuple[RehearsedPlan, ...]
    chosen: RehearsedPlan | None
    reason: str
    problem: PlanningProblem
    """With the demand that the best plan was made for."""

    @property
    def best(self) -> RehearsedPlan:
        if self.chosen is not None:
            return self.chosen
        closest = max(step.margin for step in self.steps)
        close = [step for step in self.steps if step.margin >= closest - ABOUT_AS_CLOSE]
        return min(close, key=lambda step: (step.cost_usd_per_h, -step.margin))

    @property
    def first(self) -> RehearsedPlan:
        return self.steps[0]


@dataclass(slots=True)
class _RehearsalSearch:
    factory: TemplateFactory
    planner: Planner
    settings: SolveSettings
    trial: TrialSetup
    rules: RehearsalRules
    said: Callable[[str], None]
    enough: Callable[[], bool]
    far: Callable[[int, int], None]
    known: Sequence[Known]
    """Plans that somebody has made. The search begins with the factors of the first."""
    plainer: Planner | None = None
    """Makes plans of another kind, tried where the first misses and the first that holds will do."""
    sure: RehearsedPlan | None = None
    """One of these that holds: what costs as much need not be tried."""
    brackets: dict[str, FactorBracket] = field(default_factory=dict)
    steps: list[RehearsedPlan] = field(default_factory=list)
    held_in: dict[str, RehearsedPlan] = field(default_factory=dict)
    """Where the best factor of each model was tried."""
    seen: dict[object, Evidence] = field(default_factory=dict)
    """What each model's part of a plan has shown; a part that fresh runs refuted keeps their evidence."""
    verdicts: int = 0

    def run(self) -> tuple[RehearsedPlan | None, str]:
        problem = self.factory.problem
        begun = self.known[0][0] if self.known else {}
        for ask in problem.asks:
            if ask.rate_per_s > 0:
                factor = begun.get(ask.name, 1.0)
                self.brackets[ask.name] = FactorBracket(problem.headroom, self.rules.most_factor, factor)
        while len(self.steps) < self.rules.most_rounds:
            if self.steps and self.enough():
                return None, "there was no time to try more"
            settled = all(bracket.done for bracket in self.brackets.values())
            step = (self._best() if settled else None) or self._attempt()
            if step.short and not step.holds and self._stuck(step):
                return None, "the fleet has no more nodes that would help"
            if self.sure is not None and step is self.sure:
                return step, HELD
            if self.rules.first and not step.holds and step.number == 1 and self.plainer is not None:
                self._try_plainer(self.plainer)
            if self.rules.first and step.holds:
                return self._cheaper(step) if step.number == 1 else step, HELD
            if settled and step.holds:
                verdict = self._verdict(step)
                if verdict.holds:
                    return verdict, "holds in runs that the search did not see"
                step = verdict
            if settled and not self._refute(step):
                return None, f"{self.rules.most_factor:g} times the demand is not enough for some model"
            if not settled:
                self._learn(step)
        return None, f"no plan was settled on in {self.rules.most_rounds} rounds"

    def _best(self) -> RehearsedPlan | None:
        """Every model's part of the plan that it held in, as one plan; None where nodes or links are too few."""
        problem, held = self.factory.problem, self.held_in
        if len(held) < len(self.brackets):
            return None
        if len({step.number for step in held.values()}) == 1:
            return next(iter(held.values()))
        factors = {model: step.factors[model] for model, step in held.items()}
        # A part that was planned for more than there was serves what it reached, and that is what counts here.
        plan = assembled({model: step.outcome.plan for model, step in held.items()}, problem)
        if verify(scaled(problem, factors), plan):
            return None
        last = max(held.values(), key=lambda step: step.number)
        return self._try(replace(last.outcome, plan=plan), factors)

    def _attempt(self) -> RehearsedPlan:
        factors = {model: bracket.factor for model, bracket in self.brackets.items()}
        self.said(f"round {len(self.steps) + 1}: planning")
        shop = replace(self.factory, problem=scaled(self.factory.problem, factors))
        made = next((outcome for known, outcome in self.known if _alike(known, factors)), None)
        outcome = made or self.planner(shop, self.settings)
        self.factory.searched = shop.searched
        if not outcome.plan.deployments:
            raise CapacityError("no plan was found to rehearse; allow more time, or see the plan without it")
        even = evened(shop.problem, outcome.plan, self.settings.time_limit_s, self.settings.clock)
        if self.sure is not None and even.cost_usd_per_h > self.sure.cost_usd_per_h * (1 - SAME_COST):
            return self.sure
        return self._try(replace(outcome, plan=self._kept(even, factors)), factors)

    def _try_plainer(self, planner: Planner) -> None:
        factors = {model: bracket.factor for model, bracket in self.brackets.items()}
        shop = replace(self.factory, problem=scaled(self.factory.problem, factors))
        outcome = planner(shop, self.settings)
        if outcome.plan.fraction < 1 or not outcome.plan.deployments:
            return
        even = evened(shop.problem, outcome.plan, self.settings.time_limit_s, self.settings.clock)
        parts = _parts(restored(even, self.factory.problem, factors), self.brackets)
        if all(key in self.seen for key in parts.values()):
            return  # it is the very plan that missed
        step = self._try(replace(outcome, plan=even), factors)
        self.sure = step if step.holds else None

    def _kept(self, plan: Plan, factors: dict[str, float]) -> Plan:
        """The plan with parts that models held in, where any that holds will do, they cost no more and all fit."""
        held = {
            item.model: step.outcome.plan
            for step in self.steps
            for item in step.evidence
            if item.holds and abs(step.factors[item.model] - factors[item.model]) < SAME_FACTOR
        }
        if not self.rules.first or not held or plan.fraction < 1:
            return plan
        parts = dict.fromkeys(self.brackets, plan) | held
        joined = replace(assembled(parts, self.factory.problem), formats=plan.formats, charges=plan.charges)
        dearer = joined.cost_usd_per_h > plan.cost_usd_per_h * (1 + SAME_COST)
        return plan if dearer or verify(scaled(self.factory.problem, factors), joined) else joined

    def _try(self, outcome: PlanOutcome, factors: dict[str, float]) -> RehearsedPlan:
        """Run a plan, unless the very same was run before."""
        number, plan = len(self.steps) + 1, restored(outcome.plan, self.factory.problem, factors)
        parts = _parts(plan, self.brackets)
        known = [self.seen[key] for key in parts.values() if key in self.seen]
        # Where any plan that holds will do, one with a part that is known to miss need not be run.
        hopeless = self.rules.first and not all(entry.holds for entry in known)
        if len(known) < len(parts) and not hopeless:
            runs = range(self.rules.runs)
            fresh = {model for model, key in parts.items() if key not in self.seen}
            if fresh & (joined := crossing(plan)):
                fresh |= joined & set(parts)  # they share links
            trial = self.trial if fresh == set(parts) else of_models(self.trial, fresh)
            for item in evidence_of(
                trial, plan, runs, lambda run: self.said(f"round {number}: {run}"), self.far
            ):
                self.seen.setdefault(parts[item.model], item)
        evidence = tuple(self.seen[parts[model]] for model in sorted(parts) if parts[model] in self.seen)
        got, short = reached(outcome.plan, factors), outcome.plan.fraction < 1
        step = RehearsedPlan(number, got, plan.cost_usd_per_h, evidence, plan, outcome, short=short)
        self.steps.append(step)
        return step

    def _verdict(self, step: RehearsedPlan) -> RehearsedPlan:
        start = FRESH + self.verdicts * self.rules.verdict_runs
        self.verdicts += 1
        runs = range(start, start + self.rules.verdict_runs)
        evidence = evidence_of(self.trial, step.plan, runs, lambda run: self.said(f"fresh {run}"), self.far)
        verdict = replace(step, number=len(self.steps) + 1, evidence=evidence, fresh=True)
        self.steps.append(verdict)
        parts = _parts(step.plan, self.brackets)
        # Tried again with ever new runs, anything passes some day: what was refuted stays so.
        self.seen.update({parts[item.model]: item for item in evidence if not item.holds})
        return verdict

    def _cheaper(self, held: RehearsedPlan) -> RehearsedPlan:
        """A plan that was made before and costs less, where it holds too: margins are a guess."""
        best = held
        for factors, outcome in self.known[1:]:
            if outcome.plan.cost_usd_per_h < best.cost_usd_per_h * (1 - SAME_COST):
                shop = replace(self.factory, problem=scaled(self.factory.problem, factors))
                even = evened(shop.problem, outcome.plan, self.settings.time_limit_s, self.settings.clock)
                step = self._try(replace(outcome, plan=even), dict(factors))
                best = step if step.holds else best
        return best

    def _learn(self, step: RehearsedPlan) -> None:
        cost = cost_by_model(step.plan, self.factory.problem)
        verdicts = {item.model: item.holds for item in step.evidence}
        for model, bracket in self.brackets.items():
            holds = verdicts.get(model, True)
            if step.short and not holds:
                continue  # it asked for more than there is; it asks again when others have given some up
            at = step.factors[model]
            if self.rules.first and holds:
                continue  # the first that will do: nobody gives headroom back before all hold
            growth = GROWTH
            if self.rules.first and not holds and step.margin_of(model) > -NEAR:
                growth = SMALL_GROWTH
            self.brackets[model] = told(bracket, at, cost[model], holds, self.rules.tolerance, growth)
            if holds and self.brackets[model].held == at and self._better(model, step):
                self.held_in[model] = step

    def _better(self, model: str, step: RehearsedPlan) -> bool:
        best = self.held_in.get(model)
        if best is None:
            return True
        problem = self.factory.problem
        new, old = cost_by_model(step.plan, problem)[model], cost_by_model(best.plan, problem)[model]
        farther = step.margin_of(model) > best.margin_of(model)
        return new < old * (1 - SAME_COST) or (new <= old * (1 + SAME_COST) and farther)

    def _refute(self, step: RehearsedPlan) -> bool:
        """Settled factors did not hold together: whether there is more to try."""
        cost = cost_by_model(step.plan, self.factory.problem)
        for item in step.evidence:
            if item.holds:
                continue
            bracket = refuted(self.brackets[item.model], step.factors[item.model], cost[item.model])
            self.brackets[item.model] = bracket
            self.held_in.pop(item.model, None)
            if bracket.done:
                return False
        return True

    def _stuck(self, step: RehearsedPlan) -> bool:
        """Whether models that miss for want of nodes are all that is left: nobody else can give any up."""
        missing = {item.model for item in step.evidence if not item.holds}
        return all(bracket.done for model, bracket in self.brackets.items() if model not in missing)


def rehearse(
    factory: TemplateFactory,
    planner: Planner,
    settings: SolveSettings,
    trial: TrialSetup,
    rules: RehearsalRules | None = None,
    said: Callable[[str], None] = lambda _: None,
    enough: Callable[[], bool] = lambda: False,
    far: Callable[[int, int], None] = lambda done, total: None,
    known: Sequence[Known] = (),
    plainer: Planner | None = None,
) -> Rehearsal:
    """The cheapest plan, over factors on each model's demand, that keeps every promise in simulation.

    `enough` is asked before each further round, and ends the search. `far` is told how many of a round's requests
    were served; `known` are plans that were made before, with the factors to begin with first; `plainer` makes plans
    of another kind, of which one is tried where the first misses and the first that holds will do.
    """
    search = _RehearsalSearch(
        factory, planner, settings, trial, rules or RehearsalRules(), said, enough, far, known, plainer
    )
    chosen, reason = search.run()
    if chosen is None and search.sure is not None:
        chosen, reason = search.sure, HELD
    rehearsal = Rehearsal(tuple(search.steps), chosen, reason, factory.problem)
    best = rehearsal.best
    asked = {name: factor / best.outcome.plan.fraction for name, factor in best.factors.items()}
    return replace(rehearsal, problem=scaled(factory.problem, asked))


def _alike(a: Factors, b: Factors) -> bool:
    return all(abs(a.get(name, 1.0) - b.get(name, 1.0)) < 1e-9 for name in {*a, *b})


def _parts(plan: Plan, models: Iterable[str]) -> dict[str, object]:
    """Per model a key that is equal for plans which deploy it and route its requests alike.

    Models share no replica, only links: what models attain whose KV crosses some depends on all of these.
    """
    model_of = {template.name: template.model for template in plan.templates}
    deployed: dict[str, set[object]] = {model: set() for model in models}
    for deployment in plan.deployments:
        deployed.setdefault(model_of[deployment.template], set()).add(deployment)
    for share in plan.shares:
        key = (share.template, share.region, share.bucket, share.phase, f"{share.rate_per_s:.6g}")
        deployed.setdefault(model_of[share.template], set()).add(key)
    for flow in plan.flows:
        ends = (flow.bucket, flow.prefill_region, flow.decode_region, f"{flow.rate_per_s:.6g}")
        deployed.setdefault(flow.model, set()).add(ends)
    joined = crossing(plan)
    whole = frozenset().union(*(deployed[model] for model in joined if model in deployed))
    return {name: (name, frozenset(deployed[name]), whole if name in joined else None) for name in models}


def crossing(plan: Plan) -> set[str]:
    return {flow.model for flow in plan.flows if flow.prefill_region != flow.decode_region}
