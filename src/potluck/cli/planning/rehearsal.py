"""Plans tried in simulation: wiring from a spec to a rehearsal, short by default, and how it is shown."""

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


KEPT = {"holds": "holds", "unsure": "is not sure to hold", "misses": "misses"}
"""How a promise fared, in words."""
EVIDENCE = ("model", "promised", "requests", "holds", "left_out", "answer_lengths", "ttft_s", "tpot_s")


def evidence_line(tried: Tried) -> str:
    """What simulation says of one model, with how much it saw."""
    kept = f"{KEPT[tried.verdict]} its {percent(tried.promised)}"
    if tried.verdict == "unsure":
        kept += f" ({percent(tried.at_least, tried.promised)} or more is sure; more runs may tell)"
    if not tried.answers:
        kept += f"; answered {percent(tried.answered)} or more"
    about = [
        *(["fresh runs"] if tried.fresh else []),
        *([f"gaps of CV {tried.gap_cv:g}"] if tried.gap_cv is not None else []),
    ]
    runs = f" ({', '.join(about)})" if about else ""
    attained = f"{percent(tried.attained, tried.promised)} of {tried.requests:,} requests"
    whose = f"{tried.model}'s class {tried.request_class}" if tried.request_class else tried.model
    return f"rehearsed: {whose} in time for {attained}{runs}, {kept}"


def noted(
    plan: Plan, rehearsal: Rehearsal, spec: Spec, problem: PlanningProblem, gap_cv: float | None
) -> Plan:
    """The best plan with what it was seen to do, for whoever reads it later."""
    from potluck.core.values.plan import Rehearsed
    from potluck.plan.explain import expected

    best_plan = rehearsal.best
    shown = tuple(item.told(best_plan.fresh, gap_cv) for item in best_plan.evidence)
    seen_s = {item.model: (item.ttft_s, item.tpot_s) for item in best_plan.evidence if item.ttft_s > 0}
    plan = expected(problem, plan, seen_s)
    return replace(plan, rehearsed=Rehearsed(mark_of_trial(plan, spec, problem), shown))


def known_of(plan: Plan, spec: Spec, problem: PlanningProblem) -> tuple[Tried, ...]:
    """What a plan brings along of how it fared with this very spec; nothing where it was tried with another one."""
    message = plan.rehearsed
    return message.models if message is not None and message.of == mark_of_trial(plan, spec, problem) else ()


