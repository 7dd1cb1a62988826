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

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan, Tried
    from potluck.plan.problem import PlanningProblem
    from potluck.plan.search.search_templates import Estimate
    from potluck.plan.strategies import PlanOutcome, SolveSettings, TemplateFactory
    from potluck.rehearse.evidence import Evidence, TrialSetup
    from potluck.rehearse.rehearsal import Rehearsal
    from potluck.rehearse.request_sources import Source
    from potluck.sim.load.workload import Workload
    from potluck.spec.spec_values import Spec


KEPT = {"holds": "holds", "unsure": "is not sure to hold", "misses": "misses"}
"""How a promise fared, in words."""
EVIDENCE = ("model", "promised", "runs_kept", "requests", "holds")


def evidence_line(seen: Tried) -> str:
    """What simulation says of one model, with how much it saw."""
    kept = f"{KEPT[seen.verdict]} its {percent(seen.promised)}"
    if seen.verdict == "unsure":
        kept += f" ({percent(seen.at_least, seen.promised)} or more is sure; more runs may tell)"
    if not seen.answers:
        kept += f"; answered {percent(seen.answered)} or more"
    runs = f"{seen.runs} {'fresh ' if seen.fresh else ''}runs" if seen.runs > 1 else "one run"
    if seen.gap_cv is not None:
        runs += f" with gaps of CV {seen.gap_cv:g}"
    attained = f"{percent(seen.attained, seen.promised)} of {seen.requests:,} requests"
    return f"rehearsed: {seen.model} in time for {attained} ({runs}), {kept}"


def noted(
    plan: Plan, rehearsal: Rehearsal | None, spec: Spec, problem: PlanningProblem, gap_cv: float | None
) -> Plan:
    """The plan with what it was seen to do, for whoever reads it later."""
    from potluck.core.values.plan import Rehearsed

    if rehearsal is None:
        return plan
    shown = tuple(item.told(rehearsal.best.fresh, gap_cv) for item in rehearsal.best.evidence)
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
    world = scene_of(SimulationInputs(spec, problem, bare))
    return mark_of(repr((world, tuple(model.traffic for model in spec.models), spec.policy)))


MOST_LINES = 6
SEED_STRIDE = 10_000_000
"""Between the runs of one `--seed` and the next: more than a rehearsal ever numbers."""
RUNS, SHORT_RUNS = 5, 3
SHORT_S, SHORT_PLAN_S, SHORT_ROUNDS = 14.0, 5.0, 8
"""CPU-seconds after which a short rehearsal begins no further round; those that each plan takes at most; rounds."""
Said = Callable[[str], None]
Far = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """The options of a rehearsal. None leaves it to the kind of rehearsal, short or long."""

    rehearse: bool = False
    """Long: the cheapest that holds, with a proof in fresh runs. Short: the first that holds."""
    cv: float | None = None
    requests: int | None = None
    runs: int | None = None
    attainment: str = "closed"
    averages: bool = False
    """None at all."""

    @property
    def of_runs(self) -> int:
        return self.runs or (RUNS if self.rehearse else SHORT_RUNS)


cv_option = option("--cv", type=float, help="Variation of a rehearsal's gaps: 1 is Poisson, above it bursts.")
requests_option = option(
    "--requests", type=click.IntRange(min=100), help="Of each run of a rehearsal; else as many as it takes."
)
averages_option = option("--averages", is_flag=True, help="Plan on averages alone: no short rehearsal.")


rehearsal_options = option_group(
    option("--rehearse", is_flag=True, help="Find the cheapest plan that holds, proven in fresh runs."),
    averages_option,
    option(
        "--attainment",
        type=click.Choice(["closed", "simulated"]),
        default="closed",
        help="How pairs of a pool are judged.",
    ),
    cv_option,
    requests_option,
    option("--runs", type=click.IntRange(2, 1000), help="Per round: else 3, or 5 with --rehearse."),
)


