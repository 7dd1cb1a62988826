"""Rehearsal: plans judged in simulation, from a spec and command options, and how the result is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from click import option

from potluck.cli.common.files import option_group
from potluck.cli.common.render import paragraph, percent, table, usd
from potluck.cli.planning.planning_options import strategy_of
from potluck.core.errors import InputError
from potluck.core.values.types import LengthBin

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Tried
    from potluck.core.values.types import Traffic
    from potluck.plan.problem import ModelDemand, PlanningProblem
    from potluck.plan.search.search_templates import Estimate
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.plan.strategies.template_factory import Planner
    from potluck.rehearse.evidence import Evidence, TrialSetup
    from potluck.rehearse.rehearsal import Judge, Rehearsal
    from potluck.sim.load.workload import Workload
    from potluck.spec.spec_values import Spec


VERDICTS = {"holds": "met", "unsure": "uncertain", "misses": "missed"}
"""How a table says whether an SLO was met."""
EVIDENCE = ("model", "promised", "requests", "holds", "left_out", "answer_lengths", "ttft_s", "tpot_s")


def evidence_line(tried: Tried) -> str:
    """A model's SLO attainment in simulation, with the number of requests and the target."""
    runs = [
        f"target {target(tried.promised)}",
        *(["fresh runs"] if tried.fresh else []),
        *([f"arrival CV {tried.gap_cv:g}"] if tried.gap_cv is not None else []),
    ]
    model = f"{tried.model}, class {tried.request_class}" if tried.request_class else tried.model
    attained = f"{percent(tried.attained, tried.promised)} of {tried.requests:,} simulated requests"
    line = f"{model}: SLO attainment {attained} ({', '.join(runs)})"
    if tried.verdict == "unsure":
        line += f"; 95 % confident of {percent(tried.at_least, tried.promised)} only, more runs may decide"
    elif tried.verdict == "misses":
        line += "; SLO missed"
    if not tried.answers and tried.answered < 1:
        line += f", as only {percent(tried.answered)} of the requests of a run were answered"
    return line


def target(share: float) -> str:
    """`99.5 %`: the share of requests that an SLO asks for."""
    return f"{100 * share:g} %"


def verdict_of(rehearsal: Rehearsal | None, rehearsal_options: RehearsalOptions, plan: Plan) -> str:
    """Whether the plan's SLOs were met in simulation, for its first line."""
    if rehearsal is not None:
        return "SLOs met in simulation" if rehearsal.holds else "SLOs MISSED in simulation"
    short = "" if plan.fraction >= 1 or rehearsal_options.averages else ", as it serves a part of the demand"
    return f"for mean traffic, not simulated{short}"


def evidence_lines(rehearsal: Rehearsal | None, rehearsal_options: RehearsalOptions) -> list[str]:
    """The SLO attainment of every model under the best plan; nothing without a rehearsal."""
    if rehearsal is None:
        return []
    best_plan, lines = rehearsal.best, []
    for item in best_plan.evidence:
        lines.append(evidence_line(item.summary(best_plan.fresh, rehearsal_options.cv)))
        if item.left_out > 0:
            lines.append(
                f"{item.model}: {percent(item.left_out)} of requests unserved by any plan, counted as misses"
            )
    return lines


def with_evidence(
    plan: Plan, rehearsal: Rehearsal, spec: Spec, problem: PlanningProblem, gap_cv: float | None
) -> Plan:
    """The best plan with the SLO attainment that simulation showed, for the plan file."""
    from potluck.core.values.plan import Rehearsed
    from potluck.plan.explain import expected

    best_plan = rehearsal.best
    shown = tuple(item.summary(best_plan.fresh, gap_cv) for item in best_plan.evidence)
    seen_s = {item.model: (item.ttft_s, item.tpot_s) for item in best_plan.evidence if item.ttft_s > 0}
    plan = expected(problem, plan, seen_s)
    return replace(plan, rehearsed=Rehearsed(rehearsal_digest(plan, spec, problem), shown))


