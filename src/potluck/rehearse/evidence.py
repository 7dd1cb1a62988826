"""SLO attainment of a model in simulated runs, with confidence bounds.

A run is warmed up for a few answer lengths and then judged in batches of several more; requests within a batch share
bursts and queues, batches hardly do. So bounds come from the spread between batches, a_1 ... a_n being their SLO
attainments:

    mean(a) -+ t sd(a) / sqrt(n)            t: one-sided 95 % of Student's t with n - 1 degrees

and are never closer than Wilson's for as many independent requests as were judged, so that a few lucky batches prove
nothing. An objective holds when the lower bound reaches it and, by the same bound, at most 2 % of requests are
refused; it is missed when the upper bound does not reach it. Longer and longer runs are made until either is clear
(that it holds by a wider bound, as repeated looks raise the chance of a false positive), or the limit on requests is
reached.
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
    """SLO attainment of one model in simulation, by batch."""

    model: str
    promised: float  # Target attainment.
    attained: tuple[float, ...]  # Attainment of each batch.
    requests: int  # Judged requests over all batches.
    disagreed: tuple[str, ...] = field(default=(), compare=False)
    """Deviations of the last run from the plan, attainment apart (`sim.results.plan_comparison`)."""
    answered: tuple[float, ...] = ()  # Answered share of each batch; empty without requests.
    left_out: float = 0.0
    """Share of the model's requests that no plan serves: not simulated, and counted as missed."""
    answer_lengths: float = 0.0  # Judged time, in mean answers at the latency of the objective.
    ttft_s: float = 0.0
    tpot_s: float = 0.0  # Means over answered requests, at the planned demand.
    request_class: str = ""  # The request class with the smallest margin; empty where there is one class.

    @property
    def mean(self) -> float:
        """Mean attainment over batches."""
        return self._of_all_requests(sum(self.attained) / len(self.attained) if self.attained else 0.0)

    @property
    def lower(self) -> float:
        """Lower 95 % bound on the attainment; 0 without data."""
        return self._of_all_requests(bounds(self.attained, self.requests)[0])

    def _of_all_requests(self, share: float) -> float:
        """A share of the simulated requests as a share of all, left-out ones included."""
        return share * (1.0 - self.left_out)

    @property
    def answers(self) -> bool:
        """Whether at most the accepted share of requests is refused."""
        return not self.answered or self._answered[0] >= 1.0 - SERVED

    @property
    def _answered(self) -> tuple[float, float]:
        """95 % bounds on the answered share."""
        lower, upper = bounds(self.answered, self.requests)
        return self._of_all_requests(lower), self._of_all_requests(upper)

    @property
    def holds(self) -> bool:
        """Whether the lower bound reaches the target, and hardly any requests are refused."""
        return self.lower >= self.promised and self.answers

    @property
    def long(self) -> bool:
        """Whether the judged time suffices for a steady state; the last batch may be cut short."""
        return self.answer_lengths >= 0.9 * MIN_BATCHES * BATCH_ANSWERS

    @property
    def suffices(self) -> bool:
        """Whether it holds, or would without the requests that no plan serves: no other plan does better."""
        return self.holds or (self.left_out > 0 and replace(self, left_out=0.0).holds)

    @property
    def clear(self) -> bool:
        """Whether it suffices by the wider bound for repeated looks at growing data."""
        evidence = self if self.holds else replace(self, left_out=0.0)
        widened_lower = evidence.mean - REPEATED_LOOKS_FACTOR * (evidence.mean - evidence.lower)
        return evidence.holds and widened_lower >= evidence.promised and len(evidence.attained) >= MIN_BATCHES

    @property
    def misses(self) -> bool:
        """Whether an upper bound is below its target, apart from requests that no plan serves."""
        attained, answered = bounds(self.attained, self.requests)[1], bounds(self.answered, self.requests)[1]
        return attained < self.promised or (bool(self.answered) and answered < 1.0 - SERVED)

    def summary(self, fresh: bool = False, gap_cv: float | None = None) -> Tried:
        """The evidence as the record that a plan file keeps."""
        least_answered, batch_count = min(self.answered, default=1.0), len(self.attained)
        figures = (
            self.promised,
            self.mean,
            self.lower,
            self._of_all_requests(least_answered),
            self.requests,
            batch_count,
            self.answers,
        )
        return Tried(self.model, *figures, fresh, gap_cv, self.request_class)

    @property
    def margin(self) -> float:
        """Distance of the lower bound from the target, relative to the misses that the target allows.

        The lesser of the margins of attainment and answered share; negative below the target.
        """
        attainment_margin = (self.lower - self.promised) / max(1.0 - self.promised, 1e-3)
        if not self.answered:
            return attainment_margin
        return min(attainment_margin, (self._answered[0] - (1.0 - SERVED)) / SERVED)


