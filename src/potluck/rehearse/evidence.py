"""What simulated runs say of a model's promise, and how sure that is.

Runs with different seeds are independent; requests within a run are not, since a burst hurts many at once. So the
bound comes from the spread between runs, a_1 ... a_n being the share of requests within the objective in each:

    lower = mean(a) - t sd(a) / sqrt(n)            t: one-sided 95 % of Student's t with n - 1 degrees

and never above Wilson's bound for as many independent requests as were judged, or a few lucky runs would prove
anything. A promise holds when `lower` reaches it, and when no more than a fiftieth is refused, by the same bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from potluck.core.state.policy import Policy
from potluck.core.values.plan import (
    Deployment,
    LengthBucket,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
    Tried,
)
from potluck.core.values.types import Traffic
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.group import group_template
from potluck.plan.timing.named_machines import machine_of
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import Workload, of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.results.plan_comparison import SERVED, compared, described, disagreements
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings

Z = 1.6449
"""One-sided 95 % of the normal law."""
# fmt: off
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
# fmt: on
"""One-sided 95 % of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Evidence:
    model: str
    promised: float
    """Share of requests that the objective must hold for."""
    attained: tuple[float, ...]
    requests: int
    """Judged, over all runs."""
    disagreed: tuple[str, ...] = field(default=(), compare=False)
    """What was not as planned in the first run, in words (`sim.results.planned`), the objective apart."""
    answered: tuple[float, ...] = ()
    """Share in each run; empty where nobody asked."""
    proven: bool = True
    """Whether refusals are judged by what is sure, else by what was seen: few requests prove little of 2 %."""

    @property
    def mean(self) -> float:
        return sum(self.attained) / len(self.attained) if self.attained else 0.0

    @property
    def lower(self) -> float:
        """What the share is at least, with 95 % confidence; 0 where nothing was seen."""
        return bound(self.attained, self.requests)

    @property
    def answers(self) -> bool:
        """Whether hardly anybody is turned away."""
        return not self.answered or self._answers >= 1.0 - SERVED

    @property
    def _answers(self) -> float:
        if self.proven:
            return bound(self.answered, self.requests)
        return sum(self.answered) / len(self.answered)

    @property
    def holds(self) -> bool:
        return self.lower >= self.promised and self.answers

    def told(self, fresh: bool = False, gap_cv: float | None = None) -> Tried:
        least, runs = min(self.answered, default=1.0), len(self.attained)
        seen = (self.promised, self.mean, self.lower, least, self.requests, runs, self.answers)
        return Tried(self.model, *seen, fresh, gap_cv)

    @property
    def runs_kept(self) -> int:
        """Runs that kept the promise by themselves."""
        return sum(value >= self.promised for value in self.attained)

    @property
    def margin(self) -> float:
        """How far the bound is above the promise, in units of what the promise leaves open; negative below.

        The same of answers, if that is less.
        """
        kept = (self.lower - self.promised) / max(1.0 - self.promised, 1e-3)
        if not self.answered:
            return kept
        return min(kept, (self._answers - (1.0 - SERVED)) / SERVED)


def bound(shares: Sequence[float], requests: int) -> float:
    """What a share seen in several runs is at least, with 95 % confidence; 0 where nothing was seen."""
    count = len(shares)
    mean = sum(shares) / count if count else 0.0
    if count < 2:
        return 0.0 if not count else wilson(mean, requests)
    spread = sqrt(sum((share - mean) ** 2 for share in shares) / (count - 1))
    return min(mean - student_t(count - 1) * spread / sqrt(count), wilson(mean, requests))


def student_t(degrees: int) -> float:
    """One-sided 95 %; beyond the table its usual expansion in 1 / degrees."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def wilson(share: float, count: int) -> float:
    if count == 0:
        return 0.0
    middle = share + Z * Z / (2 * count)
    return (middle - Z * sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)) / (1 + Z * Z / count)


@dataclass(frozen=True, slots=True)
class TrialSetup:
    world: ResolvedPlan
    """Its plan is replaced by the one on trial."""
    source: Callable[[int], Workload]
    """The requests of a run by its number; the same number, the same requests."""
    policy: Policy
    settings: SimSettings
    warm_up_share: float = 0.2
    """Of each run's arrivals, by time, that are not judged: the first meet empty replicas."""
    proven: bool = True
    """See `Evidence`."""


def of_models(trial: TrialSetup, names: Collection[str]) -> TrialSetup:
    def source(run: int) -> Workload:
        load = trial.source(run)
        mine = [place for place, name in enumerate(load.models) if name in names]
        return load.take(np.flatnonzero(np.isin(load.model, mine)))

    return replace(trial, source=source)