def known_evidence(plan: Plan, spec: Spec, problem: PlanningProblem) -> tuple[Tried, ...]:
    """SLO attainment that a plan file has of this very spec; nothing where it was simulated with another one."""
    message = plan.rehearsed
    return (
        message.models if message is not None and message.of == rehearsal_digest(plan, spec, problem) else ()
    )


def rehearsal_digest(plan: Plan, spec: Spec, problem: PlanningProblem) -> str:
    """A digest of the inputs of a rehearsal, apart from seeds and lengths of runs."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.values.plan import mark_of, plan_from_json, plan_to_json

    # As it is read from a file: there 3 requests a second have become 3.0.
    bare = plan_from_json(plan_to_json(replace(plan, rehearsed=None)))
    resolved_plan = scene_of(SimulationInputs(spec, problem, bare))
    return mark_of(repr((resolved_plan, tuple(model.traffic for model in spec.models), spec.policy)))


MAX_DEVIATION_LINES = 6
SHORT_REHEARSAL_CPU_S, SHORT_SOLVE_CPU_S = 30.0, 5.0
"""After this time a short rehearsal starts no further plan; limit of each of its solves."""
LONG_REHEARSAL_MAX_REQUESTS = 100_000
"""Simulated requests per plan and model, with --rehearse."""
ReportStage = Callable[[str], None]
ReportProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """The options of a rehearsal; None takes the default of a short or a long one."""

    rehearse: bool = False
    """Long: more plans, more requests, and fresh runs for the best plan."""
    cv: float | None = None
    requests: int | None = None
    attainment: str = "closed"
    averages: bool = False
    """No simulation: plan for mean traffic."""


cv_option = option(
    "--cv", type=float, help="Coefficient of variation of simulated inter-arrival times; 1: Poisson."
)
requests_option = option(
    "--requests", type=click.IntRange(min=100), help="Simulated requests per plan and model, at most."
)
averages_option = option("--averages", is_flag=True, help="Plan for mean traffic only; skip the simulation.")


rehearsal_options = option_group(
    option(
        "--rehearse",
        is_flag=True,
        help="Simulate more plans for longer, and the best one again with fresh requests.",
    ),
    averages_option,
    option(
        "--attainment",
        type=click.Choice(["closed", "simulated"]),
        default="closed",
        help="With `pool:`: estimate the SLO attainment of pairs in closed form, or simulate them.",
    ),
    cv_option,
    requests_option,
)


def rehearsed(
    spec: Spec,
    factory: TemplateFactory,
    outcome: PlanOutcome,
    planner: Planner,
    settings: SolveSettings,
    rehearsal_options: RehearsalOptions,
    report_progress: ReportProgress = lambda done, total: None,
    seen: dict[object, Evidence] | None = None,
) -> Rehearsal | None:
    """The rehearsal that the options ask for; None with --averages, without demand, or for a part of the demand.

    `seen` caches evidence of the same spec between calls.
    """
    if rehearsal_options.averages or not any(demand.rate_per_s > 0 for demand in factory.problem.demands):
        return None
    if not rehearsal_options.rehearse and outcome.plan.fraction < 1:
        return None
    from potluck.rehearse.rehearsal import RehearsalRules, rehearse

    factory = factory.with_formats_of(outcome.plan)
    trial = trial_of(spec, factory.problem, outcome.plan, rehearsal_options, settings.seed)
    began_s, cv = time.process_time(), 1.0 if rehearsal_options.cv is None else rehearsal_options.cv
    rules = RehearsalRules(cv=cv, enough=lambda: time.process_time() - began_s > SHORT_REHEARSAL_CPU_S)
    if rehearsal_options.rehearse:
        rules = RehearsalRules(60, 16, 10 * LONG_REHEARSAL_MAX_REQUESTS, fresh=True, cv=cv)
    else:
        settings = replace(settings, time_limit_s=min(settings.time_limit_s, SHORT_SOLVE_CPU_S))
    return rehearse(factory, planner, settings, judge_of(trial, report_progress), rules, outcome, seen)


def judge_of(trial: TrialSetup, report_progress: ReportProgress = lambda done, total: None) -> Judge:
    from potluck.rehearse.evidence import evidence_of

    return lambda plan, names, first_run: evidence_of(trial, plan, names, first_run, report_progress)


def rehearsing(planner: Planner, spec: Spec) -> Planner:
    """A planner that returns the cheapest plan that meets its SLOs in a short rehearsal, else the closest."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        outcome = planner(factory, settings)
        if not outcome.plan.deployments:
            return outcome
        now, settings = current_spec(spec, factory.problem), replace(settings, start_s=None)
        result = rehearsed(now, factory, outcome, planner, settings, RehearsalOptions())
        if result is None:
            return outcome
        best_outcome = result.outcome
        return replace(
            best_outcome, plan=with_evidence(best_outcome.plan, result, now, factory.problem, None)
        )

    return planned