REPEATED_LOOKS_FACTOR = 1.8  # Widens bounds so that all looks together err about as often as one.
SINGLE_BATCH_FACTOR = 2.0  # Widens bounds from a single batch, whose variance between batches is unknown.


def bounds(shares: Sequence[float], requests: int) -> tuple[float, float]:
    """(lower, upper) one-sided 95 % bounds on a share observed in several batches."""
    count = len(shares)
    if not count:
        return 0.0, 1.0
    mean = sum(shares) / count
    z = Z if count > 1 else SINGLE_BATCH_FACTOR * Z
    lower, upper = wilson(mean, requests, z), 1.0 - wilson(1.0 - mean, requests, z)
    if count > 1:
        standard_deviation = sqrt(sum((share - mean) ** 2 for share in shares) / (count - 1))
        half_width = student_t(count - 1) * standard_deviation / sqrt(count)
        lower, upper = min(lower, mean - half_width), max(upper, mean + half_width)
    return lower, upper


def student_t(degrees: int) -> float:
    """One-sided 95 % quantile of Student's t; beyond the table by its expansion in 1 / degrees."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def wilson(share: float, count: int, z: float = Z) -> float:
    """Wilson's lower bound on a share of `count` independent requests."""
    if count == 0:
        return 0.0
    centre = share + z * z / (2 * count)
    return (centre - z * sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)) / (1 + z * z / count)


WARM_UP_ANSWERS, BATCH_ANSWERS = 3.0, 5.0
"""Length of the warm-up, when replicas are still empty, and of a batch, in answer lengths."""
BATCHES_OF_RUNS = (1, 4, 8, 16, 32, 64)
"""Batches of consecutive runs: the first finds clear misses, the second spans twenty answer lengths."""
MIN_BATCHES = 4  # Before an objective counts as met.
MIN_BATCH_REQUESTS, MIN_ALLOWED_MISSES = 50, 2.0  # Of a batch; misses that the objective allows in it.
FINAL_FACTOR, MAX_FINAL_REQUESTS = (
    8,
    100_000,
)  # Requests of final runs, relative to those of the search, and at most.
MIN_CLASS_SHARE = 1e-3  # Of a model's requests; smaller classes are not judged.
MAX_WARM_UP_SHARE = 0.4  # Of a run whose length is limited by its requests.


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Everything a simulation of a plan needs but the plan: fleet, requests, policy and limits."""

    world: ResolvedPlan  # Its plan is replaced by the simulated one.
    source: Source
    policy: Policy
    settings: SimSettings
    traffic: Mapping[str, Traffic]  # Of the models with demand.
    left_out: Mapping[str, float] = field(default_factory=dict)
    """Share of a model's requests that no plan serves; `source` omits them."""
    most_requests: int = 12_000  # Simulated requests for one plan of one model.
    looks: tuple[int, ...] = BATCHES_OF_RUNS

    @property
    def final(self) -> TrialSetup:
        """The setup for a chosen plan: longer, and without the first short run."""
        max_requests = max(self.most_requests, min(FINAL_FACTOR * self.most_requests, MAX_FINAL_REQUESTS))
        return replace(self, most_requests=max_requests, looks=self.looks[1:] or self.looks)

    def spans_s(self, names: Collection[str]) -> tuple[float, float]:
        """(warm-up, batch) lengths of runs of these models: the longest that each needs, within the request limit."""
        batch_s = warm_up_s = 0.0
        for name in names:
            slo, traffic = self.world.slos[name], self.traffic[name]
            answer_s = answer_length_s(slo, traffic)
            min_requests = max(MIN_BATCH_REQUESTS, MIN_ALLOWED_MISSES / max(1.0 - slo.attainment, 1e-4))
            shares = [share for _, share in traffic.classes if share > 0]
            rarest_share = min([*shares, rest if (rest := 1.0 - sum(shares)) > MIN_CLASS_SHARE else 1.0])
            batch_s = max(
                batch_s, BATCH_ANSWERS * answer_s, min_requests / (traffic.rate_per_s * rarest_share)
            )
            warm_up_s = max(warm_up_s, WARM_UP_ANSWERS * answer_s)
        rate_per_s = sum(self.traffic[name].rate_per_s for name in names)
        max_run_s = self.most_requests / rate_per_s
        warm_up_s = min(warm_up_s, MAX_WARM_UP_SHARE * max_run_s)
        return warm_up_s, min(batch_s, (max_run_s - warm_up_s) / MIN_BATCHES)