def evidence_of(
    trial: TrialSetup,
    plan: Plan,
    runs: Sequence[int],
    said: Callable[[str], None] = lambda _: None,
    far: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evidence, ...]:
    """Run a plan and judge every model that was promised something and asked for something.

    `far` is told how many of about how many requests were served.
    """
    attained: dict[str, list[float]] = {}
    answered: dict[str, list[float]] = {}
    requests: dict[str, int] = {}
    world = replace(trial.world, plan=plan)
    disagreed: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        said(f"run {place + 1} of {len(runs)}")
        load = trial.source(run)
        before, total = place * len(load), len(runs) * len(load)
        result = simulate(
            world,
            load,
            trial.policy,
            seed=run,
            settings=trial.settings,
            progress=lambda done, _, before=before, total=total: far(before + done, total),  # type: ignore[misc]
        )
        if not place:
            disagreed = _disagreed(world, result, trial.policy)
        warm_up_s = float(load.arrival_s[0]) + trial.warm_up_share * load.span_s
        for model in summarise(result, warm_up_s).models:
            if model.attainment is None or model.slo is None:
                continue
            attained.setdefault(model.model, []).append(model.attainment)
            judged = model.requests - model.outcomes.cancelled
            answered.setdefault(model.model, []).append(1.0 - model.outcomes.refused / max(1, judged))
            requests[model.model] = requests.get(model.model, 0) + judged
    return tuple(
        Evidence(
            name,
            trial.world.slos[name].attainment,
            tuple(shares),
            requests[name],
            tuple(disagreed.get(name, ())),
            tuple(answered[name]),
            trial.proven,
        )
        for name, shares in sorted(attained.items())
    )


def _disagreed(world: ResolvedPlan, result: SimResult, policy: Policy) -> dict[str, list[str]]:
    """By model; what two models share is told of both."""
    disagreed: dict[str, list[str]] = {}
    for each in disagreements(compared(world, result, policy.balance)):
        if each.what != "attainment":
            planned, ran = described(each)
            for name in [name for name in world.slos if each.name.startswith(name)] or list(world.slos):
                text = f"{each.what} of {each.name}: {planned} planned, {ran} ran"
                disagreed.setdefault(name, []).append(text)
    return disagreed


REQUESTS = 400
WARM_UP_SHARE = 0.2
"""Of the arrivals, by time, that are not judged: the first meet empty replicas."""


@dataclass(frozen=True, slots=True)
class PairTrial:
    """Tries pairs of replicas of one model; calling it is an `Estimate` of `plan.search.attain`.

    The pair is a plan of one group; the same requests, in their order, are asked of every pair, nobody is refused.
    The search may think more of a pair than `timing.rates` does, by which it is sent its requests in the end; then it
    is tried at what it will be sent, and the rest counts as missed.
    """

    problem: PlanningProblem
    world: ResolvedPlan
    """Its plan is replaced by each pair's."""
    traffic: Traffic
    policy: Policy
    requests: int = REQUESTS
    seed: int = 0

    def __call__(self, prefill: PlannedReplica, decode: PlannedReplica, rate_per_s: float) -> float:
        ask = next(each for each in self.problem.asks if each.name == self.traffic.model)
        members = (prefill,) if prefill == decode else (prefill, decode)
        template = group_template(self.problem, ask, members, self.problem.codecs[-1])
        if template is None:
            return 0.0
        sent_per_s = min(rate_per_s, self.problem.headroom * _rate(ask, template))
        if not sent_per_s > 0:
            return 0.0
        load = of_traffic([replace(self.traffic, rate_per_s=sent_per_s)], self.requests, self.seed, 1.0)
        world = replace(self.world, plan=pair_plan(self.problem, ask, template, sent_per_s))
        rules = replace(self.policy, admission=False, scaling="none")
        result = simulate(world, load, rules, seed=self.seed, settings=SimSettings())
        warm_up_s = float(load.arrival_s[0]) + WARM_UP_SHARE * load.span_s
        attained = summarise(result, warm_up_s).total.attainment or 0.0
        return attained * sent_per_s / rate_per_s


def _rate(ask: ModelDemand, template: Template) -> float:
    """Requests a second of the model's mix that one copy serves; 0 where a bucket is beyond it."""
    busy = 0.0
    for demand in ask.demands:
        capacity = template.capacity[demand.bucket].closed_per_s
        if not capacity > 0:
            return 0.0
        busy += demand.rate_per_s / ask.rate_per_s / capacity
    return 1.0 / busy


def pair_plan(problem: PlanningProblem, ask: ModelDemand, template: Template, rate_per_s: float) -> Plan:
    machine = machine_of(problem, next(iter(template.machines)))
    assert machine is not None, "a group names machines of its pool"
    rates = [rate_per_s * demand.rate_per_s / ask.rate_per_s for demand in ask.demands]
    return Plan(
        strategy="pair",
        templates=(template,),
        deployments=(Deployment(template.name, machine.region, 1),),
        buckets=tuple(
            LengthBucket(ask.name, demand.bucket, demand.longest_tokens, rate)
            for demand, rate in zip(ask.demands, rates, strict=True)
        ),
        shares=tuple(
            PlannedShare(template.name, machine.region, demand.bucket, "closed", rate)
            for demand, rate in zip(ask.demands, rates, strict=True)
        ),
        flows=(),
        predictions=(),
        cost_usd_per_h=0.0,
        gap=0.0,
    )