def current_spec(spec: Spec, problem: PlanningProblem) -> Spec:
    """The spec with the current nodes, links, rates and lengths of a problem."""
    asks = {demand.name: demand for demand in problem.demands}
    models = tuple(
        replace(model, traffic=_traffic_now(model.traffic, asks[model.name])) if model.name in asks else model
        for model in spec.models
    )
    return replace(spec, models=models, regions=problem.regions, links=problem.links, pool=problem.pool)


def _traffic_now(traffic: Traffic, model_demand: ModelDemand) -> Traffic:
    now = replace(traffic, rate_per_s=model_demand.rate_per_s)
    demands = [demand for demand in model_demand.buckets if demand.rate_per_s > 0]
    if not demands or len(demands) < len(model_demand.buckets):
        return now
    bins = tuple(
        LengthBin(each.input_tokens, each.output_tokens, each.rate_per_s / model_demand.rate_per_s)
        for each in demands
    )
    means = replace(now, lengths=bins)
    pairs = (
        (means.mean_input_tokens, now.mean_input_tokens),
        (means.mean_output_tokens, now.mean_output_tokens),
    )
    # Within a little the spec's own lengths are those that were planned for.
    return means if any(abs(mean / own - 1) > 0.02 for mean, own in pairs) else now


def planner_of(strategy: str, spec: Spec, averages: bool) -> Planner:
    """A strategy whose plans meet their SLOs in a short rehearsal, unless `averages`."""
    planner = strategy_of(strategy)
    return planner if averages else rehearsing(planner, spec)


def simulation_basis(averages: bool) -> str:
    """Whether the plans of a table were simulated."""
    return "for mean traffic, not simulated" if averages else "each checked in simulation"


def rehearsal_options_of(options: Mapping[str, Any]) -> RehearsalOptions:
    rehearsal_options = RehearsalOptions(**options)
    if rehearsal_options.cv is not None and not rehearsal_options.cv >= 0:
        raise InputError("--cv", f"must not be negative, is {rehearsal_options.cv:g}")
    if rehearsal_options.averages:
        given = {
            "--rehearse": rehearsal_options.rehearse,
            "--cv": rehearsal_options.cv,
            "--requests": rehearsal_options.requests,
        }
        for name, value in given.items():
            if value not in (None, False):
                raise InputError(name, "is for simulated plans; leave --averages out")
    return rehearsal_options


def simulated_briefly(
    spec: Spec, problem: PlanningProblem, plan: Plan, report_stage: ReportStage = lambda _: None
) -> tuple[Tried, ...]:
    """SLO attainment of a plan in a short simulation of the current problem; nothing without demand."""
    from potluck.rehearse.rehearsal import tried

    spec = current_spec(spec, problem)
    if not any(model.traffic.rate_per_s > 0 for model in spec.models):
        return ()
    report_stage("simulating the plan")
    trial = trial_of(spec, problem, plan, RehearsalOptions())
    return tuple(evidence.summary() for evidence in tried(judge_of(trial), plan, trial.traffic))


def estimate_of(
    spec: Spec, problem: PlanningProblem, rehearsal_options: RehearsalOptions, seed: int = 0
) -> Estimate | None:
    """The simulator of replica pairs for `--attainment simulated`; None: closed form."""
    if rehearsal_options.attainment == "closed":
        return None
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.values.plan import Plan
    from potluck.plan.strategies.pool_strategy import require_pool
    from potluck.rehearse.evidence import PairTrial

    try:
        demand = require_pool(problem)
    except InputError as error:
        raise InputError("--attainment", f"simulated is for groups of a pool: {error.problem}") from error
    resolved_plan = scene_of(SimulationInputs(spec, problem, Plan("none", (), (), (), (), (), (), 0.0, 0.0)))
    return PairTrial(problem, resolved_plan, spec.model(demand.name).traffic, spec.policy, seed=seed)