def answer_length_s(slo: Slo, traffic: Traffic) -> float:
    """Duration of a mean answer at the latency of the objective."""
    return slo.ttft_s + traffic.mean_output_tokens * slo.tpot_s


@dataclass(slots=True)
class _Samples:
    """Measurements of one model over the runs so far."""

    attained: dict[str, list[float]] = field(default_factory=dict)  # By request class.
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
    report_served: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evidence, ...]:
    """Simulate a plan until it is clear for every model whether it meets its SLO. `names` run together.

    A nonzero `first_run` validates a chosen plan with longer runs (`TrialSetup.final`). `report_served` receives the
    number of served requests and the expected total.
    """
    if first_run:
        trial = trial.final
    models = sorted(trial.traffic if names is None else names)
    samples = {name: _Samples() for name in models if name in trial.world.slos}
    resolved_plan = replace(trial.world, plan=plan.of_models(models))
    warm_up_s, batch_s = trial.spans_s(list(samples))
    simulated_requests, replica_models = 0, None
    evidence: tuple[Evidence, ...] = ()
    for run, batches in enumerate(trial.looks):
        workload = trial.source(first_run + run, models, warm_up_s + batches * batch_s)
        if run > 1 and simulated_requests + len(workload) > trial.most_requests:
            break
        simulated_requests += len(workload)
        replica_models = replica_models or replica_models_of(resolved_plan, workload)
        result = simulate(
            resolved_plan,
            workload,
            trial.policy,
            seed=first_run + run,
            settings=trial.settings,
            progress=report_served,
            replica_models=replica_models,
        )
        for name, model_samples in samples.items():
            _add_run(model_samples, result, name, (warm_up_s, batch_s))
        evidence = tuple(_evidence(trial, name, model_samples) for name, model_samples in samples.items())
        if any(item.misses for item in evidence) or all(item.clear for item in evidence):
            break
    deviations = _deviations(resolved_plan, result, trial.policy, replica_models)
    return tuple(replace(item, disagreed=tuple(deviations.get(item.model, ()))) for item in evidence)


def _add_run(samples: _Samples, result: SimResult, name: str, spans_s: tuple[float, float]) -> None:
    """Add the batches of a run, divided by arrival time after the warm-up."""
    records = result.records
    of_model = records.model == records.models.index(name)
    if not of_model.any():
        return
    verdict = judge(records, result.slos, result.end_s, result.classes)
    begin_s, end_s = float(records.arrival_s[0]), float(records.arrival_s[-1])
    warm_up_s = min(spans_s[0], MAX_WARM_UP_SHARE * (end_s - begin_s))
    count = max(1, round((end_s - begin_s - warm_up_s) / spans_s[1]))
    edges = np.linspace(begin_s + warm_up_s, end_s, count + 1)[1:-1]
    batch = np.searchsorted(edges, records.arrival_s, side="right")
    judged = of_model & verdict.judged & (records.arrival_s >= begin_s + warm_up_s)
    for class_name, of_class in _classes(result):
        for batch_index in range(count):
            in_batch = judged & of_class & (batch == batch_index)
            if total := int(in_batch.sum()):
                met, refused = (
                    int((verdict.met & in_batch).sum()),
                    int((records.outcome[in_batch] == REFUSED).sum()),
                )
                samples.attained.setdefault(class_name, []).append(met / total)
                samples.answered.setdefault(class_name, []).append(1.0 - refused / total)
                samples.requests[class_name] += total
    samples.judged_s += end_s - begin_s - warm_up_s
    answered = judged & (records.outcome == ANSWERED)
    if answered.any():
        samples.ttft_s = float((records.first_token_s - records.arrival_s)[answered].mean())
        tpots = tpot(records)[answered]
        samples.tpot_s = float(np.nanmean(tpots)) if not np.isnan(tpots).all() else 0.0


def _classes(result: SimResult) -> list[tuple[str, NDArray[np.bool_]]]:
    """(class name, mask of its requests) for every request class."""
    labels = result.records.labels
    if labels is None or len(labels.classes) < 2:
        return [("", np.ones(len(result.records), np.bool_))]
    return [(name, labels.request_class == index) for index, name in enumerate(labels.classes)]