def rehearsed(
    spec: Spec,
    factory: TemplateFactory,
    outcome: PlanOutcome,
    planner: Callable[[TemplateFactory, SolveSettings], PlanOutcome],
    settings: SolveSettings,
    asked: RehearsalOptions,
    far: Far = lambda done, total: None,
) -> Rehearsal | None:
    """The rehearsal that the options ask for; None without one, or where nothing is asked of the fleet.

    A short one begins with the headroom that queueing asks for, and tries without it too."""
    if asked.averages or not any(ask.rate_per_s > 0 for ask in factory.problem.asks):
        return None
    if not asked.rehearse and outcome.plan.fraction < 1:
        return None
    from potluck.rehearse.queueing_margins import margined
    from potluck.rehearse.rehearsal import RehearsalRules, rehearse

    plain = dict.fromkeys((ask.name for ask in factory.problem.asks), 1.0)
    factory = factory.settled(outcome.plan)
    trial, recorded = trial_of(spec, factory.problem, outcome.plan, asked, settings.seed)
    runs = asked.of_runs
    if asked.rehearse:
        # A trace has just so many pieces; seeds there are without end.
        rules = RehearsalRules(runs=runs, verdict_runs=runs if recorded else 2 * runs)
        known = [(plain, outcome)]
        return rehearse(factory, planner, settings, trial, rules, factory.said, far=far, known=known)
    began_s = time.process_time()
    short = replace(settings, time_limit_s=min(settings.time_limit_s, SHORT_PLAN_S))
    more = margined(factory, outcome, planner, short, 1.0 if asked.cv is None else asked.cv)
    known = [(more.factors, more.outcome), (plain, outcome)]
    rules = RehearsalRules(runs=runs, most_rounds=SHORT_ROUNDS, first=True)
    return rehearse(
        factory,
        planner,
        short,
        trial,
        rules,
        lambda what: factory.said(f"rehearsing, {what}"),
        lambda: time.process_time() - began_s > SHORT_S,
        far,
        known,
        _plainer(factory.problem, more.outcome, settings),
    )


def _plainer(
    problem: PlanningProblem, made: PlanOutcome, settings: SolveSettings
) -> Callable[[TemplateFactory, SolveSettings], PlanOutcome] | None:
    """Single nodes alone; None where more is asked than they know of. Their gap is to `made`, a plan of all kinds."""
    from potluck.plan.strategies.programs import single_nodes

    other = made.plan.strategy != "auto" or settings.running is not None or bool(settings.pins)
    if other or any(ask.origins for ask in problem.asks):
        return None
    least = made.plan.cost_usd_per_h * (1 - made.plan.gap)

    def planned(factory: TemplateFactory, settings: SolveSettings) -> PlanOutcome:
        plan_outcome = single_nodes(factory, settings)
        cost = plan_outcome.plan.cost_usd_per_h
        gap = max(plan_outcome.plan.gap, 1 - least / cost if cost > 0 else 0.0)
        return replace(plan_outcome, plan=replace(plan_outcome.plan, gap=gap))

    return planned


def planner_of(strategy: str, averages: bool) -> Callable[[TemplateFactory, SolveSettings], PlanOutcome]:
    """A strategy for commands that rehearse nothing: with margins, unless averages are asked for."""
    from potluck.rehearse.queueing_margins import with_margins

    planner = strategy_of(strategy)
    return planner if averages else with_margins(planner)


def untried_basis(averages: bool) -> str:
    """Where what plans of these commands promise comes from."""
    return "on averages, not rehearsed" if averages else "with queueing margins, not rehearsed"


def asked_of(options: Mapping[str, Any]) -> RehearsalOptions:
    asked = RehearsalOptions(**options)
    if asked.cv is not None and not asked.cv >= 0:
        raise InputError("--cv", f"must not be negative, is {asked.cv:g}")
    if asked.averages:
        given = {"--rehearse": asked.rehearse, "--cv": asked.cv, "--requests": asked.requests}
        for name, value in (given | {"--runs": asked.runs}).items():
            if value not in (None, False):
                raise InputError(name, "is for a rehearsal; leave --averages out")
    return asked


def tried(
    trial: TrialSetup, plan: Plan, runs: int, said: Said, far: Far = lambda done, total: None
) -> tuple[Evidence, ...]:
    from potluck.rehearse.evidence import evidence_of

    return evidence_of(trial, plan, range(runs), lambda what: said(f"rehearsing, {what}"), far)


def tried_briefly(spec: Spec, problem: PlanningProblem, plan: Plan, said: Said) -> tuple[Tried, ...]:
    """The same in a few runs; nothing where nothing is asked of the fleet."""
    if not any(model.traffic.rate_per_s > 0 for model in spec.models):
        return ()
    trial, _ = trial_of(spec, problem, plan, RehearsalOptions())
    return tuple(evidence.told() for evidence in tried(trial, plan, SHORT_RUNS, said))