def mark_of_trial(plan: Plan, spec: Spec, problem: PlanningProblem) -> str:
    """Of all that decides how a rehearsal of a plan ends, seeds and lengths of runs apart."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.values.plan import mark_of, plan_from_json, plan_to_json

    # As it is read from a file: there 3 requests a second have become 3.0.
    bare = plan_from_json(plan_to_json(replace(plan, rehearsed=None)))
    resolved_plan = scene_of(SimulationInputs(spec, problem, bare))
    return mark_of(repr((resolved_plan, tuple(model.traffic for model in spec.models), spec.policy)))


MOST_LINES = 6
SHORT_S, SHORT_PLAN_S = 30.0, 5.0
"""CPU-seconds after which a short rehearsal begins no further plan; those that each solve takes at most."""
LONG_REQUESTS = 100_000
"""Of one plan of one model, with --rehearse."""
Said = Callable[[str], None]
Far = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """The options of a rehearsal. None leaves it to the kind of rehearsal, short or long."""

    rehearse: bool = False
    """Long: more plans and more requests of each, with a proof in fresh runs."""
    cv: float | None = None
    requests: int | None = None
    attainment: str = "closed"
    averages: bool = False
    """None at all."""


cv_option = option("--cv", type=float, help="Variation of a rehearsal's gaps: 1 is Poisson, above it bursts.")
requests_option = option(
    "--requests", type=click.IntRange(min=100), help="Simulated of each model, at most, to judge one plan."
)
averages_option = option("--averages", is_flag=True, help="Plan on averages alone: no short rehearsal.")


rehearsal_options = option_group(
    option("--rehearse", is_flag=True, help="Try more plans, for longer, and prove the best in fresh runs."),
    averages_option,
    option(
        "--attainment",
        type=click.Choice(["closed", "simulated"]),
        default="closed",
        help="How pairs of a pool are judged.",
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
    far: Far = lambda done, total: None,
    seen: dict[object, Evidence] | None = None,
) -> Rehearsal | None:
    """The rehearsal that the options ask for; None without one, or where nothing is asked of the fleet.

    `seen` is what trials of the same spec have shown before.
    """
    if rehearsal_options.averages or not any(demand.rate_per_s > 0 for demand in factory.problem.asks):
        return None
    if not rehearsal_options.rehearse and outcome.plan.fraction < 1:
        return None
    from potluck.rehearse.rehearsal import RehearsalRules, rehearse

    factory = factory.settled(outcome.plan)
    trial = trial_of(spec, factory.problem, outcome.plan, rehearsal_options, settings.seed)
    began_s, cv = time.process_time(), 1.0 if rehearsal_options.cv is None else rehearsal_options.cv
    rules = RehearsalRules(cv=cv, enough=lambda: time.process_time() - began_s > SHORT_S)
    if rehearsal_options.rehearse:
        rules = RehearsalRules(60, 16, 10 * LONG_REQUESTS, fresh=True, cv=cv)
    else:
        settings = replace(settings, time_limit_s=min(settings.time_limit_s, SHORT_PLAN_S))
    return rehearse(factory, planner, settings, judge_of(trial, far), rules, outcome, seen)


def judge_of(trial: TrialSetup, far: Far = lambda done, total: None) -> Judge:
    from potluck.rehearse.evidence import evidence_of

    return lambda plan, names, first_run: evidence_of(trial, plan, names, first_run, far)


def rehearsing(planner: Planner, spec: Spec) -> Planner:
    """The planner whose plans are the cheapest that hold in a short rehearsal; closest, where none does."""

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        outcome = planner(factory, settings)
        if not outcome.plan.deployments:
            return outcome
        now, settings = spec_now(spec, factory.problem), replace(settings, start_s=None)
        result = rehearsed(now, factory, outcome, planner, settings, RehearsalOptions())
        if result is None:
            return outcome
        best_outcome = result.outcome
        return replace(best_outcome, plan=noted(best_outcome.plan, result, now, factory.problem, None))

    return planned


def spec_now(spec: Spec, problem: PlanningProblem) -> Spec:
    """The spec with the nodes, links, rates and lengths that there are after what happened."""
    asks = {demand.name: demand for demand in problem.asks}
    models = tuple(
        replace(model, traffic=_traffic_now(model.traffic, asks[model.name])) if model.name in asks else model
        for model in spec.models
    )
    return replace(spec, models=models, regions=problem.regions, links=problem.links, pool=problem.pool)


def _traffic_now(traffic: Traffic, model_demand: ModelDemand) -> Traffic:
    now = replace(traffic, rate_per_s=model_demand.rate_per_s)
    demands = [demand for demand in model_demand.demands if demand.rate_per_s > 0]
    if not demands or len(demands) < len(model_demand.demands):
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
    """A strategy whose plans hold in a short rehearsal, unless averages are asked for."""
    planner = strategy_of(strategy)
    return planner if averages else rehearsing(planner, spec)


def basis_of_all(averages: bool) -> str:
    """Where what plans of these commands promise comes from."""
    return "proven on averages, not rehearsed" if averages else "each rehearsed in simulation"


def asked_of(options: Mapping[str, Any]) -> RehearsalOptions:
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
                raise InputError(name, "is for a rehearsal; leave --averages out")
    return rehearsal_options


def tried_briefly(
    spec: Spec, problem: PlanningProblem, plan: Plan, said: Said = lambda _: None
) -> tuple[Tried, ...]:
    """What simulation shows of a plan, of what is asked and there now; nothing where nothing is asked."""
    from potluck.rehearse.rehearsal import tried

    spec = spec_now(spec, problem)
    if not any(model.traffic.rate_per_s > 0 for model in spec.models):
        return ()
    said("rehearsing")
    trial = trial_of(spec, problem, plan, RehearsalOptions())
    return tuple(evidence.told() for evidence in tried(judge_of(trial), plan, trial.traffic))


def estimate_of(
    spec: Spec, problem: PlanningProblem, rehearsal_options: RehearsalOptions, seed: int = 0
) -> Estimate | None:
    """What tries pairs of a pool's replicas under `--attainment simulated`; None: the closed form does."""
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
    """How plans of a spec are tried."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.rehearse.evidence import LOOKS, TrialSetup
    from potluck.rehearse.request_sources import PIECES, made_up, recorded
    from potluck.sim.sim_settings import SimSettings as Running

    resolved_plan = scene_of(SimulationInputs(spec, problem, plan))
    traffic = [model.traffic for model in spec.models if model.traffic.rate_per_s > 0]
    traces = _traces(spec, rehearsal_options)
    source = (
        recorded(traces, traffic)
        if traces
        else made_up(traffic, 1.0 if rehearsal_options.cv is None else rehearsal_options.cv, seed)
    )
    shares: dict[str, float] = {}
    if left_out := _left_out(problem):
        resolved_plan = replace(
            resolved_plan, mean_tokens={**resolved_plan.mean_tokens, **_means(problem, left_out)}
        )
        rates = {demand.name: demand.rate_per_s for demand in problem.asks}
        shares = {item.model: max(0.0, 1.0 - rates[item.model] / item.rate_per_s) for item in traffic}
        whole = source
        source = lambda run, names, span_s: _without(whole(run, names, span_s), left_out)  # noqa: E731
    setup = TrialSetup(
        resolved_plan, source, spec.policy, Running(), {item.model: item for item in traffic}, shares
    )
    most = rehearsal_options.requests or (
        LONG_REQUESTS if rehearsal_options.rehearse else setup.most_requests
    )
    return replace(setup, most_requests=most, looks=LOOKS[: PIECES // 2] if traces else LOOKS)


def _traces(spec: Spec, rehearsal_options: RehearsalOptions) -> dict[str, Workload]:
    """The spec's own traces, where they have times and requests enough; everything else is made up."""
    from potluck.cli.common.workloads import WorkloadOptions as Wanted
    from potluck.cli.common.workloads import of_trace
    from potluck.rehearse.request_sources import LEAST_PIECE, PIECES
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
    short = any(len(workload) < PIECES * LEAST_PIECE for workload in traces.values())
    return {} if short and not rehearsal_options.rehearse else traces


