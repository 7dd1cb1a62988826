"""What simulated runs say of a model's promise, and how sure that is.

A run is warmed up for a few answer lengths and then judged in batches of several more; requests within a batch share
bursts and queues, batches hardly do. So bounds come from the spread between batches, a_1 ... a_n being the share of
requests within the objective in each:

    mean(a) -+ t sd(a) / sqrt(n)            t: one-sided 95 % of Student's t with n - 1 degrees

and are never closer than Wilson's for as many independent requests as were judged, or a few lucky batches would prove
anything. A promise holds when the lower bound reaches it, and when no more than a fiftieth is refused, by the same
bound; it is missed when the upper bound does not reach it. Ever longer runs are made until one of both is clear (that
it holds, by a wider bound: who looks often is lucky some time), or as many requests were simulated as may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

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
from potluck.core.values.types import Slo, Traffic
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.templates.group import group_template
from potluck.plan.timing.named_machines import machine_of
from potluck.rehearse.request_sources import Source
from potluck.runtime.replica_models import ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import judge, summarise, tpot
from potluck.sim.results.plan_comparison import SERVED, compared, described, disagreements
from potluck.sim.results.records import ANSWERED, REFUSED, SimResult
from potluck.sim.run import replica_models_of, simulate
from potluck.sim.sim_settings import SimSettings

Z = 1.6449  # One-sided 95 % of the normal law.
# fmt: off
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
# fmt: on
"""One-sided 95 % of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Evidence:
    model: str
    promised: float  # Share of requests that the objective must hold for.
    attained: tuple[float, ...]  # Share of the requests of each batch that were in time.
    requests: int  # Judged, over all batches.
    disagreed: tuple[str, ...] = field(default=(), compare=False)
    """What was not as planned in the last run, in words (`sim.results.planned`), the objective apart."""
    answered: tuple[float, ...] = ()  # Share of each batch; empty where nobody asked.
    left_out: float = 0.0
    """Share of the model's requests that no plan serves: they were not simulated, and count as missed."""
    answer_lengths: float = 0.0  # Judged time, in answers of mean length as slow as the objective allows.
    ttft_s: float = 0.0
    tpot_s: float = 0.0  # Means of what was answered, at the demand there is.
    request_class: str = ""  # Of the model's requests, the class that is worst off; empty where there is one.

    @property
    def mean(self) -> float:
        return self._of_all(sum(self.attained) / len(self.attained) if self.attained else 0.0)

    @property
    def lower(self) -> float:
        """What the share is at least, with 95 % confidence; 0 where nothing was seen."""
        return self._of_all(bounds(self.attained, self.requests)[0])

    def _of_all(self, share: float) -> float:
        return share * (1.0 - self.left_out)

    @property
    def answers(self) -> bool:
        """Whether hardly anybody is turned away."""
        return not self.answered or self._answered[0] >= 1.0 - SERVED

    @property
    def _answered(self) -> tuple[float, float]:
        lower, upper = bounds(self.answered, self.requests)
        return self._of_all(lower), self._of_all(upper)

    @property
    def holds(self) -> bool:
        return self.lower >= self.promised and self.answers

    @property
    def long(self) -> bool:
        """Whether as many answers came after one another as a steady state needs; the last batch may be cut."""
        return self.answer_lengths >= 0.9 * LEAST_BATCHES * BATCH

    @property
    def suffices(self) -> bool:
        """Whether it holds, or would if requests that no plan serves were not asked: no other plan does better."""
        return self.holds or (self.left_out > 0 and replace(self, left_out=0.0).holds)

    @property
    def clear(self) -> bool:
        """Whether it suffices also by a wider bound: of several looks each has its chance to be a lucky one."""
        seen = self if self.holds else replace(self, left_out=0.0)
        least = seen.mean - LUCKY * (seen.mean - seen.lower)
        return seen.holds and least >= seen.promised and len(seen.attained) >= LEAST_BATCHES

    @property
    def misses(self) -> bool:
        """Whether more runs would not help, what no plan serves apart."""
        attained, answered = bounds(self.attained, self.requests)[1], bounds(self.answered, self.requests)[1]
        return attained < self.promised or (bool(self.answered) and answered < 1.0 - SERVED)

    def told(self, fresh: bool = False, gap_cv: float | None = None) -> Tried:
        least, runs = min(self.answered, default=1.0), len(self.attained)
        seen = (self.promised, self.mean, self.lower, self._of_all(least), self.requests, runs, self.answers)
        return Tried(self.model, *seen, fresh, gap_cv, self.request_class)

    @property
    def margin(self) -> float:
        """How far the bound is above the promise, in units of what the promise leaves open; negative below.

        The same of answers, if that is less.
        """
        kept = (self.lower - self.promised) / max(1.0 - self.promised, 1e-3)
        if not self.answered:
            return kept
        return min(kept, (self._answered[0] - (1.0 - SERVED)) / SERVED)