def _evidence(trial: TrialSetup, name: str, samples: _Samples) -> Evidence:
    """The evidence of the request class with the smallest margin; each class has its own objective."""
    slo, classes_by_name = trial.world.slos[name], {item.name: item for item in trial.policy.classes}
    evidence_of_classes = []
    for class_name in samples.attained or {"": []}:
        class_slo = (
            classes_by_name[class_name].objective(slo) if class_name in classes_by_name else slo
        ) or slo
        evidence = Evidence(
            name,
            class_slo.attainment,
            tuple(samples.attained.get(class_name, ())),
            samples.requests[class_name],
            answered=tuple(samples.answered.get(class_name, ())),
            left_out=trial.left_out.get(name, 0.0),
            answer_lengths=samples.judged_s / answer_length_s(slo, trial.traffic[name]),
            ttft_s=samples.ttft_s,
            tpot_s=samples.tpot_s,
            request_class=class_name,
        )
        evidence_of_classes.append(evidence)
    return min(evidence_of_classes, key=lambda item: item.margin)


def _deviations(
    resolved_plan: ResolvedPlan, result: SimResult, policy: Policy, replica_models: ReplicaModels | None
) -> dict[str, list[str]]:
    """Deviations from the plan by model, as sentences; those of shared resources are listed for every model."""
    deviations_of: dict[str, list[str]] = {}
    for deviation in disagreements(compared(resolved_plan, result, policy.balance, replica_models)):
        if deviation.what != "attainment":
            planned, measured = described(deviation)
            for name in [name for name in resolved_plan.slos if deviation.name.startswith(name)] or list(
                resolved_plan.slos
            ):
                text = f"{deviation.what} of {deviation.name}: {planned} planned, {measured} simulated"
                deviations_of.setdefault(name, []).append(text)
    return deviations_of


PAIR_REQUESTS = 400
WARM_UP_SHARE = 0.2  # Share of the arrival time that is not judged, when replicas are still empty.


@dataclass(frozen=True, slots=True)
class PairTrial:
    """Simulates pairs of replicas of one model; an instance is an `Estimate` of `plan.search.search_templates`.

    The pair is simulated as a plan of one group, always with the same requests and without admission control. Where
    the search rates a pair higher than `timing.replica_rates`, which limits its requests in the end, it is simulated
    at that limit and the rest counts as missed.
    """

    problem: PlanningProblem
    world: ResolvedPlan  # Its plan is replaced by each pair's.
    traffic: Traffic
    policy: Policy
    requests: int = PAIR_REQUESTS
    seed: int = 0

    def __call__(
        self, prefill_replica: PlannedReplica, decode_replica: PlannedReplica, rate_per_s: float
    ) -> float:
        """Share of `rate_per_s` that the pair serves within the objective."""
        demand = next(
            model_demand for model_demand in self.problem.demands if model_demand.name == self.traffic.model
        )
        members = (
            (prefill_replica,) if prefill_replica == decode_replica else (prefill_replica, decode_replica)
        )
        template = group_template(self.problem, demand, members, self.problem.codecs[-1])
        if template is None:
            return 0.0
        sent_per_s = min(rate_per_s, self.problem.headroom * _closed_rate(demand, template))
        if not sent_per_s > 0:
            return 0.0
        workload = of_traffic([replace(self.traffic, rate_per_s=sent_per_s)], self.requests, self.seed, 1.0)
        resolved_plan = replace(self.world, plan=pair_plan(self.problem, demand, template, sent_per_s))
        policy = replace(self.policy, admission=False, scaling="none")
        result = simulate(resolved_plan, workload, policy, seed=self.seed, settings=SimSettings())
        warm_up_s = float(workload.arrival_s[0]) + WARM_UP_SHARE * workload.span_s
        attained = summarise(result, warm_up_s).total.attainment or 0.0
        return attained * sent_per_s / rate_per_s


def _closed_rate(demand: ModelDemand, template: Template) -> float:
    """Requests/s of the model's length mix that one copy serves; 0 if it cannot serve some bucket."""
    busy = 0.0
    for bucket in demand.buckets:
        capacity = template.capacity[bucket.bucket].closed_per_s
        if not capacity > 0:
            return 0.0
        busy += bucket.rate_per_s / demand.rate_per_s / capacity
    return 1.0 / busy


def pair_plan(problem: PlanningProblem, demand: ModelDemand, template: Template, rate_per_s: float) -> Plan:
    """A plan of one copy of a group at this rate."""
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