def estimate_of(
    spec: Spec, problem: PlanningProblem, asked: RehearsalOptions, seed: int = 0
) -> Estimate | None:
    """What tries pairs of a pool's replicas under `--attainment simulated`; None: the closed form does."""
    if asked.attainment == "closed":
        return None
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.values.plan import Plan
    from potluck.plan.strategies.pool_strategy import require_pool
    from potluck.rehearse.evidence import PairTrial

    try:
        ask = require_pool(problem)
    except InputError as error:
        raise InputError("--attainment", f"simulated is for groups of a pool: {error.problem}") from error
    world = scene_of(SimulationInputs(spec, problem, Plan("none", (), (), (), (), (), (), 0.0, 0.0)))
    return PairTrial(problem, world, spec.model(ask.name).traffic, spec.policy, seed=seed)


def trial_of(
    spec: Spec, problem: PlanningProblem, plan: Plan, asked: RehearsalOptions, seed: int = 0
) -> tuple[TrialSetup, bool]:
    """How plans of a spec are tried, and whether with recorded requests."""
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.rehearse.evidence import TrialSetup
    from potluck.sim.sim_settings import SimSettings as Running

    world = scene_of(SimulationInputs(spec, problem, plan))
    source, recorded = _source(spec, asked, seed)
    if left_out := _left_out(problem):
        world = replace(world, mean_tokens={**world.mean_tokens, **_means(problem, left_out)})
        whole = source
        source = lambda run: _without(whole(run), left_out)  # noqa: E731
    return TrialSetup(world, source, spec.policy, Running(), proven=asked.rehearse), recorded


def _source(spec: Spec, asked: RehearsalOptions, seed: int) -> tuple[Source, bool]:
    """The spec's own traces where it has some with times; everything else is made up. And whether it has."""
    from potluck.cli.common.workloads import WorkloadOptions as Wanted
    from potluck.cli.common.workloads import of_trace
    from potluck.rehearse.request_sources import few, made_up, recorded, short_of
    from potluck.spec.traces import load_trace

    traffic = [model.traffic for model in spec.models if model.traffic.rate_per_s > 0]
    promised = {model.name: model.slo.attainment for model in spec.models}
    count = asked.requests or (None if asked.rehearse else few(traffic, promised))
    traces = {}
    for model in spec.models:
        trace = None if model.trace is None else load_trace(model.trace, blocks=True)
        if trace is not None and trace.span_s > 0 and asked.cv is None and model.traffic.rate_per_s > 0:
            traces[model.name] = of_trace(trace, model.name, Wanted())
    # A short rehearsal does with made-up arrivals where a trace has too few: in a few requests nothing is seen.
    pieces = 2 * asked.of_runs
    if traces and (
        asked.rehearse or all(len(made) >= pieces * short_of(promised[name]) for name, made in traces.items())
    ):
        return recorded(traces, traffic, asked.of_runs, most=count), True
    made = made_up(traffic, 1.0 if asked.cv is None else asked.cv, count)
    return (lambda run: made(run + SEED_STRIDE * seed)), False


def _left_out(problem: PlanningProblem) -> dict[str, list[tuple[int, bool]]]:
    """(longest prompt, whether nothing serves it) of the buckets of models of which the plan leaves some out."""
    return {
        ask.name: [(demand.longest_tokens, demand.rate_per_s <= 0) for demand in ask.demands]
        for ask in problem.asks
        if any(demand.rate_per_s <= 0 for demand in ask.demands)
    }


def _means(problem: PlanningProblem, names: Collection[str]) -> dict[str, tuple[float, float]]:
    means = {}
    for ask in problem.asks:
        if ask.name in names and ask.rate_per_s > 0:
            prompts = sum(demand.rate_per_s * demand.input_tokens for demand in ask.demands)
            answers = sum(demand.rate_per_s * demand.output_tokens for demand in ask.demands)
            means[ask.name] = (prompts / ask.rate_per_s, answers / ask.rate_per_s)
    return means