def _left_out(problem: PlanningProblem) -> dict[str, list[tuple[int, bool]]]:
    """(longest prompt, whether nothing serves it) of the buckets of models of which the plan leaves some out."""
    return {
        model_demand.name: [
            (demand.longest_tokens, demand.rate_per_s <= 0) for demand in model_demand.demands
        ]
        for model_demand in problem.asks
        if any(demand.rate_per_s <= 0 for demand in model_demand.demands)
    }


def _means(problem: PlanningProblem, names: Collection[str]) -> dict[str, tuple[float, float]]:
    means = {}
    for model_demand in problem.asks:
        if model_demand.name in names and model_demand.rate_per_s > 0:
            prompts = sum(demand.rate_per_s * demand.input_tokens for demand in model_demand.demands)
            answers = sum(demand.rate_per_s * demand.output_tokens for demand in model_demand.demands)
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


def basis_of(rehearsal: Rehearsal | None) -> str:
    """What a proof is about: nothing but averages are ever proven."""
    if rehearsal is None or rehearsal.best.plan.deployments == rehearsal.averages.plan.deployments:
        return "on averages"
    return f"{rehearsal.end if rehearsal.holds else 'closest to holding'}; on averages"


def show_rehearsal(rehearsal: Rehearsal | None, rehearsal_options: RehearsalOptions, plan: Plan) -> None:
    """Every plan that was tried where there were several, and what came of it."""
    if rehearsal is None and not plan.deployments:
        return
    if rehearsal is None:
        short = (
            "" if plan.fraction >= 1 or rehearsal_options.averages else ", as it serves a part of the demand"
        )
        paragraph(f"on averages: what is expected was not rehearsed in simulation{short}.")
        return
    if len(rehearsal.steps) > 1:
        _show_plans(rehearsal)
    best_plan, averages_usd = rehearsal.best, rehearsal.averages.plan.total_usd_per_h
    for item in best_plan.evidence:
        paragraph(f"{evidence_line(item.told(best_plan.fresh, rehearsal_options.cv))}.")
        if item.left_out > 0:
            paragraph(
                f"{percent(item.left_out)} of {item.model}'s requests are served by no plan, and count as missed."
            )
    wrong = dict.fromkeys(line for entry in best_plan.evidence for line in entry.disagreed)
    for line in list(wrong)[:MOST_LINES]:
        paragraph(f"Not as planned: {line}.")
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
            else " --rehearse tries more plans."
        )
        paragraph(f"Warning: no plan{more} held in simulation: {rehearsal.end}. This one {which}.{longer}")
    elif len(rehearsal.steps) > 1:
        was = f"{usd(abs(change))}/h {'more' if change > 0 else 'less'} than"
        was = "as much as" if abs(change) < 0.005 else was
        paragraph(
            f"The plan {rehearsal.end}: {was} the cheapest plan on averages, of {len(rehearsal.steps)} tried."
        )
    click.echo()


def _show_plans(rehearsal: Rehearsal) -> None:
    rows = []
    for rehearsed in rehearsal.steps:
        message = (f"{rehearsed.number}{' fresh' if rehearsed.fresh else ''}", usd(rehearsed.cost_usd_per_h))
        for item in rehearsed.evidence:
            promised = item.promised
            verdict = f"{KEPT[item.told().verdict]} {percent(promised)}"
            refused = "" if item.answers else ", refuses"
            shares = (percent(item.mean, promised), percent(item.lower, promised))
            rows.append((*message, item.model, rehearsed.made[item.model], *shares, f"{verdict}{refused}"))
            message = ("", "")
    table("Rehearsal", ("plan", "USD/h", "model", "made by", "attained", "at least", "objective"), rows)


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