LUCKY = 1.8  # Times as wide: then all looks together are wrong about as often as one.
ONE_BATCH_Z = 2.0  # Times as wide are bounds from a single batch, of which nobody knows how batches differ.


def bounds(shares: Sequence[float], requests: int) -> tuple[float, float]:
    """What a share seen in several batches is at least and at most, each with 95 % confidence."""
    count = len(shares)
    if not count:
        return 0.0, 1.0
    mean = sum(shares) / count
    z = Z if count > 1 else ONE_BATCH_Z * Z
    lower, upper = wilson(mean, requests, z), 1.0 - wilson(1.0 - mean, requests, z)
    if count > 1:
        spread = sqrt(sum((share - mean) ** 2 for share in shares) / (count - 1))
        wide = student_t(count - 1) * spread / sqrt(count)
        lower, upper = min(lower, mean - wide), max(upper, mean + wide)
    return lower, upper


def student_t(degrees: int) -> float:
    """One-sided 95 %; beyond the table its usual expansion in 1 / degrees."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def wilson(share: float, count: int, z: float = Z) -> float:
    if count == 0:
        return 0.0
    middle = share + z * z / (2 * count)
    return (middle - z * sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)) / (1 + z * z / count)


WARM_UP, BATCH, LOOKS = 3.0, 5.0, (1, 4, 8, 16, 32, 64)
"""In answer lengths: what is not judged of a run, since the first meet empty replicas, and a batch. And the batches
of one run after another: the first shows who misses by far, the second is twenty answer lengths.
"""
LEAST_BATCHES = 4  # Before a promise is called held.
LEAST_REQUESTS, LEAST_LATE = 50, 2.0  # Of a batch, and of those the promise lets be late.
FINAL, MOST_FINAL = 8, 100_000
LEAST_SHARE = 1e-3  # Of a model's requests, what a class has that counts.
MOST_WARM_UP = 0.4  # Of a run: where there are too many requests for its whole length.


@dataclass(frozen=True, slots=True)
class TrialSetup:
    world: ResolvedPlan  # Its plan is replaced by the one on trial.
    source: Source
    policy: Policy
    settings: SimSettings
    traffic: Mapping[str, Traffic]  # Of the models that are asked for something.
    left_out: Mapping[str, float] = field(default_factory=dict)
    """Share of a model's requests that no plan serves, and `source` does not have."""
    most_requests: int = 12_000  # Of one plan of one model.
    looks: tuple[int, ...] = LOOKS

    @property
    def final(self) -> TrialSetup:
        """The same, for a plan that was chosen: for longer, and no look at the beginning alone."""
        most = max(self.most_requests, min(FINAL * self.most_requests, MOST_FINAL))
        return replace(self, most_requests=most, looks=self.looks[1:] or self.looks)

    def spans_s(self, names: Collection[str]) -> tuple[float, float]:
        """(warm-up, batch) of runs of these models: the longest of theirs, as far as so many requests go."""
        batch_s = warm_up_s = 0.0
        for name in names:
            slo, asked = self.world.slos[name], self.traffic[name]
            answer_s = answer_length_s(slo, asked)
            least = max(LEAST_REQUESTS, LEAST_LATE / max(1.0 - slo.attainment, 1e-4))
            shares = [share for _, share in asked.classes if share > 0]
            rarest = min([*shares, rest if (rest := 1.0 - sum(shares)) > LEAST_SHARE else 1.0])
            batch_s = max(batch_s, BATCH * answer_s, least / (asked.rate_per_s * rarest))
            warm_up_s = max(warm_up_s, WARM_UP * answer_s)
        rate_per_s = sum(self.traffic[name].rate_per_s for name in names)
        most_s = self.most_requests / rate_per_s
        warm_up_s = min(warm_up_s, MOST_WARM_UP * most_s)
        return warm_up_s, min(batch_s, (most_s - warm_up_s) / LEAST_BATCHES)


def answer_length_s(slo: Slo, traffic: Traffic) -> float:
    """Of a mean answer, as slow as may be."""
    return slo.ttft_s + traffic.mean_output_tokens * slo.tpot_s