def _without(load: Workload, left_out: Mapping[str, Sequence[tuple[int, bool]]]) -> Workload:
    import numpy as np

    kept = np.ones(len(load), bool)
    for place, name in enumerate(load.models):
        if name in left_out:
            edges, gone = zip(*left_out[name], strict=True)
            bucket = np.minimum(np.searchsorted(edges, load.prompt_tokens), len(edges) - 1)
            kept &= (load.model != place) | ~np.array(gone)[bucket]
    return load.take(np.flatnonzero(kept))


def basis_of(rehearsal: Rehearsal | None) -> str:
    """For which demand a plan was made: proofs are about that."""
    factors = {} if rehearsal is None else rehearsal.best.factors
    more = [f"{name} x {factor:.3g}" for name, factor in factors.items() if abs(factor - 1) > 1e-3]
    return f"for demand with headroom ({', '.join(more)})" if more else "on averages"


def show_rehearsal(rehearsal: Rehearsal | None, asked: RehearsalOptions, plan: Plan) -> None:
    """Every round where there were several, and what came of it."""
    if rehearsal is None and not plan.deployments:
        return
    if rehearsal is None:
        short = "" if plan.fraction >= 1 or asked.averages else ", as it serves a part of the demand"
        paragraph(f"on averages: what is expected was not rehearsed in simulation{short}.")
        return
    if len(rehearsal.steps) > 1:
        _show_rounds(rehearsal)
    best, first = rehearsal.best, rehearsal.first
    for item in best.evidence:
        paragraph(f"{evidence_line(item.told(best.fresh, asked.cv))}.")
    wrong = dict.fromkeys(line for entry in best.evidence for line in entry.disagreed)
    for line in list(wrong)[:MOST_LINES]:
        paragraph(f"Not as planned: {line}.")
    if rehearsal.chosen is None:
        dearest = max(step.cost_usd_per_h for step in rehearsal.steps)
        more = f" up to {usd(dearest)}/h" if dearest > best.cost_usd_per_h * 1.005 else ""
        paragraph(
            f"Warning: no plan{more} held in simulation: {rehearsal.reason}. This is the cheapest of those that came "
            "closest."
        )
    elif len(rehearsal.steps) > 1:
        change = best.cost_usd_per_h - first.cost_usd_per_h
        was = f"{usd(abs(change))}/h {'more' if change > 0 else 'less'} than"
        if abs(change) < 0.005:
            was = "as much as"
        missed = any(entry.told().verdict == "misses" for entry in first.evidence)
        kept = "held" if first.holds else "missed" if missed else "was not sure to hold"
        paragraph(f"The plan {rehearsal.reason}: {was} the first plan, which {kept} with the same requests.")
    click.echo()


def _show_rounds(rehearsal: Rehearsal) -> None:
    rows = []
    for step in rehearsal.steps:
        runs = max((len(entry.attained) for entry in step.evidence), default=0)
        message = (f"{step.number}", f"{runs} fresh" if step.fresh else f"{runs}", usd(step.cost_usd_per_h))
        for item in step.evidence:
            promised = item.promised
            verdict = f"{KEPT[item.told().verdict]} {percent(promised)}"
            refused = "" if item.answers else ", refuses"
            shares = (percent(item.mean, promised), percent(item.lower, promised))
            cells = (f"x {step.factors[item.model]:.3g}", *shares, f"{verdict}{refused}")
            rows.append((*message, item.model, *cells))
            message = ("", "", "")
    columns = ("round", "runs", "USD/h", "model", "headroom", "attained", "at least", "objective")
    table("Rehearsal", columns, rows)


def rehearsal_json(rehearsal: Rehearsal | None) -> dict[str, object]:
    """For `--json`; nothing without a rehearsal."""
    if rehearsal is None:
        return {}
    steps = [
        {
            "round": step.number,
            **{name: getattr(step, name) for name in ("fresh", "cost_usd_per_h", "factors", "holds")},
            "models": [
                {
                    **{name: getattr(item, name) for name in EVIDENCE},
                    "attained": item.mean,
                    "at_least": item.lower,
                    "answered": sum(item.answered) / max(1, len(item.answered)),
                    "runs": len(item.attained),
                    "disagreed": list(item.disagreed),
                }
                for item in step.evidence
            ],
        }
        for step in rehearsal.steps
    ]
    return {"rehearsal": {"holds": rehearsal.chosen is not None, "reason": rehearsal.reason, "steps": steps}}