def trial_of(
    spec: Spec, problem: PlanningProblem, plan: Plan, rehearsal_options: RehearsalOptions, seed: int = 0
) -> TrialSetup:
    """How plans of a spec are simulated: resolved plan, request source and limits."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.rehearse.evidence import BATCHES_OF_RUNS, TrialSetup
    from potluck.rehearse.request_sources import TRACE_PIECES, generated, recorded
    from potluck.sim.sim_settings import SimSettings as Running

    resolved_plan = scene_of(SimulationInputs(spec, problem, plan))
    traffic = [model.traffic for model in spec.models if model.traffic.rate_per_s > 0]
    traces = _traces(spec, rehearsal_options)
    source = (
        recorded(traces, traffic)
        if traces
        else generated(traffic, 1.0 if rehearsal_options.cv is None else rehearsal_options.cv, seed)
    )
    shares: dict[str, float] = {}
    if left_out := _left_out(problem):
        resolved_plan = replace(
            resolved_plan, mean_tokens={**resolved_plan.mean_tokens, **_means(problem, left_out)}
        )
        rates = {demand.name: demand.rate_per_s for demand in problem.demands}
        shares = {item.model: max(0.0, 1.0 - rates[item.model] / item.rate_per_s) for item in traffic}
        whole = source
        source = lambda run, names, span_s: _without(whole(run, names, span_s), left_out)  # noqa: E731
    setup = TrialSetup(
        resolved_plan, source, spec.policy, Running(), {item.model: item for item in traffic}, shares
    )
    most = rehearsal_options.requests or (
        LONG_REHEARSAL_MAX_REQUESTS if rehearsal_options.rehearse else setup.most_requests
    )
    return replace(
        setup, most_requests=most, looks=BATCHES_OF_RUNS[: TRACE_PIECES // 2] if traces else BATCHES_OF_RUNS
    )


def _traces(spec: Spec, rehearsal_options: RehearsalOptions) -> dict[str, Workload]:
    """The spec's own traces that are long enough to replay; requests of other models are synthetic."""
    from potluck.cli.common.workloads import WorkloadOptions as Wanted
    from potluck.cli.common.workloads import of_trace
    from potluck.rehearse.request_sources import MIN_PIECE_REQUESTS, TRACE_PIECES
    from potluck.spec.traces import load_trace

    traces = {}
    for model in spec.models:
        trace = None if model.trace is None else load_trace(model.trace, blocks=True)
        if (
            trace is not None
            and trace.span_s > 0
            and rehearsal_options.cv is None
            and model.traffic.rate_per_s > 0
        ):
            traces[model.name] = of_trace(trace, model.name, Wanted())
    short = any(len(workload) < TRACE_PIECES * MIN_PIECE_REQUESTS for workload in traces.values())
    return {} if short and not rehearsal_options.rehearse else traces


def _left_out(problem: PlanningProblem) -> dict[str, list[tuple[int, bool]]]:
    """(longest prompt, whether no template serves it) of each bucket, for models that are served in part."""
    return {
        model_demand.name: [
            (demand.longest_tokens, demand.rate_per_s <= 0) for demand in model_demand.buckets
        ]
        for model_demand in problem.demands
        if any(demand.rate_per_s <= 0 for demand in model_demand.buckets)
    }


def _means(problem: PlanningProblem, names: Collection[str]) -> dict[str, tuple[float, float]]:
    means = {}
    for model_demand in problem.demands:
        if model_demand.name in names and model_demand.rate_per_s > 0:
            prompts = sum(demand.rate_per_s * demand.input_tokens for demand in model_demand.buckets)
            answers = sum(demand.rate_per_s * demand.output_tokens for demand in model_demand.buckets)
            means[model_demand.name] = (prompts / model_demand.rate_per_s, answers / model_demand.rate_per_s)
    return means