@dataclass(slots=True)
class _Samples:
    """What runs have shown of one model so far."""

    attained: dict[str, list[float]] = field(default_factory=dict)  # Of each class of its requests.
    answered: dict[str, list[float]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    judged_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0


def evidence_of(
    trial: TrialSetup,
    plan: Plan,
    names: Collection[str] | None = None,
    first_run: int = 0,
    far: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evidence, ...]:
    """Run a plan until it is clear of every model whether it holds. `names` share what they run on: one run for all.

    A later `first_run` proves what was chosen, and takes longer (`TrialSetup.final`). `far` is told how many of
    about how many requests were served.
    """
    if first_run:
        trial = trial.final
    asked = sorted(trial.traffic if names is None else names)
    samples = {name: _Samples() for name in asked if name in trial.world.slos}
    resolved_plan = replace(trial.world, plan=plan.of_models(asked))
    warm_up_s, batch_s = trial.spans_s(list(samples))
    spent, replica_models = 0, None
    shown: tuple[Evidence, ...] = ()
    for look, batches in enumerate(trial.looks):
        workload = trial.source(first_run + look, asked, warm_up_s + batches * batch_s)
        if look > 1 and spent + len(workload) > trial.most_requests:
            break
        spent += len(workload)
        replica_models = replica_models or replica_models_of(resolved_plan, workload)
        result = simulate(
            resolved_plan,
            workload,
            trial.policy,
            seed=first_run + look,
            settings=trial.settings,
            progress=far,
            replica_models=replica_models,
        )
        for name, mine in samples.items():
            _add(mine, result, name, (warm_up_s, batch_s))
        shown = tuple(_evidence(trial, name, mine) for name, mine in samples.items())
        if any(item.misses for item in shown) or all(item.clear for item in shown):
            break
    disagreed = _disagreed(resolved_plan, result, trial.policy, replica_models)
    return tuple(replace(item, disagreed=tuple(disagreed.get(item.model, ()))) for item in shown)


def _add(samples: _Samples, result: SimResult, name: str, spans_s: tuple[float, float]) -> None:
    """Count a run's batches: by when requests arrived, after the warm-up; the last may be a little longer."""
    records = result.records
    mine = records.model == records.models.index(name)
    if not mine.any():
        return
    verdict = judge(records, result.slos, result.end_s, result.classes)
    begin_s, end_s = float(records.arrival_s[0]), float(records.arrival_s[-1])
    warm_up_s = min(spans_s[0], MOST_WARM_UP * (end_s - begin_s))
    count = max(1, round((end_s - begin_s - warm_up_s) / spans_s[1]))
    edges = np.linspace(begin_s + warm_up_s, end_s, count + 1)[1:-1]
    batch = np.searchsorted(edges, records.arrival_s, side="right")
    judged = mine & verdict.judged & (records.arrival_s >= begin_s + warm_up_s)
    for kind, own in _classes(result):
        for place in range(count):
            here = judged & own & (batch == place)
            if total := int(here.sum()):
                met, refused = int((verdict.met & here).sum()), int((records.outcome[here] == REFUSED).sum())
                samples.attained.setdefault(kind, []).append(met / total)
                samples.answered.setdefault(kind, []).append(1.0 - refused / total)
                samples.requests[kind] += total
    samples.judged_s += end_s - begin_s - warm_up_s
    answered = judged & (records.outcome == ANSWERED)
    if answered.any():
        samples.ttft_s = float((records.first_token_s - records.arrival_s)[answered].mean())
        paced = tpot(records)[answered]
        samples.tpot_s = float(np.nanmean(paced)) if not np.isnan(paced).all() else 0.0


def _classes(result: SimResult) -> list[tuple[str, NDArray[np.bool_]]]:
    """Every class of requests, with who is in it."""
    labels = result.records.labels
    if labels is None or len(labels.classes) < 2:
        return [("", np.ones(len(result.records), np.bool_))]
    return [(name, labels.request_class == place) for place, name in enumerate(labels.classes)]


def _evidence(trial: TrialSetup, name: str, samples: _Samples) -> Evidence:
    """Of the class that is worst off: each has its own objective, and a small one counts as much as the rest."""
    slo, known = trial.world.slos[name], {item.name: item for item in trial.policy.classes}
    shown = []
    for kind in samples.attained or {"": []}:
        promised = (known[kind].objective(slo) if kind in known else slo) or slo
        evidence = Evidence(
            name,
            promised.attainment,
            tuple(samples.attained.get(kind, ())),
            samples.requests[kind],
            answered=tuple(samples.answered.get(kind, ())),
            left_out=trial.left_out.get(name, 0.0),
            answer_lengths=samples.judged_s / answer_length_s(slo, trial.traffic[name]),
            ttft_s=samples.ttft_s,
            tpot_s=samples.tpot_s,
            request_class=kind,
        )
        shown.append(evidence)
    return min(shown, key=lambda item: item.margin)


def _disagreed(
    resolved_plan: ResolvedPlan, result: SimResult, policy: Policy, replica_models: ReplicaModels | None
) -> dict[str, list[str]]:
    """By model; what two models share is told of both."""
    disagreed: dict[str, list[str]] = {}
    for deviation in disagreements(compared(resolved_plan, result, policy.balance, replica_models)):
        if deviation.what != "attainment":
            planned, ran = described(deviation)
            for name in [name for name in resolved_plan.slos if deviation.name.startswith(name)] or list(
                resolved_plan.slos
            ):
                text = f"{deviation.what} of {deviation.name}: {planned} planned, {ran} ran"
                disagreed.setdefault(name, []).append(text)
    return disagreed


REQUESTS = 400
WARM_UP_SHARE = 0.2  # Of the arrivals, by time, that are not judged: the first meet empty replicas.


@dataclass(frozen=True, slots=True)
class PairTrial:
    """Tries pairs of replicas of one model; calling it is an `Estimate` of `plan.search.attain`.

    The pair is a plan of one group; the same requests, in their order, are asked of every pair, nobody is refused.
    The search may think more of a pair than `timing.rates` does, by which it is sent its requests in the end; then it
    is tried at what it will be sent, and the rest counts as missed.
    """

    problem: PlanningProblem
    world: ResolvedPlan  # Its plan is replaced by each pair's.
    traffic: Traffic
    policy: Policy
    requests: int = REQUESTS
    seed: int = 0

    def __call__(
        self, prefill_replica: PlannedReplica, decode_replica: PlannedReplica, rate_per_s: float
    ) -> float:
        demand = next(
            model_demand for model_demand in self.problem.demands if model_demand.name == self.traffic.model
        )
        members = (
            (prefill_replica,) if prefill_replica == decode_replica else (prefill_replica, decode_replica)
        )
        template = group_template(self.problem, demand, members, self.problem.codecs[-1])
        if template is None:
            return 0.0
        sent_per_s = min(rate_per_s, self.problem.headroom * _rate(demand, template))
        if not sent_per_s > 0:
            return 0.0
        workload = of_traffic([replace(self.traffic, rate_per_s=sent_per_s)], self.requests, self.seed, 1.0)
        resolved_plan = replace(self.world, plan=pair_plan(self.problem, demand, template, sent_per_s))
        policy = replace(self.policy, admission=False, scaling="none")
        result = simulate(resolved_plan, workload, policy, seed=self.seed, settings=SimSettings())
        warm_up_s = float(workload.arrival_s[0]) + WARM_UP_SHARE * workload.span_s
        attained = summarise(result, warm_up_s).total.attainment or 0.0
        return attained * sent_per_s / rate_per_s


def _rate(demand: ModelDemand, template: Template) -> float:
    """Requests a second of the model's mix that one copy serves; 0 where a bucket is beyond it."""
    busy = 0.0
    for bucket in demand.buckets:
        capacity = template.capacity[bucket.bucket].closed_per_s
        if not capacity > 0:
            return 0.0
        busy += bucket.rate_per_s / demand.rate_per_s / capacity
    return 1.0 / busy


def pair_plan(problem: PlanningProblem, demand: ModelDemand, template: Template, rate_per_s: float) -> Plan:
    machine = machine_of(problem, next(iter(template.machines)))
    assert machine is not None, "a group names machines of its pool"
    rates = [rate_per_s * bucket.rate_per_s / demand.rate_per_s for bucket in demand.buckets]
    return Plan(
        strategy="pair",
        templates=(template,),
        deployments=(Deployment(template.name, machine.region, 1),),
        buckets=tuple(
            LengthBucket(demand.name, bucket.bucket, bucket.longest_tokens, rate)
            for bucket, rate in zip(demand.buckets, rates, strict=True)
        ),
        shares=tuple(
            PlannedShare(template.name, machine.region, bucket.bucket, "closed", rate)
            for bucket, rate in zip(demand.buckets, rates, strict=True)
        ),
        flows=(),
        predictions=(),
        cost_usd_per_h=0.0,
        gap=0.0,
    )