def _without(workload: Workload, left_out: Mapping[str, Sequence[tuple[int, bool]]]) -> Workload:
    import numpy as np

    kept = np.ones(len(workload), bool)
    for place, name in enumerate(workload.models):
        if name in left_out:
            edges, gone = zip(*left_out[name], strict=True)
            bucket = np.minimum(np.searchsorted(edges, workload.prompt_tokens), len(edges) - 1)
            kept &= (workload.model != place) | ~np.array(gone)[bucket]
    return workload.take(np.flatnonzero(kept))


def show_rehearsal(rehearsal: Rehearsal | None, rehearsal_options: RehearsalOptions) -> None:
    """The plans that were simulated where there were several, and how the chosen one was found."""
    if rehearsal is None:
        return
    if len(rehearsal.steps) > 1:
        _show_plans(rehearsal)
    best_plan, averages_usd = rehearsal.best, rehearsal.averages.plan.total_usd_per_h
    deviations = dict.fromkeys(line for entry in best_plan.evidence for line in entry.disagreed)
    for line in list(deviations)[:MAX_DEVIATION_LINES]:
        paragraph(f"Simulation deviates from the plan: {line}.")
    change = best_plan.cost_usd_per_h - averages_usd
    if not rehearsal.holds:
        dearest = max(rehearsed.cost_usd_per_h for rehearsed in rehearsal.steps)
        more = f" up to {usd(dearest)}/h" if dearest > best_plan.cost_usd_per_h * 1.005 else ""
        which = (
            "is the cheapest of those that came closest" if len(rehearsal.steps) > 1 else "is the only one"
        )
        longer = (
            ""
            if rehearsal_options.rehearse or not rehearsal.end.longer_may_help
            else " --rehearse simulates more plans."
        )
        paragraph(
            f"Warning: no plan{more} met its SLOs in simulation: {rehearsal.end}. This plan {which}.{longer}"
        )
    elif len(rehearsal.steps) > 1:
        difference = f"{usd(abs(change))}/h {'more' if change > 0 else 'less'} than"
        difference = "as much as" if abs(change) < 0.005 else difference
        paragraph(
            f"The chosen plan {rehearsal.end} and costs {difference} the cheapest plan for mean traffic "
            f"({len(rehearsal.steps)} plans simulated)."
        )
    click.echo()


def _show_plans(rehearsal: Rehearsal) -> None:
    rows = []
    for rehearsed in rehearsal.steps:
        plan_cells = (
            f"{rehearsed.number}{' fresh' if rehearsed.fresh else ''}",
            usd(rehearsed.cost_usd_per_h),
        )
        for item in rehearsed.evidence:
            promised = item.promised
            verdict = f"{VERDICTS[item.summary().verdict]}, target {target(promised)}"
            refused = "" if item.answers else ", refusals"
            shares = (percent(item.mean, promised), percent(item.lower, promised))
            rows.append((*plan_cells, item.model, rehearsed.made[item.model], *shares, f"{verdict}{refused}"))
            plan_cells = ("", "")
    heads = ("plan", "USD/h", "model", "source", "SLO attainment", "95 % lower bound", "SLO")
    table("Plans simulated", heads, rows)


def rehearsal_json(rehearsal: Rehearsal | None) -> dict[str, object]:
    """For `--json`; nothing without a rehearsal."""
    if rehearsal is None:
        return {}
    steps = [
        {
            "plan": rehearsed.number,
            **{name: getattr(rehearsed, name) for name in ("fresh", "cost_usd_per_h", "made", "holds")},
            "models": [
                {
                    **{name: getattr(item, name) for name in EVIDENCE},
                    "attained": item.mean,
                    "at_least": item.lower,
                    "answered": sum(item.answered) / max(1, len(item.answered)),
                    "batches": len(item.attained),
                    "disagreed": list(item.disagreed),
                }
                for item in rehearsed.evidence
            ],
        }
        for rehearsed in rehearsal.steps
    ]
    end = rehearsal.end
    return {"rehearsal": {"holds": rehearsal.holds, "ended": end.ending, "reason": end.words, "steps": steps}}
